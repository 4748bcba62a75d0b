#ifndef RINGFENCE_SIM_STREAMS_HPP
#define RINGFENCE_SIM_STREAMS_HPP

// Streams and events. A stream is a thread with a queue of tasks.
//
// Each stream has a clock of its own. A task begins when the task before it has ended or when it was queued, whichever
// is later, and a task that takes time moves the clock and sleeps until then. So a thread that wakes up late delays one
// task and not those behind it, and the rates of copies are right on a busy machine.

#include "process.hpp"
#include "settings.hpp"

#include <c10/core/Stream.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>

namespace ringfence::sim {

constexpr int kStreams = 33; // of each device; 0 is the default stream, the others are handed out in turn

class Queue;

// Counts how often it was recorded and the last record that a stream has reached.
class Event {
  public:
    uint64_t record();
    uint64_t recorded();
    void reach(uint64_t version, Time when);
    Time await(uint64_t version); // returns the stream's clock at the record
    bool done();
    Time when();

  private:
    std::mutex mutex_;
    std::condition_variable changed_;
    uint64_t recorded_ = 0, reached_ = 0;
    Time when_{};
};

using EventPtr = std::shared_ptr<Event>; // tasks that are still queued keep it

class Queue {
  public:
    using Task = std::function<void(Queue &)>;

    // Add a task. It is delayed by the configured jitter, unless it is an event.
    void push(Task task, bool jitter = true);
    void record(const EventPtr &event);
    void wait(const EventPtr &event);

    bool idle();
    void synchronize(); // blocks until all that was queued before is done

    // For the task that is running: let time pass, and do so until a moment of the stream's clock.
    void pass(Duration duration) { pass_until(now_ + duration); }
    void pass_until(Time moment);
    void keep_up(); // moves a clock that has fallen too far behind, and counts that as late
    Time now() const { return now_; }

    std::atomic<bool> capturing{false};

  private:
    struct Entry {
        Task task;
        Time queued;
        Duration delay;
    };

    void run();
    Duration next_jitter();

    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Entry> entries_;
    uint64_t pushed_ = 0, done_ = 0;
    uint64_t drawn_ = 0, settings_version_ = 0; // delays since `configure`
    bool started_ = false;
    Time done_at_{}; // of the last task, on the stream's own clock
    Time now_{};     // of the stream's own clock; its thread alone uses it
};

int current_device();
void set_current_device(int64_t index);
int resolve_device(c10::Device device); // no index: the current device

int64_t exchange_stream(int device, int64_t stream); // returns the stream that was current before
c10::Stream make_stream(int device, int64_t stream);
c10::Stream current_stream(int device);

Queue &queue_of(int device, int64_t stream);
Queue &queue_of(const c10::Stream &stream);
Queue &current_queue(int device);

void synchronize_device(int device);
bool device_idle(int device);

// Adds a task that takes this long before it does its work, under `Working`.
void launch(Queue &queue, Duration duration, std::function<void()> work);

} // namespace ringfence::sim

#endif
