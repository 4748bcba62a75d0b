#ifndef RINGFENCE_SIM_DEVICE_MEMORY_HPP
#define RINGFENCE_SIM_DEVICE_MEMORY_HPP

// Device memory: one memory file that is mapped twice. Tensors show addresses of the first mapping, which nobody may
// access, so host code that touches device memory always faults. Stream threads use the second one.
//
// The caching allocator keeps freed blocks by the stream they were allocated on, as CUDA's does: that stream gets them
// again at once, and nobody does before the streams of `record_stream` are through. A block is overwritten, in stream
// order, when it is allocated: a missing wait or `record_stream` shows in the numbers. Not when it is freed: FSDP2
// relies on freed blocks staying as they are until their stream, which it makes wait, gets them again.

#include "streams.hpp"

#include <c10/core/CachingDeviceAllocator.h>

#include <map>
#include <set>
#include <tuple>
#include <vector>

namespace ringfence::sim {

constexpr size_t kDeviceBytes = size_t(1) << 33; // of each device; pages that are not used take no memory

// The address that a stream thread uses for an address that a tensor shows.
void *device_address(const void *shown);

// The device that an address belongs to, or -1.
int device_of(const void *shown);

// Free ranges of a device's memory.
class Extents {
  public:
    static constexpr size_t kNone = SIZE_MAX;
    Extents() { free_[0] = kDeviceBytes; }
    size_t take(size_t size); // returns the offset, or kNone
    void give(size_t offset, size_t size);

  private:
    std::map<size_t, size_t> free_; // offset to size
};

struct Block {
    size_t offset, size;
    int device;
    int64_t stream;                            // that it was allocated on
    std::set<std::pair<int, int64_t>> used_on; // device and stream, of record_stream
    std::vector<EventPtr> pending;             // of these, since it was freed
};

class DeviceMemory final : public c10::DeviceAllocator {
  public:
    c10::DataPtr allocate(size_t bytes) override;
    c10::DeleterFnPtr raw_deleter() const override { return nullptr; } // the deleter needs more than the address
    void copy_data(void *target, const void *source, size_t count) const override;
    bool initialized() override { return true; }
    void emptyCache(c10::MempoolId_t pool) override;
    void recordStream(const c10::DataPtr &pointer, c10::Stream stream) override;
    c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override;
    void resetAccumulatedStats(c10::DeviceIndex device) override;
    void resetPeakStats(c10::DeviceIndex device) override;
    std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override;

    int64_t bytes_in_use(int device);
    int64_t bytes_reserved(int device);

  private:
    struct Device {
        Extents extents;
        std::map<std::pair<int64_t, size_t>, std::vector<Block *>> idle; // by stream and size
        std::vector<Block *> pending;                                    // freed, still used on another stream
        c10::CachingDeviceAllocator::DeviceStats stats;
    };

    static void release(void *context);
    void free(Block *block);
    Block *reuse_or_reserve(int device, int64_t stream, size_t size);
    void collect(Device &device);
    void trim(int index);

    std::mutex mutex_;
    Device devices_[kMaxDevices];
};

DeviceMemory &device_memory();

} // namespace ringfence::sim

#endif
