/* Microseconds of the host for a launch by an exported header, by cublasLtMatmul, and by the header's calls of the driver
 * alone, in turns; see header_launch.py. */
#include <cublasLt.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "gemm.h"

enum { CALLS = 100, ROUNDS = 201 };
#define TRY(call) do { const int status = (int)(call); if (status) { printf("%s: %d\n", #call, status); exit(1); } } while (0)

static void *find(void *library, const char *name) { return dlsym(library, name); }
static void *zeros(int64_t bytes) {
    void *address = NULL;
    TRY(cudaMalloc(&address, (size_t)bytes + 256));
    TRY(cudaMemset(address, 0, (size_t)bytes));
    return address;
}
static double microseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e6 + (double)now.tv_nsec / 1e3;
}
static int compare(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The driver's functions, called CALLS times in place of once, and the microseconds of a call, added up. */
static gemm_driver driver;
static double launch_us, encode_us;
static CUresult CUDAAPI launch(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
    const double begun = microseconds();
    int i;
    for (i = 0; i < CALLS; ++i) TRY(driver.cuLaunchKernelEx(config, function, parameters, extra));
    launch_us += (microseconds() - begun) / CALLS;
    return CUDA_SUCCESS;
}
static CUresult CUDAAPI encode(
    CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address, const cuuint64_t *sizes, const cuuint64_t *strides,
    const cuuint32_t *box, const cuuint32_t *ones, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
    CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
    const double begun = microseconds();
    int i;
    for (i = 0; i < CALLS; ++i)
        TRY(driver.cuTensorMapEncodeTiled(
            map, type, rank, address, sizes, strides, box, ones, interleave, swizzle, promotion, fill));
    encode_us += (microseconds() - begun) / CALLS;
    return CUDA_SUCCESS;
}

/* Two empty kernels: one without parameters, and one with more bytes of them than a GEMM has. */
enum { PARAMETER_BYTES = 896 };
static const char empty_ptx[] =
    ".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry none() { ret; }\n"
    ".visible .entry many(.param .align 64 .b8 p[896]) { ret; }\n";

int main(int count, char **words) {
    const int64_t m = count > 1 ? atoll(words[1]) : 64, n = 64, k = 64;
    const float one = 1, zero = 0;
    double times[6][ROUNDS];
    int round, i, j, found = 0;
    char bytes[PARAMETER_BYTES] = {0};
    void *parameter = bytes;
    CUmodule module;
    CUfunction functions[2];
    gemm_kernels kernels, measured;
    gemm_args x;
    cublasLtHandle_t handle;
    cublasLtMatmulDesc_t operation;
    cublasLtMatrixLayout_t a, b, d;
    cublasLtMatmulPreference_t preference;
    cublasLtMatmulHeuristicResult_t heuristic;
    const cublasOperation_t transposed = CUBLAS_OP_T;
    memset(&x, 0, sizeof x);
    x.m = m, x.n = n, x.k = k, x.a_stride = x.b_stride = k, x.out_stride = n;
    x.a = zeros(2 * m * k), x.b = zeros(2 * n * k), x.out = zeros(2 * m * n);
    if (!gemm_find_driver(&driver, find, dlopen("libcuda.so.1", RTLD_NOW))) return 1;
    TRY(gemm_load(&kernels, &driver));
    TRY(driver.cuModuleLoadData(&module, empty_ptx));
    for (i = 0; i < 2; ++i) TRY(driver.cuModuleGetFunction(&functions[i], module, i ? "many" : "none"));
    measured = kernels;
    measured.driver.cuLaunchKernelEx = launch, measured.driver.cuTensorMapEncodeTiled = encode;
    x.workspace = zeros(x.workspace_bytes = gemm_workspace_bytes(&x));
    x.flags = zeros(x.flag_bytes = gemm_flag_bytes(&x));

    /* cuBLAS computes the transposed product of column-major matrices: D^T (n, m) = B^T (n, k) A^T (k, m). */
    TRY(cublasLtCreate(&handle));
    TRY(cublasLtMatmulDescCreate(&operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    TRY(cublasLtMatmulDescSetAttribute(operation, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed));
    TRY(cublasLtMatrixLayoutCreate(&b, CUDA_R_16BF, (uint64_t)k, (uint64_t)n, k));
    TRY(cublasLtMatrixLayoutCreate(&a, CUDA_R_16BF, (uint64_t)k, (uint64_t)m, k));
    TRY(cublasLtMatrixLayoutCreate(&d, CUDA_R_16BF, (uint64_t)n, (uint64_t)m, n));
    TRY(cublasLtMatmulPreferenceCreate(&preference));
    TRY(cublasLtMatmulAlgoGetHeuristic(handle, operation, b, a, d, d, preference, 1, &heuristic, &found));
    if (!found) return 1;
    for (round = 0; round < ROUNDS; ++round) {
        double begun;
        TRY(cudaDeviceSynchronize());
        begun = microseconds();
        for (i = 0; i < CALLS; ++i) TRY(gemm_launch(&kernels, &x, NULL));
        times[0][round] = (microseconds() - begun) / CALLS;
        TRY(cudaDeviceSynchronize());
        begun = microseconds();
        for (i = 0; i < CALLS; ++i)
            TRY(cublasLtMatmul(handle, operation, &one, x.b, b, x.a, a, &zero, x.out, d, x.out, d, &heuristic.algo, NULL, 0, NULL));
        times[1][round] = (microseconds() - begun) / CALLS;
        TRY(cudaDeviceSynchronize());
        launch_us = encode_us = 0;
        TRY(gemm_launch(&measured, &x, NULL));
        times[2][round] = launch_us, times[3][round] = encode_us;
        TRY(cudaDeviceSynchronize());
        for (j = 0; j < 2; ++j) {
            CUlaunchConfig config;
            memset(&config, 0, sizeof config);
            config.gridDimX = config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1, config.blockDimX = 384;
            launch_us = 0;
            TRY(launch(&config, functions[j], &parameter, NULL));
            times[4 + j][round] = launch_us;
            TRY(cudaDeviceSynchronize());
        }
    }
    for (i = 0; i < 6; ++i) {
        qsort(times[i], ROUNDS, sizeof times[i][0], compare);
        printf("%f ", times[i][ROUNDS / 2]);
    }
    return 0;
}
