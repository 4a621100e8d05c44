"""Launching: arguments as the driver gets them, on any machine; kernels, threads, clusters and graphs on a GPU."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from gemmsmith.backends.cuda import cuda_graph, kernel_loader, launch_template
from gemmsmith.backends.cuda.cuda_graph import CudaGraph, time_calls
from gemmsmith.backends.cuda.driver import DeviceAttributes, check, device_attributes
from gemmsmith.backends.cuda.kernel_loader import LoadedKernel
from gemmsmith.backends.cuda.launch_template import LaunchTemplate
from gemmsmith.backends.cuda.memory import DeviceArray
from gemmsmith.core.arguments import Pointer, TensorMap
from gemmsmith.core.chip import CHIPS, HOPPER
from gemmsmith.core.dtypes import FP32
from gemmsmith.core.errors import ArgumentError, DeviceError

ROWS, COLUMNS = 8, 32

TMA = r"""
struct alignas(64) TensorMap { char bytes[128]; };
extern "C" __global__ void __launch_bounds__(256) tile_of(
    const __grid_constant__ TensorMap map, float* out, int row, unsigned by, long long first, float add) {
    __shared__ alignas(128) float tile[256];
    __shared__ alignas(8) unsigned long long barrier;
    unsigned at = (unsigned)__cvta_generic_to_shared(&barrier), to = (unsigned)__cvta_generic_to_shared(tile);
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(at));
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 1024;" :: "r"(at) : "memory");
        asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                     " [%0], [%1, {0, %2, 0}], [%3];" :: "r"(to), "l"(&map), "r"(row), "r"(at) : "memory");
    }
    __syncthreads();
    asm volatile("{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0;"
                 " @!done bra again; }" :: "r"(at) : "memory");
    out[first + threadIdx.x] = tile[threadIdx.x] * by + add;
}
"""
TMA_KINDS = ("tensor_map", "pointer", "i32", "u32", "i64", "f32")

PAIR = """extern "C" __global__ void __cluster_dims__(2, 1, 1) pair(int* out) {
    extern __shared__ int s[];
    s[threadIdx.x] = blockIdx.x;
    __syncthreads();
    if (threadIdx.x == 0) out[blockIdx.x] = s[127];
}"""


@pytest.mark.parametrize(("target", "capability", "loaded"), [
    ("sm_80", (8, 0), "cubin"), ("sm_86", (8, 7), "cubin"), ("sm_90a", (9, 0), "cubin"), ("sm_120", (12, 1), "cubin"),
    ("sm_80", (8, 6), "ptx"), ("sm_80", (9, 0), "ptx"), ("sm_100", (11, 0), "ptx"), ("sm_120", (13, 0), "ptx"),
])  # fmt: skip
def test_cubins_are_for_a_gpus_own_capability(
    target: str, capability: tuple[int, int], loaded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver compiles other kernels' PTX."""
    monkeypatch.setattr(
        kernel_loader, "device_attributes", lambda _: DeviceAttributes("NVIDIA", capability, 100, 100 * 1024)
    )
    monkeypatch.setattr(kernel_loader, "compile_source", lambda *given: SimpleNamespace(cubin=b"cubin"))
    monkeypatch.setattr(kernel_loader, "compile_ptx", lambda *given: "ptx")
    of = recorded("", "k", (), chip=CHIPS[target.removesuffix("a")])
    assert kernel_loader._build_image(of, 0) == {"cubin": b"cubin", "ptx": b"ptx\0"}[loaded]


def recorded(source: str, name: str, kinds: tuple[str, ...], **changes: Any) -> Any:
    """What the loader reads of a recorded kernel."""
    shape = {"threads": 256, "cluster": (1, 1, 1), "shared_bytes": 0, "chip": HOPPER}
    return SimpleNamespace(source=source, name=name, parameter_kinds=kinds, **(shape | changes))


def kernel(kinds: tuple[str, ...]) -> LoadedKernel:
    """One that no driver has loaded."""
    return LoadedKernel("k", 0x88, 0, 384, (2, 1, 1), 200 * 1024, kinds)


def launch(k: LoadedKernel, grid: int, arguments: list[Any], stream: int, pdl: bool = False) -> None:
    """With arguments that are all known."""
    LaunchTemplate(k, grid, arguments, pdl).launch({}, stream)


