/* <!-- about -->
 *
 * One kernel set for one context: <!-- name -->_load in the context, then <!-- name -->_launch on any of its streams, from any threads; at last
 * <!-- name -->_unload. All arrays are on the device. A launch allocates nothing and may be captured into a graph.
 *
 * Include cuda.h's folder; nothing is linked. The driver's functions are found by name, such as by dlsym of libcuda.so.1
 * or cuGetProcAddress. C99 or C++.
 */
#ifndef <!-- name -->_H
#define <!-- name -->_H

#include <cuda.h>
#include <stdint.h>
#include <string.h>

typedef struct {
<!-- arguments -->
    void *workspace; /* <!-- name -->_workspace_bytes, of any contents, aligned to 256 bytes; may be used again afterwards */
    int64_t workspace_bytes;
    void *flags; /* <!-- name -->_flag_bytes, aligned to 256 bytes, which were zero before the first launch; of one stream only, or
                  * of one launch in a graph */
    int64_t flag_bytes;
} <!-- name -->_args;

enum {
    <!-- name -->_OK = 0,
    <!-- name -->_ERROR_SIZE = 1,
    <!-- name -->_ERROR_LAYOUT = 2,
    <!-- name -->_ERROR_OVERLAP = 3,
    <!-- name -->_ERROR_WORKSPACE = 4,
    <!-- name -->_ERROR_FLAGS = 5,
    <!-- name -->_ERROR_DEVICE = 6,
    <!-- name -->_ERROR_DRIVER = 1000 /* and more: 1000 + the driver's CUresult */
};

static inline const char *<!-- name -->_error(int status) {
    switch (status) {
    case <!-- name -->_OK: return "no error";
    case <!-- name -->_ERROR_SIZE: return "a size, a stride or a pointer is negative, null or too large";
    case <!-- name -->_ERROR_LAYOUT: return "a pointer or a row is not aligned to 16 bytes, or the sizes are not those of the kernel";
    case <!-- name -->_ERROR_OVERLAP: return "a result overlaps itself or another array";
    case <!-- name -->_ERROR_WORKSPACE: return "workspace is null, not aligned or smaller than workspace_bytes says";
    case <!-- name -->_ERROR_FLAGS: return "flags is null, not aligned or smaller than flag_bytes says";
    case <!-- name -->_ERROR_DEVICE: return "the context's device is not one of <!-- target -->, or cannot hold one cluster";
    default: return status >= <!-- name -->_ERROR_DRIVER ? "an error of the driver: status - 1000 is its CUresult" : "unknown";
    }
}

