// An MLP of three exported kernels, without Python and without the CUDA runtime, for any number of rows:
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
using Floats = std::vector<float>;
using Halves = std::vector<uint16_t>;  // bf16

// -- the driver: cuda.h has types and the names of versions, dlsym the functions -------------------------------------
static void *library;

static void *find(void *, const char *name) {
    void *function = dlsym(library, name);
    if (!function) std::printf("libcuda has no %s; install a newer driver\n", name), std::exit(1);
    return function;
}

static void check(int status, const char *call) {
    if (status) std::printf("%s: %d, %s\n", call, status, up_error(status)), std::exit(1);
}

#define TEXT(x) #x
#define FUNCTION(function) reinterpret_cast<decltype(&function)>(find(nullptr, TEXT(function)))
#define CUDA(function, ...)                                           \
    do {                                                              \
        const int result_ = FUNCTION(function)(__VA_ARGS__);          \
        check(result_ ? up_ERROR_DRIVER + result_ : 0, #function);    \
    } while (0)

using Memory = std::shared_ptr<void>;

static CUdeviceptr address(const Memory &x) { return reinterpret_cast<CUdeviceptr>(x.get()); }

static Memory allocate(int64_t bytes) {  // of zeros, which flags must be
    CUdeviceptr at = 0;
    if (!bytes) return nullptr;
    CUDA(cuMemAlloc, &at, static_cast<size_t>(bytes));
    CUDA(cuMemsetD8, at, 0, static_cast<size_t>(bytes));
    return Memory(reinterpret_cast<void *>(at), [at](void *) { CUDA(cuMemFree, at); });
}

// -- the kernels -----------------------------------------------------------------------------------------------------
using Step = std::function<void(CUstream)>;

// A header's functions as a type. `prepare` does all but the launch, so that a capture allocates nothing:
// out = epilogue(a @ weight), where `set` sets the epilogue's operands.
#define HEADER(name)                                                                                                  \
    struct name {                                                                                                     \
        name##_kernels kernels;                                                                                       \
        name() {                                                                                                      \
            name##_driver driver;                                                                                     \
            name##_find_driver(&driver, find, nullptr);                                                               \
            check(name##_load(&kernels, &driver), #name "_load");                                                     \
        }                                                                                                             \
        ~name() { name##_unload(&kernels); }                                                                          \
        template <class Set>                                                                                          \
        Step prepare(int64_t m, int64_t n, int64_t k, Memory a, Memory weight, Memory out, Set set) const {           \
            name##_args x = {};                                                                                       \
            x.m = m, x.n = n, x.k = k, x.a_stride = x.b_stride = k, x.out_stride = n;                                 \
            x.a = a.get(), x.b = weight.get(), x.out = out.get();                                                     \
            set(x);                                                                                                   \
            const Memory workspace = allocate(x.workspace_bytes = name##_workspace_bytes(&x));                        \
            const Memory flags = allocate(x.flag_bytes = name##_flag_bytes(&x));                                      \
            x.workspace = workspace.get(), x.flags = flags.get();                                                     \
            const std::vector<Memory> kept = {a, weight, out, workspace, flags};                                      \
            return [this, x, kept](CUstream stream) { check(name##_launch(&kernels, &x, stream), #name "_launch"); }; \
        }                                                                                                             \
    };
HEADER(up)
HEADER(down)
HEADER(head)

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

struct Matrix {  // random values of bf16, on the host and on the device
    Floats host;
    Memory device;

    Matrix(int64_t rows, int64_t columns, float most, std::mt19937 &dice) : host(rows * columns), device(allocate(2 * rows * columns)) {
        Halves values(host.size());
        std::uniform_real_distribution<float> uniform(-most, most);
        for (size_t i = 0; i < host.size(); ++i) host[i] = from_bf16(values[i] = to_bf16(uniform(dice)));
        CUDA(cuMemcpyHtoD, address(device), values.data(), 2 * values.size());
    }
};

// out[i, j] = of(sum over k of a[i, k] * weight[j, k], i, j), rounded to bf16.
template <class F>
Floats layer(const Floats &a, const Floats &weight, int64_t m, int64_t n, int64_t k, F of) {
    Floats out(m * n);
    for (int64_t i = 0; i < m * n; ++i) {
        float sum = 0;
        for (int64_t x = 0; x < k; ++x) sum += a[i / n * k + x] * weight[i % n * k + x];
        out[i] = from_bf16(to_bf16(of(sum, i / n, i % n)));
    }
    return out;
}

struct Network {
    Matrix up_weight, bias, down_weight, head_weight;
    up up_;
    down down_;
    head head_;

    explicit Network(std::mt19937 &dice)
        : up_weight(HIDDEN, WIDTH, 0.1f, dice), bias(1, HIDDEN, 1, dice), down_weight(WIDTH, HIDDEN, 0.05f, dice),
          head_weight(CLASSES, WIDTH, 0.1f, dice) {}

    std::vector<Step> steps(int64_t m, Memory x, Memory out) const {
        const Memory hidden = allocate(2 * m * HIDDEN), y = allocate(2 * m * WIDTH);
        return {
            up_.prepare(m, HIDDEN, WIDTH, x, up_weight.device, hidden, [&](auto &args) { args.in_bias = bias.device.get(); }),
            down_.prepare(m, WIDTH, HIDDEN, hidden, down_weight.device, y,
                          [&](auto &args) { args.in_x = x.get(), args.in_x_stride = WIDTH; }),
            head_.prepare(m, CLASSES, WIDTH, y, head_weight.device, out, [](auto &) {})};
    }

    Floats on_host(int64_t m, const Floats &x) const {
        const Floats hidden = layer(x, up_weight.host, m, HIDDEN, WIDTH, [&](float sum, int64_t, int64_t j) {
            const float value = sum + bias.host[j];
            return 0.5f * value * (1 + std::erf(value * std::sqrt(0.5f)));
        });
        const auto residual = [&](float sum, int64_t i, int64_t j) { return sum + x[i * WIDTH + j]; };
        const Floats y = layer(hidden, down_weight.host, m, WIDTH, HIDDEN, residual);
        return layer(y, head_weight.host, m, CLASSES, WIDTH, [](float sum, int64_t, int64_t) { return sum; });
    }
};

// Launches on results that are NaN before, and returns the largest error relative to 1 + |value|.
static float error_of(const Step &launch, CUstream stream, const Memory &out, const Floats &want) {
    Halves values(want.size());
    float most = 0;
    CUDA(cuMemsetD8Async, address(out), 0xff, 2 * want.size(), stream);
    launch(stream);
    CUDA(cuStreamSynchronize, stream);
    CUDA(cuMemcpyDtoH, values.data(), address(out), 2 * values.size());
    for (size_t i = 0; i < want.size(); ++i) {
        const float error = std::fabs(from_bf16(values[i]) - want[i]) / (1 + std::fabs(want[i]));
        if (!(error <= most)) most = std::isnan(error) ? HUGE_VALF : error;
    }
    return most;
}

static bool run(const Network &network, int64_t m, CUstream stream, std::mt19937 &dice) {
    const Matrix x(m, WIDTH, 1, dice);
    const Memory out = allocate(2 * m * CLASSES);
    const Floats want = network.on_host(m, x.host);
    const auto all = [](const std::vector<Step> &steps, CUstream on) { for (const Step &step : steps) step(on); };
    const auto eager = network.steps(m, x.device, out), captured = network.steps(m, x.device, out);  // flags of their own
    CUgraph graph;
    CUgraphExec executable;
    CUDA(cuStreamBeginCapture, stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
    all(captured, stream);
    CUDA(cuStreamEndCapture, stream, &graph);
    CUDA(cuGraphInstantiate, &executable, graph, 0);
    const float error = error_of([&](CUstream on) { all(eager, on); }, stream, out, want);
    const float of_graph = error_of([&](CUstream on) { CUDA(cuGraphLaunch, executable, on); }, stream, out, want);
    CUDA(cuGraphExecDestroy, executable);
    CUDA(cuGraphDestroy, graph);
    std::printf("%lld rows: largest error %g, as a graph %g\n", static_cast<long long>(m), error, of_graph);
    return error < 0.03f && of_graph < 0.03f;
}

int main(int count, char **words) {
    CUdevice device;
    CUcontext context;
    CUstream stream;
    if (!(library = dlopen("libcuda.so.1", RTLD_NOW))) return std::printf("no libcuda: %s\n", dlerror()), 77;
    if (const int result = FUNCTION(cuInit)(0)) return std::printf("no GPU: cuInit returned %d\n", result), 77;
    CUDA(cuDeviceGet, &device, 0);
    CUDA(cuDevicePrimaryCtxRetain, &context, device);
    CUDA(cuCtxSetCurrent, context);
    CUDA(cuStreamCreate, &stream, CU_STREAM_DEFAULT);  // copies and memsets of the null stream come before its launches
    std::mt19937 dice(std::random_device{}());
    const Network network(dice);
    bool is_right = true;
    std::vector<int64_t> sizes;
    for (int i = 1; i < count; ++i) sizes.push_back(std::atoll(words[i]));
    if (sizes.empty()) sizes = {1, 48, 1000};
    for (const int64_t m : sizes) is_right = run(network, m, stream, dice) && is_right;
    CUDA(cuStreamDestroy, stream);
    return !is_right;
}
