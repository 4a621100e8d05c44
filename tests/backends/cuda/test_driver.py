"""The driver: what is said where there is none, no GPU or another GPU; attributes and tensor maps on a Hopper."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gemmsmith.backends.cuda import driver
from gemmsmith.core.arguments import TensorMap
from gemmsmith.core.dtypes import BF16, FP16, FP32, DType
from gemmsmith.core.errors import DeviceError

MAP = TensorMap(1 << 40, BF16, (4096, 300, 2), (8192, 1 << 20), (64, 128, 1), 128)


@pytest.fixture
def forgotten() -> Iterator[None]:
    """Devices are asked for again, in the test and after it."""
    found = (driver.device_attributes, driver.require_chip, driver.encode_tensor_map)
    for each in found:
        each.cache_clear()
    yield
    for each in found:
        each.cache_clear()


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch, forgotten: None) -> None:
    monkeypatch.setattr(driver, "_driver_error", lambda: "no CUDA driver: libcuda.so.1 is not there")


@pytest.mark.usefixtures("no_driver")
def test_without_a_driver_every_call_says_so() -> None:
    assert not driver.is_available()
    for call in (
        lambda: driver.require_chip(0),
        lambda: driver.device_attributes(0),
        lambda: driver.encode_tensor_map(MAP),
    ):
        with pytest.raises(DeviceError, match="libcuda.so.1 is not there.*'sim' or 'reference'"):
            call()


@pytest.mark.usefixtures("forgotten")
def test_a_driver_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_driver_error", lambda: "")
    monkeypatch.setattr(driver, "device_count", lambda: 0)
    assert not driver.is_available()
    with pytest.raises(DeviceError, match="device: got 0, this process sees 0 GPU"):
        driver.require_chip(0)


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize("device", [-1, 2])
def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch, device: int) -> None:
    monkeypatch.setattr(driver, "_driver_error", lambda: "")
    monkeypatch.setattr(driver, "device_count", lambda: 2)
    with pytest.raises(DeviceError, match=f"device: got {device}, this process sees 2 GPU"):
        driver.require_chip(device)


@pytest.mark.usefixtures("forgotten")
def test_another_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        driver, "device_attributes", lambda _: driver.DeviceAttributes("NVIDIA A100", (8, 0), 108, 166912)
    )
    with pytest.raises(DeviceError, match="device 0 is a NVIDIA A100 of compute capability 8.0.*Hopper"):
        driver.require_chip(0)


def test_an_error_names_the_drivers_error_and_the_call() -> None:
    from cuda.bindings import driver as cu

    with pytest.raises(DeviceError, match=r"CUDA_ERROR_INVALID_VALUE in cuSomething\(3\)"):
        driver.check((cu.CUresult.CUDA_ERROR_INVALID_VALUE,), "cuSomething(3)")
    assert driver.check((cu.CUresult.CUDA_SUCCESS, 5)) == 5
    assert driver.check((cu.CUresult.CUDA_SUCCESS, 5, 6)) == (5, 6)
    assert driver.check((cu.CUresult.CUDA_SUCCESS,)) == ()


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize(
    ("dtype", "kind", "swizzle", "mode"),
    [
        (BF16, "BFLOAT16", 128, "128B"), (FP16, "FLOAT16", 64, "64B"),
        (FP32, "FLOAT32", 32, "32B"), (FP32, "FLOAT32", 0, "NONE"),
    ],
)  # fmt: skip
def test_what_a_tensor_map_is_encoded_from(
    monkeypatch: pytest.MonkeyPatch, dtype: DType, kind: str, swizzle: int, mode: str
) -> None:
    from cuda.bindings import driver as cu

    calls = []

    def encode(*arguments: object) -> tuple[object, object]:
        calls.append(arguments)
        return cu.CUresult.CUDA_SUCCESS, cu.CUtensorMap()

    monkeypatch.setattr(driver, "_driver_error", lambda: "")
    monkeypatch.setattr(cu, "cuTensorMapEncodeTiled", encode)
    given = TensorMap(64, dtype, (40, 30, 2), (160, 4800), (8, 16, 1), swizzle)
    equal = TensorMap(64, dtype, (40, 30, 2), (160, 4800), (8, 16, 1), swizzle)
    assert driver.encode_tensor_map(given) is driver.encode_tensor_map(equal)
    (call,) = calls
    numbers = [[int(x) for x in argument] for argument in call[3:7]]
    assert numbers == [[40, 30, 2], [160, 4800], [8, 16, 1], [1, 1, 1]]
    assert call[1:3] == (3, 64)
    assert call[0].name == f"CU_TENSOR_MAP_DATA_TYPE_{kind}"
    assert [x.name for x in call[7:]] == [
        "CU_TENSOR_MAP_INTERLEAVE_NONE", f"CU_TENSOR_MAP_SWIZZLE_{mode}",
        "CU_TENSOR_MAP_L2_PROMOTION_L2_128B", "CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE",
    ]  # fmt: skip


def test_the_cache_of_tensor_maps_is_bounded() -> None:
    assert driver.encode_tensor_map.cache_info().maxsize == driver.MAX_CACHED_TENSOR_MAPS


@pytest.mark.gpu
def test_a_hopper() -> None:
    driver.require_chip(0)
    found = driver.device_attributes(0)
    assert found.capability == (9, 0)
    assert found.sm_count > 0
    assert found.max_shared_bytes_per_cta == 227 * 1024
    assert found.name.isprintable()
    with pytest.raises(DeviceError, match="this process sees"):
        driver.require_chip(1000)


@pytest.mark.gpu
def test_a_map_the_driver_refuses_is_named() -> None:
    from gemmsmith.backends.cuda import kernel_loader

    refused = pytest.raises(DeviceError, match="CUDA_ERROR_INVALID_VALUE in cuTensorMapEncodeTiled.*address=8")
    with kernel_loader.device_guard(0), refused:
        driver.encode_tensor_map(TensorMap(8, FP16, (8, 1, 1), (16, 0), (8, 1, 1), 0))
