"""Functions that would trace alike have equal fingerprints, others never."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import pytest

import gemmsmith
from gemmsmith.graph.frontend.fingerprint import fingerprint

pytestmark = pytest.mark.filterwarnings("ignore::gemmsmith.RetraceWarning")


class Named(NamedTuple):
    """A tuple that is more than its elements."""

    x: float


def attributed(acc: Any) -> Any:
    return acc * attributed.scale  # type: ignore[attr-defined]


attributed.scale = 2.0  # type: ignore[attr-defined]
SCALE = 2.0
TABLE = [1.0]


def scaled(factor: float, offset: float = 0.0) -> Callable[..., Any]:
    def f(acc: Any, more: float = offset) -> Any:
        return acc * factor + more

    return f


def by_global(acc: Any) -> Any:
    return acc * SCALE


def by_helper(acc: Any) -> Any:
    return by_global(acc) + 1


def recursive(acc: Any) -> Any:
    return recursive(acc) if acc is None else np.maximum(acc, math.pi)


def test_closures_defaults_and_globals(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fingerprint(scaled(2.0)) == fingerprint(scaled(2.0))
    assert fingerprint(scaled(2.0)) != fingerprint(scaled(3.0))
    assert fingerprint(scaled(2.0, 1.0)) != fingerprint(scaled(2.0))
    assert fingerprint(scaled(0.0)) != fingerprint(scaled(-0.0))
    assert fingerprint(scaled(1)) != fingerprint(scaled(1.0))
    before = [fingerprint(f) for f in (by_global, by_helper, recursive)]
    assert None not in before
    assert before == [fingerprint(f) for f in (by_global, by_helper, recursive)]
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    after = [fingerprint(f) for f in (by_global, by_helper, recursive)]
    assert [x == y for x, y in zip(before, after, strict=True)] == [False, False, True]


def test_code_without_globals_gets_more() -> None:
    """A default, an attribute or other code, given to a function that was nothing but its code."""

    def doubled(acc: Any) -> Any:
        return acc * 2

    def tripled(acc: Any) -> Any:
        return acc * 3

    alone, code = fingerprint(doubled), doubled.__code__
    assert alone not in (None, fingerprint(tripled))
    doubled.__defaults__ = (1.0,)
    assert fingerprint(doubled) != alone
    doubled.__defaults__ = None
    assert fingerprint(doubled) == alone
    doubled.__wrapped__ = scaled  # type: ignore[attr-defined]
    assert fingerprint(doubled) != alone
    del doubled.__wrapped__  # type: ignore[attr-defined]
    doubled.__code__ = tripled.__code__
    assert fingerprint(doubled) == fingerprint(tripled)
    doubled.__code__ = code
    assert fingerprint(doubled) == alone


def test_what_may_change_unseen_has_none() -> None:
    class Holder:
        scale = 2.0

    held = Holder()
    functions: list[Any] = [
        lambda acc: acc * held.scale, Holder(), attributed, lambda acc: attributed(acc),
        scaled(Named(1.0)), print,
    ]  # fmt: skip
    assert [fingerprint(f) for f in functions] == [None] * len(functions)
    assert fingerprint(scaled) is not None


def test_numbers_of_every_kind() -> None:
    a, b = np.ones((4, 8), np.float16), np.ones((8, 4), np.float16)
    for alpha in (2, 2.0, np.float32(2), np.int64(2), Fraction(2), True):
        got = gemmsmith.gemm(a, b, epilogue=lambda acc, alpha: acc * alpha, alpha=alpha)
        assert (got == 8 * float(alpha)).all()


def test_gemm_sees_what_changes() -> None:
    a, b = np.ones((4, 8), np.float16), np.ones((8, 4), np.float16)
    for factor in (2.0, 3.0, 2.0):
        assert (gemmsmith.gemm(a, b, epilogue=scaled(factor)) == 8 * factor).all()
    TABLE[0] = 1.0
    assert (gemmsmith.gemm(a, b, epilogue=lambda acc: acc * TABLE[0]) == 8).all()
    TABLE[0] = 5.0
    assert (gemmsmith.gemm(a, b, epilogue=lambda acc: acc * TABLE[0]) == 40).all()


def with_factor(factor: float, acc: Any) -> Any:
    return acc * factor


def test_partials() -> None:
    two, three = functools.partial(with_factor, 2.0), functools.partial(with_factor, 3.0)
    assert fingerprint(two) == fingerprint(functools.partial(with_factor, 2.0)) is not None
    assert fingerprint(two) != fingerprint(three)
    named = functools.partial(scaled(2.0), more=1.0)
    assert fingerprint(named) == fingerprint(functools.partial(scaled(2.0), more=1.0)) is not None
    assert fingerprint(named) != fingerprint(functools.partial(scaled(2.0), more=2.0))
    assert fingerprint(functools.partial(with_factor, np.ones(3))) is None
    two.note = 1  # type: ignore[attr-defined]
    assert fingerprint(two) is None


@pytest.mark.torch
def test_modules() -> None:
    nn = pytest.importorskip("torch").nn

    def made() -> list[Any]:
        return [
            nn.GELU(), nn.GELU(approximate="tanh"), nn.LeakyReLU(0.1), nn.LeakyReLU(0.2), nn.Dropout(), nn.ReLU(),
            nn.Dropout().eval(), nn.Sequential(nn.ReLU(), nn.ELU(1.0)), nn.Sequential(nn.ReLU(), nn.ELU(2.0)),
            functools.partial(nn.ReLU()), functools.partial(nn.ELU()),
        ]  # fmt: skip

    one, other = ([fingerprint(module) for module in made()] for _ in range(2))
    assert None not in one
    assert one == other
    assert len(set(one)) == len(one)

    class Own(nn.Module):
        def forward(self, acc: Any) -> Any:
            return self.helper(acc)

    hooked = nn.ReLU()
    hooked.register_forward_hook(lambda module, args, result: result)
    assert [fingerprint(x) for x in (Own(), hooked, nn.PReLU(), nn.Sequential(Own()))] == [None] * 4
    act = nn.LeakyReLU(0.1)
    before = fingerprint(lambda acc: act(acc))
    assert before is not None


@pytest.mark.torch
def test_gemm_sees_a_module_change() -> None:
    nn = pytest.importorskip("torch").nn
    a, b = np.full((4, 8), -1, np.float16), np.ones((8, 4), np.float16)
    module = nn.LeakyReLU(0.5)
    for slope in (0.5, 0.25, 0.5):
        module.negative_slope = slope
        assert (gemmsmith.gemm(a, b, epilogue=module) == -8 * slope).all()
        assert (gemmsmith.gemm(a, b, epilogue=lambda acc: module(acc)) == -8 * slope).all()
    dropout = nn.Dropout().eval()
    assert (gemmsmith.gemm(a, b, epilogue=dropout) == -8).all()
    with pytest.raises(gemmsmith.EpilogueError, match="pass the mask"):
        gemmsmith.gemm(a, b, epilogue=dropout.train())
    with pytest.raises(gemmsmith.EpilogueError, match="epilogue: got the class GELU; use an instance"):
        gemmsmith.gemm(a, b, epilogue=nn.GELU)
