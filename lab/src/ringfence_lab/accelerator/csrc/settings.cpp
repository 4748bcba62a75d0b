#include "settings.hpp"

#include <algorithm>
#include <mutex>

namespace ringfence::sim {

std::atomic<bool> confidential{false};
std::atomic<int64_t> lag_ns{0};
Counters counters;

namespace {

std::atomic<int64_t> configured_lag_ns{std::chrono::nanoseconds(kLag).count()}; // `Settings::lag` without its lock

struct Stored {
    std::mutex mutex;
    Settings settings;
};

Stored &stored() {
    static auto *only = new Stored;
    return *only;
}

} // namespace

void count_late(Time begin, Time end) {
    static auto *mutex = new std::mutex;
    static Time counted{};
    std::lock_guard<std::mutex> hold(*mutex);
    begin = std::max(begin, counted);
    if (begin >= end)
        return;
    counters.late_ns += std::chrono::duration_cast<std::chrono::nanoseconds>(end - begin).count();
    counted = end;
}

Duration largest_lag() {
    return std::chrono::nanoseconds(std::max(lag_ns.load(), configured_lag_ns.load()));
}

Duration seconds(double count) { return std::chrono::duration_cast<Duration>(std::chrono::duration<double>(count)); }

Duration Settings::copy_time(Direction direction, size_t bytes) const {
    return copy[direction] + (rate[direction] > 0 ? seconds(static_cast<double>(bytes) / rate[direction]) : Duration{});
}

Settings current_settings() {
    std::lock_guard<std::mutex> hold(stored().mutex);
    return stored().settings;
}

void configure(const Settings &settings) {
    std::lock_guard<std::mutex> hold(stored().mutex);
    auto version = stored().settings.version + 1;
    stored().settings = settings;
    stored().settings.version = version;
    configured_lag_ns = std::chrono::duration_cast<std::chrono::nanoseconds>(settings.lag).count();
}

} // namespace ringfence::sim
