"""What Python compiles ordinary epilogues to is known, whatever its version."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import gemmsmith
from gemmsmith.graph.frontend.purity import find_reads, is_listed_as_constant

FACTOR = 2.0


def loops(acc: Any, scale: Any, *rest: Any, k: float = 3, **more: Any) -> Any:
    x = acc * scale + k
    for r in rest:
        x = x + r
    for i in range(4):
        if (i % 2 == 0 and i > 1) or not k:
            continue
        x += i
        x = -x if i else +x
    y = [a * FACTOR for a in (x, x)]
    z = {n: y[i] for i, n in enumerate(("out", "out1"))}
    a, (b, *_) = x, y
    while k < 0:
        k += 1
    if scale is None:
        return x
    if scale is not None:
        x = x**2
    return {"a": a.square().sum(-1), **z, "b": b, **more}


def functions(acc: Any) -> Any:
    s = 2.0

    def g(x: Any) -> Any:
        return x * s

    def h(x: Any, q: float = s) -> Any:
        return g(x) + q

    args, kw = (acc,), {"q": 3}
    return h(*args, **kw), (lambda *a: a)(*args, *args), 1 < s < 3


def refusals(acc: Any) -> Any:
    if acc:
        raise ValueError("no")
    x, y = acc.max(-1)
    x, y = y, x
    return x, y, not acc, acc in (1, 2), [*x, *y], acc[1:2]


def counts(acc: Any) -> Any:
    global FACTOR
    FACTOR += 1
    return acc


def guarded(acc: Any) -> Any:
    try:
        return acc.relu()
    except AttributeError:
        return acc


def test_what_code_reads() -> None:
    assert find_reads(loops.__code__) == (("FACTOR", "enumerate", "range"), "")
    assert find_reads(functions.__code__) == ((), "")
    assert find_reads(refusals.__code__) == (("ValueError",), "")
    assert "STORE_GLOBAL" in find_reads(counts.__code__).unknown_read
    assert find_reads(guarded.__code__).unknown_read
    assert find_reads((lambda acc: acc.relu().__class__).__code__).unknown_read == "it reads the attribute __class__"
    assert find_reads((lambda acc: (lambda: acc.data)()).__code__).unknown_read == "it reads the attribute data"


def ours(acc: Any) -> Any:
    gate, up = gemmsmith.deinterleave(acc)
    return gemmsmith.quantize(gemmsmith.interleave(gate.silu(), up)), gemmsmith.top_k_softmax(acc, 2)


def test_what_is_known() -> None:
    assert find_reads(ours.__code__) == (("gemmsmith",), "")
    for x in (np, math, np.exp, np.clip, np.float32, math.exp, abs, float, len, gemmsmith, gemmsmith.quantize):
        assert is_listed_as_constant(x), x
    for y in (np.random, np.random.rand, np.random.power, print, open, vars, globals, type, id, np.ndarray, pytest):
        assert not is_listed_as_constant(y), y


@pytest.mark.torch
def test_what_is_known_of_torch() -> None:
    torch = pytest.importorskip("torch")
    for x in (torch, torch.relu, torch.nn.functional, torch.nn.functional.silu, torch.bfloat16):
        assert is_listed_as_constant(x), x
    for y in (torch.rand, torch.is_grad_enabled, torch.tensor, torch.get_default_dtype, torch.nn.init):
        assert not is_listed_as_constant(y), y
