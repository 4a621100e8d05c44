"""From arrays to problems: torch.matmul's rules, the same memory whatever the layout, and one clear error each."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import gemmsmith
from gemmsmith.arrays import ArrayInfo, Spec, as_numpy, describe
from gemmsmith.binding import graphs as binding_graphs
from gemmsmith.binding.bind import bind
from gemmsmith.binding.binding import Binding
from gemmsmith.binding.matrices import orient_problem
from gemmsmith.binding.request import Request
from gemmsmith.core.dtypes import BF16, FP16, FP32
from gemmsmith.core.errors import ArgumentError, ConfigError
from gemmsmith.core.graph import BroadcastDims, identity_graph
from gemmsmith.core.grouping import Grouping
from gemmsmith.core.problem import Matrix, Problem

bf16 = ml_dtypes.bfloat16


def memory(x: Matrix, address: int) -> np.ndarray:
    """The matrix's elements (batch, rows, cols), as it addresses them."""
    shape, strides = (x.batch, x.rows, x.cols), (x.batch_stride, x.row_stride, x.col_stride)
    return as_numpy(ArrayInfo(x.dtype, shape, strides, address, "cpu", 0, True))


def problem_of(a: Any, b: Any, out: Any = None) -> Problem:
    return bind(Request(a, b, out)).problem


