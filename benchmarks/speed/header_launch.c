/* Microseconds of the host for a launch by an exported header and by cublasLtMatmul, in turns; see header_launch.py. */
#include <cublasLt.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "gemm.h"

enum { CALLS = 500, ROUNDS = 41 };
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

int main(int count, char **words) {
    const int64_t m = count > 1 ? atoll(words[1]) : 64, n = 64, k = 64;
    const float one = 1, zero = 0;
    double times[2][ROUNDS];
    int round, i, found = 0;
    gemm_driver driver;
    gemm_kernels kernels;
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
    }
    for (i = 0; i < 2; ++i) qsort(times[i], ROUNDS, sizeof times[i][0], compare);
    printf("%f %f\n", times[0][ROUNDS / 2], times[1][ROUNDS / 2]);
    return 0;
}
