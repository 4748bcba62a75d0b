#include "copy_engine.hpp"

#include <algorithm>

namespace ringfence::sim {

namespace {

constexpr double kWeight = 0.1; // of the latest copy in the average
constexpr size_t kSmallest = 16384; // copies that say something about the speed

} // namespace

Time CopyEngine::reserve(Time from, Duration duration) {
    std::lock_guard<std::mutex> hold(mutex_);
    free_at_ = std::max(free_at_, from) + duration;
    return free_at_;
}

Duration CopyEngine::expected(size_t bytes) {
    std::lock_guard<std::mutex> hold(mutex_);
    return seconds(seconds_per_byte_ * static_cast<double>(bytes));
}

void CopyEngine::learn(size_t bytes, Duration taken) {
    if (bytes < kSmallest)
        return;
    std::lock_guard<std::mutex> hold(mutex_);
    auto each = std::chrono::duration<double>(taken).count() / static_cast<double>(bytes);
    seconds_per_byte_ += (seconds_per_byte_ > 0 ? kWeight : 1) * (each - seconds_per_byte_);
}

void CopyEngine::copy(Queue &queue, Duration duration, size_t bytes, const std::function<void()> &move) {
    auto end = reserve(queue.now(), duration);
    // Not earlier than needed: a reader that does not wait for the copy finds old data.
    queue.pass_until(std::max(queue.now(), end - std::min(duration, expected(bytes))));
    auto begin = Clock::now();
    {
        Working working;
        move();
    }
    learn(bytes, Clock::now() - begin);
    queue.pass_until(end);
}

CopyEngine &copy_engine(int device, Direction direction) {
    static auto *all = new CopyEngine[kMaxDevices * 2];
    return all[device * 2 + direction];
}

} // namespace ringfence::sim
