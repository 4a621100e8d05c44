/* driver.h as a library, libcuda.so.1, whose device memory is the host's. Kernels compute nothing.
 *
 * STAND_IN_KINDS: the sizes of the parameters of each function in the order of loading, with spaces between.
 */
#include "driver.h"

__attribute__((constructor)) static void read_kinds(void) {
    char *kinds = getenv("STAND_IN_KINDS");
    size_t i;
    kinds = strtok(strdup(kinds ? kinds : ""), " ");
    for (i = 0; kinds; ++i, kinds = strtok(NULL, " ")) kinds_of_function[i] = kinds;
}
CUresult cuInit(unsigned int flags) { return flags ? 1 : getenv("STAND_IN_NO_GPU") ? 100 : 0; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { return (*device = ordinal) > 7 ? 101 : 0; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    *context = (CUcontext)(intptr_t)(device + 1);
    return 0;
}
CUresult cuCtxSetCurrent(CUcontext context) { return !context; }
static CUcontext contexts[8];
static int pushed;
CUresult cuCtxPushCurrent(CUcontext context) { return contexts[pushed++] = context, !context; }
CUresult cuCtxPopCurrent(CUcontext *context) { return *context = contexts[--pushed], !*context; }
CUresult cuMemAlloc(CUdeviceptr *address, size_t bytes) {
    *address = (CUdeviceptr)(intptr_t)aligned_alloc(256, (bytes + 255) / 256 * 256);
    return !*address;
}
CUresult cuMemFree(CUdeviceptr address) { return free((void *)(intptr_t)address), 0; }
CUresult cuMemsetD8(CUdeviceptr address, unsigned char value, size_t bytes) {
    return memset((void *)(intptr_t)address, value, bytes), 0;
}
CUresult cuMemsetD8Async(CUdeviceptr address, unsigned char value, size_t bytes, CUstream stream) {
    printf(" | memset %d %zu %d", value, bytes, (int)(intptr_t)stream);
    return cuMemsetD8(address, value, bytes);
}
CUresult cuMemcpyHtoD(CUdeviceptr to, const void *from, size_t bytes) { return memcpy((void *)(intptr_t)to, from, bytes), 0; }
CUresult cuMemcpyDtoH(void *to, CUdeviceptr from, size_t bytes) { return memcpy(to, (void *)(intptr_t)from, bytes), 0; }
CUresult cuStreamCreate(CUstream *stream, unsigned int flags) {
    *stream = (CUstream)(intptr_t)7;
    return flags;
}
CUresult cuStreamDestroy(CUstream stream) { return !stream; }
CUresult cuStreamBeginCapture(CUstream stream, CUstreamCaptureMode mode) {
    printf(" | capture");
    return !stream || mode != CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
}
CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph) {
    printf(" | captured");
    *graph = (CUgraph)stream;
    return !stream;
}
CUresult cuGraphInstantiate(CUgraphExec *executable, CUgraph graph, unsigned long long flags) {
    *executable = (CUgraphExec)graph;
    return flags != 0;
}
CUresult cuGraphLaunch(CUgraphExec executable, CUstream stream) {
    printf(" | graph");
    return !executable || !stream;
}
CUresult cuGraphExecDestroy(CUgraphExec executable) { return !executable; }
CUresult cuGraphDestroy(CUgraph graph) { return !graph; }

#define EXPORT(name, function) __typeof__(function) name __attribute__((alias(#function)));
EXPORT(cuModuleLoadData, load_data)
EXPORT(cuModuleUnload, unload)
EXPORT(cuModuleGetFunction, get_function)
EXPORT(cuFuncSetAttribute, set_attribute)
EXPORT(cuCtxGetDevice, get_device)
EXPORT(cuDeviceGetAttribute, get_device_attribute)
EXPORT(cuOccupancyMaxActiveBlocksPerMultiprocessor, max_blocks)
EXPORT(cuOccupancyMaxActiveClusters, max_clusters)
EXPORT(cuTensorMapEncodeTiled, encode)
EXPORT(cuMemHostAlloc, host_alloc)
EXPORT(cuMemFreeHost, free_host)
EXPORT(cuStreamSynchronize, synchronize)
CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
    const CUresult result = launch(config, function, parameters, extra);
    if (config->hStream != CU_STREAM_PER_THREAD) printf(" stream %d", (int)(intptr_t)config->hStream);
    return result;
}
