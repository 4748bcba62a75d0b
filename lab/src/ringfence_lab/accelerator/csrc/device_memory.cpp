#include "device_memory.hpp"

#include <c10/util/Exception.h>

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace ringfence::sim {

namespace {

constexpr size_t kSmallestBlock = 512; // bytes, as CUDA
constexpr size_t kPage = 4096;
constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);

struct Mappings {
    char *shown, *usable;

    Mappings() {
        size_t bytes = kDeviceBytes * kMaxDevices;
        int file = memfd_create("ringfence-sim", MFD_CLOEXEC);
        TORCH_CHECK(file >= 0 && ftruncate(file, static_cast<off_t>(bytes)) == 0,
                    "the simulated accelerator cannot create its memory: ", std::strerror(errno));
        auto map = [&](int protection) {
            void *made = mmap(nullptr, bytes, protection, MAP_SHARED | MAP_NORESERVE, file, 0);
            TORCH_CHECK(made != MAP_FAILED, "the simulated accelerator cannot map its memory: ", std::strerror(errno));
            madvise(made, bytes, MADV_DONTDUMP);
            return static_cast<char *>(made);
        };
        shown = map(PROT_NONE);
        usable = map(PROT_READ | PROT_WRITE);
        close(file);
    }
};

Mappings &mappings() {
    static auto *only = new Mappings;
    return *only;
}

char *shown_address(const Block &block) {
    return mappings().shown + static_cast<size_t>(block.device) * kDeviceBytes + block.offset;
}

size_t rounded(size_t bytes) {
    size_t size = kSmallestBlock;
    while (size < bytes)
        size *= 2;
    return size;
}

} // namespace

void *device_address(const void *shown) {
    if (shown == nullptr)
        return nullptr;
    TORCH_CHECK(device_of(shown) >= 0, "this address is not in the memory of the simulated accelerator");
    return mappings().usable + (static_cast<const char *>(shown) - mappings().shown);
}

int device_of(const void *shown) {
    auto *address = static_cast<const char *>(shown);
    auto *begin = mappings().shown;
    if (address < begin || address >= begin + kDeviceBytes * kMaxDevices)
        return -1;
    return static_cast<int>(static_cast<size_t>(address - begin) / kDeviceBytes);
}

size_t Extents::take(size_t size) {
    for (auto found = free_.begin(); found != free_.end(); ++found) {
        auto [offset, available] = *found;
        if (available < size)
            continue;
        free_.erase(found);
        if (available > size)
            free_[offset + size] = available - size;
        return offset;
    }
    return kNone;
}

void Extents::give(size_t offset, size_t size) {
    auto next = free_.upper_bound(offset);
    if (next != free_.end() && offset + size == next->first) {
        size += next->second;
        next = free_.erase(next);
    }
    if (next != free_.begin() && std::prev(next)->first + std::prev(next)->second == offset)
        std::prev(next)->second += size;
    else
        free_[offset] = size;
}

c10::DataPtr DeviceMemory::allocate(size_t bytes) {
    check_usable();
    int device = current_device();
    c10::Device where(kDeviceType, static_cast<c10::DeviceIndex>(device));
    if (bytes == 0)
        return {nullptr, nullptr, &release, where};
    auto stream = current_stream(device).id();
    auto *block = reuse_or_reserve(device, stream, rounded(bytes));
    if (block == nullptr) { // as CUDA does when it is out of memory: wait for the device and return cached blocks
        trim(device);
        block = reuse_or_reserve(device, stream, rounded(bytes));
    }
    TORCH_CHECK_WITH(OutOfMemoryError, block != nullptr, "sim:", device, " is out of memory: tried to allocate ", bytes,
                     " bytes, ", bytes_in_use(device), " of ", kDeviceBytes, " are in use");
    auto *shown = shown_address(*block);
    auto *memory = device_address(shown);
    launch(queue_of(device, stream), {}, [memory, bytes] { std::memset(memory, kPoison, bytes); });
    return {shown, block, &release, where};
}

Block *DeviceMemory::reuse_or_reserve(int index, int64_t stream, size_t size) {
    std::lock_guard<std::mutex> hold(mutex_);
    auto &device = devices_[index];
    collect(device);
    auto &idle = device.idle[{stream, size}];
    Block *block = nullptr;
    if (!idle.empty()) {
        block = idle.back();
        idle.pop_back();
    } else {
        auto offset = device.extents.take(size);
        if (offset == Extents::kNone)
            return nullptr;
        block = new Block{offset, size, index, stream, {}, {}};
        device.stats.reserved_bytes[kAll].increase(size);
        device.stats.segment[kAll].increase(1);
        ++device.stats.num_device_alloc;
    }
    device.stats.allocated_bytes[kAll].increase(size);
    device.stats.active_bytes[kAll].increase(size);
    device.stats.allocation[kAll].increase(1);
    return block;
}

