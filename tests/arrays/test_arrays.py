"""Every library's arrays read the same way."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
import types
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmsmith.arrays import (
    ArrayInfo,
    Spec,
    address_of,
    arrays_overlap,
    as_numpy,
    cache_key_and_address,
    current_stream,
    describe,
    empty_like_kind,
    row_major,
)
from gemmsmith.arrays.torch_tensors import make_torch_adapter
from gemmsmith.core.dtypes import BF16, BOOL, FP16, FP32, INT32, INT64, DType
from gemmsmith.core.errors import ArgumentError

DTYPES = [BF16, FP16, FP32, INT32, INT64, BOOL]


def by_interface(x: np.ndarray, **changes: Any) -> Any:
    """An object of an unknown library that says its memory is on device 3."""

    class DeviceArray:
        owner = x
        dtype = x.dtype
        __cuda_array_interface__ = {**x.__array_interface__, "version": 3, **changes}  # noqa: RUF012

        def __dlpack_device__(self) -> tuple[int, int]:
            return 2, 3

    return DeviceArray()


class ByDlpack:
    """An object with DLPack alone, as of version 1 or before."""

    def __init__(self, x: np.ndarray, versioned: bool) -> None:
        self.x, self.versioned = x, versioned

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __dlpack__(self, **options: Any) -> Any:
        if options and not self.versioned:
            raise TypeError("unexpected keyword max_version")
        return self.x.__dlpack__(**options)


# -- numpy ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_numpy(dtype: DType) -> None:
    x = np.zeros((4, 6), dtype.numpy)
    assert describe(x) == ArrayInfo(dtype, (4, 6), (6, 1), x.ctypes.data, "cpu", 0, True)
    assert describe(x.T).strides == (1, 6)
    assert describe(x[::-1, ::2]).strides == (-6, 2)
    assert describe(x[1:, 1:]).address == x.ctypes.data + 7 * dtype.bytes
    assert describe(np.broadcast_to(x, (3, 4, 6))).strides == (0, 6, 1)
    assert describe(x).itemsize == dtype.bytes
    x.flags.writeable = False
    assert not describe(x).writable


def test_alignment_is_that_of_the_address() -> None:
    x = np.zeros(64, np.float16)
    start = -x.ctypes.data % 16 // 2
    assert [describe(x[start + i :]).alignment for i in range(9)] == [16, 2, 4, 2, 8, 2, 4, 2, 16]


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.zeros((2, 2)), "b: got dtype float64; use fp32, bf16 or fp16, "),
        (np.zeros((2, 2), np.int16), "b: got dtype int16"),
        (np.zeros((2, 2), ">f2"), "b: got dtype >f2; .* native byte order"),
        (np.ma.masked_array(np.zeros((2, 2), np.float16)), r"b: got a masked array; use x.filled"),
        (np.zeros((2, 2), [("x", "f2"), ("y", "u1")])["x"], r"b: got strides of \(6, 3\) bytes; use multiples of"),
        ([[1.0]], "b: got builtins.list; use a torch tensor, a numpy or CuPy array"),
        (None, "b: got builtins.NoneType"),
        (3.0, "b: got builtins.float"),
        (np.float16(3), "b: got numpy.float16"),
    ],
)
def test_what_is_refused(x: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        describe(x, "b")


# -- the CUDA array interface --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_interface(dtype: DType) -> None:
    x = np.zeros((4, 6), dtype.numpy)
    assert describe(by_interface(x)) == ArrayInfo(dtype, (4, 6), (6, 1), x.ctypes.data, "cuda", 3, True)
    strided = by_interface(x[:, ::2], strides=x[:, ::2].strides)
    assert describe(strided).strides == (6, 2)
    assert describe(by_interface(x, data=(4096, True)))[3:7] == (4096, "cuda", 3, False)
    assert describe(by_interface(x, data=(0, False), shape=(0, 6))).address == 0


def test_interface_without_a_dtype_reads_its_type_string() -> None:
    class DeviceArray:
        __cuda_array_interface__ = {"version": 3, "shape": (2, 3), "typestr": "<f2", "data": (0, False)}  # noqa: RUF012

    assert describe(DeviceArray())[:3] == (FP16, (2, 3), (3, 1))


def test_interface_streams() -> None:
    x = np.zeros((4, 6), np.float16)
    assert [current_stream(by_interface(x, stream=s)) for s in (None, 1, 2, 0xABC0)] == [0, 1, 2, 0xABC0]
    assert current_stream(x) == 0


def test_interface_refuses_masks_and_unknown_types() -> None:
    x = np.zeros((2, 2), np.float16)
    with pytest.raises(ArgumentError, match="a: got a masked array"):
        describe(by_interface(x, mask=x), "a")
    with pytest.raises(ArgumentError, match="a: got dtype float64"):
        describe(by_interface(np.zeros(3)), "a")


# -- DLPack --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [FP16, FP32])
@pytest.mark.parametrize("versioned", [False, True])
def test_dlpack(dtype: DType, versioned: bool) -> None:
    x = np.arange(24).reshape(4, 6).astype(dtype.numpy)
    info = describe(ByDlpack(x[1:, ::2], versioned))
    assert info == ArrayInfo(dtype, (3, 3), (6, 2), x[1:].ctypes.data, "cpu", 0, versioned)
    assert np.array_equal(as_numpy(ByDlpack(x[1:, ::2], versioned)), x[1:, ::2])


def test_dlpack_leaves_the_memory_with_its_owner() -> None:
    x = np.ones((4, 4), np.float16)
    before = sys.getrefcount(x)
    for _ in range(10):
        describe(ByDlpack(x, True))
    assert sys.getrefcount(x) == before


@pytest.mark.parametrize("x", [np.zeros((2, 2)), np.zeros((2, 2), np.int16), np.zeros((2, 2), np.complex64)])
def test_dlpack_refuses_other_dtypes(x: np.ndarray) -> None:
    with pytest.raises(ArgumentError, match="a: got DLPack dtype .*use bf16, fp16 or fp32"):
        describe(ByDlpack(x, True), "a")


# -- torch ---------------------------------------------------------------------------------------------------------


@pytest.mark.torch
@pytest.mark.parametrize("dtype", DTYPES)
def test_torch(dtype: DType) -> None:
    torch = pytest.importorskip("torch")
    x = torch.arange(24).reshape(4, 6).to(getattr(torch, dtype.numpy.name))
    assert describe(x) == ArrayInfo(dtype, (4, 6), (6, 1), x.data_ptr(), "cpu", 0, True)
    assert describe(x.t()[1:]).strides == (1, 6)
    assert describe(x.expand(3, 4, 6)).strides == (0, 6, 1)
    assert describe(torch.nn.Parameter(x, requires_grad=not dtype.is_integer)).dtype is dtype
    assert current_stream(x) == 0

    view = as_numpy(x.t()[1:])
    assert view.dtype == dtype.numpy
    assert np.array_equal(view, np.arange(24).astype(dtype.numpy).reshape(4, 6).T[1:])
    as_numpy(x)[0, 0] = 1
    assert float(x[0, 0]) == 1

    made = empty_like_kind(x, (2, 3), FP32)
    assert isinstance(made, torch.Tensor)
    assert address_of(made) == made.data_ptr()
    assert (tuple(made.shape), made.dtype, made.device) == ((2, 3), torch.float32, x.device)
    assert empty_like_kind(x, (2, 3), FP32, (1, 4)).stride() == (1, 4)


@pytest.mark.torch
def test_a_torch_view_keeps_its_tensor_alive() -> None:
    torch = pytest.importorskip("torch")
    view = as_numpy(torch.full((1000, 1000), 3, dtype=torch.bfloat16))
    assert np.all(view.astype(np.float32) == 3)


@pytest.mark.torch
def test_torch_refusals() -> None:
    torch = pytest.importorskip("torch")
    for x, message in [
        (torch.zeros(2, 2), None),
        (torch.zeros(2, 2, dtype=torch.float64), "a: got a .* tensor of torch.float64; use"),
        (torch.zeros(2, 2).to_sparse(), "a: got a torch.sparse_coo tensor"),
        (torch.zeros(2, 2, dtype=torch.complex64).conj().imag, "a: got .*resolve_neg"),
        (torch.zeros(2, 2, device="meta"), "a: got a tensor on meta; use one on a CUDA device or the CPU"),
    ]:
        if message is None:
            describe(x, "a")
        else:
            with pytest.raises(ArgumentError, match=message):
                describe(x, "a")


def seen_by(transform: Any, x: Any) -> Any:
    """What a function sees of x under a torch.func transform."""
    seen: list[Any] = []

    def f(y: Any) -> Any:
        with pytest.raises(ArgumentError) as error:
            cache_key_and_address(y, "a")
        with pytest.raises(ArgumentError, match="^a: got "):
            describe(y.detach(), "a")
        seen.append(str(error.value))
        return y.float().sum()

    transform(f)(x)
    return seen[0]


@pytest.mark.torch
def test_torch_tensors_without_memory() -> None:
    torch = pytest.importorskip("torch")
    from torch._subclasses.fake_tensor import FakeTensorMode

    x = torch.zeros(2, 4, 4, dtype=torch.bfloat16)
    message = "a: got a .* without memory .*; use an ordinary tensor"
    with FakeTensorMode():
        fake = torch.zeros(4, 4, dtype=torch.bfloat16)
    freed = torch.zeros(4, 4, dtype=torch.bfloat16)
    freed.untyped_storage().resize_(0)

    class Wrapper(torch.Tensor):
        __torch_dispatch__ = torch.Tensor.__torch_function__

    wrapper = torch.Tensor._make_wrapper_subclass(Wrapper, (4, 4), dtype=torch.bfloat16)
    for y in (fake, freed, wrapper):
        for look in (describe, cache_key_and_address):
            with pytest.raises(ArgumentError, match=message):
                look(y, "a")
    assert re.match(message, seen_by(torch.vmap, x))
    assert re.match("a: got a tensor that requires grad", seen_by(torch.func.grad, x))
    parts = [torch.zeros(2, 4, dtype=torch.bfloat16), torch.zeros(3, 4, dtype=torch.bfloat16)]
    for layout in (torch.strided, torch.jagged):
        for look in (describe, cache_key_and_address):
            with pytest.raises(ArgumentError, match="a: got a nested tensor; use a dense one: x.values.. of a jagged"):
                look(torch.nested.nested_tensor(parts, layout=layout), "a")
    assert describe(torch.zeros(0, 4, dtype=torch.bfloat16)).address == 0
    assert cache_key_and_address(torch.zeros(0, 4, dtype=torch.bfloat16))[1] == 0


@pytest.mark.torch
def test_a_gradient_that_would_be_lost() -> None:
    torch = pytest.importorskip("torch")
    x = torch.nn.Parameter(torch.zeros(4, 4, dtype=torch.bfloat16))
    for y in (x, x.t(), x * 2):
        with pytest.raises(ArgumentError, match=r"w: got a tensor that requires grad.*no_grad\(\).* or x.detach\(\)"):
            cache_key_and_address(y, "w")
        assert cache_key_and_address(y.detach())[1] == y.data_ptr()
        with torch.no_grad():
            assert cache_key_and_address(y)[1] == y.data_ptr()
        with torch.inference_mode():
            assert cache_key_and_address(y)[1] == y.data_ptr()


@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["int16", "uint16", "complex64", "float64"])
def test_a_torch_dtype_that_is_no_operands(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(ArgumentError) as error:
        describe(torch.zeros(2, 2, dtype=getattr(torch, dtype)), "a")
    said = f"a: got a dense tensor of torch.{dtype}; use one of torch.bfloat16, torch.float16"
    assert str(error.value).startswith(said)
    assert "to_dense" not in str(error.value)


@pytest.mark.torch
def test_results_on_the_current_device_are_made_the_quick_way() -> None:
    """As Inductor makes them; where another device is current by a function that takes a device."""
    torch = pytest.importorskip("torch")
    made: list[tuple[Any, ...]] = []
    guards = types.SimpleNamespace(_empty_strided_cuda=lambda *of: made.append(of))
    private = types.SimpleNamespace(_dynamo=types.SimpleNamespace(guards=guards), _cuda_getDevice=lambda: 1)
    public = {name: getattr(torch, name) for name in dir(torch) if not name.startswith("_")}
    reader = make_torch_adapter(types.SimpleNamespace(
        **public | {"_C": private, "empty_strided": lambda *of, dtype, device: made.append((*of, dtype, device))}
    ))  # fmt: skip
    for index in (0, 1):
        x = types.SimpleNamespace(is_cuda=True, get_device=lambda index=index: index, device=f"cuda:{index}")
        reader.empty(x, torch.Size((2, 3, 4)), FP32, (12, 1, 3))
    assert made == [((2, 3, 4), (12, 1, 3), torch.float32, "cuda:0"), ((2, 3, 4), (12, 1, 3), torch.float32)]
    assert type(made[1][0]) is tuple


@pytest.mark.torch
@pytest.mark.gpu
def test_torch_on_the_gpu() -> None:
    torch = pytest.importorskip("torch")
    x = torch.zeros(4, 6, dtype=torch.bfloat16, device="cuda")
    assert describe(x) == ArrayInfo(BF16, x.shape, x.stride(), x.data_ptr(), "cuda", x.device.index, True)
    made = empty_like_kind(x, (2, 3), FP16)
    assert (made.device, made.shape, made.stride(), made.dtype) == (x.device, (2, 3), (3, 1), torch.float16)
    with pytest.raises(ArgumentError, match="a: got an array on cuda:0; use one on the CPU"):
        as_numpy(x, "a")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        assert current_stream(x) == stream.cuda_stream
    assert current_stream(x) == torch.cuda.current_stream().cuda_stream


def test_only_numpy_is_imported() -> None:
    code = (
        "import sys, numpy as np, gemmsmith; gemmsmith.gemm; gemmsmith.arrays.describe(np.zeros((2, 2), np.float16));"
        "print({'torch', 'cupy', 'cuda', 'matplotlib', 'rich', 'click'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"


# -- Spec, numpy views, new arrays --------------------------------------------------------------------------------


def test_spec() -> None:
    assert describe(Spec((4, 6), "bf16")) == ArrayInfo(BF16, (4, 6), (6, 1), 0, "spec", 0, True)
    assert describe(Spec((4, 6), np.float16, (1, 8))).strides == (1, 8)
    assert describe(Spec((4, 6), "fp32")).alignment == 16
    assert Spec([np.int64(4), 6], "fp32") == Spec((4, 6), FP32, (6, 1))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((4, -6), "bf16"), r"Spec.shape: got \(4, -6\); use a tuple of integers >= 0"),
        ((4, "bf16"), "Spec.shape: got 4; use a tuple"),
        ((("4", 6), "bf16"), "Spec.shape: got"),
        (((4, 6.0), "bf16"), "Spec.shape: got"),
        (((4, 6), "bf16", (6,)), r"Spec.strides: got \(6,\); use 2 integers"),
        (((4, 6), "fp8"), "Spec.dtype: got 'fp8'"),
    ],
)
def test_bad_specs(arguments: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Spec(*arguments)


@given(st.lists(st.integers(0, 4), max_size=4))
def test_row_major_is_numpys(shape: list[int]) -> None:
    x = np.empty(shape, np.int8)
    if x.size:
        assert row_major(tuple(shape)) == x.strides


def test_the_driver_knows_where_an_array_of_an_unknown_library_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it does not say so itself."""
    driver = pytest.importorskip("cuda.bindings.driver")
    asked: list[tuple[Any, int]] = []

    class Unknown:
        __cuda_array_interface__ = {**np.zeros(4, np.float32).__array_interface__, "version": 3, "data": (4096, False)}  # noqa: RUF012

    def attribute(what: Any, address: int) -> tuple[Any, int]:
        asked.append((what, address))
        return driver.CUresult.CUDA_SUCCESS, 5

    monkeypatch.setattr(driver, "cuPointerGetAttribute", attribute)
    result = describe(Unknown())
    assert (result.device, result.device_index, result.address) == ("cuda", 5, 4096)
    assert asked == [(driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, 4096)]
    unknown = driver.CUresult.CUDA_ERROR_INVALID_VALUE
    monkeypatch.setattr(driver, "cuPointerGetAttribute", lambda what, address: (unknown, 0))
    with pytest.raises(ArgumentError, match="a: .*address 0x1000 is not known to the driver .*use device memory"):
        describe(Unknown(), "a")