/* -- the driver -------------------------------------------------------------------------------------------------- */
typedef struct {
    CUresult (CUDAAPI *cuModuleLoadData)(CUmodule *, const void *);
    CUresult (CUDAAPI *cuModuleUnload)(CUmodule);
    CUresult (CUDAAPI *cuModuleGetFunction)(CUfunction *, CUmodule, const char *);
    CUresult (CUDAAPI *cuFuncSetAttribute)(CUfunction, CUfunction_attribute, int);
    CUresult (CUDAAPI *cuCtxGetDevice)(CUdevice *);
    CUresult (CUDAAPI *cuDeviceGetAttribute)(int *, CUdevice_attribute, CUdevice);
    CUresult (CUDAAPI *cuOccupancyMaxActiveBlocksPerMultiprocessor)(int *, CUfunction, int, size_t);
    CUresult (CUDAAPI *cuOccupancyMaxActiveClusters)(int *, CUfunction, const CUlaunchConfig *);
    CUresult (CUDAAPI *cuTensorMapEncodeTiled)(
        CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
        const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
    CUresult (CUDAAPI *cuLaunchKernelEx)(const CUlaunchConfig *, CUfunction, void **, void **);
    CUresult (CUDAAPI *cuMemHostAlloc)(void **, size_t, unsigned);
    CUresult (CUDAAPI *cuMemFreeHost)(void *);
    CUresult (CUDAAPI *cuStreamSynchronize)(CUstream);
} <!-- name -->_driver;

/* Finds the driver's functions by find(context, name); 0 if one is missing. */
static inline int <!-- name -->_find_driver(<!-- name -->_driver *driver, void *(*find)(void *, const char *), void *context) {
    static const char *const names[] = {
        "cuModuleLoadData", "cuModuleUnload", "cuModuleGetFunction", "cuFuncSetAttribute", "cuCtxGetDevice",
        "cuDeviceGetAttribute", "cuOccupancyMaxActiveBlocksPerMultiprocessor", "cuOccupancyMaxActiveClusters",
        "cuTensorMapEncodeTiled", "cuLaunchKernelEx", "cuMemHostAlloc", "cuMemFreeHost", "cuStreamSynchronize"};
    size_t i;
    for (i = 0; i < sizeof names / sizeof *names; ++i) {
        void *found = find(context, names[i]);
        if (!found) return 0;
        memcpy((char *)driver + i * sizeof found, &found, sizeof found); /* an object pointer is none to a function in C */
    }
    return 1;
}

/* -- the arguments of the launches ------------------------------------------------------------------------------- */
/* Integers do not overflow: results beyond 64 bits are the nearest that fits. Divisions round down; x / 0 is 0. */
static inline int64_t <!-- name -->_mul_(int64_t a, int64_t b) {
    if (a && b) {
        const int is_negative = (a < 0) != (b < 0);
        if (a == INT64_MIN || b == INT64_MIN || (a < 0 ? -a : a) > INT64_MAX / (b < 0 ? -b : b))
            return is_negative ? INT64_MIN : INT64_MAX;
    }
    return a * b;
}
static inline int64_t <!-- name -->_add_(int64_t a, int64_t b) {
    if (b > 0 ? a > INT64_MAX - b : a < INT64_MIN - b) return b > 0 ? INT64_MAX : INT64_MIN;
    return a + b;
}
static inline int64_t <!-- name -->_neg_(int64_t a) { return a == INT64_MIN ? INT64_MAX : -a; }
static inline int64_t <!-- name -->_sub_(int64_t a, int64_t b) { return <!-- name -->_add_(a, <!-- name -->_neg_(b)); }
static inline int64_t <!-- name -->_div_(int64_t a, int64_t b) {
    if (!b || (a == INT64_MIN && b == -1)) return b ? INT64_MAX : 0;
    return a / b - (a % b != 0 && (a < 0) != (b < 0));
}
static inline int64_t <!-- name -->_mod_(int64_t a, int64_t b) {
    if (!b || b == -1) return 0;
    return a % b + (a % b != 0 && (a < 0) != (b < 0) ? b : 0);
}
static inline int64_t <!-- name -->_ceil_div_(int64_t a, int64_t b) { return <!-- name -->_neg_(<!-- name -->_div_(<!-- name -->_neg_(a), b)); }
static inline int64_t <!-- name -->_shl_(int64_t a, int64_t b) {
    return b < 0 || b > 62 ? 0 : <!-- name -->_mul_(a, (int64_t)((uint64_t)1 << b));
}
static inline int64_t <!-- name -->_shr_(int64_t a, int64_t b) {
    return b < 0 || b > 62 ? 0 : <!-- name -->_div_(a, (int64_t)((uint64_t)1 << b));
}
static inline int64_t <!-- name -->_inverse_bits_(int64_t a) { /* of 1 / a as fp32 */
    const float x = a ? (float)(1.0 / (double)a) : 0;
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}
static inline int64_t <!-- name -->_bit_length_(int64_t a) {
    uint64_t rest = a < 0 ? (uint64_t)<!-- name -->_neg_(a) : (uint64_t)a;
    int64_t bits = 0;
    for (; rest; rest >>= 1) ++bits;
    return bits;
}

static inline int <!-- name -->_overlap_(const void *a, int64_t a_bytes, const void *b, int64_t b_bytes) {
    const int64_t first = (int64_t)(intptr_t)a, second = (int64_t)(intptr_t)b;
    return a_bytes > 0 && b_bytes > 0 && first < <!-- name -->_add_(second, b_bytes) && second < <!-- name -->_add_(first, a_bytes);
}

/* Whether elements of an array share memory: ordered by their strides, a dimension does not reach over those within. */
static inline int <!-- name -->_shares_(int64_t n0, int64_t n1, int64_t n2, int64_t s0, int64_t s1, int64_t s2) {
    int64_t sizes[3], strides[3], last = 0;
    int i, j;
    sizes[0] = n0, sizes[1] = n1, sizes[2] = n2;
    strides[0] = s0, strides[1] = s1, strides[2] = s2;
    for (i = 0; i < 3; ++i) { /* the least stride of those that are left */
        int least = -1;
        for (j = 0; j < 3; ++j)
            if (sizes[j] > 1 && (least < 0 || strides[j] < strides[least])) least = j;
        if (least < 0) break;
        if (strides[least] <= last) return 1;
        last = <!-- name -->_add_(last, <!-- name -->_mul_(sizes[least] - 1, strides[least]));
        sizes[least] = 1;
    }
    return 0;
}

typedef struct {
    int64_t error, workspace_bytes, flag_bytes;
<!-- numbers -->
} <!-- name -->_numbers_;

static inline void <!-- name -->_compute_(const <!-- name -->_args *x, <!-- name -->_numbers_ *out) {
<!-- operations -->
}

/* The status of a launch with these arguments, but for the workspace and the flags. */
static inline int <!-- name -->_check_(const <!-- name -->_args *x, <!-- name -->_numbers_ *out) {
    memset(out, 0, sizeof *out);
<!-- checks -->
    <!-- name -->_compute_(x, out);
    return out->error ? <!-- name -->_ERROR_LAYOUT : <!-- name -->_OK;
}

static inline int <!-- name -->_supports(const <!-- name -->_args *x) {
    <!-- name -->_numbers_ numbers;
    return <!-- name -->_check_(x, &numbers);
}

/* Bytes of `workspace` and of `flags` that a launch needs; 0 if its arguments are not supported. */
static inline int64_t <!-- name -->_workspace_bytes(const <!-- name -->_args *x) {
    <!-- name -->_numbers_ numbers;
    return <!-- name -->_check_(x, &numbers) ? 0 : numbers.workspace_bytes;
}
static inline int64_t <!-- name -->_flag_bytes(const <!-- name -->_args *x) {
    <!-- name -->_numbers_ numbers;
    return <!-- name -->_check_(x, &numbers) ? 0 : numbers.flag_bytes;
}

/* -- the kernels -------------------------------------------------------------------------------------------------- */
<!-- images -->
static const struct {
    const unsigned char *image;
    const char *name;
    int threads, cluster, shared_bytes;
} <!-- name -->_kernels_[] = {
<!-- kernels -->
};
#define <!-- name -->_COUNT_ (sizeof <!-- name -->_kernels_ / sizeof *<!-- name -->_kernels_)

typedef struct {
    <!-- name -->_driver driver;
    CUmodule modules[<!-- count -->];
    CUfunction functions[<!-- count -->];
    int64_t resident[<!-- count -->]; /* clusters of each kernel that the device holds at once */
    int64_t sms, placed[<!-- count -->]; /* clusters in `by_gpc`, those of a GPC together */
    uint16_t by_gpc[<!-- count -->][<!-- most -->];
} <!-- name -->_kernels;

static inline CUlaunchConfig <!-- name -->_config_(size_t kernel, int64_t ctas, CUlaunchAttribute *attribute) {
    CUlaunchConfig config;
    memset(&config, 0, sizeof config);
    config.gridDimX = (unsigned)ctas;
    config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1;
    config.blockDimX = (unsigned)<!-- name -->_kernels_[kernel].threads;
    config.sharedMemBytes = (unsigned)<!-- name -->_kernels_[kernel].shared_bytes;
    config.attrs = attribute;
    config.numAttrs = attribute ? 1 : 0;
    return config;
}

static inline CUlaunchAttribute <!-- name -->_cluster_(int ctas) {
    CUlaunchAttribute attribute;
    memset(&attribute, 0, sizeof attribute);
    attribute.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    attribute.value.clusterDim.x = (unsigned)ctas;
    attribute.value.clusterDim.y = attribute.value.clusterDim.z = 1;
    return attribute;
}

<!-- placement -->
#define <!-- name -->_TRY_(call) do { const CUresult result_ = (call); if (result_) return <!-- name -->_ERROR_DRIVER + (int)result_; } while (0)

/* Loads the kernels into the current context. */
static inline int <!-- name -->_load(<!-- name -->_kernels *kernels, const <!-- name -->_driver *driver) {
    CUdevice device;
    int major = 0, minor = 0, sms = 0;
    size_t i;
    memset(kernels, 0, sizeof *kernels);
    kernels->driver = *driver;
    <!-- name -->_TRY_(driver->cuCtxGetDevice(&device));
    <!-- name -->_TRY_(driver->cuDeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device));
    <!-- name -->_TRY_(driver->cuDeviceGetAttribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device));
    <!-- name -->_TRY_(driver->cuDeviceGetAttribute(&sms, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device));
    kernels->sms = sms;
    if (!(<!-- device -->)) return <!-- name -->_ERROR_DEVICE;
    for (i = 0; i < <!-- name -->_COUNT_; ++i) {
        int resident = 0;
        <!-- name -->_TRY_(driver->cuModuleLoadData(&kernels->modules[i], <!-- name -->_kernels_[i].image));
        <!-- name -->_TRY_(driver->cuModuleGetFunction(&kernels->functions[i], kernels->modules[i], <!-- name -->_kernels_[i].name));
        if (<!-- name -->_kernels_[i].shared_bytes > 48 * 1024)
            <!-- name -->_TRY_(driver->cuFuncSetAttribute(
                kernels->functions[i], CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, <!-- name -->_kernels_[i].shared_bytes));
        if (<!-- name -->_kernels_[i].cluster > 1) {
            CUlaunchAttribute attribute = <!-- name -->_cluster_(<!-- name -->_kernels_[i].cluster);
            CUlaunchConfig config = <!-- name -->_config_(i, <!-- name -->_kernels_[i].cluster, &attribute);
            <!-- name -->_TRY_(driver->cuOccupancyMaxActiveClusters(&resident, kernels->functions[i], &config));
            kernels->resident[i] = resident;
        } else {
            <!-- name -->_TRY_(driver->cuOccupancyMaxActiveBlocksPerMultiprocessor(
                &resident, kernels->functions[i], <!-- name -->_kernels_[i].threads, (size_t)<!-- name -->_kernels_[i].shared_bytes));
            kernels->resident[i] = (int64_t)resident * sms;
        }
        if (!kernels->resident[i]) return <!-- name -->_ERROR_DEVICE;
    }
