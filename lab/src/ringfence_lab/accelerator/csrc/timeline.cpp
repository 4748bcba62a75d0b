#include "timeline.hpp"

#include <algorithm>

namespace ringfence::sim {

namespace {

constexpr auto kRemembered = std::chrono::seconds(1); // longer than a stream falls behind, beside its lag

} // namespace

Time Timeline::first_gap(const Busy &busy, Time from, Duration duration) {
    auto begin = from;
    for (auto [taken, free] : busy) {
        if (taken >= begin + duration)
            break;
        begin = std::max(begin, free);
    }
    return begin;
}

Time Timeline::reserve(Time from, Duration duration) {
    if (duration <= Duration{})
        return from;
    auto past = std::min(from, Clock::now()) - largest_lag() - kRemembered;
    Busy *chosen = nullptr;
    Time begin{};
    for (auto &busy : servers_) {
        while (!busy.empty() && busy.begin()->second < past)
            busy.erase(busy.begin());
        auto found = first_gap(busy, from, duration);
        if (chosen == nullptr || found < begin) {
            chosen = &busy;
            begin = found;
        }
    }
    chosen->emplace(begin, begin + duration);
    return begin;
}

} // namespace ringfence::sim
