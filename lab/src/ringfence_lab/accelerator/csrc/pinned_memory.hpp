#ifndef RINGFENCE_SIM_PINNED_MEMORY_HPP
#define RINGFENCE_SIM_PINNED_MEMORY_HPP

// Pinned host memory. A freed block is used again when the streams that copied from or to it are through.

#include "streams.hpp"

#include <ATen/core/CachingHostAllocator.h>

#include <map>
#include <set>
#include <vector>

namespace ringfence::sim {

struct PinnedBlock {
    char *address;
    size_t size;
    std::set<std::pair<int, int64_t>> used_on; // device and stream
    std::vector<EventPtr> pending;             // of these, since it was freed
};

class PinnedMemory final : public at::HostAllocator {
  public:
    at::DataPtr allocate(size_t bytes) override;
    c10::DeleterFnPtr raw_deleter() const override { return nullptr; } // the deleter needs more than the address
    void copy_data(void *target, const void *source, size_t count) const override;
    bool record_event(void *pointer, void *context, c10::Stream stream) override;
    void empty_cache() override;
    at::HostStats get_stats() override;
    void reset_accumulated_stats() override;
    void reset_peak_stats() override;

    bool contains(const void *address); // of a block that is in use

    int64_t bytes();
    int64_t peak_bytes();

  private:
    static void release(void *context);
    void free(PinnedBlock *block);
    PinnedBlock *find(const void *address);
    void unmap(PinnedBlock *block);

    std::mutex mutex_;
    std::map<const char *, PinnedBlock *> blocks_;    // in use, by address
    std::map<size_t, std::vector<PinnedBlock *>> idle_; // by size
    at::HostStats stats_;
};

PinnedMemory &pinned_memory();

} // namespace ringfence::sim

#endif
