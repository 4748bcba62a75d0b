// What torch asks about devices, streams and events.

#include "device_memory.hpp"
#include "streams.hpp"

#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace ringfence::sim {

namespace {

EventPtr &event_of(void *event) { return *static_cast<EventPtr *>(event); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override { return kDeviceType; }

    c10::Device exchangeDevice(c10::Device device) const override {
        auto before = getDevice();
        setDevice(device);
        return before;
    }
    c10::Device getDevice() const override {
        return c10::Device(kDeviceType, static_cast<c10::DeviceIndex>(current_device()));
    }
    void setDevice(c10::Device device) const override {
        if (device.index() >= 0)
            set_current_device(device.index());
    }
    void uncheckedSetDevice(c10::Device device) const noexcept override {
        if (device.index() >= 0 && device.index() < device_count)
            set_current_device(device.index());
    }
    c10::DeviceIndex deviceCount() const noexcept override {
        return static_cast<c10::DeviceIndex>(device_count.load());
    }
    c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; } // all data types

    c10::Stream getStream(c10::Device device) const override { return current_stream(resolve_device(device)); }
    c10::Stream getDefaultStream(c10::Device device) const override { return make_stream(resolve_device(device), 0); }
    c10::Stream getNewStream(c10::Device device, int) const override {
        static std::atomic<int64_t> next{0};
        return make_stream(resolve_device(device), 1 + next++ % (kStreams - 1));
    }
    c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
    c10::Stream exchangeStream(c10::Stream stream) const override {
        queue_of(stream); // raises if it is a stream of something else
        return make_stream(stream.device_index(), exchange_stream(stream.device_index(), stream.id()));
    }
    void *getStreamNativeHandle(const c10::Stream stream) const override { return &queue_of(stream); }
    bool queryStream(const c10::Stream &stream) const override {
        check_usable();
        return queue_of(stream).idle();
    }
    void synchronizeStream(const c10::Stream &stream) const override {
        check_usable();
        HostBlocked blocked;
        queue_of(stream).synchronize();
        check_usable();
    }
    bool isStreamCapturing(const c10::Stream &stream) const override { return queue_of(stream).capturing; }
    void synchronizeDevice(const c10::DeviceIndex device) const override {
        check_usable();
        HostBlocked blocked;
        synchronize_device(device < 0 ? current_device() : device);
        check_usable();
    }

    void destroyEvent(void *event, const c10::DeviceIndex) const noexcept override {
        delete static_cast<EventPtr *>(event);
    }
    void record(void **event, const c10::Stream &stream, const c10::DeviceIndex, const c10::EventFlag) const override {
        check_usable();
        auto &queue = queue_of(stream);
        if (*event == nullptr)
            *event = new EventPtr(std::make_shared<Event>());
        queue.record(event_of(*event));
    }
    void block(void *event, const c10::Stream &stream) const override {
        check_usable();
        if (event != nullptr) // otherwise it was never recorded
            queue_of(stream).wait(event_of(event));
    }
    bool queryEvent(void *event) const override {
        check_usable();
        return event == nullptr || event_of(event)->done();
    }
    void synchronizeEvent(void *event) const override {
        check_usable();
        if (event == nullptr)
            return;
        HostBlocked blocked;
        auto shared = event_of(event);
        shared->await(shared->recorded());
        check_usable();
    }
    double elapsedTime(void *first, void *second, const c10::DeviceIndex) const override {
        check_usable();
        return std::chrono::duration<double, std::milli>(event_of(second)->when() - event_of(first)->when()).count();
    }

    void recordDataPtrOnStream(const c10::DataPtr &pointer, const c10::Stream &stream) const override {
        device_memory().recordStream(pointer, stream);
    }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

} // namespace

} // namespace ringfence::sim
