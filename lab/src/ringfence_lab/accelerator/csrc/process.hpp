#ifndef RINGFENCE_SIM_PROCESS_HPP
#define RINGFENCE_SIM_PROCESS_HPP

// The state of the process: number of devices, fork, exit, and the first task that failed.

#include <c10/core/Device.h>

#include <atomic>
#include <string>

namespace ringfence::sim {

constexpr auto kDeviceType = c10::DeviceType::PrivateUse1;
constexpr int kMaxDevices = 8;
constexpr int kPoison = 0xFB; // what fresh memory holds; float32: about -2.6e36, int32: -67372037

extern std::atomic<int> device_count;

// Whether this process is a forked child of the one that loaded the device. Its threads are gone and its locks may be
// held forever, so a child frees nothing and may not use the device.
bool forked() noexcept;

// Raises if the process cannot use the device: a forked child, a process that is exiting, or after a failed task.
void check_usable();

// Raises if there is no such device.
void check_device(int64_t index);

// A stream task failed. Everything that uses the device raises this error from now on, as after a CUDA error.
void report_failure(const std::string &message) noexcept;

// For tests of several failures: the device is usable again.
void forget_failure();

// A stream thread holds one of these while it runs code of torch. `stop_streams` waits for it, so that no kernel runs
// while the libraries are torn down. After that call the constructor never returns.
class Working {
  public:
    Working();
    ~Working();
    Working(const Working &) = delete;
    Working &operator=(const Working &) = delete;
};

// Ends the execution of tasks, at the exit of the process. What is still queued is dropped, as on a GPU.
void stop_streams();

} // namespace ringfence::sim

#endif
