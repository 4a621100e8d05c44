// An MLP of three exported kernels without Python and without the CUDA runtime, for any number of rows:
//
//     hidden = gelu(x @ up + bias);  y = hidden @ down + x;  classes = y @ head
//
// It runs eagerly and as a CUDA graph, and checks both with loops on the host. It exits with 77 where there is no GPU.
//
//     cmake -B build && cmake --build build && build/engine 1 48 1000
#include <dlfcn.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#include "down.h"
#include "head.h"
#include "up.h"

constexpr int64_t WIDTH = 256, HIDDEN = 1024, CLASSES = 512;  // export.py has them, too

// -- the driver: cuda.h gives types and the names of versions, dlsym the functions ---------------------------------
static void *library;

static void *find(void *, const char *name) { return dlsym(library, name); }

static void check(int status, const char *call) {
    if (!status) return;
    std::printf("%s: %d, %s\n", call, status, up_error(status));
    std::exit(1);
}

static int as_status(int result) { return result ? up_ERROR_DRIVER + result : 0; }

static void *needed(const char *name) {
    void *function = find(nullptr, name);
    if (!function) std::printf("libcuda has no %s; install a newer driver\n", name), std::exit(1);
    return function;
}

#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)
#define FUNCTION(function) reinterpret_cast<decltype(&function)>(needed(TEXT(function)))
#define CUDA(function, ...) check(as_status(FUNCTION(function)(__VA_ARGS__)), #function)

using Memory = std::shared_ptr<void>;

static CUdeviceptr address(const void *at) { return reinterpret_cast<CUdeviceptr>(at); }

static Memory allocate(int64_t bytes) {  // of zeros, which flags must be
    CUdeviceptr at = 0;
    if (!bytes) return nullptr;
    CUDA(cuMemAlloc, &at, static_cast<size_t>(bytes));
    CUDA(cuMemsetD8, at, 0, static_cast<size_t>(bytes));
    return Memory(reinterpret_cast<void *>(at), [](void *x) { CUDA(cuMemFree, address(x)); });
}