void DeviceMemory::release(void *context) {
    if (context != nullptr && !forked())
        device_memory().free(static_cast<Block *>(context));
}

void DeviceMemory::free(Block *block) {
    std::lock_guard<std::mutex> hold(mutex_);
    auto &device = devices_[block->device];
    device.stats.allocated_bytes[kAll].decrease(block->size);
    device.stats.active_bytes[kAll].decrease(block->size);
    device.stats.allocation[kAll].decrease(1);
    for (auto [index, stream] : block->used_on) {
        block->pending.push_back(std::make_shared<Event>());
        queue_of(index, stream).record(block->pending.back());
    }
    block->used_on.clear();
    device.pending.push_back(block);
    collect(device);
}

// Move freed blocks that no other stream uses any more to the lists they are taken from.
void DeviceMemory::collect(Device &device) {
    auto in_use = [](Block *block) {
        return !std::all_of(block->pending.begin(), block->pending.end(), [](auto &event) { return event->done(); });
    };
    auto kept = std::stable_partition(device.pending.begin(), device.pending.end(), in_use);
    for (auto each = kept; each != device.pending.end(); ++each) {
        (*each)->pending.clear();
        device.idle[{(*each)->stream, (*each)->size}].push_back(*each);
    }
    device.pending.erase(kept, device.pending.end());
}

// Return cached blocks to the system, if the device is idle after a wait.
void DeviceMemory::trim(int index) {
    synchronize_device(index);
    std::lock_guard<std::mutex> hold(mutex_);
    auto &device = devices_[index];
    collect(device);
    if (!device_idle(index))
        return; // another thread has queued work since
    for (auto &[key, blocks] : device.idle) {
        for (auto *block : blocks) {
            auto *memory = static_cast<char *>(device_address(shown_address(*block)));
            auto begin = (reinterpret_cast<uintptr_t>(memory) + kPage - 1) / kPage * kPage;
            auto end = (reinterpret_cast<uintptr_t>(memory) + block->size) / kPage * kPage;
            if (begin < end)
                madvise(reinterpret_cast<void *>(begin), end - begin, MADV_REMOVE);
            device.extents.give(block->offset, block->size);
            device.stats.reserved_bytes[kAll].decrease(block->size);
            device.stats.segment[kAll].decrease(1);
            ++device.stats.num_device_free;
            delete block;
        }
    }
    device.idle.clear();
}

void DeviceMemory::emptyCache(c10::MempoolId_t) {
    check_usable();
    for (int index = 0; index < device_count; ++index)
        trim(index);
}

void DeviceMemory::recordStream(const c10::DataPtr &pointer, c10::Stream stream) {
    auto *block = static_cast<Block *>(pointer.get_context());
    if (block == nullptr || pointer.get_deleter() != &release)
        return;
    queue_of(stream); // raises if it is a stream of something else
    std::lock_guard<std::mutex> hold(mutex_);
    if (stream.device_index() != block->device || stream.id() != block->stream)
        block->used_on.insert({stream.device_index(), stream.id()});
}

void DeviceMemory::copy_data(void *target, const void *source, size_t count) const {
    check_usable();
    auto *to = device_address(target), *from = device_address(source);
    launch(current_queue(device_of(target)), current_settings().kernel, [=] { std::memcpy(to, from, count); });
}

c10::CachingDeviceAllocator::DeviceStats DeviceMemory::getDeviceStats(c10::DeviceIndex device) {
    check_device(device);
    std::lock_guard<std::mutex> hold(mutex_);
    return devices_[device].stats;
}

void DeviceMemory::resetAccumulatedStats(c10::DeviceIndex device) {
    check_device(device);
    std::lock_guard<std::mutex> hold(mutex_);
    auto &stats = devices_[device].stats;
    for (auto *each : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.allocation})
        (*each)[kAll].reset_accumulated();
}

void DeviceMemory::resetPeakStats(c10::DeviceIndex device) {
    check_device(device);
    std::lock_guard<std::mutex> hold(mutex_);
    auto &stats = devices_[device].stats;
    for (auto *each : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.allocation})
        (*each)[kAll].reset_peak();
}

std::pair<size_t, size_t> DeviceMemory::getMemoryInfo(c10::DeviceIndex device) {
    check_device(device);
    return {kDeviceBytes - static_cast<size_t>(bytes_reserved(device)), kDeviceBytes};
}

int64_t DeviceMemory::bytes_in_use(int device) {
    std::lock_guard<std::mutex> hold(mutex_);
    return devices_[device].stats.allocated_bytes[kAll].current;
}

int64_t DeviceMemory::bytes_reserved(int device) {
    std::lock_guard<std::mutex> hold(mutex_);
    return devices_[device].stats.reserved_bytes[kAll].current;
}

DeviceMemory &device_memory() {
    static auto *only = new DeviceMemory;
    return *only;
}

} // namespace ringfence::sim
