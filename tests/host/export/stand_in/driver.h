/* A driver that prints what it gets. A tensor map is its numbers: address, extents, strides, box, dtype and swizzle. */
#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int resident = 66;
static const char *kinds_of_function[64]; /* the size of each parameter: 4, 8, t: a tensor map, o: the order */

static CUresult load_data(CUmodule *module, const void *image) {
    *module = (CUmodule)(intptr_t)image;
    return 0;
}
static CUresult unload(CUmodule module) { return !module; }
static CUresult get_function(CUfunction *function, CUmodule module, const char *name) {
    static intptr_t count = 0;
    *function = (CUfunction)++count;
    return !module || !*name;
}
static CUresult set_attribute(CUfunction function, CUfunction_attribute attribute, int value) {
    const int is_known = attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES || attribute == CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED;
    return !function || !is_known || (attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES && value <= 48 * 1024);
}
static CUresult get_device(CUdevice *device) { return *device = 0; }
static CUresult get_device_attribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    *value = attribute == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT ? 132 : attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR ? 9 : 0;
    return device;
}
static CUresult max_blocks(int *blocks, CUfunction function, int threads, size_t shared_bytes) {
    *blocks = 1;
    return !function || threads % 32 || shared_bytes > 227 * 1024;
}
static CUresult max_clusters(int *clusters, CUfunction function, const CUlaunchConfig *config) {
    *clusters = resident;
    return !function || config->gridDimX != config->attrs->value.clusterDim.x;
}
static CUresult encode(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address, const cuuint64_t *extents,
                       const cuuint64_t *strides, const cuuint32_t *box, const cuuint32_t *steps, CUtensorMapInterleave interleave,
                       CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
    uint64_t numbers[16] = {(uint64_t)(intptr_t)address, (uint64_t)type * 256 + (uint64_t)swizzle};
    cuuint32_t i;
    int is_wrong = rank < 3 || rank > 5 || (int)interleave || promotion != CU_TENSOR_MAP_L2_PROMOTION_L2_128B || (int)fill;
    for (i = 0; i < rank; ++i) {
        numbers[2 + i] = extents[i] << 32 | box[i]; /* neither has more than 32 bits */
        if (i + 1 < rank) numbers[7 + i] = strides[i];
        is_wrong |= steps[i] != 1;
    }
    if ((intptr_t)map % 64) abort(); /* as cuTensorMapEncodeTiled requires */
    memcpy(map, numbers, sizeof numbers);
    return is_wrong;
}
/* The SMs of a probe's CTAs: clusters go round-robin over eleven GPCs of twelve SMs. */
static CUresult probe(const CUlaunchConfig *config, uint32_t *sms) {
    unsigned i, size = config->attrs->value.clusterDim.x;
    for (i = 0; i < config->gridDimX; ++i) sms[i] = (i / size / 11 * size + i % size) % 12 * 11 + i / size % 11;
    return size > 12;
}
static CUresult launch(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
    const intptr_t index = (intptr_t)function - 1;
    const char *kind = kinds_of_function[index] ? kinds_of_function[index] : "";
    if (config->numAttrs && config->attrs->id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) return probe(config, *(uint32_t **)*parameters);
    printf(" | %d %u %u %u %u", (int)index, config->gridDimX, config->blockDimX, config->sharedMemBytes, config->numAttrs);
    for (; *kind; ++kind, ++parameters) {
        uint64_t numbers[16] = {0};
        int i, count = 1;
        if (*kind == '4') memcpy(numbers, *parameters, 4);
        else if (*kind == '8') memcpy(numbers, *parameters, 8);
        else if (*kind == 't') memcpy(numbers, *parameters, sizeof numbers), count = 16;
        for (i = 0; i < count && *kind != 'o'; ++i) printf(" %llu", (unsigned long long)numbers[i]);
        for (i = 0; i < 288 && *kind == 'o'; ++i) printf(" %d", ((uint16_t *)*parameters)[i]);
    }
    return config->gridDimY != 1 || config->gridDimZ != 1 || extra != NULL;
}
static CUresult host_alloc(void **address, size_t bytes, unsigned flags) {
    *address = malloc(bytes);
    return !*address || flags;
}
static CUresult free_host(void *address) { return free(address), 0; }
static CUresult synchronize(CUstream stream) { return !stream; }
static void *find(void *context, const char *name) {
    static const struct { const char *name; void (*function)(void); } all[] = {
        {"cuModuleLoadData", (void (*)(void))load_data}, {"cuModuleUnload", (void (*)(void))unload},
        {"cuModuleGetFunction", (void (*)(void))get_function}, {"cuFuncSetAttribute", (void (*)(void))set_attribute},
        {"cuCtxGetDevice", (void (*)(void))get_device}, {"cuDeviceGetAttribute", (void (*)(void))get_device_attribute},
        {"cuOccupancyMaxActiveBlocksPerMultiprocessor", (void (*)(void))max_blocks},
        {"cuOccupancyMaxActiveClusters", (void (*)(void))max_clusters},
        {"cuTensorMapEncodeTiled", (void (*)(void))encode}, {"cuLaunchKernelEx", (void (*)(void))launch},
        {"cuMemHostAlloc", (void (*)(void))host_alloc}, {"cuMemFreeHost", (void (*)(void))free_host},
        {"cuStreamSynchronize", (void (*)(void))synchronize}};
    size_t i;
    for (i = 0; i < sizeof all / sizeof *all; ++i)
        if (!strcmp(all[i].name, name)) {
            void *found;
            memcpy(&found, &all[i].function, sizeof found);
            return found;
        }
    return context;
}
