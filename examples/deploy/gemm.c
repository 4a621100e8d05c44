/* A product of bf16 by an exported kernel, without Python. The GEMM may have any m; n and k, too.
 *
 *     gemmsmith export 1024x1024x1024
 *     cc -I. -I"$CUDA_HOME/include" gemm.c -o gemm -L"$CUDA_HOME/lib64/stubs" -lcuda -ldl && ./gemm 1000
 *
 * The header needs no -lcuda; the calls of cuMemAlloc and so on here do.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

#include "gemm.h"

#define TRY(call) check((int)(call), #call)

static void check(int status, const char *call) {
    if (status) {
        printf("%s: %d, %s\n", call, status, gemm_error(status));
        exit(1);
    }
}

static void *find(void *library, const char *name) { return dlsym(library, name); }

static uint16_t bf16(float x) { /* exact for the small integers here */
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (uint16_t)(bits >> 16);
}

static void *allocate(int64_t bytes) {
    CUdeviceptr address = 0;
    if (bytes) TRY(cuMemAlloc(&address, (size_t)bytes));
    if (bytes) TRY(cuMemsetD8(address, 0, (size_t)bytes)); /* the flags are zero before the first launch */
    return (void *)address;
}

int main(int count, char **words) {
    const int64_t m = count > 1 ? atoll(words[1]) : 1000, n = 768, k = 512, most = (m > n ? m : n) * (k > n ? k : n);
    uint16_t *values = malloc(2 * (size_t)most);
    CUdevice device;
    CUcontext context;
    gemm_driver driver;
    gemm_kernels kernels;
    gemm_args x = {0};
    int64_t i, wrong = 0;
    TRY(cuInit(0));
    TRY(cuDeviceGet(&device, 0));
    TRY(cuDevicePrimaryCtxRetain(&context, device));
    TRY(cuCtxSetCurrent(context));
    if (!gemm_find_driver(&driver, find, dlopen("libcuda.so.1", RTLD_NOW))) return 1;
    TRY(gemm_load(&kernels, &driver));

    x.m = m, x.n = n, x.k = k;
    x.a = allocate(2 * m * k), x.a_stride = k; /* row-major */
    x.b = allocate(2 * k * n), x.b_stride = k; /* column-major, the default layout */
    x.out = allocate(2 * m * n), x.out_stride = n;
    x.workspace = allocate(x.workspace_bytes = gemm_workspace_bytes(&x));
    x.flags = allocate(x.flag_bytes = gemm_flag_bytes(&x));
    for (i = 0; i < m * k; ++i) values[i] = bf16((float)(i / k % 3)); /* row i of a is all i % 3 */
    TRY(cuMemcpyHtoD((CUdeviceptr)x.a, values, 2 * (size_t)(m * k)));
    for (i = 0; i < n * k; ++i) values[i] = bf16(i % k == i / k % k); /* each column of b has a single 1 */
    TRY(cuMemcpyHtoD((CUdeviceptr)x.b, values, 2 * (size_t)(n * k)));
    TRY(gemm_launch(&kernels, &x, NULL));
    TRY(cuMemcpyDtoH(values, (CUdeviceptr)x.out, 2 * (size_t)(m * n)));
    for (i = 0; i < m * n; ++i) wrong += values[i] != bf16((float)(i / n % 3));
    printf("%lld x %lld: %lld are wrong\n", (long long)m, (long long)n, (long long)wrong);
    gemm_unload(&kernels);
    return wrong != 0;
}
