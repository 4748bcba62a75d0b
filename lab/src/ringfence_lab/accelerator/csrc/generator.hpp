#ifndef RINGFENCE_SIM_GENERATOR_HPP
#define RINGFENCE_SIM_GENERATOR_HPP

// Random numbers. The state is a seed and an offset, as of CUDA's generator: DTensor reads and writes it in this form.
// Each operator draws from a CPU generator that is seeded with both.

#include "process.hpp"

#include <ATen/core/Generator.h>
#include <c10/core/GeneratorImpl.h>

namespace ringfence::sim {

class Generator final : public c10::GeneratorImpl {
  public:
    explicit Generator(int device);

    void set_current_seed(uint64_t seed) override;
    void set_offset(uint64_t offset) override { offset_ = offset; }
    uint64_t get_offset() const override { return offset_; }
    uint64_t current_seed() const override { return seed_; }
    uint64_t seed() override;
    void set_state(const c10::TensorImpl &state) override;
    c10::intrusive_ptr<c10::TensorImpl> get_state() const override;

    // A CPU generator for one operator that makes this many numbers.
    at::Generator for_operator(int64_t numbers);

    static c10::DeviceType device_type() { return kDeviceType; }

  private:
    Generator *clone_impl() const override;

    uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
};

const at::Generator &default_generator(int device);

} // namespace ringfence::sim

#endif
