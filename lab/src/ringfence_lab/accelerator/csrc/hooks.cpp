// What torch asks about the accelerator as a whole.

#include "device_memory.hpp"
#include "generator.hpp"
#include "pinned_memory.hpp"
#include "tee.hpp"

#include <ATen/detail/PrivateUse1HooksInterface.h>

#include <cstring>

namespace ringfence::sim {

namespace {

struct Hooks final : at::PrivateUse1HooksInterface {
    void init() const override {}
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return device_count > 0; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return !forked(); }
    c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(device_count.load()); }

    c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_device()); }
    void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(device); }
    c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
        auto before = getCurrentDevice();
        if (device >= 0)
            set_current_device(device);
        return before;
    }
    c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }

    at::Allocator *getPinnedMemoryAllocator() const override { return &pinned_memory(); }
    bool isPinnedPtr(const void *data) const override { return !in_confidential_mode() && pinned_memory().contains(data); }
    c10::Device getDeviceFromPtr(void *data) const override {
        int device = device_of(data);
        TORCH_CHECK(device >= 0, "this address is not in the memory of the simulated accelerator");
        return c10::Device(kDeviceType, static_cast<c10::DeviceIndex>(device));
    }

    const at::Generator &getDefaultGenerator(c10::DeviceIndex device) const override {
        return default_generator(device);
    }
    at::Generator getNewGenerator(c10::DeviceIndex device) const override {
        return at::make_generator<Generator>(device < 0 ? current_device() : device);
    }

    // FSDP frees and reallocates the storage of its parameters through this.
    void resizePrivateUse1Bytes(const c10::Storage &storage, size_t bytes) const override {
        auto *self = storage.unsafeGetStorageImpl();
        c10::DeviceGuard guard(self->device());
        auto fresh = device_memory().allocate(bytes);
        auto kept = std::min(bytes, self->nbytes());
        if (kept > 0) {
            auto *from = device_address(self->data()), *to = device_address(fresh.get());
            launch(current_queue(self->device().index()), {}, [=] { std::memcpy(to, from, kept); });
        }
        self->set_data_ptr_noswap(std::move(fresh));
        self->set_nbytes(bytes);
    }
};

struct Registration {
    Registration() {
        at::RegisterPrivateUse1HooksInterface(new Hooks);
        c10::SetAllocator(kDeviceType, &device_memory());
        at::setHostAllocator(kDeviceType, &pinned_memory());
    }
} registration;

} // namespace

} // namespace ringfence::sim
