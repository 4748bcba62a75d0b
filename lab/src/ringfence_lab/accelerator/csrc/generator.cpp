#include "generator.hpp"

#include "streams.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Utils.h>
#include <ATen/core/Tensor.h>

#include <array>
#include <cstring>

namespace ringfence::sim {

namespace {

constexpr size_t kStateBytes = 16;
constexpr uint64_t kOffsetStep = 4; // offsets are multiples of it

} // namespace

Generator::Generator(int device)
    : c10::GeneratorImpl(c10::Device(kDeviceType, static_cast<c10::DeviceIndex>(device)),
                         c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

void Generator::set_current_seed(uint64_t seed) {
    seed_ = seed;
    offset_ = 0;
}

uint64_t Generator::seed() {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
}

void Generator::set_state(const c10::TensorImpl &state) {
    at::detail::check_rng_state(state);
    TORCH_CHECK(state.numel() == kStateBytes, "the state of a generator of the simulated accelerator has ", kStateBytes,
                " bytes");
    auto *bytes = static_cast<const char *>(state.data());
    std::memcpy(&seed_, bytes, sizeof seed_);
    std::memcpy(&offset_, bytes + sizeof seed_, sizeof offset_);
}

c10::intrusive_ptr<c10::TensorImpl> Generator::get_state() const {
    auto state = at::detail::empty_cpu({kStateBytes}, at::kByte);
    auto *bytes = static_cast<char *>(state.data_ptr());
    std::memcpy(bytes, &seed_, sizeof seed_);
    std::memcpy(bytes + sizeof seed_, &offset_, sizeof offset_);
    return state.getIntrusivePtr();
}

at::Generator Generator::for_operator(int64_t numbers) {
    std::lock_guard<std::mutex> hold(mutex_);
    auto made = at::detail::createCPUGenerator(seed_ ^ (offset_ * 0x9E3779B97F4A7C15u));
    offset_ += (static_cast<uint64_t>(std::max<int64_t>(numbers, 1)) + kOffsetStep - 1) / kOffsetStep * kOffsetStep;
    return made;
}

Generator *Generator::clone_impl() const {
    auto *made = new Generator(device().index());
    made->seed_ = seed_;
    made->offset_ = offset_;
    return made;
}

const at::Generator &default_generator(int device) {
    static auto *all = [] {
        auto *made = new std::array<at::Generator, kMaxDevices>;
        for (int index = 0; index < kMaxDevices; ++index)
            (*made)[static_cast<size_t>(index)] = at::make_generator<Generator>(index);
        return made;
    }();
    int index = device < 0 ? current_device() : device;
    check_device(index);
    return (*all)[static_cast<size_t>(index)];
}

} // namespace ringfence::sim
