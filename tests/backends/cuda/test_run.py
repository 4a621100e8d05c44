"""Calls on a GPU, on any machine: what the driver would get, at the first call and at later ones of the signature."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import gemmsmith
from gemmsmith import ArgumentError, Config, arrays
from gemmsmith.backends.cuda import launch_template, run
from gemmsmith.backends.cuda.kernel_loader import LoadedKernel
from gemmsmith.binding import request
from gemmsmith.core.arguments import TensorMap
from gemmsmith.core.chip import CHIPS
from gemmsmith.host import cached_run, output_kernels, packing, planned_gemm
from gemmsmith.host.planned_gemm import PlannedGemm
from gemmsmith.hw.cluster import MAX_CLUSTERS
from gemmsmith.lang.kernel import Kernel

READ = {"i32": ctypes.c_int32, "u32": ctypes.c_uint32, "i64": ctypes.c_int64, "u64": ctypes.c_uint64,
        "f32": ctypes.c_float, "pointer": ctypes.c_uint64, "fast_divmod": ctypes.c_uint64,
        "cluster_permutation": ctypes.c_uint16 * MAX_CLUSTERS}  # fmt: skip
GRID_ORDER = (ctypes.c_uint16 * MAX_CLUSTERS)(*range(MAX_CLUSTERS))


class OnGpu:
    """An array that says it is on a GPU; its address need not exist."""

    def __init__(self, shape: tuple[int, ...], address: int, dtype: Any = np.float16) -> None:
        self.dtype = np.dtype(dtype)
        self.shape, self.address = shape, address

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "shape": self.shape, "typestr": self.dtype.str, "strides": None, "stream": 7,
                "data": (self.address, False)}  # fmt: skip

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0


class Encoded:
    """Stands for a CUtensorMap."""

    all: dict[int, TensorMap]

    def __init__(self, template: TensorMap) -> None:
        self.all[id(template)] = template
        self.template = template

    def getPtr(self) -> int:
        return id(self.template)


class Driver:
    """Reads the arguments of each launch, as the driver does before it returns."""

    def __init__(self, kernel: LoadedKernel, seen: list[tuple[str, int, list[Any]]]) -> None:
        self.kernel, self.seen = kernel, seen

    def read(self, grid: int, address: int) -> tuple[Any]:
        kinds = self.kernel.parameter_kinds
        pointers = (ctypes.c_uint64 * len(kinds)).from_address(address)
        values: list[Any] = []
        for kind, pointer in zip(kinds, pointers, strict=True):
            if kind == "tensor_map":
                values.append(Encoded.all[pointer])
            else:
                value = READ[kind].from_address(pointer)
                values.append(tuple(value) if kind == "cluster_permutation" else value.value)
        self.seen.append((self.kernel.name, grid, values))
        return (0,)

    def cuLaunchKernel(self, function: Any, grid: int, *rest: Any) -> tuple[Any]:
        return self.read(grid, rest[-2])


class Recorded:
    """Stands for a CUDA graph: its launches are seen once, when it is recorded."""

    def __init__(self, record: Any, stream: Any) -> None:
        record()
        self.launched: list[int] = []
        recorded.append(self)

    def launch(self, stream: int) -> None:
        self.launched.append(stream)


recorded: list[Recorded] = []


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, list[Any]]]:
    """The launches, as (kernel, grid, arguments)."""
    found: list[tuple[str, int, list[Any]]] = []
    Encoded.all = {}
    cached_run._PLANS_BY_ROWS.clear()
    loaded: dict[str, LoadedKernel] = {}

    def load(of: Kernel, device: int, stream: int) -> LoadedKernel:
        assert stream == 7
        source = of.source
        if source not in loaded:
            kernel = LoadedKernel(of.name, 1, device, of.threads, of.cluster, of.shared_bytes, of.parameter_kinds)
            loaded[source] = kernel
            kernel._driver = Driver(kernel, found)
            kernel.launch = lambda grid, arguments, stream, pdl: kernel._driver.read(grid, arguments)  # type: ignore
            kernel.max_active_clusters = lambda: 66  # type: ignore[method-assign]
            kernel.cluster_permutation = lambda clusters: GRID_ORDER  # type: ignore[method-assign]
        return loaded[source]

    monkeypatch.setattr(run.kernel_loader, "load_kernel", load)
    monkeypatch.setattr(run.kernel_loader, "is_capturing", lambda stream: False)
    monkeypatch.setattr(run, "Stream", lambda: types.SimpleNamespace(handle=9))
    monkeypatch.setattr(run, "CudaGraph", Recorded)
    monkeypatch.setattr(run.kernel_loader, "device_guard", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(run.kernel_loader, "is_current", lambda device: len(found) % 2 == 0)
    monkeypatch.setattr(run.driver, "require_chip", lambda device, chip: None)
    pool = types.SimpleNamespace(lock=contextlib.nullcontext(), get=lambda stream, nbytes: 0xF000)
    monkeypatch.setattr(run, "pool_of", lambda device: pool)
    monkeypatch.setattr(launch_template, "encode_tensor_map", Encoded)
    return found


def check(plan: PlannedGemm, a: Any, b: Any, seen: list[Any], **places: Any) -> None:
    """The last launches had the plan's arguments for these addresses."""
    first, second = (b, a) if plan.launches.swapped else (a, b)
    addresses = {"a": first.address, "b": second.address, "flags": 0xF000, **places}
    launches = plan.launches.all
    assert len(seen) >= len(launches)
    for (name, grid, values), launch in zip(seen[-len(launches) :], launches, strict=True):
        assert name == launch.kernel.name
        assert grid == min(launch.work_clusters, 66) * launch.kernel.cluster[0]
        want = launch.resolve(addresses)
        for parameter, value in zip(launch.kernel.parameters, values, strict=True):
            assert value == want[parameter.name], parameter.name