def carry_out(f: Binding, a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """Executes the problem on the arrays' memory."""
    left, right = (b, a) if f.swapped else (a, b)
    p = f.problem
    result = memory(p.a, left.ctypes.data).astype(float) @ memory(p.b, right.ctypes.data).astype(float)
    memory(p.d, out.ctypes.data)[...] = result


@st.composite
def laid_out(draw: st.DrawFn, shape: tuple[int, ...], dtype: Any, overlapping: bool) -> np.ndarray:
    """Small integers of that shape: any order of dimensions, gaps of rows and elements, an offset, broadcasts."""
    order = draw(st.permutations(range(len(shape))))
    gaps = [draw(st.sampled_from([0, 0, 0, 1, 3])) for _ in shape]
    whole = np.zeros([shape[i] + g for i, g in zip(order, gaps, strict=True)], dtype)
    x = whole[tuple(slice(g // 2, g // 2 + shape[i]) for i, g in zip(order, gaps, strict=True))]
    x = x.transpose(np.argsort(order))
    if draw(st.sampled_from([False, False, True])):
        x = np.zeros([*x.shape[:-1], 2 * x.shape[-1]], dtype)[..., ::2]
    x[...] = np.random.default_rng(draw(st.integers(0, 99))).integers(-3, 4, x.shape)
    if overlapping and x.size and draw(st.sampled_from([False, False, True])):
        x = np.broadcast_to(x[:1].copy(), x.shape)
    return x


extent = st.sampled_from([0, 1, 1, 2, 3, 5, 8])


@given(st.data(), extent, extent, extent, extent, st.sampled_from([1, 2, 3]), st.sampled_from([1, 2, 3]))
def test_any_layout_is_the_same_product(
    data: st.DataObject, m: int, n: int, k: int, batch: int, a_kind: int, b_kind: int
) -> None:
    """1: no batch, 2: a batch of 1, 3: the batch."""
    a_shape, b_shape = ({1: s, 2: (1, *s), 3: (batch, *s)}[kind] for s, kind in (((m, k), a_kind), ((k, n), b_kind)))
    a, b = (data.draw(laid_out(shape, np.float16, True)) for shape in (a_shape, b_shape))
    want = a.astype(float) @ b.astype(float)
    out = data.draw(laid_out(want.shape, np.float32, False))
    out[...] = np.nan

    f = bind(Request(a, b, out))
    carry_out(f, a, b, out)
    assert np.array_equal(out, want)
    assert f.shape == want.shape
    p = f.problem
    assert p.a.cols == p.b.rows == k
    assert p.a.batch == p.b.batch == p.d.batch == p.batch
    assert (p.d.rows, p.d.cols) == (p.m, p.n)
    assert all(x == x.canonical() for x in (p.a, p.b, p.d))
    if 1 in (s for s, e in zip(describe(out).strides[-2:], out.shape[-2:], strict=True) if e > 1):
        assert p.d.col_stride == 1


@pytest.mark.parametrize(
    ("a", "b", "shape", "mnk", "batch"),
    [
        ((4, 8), (8, 5), (4, 5), (4, 5, 8), 1),
        ((3, 4, 8), (3, 8, 5), (3, 4, 5), (4, 5, 8), 3),
        ((1, 4, 8), (3, 8, 5), (3, 4, 5), (4, 5, 8), 3),
        ((4, 8), (3, 8, 5), (3, 4, 5), (4, 5, 8), 3),
        ((3, 4, 8), (8, 5), (3, 4, 5), (12, 5, 8), 1),  # folded
        ((3, 4, 8), (1, 8, 5), (3, 4, 5), (12, 5, 8), 1),
        ((1, 4, 8), (1, 8, 5), (1, 4, 5), (4, 5, 8), 1),
        ((1, 4, 8), (8, 5), (1, 4, 5), (4, 5, 8), 1),
        ((0, 4, 8), (8, 5), (0, 4, 5), (4, 5, 8), 0),
        ((4, 0), (0, 5), (4, 5), (4, 5, 0), 1),
        ((0, 8), (8, 0), (0, 0), (0, 0, 8), 1),
    ],
)
def test_shapes_are_torchs(
    a: tuple[int, ...], b: tuple[int, ...], shape: tuple[int, ...], mnk: tuple[int, int, int], batch: int
) -> None:
    f = bind(Request(Spec(a, "bf16"), Spec(b, "bf16")))
    assert f.shape == shape
    assert (f.problem.m, f.problem.n, f.problem.k) == mnk
    assert f.problem.batch == batch


@pytest.mark.torch
def test_agrees_with_torch_matmul() -> None:
    torch = pytest.importorskip("torch")
    for a_shape in [(2, 3), (1, 2, 3), (4, 2, 3), (0, 2, 3), (2, 0), (3,), (2, 4), (4, 2, 5)]:
        for b_shape in [(3, 5), (1, 3, 5), (4, 3, 5), (0, 3, 5), (0, 5), (3,)]:
            a, b = torch.zeros(a_shape, dtype=torch.bfloat16), torch.zeros(b_shape, dtype=torch.bfloat16)
            try:
                want = tuple(torch.matmul(a, b).shape) if a.dim() > 1 < b.dim() else None
            except RuntimeError:
                want = None
            if want is None:
                with pytest.raises(ArgumentError, match=r"^[ab]: got shape|^b: got a batch"):
                    bind(Request(a, b))
            else:
                assert bind(Request(a, b)).shape == want


def test_column_major_out_is_transposed() -> None:
    a, b = np.ones((4, 8), np.float16), np.ones((8, 5), np.float16)
    assert not bind(Request(a, b, np.empty((4, 5), np.float16))).swapped
    f = bind(Request(a, b, np.empty((5, 4), np.float16).T))
    assert f.swapped
    assert (f.problem.m, f.problem.n, f.shape) == (5, 4, (4, 5))
    assert f.problem.d == Matrix(FP16, 5, 4, 4, 1)
    assert f.problem.a == describe_matrix(b).T
    strided = np.empty((4, 10), np.float16)[:, ::2]
    assert not bind(Request(a, b, strided)).swapped


def describe_matrix(x: np.ndarray) -> Matrix:
    info = describe(x)
    return Matrix(info.dtype, *info.shape, *info.strides, alignment=info.alignment)


def test_a_batch_that_does_not_continue_the_rows_stays_a_batch() -> None:
    b = Spec((8, 5), "bf16")
    apart = Spec((3, 4, 8), "bf16", (40, 8, 1))
    assert problem_of(apart, b).batch == 3
    assert problem_of(Spec((3, 4, 8), "bf16", (0, 8, 1)), b).batch == 3
    assert problem_of(Spec((3, 4, 8), "bf16", (32, 8, 1)), b, Spec((3, 4, 5), "bf16", (32, 8, 1))).m == 12
    assert problem_of(Spec((3, 4, 8), "bf16", (32, 8, 1)), b, Spec((3, 4, 5), "bf16", (40, 8, 1))).batch == 3
    big = problem_of(Spec((2**20, 2**12, 8), "bf16"), b)
    assert (big.m, big.batch) == (2**12, 2**20)


def test_one_row_a_batch_folds_whatever_its_row_stride() -> None:
    f = bind(Request(Spec((3, 1, 8), "bf16", (16, 999, 1)), Spec((8, 5), "bf16")))
    assert f.problem.a == Matrix(BF16, 3, 8, 16, 1)


def test_a_column_major_batched_out_folds_on_the_other_side() -> None:
    """out[b] = A @ B[b], stored by columns: one problem with the batch in its rows."""
    f = bind(Request(Spec((4, 8), "fp16"), Spec((3, 8, 5), "fp16", (40, 1, 8)), Spec((3, 4, 5), "fp16", (20, 1, 4))))
    assert f.swapped
    assert (f.problem.m, f.problem.n, f.problem.batch) == (15, 4, 1)


def test_alignment_comes_from_the_address() -> None:
    whole = np.zeros(100, np.float16)
    whole = whole[-whole.ctypes.data % 16 // 2 :]
    p = problem_of(whole[4:36].reshape(4, 8), whole[33:73].reshape(8, 5))
    assert (p.a.alignment, p.b.alignment, p.d.alignment) == (8, 2, 16)


# -- dtypes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operand", "options", "output", "accumulate"),
    [
        ("bf16", {}, BF16, FP32),
        ("fp16", {}, FP16, FP32),
        ("fp16", {"accumulate": "fp16"}, FP16, FP16),
        ("fp16", {"accumulate": np.float16, "out_dtype": "fp32"}, FP32, FP16),
        ("bf16", {"out_dtype": np.float32}, FP32, FP32),
        ("bf16", {"out_dtype": "fp16"}, FP16, FP32),
        ("bf16", {"out": Spec((4, 5), "fp32")}, FP32, FP32),
        ("bf16", {"out": Spec((4, 5), "fp32"), "out_dtype": "fp32"}, FP32, FP32),
    ],
)
def test_dtypes(operand: str, options: dict[str, Any], output: Any, accumulate: Any) -> None:
    f = bind(Request(Spec((4, 8), operand), Spec((8, 5), operand), **options))
    assert f.out_dtype is f.problem.d.dtype is output
    assert f.problem.accumulator_dtype is accumulate


# -- errors --------------------------------------------------------------------------------------------------------

A, B = Spec((4, 8), "bf16"), Spec((8, 5), "bf16")
CUDA = ArrayInfo(BF16, (8, 5), (5, 1), 0x1000, "cuda", 0, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        # shapes
        ((A, Spec((7, 5), "bf16")), r"b: got shape \(7, 5\), whose k is 7, with a .*\(4, 8\), whose k is 8; use"),
        ((Spec((8,), "bf16"), B), r"a: got shape \(8,\); use \(m, k\) or \(batch, m, k\); a vector needs"),
        ((A, Spec((8,), "bf16")), r"b: got shape \(8,\); use \(k, n\)"),
        ((Spec((), "bf16"), B), r"a: got shape \(\); use \(m, k\)"),
        ((A, Spec((1, 1, 8, 5), "bf16")), r"b: got shape \(1, 1, 8, 5\); use"),
        (
            (Spec((2, 4, 8), "bf16"), Spec((3, 8, 5), "bf16")),
            "b: got a batch of 3 with a's .* 2; use the same, or 1",
        ),
        ((Spec((0, 4, 8), "bf16"), Spec((3, 8, 5), "bf16")), "b: got a batch of 3 with a's batch of 0"),
        ((Spec((2**31, 8), "bf16"), B), r"a: got shape \(2147483648, 8\); use extents of at most 2147"),
        ((A, Spec((8, 2**31), "bf16")), "b: got shape .*; use extents of at most"),
        ((Spec((2**31, 4, 8), "bf16"), B), "a: got shape .*; use extents of at most"),
        (
            (Spec((2**30, 2**30, 2**30), "bf16"), Spec((2**30, 1), "bf16")),
            r"a: got shape .* use less than 2\^63 bytes",
        ),
        # dtypes
        ((A, Spec((8, 5), "fp16")), "b: got dtype fp16 with a of bf16; use the same for both"),
        ((A, B, None, None, "fp16"), "accumulate: got 'fp16' for operands of bf16; use fp32"),
        ((A, B, None, None, "bf16"), "accumulate: got 'bf16' for operands of bf16; use fp32"),
        ((A, B, None, None, "fp64"), "accumulate: got 'fp64'"),
        ((A, B, None, "int8"), "out_dtype: got 'int8'; use one of bf16, fp16, fp32"),
        ((A, B, None, None, "fp8"), "accumulate: got 'fp8' for operands of bf16; use fp32"),
        ((A, B, Spec((4, 5), "fp16"), "fp32"), "out: got dtype fp16 with out_dtype fp32"),
        (("A", B), "a: got builtins.str; use a torch tensor"),
        # memory
        ((Spec((4, 8), "bf16", (-8, 1)), B), r"a: got strides \(-8, 1\); use strides >= 0, for instance a copy"),
        ((np.zeros((4, 8), bf16), CUDA), "a, b: got a on cpu, b on cuda:0; use arrays of one device"),
        ((CUDA._replace(shape=(4, 8), device_index=1), CUDA), "got a on cuda:1, b on cuda:0"),
        ((CUDA._replace(shape=(4, 8)), CUDA, np.zeros((4, 5), bf16)), "a, b, out: got .* out on cpu"),
        ((A, CUDA._replace(address=0x1001)), "b: got address 0x1001; use a multiple of the element's 2 bytes"),
        # out
        ((A, B, Spec((5, 4), "bf16")), r"out: got shape \(5, 4\); use \(4, 5\)"),
        ((A, B, Spec((1, 4, 5), "bf16")), r"out: got shape \(1, 4, 5\); use \(4, 5\)"),
        (
            (A, B, Spec((4, 5), "bf16", (0, 1))),
            r"out: got strides \(0, 1\) for shape \(4, 5\), which may overlap itself",
        ),
        ((A, B, Spec((4, 5), "bf16", (4, 1))), r"out: got strides \(4, 1\)"),
        ((A, B, Spec((4, 5), "bf16", (1, 1))), r"out: got strides \(1, 1\)"),
        ((A, B, Spec((4, 5), "bf16", (-5, 1))), r"out: got strides \(-5, 1\); use strides >= 0"),
    ],
)  # fmt: skip
def test_bad_arguments(arguments: tuple[Any, ...], message: str) -> None:
    a, b, *rest = arguments
    options = dict(zip(("out", "out_dtype", "accumulate"), rest, strict=False))
    with pytest.raises(ArgumentError, match=message):
        bind(Request(a, b, **options))


def test_out_must_be_writable_and_of_its_own() -> None:
    whole = np.zeros((40, 40), bf16)
    a, b, out = whole[:4, :8], whole[10:18, :5], whole[:4, 8:13]
    assert bind(Request(a, b, out)).problem.d.row_stride == 40  # beside a, in a's rows, but sharing nothing
    for bad, name in [(whole[:4, 7:12], "a"), (whole[17:21, 4:9], "b")]:
        with pytest.raises(ArgumentError, match=f"out: overlaps {name}; pass a separate array"):
            bind(Request(a, b, bad))
    out.flags.writeable = False
    with pytest.raises(ArgumentError, match="out: got a read-only array"):
        bind(Request(a, b, out))
    bind(Request(a[:0], b, whole[:0, :5]))
    square = np.zeros((4, 4), bf16)
    with pytest.raises(ArgumentError, match="out: overlaps a"):
        bind(Request(square, np.zeros((4, 4), bf16), square))


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 12)), min_size=3, max_size=3))
def test_no_out_with_an_element_twice_gets_through(dimensions: list[tuple[int, int]]) -> None:
    shape, strides = (tuple(x) for x in zip(*dimensions, strict=True))
    batch, m, n = shape
    assume(batch != 1)
    operands = Spec((batch, m, 3), "bf16"), Spec((batch, 3, n), "bf16")
    offsets = sum(i * s for i, s in zip(np.indices(shape), strides, strict=True))
    try:
        bind(Request(*operands, Spec(shape, "bf16", strides)))
    except ArgumentError:
        assert 0 not in shape
    else:
        assert len(np.unique(offsets)) == np.prod(shape)


