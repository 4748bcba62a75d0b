#include "pinned_memory.hpp"

#include <c10/util/Exception.h>

#include <sys/mman.h>

#include <algorithm>
#include <cstring>

namespace ringfence::sim {

namespace {

constexpr size_t kSmallestPinned = 4096; // a page

bool in_use(PinnedBlock *block) {
    return !std::all_of(block->pending.begin(), block->pending.end(), [](auto &event) { return event->done(); });
}

} // namespace

at::DataPtr PinnedMemory::allocate(size_t bytes) {
    check_usable();
    if (bytes == 0)
        return {nullptr, nullptr, &release, at::kCPU};
    size_t size = kSmallestPinned;
    while (size < bytes)
        size *= 2;
    PinnedBlock *block = nullptr;
    {
        std::lock_guard<std::mutex> hold(mutex_);
        auto &idle = idle_[size];
        auto found = std::find_if_not(idle.begin(), idle.end(), in_use);
        if (found != idle.end()) {
            block = *found;
            idle.erase(found);
            block->pending.clear();
        } else {
            void *made = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            TORCH_CHECK_WITH(OutOfMemoryError, made != MAP_FAILED, "cannot allocate ", bytes, " bytes of pinned memory");
            block = new PinnedBlock{static_cast<char *>(made), size, {}, {}};
            stats_.allocated_bytes.increase(size);
            stats_.allocations.increase(1);
            ++stats_.num_host_alloc;
        }
        blocks_[block->address] = block;
        stats_.active_bytes.increase(size);
        stats_.active_requests.increase(1);
    }
    std::memset(block->address, kPoison, bytes);
    return {block->address, block, &release, at::kCPU};
}

void PinnedMemory::release(void *context) {
    if (context != nullptr && !forked())
        pinned_memory().free(static_cast<PinnedBlock *>(context));
}

void PinnedMemory::free(PinnedBlock *block) {
    std::lock_guard<std::mutex> hold(mutex_);
    for (auto [device, stream] : block->used_on) {
        block->pending.push_back(std::make_shared<Event>());
        queue_of(device, stream).record(block->pending.back());
    }
    block->used_on.clear();
    blocks_.erase(block->address);
    idle_[block->size].push_back(block);
    stats_.active_bytes.decrease(block->size);
    stats_.active_requests.decrease(1);
}

PinnedBlock *PinnedMemory::find(const void *address) {
    auto *wanted = static_cast<const char *>(address);
    auto next = blocks_.upper_bound(wanted);
    if (next == blocks_.begin())
        return nullptr;
    auto *block = std::prev(next)->second;
    return wanted < block->address + block->size ? block : nullptr;
}

bool PinnedMemory::contains(const void *address) {
    if (forked())
        return false;
    std::lock_guard<std::mutex> hold(mutex_);
    return find(address) != nullptr;
}

bool PinnedMemory::record_event(void *pointer, void *, c10::Stream stream) {
    check_usable();
    queue_of(stream); // raises if it is a stream of something else
    std::lock_guard<std::mutex> hold(mutex_);
    auto *block = find(pointer);
    if (block == nullptr)
        return false;
    block->used_on.insert({stream.device_index(), stream.id()});
    return true;
}

void PinnedMemory::copy_data(void *target, const void *source, size_t count) const {
    std::memcpy(target, source, count);
}

void PinnedMemory::unmap(PinnedBlock *block) {
    munmap(block->address, block->size);
    stats_.allocated_bytes.decrease(block->size);
    stats_.allocations.decrease(1);
    ++stats_.num_host_free;
    delete block;
}

void PinnedMemory::empty_cache() {
    check_usable();
    std::lock_guard<std::mutex> hold(mutex_);
    for (auto &[size, idle] : idle_) {
        auto unused = std::stable_partition(idle.begin(), idle.end(), in_use);
        std::for_each(unused, idle.end(), [this](auto *block) { unmap(block); });
        idle.erase(unused, idle.end());
    }
}

at::HostStats PinnedMemory::get_stats() {
    std::lock_guard<std::mutex> hold(mutex_);
    return stats_;
}

void PinnedMemory::reset_accumulated_stats() {
    std::lock_guard<std::mutex> hold(mutex_);
    for (auto *each : {&stats_.allocated_bytes, &stats_.allocations, &stats_.active_bytes, &stats_.active_requests})
        each->reset_accumulated();
}

void PinnedMemory::reset_peak_stats() {
    std::lock_guard<std::mutex> hold(mutex_);
    for (auto *each : {&stats_.allocated_bytes, &stats_.allocations, &stats_.active_bytes, &stats_.active_requests})
        each->reset_peak();
}

int64_t PinnedMemory::bytes() {
    std::lock_guard<std::mutex> hold(mutex_);
    return stats_.allocated_bytes.current;
}

int64_t PinnedMemory::peak_bytes() {
    std::lock_guard<std::mutex> hold(mutex_);
    return stats_.allocated_bytes.peak;
}

PinnedMemory &pinned_memory() {
    static auto *only = new PinnedMemory;
    return *only;
}

} // namespace ringfence::sim