def count_of_traces(monkeypatch: pytest.MonkeyPatch, plan: PlannedGemm) -> list[int]:
    """How often the plan looks at its arrays closely."""
    calls_made = [0]
    real = plan._bind

    def bind(*arguments: Any, **more: Any) -> Any:
        calls_made[0] += 1
        return real(*arguments, **more)

    monkeypatch.setattr(plan, "_bind", bind)
    return calls_made


@pytest.mark.parametrize("config", [Config(), Config(splits=0), Config(tile=(128, 64, 64), cluster=(1, 1), splits=2)])
def test_addresses_are_put_in(seen: list[Any], monkeypatch: pytest.MonkeyPatch, config: Config) -> None:
    a, b, d = OnGpu((256, 64), 0x10000), OnGpu((64, 512), 0x100000), OnGpu((256, 512), 0x200000)
    plan = gemmsmith.plan(a, b, out=d, config=config)
    space = OnGpu((max(plan.workspace_bytes, 1),), 0x800000, np.uint8)
    space.nbytes = space.shape[0]
    looks = count_of_traces(monkeypatch, plan._planned)
    for i in range(4):
        a, b, d = OnGpu((256, 64), 0x10000 + 256 * i), OnGpu((64, 512), 0x100000), OnGpu((256, 512), 0x200000 + 64 * i)
        assert plan.run(a, b, d, workspace=space) is d
        check(plan._planned, a, b, seen, out=d.address, workspace=space.address)
    assert looks == [1]
    plan.run(OnGpu((128, 64), 0x10000), b, OnGpu((128, 512), 0x200000), workspace=space)
    assert looks == [2]  # other sizes, the same kernel
    assert len({name for name, *_ in seen}) == 1