# -- epilogues -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shapes", [((4, 8), (8, 6)), ((3, 4, 8), (8, 6)), ((1, 8), (8, 1)), ((0, 8), (8, 6))])
@pytest.mark.parametrize("column_major", [False, True])
def test_the_bare_product_is_the_graph_with_one_node(shapes: Any, column_major: bool) -> None:
    a, b = (Spec(shape, "bf16") for shape in shapes)
    shape = bind(Request(a, b)).shape
    out = Spec(shape, "fp32", (*([shape[-1] * shape[-2]] * (len(shape) - 2)), 1, shape[-2]) if column_major else None)
    product = bind(Request(a, b, out))
    for epilogue in (lambda acc: acc, identity_graph(FP32)):
        same = bind(Request(a, b, out, epilogue=epilogue, out_dtype="fp32"))
        assert same.graph == product.graph == identity_graph(FP32)
        assert (same.problem, same.spec, same.swapped) == (product.problem, product.spec, product.swapped)
        assert (same.arrays, same.arguments) == (product.arrays, product.arguments)


def test_options_without_a_function_change_no_kernel() -> None:
    assert bind(Request(A, B, fast_math=False, deterministic=False)).spec == bind(Request(A, B)).spec
    fused = bind(Request(A, B, epilogue=lambda acc: acc.exp(), fast_math=False)).spec
    assert not fused.fast_math


