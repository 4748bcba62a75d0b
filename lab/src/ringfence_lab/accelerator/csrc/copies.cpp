// Copies between host and device, within a device and between devices.

#include "copy_engine.hpp"
#include "device_memory.hpp"
#include "pinned_memory.hpp"
#include "sealed_copy.hpp"
#include "tensors.hpp"

#include <ATen/ops/clone.h>
#include <ATen/ops/from_blob.h>

#include <cstring>

namespace ringfence::sim {

thread_local bool in_fallback = false;

at::Tensor stream_view(const at::Tensor &tensor) {
    TORCH_CHECK(tensor.layout() == at::kStrided, "the simulated accelerator has strided tensors only");
    auto *data = const_cast<void *>(tensor.const_data_ptr());
    auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
    if (tensor.is_privateuseone())
        data = device_address(data);
    auto view = at::from_blob(data, tensor.sizes(), tensor.strides(), options);
    if (tensor.is_conj())
        view._set_conj(true);
    if (tensor.is_neg())
        view._set_neg(true);
    return view;
}

void move(const at::Tensor &from, const at::Tensor &to) {
    bool same = from.scalar_type() == to.scalar_type() && from.is_conj() == to.is_conj() && from.is_neg() == to.is_neg();
    if (same && from.is_contiguous() && to.is_contiguous())
        std::memcpy(to.data_ptr(), from.const_data_ptr(), to.nbytes());
    else
        to.copy_(from);
}

namespace {

void copy_within(const at::Tensor &source, const at::Tensor &target) {
    auto from = stream_view(source), to = stream_view(target);
    int device = target.device().index();
    launch(current_queue(device), current_settings().kernel, [from, to] { move(from, to); });
}

// In the current stream of the source's device, which waits for the current stream of the target's, and the other way
// round afterwards.
void copy_between(const at::Tensor &source, const at::Tensor &target) {
    auto from = stream_view(source), to = stream_view(target);
    auto &reader = current_queue(source.device().index()), &writer = current_queue(target.device().index());
    auto ready = std::make_shared<Event>(), done = std::make_shared<Event>();
    writer.record(ready);
    reader.wait(ready);
    if (auto tee = current_tee()) {
        int out = source.device().index(), in = target.device().index();
        reader.push([=](Queue &running) { copy_between_devices(running, *tee, {from, out}, {to, in}); });
    } else {
        launch(reader, current_settings().kernel, [from, to] { move(from, to); });
    }
    reader.record(done);
    writer.wait(done);
}

// The operands and results of an operator that the CPU computes.
void copy_for_fallback(const at::Tensor &source, const at::Tensor &target) {
    bool result = target.is_privateuseone();
    auto &queue = current_queue((result ? target : source).device().index());
    auto from = stream_view(source), to = stream_view(target);
    auto kernel = result ? current_settings().kernel : Duration{};
    launch(queue, kernel, [from, to, source, result] { // holds the result until it is written
        move(from, to);
    });
    if (!result)
        queue.synchronize();
}

void transfer(at::Tensor source, const at::Tensor &target, bool non_blocking) {
    auto direction = target.is_privateuseone() ? kUp : kDown;
    int device = (direction == kUp ? target : source).device().index();
    auto &queue = current_queue(device);
    const auto &host = direction == kUp ? source : target;
    bool pinned = pinned_memory().contains(host.const_data_ptr());
    auto tee = current_tee();
    // With bounce buffers a copy returns when it is done, and with it all that was queued on its stream.
    bool blocking = !non_blocking || (tee != nullptr && tee->settings.confidential);
    at::Tensor snapshot;
    if (pinned) {
        blocking = blocking || confidential;
        pinned_memory().record_event(const_cast<void *>(host.const_data_ptr()), nullptr, current_stream(device));
    } else if (direction == kDown) {
        blocking = true; // a copy to pageable memory returns when it is done
    } else if (!blocking) {
        source = snapshot = source.clone(); // pageable memory is staged before the call returns
    }
    auto bytes = static_cast<size_t>(target.numel()) * host.element_size();
    auto from = stream_view(source), to = stream_view(target);
    if (tee != nullptr) {
        Place sender{from, direction == kUp ? kHost : device}, receiver{to, direction == kUp ? device : kHost};
        queue.push([sender, receiver, snapshot, tee](Queue &running) {
            copy_to_or_from_host(running, *tee, sender, receiver);
        });
    } else {
        auto duration = current_settings().copy_time(direction, bytes);
        auto &engine = copy_engine(device, direction);
        queue.push([from, to, snapshot, duration, bytes, &engine](Queue &running) {
            engine.copy(running, duration, bytes, [&] { move(from, to); });
        });
    }
    ++counters.copies[direction];
    counters.bytes[direction] += static_cast<int64_t>(bytes);
    if (blocking) {
        HostBlocked blocked;
        queue.synchronize();
    }
}

} // namespace

at::Tensor copy_tensor(const at::Tensor &source, const at::Tensor &target, bool non_blocking) {
    check_usable();
    if (target.numel() == 0)
        return target;
    auto expanded = source.sizes() == target.sizes() ? source : source.expand(target.sizes());
    if (source.is_privateuseone() && target.is_privateuseone())
        source.device() == target.device() ? copy_within(expanded, target) : copy_between(expanded, target);
    else if (in_fallback)
        copy_for_fallback(expanded, target);
    else
        transfer(expanded, target, non_blocking);
    check_usable();
    return target;
}

} // namespace ringfence::sim
