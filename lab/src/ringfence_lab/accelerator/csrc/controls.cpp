// What the Python module calls, as operators: torch.ops.ringfence_sim.

#include "device_memory.hpp"
#include "generator.hpp"
#include "libcrypto.hpp"
#include "pinned_memory.hpp"
#include "sealed_copy.hpp"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <map>

namespace ringfence::sim {

namespace {

void start(int64_t devices) {
    TORCH_CHECK(devices >= 1 && devices <= kMaxDevices, "the simulated accelerator has 1 to ", kMaxDevices,
                " devices, not ", devices);
    int none = 0;
    TORCH_CHECK(device_count.compare_exchange_strong(none, static_cast<int>(devices)) || none == devices,
                "the simulated accelerator has ", none, " devices in this process");
}

void configure_times(double kernel, double down, double up, double down_rate, double up_rate, double jitter,
                     double lag, int64_t seed) {
    for (auto value : {kernel, down, up, down_rate, up_rate, jitter, lag})
        TORCH_CHECK_VALUE(value >= 0 && value < 1e18, "times and rates must not be negative, got ", value);
    Settings settings;
    settings.kernel = seconds(kernel);
    settings.copy[kDown] = seconds(down);
    settings.copy[kUp] = seconds(up);
    settings.rate[kDown] = down_rate;
    settings.rate[kUp] = up_rate;
    settings.jitter = seconds(jitter);
    settings.lag = seconds(lag);
    settings.seed = static_cast<uint64_t>(seed);
    configure(settings);
}

void begin_tee(const std::vector<double> &figures, const std::vector<bool> &switches, double dilation) {
    check_usable();
    TORCH_CHECK_VALUE(figures.size() == 12 && switches.size() == 4, "a simulated TEE has 12 figures and 4 switches");
    TORCH_CHECK_VALUE(dilation >= 1, "dilation must be at least 1, got ", dilation);
    TeeSettings given;
    given.copy_overhead = seconds(figures[0] * dilation);
    given.plain_overhead = seconds(figures[1] * dilation);
    given.cpu_rate = figures[2] / dilation;
    given.cpu_threads = static_cast<size_t>(figures[3]);
    given.engines = static_cast<size_t>(figures[4]);
    given.link_rate = figures[5] / dilation;
    given.device_rate = figures[6] / dilation;
    given.authentication_rate = figures[7] / dilation;
    given.authentication_parts = static_cast<size_t>(figures[8]);
    given.piece_bytes = static_cast<size_t>(figures[9]);
    given.peer_rate = figures[10] / dilation;
    given.peer_overhead = seconds(figures[11] * dilation);
    given.confidential = switches[0];
    given.direct = switches[1];
    given.parallel_authentication = switches[2];
    given.overlap = switches[3];
    given.dilation = dilation;
    for (auto count : {given.cpu_threads, given.engines, given.authentication_parts, given.piece_bytes})
        TORCH_CHECK_VALUE(count >= 1, "a simulated TEE needs at least one thread, engine, part and byte of a piece");
    simulate_tee(std::make_shared<Tee>(given));
}

// What the latest bounce buffer holds.
at::Tensor read_bounce_buffer() {
    auto buffer = latest_bounce_buffer();
    TORCH_CHECK(!buffer.empty(), "no copy has used a bounce buffer yet");
    auto copied = at::empty({static_cast<int64_t>(buffer.size())}, at::kByte);
    std::memcpy(copied.mutable_data_ptr(), buffer.data(), buffer.size());
    return copied;
}

void sleep_in_stream(double duration) {
    TORCH_CHECK_VALUE(duration >= 0 && duration < 1e6, "a kernel cannot take ", duration, " seconds");
    check_usable();
    launch(current_queue(current_device()), seconds(duration), {});
}

// Kernels that run until the host releases them. Never destroyed: streams may wait for them until the process ends.
struct HeldKernels {
    std::mutex mutex;
    int64_t next = 0;
    std::map<int64_t, EventPtr> held;
};

HeldKernels &held_kernels() {
    static auto *only = new HeldKernels;
    return *only;
}

int64_t hold_stream() {
    check_usable();
    auto end = std::make_shared<Event>();
    end->record(); // reached by `release_kernel`
    current_queue(current_device()).wait(end);
    std::lock_guard<std::mutex> hold(held_kernels().mutex);
    held_kernels().held.emplace(held_kernels().next, std::move(end));
    return held_kernels().next++;
}

void release_kernel(int64_t kernel) {
    std::lock_guard<std::mutex> hold(held_kernels().mutex);
    auto found = held_kernels().held.extract(kernel);
    if (!found.empty())
        found.mapped()->reach(found.mapped()->recorded(), Clock::now());
}

// A kernel that fails when it runs, for tests of what happens then.
void fail_in_stream() {
    check_usable();
    launch(current_queue(current_device()), {}, [] { TORCH_CHECK(false, "this kernel fails on purpose"); });
}

void set_capturing(int64_t device, int64_t stream, bool on) {
    queue_of(static_cast<int>(device), stream).capturing = on;
}

std::vector<int64_t> read_stats() {
    auto &pinned = pinned_memory();
    std::vector<int64_t> values = {
        pinned.bytes(),         pinned.peak_bytes(),    counters.host_blocked_ns, counters.copies[kDown],
        counters.copies[kUp],   counters.bytes[kDown],  counters.bytes[kUp],      counters.sealed_copies,
        counters.sealed_bytes,  counters.late_ns,       counters.crypto_ns,       counters.host_waits,
    };
    for (int device = 0; device < device_count; ++device) {
        values.push_back(device_memory().bytes_in_use(device));
        values.push_back(device_memory().bytes_reserved(device));
    }
    return values;
}

// The default generator of a device.
at::Tensor random_state(int64_t device) {
    auto generator = default_generator(static_cast<int>(device));
    std::lock_guard<std::mutex> hold(generator.mutex());
    return generator.get_state();
}

void set_random_state(int64_t device, const at::Tensor &state) {
    auto generator = default_generator(static_cast<int>(device));
    std::lock_guard<std::mutex> hold(generator.mutex());
    generator.set_state(state);
}

void seed_generator(int64_t device, int64_t seed) {
    auto generator = default_generator(static_cast<int>(device));
    std::lock_guard<std::mutex> hold(generator.mutex());
    generator.set_current_seed(static_cast<uint64_t>(seed));
}

TORCH_LIBRARY(ringfence_sim, m) {
    m.def("start(int devices) -> ()", start);
    m.def("stop() -> ()", stop_streams);
    m.def("devices() -> int", [] { return static_cast<int64_t>(device_count.load()); });
    m.def("forked() -> bool", [] { return forked(); });
    m.def("configure(float kernel, float down, float up, float down_rate, float up_rate, float jitter, float lag, "
          "int seed) -> ()",
          configure_times);
    m.def("confidential(bool on) -> ()", [](bool on) { confidential = on; });
    m.def("load_libcrypto(str name) -> str", [](const std::string &name) { return load_libcrypto(name); });
    m.def("simulate_tee(float[] figures, bool[] switches, float dilation) -> ()",
          [](const std::vector<double> &figures, const c10::List<bool> &switches, double dilation) {
              begin_tee(figures, {switches.begin(), switches.end()}, dilation);
          });
    m.def("end_tee() -> ()", [] { simulate_tee(nullptr); });
    m.def("corrupt(int after, int position) -> ()", corrupt_bounce);
    m.def("bounce_buffer() -> Tensor", read_bounce_buffer);
    m.def("spend_nonces(int count) -> ()", spend_nonces);
    m.def("recover() -> ()", forget_failure);
    m.def("sleep(float seconds) -> ()", sleep_in_stream);
    m.def("hold() -> int", hold_stream);
    m.def("release(int kernel) -> ()", release_kernel);
    m.def("fail() -> ()", fail_in_stream);
    m.def("set_capturing(int device, int stream, bool on) -> ()", set_capturing);
    m.def("stats() -> int[]", read_stats);
    m.def("random_state(int device) -> Tensor", random_state);
    m.def("set_random_state(int device, Tensor state) -> ()", set_random_state);
    m.def("seed(int device, int seed) -> ()", seed_generator);
}

} // namespace

} // namespace ringfence::sim