@given(
    st.tuples(*[st.sampled_from([0, 1, 2, 5, 8, 16])] * 3),
    st.tuples(*[st.booleans()] * 3),
    st.booleans(),
    st.booleans(),
)
def test_the_transpose_is_that_of_the_arrays(
    sizes: tuple[int, int, int], column_major: tuple[bool, bool, bool], fused: bool, fp8: bool
) -> None:
    m, n, k = sizes
    shapes = (m, k), (k, n), (m, n)
    dtypes = ("fp8_e4m3", "fp8_e4m3", "bf16") if fp8 else ("bf16",) * 3
    a, b, out = (
        Spec(shape, dtype, (1, shape[0] + 3) if is_column_major else (shape[1] + 8, 1))
        for shape, dtype, is_column_major in zip(shapes, dtypes, column_major, strict=True)
    )
    operands = {"bias": Spec((n,), "fp32"), "c": Spec((m, n), "fp16")} if fused else {}
    bound = bind(Request(a, b, out, operands, (lambda acc, bias, c: acc + bias + c) if fused else None))
    found = bound.transposed()
    wanted = orient_problem(
        bound.spec.with_graph(bound.graph), bound.arguments, bound.shape, bound.out_dtype, bound.multiplication,
        bound.scale_granularity, bound.product, bound.grouping, bound.problem.groups, swapped=not bound.swapped,
    )  # fmt: skip
    assert (found.problem, found.swapped, found.spec, found.arrays) == wanted


