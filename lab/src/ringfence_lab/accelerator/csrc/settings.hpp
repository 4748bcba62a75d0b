#ifndef RINGFENCE_SIM_SETTINGS_HPP
#define RINGFENCE_SIM_SETTINGS_HPP

// What `configure` and `confidential` set, and what `stats` counts. Those of `simulate_tee` are in tee.hpp.

#include <atomic>
#include <chrono>
#include <cstdint>

namespace ringfence::sim {

using Clock = std::chrono::steady_clock;
using Time = Clock::time_point;
using Duration = Clock::duration;

Duration seconds(double count);

constexpr auto kLag = std::chrono::milliseconds(1); // unless `configure` sets another one

enum Direction { kDown, kUp }; // device to host, host to device

struct Settings {
    Duration kernel{};    // of every kernel
    Duration copy[2]{};   // fixed time of every copy, by direction
    double rate[2]{};     // bytes per second; 0: not limited
    Duration jitter{};    // the largest random delay of a task
    Duration lag{kLag};   // how far a stream's clock may fall behind
    uint64_t seed = 0;    // of the delays
    uint64_t version = 0; // counts calls of `configure`

    Duration copy_time(Direction direction, size_t bytes) const;
};

Settings current_settings();
void configure(const Settings &settings);

extern std::atomic<bool> confidential;
extern std::atomic<int64_t> lag_ns; // how far a stream's clock may fall behind while a TEE is simulated; 0: none is
Duration largest_lag();             // that one or the configured one, whichever is larger

struct Counters {
    std::atomic<int64_t> host_blocked_ns{0}, host_waits{0};
    std::atomic<int64_t> copies[2]{}, bytes[2]{};
    std::atomic<int64_t> sealed_copies{0}, sealed_bytes{0}; // through bounce buffers
    std::atomic<int64_t> late_ns{0}, crypto_ns{0};
};

extern Counters counters;

// A stream was behind the simulated time between two moments, because the host is too slow. Moments count once, however
// many streams are late.
void count_late(Time begin, Time end);

// Counts a wait of the host, and adds the time until its end to `host_blocked_ns`.
class HostBlocked {
  public:
    HostBlocked() : begin_(Clock::now()) { ++counters.host_waits; }
    ~HostBlocked() {
        auto passed = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - begin_);
        counters.host_blocked_ns += passed.count();
    }
    HostBlocked(const HostBlocked &) = delete;
    HostBlocked &operator=(const HostBlocked &) = delete;

  private:
    Time begin_;
};

} // namespace ringfence::sim

#endif
