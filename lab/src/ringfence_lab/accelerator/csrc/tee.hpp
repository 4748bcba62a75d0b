#ifndef RINGFENCE_SIM_TEE_HPP
#define RINGFENCE_SIM_TEE_HPP

// What `simulate_tee` sets, what its copies share, and how long each of them takes.
//
// A copy through a bounce buffer holds a copy engine of its device and direction from its begin to its end. Its stages
// are encryption, transfer, authentication and decryption. They follow each other, or run piece by piece at the same
// time (`overlap`). Stages that several copies share queue: driver threads of the machine, and the link of a device.

#include "libcrypto.hpp"
#include "process.hpp"
#include "timeline.hpp"

#include <deque>
#include <memory>
#include <mutex>

namespace ringfence::sim {

struct TeeSettings {
    Duration copy_overhead{}, plain_overhead{}, peer_overhead{}; // all times are dilated
    double cpu_rate = 0, link_rate = 0, device_rate = 0, authentication_rate = 0, peer_rate = 0;
    size_t cpu_threads = 1, engines = 1, authentication_parts = 1, piece_bytes = 1;
    bool confidential = false, direct = false, parallel_authentication = false, overlap = false;
    double dilation = 1;

    size_t pieces(size_t bytes) const { return (bytes + piece_bytes - 1) / piece_bytes; }
};

struct Window {
    Time begin, end;
};

class Tee {
  public:
    explicit Tee(const TeeSettings &settings);

    const TeeSettings settings;

    // The key of copies from one place to another: a device, or -1 for the host. Only in confidential mode.
    Key &key(int from, int to) { return keys_.at(static_cast<size_t>((from + 1) * (kMaxDevices + 1) + to + 1)); }
    void spend_nonces(uint64_t count);

    // When a copy is done that could begin at `from`; the copy occupies what it needs.
    Window plain(int device, Direction direction, Time from, size_t bytes);
    Window peer(int source, int target, Time from, size_t bytes);
    Window sealed(int device, Direction direction, Time from, size_t bytes);
    // Of a direct copy between devices: with overlap both halves have the same window.
    Window direct_first(int source, int target, Time from, size_t bytes);
    Window direct_second(int target, const Window &first, Time from, size_t bytes);

  private:
    // How long a stage takes for all bytes and for one piece.
    struct Stage {
        Duration whole, piece;
    };
    struct Engines {
        explicit Engines(size_t count) : free_at(count) {}
        Time &earliest();
        std::vector<Time> free_at;
    };
    struct Port {
        Engines engines;
        Timeline link{1};
        Time peer_free_at{};
    };

    Stage stage(double rate, size_t bytes) const;
    Stage authentication(size_t bytes) const;
    static Duration pipelined(std::initializer_list<Stage> stages);
    Port &port(int device, Direction direction) { return ports_[static_cast<size_t>(device * 2 + direction)]; }

    std::mutex mutex_;
    std::vector<Port> ports_; // by device and direction
    Timeline cpu_;
    std::deque<Key> keys_;
};

using TeePtr = std::shared_ptr<Tee>; // copies that are queued keep it

TeePtr current_tee(); // null: none is simulated
void simulate_tee(TeePtr tee);

// Whether host-device copies behave as in confidential mode.
bool in_confidential_mode();

} // namespace ringfence::sim

#endif