def scaled_by_x(acc: Any, x: Any) -> Any:
    return acc * x


def test_requests_are_equal_if_one_plan_serves_them() -> None:
    """They may differ in addresses and in numbers, but in nothing else."""

    def made() -> Request:
        a, b = np.ones((16, 32), np.float16), np.ones((32, 8), np.float16)
        return Request(a, b, operands={"x": float(a.ctypes.data)}, epilogue=scaled_by_x)

    one, other = made(), made()
    assert one == other
    assert hash(one) == hash(other)
    for different in (
        {"a": np.ones((32, 32), np.float16)}, {"b": np.ones((8, 32), np.float16).T}, {"out": {}}, {"operands": {}},
        {"operands": {"x": np.ones(8, np.float32)}}, {"epilogue": None}, {"scale_a": 2.0}, {"scale_b": 2.0},
        {"precision": "tf32"}, {"fast_math": False}, {"grouping": Grouping("sizes")}, {"backend": "sim"},
    ):  # fmt: skip
        assert one != other._replace(**different)


@pytest.mark.parametrize("fused", [False, True])
def test_twice_transposed_is_the_same(fused: bool) -> None:
    arguments: dict[str, Any] = {
        "epilogue": lambda acc, c: (acc + c, acc.sum(-1)),
        "operands": {"c": Spec((5,), "bf16")},
    }
    request = Request(A, B, **(arguments if fused else {}))
    there = bind(request)
    back = there.transposed()
    assert back.swapped
    assert back.problem == there.problem.T
    assert back.transposed() == there
    assert bind(request, back) == back
    assert bind(request, there) == there


def test_a_graph_that_needs_whole_rows_has_no_transpose() -> None:
    there = bind(
        Request(Spec((4, 8), "bf16"), Spec((8, 16), "bf16"), epilogue=lambda acc: gemmsmith.top_k_softmax(acc, 2))
    )
    with pytest.raises(ConfigError, match="swap_ab: got True for an epilogue that needs full rows"):
        there.transposed()


