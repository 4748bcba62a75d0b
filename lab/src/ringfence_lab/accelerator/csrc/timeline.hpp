#ifndef RINGFENCE_SIM_TIMELINE_HPP
#define RINGFENCE_SIM_TIMELINE_HPP

// When something is in use that copies share: driver threads, links.

#include "settings.hpp"

#include <map>
#include <vector>

namespace ringfence::sim {

// A number of equal servers. A reservation takes the earliest gap that is long enough, also between two others: one may
// be made long before it begins.
class Timeline {
  public:
    explicit Timeline(size_t servers) : servers_(servers) {}
    Time reserve(Time from, Duration duration); // returns when it begins

  private:
    using Busy = std::map<Time, Time>; // begin to end

    static Time first_gap(const Busy &busy, Time from, Duration duration);

    std::vector<Busy> servers_;
};

} // namespace ringfence::sim

#endif