def test_as_numpy() -> None:
    x = np.zeros((3, 4), ml_dtypes.bfloat16)
    assert as_numpy(x) is x
    assert as_numpy(describe(x[:0])).shape == (0, 4)
    view = as_numpy(describe(x.T))
    view[1, 2] = 5
    assert float(x[2, 1]) == 5
    with pytest.raises(ArgumentError, match="out: got an array on cuda:3; use one on the CPU"):
        as_numpy(by_interface(x), "out")
    with pytest.raises(ArgumentError, match="out: got an array on spec"):
        as_numpy(Spec((2, 2), "bf16"), "out")


@pytest.mark.parametrize("dtype", DTYPES)
def test_empty_like_kind(dtype: DType) -> None:
    made = empty_like_kind(np.zeros(3, np.float16), (2, 0, 5), dtype)
    assert (made.shape, made.dtype) == ((2, 0, 5), dtype.numpy)
    made = empty_like_kind(np.zeros(3, np.float16), (2, 5, 3), dtype, (24, 1, 8))
    assert describe(made)[:3] == (dtype, (2, 5, 3), (24, 1, 8))
    made[...] = 1  # within its memory
    assert isinstance(empty_like_kind(ByDlpack(np.zeros(3, np.float16), True), (2,), dtype), np.ndarray)
    with pytest.raises(ArgumentError, match=r"out: cannot allocate an array of type .*DeviceArray; pass `out`"):
        empty_like_kind(by_interface(np.zeros(3, np.float16)), (2,), dtype)