def test_the_transpose_of_halves_pairs_rows() -> None:
    there = bind(
        Request(Spec((4, 8), "bf16"), Spec((8, 32), "bf16"), epilogue=lambda acc: gemmsmith.deinterleave(acc)[0])
    )
    back = there.transposed()
    assert there.graph.broadcast_dims[-1] == BroadcastDims(True, 1, 2)
    assert back.spec.graph.broadcast_dims[-1] == BroadcastDims(True, 2, 1)
    assert back.spec.graph.transposed == there.graph
    with pytest.raises(gemmsmith.EpilogueError, match="epilogue: got a chunk of rows; use one of columns"):
        bind(Request(Spec((32, 8), "bf16"), Spec((8, 4), "bf16"), epilogue=back.spec.graph))


def test_the_kernel_computes_d_of_the_epilogue() -> None:
    """Of its dtype and layout, also where it is not the first result; only results may be written."""
    out = {"y": Spec((4,), "fp32"), "z": Spec((4, 5), "fp32", (1, 4))}
    there = bind(Request(A, B, out, epilogue=lambda acc: {"y": acc.sum(-1), "z": acc.to("fp32")}))
    assert there.swapped
    assert there.problem.d == there.arrays["z"]
    assert (there.problem.d.rows, there.problem.d.dtype) == (5, FP32)
    assert there.out_dtype is BF16
    assert {name for name, x in there.arguments.items() if x.writable} == {"out_y", "out_z"}


def test_results_are_made_at_last(rng: np.random.Generator) -> None:
    a, b = rng.standard_normal((4, 8)).astype(np.float16), rng.standard_normal((8, 5)).astype(np.float16)
    out = np.full((4, 5), np.nan, np.float32)
    there = bind(Request(a, b, out, epilogue=lambda acc: (acc.to("fp32"), acc.sum(-1))))
    assert list(there.unallocated_results) == ["out1"]
    whole = there.allocate_results()
    assert not whole.unallocated_results
    assert whole.value[0] is out
    assert (whole.value[1].shape, whole.value[1].dtype) == ((4,), np.float32)
    assert whole.arguments["out1"].address == whole.value[1].ctypes.data
    assert there.arguments["out1"].address == 0


WHOLE = np.zeros((40, 40), bf16)
HERE = WHOLE[:4, :8], WHOLE[10:18, :5]


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ({"y": WHOLE[:4, 4:9]}, "y: overlaps a; pass a separate array"),
        ({"y": WHOLE[14:18, 4:9]}, "y: overlaps b; pass a separate array"),
        ({"y": np.lib.stride_tricks.as_strided(WHOLE[30:], (4, 5), (0, 2))}, r"y: got strides \(0, 1\) for shape"),
        ({"y": np.zeros((4, 10), bf16)[:, ::-2]}, r"y: got strides \(10, -2\); use strides >= 0"),
        ({"y": CUDA._replace(shape=(4, 5))}, "a, b, y: got a on cpu, b on cpu, y on cuda:0; use arrays of one device"),
        ({"x": np.zeros((4, 5), bf16)}, "out: got arrays for x; the epilogue's results are y"),
        ({"y": np.zeros((4, 5), np.float16)}, "y: got dtype fp16; the epilogue returns bf16"),
    ],
)  # fmt: skip
def test_bad_results_of_an_epilogue(out: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        bind(Request(*HERE, out, epilogue=lambda acc: {"y": acc * 2.0}))


def test_one_array_for_two_results() -> None:
    out = np.zeros((4, 5), bf16)
    with pytest.raises(ArgumentError, match="y: overlaps z; pass a separate array$"):
        bind(Request(*HERE, {"y": out, "z": out}, epilogue=lambda acc: {"y": acc, "z": acc * 2.0}))


@pytest.mark.parametrize("x", [True, np.True_, 3, np.int8(3), 2.5, np.float16(2.5), bf16(2.5), Fraction(5, 2)])
def test_numbers_as_operands(x: Any, rng: np.random.Generator) -> None:
    """Also scalars of numpy and ml_dtypes, such as elements of arrays."""
    a, b = (rng.standard_normal(shape, np.float32) for shape in ((4, 8), (8, 5)))
    product = gemmsmith.gemm(a, b, epilogue=lambda acc, x: acc * x, x=x)
    np.testing.assert_allclose(product, a.astype(float) @ b * float(x), rtol=1e-5, atol=1e-5)
    assert gemmsmith.plan(a, b, epilogue=lambda acc, x: acc * x, x=x).problem


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "x", [np.datetime64("2020"), np.timedelta64(3), np.str_("3"), np.bytes_(b"3"), np.complex64(1), 1j, "1"]
)
def test_what_is_no_number(x: Any) -> None:
    for call in (gemmsmith.gemm, gemmsmith.plan):
        with pytest.raises(ArgumentError, match="x: got .*; use a torch tensor"):
            call(*HERE, epilogue=lambda acc, x: acc * x, x=x)


