"""The collectives: each method binds its tensors to the buffers of a schedule."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from ringfence.backend.base import GroupBase, one
from ringfence.backend.binding import CallMemory, bytes_of, even_parts, same_layout, share_of, wide_dtype
from ringfence.backend.overloads import listed, listed_with, options_of
from ringfence.backend.sparse import sparse_all_reduce
from ringfence.backend.work import RingfenceWork
from ringfence.collectives import Buffer, Collective


class CollectiveMethods(GroupBase):
    """The collectives of a process group, under the names that torch uses."""

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None, *, op: Any = None) -> RingfenceWork:
        (tensor,) = one(listed(tensors))
        options = options_of(c10d.AllreduceOptions, opts, op, timeout=timeout)
        if tensor.is_sparse:
            sparse_all_reduce(self, tensor, options)
            return self._finished([tensor])
        stage = self._stage(tensor, options)
        return self._submit(
            Collective.ALL_REDUCE,
            stage,
            {Buffer.DATA: [stage.in_place(tensor)]},
            options,
            [tensor],
            reduction=options.reduceOp,
            elements=tensor.numel(),
            nbytes=bytes_of(tensor),
        )

    def _stage(self, tensor: torch.Tensor, options: Any) -> CallMemory:
        """The memory of tensors that are reduced."""
        reduction, dtype = options.reduceOp, tensor.dtype
        return CallMemory(share_of(reduction, dtype, self._group_size), wide_dtype(reduction, dtype))

    def allreduce_coalesced(self, tensors: list[torch.Tensor], options: Any = None) -> RingfenceWork:
        return self._together([self.allreduce([tensor], options) for tensor in tensors])

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None, *, root: Any = None) -> RingfenceWork:
        (tensor,) = one(listed(tensors))
        options = options_of(c10d.BroadcastOptions, opts, root=root, timeout=timeout)
        stage = CallMemory()
        is_root = self._group_rank == options.rootRank
        memory = stage.input(tensor) if is_root else stage.output(tensor)
        stage.given = [tensor]  # profiles show it as the input on every rank
        return self._submit(
            Collective.BROADCAST,
            stage,
            {Buffer.DATA: [memory]},
            options,
            [tensor],
            root=options.rootRank,
            elements=tensor.numel(),
            nbytes=bytes_of(tensor),
        )

    def reduce(
        self, tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None, *, root: Any = None
    ) -> RingfenceWork:
        (tensor,) = one(listed(tensors))
        options = options_of(c10d.ReduceOptions, opts, op, root, timeout)
        stage = self._stage(tensor, options)
        if self._group_rank == options.rootRank:
            memory = stage.in_place(tensor)
            parts = {Buffer.INPUT: [memory], Buffer.OUTPUT: [memory]}
        else:
            parts = {Buffer.INPUT: [stage.input(tensor)]}
        return self._submit(
            Collective.REDUCE,
            stage,
            parts,
            options,
            [tensor],
            reduction=options.reduceOp,
            root=options.rootRank,
            elements=tensor.numel(),
            nbytes=bytes_of(tensor),
        )

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, *, timeout: Any = None) -> RingfenceWork:
        outputs, inputs = listed_with(outputs, inputs)
        options = options_of(c10d.AllgatherOptions, opts, timeout=timeout)
        works = [self._all_gather(outs, tensor, options) for outs, tensor in zip(outputs, inputs, strict=True)]
        return works[0] if len(works) == 1 else self._together(works)

    def _all_gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor, options: Any) -> RingfenceWork:
        self._expect_one_per_rank(outputs, "output")
        if outputs[self._group_rank].numel() != tensor.numel():
            raise ValueError(f"all_gather: output {self._group_rank} and the input differ in size")
        same_layout([tensor, *outputs])
        total = sum(out.numel() for out in outputs)
        stage = CallMemory()
        return self._submit(
            Collective.ALL_GATHER,
            stage,
            {Buffer.INPUT: [stage.input(tensor)], Buffer.OUTPUT: [stage.output(out) for out in outputs]},
            options,
            outputs,
            elements=total,
            nbytes=total * tensor.element_size(),
            even=all(out.numel() == tensor.numel() for out in outputs),
        )

    def all_gather_single(self, out: torch.Tensor, tensor: torch.Tensor, options: Any = None) -> RingfenceWork:
        if out.numel() != tensor.numel() * self._group_size:
            raise ValueError(
                f"all_gather: the output has {out.numel()} elements, expected {self._group_size} * {tensor.numel()}"
            )
        same_layout([tensor, out])
        stage = CallMemory()
        return self._submit(
            Collective.ALL_GATHER,
            stage,
            {Buffer.INPUT: [stage.input(tensor)], Buffer.OUTPUT: [stage.output(out)]},
            options,
            [out],
            elements=out.numel(),
            nbytes=bytes_of(out),
        )

    def all_gather_single_coalesced(
        self, outs: list[torch.Tensor], tensors: list[torch.Tensor], options: Any = None
    ) -> RingfenceWork:
        return self._together([self.all_gather_single(o, t, options) for o, t in zip(outs, tensors, strict=True)])

    def allgather_coalesced(
        self, outputs: list[list[torch.Tensor]], tensors: list[torch.Tensor], options: Any = None
    ) -> RingfenceWork:
        works = [
            self._all_gather([rank_outputs[index] for rank_outputs in outputs], tensor, options)
            for index, tensor in enumerate(tensors)
        ]
        return self._together(works)

    def gather(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None, *, root: Any = None
    ) -> RingfenceWork:
        outputs, inputs = listed_with(outputs, inputs)
        (tensor,) = one(inputs)
        options = options_of(c10d.GatherOptions, opts, root=root, timeout=timeout)
        stage = CallMemory()
        parts = {Buffer.INPUT: [stage.input(tensor)]}
        results: list[torch.Tensor] = []
        if self._group_rank == options.rootRank:
            (results,) = outputs
            self._expect_one_per_rank(results, "output")
            same_layout([tensor, *results], equal=True)
            parts[Buffer.OUTPUT] = [stage.output(out) for out in results]
        return self._submit(
            Collective.GATHER,
            stage,
            parts,
            options,
            results or [tensor],
            root=options.rootRank,
            elements=tensor.numel(),
            nbytes=bytes_of(tensor) * self._group_size,
        )

    def scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None, *, root: Any = None
    ) -> RingfenceWork:
        inputs, outputs = listed_with(inputs, outputs)
        (out,) = one(outputs)
        options = options_of(c10d.ScatterOptions, opts, root=root, timeout=timeout)
        stage = CallMemory()
        parts = {Buffer.OUTPUT: [stage.output(out)]}
        if self._group_rank == options.rootRank:
            (tensors,) = inputs
            self._expect_one_per_rank(tensors, "input")
            same_layout([out, *tensors], equal=True)
            parts[Buffer.INPUT] = [stage.input(tensor) for tensor in tensors]
        return self._submit(
            Collective.SCATTER,
            stage,
            parts,
            options,
            [out],
            root=options.rootRank,
            elements=out.numel(),
            nbytes=bytes_of(out) * self._group_size,
        )

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None, *, op: Any = None
    ) -> RingfenceWork:
        inputs, outputs = listed_with(inputs, outputs)
        options = options_of(c10d.ReduceScatterOptions, opts, op, timeout=timeout)
        works = []
        for out, tensors in zip(outputs, inputs, strict=True):
            self._expect_one_per_rank(tensors, "input")
            same_layout([out, *tensors])
            stage = self._stage(out, options)
            works.append(self._reduce_scatter(stage, out, [stage.input(tensor) for tensor in tensors], options))
        return works[0] if len(works) == 1 else self._together(works)

    def _reduce_scatter(
        self, stage: CallMemory, out: torch.Tensor, tensors: list[torch.Tensor], options: Any
    ) -> RingfenceWork:
        if len(tensors) > 1 and tensors[self._group_rank].numel() != out.numel():
            raise ValueError(f"reduce_scatter: input {self._group_rank} and the output differ in size")
        total = sum(tensor.numel() for tensor in tensors)
        return self._submit(
            Collective.REDUCE_SCATTER,
            stage,
            {Buffer.INPUT: tensors, Buffer.OUTPUT: [stage.output(out)]},
            options,
            [out],
            reduction=options.reduceOp,
            elements=total,
            nbytes=total * tensors[0].element_size(),
            even=len(tensors) == 1 or all(tensor.numel() == out.numel() for tensor in tensors),
        )

    def reduce_scatter_single(self, out: torch.Tensor, tensor: torch.Tensor, options: Any = None) -> RingfenceWork:
        if tensor.numel() != out.numel() * self._group_size:
            raise ValueError(
                f"reduce_scatter: the input has {tensor.numel()} elements, expected {self._group_size} * {out.numel()}"
            )
        same_layout([out, tensor])
        options = options or c10d.ReduceScatterOptions()
        stage = self._stage(out, options)
        return self._reduce_scatter(stage, out, [stage.input(tensor)], options)

    def reduce_scatter_single_coalesced(
        self, outs: list[torch.Tensor], tensors: list[torch.Tensor], options: Any = None
    ) -> RingfenceWork:
        return self._together([self.reduce_scatter_single(o, t, options) for o, t in zip(outs, tensors, strict=True)])

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], options: Any = None) -> RingfenceWork:
        self._expect_one_per_rank(outputs, "output")
        self._expect_one_per_rank(inputs, "input")
        stage = CallMemory()
        bound = [stage.output(out) for out in outputs], [stage.input(tensor) for tensor in inputs]
        return self._all_to_all(stage, *bound, outputs, options, even=False)

    def all_to_all_single(
        self,
        out: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
        *,
        timeout: Any = None,
    ) -> RingfenceWork:
        options = options_of(c10d.AllToAllOptions, opts, timeout=timeout)
        stage = CallMemory()
        outputs = _split(stage.output(out), out, output_splits, self._group_size)
        inputs = _split(stage.input(tensor), tensor, input_splits, self._group_size)
        even = not output_splits and not input_splits  # only then every rank knows this of all others
        return self._all_to_all(stage, outputs, inputs, [out], options, even)

    def _all_to_all(
        self,
        stage: CallMemory,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        results: list[torch.Tensor],
        options: Any,
        even: bool,
    ) -> RingfenceWork:
        same_layout([*outputs, *inputs])
        if outputs[self._group_rank].numel() != inputs[self._group_rank].numel():
            raise ValueError(
                "all_to_all: the parts that this rank sends to itself and receives from itself differ in size"
            )
        if self._group_size < self._session.engine.table.bruck_group:
            even = False  # same schedule; some ranks may pass equal splits explicitly and others not
        return self._submit(
            Collective.ALL_TO_ALL,
            stage,
            {Buffer.INPUT: inputs, Buffer.OUTPUT: outputs},
            options,
            results,
            elements=outputs[0].numel() if even else 0,
            nbytes=bytes_of(outputs[0]) * self._group_size if even else 0,
            even=even,
        )

    def barrier(self, opts: Any = None, *, timeout: Any = None) -> RingfenceWork:
        """With a device (`device_ids`), it also waits for the work on that device's current stream."""
        options = options_of(c10d.BarrierOptions, opts, timeout=timeout)
        given = getattr(options, "device", None)
        device = _indexed(given) if given is not None and given.type != "cpu" else None
        return self._submit(Collective.BARRIER, CallMemory(device=device), {}, options, [])

    # Names before torch 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


def _split(memory: torch.Tensor, tensor: torch.Tensor, splits: list[int], count: int) -> list[torch.Tensor]:
    """The parts of an all-to-all. Splits count rows of dimension 0; no splits mean equal parts."""
    rows = tensor.size(0) if tensor.dim() else 1
    if not splits:
        if rows % count:
            raise ValueError(f"all_to_all: dimension 0 ({rows}) is not divisible by {count} ranks; pass split sizes")
        return even_parts(memory, count)
    if len(splits) != count or sum(splits) != rows:
        raise ValueError(f"all_to_all: split sizes {splits} do not add up to dimension 0 ({rows}) over {count} ranks")
    row = memory.numel() // rows if rows else 0
    return list(memory.split([split * row for split in splits]))


def _indexed(device: torch.device) -> torch.device:
    """The same device with its index; without one, the current device is meant."""
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    return torch.device(device.type, index)
