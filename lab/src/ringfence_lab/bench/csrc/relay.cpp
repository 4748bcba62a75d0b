// A long link between network namespaces: a TUN device in each, and packets between them with delay, jitter and loss.
//
//     relay DELAY_NS JITTER_NS LOSS SEED INTERFACE NAMESPACE ADDRESS [NAMESPACE ADDRESS ...]
//
// Packets leave in the order in which they came, for each destination. The delay moves within ± the jitter, in straight
// lines between random points: packets do not overtake each other, as in a queue. The program prints "ready" when the
// devices are there, a line of counters for each line on its stdin, and ends with its stdin or when a device is
// removed.

#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <deque>
#include <memory>
#include <string>
#include <vector>

namespace {

constexpr size_t kLargestPacket = 9216;
constexpr size_t kMostPackets = 16384;         // together; what comes beyond is dropped and counted
constexpr int kBatch = 64;                     // packets of a device before the others take turns
constexpr int64_t kShortestSwing = 20'000'000; // ns between two points of the jitter

using Memory = std::unique_ptr<uint8_t[]>;

struct Packet {
    int64_t due;
    size_t length;
    Memory data;
};

struct Port {
    int device;
    uint32_t address;
    std::deque<Packet> queue; // of what goes to this namespace
    int64_t last_due = 0;
    int64_t swing_begins = 0;
    double from = 0, to = 0; // the jitter moves from one to the other, within -1 to 1
};

struct Counters {
    unsigned long long packets = 0, bytes = 0, lost = 0, dropped = 0, unknown = 0;
};

[[noreturn]] void fail(const std::string &what) {
    fprintf(stderr, "%s: %s\n", what.c_str(), strerror(errno));
    exit(1);
}

int64_t now() {
    timespec time{};
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1'000'000'000LL + time.tv_nsec;
}

int device_in(const std::string &space, const char *interface) {
    const int inside = open(("/run/netns/" + space).c_str(), O_RDONLY | O_CLOEXEC);
    if (inside < 0 || setns(inside, CLONE_NEWNET) != 0)
        fail("namespace " + space);
    close(inside);
    const int device = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    if (device < 0)
        fail("/dev/net/tun");
    ifreq request{};
    request.ifr_flags = IFF_TUN | IFF_NO_PI;
    snprintf(request.ifr_name, IFNAMSIZ, "%s", interface);
    if (ioctl(device, TUNSETIFF, &request) != 0)
        fail("TUNSETIFF");
    return device;
}

class Relay {
  public:
    Relay(int64_t delay, int64_t jitter, double loss, uint64_t seed)
        : delay_(delay), jitter_(jitter), loss_(loss), state_(seed * 2 + 1) {
        epoll_ = epoll_create1(EPOLL_CLOEXEC);
        timer_ = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
        if (epoll_ < 0 || timer_ < 0)
            fail("epoll");
        watch(timer_, kTimer);
        watch(STDIN_FILENO, kInput);
    }

    void add(const std::string &space, const char *interface, const char *address) {
        Port port{};
        if (inet_pton(AF_INET, address, &port.address) != 1)
            fail(address);
        port.device = device_in(space, interface);
        watch(port.device, ports_.size());
        ports_.push_back(std::move(port));
    }

    int run() {
        for (;;) {
            epoll_event events[16];
            const int count = epoll_wait(epoll_, events, 16, -1);
            if (count < 0 && errno != EINTR)
                fail("epoll_wait");
            for (int index = 0; index < count; ++index) {
                const uint64_t which = events[index].data.u64;
                if (which == kInput) {
                    if (!answer())
                        return 0;
                } else if (which == kTimer) {
                    uint64_t expirations;
                    if (read(timer_, &expirations, sizeof expirations) < 0 && errno != EAGAIN)
                        fail("timer");
                } else {
                    receive(ports_[which].device);
                }
            }
            deliver();
        }
    }

  private:
    static constexpr uint64_t kTimer = ~0ULL, kInput = ~1ULL;

    void watch(int descriptor, uint64_t which) {
        epoll_event event{.events = EPOLLIN, .data = {.u64 = which}};
        if (epoll_ctl(epoll_, EPOLL_CTL_ADD, descriptor, &event) != 0)
            fail("epoll_ctl");
    }

    double random() { // 0 to 1
        state_ = state_ * 6364136223846793005ULL + 1442695040888963407ULL;
        return static_cast<double>(state_ >> 11) / 9007199254740992.0;
    }

