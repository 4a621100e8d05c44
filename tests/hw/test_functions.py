"""The functions of `hw`: what help() and type checkers see of them."""

from __future__ import annotations

import inspect

import pytest

from gemmsmith import hw

FUNCTIONS = [name for name, x in vars(hw).items() if inspect.isfunction(x) and x.__module__.startswith("gemmsmith.hw")]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_have_a_docstring_and_no_generic_parameters(name: str) -> None:
    function = getattr(hw, name)
    assert inspect.getdoc(function)
    kinds = {p.kind for p in inspect.signature(function).parameters.values()}
    assert kinds <= {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}


def test_a_function_has_the_parameters_of_its_class() -> None:
    signature = inspect.signature(hw.mbarrier_wait)
    assert list(signature.parameters) == list(inspect.signature(hw.mbarrier.MbarrierWait).parameters)
    assert inspect.signature(hw.cluster_rank).return_annotation == "Value"
    assert signature.return_annotation is None
