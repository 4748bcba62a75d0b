// Operators: tensors and views, copies, and everything else by torch's CPU kernels.

#include "device_memory.hpp"
#include "generator.hpp"
#include "tensors.hpp"

#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/clamp_min.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/is_set_to_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <set>
#include <string>

namespace ringfence::sim {

namespace {

using c10::IValue;
using torch::jit::Stack;

const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

c10::Device device_or_current(std::optional<c10::Device> device) {
    return c10::Device(kDeviceType, static_cast<c10::DeviceIndex>(
                                        resolve_device(device.value_or(c10::Device(kDeviceType, -1)))));
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<c10::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
    c10::DeviceGuard guard(device_or_current(device));
    return at::detail::empty_generic(size, &device_memory(), kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
    c10::DeviceGuard guard(device_or_current(device));
    return at::detail::empty_strided_generic(size, stride, &device_memory(), kKeys, c10::dtype_or_default(dtype));
}

// torch's own function would copy the old contents in host code: it finds the storage large enough.
const at::Tensor &resize(const at::Tensor &self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
    auto elements = static_cast<size_t>(self.storage_offset() + c10::multiply_integers(size));
    if (c10::multiply_integers(size) > 0 && elements * self.dtype().itemsize() > self.storage().nbytes())
        at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), elements * self.dtype().itemsize());
    return at::native::resize_(self, size, format);
}

at::Tensor copy_and_resize(const at::Tensor &source, const at::Tensor &target) {
    if (source.sizes() != target.sizes())
        resize(target, source.sizes(), std::nullopt);
    return copy_tensor(source, target, true);
}

at::Tensor &fill(at::Tensor &self, const at::Scalar &value) {
    check_usable();
    if (self.numel() > 0)
        launch(current_queue(self.device().index()), current_settings().kernel,
               [view = stream_view(self), value] { view.fill_(value); });
    return self;
}

at::Tensor &zero(at::Tensor &self) { return fill(self, 0); }

at::Tensor relu(const at::Tensor &self) { return at::clamp_min(self, 0); } // has no form with an output argument

at::Tensor &relu_in_place(at::Tensor &self) { return at::clamp_min_(self, 0); }

void record_stream(at::Tensor &self, c10::Stream stream) {
    device_memory().recordStream(self.storage().data_ptr(), stream);
}

at::Tensor as_strided(const at::Tensor &self, at::IntArrayRef size, at::IntArrayRef stride,
                      std::optional<int64_t> offset) {
    return at::native::as_strided_tensorimpl(self, size, stride, offset);
}


at::Tensor &set_storage(at::Tensor &self, at::Storage source, int64_t offset, at::IntArrayRef size,
                        at::IntArrayRef stride) {
    auto contiguous = at::detail::defaultStrides(size);
    auto *impl = self.unsafeGetTensorImpl();
    impl->set_storage_keep_dtype(std::move(source));
    impl->set_storage_offset(offset);
    impl->set_sizes_and_strides(size, stride.empty() ? at::IntArrayRef(contiguous) : stride);
    return self;
}

at::Tensor &set_whole_storage(at::Tensor &self, at::Storage source) {
    auto elements = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
    return set_storage(self, std::move(source), 0, {elements}, {1});
}

at::Tensor &set_tensor(at::Tensor &self, const at::Tensor &source) {
    return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

// The arguments of an operator with every device tensor replaced.
Stack with_tensors(const Stack &arguments, const std::function<at::Tensor(const at::Tensor &)> &replace) {
    auto one = [&](const at::Tensor &tensor) { return tensor.defined() ? replace(tensor) : tensor; };
    Stack replaced;
    for (const auto &argument : arguments) {
        if (argument.isTensor()) {
            replaced.emplace_back(one(argument.toTensor()));
        } else if (argument.isTensorList()) {
            c10::List<at::Tensor> list;
            for (const at::Tensor &tensor : argument.toTensorVector())
                list.push_back(one(tensor));
            replaced.emplace_back(std::move(list));
        } else {
            replaced.push_back(argument);
        }
    }
    return replaced;
}

// Whether an operator has one output, which is its last argument, and takes no random numbers.
bool has_output_argument(const c10::FunctionSchema &schema) {
    const auto &arguments = schema.arguments();
    if (arguments.empty() || schema.returns().size() != 1 || !arguments.back().is_out())
        return false;
    int written = 0;
    for (const auto &argument : arguments) {
        written += argument.alias_info() != nullptr && argument.alias_info()->isWrite();
        if (argument.type()->str() == "Generator?" || argument.type()->str() == "Tensor?[]")
            return false;
    }
    return written == 1;
}

// Whether torch has made sure that the output of such a call has the right shape: it made the tensor for this call, or
// the call is in place. The output of `torch.add(..., out=tensor)` may still have to be resized.
bool is_prepared(const at::Tensor &output, const Stack &arguments) {
    if (output.numel() == 0)
        return false;
    if (output.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj() == nullptr)
        return true;
    auto first = arguments.front();
    return first.isTensor() && first.toTensor().is_same(output);
}

// Whether the CPU kernel only writes to an output that is prepared. Others resize it, such as that of mse_loss.
bool keeps_output(const c10::OperatorHandle &op) {
    static const auto *known = new std::set<std::string>{
        "aten::_log_softmax", "aten::_log_softmax_backward_data", "aten::_softmax", "aten::_softmax_backward_data",
        "aten::addmm",        "aten::amax",                       "aten::amin",     "aten::baddbmm",
        "aten::bmm",          "aten::cat",                        "aten::gelu",     "aten::gelu_backward",
        "aten::leaky_relu",   "aten::mean",                       "aten::mm",       "aten::sum",
        "aten::threshold",    "aten::threshold_backward",
    };
    return op.hasTag(at::Tag::pointwise) || known->count(op.schema().name()) > 0;
}

// Structured operators reach a backend with an output of the right shape, after all checks. The CPU kernel runs in the
// stream, and the host waits for nothing.
bool run_in_stream(const c10::OperatorHandle &op, Stack *stack) {
    if (!has_output_argument(op.schema()) || !keeps_output(op))
        return false;
    auto count = op.schema().arguments().size();
    Stack arguments(stack->end() - static_cast<std::ptrdiff_t>(count), stack->end());
    auto output = arguments.back().toTensor();
    if (!output.is_privateuseone() || !is_prepared(output, arguments))
        return false;
    bool possible = true;
    auto views = with_tensors(arguments, [&](const at::Tensor &tensor) {
        if (tensor.device() == output.device())
            return stream_view(tensor);
        possible = possible && tensor.is_cpu() && tensor.dim() == 0;
        bool is_number = tensor.unsafeGetTensorImpl()->is_wrapped_number(); // of the program's text
        return is_number || !possible ? tensor : tensor.clone();            // a scalar is passed by value
    });
    if (!possible)
        return false;
    launch(current_queue(output.device().index()), current_settings().kernel, [op, views] {
        auto operands = views;
        try {
            op.callBoxed(&operands);
        } catch (c10::Error &error) {
            error.add_context(toString(op.operator_name()));
            throw;
        }
    });
    torch::jit::drop(*stack, count);
    stack->push_back(output);
    return true;
}

// The device of the first device tensor among the arguments, or -1, and the number of its elements.
std::pair<int, int64_t> find_device(const Stack &arguments) {
    std::pair<int, int64_t> found{-1, 0};
    with_tensors(arguments, [&](const at::Tensor &tensor) {
        if (tensor.is_privateuseone() && found.first < 0)
            found = {tensor.device().index(), tensor.numel()};
        return tensor;
    });
    return found;
}

// Replace a generator of the device, or none, by a CPU generator.
void use_cpu_generator(const c10::OperatorHandle &op, Stack *stack) {
    const auto &arguments = op.schema().arguments();
    auto first = stack->size() - arguments.size();
    for (size_t i = 0; i < arguments.size(); ++i) {
        auto &value = (*stack)[first + i];
        if (arguments[i].type()->str() != "Generator?" && arguments[i].type()->str() != "Generator")
            continue;
        auto [device, numbers] = find_device(Stack(stack->begin() + static_cast<std::ptrdiff_t>(first), stack->end()));
        auto generator = value.isNone() ? default_generator(device) : value.toGenerator();
        if (generator.device().type() == kDeviceType)
            value = IValue(generator.get<Generator>()->for_operator(numbers));
    }
}

void run(const c10::OperatorHandle &op, Stack *stack) {
    check_usable();
    if (run_in_stream(op, stack))
        return;
    use_cpu_generator(op, stack);
    struct Flag {
        bool before = std::exchange(in_fallback, true);
        ~Flag() { in_fallback = before; }
    } flag;
    at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    m.impl("empty.memory_format", empty);
    m.impl("empty_strided", empty_strided);
    m.impl("_copy_from", copy_tensor);
    m.impl("_copy_from_and_resize", copy_and_resize);
    m.impl("fill_.Scalar", fill);
    m.impl("zero_", zero);
    m.impl("relu", relu);
    m.impl("relu_", relu_in_place);
    m.impl("record_stream", record_stream);
    m.impl("as_strided", as_strided);
    m.impl("view", at::native::view);
    m.impl("_reshape_alias", at::native::_reshape_alias);
    m.impl("unfold", at::native::unfold);
    m.impl("view_as_real", at::native::view_as_real);
    m.impl("view_as_complex", at::native::view_as_complex);
    m.impl("is_set_to", at::native::is_set_to);
    m.impl("resize_", resize);
    m.impl("set_.source_Storage_storage_offset", set_storage);
    m.impl("set_.source_Storage", set_whole_storage);
    m.impl("set_.source_Tensor", set_tensor);
    // Called with an output argument, their CPU kernels would resize it and warn.
    m.impl("mse_loss", torch::CppFunction::makeFromBoxedFunction<&run>());
    m.impl("smooth_l1_loss", torch::CppFunction::makeFromBoxedFunction<&run>());
}

// Copies read and write conjugated and negated views themselves. Otherwise torch would make such a view real with a copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

} // namespace

} // namespace ringfence::sim