class FakeDriver:
    """Records launches; their arguments are read before the call returns, as the driver does."""

    def __init__(self, types: list[Any], result: Any) -> None:
        self.types, self.result, self.calls = types, result, []

    def _read(self, address: int) -> list[Any]:
        pointers = (ctypes.c_uint64 * len(self.types)).from_address(address)
        return [t.from_address(p).value for t, p in zip(self.types, pointers, strict=True)]

    def cuLaunchKernel(self, *arguments: Any) -> tuple[Any]:
        self.calls.append((*arguments[:9], self._read(arguments[9]), arguments[10]))
        return (self.result,)

    def cuLaunchKernelEx(self, config: Any, function: Any, address: int, extra: int) -> tuple[Any]:
        (attribute,) = config.attrs[: config.numAttrs]
        grid, block = ((config.gridDimX, config.gridDimY, config.gridDimZ), config.blockDimX)
        self.calls.append((function, *grid, block, int(config.hStream), config.sharedMemBytes,
                           attribute.id.name, attribute.value.programmaticStreamSerializationAllowed,
                           self._read(address), extra))  # fmt: skip
        return (self.result,)


SCALARS = {
    "i32": (ctypes.c_int32, some.integers(-(2**31), 2**31 - 1)),
    "u32": (ctypes.c_uint32, some.integers(0, 2**32 - 1)),
    "i64": (ctypes.c_int64, some.integers(-(2**63), 2**63 - 1)),
    "u64": (ctypes.c_uint64, some.integers(0, 2**64 - 1)),
    "f32": (ctypes.c_float, some.floats(width=32, allow_nan=False)),
    "pointer": (ctypes.c_uint64, some.integers(0, 2**64 - 1)),
}


@given(some.data())
def test_arguments_arrive_as_they_were_given(data: some.DataObject) -> None:
    from cuda.bindings.driver import CUresult

    kinds = tuple(data.draw(some.lists(some.sampled_from(sorted(SCALARS)), max_size=12)))
    values = [data.draw(SCALARS[kind][1]) for kind in kinds]
    k = kernel(kinds)
    fake = k._driver = FakeDriver([SCALARS[kind][0] for kind in kinds], CUresult.CUDA_SUCCESS)
    launch(k, 132, values, 0x1234)
    launch(k, 66, values, 0x5678, pdl=True)
    launch(k, 64, values, 0x9ABC, pdl=True)
    shared, pdl = 200 * 1024, "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION"
    assert fake.calls == [
        (0x88, 132, 1, 1, 384, 1, 1, shared, 0x1234, values, 0),
        (0x88, 66, 1, 1, 384, 0x5678, shared, pdl, 1, values, 0),
        (0x88, 64, 1, 1, 384, 0x9ABC, shared, pdl, 1, values, 0),
    ]


def test_tensor_maps_are_passed_where_they_were_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda.bindings.driver import CUresult, CUtensorMap

    encoded = {address: CUtensorMap() for address in (16, 32)}
    monkeypatch.setattr(launch_template, "encode_tensor_map", lambda x: encoded[x.address])
    k = kernel(("tensor_map", "i32", "tensor_map", "u32"))
    first, second = (TensorMap(address, FP32, (8, 8, 1), (32, 0), (8, 8, 1), 0) for address in encoded)
    block, _ = LaunchTemplate(k, 1, [first, -7, second, 9], False)._block()
    assert (block[0], block[2]) == tuple(x.getPtr() for x in encoded.values())
    assert [ctypes.c_int32.from_address(block[i]).value for i in (1, 3)] == [-7, 9]
    fake = k._driver = FakeDriver([], CUresult.CUDA_SUCCESS)
    launch(k, 1, [first, -7, second, 9], 0)
    assert len(fake.calls) == 1


def test_threads_share_no_arguments() -> None:
    from cuda.bindings.driver import CUresult

    k = kernel(("i64",) * 4)
    k._driver = fake = FakeDriver([ctypes.c_int64] * 4, CUresult.CUDA_SUCCESS)

    def many(thread: int) -> None:
        for i in range(300):
            launch(k, 1 + thread, [1000 * thread + i] * 4, thread, pdl=i % 2 == 0)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(many, range(8)))
    assert len(fake.calls) == 8 * 300
    for call in fake.calls:
        thread, values = call[1] - 1, call[-2]
        assert len(set(values)) == 1
        assert values[0] // 1000 == thread
        assert call[5 if isinstance(call[7], str) else 8] == thread