def test_numbers_and_operands(seen: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def f(acc: Any, alpha: Any, bias: Any, c: Any) -> Any:
        x = acc * alpha + bias + c
        return x, x.sum(-1), x.to("fp32")

    a, b, bias = OnGpu((256, 64), 0x10000), OnGpu((64, 512), 0x100000), OnGpu((512,), 0x180000)
    outs = (OnGpu((256, 512), 0x200000), OnGpu((256,), 0x300000, np.float32), OnGpu((256, 512), 0x400000, np.float32))
    c = OnGpu((256, 512), 0x600000)
    plan = gemmsmith.plan(a, b, out=outs, epilogue=f, alpha=0.5, bias=bias, c=c)
    space = OnGpu((plan.workspace_bytes,), 0x900000, np.uint8)
    space.nbytes = plan.workspace_bytes
    looks = count_of_traces(monkeypatch, plan._planned)
    for i, alpha in enumerate((0.5, 2.0, -3.25)):
        c = OnGpu((256, 512), 0x600000 + 1024 * i)
        got = plan.run(a, b, outs, alpha=alpha, bias=bias, c=c, workspace=space)
        assert got == outs
        check(plan._planned, a, b, seen, workspace=space.address, in_alpha=alpha, in_bias=bias.address, in_c=c.address,
              out=outs[0].address, out1=outs[1].address, out2=outs[2].address)  # fmt: skip
    assert looks == [1]
    with pytest.raises(ArgumentError, match="alpha: got 1e"):
        plan.run(a, b, outs, alpha=1e300, bias=bias, c=c, workspace=space)


def test_arrays_that_meet_are_looked_at(seen: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, d = OnGpu((256, 64), 0x10000), OnGpu((64, 512), 0x100000), OnGpu((256, 512), 0x200000)
    plan = gemmsmith.plan(a, b, out=d)
    looks = count_of_traces(monkeypatch, plan._planned)
    plan.run(a, b, d)
    plan.run(a, b, d)
    assert looks == [1]
    with pytest.raises(ArgumentError, match="out: overlaps b"):
        plan.run(a, b, OnGpu((256, 512), 0x100000 + 0x8000))
    assert looks == [2]
    plan.run(OnGpu((256, 64), 0x10002), b, d) if plan.workspace_bytes else None
    with pytest.raises(ArgumentError, match="shape"):
        plan.run(OnGpu((256, 32), 0x10000), b, d)


class Replayed:
    """Stands for a CUDA graph: what was launched when it was captured, at every launch."""

    def __init__(self, call: Any, stream: Any) -> None:
        call()
        self.captured = Replayed.seen[-1:]
        Replayed.seen.pop()

    seen: list[Any]

    def launch(self, stream: int) -> None:
        assert stream == 7
        Replayed.seen.extend(self.captured)


@pytest.mark.parametrize("config", [Config(), Config(splits=0)])
def test_a_prepared_run(seen: list[Any], monkeypatch: pytest.MonkeyPatch, config: Config) -> None:
    """Launches when it is called, not before; into a capture without its graph."""
    Replayed.seen, capturing = seen, [False]
    monkeypatch.setattr(run, "CudaGraph", Replayed)
    monkeypatch.setattr(run, "Stream", lambda: types.SimpleNamespace(handle=9))
    monkeypatch.setattr(run.kernel_loader, "is_capturing", lambda stream: capturing[0])
    a, b, d = OnGpu((256, 64), 0x10000), OnGpu((64, 512), 0x100000), OnGpu((256, 512), 0x200000)
    plan = gemmsmith.plan(a, b, out=d, config=config)
    space = OnGpu((max(plan.workspace_bytes, 1),), 0x800000, np.uint8)
    space.nbytes = space.shape[0]
    a = OnGpu((256, 64), 0x20000)
    prepared_run = plan.prepare(a, b, d, workspace=space)
    assert not seen
    for i, into_a_capture in enumerate((False, False, True)):
        capturing[0] = into_a_capture
        assert prepared_run() is d
        assert len(seen) == i + 1
        check(plan._planned, a, b, seen, out=d.address, workspace=space.address)
    with pytest.raises(gemmsmith.DeviceError, match="before the capture"):
        plan.prepare(a, b, d, workspace=space)
    with pytest.raises(ArgumentError, match="overlaps"):
        plan.prepare(a, b, OnGpu((256, 512), 0x20000), workspace=space)


def test_a_prepared_run_on_the_cpu() -> None:
    a, b = np.random.default_rng(1).standard_normal((2, 64, 64)).astype(np.float16)
    out = np.full((64, 64), np.nan, np.float16)
    prepared_run = gemmsmith.plan(a, b).prepare(a, b, out)
    assert prepared_run() is out
    a *= 2
    assert np.allclose(prepared_run(), a.astype(np.float64) @ b, rtol=2e-3, atol=2e-3)


def test_swapped(seen: list[Any]) -> None:
    a, b, d = OnGpu((16, 64), 0x10000), OnGpu((64, 512), 0x100000), OnGpu((16, 512), 0x200000)
    plan = gemmsmith.plan(a, b, out=d, config=Config(tile=(128, 16, 64), cluster=(1, 1), swap_ab=True))
    for i in range(2):
        a = OnGpu((16, 64), 0x10000 + 1024 * i)
        plan.run(a, b, d)
        check(plan._planned, a, b, seen, out=d.address)


def test_the_same_addresses_again(seen: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no more tensor maps are remembered."""
    monkeypatch.setattr(launch_template, "MAX_TENSOR_MAPS", 2)
    a, b, d = OnGpu((256, 64), 0x10000), OnGpu((64, 512), 0x100000), OnGpu((256, 512), 0x200000)
    plan = gemmsmith.plan(a, b, out=d)
    for i in (0, 0, 1, 1, 0, 2, 3, 4, 4, 0, 0):
        a = OnGpu((256, 64), 0x10000 + 256 * i)
        plan.run(a, b, d)
        check(plan._planned, a, b, seen, out=d.address)


@pytest.mark.parametrize("given", ["alone", "tuple", "names", "other names"])
def test_gemm_with_an_epilogue(seen: list[Any], monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    """However its results are given, each launch has the addresses of its own call."""
    monkeypatch.setattr(cached_run, "_PLAN_CACHE", {})
    names = ["y", "z"] if given == "other names" else ["out"] if given == "alone" else ["out", "out1"]

    def f(acc: Any, bias: Any) -> Any:
        x = acc + bias
        return x if given == "alone" else {"y": x, "z": x * 2.0} if given == "other names" else (x, x * 2.0)

    for i in (0, 0, 1, 2, 1):
        a, b = OnGpu((256, 64), 0x10000 + 512 * i), OnGpu((64, 512), 0x100000)
        bias = OnGpu((512,), 0x180000 + 1024 * i)
        outs = [OnGpu((256, 512), 0x200000 + 0x80000 * j + 1024 * i) for j in range(len(names))]
        out = {"alone": outs[0], "tuple": tuple(outs)}.get(given) or dict(zip(names, outs, strict=True))
        gemmsmith.gemm(a, b, epilogue=f, bias=bias, out=out)
        plan = next(iter(cached_run._PLAN_CACHE.values()))[0]
        places = {
            name if name.startswith("out") else f"out_{name}": x.address for name, x in zip(names, outs, strict=True)
        }
        check(plan, a, b, seen, in_bias=bias.address, **places)


def test_a_known_call_reads_each_array_once(seen: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where results are given as a tuple."""
    monkeypatch.setattr(cached_run, "_PLAN_CACHE", {})
    a, b, bias = OnGpu((256, 64), 0x10000), OnGpu((64, 512), 0x100000), OnGpu((512,), 0x180000)
    outs = OnGpu((256, 512), 0x200000), OnGpu((256, 512), 0x300000)

    def f(acc: Any, bias: Any) -> Any:
        return acc + bias, acc

    read: list[str] = []
    real = arrays.cache_key_and_address
    monkeypatch.setattr(request, "cache_key_and_address", lambda x, name="array": (read.append(name), real(x, name))[1])
    for _ in range(3):
        read.clear()
        assert gemmsmith.gemm(a, b, epilogue=f, bias=bias, out=outs) == outs
    assert read == ["a", "b", "bias", "out", "out1"]
    assert len(seen) == 3


def test_planning_allocates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = OnGpu((256, 64), 0x10000), OnGpu((64, 512), 0x100000)  # of a library that gemmsmith makes no arrays of
    plan = gemmsmith.plan(a, b, epilogue=lambda acc: (acc, acc.sum(-1)))
    assert plan.workspace_bytes > 0
    with pytest.raises(ArgumentError, match="out: cannot allocate an array of type .*; pass `out`"):
        plan.run(a, b)


@pytest.mark.parametrize("k", [64, 63])
def test_programmatic_launch(seen: list[Any], monkeypatch: pytest.MonkeyPatch, k: int) -> None:
    """Of all launches of a call but the first, which is a kernel that packs if there are several."""
    a, b, d = OnGpu((256, k), 0x10000), OnGpu((k, 512), 0x100000), OnGpu((256, 512), 0x200000)
    plan = gemmsmith.plan(a, b, out=d, config=Config())
    space = OnGpu((max(plan.workspace_bytes, 1),), 0x800000, np.uint8)
    space.nbytes = space.shape[0]
    plan.run(a, b, d, workspace=space)
    (call,) = plan._planned.calls.values()
    assert [launch.pdl for launch in call.launches] == [i > 0 for i in range(len(call.launches))]
    assert len(call.launches) == 1 + (k % 8 > 0)


def test_the_form_of_out_is_part_of_what_gemm_knows(seen: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """An array alone is the first result, whatever that is called; by its name it may be another."""
    monkeypatch.setattr(cached_run, "_PLAN_CACHE", {})
    a, b, d = OnGpu((256, 64), 0x10000), OnGpu((64, 512), 0x100000), OnGpu((256, 512), 0x200000)
    other = OnGpu((256, 512), 0x300000)

    def f(acc: Any) -> Any:
        return {"y": acc * 2.0, "out": acc}

    monkeypatch.setattr(run, "adapter_of", lambda like: arrays.adapter_of(like)._replace(empty=lambda *_: other))
    monkeypatch.setattr("gemmsmith.binding.binding.empty_like_kind", lambda like, *_: other)
    for form in ("array", "array", "names", "names", "array", "names"):
        gemmsmith.gemm(a, b, epilogue=f, out=d if form == "array" else {"out": d})
        known = next(
            p for (*_, (kind, _)), (p, _) in cached_run._PLAN_CACHE.items() if (kind is dict) == (form == "names")
        )
        y, out = (d, other) if form == "array" else (other, d)
        check(known, a, b, seen, out_y=y.address, out=out.address)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.int8])
def test_another_chip(seen: list[Any], monkeypatch: pytest.MonkeyPatch, dtype: type) -> None:
    """Its own kernels, with stream-K's flags, reductions and packings; in a graph, and at the first and later calls."""
    monkeypatch.setattr(cached_run, "_PLAN_CACHE", {})
    monkeypatch.setattr(planned_gemm, "chip_of", lambda a: CHIPS["sm_86"])

    def f(acc: Any) -> Any:
        return acc, acc.sum(-1)

    for m, n, k in ((512, 512, 16384), (100, 70, 50)):
        a, b = OnGpu((m, k), 0x10000, dtype), OnGpu((k, n), 0x10000000, dtype)
        d, sums = OnGpu((m, n), 0x20000000, np.float32), OnGpu((m,), 0x30000000, np.float32)
        space = OnGpu((1 << 25,), 0x40000000)
        space.nbytes = 1 << 26
        plan = gemmsmith.plan(a, b, epilogue=f, out={"out": d, "out1": sums}, out_dtype="fp32")
        assert all(x.kernel.chip.name == "sm_86" for x in plan._planned.launches.all)
        assert plan.config.design == ("sgemm" if dtype == np.float32 else "mma_multistage")
        assert bool(plan._planned.launches.flag_bytes) == (plan.config.splits == 0)
        run_again = plan.prepare(a, b, {"out": d, "out1": sums}, workspace=space)
        graph = recorded[-1]
        check(plan._planned, a, b, seen, out=d.address, out1=sums.address, workspace=space.address)
        run_again()
        assert graph.launched == [7]
        for address in (0x50000000, 0x60000000):
            d = OnGpu((m, n), address, np.float32)
            plan.run(a, b, {"out": d, "out1": sums}, workspace=space)
            check(plan._planned, a, b, seen, out=d.address, out1=sums.address, workspace=space.address)


def test_packing_on_another_chip(seen: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "chip_of", lambda a: CHIPS["sm_86"])
    asked = []
    monkeypatch.setattr(run.driver, "require_chip", lambda device, chip: asked.append(chip.name))
    made = OnGpu((9, 16), 0x50000)
    monkeypatch.setattr(output_kernels, "empty_like_kind", lambda like, shape, dtype: made)
    made.swapaxes = lambda i, j: made  # type: ignore[attr-defined]
    monkeypatch.setattr(OnGpu, "__getitem__", lambda self, key: self, raising=False)
    gemmsmith.pack(OnGpu((13, 9), 0x10000))
    assert asked == ["sm_86"]
    assert seen[-1][0].startswith("pack_")


def test_the_bare_product_takes_an_array(seen: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_run, "_PLAN_CACHE", {})
    a, b, d = OnGpu((256, 64), 0x10000), OnGpu((64, 512), 0x100000), OnGpu((256, 512), 0x200000)
    plan = gemmsmith.plan(a, b, out=d)
    for _ in range(2):
        assert gemmsmith.gemm(a, b, out=d) is d
        assert plan.run(a, b, d) is d
        for call in (gemmsmith.gemm, plan.run):
            with pytest.raises(ArgumentError, match="out: got"):
                call(a, b, out={"out": d})


@pytest.mark.parametrize("fused", [False, True])
def test_another_m_of_one_plan(seen: list[Any], monkeypatch: pytest.MonkeyPatch, fused: bool) -> None:
    """Its launches are those of a plan of its own, at its own addresses."""

    def launches(m: int) -> list[Any]:
        before, i = len(seen), m % 8
        a, b, out = OnGpu((m, 64), 0x10000 + 4096 * i), OnGpu((64, 512), 0x100000), OnGpu((m, 512), 0x200000 + 4096 * i)
        if fused:
            row, number = OnGpu((m, 1), 0x400000 + 4096 * i, np.float32), 1.5 * m
            gemmsmith.gemm(a, b, out=out, epilogue=lambda acc, row, x: acc * row + x, row=row, x=number)
        else:
            gemmsmith.gemm(a, b, out=out)
        return seen[before:]

    own = {}
    for m in range(97, 105):
        monkeypatch.setattr(cached_run, "_PLAN_CACHE", {})
        cached_run._PLANS_BY_ROWS.clear()
        own[m] = launches(m)
    for m in (97, 104, 100, 97):
        assert launches(m) == own[m]
    assert len({id(planned) for planned, _ in cached_run._PLAN_CACHE.values()}) == 1


def test_another_m_of_an_empty_result(seen: list[Any]) -> None:
    """A slice of no columns, whose address is 0, as torch's is."""

    class NoColumns(OnGpu):
        @property
        def __cuda_array_interface__(self) -> dict[str, Any]:
            return {**super().__cuda_array_interface__, "strides": (1024, 2)}

    for m in (97, 98, 99):
        out = NoColumns((m, 0), 0)
        assert gemmsmith.gemm(OnGpu((m, 64), 0x10000), OnGpu((64, 0), 0x100000), out=out) is out
    assert not seen


def test_zeros_of_both_signs(seen: list[Any]) -> None:
    a, b, d = OnGpu((256, 64), 0x10000), OnGpu((64, 512), 0x100000), OnGpu((256, 512), 0x200000)
    for s in (0.0, -0.0, 0.0):
        gemmsmith.gemm(a, b, epilogue=lambda acc, s: acc / s, s=s, out=d)
        given = [x for x in seen[-1][2] if isinstance(x, float)]
        assert [np.signbit(x) for x in given] == [np.signbit(s)]


def test_a_first_call_that_fails_is_no_matter(seen: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_run, "_PLAN_CACHE", {})
    a, b, d = OnGpu((256, 64), 0x10000), OnGpu((64, 512), 0x100000), OnGpu((256, 512), 0x200000)
    with monkeypatch.context() as broken:
        broken.setattr(run.kernel_loader, "load_kernel", lambda *_, **__: raising())
        with pytest.raises(gemmsmith.DeviceError):
            gemmsmith.gemm(a, b, out=d)
    ((known, _),) = cached_run._PLAN_CACHE.values()
    looks = count_of_traces(monkeypatch, known)
    for _ in range(3):
        gemmsmith.gemm(a, b, out=d)
    assert looks == [1]
    assert len(seen) == 3


def raising() -> None:
    raise gemmsmith.DeviceError("it is being captured")


@pytest.mark.torch
@pytest.mark.parametrize("name", ["a", "b", "c", "out"])
def test_no_gradient_is_lost_in_silence(name: str, rng: np.random.Generator) -> None:
    """Of any argument of any call, also of one whose like came before."""
    torch = pytest.importorskip("torch")
    given = {
        x: torch.nn.Parameter(torch.from_numpy(rng.standard_normal((64, 64))).bfloat16(), requires_grad=x == name)
        for x in ("a", "b", "c", "out")
    }

    def f(acc: Any, c: Any) -> Any:
        return acc + c

    plan = gemmsmith.plan(**given, epilogue=f)
    ways = [lambda: gemmsmith.gemm(**given, epilogue=f), lambda: plan.run(**given), lambda: plan.prepare(**given)()]
    ways.append(lambda: plan.simulate(**given))
    want = given["a"].detach().double() @ given["b"].detach().double() + given["c"].detach().double()
    for _ in range(2):
        for way in ways:
            with pytest.raises(ArgumentError, match=f"^{name}: got a tensor that requires grad"):
                way()
            with torch.no_grad():
                given["out"].fill_(torch.nan)
                way()
                assert torch.allclose(given["out"].double(), want, rtol=2**-7, atol=2**-7)


def test_many_threads_at_once(seen: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """On one plan that all of them make first: each launch has the addresses of one call."""
    monkeypatch.setattr(cached_run, "_PLAN_CACHE", {})
    monkeypatch.setattr(launch_template, "MAX_TENSOR_MAPS", 3)
    b, start = OnGpu((64, 512), 0x100000), threading.Barrier(8)

    def work(first: int) -> None:
        start.wait()
        for i in range(first, 400, 8):
            out = OnGpu((256, 512), 0x2000000 + 4096 * i)
            gemmsmith.gemm(OnGpu((256, 64), 0x1000000 + 4096 * i), b, out=out, config=Config())

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    ((known, _),) = cached_run._PLAN_CACHE.values()
    names = [p.name for p in known.kernel.parameters]
    pairs = [tuple(values[names.index(name)].address for name in ("a", "out")) for _, _, values in seen]
    assert sorted(pairs) == [(0x1000000 + 4096 * i, 0x2000000 + 4096 * i) for i in range(400)]