<!-- place -->
    return <!-- name -->_OK;
}

/* Unloads the kernels, also after a load that failed. No launch may be running. */
static inline void <!-- name -->_unload(<!-- name -->_kernels *kernels) {
    size_t i;
    for (i = 0; i < <!-- name -->_COUNT_; ++i) {
        if (kernels->modules[i]) kernels->driver.cuModuleUnload(kernels->modules[i]);
        kernels->modules[i] = NULL;
    }
}

/* Encodes a tensor map at a multiple of 64 bytes: of its rank many extents, one stride less, and the extents of the box,
 * innermost first, and the swizzle. Strides and swizzle in bytes. */
static inline CUresult <!-- name -->_encode_(
    const <!-- name -->_kernels *kernels, void *map, CUtensorMapDataType type, cuuint32_t rank, int64_t address, const uint64_t *numbers) {
    cuuint64_t sizes[9];
    cuuint32_t box[5], ones[5], i;
    const uint64_t swizzle = numbers[3 * rank - 1];
    const CUtensorMapSwizzle mode = swizzle == 128 ? CU_TENSOR_MAP_SWIZZLE_128B
                                    : swizzle == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                    : swizzle == 32 ? CU_TENSOR_MAP_SWIZZLE_32B : CU_TENSOR_MAP_SWIZZLE_NONE;
    for (i = 0; i < 2 * rank - 1; ++i) sizes[i] = numbers[i];
    for (i = 0; i < rank; ++i) box[i] = (cuuint32_t)numbers[2 * rank - 1 + i], ones[i] = 1;
    return kernels->driver.cuTensorMapEncodeTiled(
        (CUtensorMap *)map, type, rank, (void *)(intptr_t)address, sizes, sizes + rank, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
        mode, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

/* Launches a kernel. `pdl`: it may begin while the one before runs, for whose results it waits. */
static inline CUresult <!-- name -->_start_(
    const <!-- name -->_kernels *kernels, size_t kernel, int64_t clusters, int pdl, CUstream stream, void **parameters) {
    CUlaunchAttribute attribute;
    CUlaunchConfig config;
    memset(&attribute, 0, sizeof attribute);
    attribute.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attribute.value.programmaticStreamSerializationAllowed = 1;
    config = <!-- name -->_config_(kernel, clusters * <!-- name -->_kernels_[kernel].cluster, pdl ? &attribute : NULL);
    config.hStream = stream;
    return kernels->driver.cuLaunchKernelEx(&config, kernels->functions[kernel], parameters, NULL);
}

/* Launches the kernels on a stream of the context in which they were loaded, which is current. */
static inline int <!-- name -->_launch(const <!-- name -->_kernels *kernels, const <!-- name -->_args *x, CUstream stream) {
    <!-- name -->_numbers_ n;
    int launched = 0;
    const int status = <!-- name -->_check_(x, &n);
    if (status) return status;
    if (n.workspace_bytes > 0 && (x->workspace_bytes < n.workspace_bytes || !x->workspace || (uintptr_t)x->workspace % 256))
        return <!-- name -->_ERROR_WORKSPACE;
    if (n.flag_bytes > 0 && (x->flag_bytes < n.flag_bytes || !x->flags || (uintptr_t)x->flags % 256)) return <!-- name -->_ERROR_FLAGS;
<!-- launches -->
    (void)launched;
    return <!-- name -->_OK;
}

#endif