def test_calls_of_a_program_share_no_arguments() -> None:
    from cuda.bindings.driver import CUresult

    k = kernel(("pointer", "f32", "u64"))
    k._driver = fake = FakeDriver([ctypes.c_uint64, ctypes.c_float, ctypes.c_uint64], CUresult.CUDA_SUCCESS)
    shared = LaunchTemplate(k, 1, [Pointer("a", 16), Pointer("in_x", 0), 5], False)
    calls = [shared, shared.for_one_call(), shared.for_one_call()]
    expected = []
    for step in range(3):
        for i, call in enumerate(calls):
            address, number = 1024 * (i + 1) + (step == 2), i + step / 2
            call.launch({"a": address, "in_x": number}, 0)
            expected.append([address + 16, number, 5])
    assert [call[-2] for call in fake.calls] == expected


@pytest.mark.parametrize(
    ("kind", "value"),
    [("i32", 2**31), ("u32", -1), ("i64", 2**63), ("u64", 2**64), ("pointer", -1), ("f32", 1e300), ("i32", 1.5)],
)
def test_a_value_that_does_not_fit_is_refused_not_wrapped(kind: str, value: float) -> None:
    with pytest.raises(ArgumentError, match="k: .*got"):
        launch(kernel((kind,)), 1, [value], 0)


def test_too_few_arguments() -> None:
    with pytest.raises(ValueError, match="shorter"):
        launch(kernel(("i32", "i32")), 1, [1], 0)


def test_a_failed_launch_says_what_was_launched() -> None:
    from cuda.bindings.driver import CUresult

    k = kernel(())
    k._driver = FakeDriver([], CUresult.CUDA_ERROR_INVALID_VALUE)
    with pytest.raises(DeviceError, match="CUDA_ERROR_INVALID_VALUE in the launch of k: grid 0, 384 threads"):
        launch(k, 0, [], 0)


def test_clusters_are_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda.bindings import driver as cu

    asked = []

    def occupancy(function: int, config: Any) -> tuple[Any, int]:
        size = config.attrs[0].value.clusterDim
        asked.append((function, config.gridDimX, config.blockDimX, config.sharedMemBytes, (size.x, size.y, size.z)))
        return cu.CUresult.CUDA_SUCCESS, 66

    monkeypatch.setattr(cu, "cuOccupancyMaxActiveClusters", occupancy)
    k = kernel(())
    assert [k.max_active_clusters() for _ in range(3)] == [66] * 3
    assert asked == [(0x88, 2, 384, 200 * 1024, (2, 1, 1))]


def test_a_kernel_that_does_not_fit_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda.bindings import driver as cu

    monkeypatch.setattr(cu, "cuOccupancyMaxActiveClusters", lambda *_: (cu.CUresult.CUDA_SUCCESS, 0))
    with pytest.raises(DeviceError, match=r"cannot hold one cluster \(2, 1, 1\) of 384 threads and 204800 bytes"):
        kernel(()).max_active_clusters()


@pytest.mark.parametrize(
    ("error", "status", "expected"),
    [
        ("CUDA_SUCCESS", "NONE", False),
        ("CUDA_SUCCESS", "ACTIVE", True),
        ("CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", "NONE", True),
    ],
)
def test_loading_in_a_capture_is_refused(
    monkeypatch: pytest.MonkeyPatch, error: str, status: str, expected: bool
) -> None:
    from cuda.bindings import driver as cu

    state = getattr(cu.CUstreamCaptureStatus, f"CU_STREAM_CAPTURE_STATUS_{status}")
    monkeypatch.setattr(cu, "cuStreamIsCapturing", lambda _: (getattr(cu.CUresult, error), state))
    assert kernel_loader.is_capturing(5) is expected
    if expected:
        with pytest.raises(DeviceError, match="unseen is not loaded yet.*captured.*before the capture"):
            load("// unseen", "unseen", (), 5)


# -- on a GPU --------------------------------------------------------------------------------------------


def load(source: str, name: str, kinds: tuple[str, ...], stream: int = 0, **changes: Any) -> LoadedKernel:
    return kernel_loader.load_kernel(recorded(source, name, kinds, **changes), 0, stream)