    void receive(int device) {
        for (int number = 0; number < kBatch; ++number) {
            Memory data = take();
            const ssize_t length = read(device, data.get(), kLargestPacket);
            if (length < 0) {
                free_.push_back(std::move(data));
                if (errno == EAGAIN || errno == EINTR)
                    return;
                fail("read"); // the namespace was removed
            }
            queue(std::move(data), static_cast<size_t>(length));
        }
    }

    void queue(Memory data, size_t length) {
        Port *const port = length >= 20 && data[0] >> 4 == 4 ? to(data.get() + 16) : nullptr;
        if (port == nullptr) {
            ++counters_.unknown;
        } else if (random() < loss_) {
            ++counters_.lost;
        } else if (queued_ >= kMostPackets) {
            ++counters_.dropped;
        } else {
            port->last_due = std::max(port->last_due, now() + delay_ + jitter_of(*port));
            port->queue.push_back({port->last_due, length, std::move(data)});
            ++queued_;
            return;
        }
        free_.push_back(std::move(data));
    }

    Port *to(const uint8_t *address) {
        for (Port &port : ports_)
            if (memcmp(&port.address, address, sizeof port.address) == 0)
                return &port;
        return nullptr;
    }

    int64_t jitter_of(Port &port) {
        if (jitter_ == 0)
            return 0;
        const int64_t swing = std::max(kShortestSwing, 4 * jitter_);
        const int64_t at = now();
        if (at - port.swing_begins >= swing) {
            port.swing_begins = at;
            port.from = port.to;
            port.to = 2 * random() - 1;
        }
        const double part = static_cast<double>(at - port.swing_begins) / static_cast<double>(swing);
        return static_cast<int64_t>((port.from + (port.to - port.from) * part) * static_cast<double>(jitter_));
    }

    void deliver() {
        int64_t next = 0;
        for (Port &port : ports_) {
            while (!port.queue.empty() && port.queue.front().due <= now()) {
                Packet &packet = port.queue.front();
                if (write(port.device, packet.data.get(), packet.length) < 0) {
                    if (errno == EBADFD || errno == EIO)
                        fail("write");
                    ++counters_.dropped;
                } else {
                    ++counters_.packets;
                    counters_.bytes += packet.length;
                }
                free_.push_back(std::move(packet.data));
                port.queue.pop_front();
                --queued_;
            }
            if (!port.queue.empty() && (next == 0 || port.queue.front().due < next))
                next = port.queue.front().due;
        }
        itimerspec setting{}; // zero: nothing to wait for
        setting.it_value = {.tv_sec = next / 1'000'000'000, .tv_nsec = next % 1'000'000'000};
        if (timerfd_settime(timer_, TFD_TIMER_ABSTIME, &setting, nullptr) != 0)
            fail("timerfd_settime");
    }

    Memory take() {
        if (free_.empty())
            return std::make_unique_for_overwrite<uint8_t[]>(kLargestPacket);
        Memory data = std::move(free_.back()); // the one that was used last is in the cache
        free_.pop_back();
        return data;
    }

    bool answer() {
        char line[64];
        if (read(STDIN_FILENO, line, sizeof line) <= 0)
            return false;
        rusage usage{};
        getrusage(RUSAGE_SELF, &usage);
        const auto seconds = [](const timeval &time) {
            return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
        };
        printf("{\"packets\": %llu, \"bytes\": %llu, \"lost\": %llu, \"dropped\": %llu, \"cpu\": %.6f}\n",
               counters_.packets, counters_.bytes, counters_.lost, counters_.dropped,
               seconds(usage.ru_utime) + seconds(usage.ru_stime));
        fflush(stdout);
        return true;
    }

    const int64_t delay_, jitter_;
    const double loss_;
    uint64_t state_;
    int epoll_, timer_;
    std::deque<Port> ports_;
    std::vector<Memory> free_;
    size_t queued_ = 0;
    Counters counters_;
};

} // namespace

int main(int count, char **words) {
    if (count < 8 || count % 2 != 0) {
        fprintf(stderr,
                "usage: relay DELAY_NS JITTER_NS LOSS SEED INTERFACE NAMESPACE ADDRESS [NAMESPACE ADDRESS ...]\n");
        return 2;
    }
    Relay relay(atoll(words[1]), atoll(words[2]), atof(words[3]), strtoull(words[4], nullptr, 10));
    for (int index = 6; index + 1 < count; index += 2)
        relay.add(words[index], words[5], words[index + 1]);
    puts("ready");
    fflush(stdout);
    return relay.run();
}
