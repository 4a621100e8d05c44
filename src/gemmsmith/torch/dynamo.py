"""Marks on functions for Dynamo, the tracer of torch.compile, without its import: that takes seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

F = TypeVar("F", bound=Callable[..., Any])

if torch.__version__ < (2, 13) and torch._dynamo.config.skip_guards_on_constant_func_defaults:  # by default
    # Without these guards compiled code would ignore changed default arguments.
    torch._dynamo.config.skip_guards_on_constant_func_defaults = False


def assume_constant_result(function: F) -> F:
    """Mark a function that Dynamo calls instead of tracing it, and whose result is a constant in compiled code.

    It does the same as torch.compiler.assume_constant_result.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def skip_code(function: F) -> F:
    """Mark a function that Dynamo does not compile by itself, but traces where code that it compiles calls it."""
    strategy = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT)
    set_code_exec_strategy(function.__code__, strategy)
    return function
