#ifndef RINGFENCE_SIM_TENSORS_HPP
#define RINGFENCE_SIM_TENSORS_HPP

#include "process.hpp"

#include <ATen/core/Tensor.h>

namespace ringfence::sim {

// A CPU tensor on the same memory, for a stream thread. It does not keep the memory: a kernel does not either.
at::Tensor stream_view(const at::Tensor &tensor);

// Copies elements, converting them if the types differ. Runs in a stream thread.
void move(const at::Tensor &from, const at::Tensor &to);

// Copies in the current streams, as CUDA does.
at::Tensor copy_tensor(const at::Tensor &source, const at::Tensor &target, bool non_blocking);

// For the CPU fallback: read an operand now; write a result later, in the stream.
extern thread_local bool in_fallback;

} // namespace ringfence::sim

#endif