def matrix(rng: np.random.Generator) -> np.ndarray[Any, Any]:
    return rng.integers(-99, 99, (64, COLUMNS)).astype(np.float32)


def map_of(x: DeviceArray) -> TensorMap:
    return TensorMap(x.address, FP32, (COLUMNS, 64, 1), (4 * COLUMNS, 0), (COLUMNS, ROWS, 1), 0)


def expected(x: np.ndarray[Any, Any], row: int) -> np.ndarray[Any, Any]:
    """Rows beyond the matrix are zeros."""
    padded = np.vstack([x, np.zeros((ROWS, COLUMNS), np.float32)])
    return padded[row : row + ROWS].ravel() * 3 + 0.5


@pytest.mark.gpu
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("row", [0, 5, 60])
def test_a_kernel_with_every_kind_of_argument(rng: np.random.Generator, row: int, pdl: bool) -> None:
    with kernel_loader.device_guard(0):
        host = matrix(rng)
        x, out = DeviceArray.from_numpy(host), DeviceArray.from_numpy(np.full(512, np.nan, np.float32))
        k = load(TMA, "tile_of", TMA_KINDS)
        for _ in range(2):
            launch(k, 1, [map_of(x), out.address, row, 3, 256, 0.5], 0, pdl=pdl)
        result = out.numpy()
    assert np.isnan(result[:256]).all()
    assert np.array_equal(result[256:], expected(host, row))


@pytest.mark.gpu
def test_threads_load_and_launch_at_once(rng: np.random.Generator) -> None:
    source = TMA + "// a kernel of this test, not loaded before\n"
    with kernel_loader.device_guard(0):
        host = matrix(rng)
        x = DeviceArray.from_numpy(host)
        outs = [DeviceArray.from_numpy(np.full(256 * 20, np.nan, np.float32)) for _ in range(8)]

    def many(thread: int) -> LoadedKernel:
        with kernel_loader.device_guard(0):
            k = load(source, "tile_of", TMA_KINDS)
            for i in range(20):
                launch(k, 1, [map_of(x), outs[thread].address, thread * 7 + i, 3, 256 * i, 0.5], 0, pdl=i % 2 == 0)
            return k

    with ThreadPoolExecutor(8) as pool:
        assert len(set(map(id, pool.map(many, range(8))))) == 1
    with kernel_loader.device_guard(0):
        for thread, out in enumerate(outs):
            want = np.concatenate([expected(host, min(thread * 7 + i, 64)) for i in range(20)])
            assert np.array_equal(out.numpy(), want)


@pytest.mark.gpu
def test_clusters_with_much_shared_memory() -> None:
    with kernel_loader.device_guard(0):
        k = load(PAIR, "pair", ("pointer",), threads=128, cluster=(2, 1, 1), shared_bytes=200 * 1024)
        clusters = k.max_active_clusters()
        assert 0 < clusters <= device_attributes(0).sm_count // 2
        out = DeviceArray.from_numpy(np.full(2 * clusters, -1, np.int32))
        launch(k, 2 * clusters, [out.address], 0)
        assert np.array_equal(out.numpy(), np.arange(2 * clusters))
        one = load(TMA, "tile_of", TMA_KINDS)
        assert one.max_active_clusters() >= device_attributes(0).sm_count


class FakeGraphs:
    """Records graphs: of each kernel's node its arguments, and the one that it depends on, with the edge's type."""

    def __init__(self, types: list[Any]) -> None:
        self.read, self.nodes, self.destroyed = FakeDriver(types, 0)._read, list[tuple[Any, ...]](), list[str]()

    def __getattr__(self, name: str) -> Any:
        from cuda.bindings import driver

        return getattr(driver, name)  # structures and constants

    def cuGraphCreate(self, flags: int) -> tuple[int, str]:
        return 0, "graph"

    def cuGraphAddNode(self, graph: str, after: list[int], edges: list[Any], count: int, node: Any) -> tuple[int, int]:
        x = node.kernel
        sizes = x.gridDimX, x.gridDimY, x.gridDimZ, x.blockDimX, x.blockDimY, x.blockDimZ, x.sharedMemBytes
        assert graph == "graph"
        assert count == len(after) == len(edges)
        assert node.type.name == "CU_GRAPH_NODE_TYPE_KERNEL"
        self.nodes.append(
            (int(x.func), sizes, self.read(x.kernelParams), after, [(e.type, e.from_port) for e in edges])
        )
        return 0, len(self.nodes)

    def cuGraphInstantiate(self, graph: str, flags: int) -> tuple[int, str]:
        return 0, "instance"

    def cuGraphDestroy(self, graph: str) -> tuple[int]:
        self.destroyed.append(graph)
        return (0,)

    def cuGraphExecDestroy(self, instance: str) -> tuple[int]:
        return self.cuGraphDestroy(instance)


