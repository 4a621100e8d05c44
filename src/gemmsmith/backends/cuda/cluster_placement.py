"""The placement of a grid's clusters on GPCs, and the permutation by which neighboring tiles go to one GPC.

SMs of one GPC that read the same bytes at about the same time are served by one request to the L2. The hardware
distributes consecutive clusters round-robin over the GPCs, so that consecutive tiles, which share operands, run on
different ones. (Without clusters they run on the same one.) A probe, run once per device and cluster size, finds the
GPC of each cluster; the clusters of a GPC then get consecutive raster positions. If a kernel's clusters are placed in
another way than the probe's, only speed is lost.
"""

from __future__ import annotations

import ctypes
import time
from functools import cache
from typing import Any

import numpy as np

from gemmsmith.backends.cuda.compiler import compile_source
from gemmsmith.backends.cuda.cuda_graph import Stream
from gemmsmith.backends.cuda.driver import bindings, check, device_attributes, launch_config, load_function
from gemmsmith.backends.cuda.memory import DeviceArray
from gemmsmith.core.errors import DeviceError
from gemmsmith.hw.cluster import MAX_CLUSTERS

Array = np.ndarray[Any, Any]

PROBE = """\
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
"""Cluster sizes with which the probe finds the SMs of a GPC: the CTAs of a cluster run on one GPC."""
_MAX_SMS = 1024
"""More than the largest SM id, which is not the number of SMs in a MIG instance."""
_PAUSES_MS = (0, 1, 2, 4, 8, 16, 32, 64)
"""Pauses between probes while other kernels occupy SMs."""


@cache
def cluster_permutation(device: int, cluster: int, active: int, clusters: int) -> ctypes.Array[ctypes.c_uint16]:
    """Return each launched cluster's position in the order of the tiles: adjacent ones for clusters of one GPC.

    It is a CLUSTER_PERMUTATION, and the identity if the device cannot be probed, or if more clusters are launched
    than fit with one CTA per SM. `active`: clusters of `cluster` CTAs that are active at once. The first call for a
    device and `cluster` runs the probe, so the device must be current, and no stream may be being captured.
    """
    positions = np.arange(MAX_CLUSTERS)
    gpcs = _gpc_of_cluster(device, cluster, min(active, device_attributes(device).sm_count // cluster))
    if clusters <= len(gpcs):
        positions[np.argsort(gpcs[:clusters], kind="stable")] = np.arange(clusters)
    return (ctypes.c_uint16 * MAX_CLUSTERS)(*positions.tolist())


@cache
def _gpc_of_cluster(device: int, cluster: int, clusters: int) -> Array:
    """Return the GPC of each cluster, by its index in the grid; none if the device cannot be probed."""
    try:
        for pause in _PAUSES_MS:
            time.sleep(pause / 1000)
            first, second = (_probe_sms(device, cluster, clusters) for _ in range(2))
            if np.mean(first == second) > 0.9 and len(np.unique(first)) == first.size:  # else SMs were not free
                return np.asarray(_gpc_of_sm(device)[first[:, 0]])
    except DeviceError:  # a GPU shared with other processes
        pass
    return np.empty(0, int)


@cache
def _gpc_of_sm(device: int) -> Array:
    """Return a GPC id for each SM id; SMs that ran CTAs of one cluster have the same."""
    gpcs = np.arange(_MAX_SMS)
    for size in _PROBE_CLUSTER_SIZES:
        try:
            found = _probe_sms(device, size, device_attributes(device).sm_count // size)  # some run after others
        except DeviceError:  # cluster sizes above 8 are not portable
            continue
        for sms in found:
            gpcs[np.isin(gpcs, gpcs[sms])] = gpcs[sms].min()
    return gpcs


def _probe_sms(device: int, cluster: int, clusters: int) -> Array:
    """Launch `clusters` clusters of `cluster` CTAs; return the SM ids of their CTAs. Raises DeviceError.

    Each CTA requests all shared memory of an SM, so no two of them share one.
    """
    function, shared_bytes = _load_probe(device), device_attributes(device).max_shared_bytes_per_cta
    stream = Stream()  # the default stream would wait for other streams, which may be being captured
    out = DeviceArray(4 * clusters * cluster, (clusters, cluster), (4 * cluster, 4), np.uint32, stream.handle)
    config = launch_config(clusters * cluster, 32, shared_bytes, (cluster, 1, 1))
    config.hStream = stream.handle
    arguments = ((out.address,), (ctypes.c_uint64,))
    check(bindings().cuLaunchKernelEx(config, function, arguments, 0), f"the probe with clusters of {cluster}")
    return out.numpy().astype(int)


@cache
def _load_probe(device: int) -> object:
    """Return the probe kernel, loaded on a device; clusters of up to 16 CTAs may launch it."""
    cu, shared_bytes = bindings(), device_attributes(device).max_shared_bytes_per_cta
    function = load_function(compile_source(PROBE, "probe").cubin, "probe", shared_bytes)
    large = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
    check(cu.cuFuncSetAttribute(function, large, 1), "cuFuncSetAttribute(probe)")
    return function
