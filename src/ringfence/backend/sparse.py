"""All-reduce of sparse (COO) tensors: gathers the indices and values of all ranks and adds them."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist

from ringfence.errors import UnsupportedError


class _Group(Protocol):
    def size(self) -> int: ...
    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor]) -> Any: ...


def sparse_all_reduce(group: _Group, tensor: torch.Tensor, options: Any) -> None:
    """Reduce in place with three all-gathers: number of values of each rank, indices, values. Blocks until done."""
    if options.reduceOp != dist.ReduceOp.SUM:
        raise UnsupportedError("sparse tensors can only be reduced with SUM")
    if tensor.device.type != "cpu":
        raise UnsupportedError(
            f"sparse tensors can only be reduced on the CPU; this one is on {tensor.device}: use tensor.cpu() or to_dense()"
        )
    tensor = _whole(tensor)
    mine = tensor.detach().coalesce()
    indices, values = mine.indices(), mine.values()
    counts = [torch.empty(1, dtype=torch.int64, device="cpu") for _ in range(group.size())]
    group.allgather([counts], [torch.tensor([values.size(0)], device="cpu")]).wait()
    lengths = [int(count) for count in counts]
    all_indices = [indices.new_empty((indices.size(0), length)) for length in lengths]
    all_values = [values.new_empty((length, *values.shape[1:])) for length in lengths]
    first = group.allgather([all_indices], [indices])
    second = group.allgather([all_values], [values])
    first.wait()
    second.wait()
    joined = torch.cat(all_indices, dim=1), torch.cat(all_values)
    total = torch.sparse_coo_tensor(*joined, tensor.shape, check_invariants=True).coalesce()
    with torch.no_grad():
        tensor.copy_(total)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor to reduce. torch passes a complex tensor as a real view. A dense view shares memory with the
    tensor, a sparse one does not: then the base must be reduced."""
    if torch.is_inference_mode_enabled():
        raise UnsupportedError("sparse tensors cannot be reduced in inference mode, which hides their base")
    base = tensor._base
    return base if base is not None and base.is_sparse and base.is_complex() else tensor
