#include "process.hpp"

#include <c10/util/Exception.h>

#include <pthread.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>

namespace ringfence::sim {

std::atomic<int> device_count{0};

namespace {

constexpr auto kLongestKernel = std::chrono::seconds(10); // that an exiting process waits for

std::atomic<bool> in_child{false};
std::atomic<bool> failed{false};

// Never destroyed: stream threads use it until the process ends.
struct Shared {
    std::mutex mutex;
    std::condition_variable idle;
    int working = 0;
    std::atomic<bool> stopping{false};
    std::string failure;
};

Shared &shared() {
    static auto *only = new Shared;
    return *only;
}

struct Handlers {
    Handlers() {
        shared();
        pthread_atfork(nullptr, nullptr, [] { in_child = true; });
        std::atexit(stop_streams); // for programs that end without Python's own handlers
    }
} handlers;

} // namespace

bool forked() noexcept { return in_child.load(std::memory_order_relaxed); }

void check_usable() {
    TORCH_CHECK(!forked(), "the simulated accelerator cannot be used in a forked child: start the process with the "
                           "spawn method");
    TORCH_CHECK(!shared().stopping, "the simulated accelerator has stopped, because the process is exiting");
    if (failed) {
        std::lock_guard<std::mutex> hold(shared().mutex);
        TORCH_CHECK(false, "a task of the simulated accelerator failed; its results are invalid and the process has "
                           "to be restarted: ",
                    shared().failure);
    }
}

void check_device(int64_t index) {
    TORCH_CHECK(index >= 0 && index < device_count, "there is no device sim:", index, "; the simulated accelerator has ",
                device_count.load(), " devices");
}

void report_failure(const std::string &message) noexcept {
    std::lock_guard<std::mutex> hold(shared().mutex);
    if (failed)
        return;
    shared().failure = message;
    failed = true;
    std::fprintf(stderr, "simulated accelerator: a task failed: %s\n", message.c_str());
}

void forget_failure() {
    std::lock_guard<std::mutex> hold(shared().mutex);
    failed = false;
}

Working::Working() {
    std::unique_lock<std::mutex> hold(shared().mutex);
    while (shared().stopping) {
        hold.unlock();
        pause(); // the end of the process ends this thread
        hold.lock();
    }
    ++shared().working;
}

Working::~Working() {
    std::lock_guard<std::mutex> hold(shared().mutex);
    if (--shared().working == 0)
        shared().idle.notify_all();
}

void stop_streams() {
    if (forked())
        return;
    std::unique_lock<std::mutex> hold(shared().mutex);
    shared().stopping = true;
    shared().idle.wait_for(hold, kLongestKernel, [] { return shared().working == 0; });
}

} // namespace ringfence::sim