def test_a_graph_collects_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """It copies their arguments; one that may begin early depends on the one before by a programmatic edge."""
    fake = FakeGraphs([ctypes.c_int32, ctypes.c_uint64])
    monkeypatch.setattr(cuda_graph, "bindings", lambda: fake)
    monkeypatch.setattr(kernel_loader, "bindings", lambda: SimpleNamespace(cuStreamIsCapturing=lambda stream: (0, 0)))
    k, stream, capturing = kernel(("i32", "pointer")), SimpleNamespace(handle=5), []

    def calls() -> None:
        for i, pdl in enumerate((True, False, True)):
            launch(k, 10 + i, [i, 256 * i], stream.handle, pdl)
        capturing.append(kernel_loader.is_capturing(stream.handle))

    graph = CudaGraph(calls, stream)  # type: ignore[arg-type]
    edges = [([], []), ([1], [(0, 0)]), ([2], [(1, 1)])]
    assert fake.nodes == [
        (0x88, (10 + i, 1, 1, 384, 1, 1, 200 * 1024), [i, 256 * i], *edge) for i, edge in enumerate(edges)
    ]
    assert capturing == [True]
    assert not kernel_loader.is_capturing(stream.handle)
    with pytest.raises(ZeroDivisionError):
        CudaGraph(lambda: 1 // 0, stream)  # type: ignore[arg-type]
    assert not kernel_loader.is_capturing(stream.handle)
    del graph
    assert fake.destroyed == ["graph", "graph", "instance"]


@pytest.mark.gpu
def test_the_guard_restores_what_was_current() -> None:
    from cuda.bindings import driver as cu

    def current() -> int:
        return int(check(cu.cuCtxGetCurrent()))

    with ThreadPoolExecutor(1) as pool:  # a new thread has no current context

        def nested() -> tuple[int, int, int, int]:
            before = current()
            with kernel_loader.device_guard(0):
                inside = current()
                with kernel_loader.device_guard(0):
                    pass
                again = current()
            return before, inside, again, current()

        before, inside, again, after = pool.submit(nested).result()
    assert before == after == 0
    assert inside == again != 0


@pytest.mark.gpu
def test_loading_while_a_graph_is_captured() -> None:
    from cuda.bindings import driver as cu

    source = PAIR + "// a kernel of this test, not loaded before\n"
    choices = {"threads": 128, "cluster": (2, 1, 1), "shared_bytes": 512}
    with kernel_loader.device_guard(0):
        stream = check(cu.cuStreamCreate(cu.CUstream_flags.CU_STREAM_NON_BLOCKING))
        out = DeviceArray.from_numpy(np.full(2, -1, np.int32))
        mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        check(cu.cuStreamBeginCapture(stream, mode))
        assert kernel_loader.is_capturing(int(stream))
        with pytest.raises(DeviceError, match="pair is not loaded yet"):
            load(source, "pair", ("pointer",), int(stream), **choices)
        check(cu.cuGraphDestroy(check(cu.cuStreamEndCapture(stream))))
        assert not kernel_loader.is_capturing(int(stream))
        k = load(source, "pair", ("pointer",), int(stream), **choices)
        check(cu.cuStreamBeginCapture(stream, mode))
        launch(load(source, "pair", ("pointer",), int(stream), **choices), 2, [out.address], int(stream))
        graph = check(cu.cuStreamEndCapture(stream))
        replay = check(cu.cuGraphInstantiate(graph, 0))
        assert out.numpy().tolist() == [-1, -1]
        check(cu.cuGraphLaunch(replay, stream))
        check(cu.cuStreamSynchronize(stream))
        assert out.numpy().tolist() == [0, 1]
        assert time_calls(lambda: launch(k, 2, [out.address], int(stream)), int(stream), 20) > 0
        check(cu.cuGraphExecDestroy(replay))
        check(cu.cuGraphDestroy(graph))
        check(cu.cuStreamDestroy(stream))
