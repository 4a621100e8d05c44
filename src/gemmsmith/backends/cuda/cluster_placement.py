"""The placement of a grid's clusters on GPCs, and the cluster permutation that keeps neighboring tiles in one GPC.

SMs of one GPC that read the same bytes at about the same time are served by one request to the L2. The hardware
distributes consecutive clusters round-robin over the GPCs, so that consecutive tiles, which share operands, run in
different GPCs. A probe, run once per device and cluster size, determines the GPC of each cluster; the clusters of a
GPC then get consecutive raster positions. The result is a permutation in any case: on a chip that places clusters in
another way, only speed is lost.
"""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache
from typing import Any

import numpy as np

from gemmsmith.backends.cuda.compiler import compile_source
from gemmsmith.backends.cuda.cuda_graph import Stream
from gemmsmith.backends.cuda.driver import bindings, check, device_attributes, launch_config, load_function
from gemmsmith.backends.cuda.memory import DeviceArray
from gemmsmith.core.errors import DeviceError
from gemmsmith.hw.cluster import MAX_CLUSTERS

Array = np.ndarray[Any, Any]

_PROBE = """\
extern "C" __global__ void probe(unsigned* sm_of_cta)
{
    unsigned sm;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
    if (threadIdx.x == 0) sm_of_cta[blockIdx.x] = sm;
    // Long enough that every CTA is resident before the first one exits.
    const long long start = clock64();
    while (clock64() - start < 100000) {}
}
"""
_PROBE_CLUSTER_SIZES = (16, 12, 10, 8, 6, 4)
"""Cluster sizes with which the probe determines the SMs of a GPC: the CTAs of a cluster always run on one GPC."""


@cache
def cluster_permutation(device: int, cluster: int, resident: int, clusters: int) -> tuple[int, ...]:
    """Return each launched cluster's position in the order of the tiles: adjacent ones for clusters of one GPC.

    It has MAX_CLUSTERS entries; it is the identity if the device cannot be probed, or if more clusters are launched
    than are `resident` at once, with one CTA per SM. The first call for a device, `cluster` (CTAs) and `resident` runs
    the probe, so the device must be current, and no stream may be being captured.
    """
    gpcs = _gpc_of_cluster(device, cluster, resident)
    positions = np.arange(MAX_CLUSTERS)
    if clusters <= len(gpcs):
        positions[np.argsort(gpcs[:clusters], kind="stable")] = np.arange(clusters)
    return tuple(positions.tolist())


@cache
def _gpc_of_cluster(device: int, cluster: int, resident: int) -> Array:
    """Return the GPC of each of `resident` clusters, by its index in the grid; empty if the device cannot be probed.

    A cluster runs on one GPC, so the SM of its first CTA suffices.
    """
    try:
        return np.asarray(_gpc_of_sm(device)[_probe_sms(device, cluster, resident)[::cluster]])
    except DeviceError:  # a MIG instance, or a GPU shared with other processes
        return np.empty(0, int)


@lru_cache(maxsize=64)
def _gpc_of_sm(device: int) -> Array:
    """Return a GPC id for each SM; SMs that ran CTAs of one cluster have the same id.

    The CTAs of a cluster always run on one GPC. So each cluster that the probe launches merges the ids of its SMs.
    """
    sms = device_attributes(device).sm_count
    gpcs = np.arange(sms)
    for size in _PROBE_CLUSTER_SIZES:
        try:
            clusters = _probe_sms(device, size, sms // size).reshape(-1, size)  # clusters that do not fit run later
        except DeviceError:  # cluster sizes above 8 are not portable
            continue
        for cluster in clusters:
            gpcs[np.isin(gpcs, gpcs[cluster])] = gpcs[cluster].min()
    return gpcs


def _probe_sms(device: int, cluster: int, clusters: int) -> Array:
    """Launch `clusters` clusters of `cluster` CTAs, one CTA per SM; return the SM id of each CTA. Raises DeviceError.

    Each CTA requests all shared memory of an SM, so no two of them share one.
    """
    function, gpu = _load_probe(device), device_attributes(device)
    stream = Stream()  # the default stream would wait for other streams, which may be being captured
    out = DeviceArray(4 * clusters * cluster, (clusters * cluster,), (4,), np.uint32, stream.handle)
    config = launch_config(clusters * cluster, 32, gpu.max_shared_bytes_per_cta, (cluster, 1, 1))
    config.hStream = stream.handle
    arguments = ((out.address,), (ctypes.c_uint64,))
    check(bindings().cuLaunchKernelEx(config, function, arguments, 0), f"the probe with clusters of {cluster}")
    return out.numpy().astype(int)


@lru_cache(maxsize=64)
def _load_probe(device: int) -> object:
    """Return the probe kernel, loaded on a device; clusters of up to 16 CTAs may launch it."""
    cu, shared_bytes = bindings(), device_attributes(device).max_shared_bytes_per_cta
    function = load_function(compile_source(_PROBE, "probe").cubin, "probe", shared_bytes)
    large = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
    check(cu.cuFuncSetAttribute(function, large, 1), "cuFuncSetAttribute(probe)")
    return function


@cache  # as many as grids that are resident at once
def _encode_permutation(permutation: tuple[int, ...]) -> ctypes.Array[ctypes.c_uint16]:
    return (ctypes.c_uint16 * MAX_CLUSTERS)(*permutation)


def permutation_address(permutation: tuple[int, ...]) -> int:
    """Return the host address of a permutation in the layout of the kernel parameter `ClusterPermutation`.

    The memory is never freed, since launches refer to it by address.
    """
    return ctypes.addressof(_encode_permutation(permutation))
