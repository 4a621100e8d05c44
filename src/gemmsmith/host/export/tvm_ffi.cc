/* <!-- name -->(<!-- signature -->) as a function of TVM-FFI. Arrays are on one GPU; results are written where they are.
 *
 *     g++ -std=c++17 -O2 -shared -fPIC <!-- name -->_tvm_ffi.cc -o <!-- name -->.so -I"$CUDA_HOME/include" \
 *         $(tvm-ffi-config --cxxflags --ldflags --libs) -ldl
 */
#include <dlfcn.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

#include <map>
#include <mutex>

#include "<!-- name -->.h"

namespace {

using namespace tvm::ffi;

void *find(void *, const char *name) {
    static void *const library = dlopen("libcuda.so.1", RTLD_NOW);
    return library ? dlsym(library, name) : nullptr;
}

void check(int status) {
    if (status) TVM_FFI_THROW(RuntimeError) << <!-- name -->_error(status) << " (" << status << ")";
}

#define TEXT(x) #x
#define FIND(function) reinterpret_cast<decltype(&function)>(find(nullptr, TEXT(function)))
#define CUDA(function, ...)                                    \
    do {                                                       \
        static const auto entry = FIND(function);              \
        const int result = entry(__VA_ARGS__);                 \
        check(result ? <!-- name -->_ERROR_DRIVER + result : 0); \
    } while (0)

struct Current { /* makes a context the current one */
    explicit Current(CUcontext context) { CUDA(cuCtxPushCurrent, context); }
    ~Current() noexcept(false) {
        CUcontext context;
        CUDA(cuCtxPopCurrent, &context);
    }
};

struct Device {
    CUcontext context;
    <!-- name -->_kernels kernels;
};

/* Returns a device whose kernels are loaded, by the first call. */
const Device &loaded(int id) {
    static std::mutex mutex;
    static std::map<int, Device> devices;
    const std::lock_guard<std::mutex> lock(mutex);
    auto place = devices.find(id);
    if (place == devices.end()) {
        Device device;
        <!-- name -->_driver driver;
        if (!<!-- name -->_find_driver(&driver, find, nullptr)) TVM_FFI_THROW(RuntimeError) << "libcuda: none found, or one too old";
        CUDA(cuDevicePrimaryCtxRetain, &device.context, id);
        const Current current(device.context);
        const int status = <!-- name -->_load(&device.kernels, &driver);
        if (status) <!-- name -->_unload(&device.kernels);
        check(status);
        place = devices.emplace(id, device).first;
    }
    return place->second;
}

/* A dimension: its size is *size / by, rounded up, or `by`; its stride is read into *stride, or must be `fixed`, or that of
 * a contiguous array (-1). */
struct Axis {
    int64_t *size, by, *stride, fixed;
};

#define COMPARE(kind, what, got, use) \
    if (got != use) TVM_FFI_THROW(kind) << name << "." << what << ": got " << got << "; use " << use

/* Returns an array's address. Sizes that are negative are read, and others are compared. */
void *bind(TensorView x, const char *name, DLDataType dtype, DLDevice device, std::initializer_list<Axis> axes) {
    const int64_t dimensions = axes.size();
    COMPARE(ValueError, "device type (1: CPU, 2: CUDA)", x.device().device_type, kDLCUDA);
    COMPARE(ValueError, "device id", x.device().device_id, device.device_id);
    COMPARE(TypeError, "dtype", x.dtype(), dtype);
    COMPARE(ValueError, "ndim", x.ndim(), dimensions);
    int i = 0;
    for (const Axis &axis : axes) {
        const int64_t size = x.size(i), stride = x.strides()[i];
        if (axis.size && *axis.size < 0) *axis.size = size * axis.by;
        const int64_t use = axis.size ? (*axis.size + axis.by - 1) / axis.by : axis.by;
        int64_t fixed = axis.fixed < 0 ? 1 : axis.fixed;
        for (int j = i + 1; axis.fixed < 0 && j < x.ndim(); ++j) fixed *= x.size(j);
        COMPARE(ValueError, "shape[" << i << "]", size, use);
        if (axis.stride) *axis.stride = size > 1 ? stride : (x.numel() / 16 + 1) * 16; /* that of a single row may be any */
        if (!axis.stride && size > 1) COMPARE(ValueError, "strides[" << i << "]", stride, fixed);
        ++i;
    }
    return x.numel() ? static_cast<char *>(x.data_ptr()) + x.byte_offset() : reinterpret_cast<void *>(256);
}

void launch(<!-- parameters -->) {
    const DLDevice device = a.device();
    <!-- name -->_args x = {};
    <!-- sizes --> = -1;
<!-- arguments -->
    const Device &state = loaded(device.device_id);
    const Current current(state.context);
    const CUstream stream = static_cast<CUstream>(TVMFFIEnvGetStream(kDLCUDA, device.device_id));
    x.workspace_bytes = (<!-- name -->_workspace_bytes(&x) + 255) / 256 * 256;
    x.flag_bytes = <!-- name -->_flag_bytes(&x);
    Optional<Tensor> scratch;
    if (const int64_t bytes = x.workspace_bytes + x.flag_bytes) {
        scratch = Tensor::FromEnvAlloc(TVMFFIEnvTensorAlloc, {bytes + 255}, {kDLUInt, 8, 1}, device);
        const uintptr_t start = reinterpret_cast<uintptr_t>(scratch.value().data_ptr()) + scratch.value().byte_offset();
        x.workspace = reinterpret_cast<void *>((start + 255) / 256 * 256);
        x.flags = static_cast<char *>(x.workspace) + x.workspace_bytes;
        if (x.flag_bytes) CUDA(cuMemsetD8Async, reinterpret_cast<CUdeviceptr>(x.flags), 0, x.flag_bytes, stream);
    }
    const int status = <!-- name -->_launch(&state.kernels, &x, stream);
    if (status && status < <!-- name -->_ERROR_WORKSPACE)
        TVM_FFI_THROW(ValueError) << <!-- name -->_error(status) << ": got <!-- values -->;
    check(status);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(<!-- name -->, launch)
