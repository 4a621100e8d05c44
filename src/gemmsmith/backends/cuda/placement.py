"""On which SMs a grid's clusters run, and the order that gives neighboring tiles to clusters of one GPC.

SMs of one GPC that read the same bytes at about the same time are served by one request to the L2. The hardware
deals consecutive clusters out to the GPCs in turn, so consecutive tiles, which share operands, land in different
ones. A probe, run once a device and cluster size, finds which cluster lands in which GPC; clusters of a GPC then
are neighbors in the walk. It is a permutation in any case: a chip that places clusters otherwise only loses speed.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import numpy as np

from gemmsmith.backends.cuda.compiler import compile_source
from gemmsmith.backends.cuda.driver import attributes, check
from gemmsmith.backends.cuda.graphs import Stream
from gemmsmith.backends.cuda.memory import DeviceArray
from gemmsmith.core.errors import DeviceError
from gemmsmith.lang.types import ORDER_LENGTH

Array = np.ndarray[Any, Any]

_PROBE = """\
extern "C" __global__ void probe(unsigned* sm_of_cta)
{
    unsigned sm;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
    if (threadIdx.x == 0) sm_of_cta[blockIdx.x] = sm;
    // Long enough that every CTA is resident before the first is gone.
    const long long start = clock64();
    while (clock64() - start < 100000) {}
}
"""
_NEIGHBORS = (16, 12, 10, 8, 6, 4)
"""Cluster sizes used to find which SMs share a GPC: the CTAs of a cluster always run on one GPC."""


def walk_order(device: int, cluster: int, resident: int, clusters: int) -> tuple[int, ...]:
    """Where in the walk each of `clusters` clusters begins, of `cluster` CTAs each, `resident` at once: a permutation.

    At the first call for a device, cluster and `resident`, `device` is current and nothing is being captured.
    """
    placed = _gpc_of_cluster(device, cluster, resident)
    order = np.arange(ORDER_LENGTH)
    if clusters <= len(placed):
        order[np.argsort(placed[:clusters], kind="stable")] = np.arange(clusters)
    return tuple(order.tolist())


@lru_cache(maxsize=64)
def _gpc_of_cluster(device: int, cluster: int, resident: int) -> Array:
    """By index in the grid; empty, which means launch order, where the device cannot be probed."""
    try:
        return np.asarray(_gpc_of_sm(device)[_probe(device, cluster, resident)[::cluster]])
    except DeviceError:  # a part of a GPU, or a shared one
        return np.empty(0, int)


@lru_cache(maxsize=64)
def _gpc_of_sm(device: int) -> Array:
    """A number for each SM, the same for those known to share a GPC."""
    sms = attributes(device).multiprocessors
    group = np.arange(sms)
    for size in _NEIGHBORS:
        try:
            found = _probe(device, size, sms // size).reshape(-1, size)  # those that do not fit come later
        except DeviceError:  # sizes above 8 are not portable
            continue
        for members in found:
            group[np.isin(group, group[members])] = group[members].min()
    return group


def _probe(device: int, cluster: int, clusters: int) -> Array:
    """The SM of each CTA of a grid with one CTA a SM. Raises DeviceError."""
    from cuda.bindings import driver as cu

    function = _function(device)
    if clusters * cluster > attributes(device).multiprocessors:
        raise DeviceError("more CTAs than SMs")
    own = Stream()  # the default stream would wait for others, which may be being captured
    out = DeviceArray(4 * clusters * cluster, (clusters * cluster,), (4,), np.uint32, own.handle)
    config, attribute = cu.CUlaunchConfig(), cu.CUlaunchAttribute()
    attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    dimension = attribute.value.clusterDim
    dimension.x, dimension.y, dimension.z = cluster, 1, 1
    config.gridDimX, config.gridDimY, config.gridDimZ = clusters * cluster, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = 32, 1, 1
    config.sharedMemBytes = attributes(device).shared_bytes
    config.attrs, config.numAttrs = [attribute], 1
    arguments = ((out.address,), (ctypes.c_uint64,))
    config.hStream = own.handle
    check(cu.cuLaunchKernelEx(config, function, arguments, 0), f"the probe with clusters of {cluster}")
    return out.numpy().astype(int)


@lru_cache(maxsize=64)
def _function(device: int) -> object:
    from cuda.bindings import driver as cu

    module = check(cu.cuModuleLoadData(compile_source(_PROBE, "probe").cubin), "cuModuleLoadData(probe)")
    function = check(cu.cuModuleGetFunction(module, b"probe"), "cuModuleGetFunction(probe)")
    names = cu.CUfunction_attribute
    shared = names.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    check(cu.cuFuncSetAttribute(function, shared, attributes(device).shared_bytes), "cuFuncSetAttribute(probe)")
    large = names.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
    check(cu.cuFuncSetAttribute(function, large, 1), "cuFuncSetAttribute(probe)")
    return function


@lru_cache(maxsize=1024)
def _table(order: tuple[int, ...]) -> ctypes.Array[ctypes.c_uint16]:
    return (ctypes.c_uint16 * ORDER_LENGTH)(*order)


def order_address(order: tuple[int, ...]) -> int:
    """Where the launcher finds an order as the kernel's `Order`; kept for the life of the process."""
    return ctypes.addressof(_table(order))
