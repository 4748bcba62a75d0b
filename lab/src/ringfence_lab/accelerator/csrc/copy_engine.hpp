#ifndef RINGFENCE_SIM_COPY_ENGINE_HPP
#define RINGFENCE_SIM_COPY_ENGINE_HPP

// The copy engines: one for each direction and device. Copies of all streams queue for it.

#include "streams.hpp"

namespace ringfence::sim {

class CopyEngine {
  public:
    // For the running task of a stream: occupy the engine for this long, and move the bytes at the end of that time.
    void copy(Queue &queue, Duration duration, size_t bytes, const std::function<void()> &move);

  private:
    Time reserve(Time from, Duration duration);
    Duration expected(size_t bytes);
    void learn(size_t bytes, Duration taken);

    std::mutex mutex_;
    Time free_at_{};
    double seconds_per_byte_ = 0; // that the host needs to move the bytes, an average
};

CopyEngine &copy_engine(int device, Direction direction);

} // namespace ringfence::sim

#endif
