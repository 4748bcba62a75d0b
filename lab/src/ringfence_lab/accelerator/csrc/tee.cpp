#include "tee.hpp"

#include <algorithm>

namespace ringfence::sim {

namespace {

// Seconds, before dilation: how far a stream's clock may fall behind, and at most.
constexpr double kLagOfTee = 0.1, kLargestLag = 60;

struct CurrentTee {
    std::mutex mutex;
    TeePtr tee;
    std::atomic<bool> confidential{false};
};

CurrentTee &current() {
    static auto *only = new CurrentTee;
    return *only;
}

} // namespace

TeePtr current_tee() {
    std::lock_guard<std::mutex> hold(current().mutex);
    return current().tee;
}

void simulate_tee(TeePtr tee) {
    std::lock_guard<std::mutex> hold(current().mutex);
    current().confidential = tee != nullptr && tee->settings.confidential;
    lag_ns = tee != nullptr ? seconds(std::min(kLagOfTee * tee->settings.dilation, kLargestLag)).count() : 0;
    current().tee = std::move(tee);
}

bool in_confidential_mode() { return confidential || current().confidential; }

Tee::Tee(const TeeSettings &given) : settings(given), cpu_(given.cpu_threads) {
    for (int index = 0; index < kMaxDevices * 2; ++index)
        ports_.push_back(Port{Engines(given.engines)});
    for (int index = 0; settings.confidential && index < (kMaxDevices + 1) * (kMaxDevices + 1); ++index)
        keys_.emplace_back();
}

void Tee::spend_nonces(uint64_t count) {
    for (auto &key : keys_)
        key.spend_nonces(count);
}

Time &Tee::Engines::earliest() { return *std::min_element(free_at.begin(), free_at.end()); }

Tee::Stage Tee::stage(double rate, size_t bytes) const {
    if (rate <= 0)
        return {};
    auto piece = std::min(bytes, settings.piece_bytes);
    return {seconds(static_cast<double>(bytes) / rate), seconds(static_cast<double>(piece) / rate)};
}

Tee::Stage Tee::authentication(size_t bytes) const {
    auto found = stage(settings.authentication_rate, bytes);
    if (settings.parallel_authentication)
        found.whole /= static_cast<int64_t>(std::min(settings.authentication_parts, settings.pieces(bytes)));
    return found;
}

// The stage that holds up the others, and the time that one piece takes through those.
Duration Tee::pipelined(std::initializer_list<Stage> stages) {
    Duration longest{}, pieces{};
    for (auto &each : stages) {
        longest = std::max(longest, each.whole - each.piece);
        pieces += each.piece;
    }
    return longest + pieces;
}

Window Tee::plain(int device, Direction direction, Time from, size_t bytes) {
    std::lock_guard<std::mutex> hold(mutex_);
    auto &used = port(device, direction);
    auto &engine = used.engines.earliest();
    auto begin = std::max(from, engine);
    auto link = stage(settings.link_rate, bytes).whole;
    engine = used.link.reserve(begin + settings.plain_overhead, link) + link;
    return {begin, engine};
}

Window Tee::peer(int source, int target, Time from, size_t bytes) {
    std::lock_guard<std::mutex> hold(mutex_);
    auto &out = port(source, kDown).peer_free_at, &in = port(target, kUp).peer_free_at;
    auto begin = std::max({from, out, in});
    out = in = begin + settings.peer_overhead + stage(settings.peer_rate, bytes).whole;
    return {begin, out};
}

Window Tee::sealed(int device, Direction direction, Time from, size_t bytes) {
    std::lock_guard<std::mutex> hold(mutex_);
    auto &used = port(device, direction);
    auto &engine = used.engines.earliest();
    auto begin = std::max(from, engine), ready = begin + settings.copy_overhead;
    auto cpu = stage(settings.cpu_rate, bytes), link = stage(settings.link_rate, bytes);
    auto cipher = stage(settings.device_rate, bytes), tag = authentication(bytes);
    Time end;
    if (direction == kUp && !settings.overlap) {
        auto encrypted = cpu_.reserve(ready, cpu.whole) + cpu.whole;
        end = used.link.reserve(encrypted, link.whole) + link.whole + tag.whole + cipher.whole;
    } else if (direction == kDown && !settings.overlap) {
        auto sent = used.link.reserve(ready + cipher.whole + tag.whole, link.whole) + link.whole;
        end = cpu_.reserve(sent, cpu.whole) + cpu.whole;
    } else if (direction == kUp) {
        auto encrypted = cpu_.reserve(ready, cpu.whole);
        auto sent = used.link.reserve(encrypted + cpu.piece, link.whole);
        end = std::max(encrypted + pipelined({cpu, link, tag, cipher}), sent + pipelined({link, tag, cipher}));
    } else {
        auto sent = used.link.reserve(ready + cipher.piece + tag.piece, link.whole);
        auto decrypted = cpu_.reserve(sent + link.piece, cpu.whole) + cpu.whole;
        end = std::max({ready + pipelined({cipher, tag, link, cpu}), sent + pipelined({link, cpu}), decrypted});
    }
    engine = end;
    return {begin, end};
}

Window Tee::direct_first(int source, int target, Time from, size_t bytes) {
    std::lock_guard<std::mutex> hold(mutex_);
    auto &out = port(source, kDown), &in = port(target, kUp);
    auto &reader = out.engines.earliest(), &writer = in.engines.earliest();
    auto link = stage(settings.link_rate, bytes), cipher = stage(settings.device_rate, bytes);
    auto tag = authentication(bytes);
    if (!settings.overlap) {
        auto begin = std::max(from, reader);
        auto encrypted = begin + settings.copy_overhead + cipher.whole + tag.whole;
        reader = out.link.reserve(encrypted, link.whole) + link.whole;
        return {begin, reader};
    }
    auto begin = std::max({from, reader, writer}), ready = begin + settings.copy_overhead;
    auto sent = out.link.reserve(ready + cipher.piece + tag.piece, link.whole);
    auto received = in.link.reserve(sent + link.piece, link.whole);
    reader = writer = std::max({ready + pipelined({cipher, tag, link, link, tag, cipher}),
                                sent + pipelined({link, link, tag, cipher}),
                                received + pipelined({link, tag, cipher})});
    return {begin, reader};
}

Window Tee::direct_second(int target, const Window &first, Time from, size_t bytes) {
    if (settings.overlap)
        return first;
    std::lock_guard<std::mutex> hold(mutex_);
    auto &in = port(target, kUp);
    auto &writer = in.engines.earliest();
    auto begin = std::max(from, writer);
    auto link = stage(settings.link_rate, bytes);
    auto received = in.link.reserve(begin, link.whole) + link.whole;
    writer = received + authentication(bytes).whole + stage(settings.device_rate, bytes).whole;
    return {begin, writer};
}

} // namespace ringfence::sim