def test_what_tiles_add_to_is_no_operands_array() -> None:
    """A reduction whose sums are stored in a fixed order may be: its second step follows the GEMM."""
    bias = np.zeros(5, np.float32)
    request = Request(*HERE, {"sums": bias}, {"bias": bias}, lambda acc, bias: {"y": acc + bias, "sums": acc.sum(0)})
    assert bind(request).results["sums"] is bias
    with pytest.raises(ArgumentError, match="sums: overlaps bias; pass a separate array"):
        bind(request._replace(deterministic=False))


def test_a_result_may_be_an_operands_array() -> None:
    c, other = WHOLE[20:24, :5], WHOLE[20:24, 1:6]
    for c_out, good in ((c, True), (other, False)):
        arguments = (*HERE, c_out, {"c": c})
        if good:
            assert bind(Request(*arguments, epilogue=lambda acc, c: acc + c)).results["out"] is c
        else:
            with pytest.raises(ArgumentError, match="out: overlaps c; .*, or exactly c's"):
                bind(Request(*arguments, epilogue=lambda acc, c: acc + c))


def test_a_result_may_have_an_operands_memory_if_it_has_as_many_bits() -> None:
    for dtype, good in ((np.float16, True), (np.float32, False)):
        c = np.zeros((4, 5), dtype)
        out = c.view(bf16)[:, :5]
        request = Request(*HERE, out, {"c": c}, epilogue=lambda acc, c: acc + c)
        if good:
            assert bind(request).results["out"] is out
        else:
            with pytest.raises(ArgumentError, match="out: overlaps c; .*, or exactly c's"):
                bind(request)


def test_an_operand_needs_an_epilogue() -> None:
    a, b = np.zeros((4, 8), bf16), np.zeros((8, 5), bf16)
    plan = gemmsmith.plan(a, b)
    for way in (
        lambda: bind(Request(a, b, None, {"c": a})),
        lambda: plan.run(a, b, c=a),
        lambda: plan.prepare(a, b, c=a),
    ):
        with pytest.raises(ArgumentError, match="c: operands need an `epilogue` that reads them"):
            way()


def test_a_function_is_traced_again_where_rows_may_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[Any] = []
    real = binding_graphs.trace_with_shape_dependence
    monkeypatch.setattr(binding_graphs, "_GRAPH_CACHE", {})
    monkeypatch.setattr(
        binding_graphs, "trace_with_shape_dependence", lambda f, *rest: (traced.append(f.__name__), real(f, *rest))[1]
    )

    def plain(acc: Any, bias: Any) -> Any:
        return acc + bias

    def sized(acc: Any) -> Any:
        return acc / acc.shape[0]

    graphs = []
    for m in (64, 96, 64):
        a, b = Spec((m, 64), "bf16"), Spec((64, 48), "bf16")
        bind(Request(a, b, None, {"bias": Spec((48,), "fp32")}, epilogue=plain))
        graphs.append(bind(Request(a, b, epilogue=sized)).graph)
    assert traced == ["plain", "sized", "sized", "sized"]
    assert graphs[0] == graphs[2] != graphs[1]
    bind(Request(a, b, None, {"bias": Spec((64, 1), "fp32")}, epilogue=plain))  # a column is another operand
    bind(Request(a, Spec((64, 64), "bf16"), None, {"bias": Spec((64,), "fp32")}, epilogue=plain))
    bind(Request(a, b, None, {"bias": Spec((48,), "fp32")}, epilogue=plain, out_dtype="fp32"))
    assert traced[4:] == ["plain"] * 3