// -- the kernels: the functions of a header as a type ----------------------------------------------------------------
#define HEADER(name)                                                                                           \
    struct name {                                                                                              \
        using args = name##_args;                                                                              \
        name##_kernels kernels;                                                                                \
        name() {                                                                                               \
            name##_driver driver;                                                                              \
            if (!name##_find_driver(&driver, find, nullptr)) needed("cuLaunchKernelEx");                       \
            check(name##_load(&kernels, &driver), #name "_load");                                              \
        }                                                                                                      \
        ~name() { name##_unload(&kernels); }                                                                   \
        static int64_t workspace_bytes(const args &x) { return name##_workspace_bytes(&x); }                   \
        static int64_t flag_bytes(const args &x) { return name##_flag_bytes(&x); }                             \
        void launch(const args &x, CUstream stream) const { check(name##_launch(&kernels, &x, stream), #name); } \
    };
HEADER(up)
HEADER(down)
HEADER(head)

using Step = std::function<void(CUstream)>;

// out = epilogue(a @ weight): everything but the launch, so that a capture allocates nothing. `set` sets operands.
template <class Gemm, class Set>
Step prepare(const Gemm &gemm, int64_t m, int64_t n, int64_t k, Memory a, Memory weight, Memory out, Set set) {
    typename Gemm::args x = {};
    x.m = m, x.n = n, x.k = k;
    x.a = a.get(), x.a_stride = k;
    x.b = weight.get(), x.b_stride = k;
    x.out = out.get(), x.out_stride = n;
    set(x);
    Memory workspace = allocate(x.workspace_bytes = Gemm::workspace_bytes(x));
    Memory flags = allocate(x.flag_bytes = Gemm::flag_bytes(x));
    x.workspace = workspace.get(), x.flags = flags.get();
    return [=, &gemm](CUstream stream) {
        (void)a, (void)weight, (void)out, (void)workspace, (void)flags;  // they live as long as the step
        gemm.launch(x, stream);
    };
}

// -- the network -----------------------------------------------------------------------------------------------------
static uint16_t to_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static float from_bf16(uint16_t x) {
    const uint32_t bits = static_cast<uint32_t>(x) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

struct Matrix {  // values that bf16 has, on the host and on the device
    std::vector<float> host;
    Memory device;

    Matrix(int64_t rows, int64_t columns, float scale, std::mt19937 &dice) : host(rows * columns) {
        std::vector<uint16_t> values(host.size());
        std::uniform_real_distribution<float> uniform(-scale, scale);
        for (size_t i = 0; i < host.size(); ++i) host[i] = from_bf16(values[i] = to_bf16(uniform(dice)));
        device = allocate(2 * rows * columns);
        CUDA(cuMemcpyHtoD, address(device.get()), values.data(), 2 * values.size());
    }
};

struct Weights {
    Matrix up, bias, down, head;

    explicit Weights(std::mt19937 &dice)
        : up(HIDDEN, WIDTH, 0.1f, dice), bias(1, HIDDEN, 1, dice), down(WIDTH, HIDDEN, 0.05f, dice),
          head(CLASSES, WIDTH, 0.1f, dice) {}
};

struct Network {
    up up_;
    down down_;
    head head_;
    Weights weights;

    explicit Network(std::mt19937 &dice) : weights(dice) {}

    std::vector<Step> steps(int64_t m, Memory x, Memory out) const {
        Memory hidden = allocate(2 * m * HIDDEN), y = allocate(2 * m * WIDTH);
        const auto bias = [&](up_args &args) { args.in_bias = weights.bias.device.get(); };
        const auto residual = [&](down_args &args) { args.in_x = x.get(), args.in_x_stride = WIDTH; };
        return {
            prepare(up_, m, HIDDEN, WIDTH, x, weights.up.device, hidden, bias),
            prepare(down_, m, WIDTH, HIDDEN, hidden, weights.down.device, y, residual),
            prepare(head_, m, CLASSES, WIDTH, y, weights.head.device, out, [](head_args &) {}),
        };
    }
};

// out = a @ weight, and then `of(value, row, column)`, rounded to bf16.
template <class F>
std::vector<float> layer(const std::vector<float> &a, const std::vector<float> &weight, int64_t m, int64_t n, int64_t k, F of) {
    std::vector<float> out(m * n);
    for (int64_t i = 0; i < m; ++i)
        for (int64_t j = 0; j < n; ++j) {
            float sum = 0;
            for (int64_t x = 0; x < k; ++x) sum += a[i * k + x] * weight[j * k + x];
            out[i * n + j] = from_bf16(to_bf16(of(sum, i, j)));
        }
    return out;
}

static std::vector<float> on_host(const Weights &w, const std::vector<float> &x, int64_t m) {
    const auto hidden = layer(x, w.up.host, m, HIDDEN, WIDTH, [&](float sum, int64_t, int64_t j) {
        const float value = sum + w.bias.host[j];
        return 0.5f * value * (1 + std::erf(value * std::sqrt(0.5f)));
    });
    const auto y = layer(hidden, w.down.host, m, WIDTH, HIDDEN, [&](float sum, int64_t i, int64_t j) { return sum + x[i * WIDTH + j]; });
    return layer(y, w.head.host, m, CLASSES, WIDTH, [](float sum, int64_t, int64_t) { return sum; });
}

// Runs `launch` on results that are NaN before, and returns the largest error relative to 1 + |value|.
static float error_of(const std::function<void()> &launch, CUstream stream, const Memory &out, const std::vector<float> &want) {
    std::vector<uint16_t> values(want.size());
    float most = 0;
    CUDA(cuMemsetD8Async, address(out.get()), 0xff, 2 * want.size(), stream);
    launch();
    CUDA(cuStreamSynchronize, stream);
    CUDA(cuMemcpyDtoH, values.data(), address(out.get()), 2 * values.size());
    for (size_t i = 0; i < want.size(); ++i) {
        const float error = std::fabs(from_bf16(values[i]) - want[i]) / (1 + std::fabs(want[i]));
        most = error <= most ? most : std::isnan(error) ? HUGE_VALF : error;
    }
    return most;
}

static bool run(const Network &network, int64_t m, CUstream stream, std::mt19937 &dice) {
    const Matrix x(m, WIDTH, 1, dice);
    const Memory out = allocate(2 * m * CLASSES);
    const auto want = on_host(network.weights, x.host, m);
    const auto eager = network.steps(m, x.device, out), captured = network.steps(m, x.device, out);
    CUgraph graph;
    CUgraphExec executable;
    CUDA(cuStreamBeginCapture, stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
    for (const Step &step : captured) step(stream);
    CUDA(cuStreamEndCapture, stream, &graph);
    CUDA(cuGraphInstantiate, &executable, graph, 0);
    const float errors[] = {
        error_of([&] { for (const Step &step : eager) step(stream); }, stream, out, want),
        error_of([&] { CUDA(cuGraphLaunch, executable, stream); }, stream, out, want)};
    CUDA(cuGraphExecDestroy, executable);
    CUDA(cuGraphDestroy, graph);
    std::printf("%lld rows: largest error %g, as a graph %g\n", static_cast<long long>(m), errors[0], errors[1]);
    return errors[0] < 0.03f && errors[1] < 0.03f;
}

int main(int count, char **words) {
    CUdevice device;
    CUcontext context;
    CUstream stream;
    if (!(library = dlopen("libcuda.so.1", RTLD_NOW))) return std::printf("no libcuda: %s\n", dlerror()), 77;
    if (const int status = FUNCTION(cuInit)(0)) return std::printf("no GPU: cuInit returned %d\n", status), 77;
    CUDA(cuDeviceGet, &device, 0);
    CUDA(cuDevicePrimaryCtxRetain, &context, device);
    CUDA(cuCtxSetCurrent, context);
    CUDA(cuStreamCreate, &stream, CU_STREAM_DEFAULT);  // copies and memsets of the null stream come before its launches
    bool is_right = true;
    {
        std::mt19937 dice(std::random_device{}());
        const Network network(dice);
        std::vector<int64_t> sizes;
        for (int i = 1; i < count; ++i) sizes.push_back(std::atoll(words[i]));
        if (sizes.empty()) sizes = {1, 48, 1000};
        for (const int64_t m : sizes) is_right &= run(network, m, stream, dice);
    }
    CUDA(cuStreamDestroy, stream);
    return !is_right;
}