# -- overlap -------------------------------------------------------------------------------------------------------

windows = st.tuples(st.integers(0, 11), st.integers(1, 12), st.integers(1, 4))


@given(windows, windows, windows, windows)
def test_overlap_is_exact(ar: Any, ac: Any, br: Any, bc: Any) -> None:
    base = np.zeros((12, 12), np.float16)
    x, y = (base[slice(*r), slice(*c)] for r, c in ((ar, ac), (br, bc)))
    both = np.zeros((2, 12, 12), bool)
    both[0][slice(*ar), slice(*ac)] = both[1][slice(*br), slice(*bc)] = True
    assert arrays_overlap(describe(x), describe(y)) == bool((both[0] & both[1]).any())


def test_overlap_needs_one_device_and_reads_no_memory() -> None:
    here = ArrayInfo(BF16, (4, 4), (4, 1), 0x7F00_0000_0000, "cuda", 0, True)
    assert arrays_overlap(here, here)
    assert arrays_overlap(here, here._replace(address=here.address + 30))
    assert not arrays_overlap(here, here._replace(address=here.address + 32))
    assert not arrays_overlap(here, here._replace(device_index=1))
    assert not arrays_overlap(here, here._replace(shape=(4, 0)))
    assert not arrays_overlap(*[describe(Spec((4, 4), "bf16"))] * 2)
    left, right = (here._replace(strides=(8, 1), address=here.address + i) for i in (0, 8))
    assert not arrays_overlap(left, right)


def test_the_dlpack_structures_have_the_headers_sizes() -> None:
    from gemmsmith.arrays import dlpack

    assert ctypes.sizeof(dlpack._Tensor) == 48
    assert ctypes.sizeof(dlpack._Versioned) == 80
