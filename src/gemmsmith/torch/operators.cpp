/* gemmsmith's operators of exported programs. A process that loads this library has them without Python.
 *
 *     TORCH=$(python -c "import torch; print(torch.__path__[0])")
 *     g++ -std=c++20 -O2 -shared -fPIC -I"$TORCH/include" -I"$CUDA_HOME/include" operators.cpp -o operators.so -ldl
 *
 * It uses torch's stable ABI: any libtorch from 2.11 on. Made by gemmsmith.
 */
#define TORCH_TARGET_VERSION (((0ULL + 2) << 56) | ((0ULL + 11) << 48))
#include <dlfcn.h>

#include <map>
#include <mutex>

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

<!-- includes -->

#ifndef DISPATCH_KEY
#define DISPATCH_KEY CUDA
#endif
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device, void **stream);

using torch::stable::Tensor;
#define TRY(call) STD_TORCH_CHECK((call) == AOTI_TORCH_SUCCESS, "gemmsmith: " #call)

namespace {
struct Call {
    Tensor a, b;
    std::optional<Tensor> b2, offsets;
    int64_t key;
    std::vector<double> numbers;
    std::vector<Tensor> operands, results;
};
} // namespace

static Tensor empty(const std::vector<int64_t> &sizes, int32_t dtype, const Tensor &like) {
    std::vector<int64_t> strides(sizes.size(), 1);
    for (size_t i = sizes.size(); i-- > 1;) strides[i - 1] = strides[i] * std::max<int64_t>(sizes[i], 1);
    int32_t device;
    AtenTensorHandle made;
    TRY(aoti_torch_get_device_type(like.get(), &device));
    TRY(aoti_torch_empty_strided(
        (int64_t)sizes.size(), sizes.data(), strides.data(), dtype, device, like.get_device_index(), &made));
    return Tensor(made);
}

static bool is(const Tensor &x, int32_t dtype, int64_t dim) {
    int32_t own;
    TRY(aoti_torch_get_dtype(x.get(), &own));
    return own == dtype && x.dim() == dim;
}

/* The stride of a dimension; if it has one index, whose stride is arbitrary, one that reaches over the others. */
static int64_t stride(const Tensor &x, int64_t dim) {
    if (x.size(dim) > 1) return x.stride(dim);
    int64_t reach = 1, vector = 16 / (int64_t)x.element_size();
    for (int64_t i = 0; i < x.dim(); ++i)
        if (x.size(i) > 1) reach = std::max(reach, x.size(i) * x.stride(i));
    return (reach + vector - 1) / vector * vector;
}

/* Headers refuse null, the address of an empty tensor. */
static void *address(const Tensor &x) { return x.data_ptr() ? x.data_ptr() : (void *)256; }

static void *find(void *library, const char *name) { return dlsym(library, name); }

/* Launches a header's kernels, which are loaded once for each device, on torch's stream. */
#define RUN(name) \
    static void run_##name(name##_args x, const Tensor &like) { \
        static std::mutex mutex; \
        static std::map<int32_t, name##_kernels> loaded; \
        const int32_t device = like.get_device_index(); \
        const torch::stable::accelerator::DeviceGuard guard(device); \
        std::unique_lock<std::mutex> lock(mutex); \
        const auto [kernels, is_new] = loaded.try_emplace(device); \
        if (is_new) { \
            name##_driver driver; \
            const bool is_found = name##_find_driver(&driver, find, dlopen("libcuda.so.1", RTLD_NOW)); \
            const int status = is_found ? name##_load(&kernels->second, &driver) : 0; \
            if (!is_found || status) loaded.erase(kernels); \
            STD_TORCH_CHECK(is_found, "gemmsmith: libcuda.so.1 is not there, or is too old"); \
            STD_TORCH_CHECK(!status, "gemmsmith: " #name ": ", name##_error(status), " (", status, ")"); \
        } \
        lock.unlock(); \
        x.workspace_bytes = name##_workspace_bytes(&x), x.flag_bytes = name##_flag_bytes(&x); \
        const Tensor workspace = empty({x.workspace_bytes}, aoti_torch_dtype_uint8(), like); \
        const Tensor flags = empty({x.flag_bytes}, aoti_torch_dtype_uint8(), like); \
        if (x.flag_bytes) TRY(aoti_torch_zero_(flags.get())); \
        x.workspace = workspace.data_ptr(), x.flags = flags.data_ptr(); \
        void *stream = nullptr; \
        TRY(aoti_torch_get_current_cuda_stream(device, &stream)); \
        const int status = name##_launch(&kernels->second, &x, (CUstream)stream); \
        STD_TORCH_CHECK(!status, "gemmsmith: " #name ": ", name##_error(status), " (", status, ")"); \
    }

<!-- functions -->

static void gemm(StableIValue *stack, uint64_t, uint64_t) {
    namespace abi = torch::stable::detail;
    Call c{abi::to<Tensor>(stack[0]), abi::to<Tensor>(stack[1]), abi::to<std::optional<Tensor>>(stack[2]),
           abi::to<std::optional<Tensor>>(stack[3]), abi::to<int64_t>(stack[4]), {}, {}, {}};
    abi::to<std::string>(stack[5]); /* the epilogue, of which `key` is a hash */
    c.numbers = abi::to<std::vector<double>>(stack[6]), c.operands = abi::to<std::vector<Tensor>>(stack[7]);
    const bool is_done = <!-- calls -->;
    STD_TORCH_CHECK(is_done, "gemmsmith: got a call of other sizes, layouts, dtypes or another epilogue than exported");
    for (size_t i = 0; i < c.results.size(); ++i) stack[i] = abi::from(c.results[i]);
}

STABLE_TORCH_LIBRARY_FRAGMENT(gemmsmith, m) {
<!-- schemas -->
}
STABLE_TORCH_LIBRARY_IMPL(gemmsmith, DISPATCH_KEY, m) {
    for (const char *name : {"gemm_1", "gemm_2", "gemm_3", "gemm_4"}) m.impl(name, gemm);
}
