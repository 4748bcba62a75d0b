// Sparse (COO) tensors of the device: enough for a backward pass, and for DDP to divide the gradients that it reduces.

#include <ATen/core/Tensor.h>
#include <ATen/ops/_coalesced_native.h>
#include <ATen/ops/_indices_native.h>
#include <ATen/ops/_nnz_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors_native.h>
#include <ATen/ops/_values_native.h>
#include <ATen/ops/clone_native.h>
#include <ATen/ops/copy_sparse_to_sparse_native.h>
#include <ATen/ops/dense_dim_native.h>
#include <ATen/ops/empty_native.h>
#include <ATen/ops/is_coalesced_native.h>
#include <ATen/ops/sparse_dim_native.h>
#include <torch/library.h>

namespace ringfence::sim {

namespace {

at::Tensor& divide(at::Tensor& self, const at::Tensor& divisor) {
    self._values().div_(divisor);
    return self;
}

TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, m) {
    m.impl("empty.memory_format", at::native::empty_sparse_symint);
    m.impl("_sparse_coo_tensor_with_dims_and_tensors", at::native::new_with_dims_and_tensor_sparse_symint);
    m.impl("clone", at::native::clone_sparse);
    m.impl("copy_sparse_to_sparse_", at::native::copy_sparse_);
    m.impl("div_.Tensor", divide);
    m.impl("_indices", at::native::_indices_sparse);
    m.impl("_values", at::native::_values_sparse);
    m.impl("_nnz", at::native::_nnz_sparse);
    m.impl("is_coalesced", at::native::is_coalesced_sparse);
    m.impl("_coalesced_", at::native::_coalesced_sparse_);
    m.impl("sparse_dim", at::native::sparse_dim_sparse);
    m.impl("dense_dim", at::native::dense_dim_sparse);
}

} // namespace

} // namespace ringfence::sim
