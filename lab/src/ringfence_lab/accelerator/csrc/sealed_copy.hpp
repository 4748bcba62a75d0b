#ifndef RINGFENCE_SIM_SEALED_COPY_HPP
#define RINGFENCE_SIM_SEALED_COPY_HPP

// Copies of a simulated TEE. They run in a stream thread and take the time that the TEE reserves for them. In
// confidential mode the bytes are encrypted into a bounce buffer when that time begins, and decrypted from it and
// authenticated when it ends.

#include "streams.hpp"
#include "tee.hpp"

#include <ATen/core/Tensor.h>

namespace ringfence::sim {

constexpr int kHost = -1;

// One end of a copy: a view for stream threads, and the device, or kHost.
struct Place {
    at::Tensor view;
    int device;
};

void copy_to_or_from_host(Queue &queue, Tee &tee, const Place &from, const Place &to);
void copy_between_devices(Queue &queue, Tee &tee, const Place &from, const Place &to);

// What the bounce buffer of the latest copy holds: ciphertext and tags. Empty: there was none.
std::vector<char> latest_bounce_buffer();

// For tests: flip a bit of a bounce buffer, and use up nonces of all keys.
void corrupt_bounce(int64_t after, int64_t position);
void spend_nonces(int64_t count);

} // namespace ringfence::sim

#endif
