#include "streams.hpp"

#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include <sys/prctl.h>

#include <algorithm>
#include <thread>

namespace ringfence::sim {

namespace {

constexpr auto kShortest = std::chrono::microseconds(50); // a shorter sleep is left to a later task

thread_local int this_device = 0;
thread_local int64_t this_stream[kMaxDevices] = {};

// A mix of bits (splitmix64).
uint64_t mix(uint64_t value) {
    value += 0x9E3779B97F4A7C15u;
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9u;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EBu;
    return value ^ (value >> 31);
}

Queue *all_queues() {
    static auto *all = new Queue[kMaxDevices * kStreams]; // never destroyed: threads use it until the process ends
    return all;
}

} // namespace

uint64_t Event::record() {
    std::lock_guard<std::mutex> hold(mutex_);
    return ++recorded_;
}

uint64_t Event::recorded() {
    std::lock_guard<std::mutex> hold(mutex_);
    return recorded_;
}

void Event::reach(uint64_t version, Time when) {
    std::lock_guard<std::mutex> hold(mutex_);
    if (version > reached_) {
        reached_ = version;
        when_ = when;
    }
    changed_.notify_all();
}

Time Event::await(uint64_t version) {
    std::unique_lock<std::mutex> hold(mutex_);
    changed_.wait(hold, [&] { return reached_ >= version; });
    return when_;
}

bool Event::done() {
    std::lock_guard<std::mutex> hold(mutex_);
    return reached_ >= recorded_;
}

Time Event::when() {
    std::lock_guard<std::mutex> hold(mutex_);
    return when_;
}

void Queue::push(Task task, bool jitter) {
    std::lock_guard<std::mutex> hold(mutex_);
    if (!started_) {
        started_ = true;
        std::thread([this] { run(); }).detach(); // lives as long as the process
    }
    entries_.push_back({std::move(task), Clock::now(), jitter ? next_jitter() : Duration{}});
    ++pushed_;
    changed_.notify_all();
}

Duration Queue::next_jitter() {
    auto settings = current_settings();
    if (settings.jitter == Duration{})
        return {};
    if (settings_version_ != settings.version) {
        settings_version_ = settings.version;
        drawn_ = 0;
    }
    auto place = static_cast<uint64_t>(this - all_queues());
    auto random = mix(mix(mix(settings.seed) ^ place) ^ drawn_++);
    return Duration(random % static_cast<uint64_t>(settings.jitter.count() + 1));
}

void Queue::record(const EventPtr &event) {
    auto version = event->record();
    push([event, version](Queue &queue) { event->reach(version, queue.now_); }, false);
}

void Queue::wait(const EventPtr &event) {
    auto version = event->recorded();
    push([event, version](Queue &queue) { queue.now_ = std::max(queue.now_, event->await(version)); }, false);
}

bool Queue::idle() {
    std::lock_guard<std::mutex> hold(mutex_);
    return done_ == pushed_;
}

void Queue::synchronize() {
    TORCH_CHECK(!capturing, "a stream that is being captured into a graph cannot be waited for");
    std::unique_lock<std::mutex> hold(mutex_);
    auto last = pushed_;
    if (done_ >= last)
        return;
    changed_.wait(hold, [&] { return done_ >= last; });
    if (lag_ns > 0)
        count_late(done_at_, Clock::now()); // the host has waited for what the stream was behind
}

void Queue::pass_until(Time moment) {
    now_ = std::max(now_, moment);
    if (now_ - Clock::now() > kShortest)
        std::this_thread::sleep_until(now_);
}

void Queue::keep_up() {
    auto least = Clock::now() - largest_lag();
    if (now_ >= least)
        return;
    if (lag_ns > 0)
        count_late(now_, least);
    now_ = least;
}

void Queue::run() {
    prctl(PR_SET_TIMERSLACK, 1000); // sleeps end within microseconds, not the usual 50
    c10::InferenceMode inference(true);
    std::unique_lock<std::mutex> hold(mutex_);
    while (true) {
        changed_.wait(hold, [this] { return !entries_.empty(); });
        auto entry = std::move(entries_.front());
        entries_.pop_front();
        hold.unlock();
        now_ = std::max(now_, entry.queued);
        keep_up();
        pass(entry.delay);
        try {
            entry.task(*this);
        } catch (const c10::Error &error) {
            report_failure(error.what_without_backtrace());
        } catch (const std::exception &error) {
            report_failure(error.what());
        }
        {
            Working working; // the task may hold the last reference to a tensor
            entry.task = nullptr;
        }
        hold.lock();
        ++done_;
        done_at_ = now_;
        changed_.notify_all();
    }
}

int current_device() { return this_device; }

void set_current_device(int64_t index) {
    check_device(index);
    this_device = static_cast<int>(index);
}

int resolve_device(c10::Device device) {
    int index = device.index() < 0 ? this_device : device.index();
    check_device(index);
    return index;
}

int64_t exchange_stream(int device, int64_t stream) {
    queue_of(device, stream); // raises if there is none
    return std::exchange(this_stream[device], stream);
}

c10::Stream make_stream(int device, int64_t stream) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDeviceType, static_cast<c10::DeviceIndex>(device)), stream);
}

c10::Stream current_stream(int device) { return make_stream(device, this_stream[device]); }

Queue &queue_of(int device, int64_t stream) {
    check_device(device);
    TORCH_CHECK(stream >= 0 && stream < kStreams, "sim:", device, " has no stream ", stream);
    return all_queues()[device * kStreams + stream];
}

Queue &queue_of(const c10::Stream &stream) {
    TORCH_CHECK(stream.device_type() == kDeviceType, "expected a stream of the simulated accelerator, got one of ",
                stream.device());
    return queue_of(stream.device_index(), stream.id());
}

Queue &current_queue(int device) { return queue_of(device, this_stream[device]); }

void synchronize_device(int device) {
    for (int64_t stream = 0; stream < kStreams; ++stream)
        queue_of(device, stream).synchronize();
}

bool device_idle(int device) {
    for (int64_t stream = 0; stream < kStreams; ++stream)
        if (!queue_of(device, stream).idle())
            return false;
    return true;
}

void launch(Queue &queue, Duration duration, std::function<void()> work) {
    queue.push([duration, work = std::move(work)](Queue &running) {
        running.pass(duration);
        if (!work)
            return;
        Working working;
        work();
    });
}

} // namespace ringfence::sim
