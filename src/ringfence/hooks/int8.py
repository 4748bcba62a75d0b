"""`all_reduce` with int8 on the wire, and the same as a communication hook of DDP with error feedback.

It sends a quarter of the bytes. Every rank sends each other rank one shard of its tensor, quantised, and nothing else of
it: so each peer sees 1/n of each update as it is, which sums under masks would hide from it.
"""

# Without annotations from __future__: DDP compares those of a hook with its classes.

import itertools
import weakref
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ringfence.hooks.pieces import DTYPES, Call, Piece, divide
from ringfence.hooks.stages import Failure, Result, stage

_IN_FLIGHT: Final = 32  # pieces of `all_reduce` in each of its two exchanges, with buffers of 2 MiB each


@torch.no_grad()  # type: ignore[untyped-decorator]  # torch is untyped here
def all_reduce(
    tensor: torch.Tensor, group: Any = None, *, average: bool = False, residual: torch.Tensor | None = None
) -> None:
    """Sum a tensor over all ranks of a group in place, with int8 values on the wire. All ranks get equal bits.

    Blocks of 256 values have a scale each, their largest magnitude / 127, and are rounded half to even. Shards are summed
    in float32 and quantised again. So an element of the sum is wrong by at most the sum over ranks of the largest
    magnitudes of its block, divided by 126 (for an average, divided by the number of ranks too), besides the rounding to
    the tensor's dtype. Blocks are those of the flattened tensor, from its first element on. If a value of a block is
    not finite on some rank, or their float32 sum is not, the result is NaN in the whole block, on all ranks.

    Args:
        tensor: float16, bfloat16, float32 or float64, on any device that the group's backend takes. Values that float32
            cannot hold count as not finite. A group of one rank leaves it as it is.
        group: A process group; None is the default one.
        average: Divide the sum by the number of ranks.
        residual: float32 and contiguous, as many elements on the same device. It is added to this rank's contribution,
            and then holds what rounding has lost of it, and of the sum of this rank's shard. Pass it again the next
            time: over several calls errors then cancel instead of adding up. Begin with zeros.

    Raises:
        TypeError: The tensor is of another dtype, or sparse.
        ValueError: The residual does not fit the tensor, or this worker is not in the group.
        MismatchError: Another rank passed another number of elements, another dtype, or another `average`. After this or
            another failure on the way the tensor is undefined, the residual is zero, and the group cannot be used further.
    """
    _check(tensor, residual)
    rank, size = _place(group)
    flat = tensor.detach().reshape(-1)
    if size > 1:
        try:
            _in_order(divide(Call(rank, size, average), flat, None if residual is None else residual.view(-1)), group)
        except BaseException:
            if residual is not None:
                residual.zero_()  # it may hold all of the tensor
            raise
    elif residual is not None:
        flat += residual.view(-1)
        residual.zero_()
    if flat.data_ptr() != tensor.data_ptr():
        tensor.copy_(flat.view_as(tensor))


def _in_order(pieces: Sequence[Piece], group: Any) -> None:
    """Execute pieces in one group. The order of collectives depends on their number only: it is the same on all ranks."""
    lag = min(_IN_FLIGHT, len(pieces))
    for turn in range(len(pieces) + 2 * lag):
        if turn >= 2 * lag:
            pieces[turn - 2 * lag].finish()
        if lag <= turn < len(pieces) + lag:
            pieces[turn - lag].combine(group)
        if turn < len(pieces):
            pieces[turn].begin(group)


def _check(tensor: torch.Tensor, residual: torch.Tensor | None) -> None:
    if tensor.dtype not in DTYPES or tensor.layout is not torch.strided:
        raise TypeError(
            f"int8 quantises dense float16, bfloat16, float32 and float64, not {tensor.dtype} {tensor.layout}"
        )
    if residual is not None and (
        residual.dtype is not torch.float32
        or residual.numel() != tensor.numel()
        or residual.device != tensor.device
        or not residual.is_contiguous()
    ):
        raise ValueError(
            f"the residual must be a contiguous float32 tensor of {tensor.numel()} elements on {tensor.device}; this one "
            f"has {residual.numel()} of {residual.dtype} on {residual.device}"
        )


def _place(group: Any) -> tuple[int, int]:
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("this worker is not in the group")
    return rank, dist.get_world_size(group)


class State:
    """What `hook` keeps for a model: groups and threads of its own, and the errors of quantisation so far.

    Construct it on all ranks of the group, in the same order as other groups:

        state = int8.State(model)
        model.register_comm_hook(state, int8.hook)

    Args:
        model: The DistributedDataParallel module.
        group: The process group that is summed over; None is the model's.
        error_feedback: Add to each gradient what rounding lost of earlier ones. It takes four bytes a parameter; buffers
            of gradients on the wire take two.
        timeout: Of its collectives; None is the backend's default.

    Raises:
        ValueError: This worker is not in the group.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        group: Any = None,
        *,
        error_feedback: bool = True,
        timeout: timedelta | None = None,
    ) -> None:
        group = group or model.process_group
        self.rank, self.size = _place(group)
        named = model.module.named_parameters() if error_feedback else ()
        self._parameters = {name: each for name, each in named if each.requires_grad}
        self._names = {id(each): name for name, each in self._parameters.items()}
        self._residuals: dict[str, torch.Tensor] = {}
        self._buckets: dict[int, tuple[list[str], torch.Tensor]] = {}  # names and residual by index
        # Of its own, since what else a script calls meanwhile comes in another order on each rank; and two, since the
        # second exchange of a piece and the first of a later one have no order either.
        members = dist.get_process_group_ranks(group)
        self._exchange, self._gather = (
            dist.new_group(members, timeout, dist.get_backend(group), use_local_synchronization=True) for _ in range(2)
        )
        self._failure = Failure([dist.group.WORLD, self._exchange, self._gather])
        self._calls = itertools.count()
        self._stages = [stage(f"int8-{name}") for name in ("begin", "combine", "finish")]
        for tasks in self._stages:
            weakref.finalize(self, tasks.put, None)
        self._streams: dict[torch.device, torch.Stream] = {}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return this rank's errors by rank and parameter, for a checkpoint. Call it between steps.

        They differ on each rank, so the names begin with the rank. They are the tensors in use, as those of a module are.
        After a call that has failed they are undefined: this raises its error again.
        """
        self._failure.check()
        return {f"{self.rank}.{name}": self._residual(name).view(each.shape) for name, each in self._parameters.items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take up what `state_dict` returned. Call it between steps, with a group of the same size.

        Raises:
            ValueError: The names or shapes are not those of this rank and model. Nothing is changed then. To go on with
                a group of another size, leave it out: a fraction of one step is lost.
        """
        wanted = self.state_dict()
        if {name: each.shape for name, each in state.items()} != {name: each.shape for name, each in wanted.items()}:
            raise ValueError(f"these are not the errors of rank {self.rank} for this model: names or shapes differ")
        for name, each in wanted.items():
            each.copy_(state[name])

    def _residual(self, name: str) -> torch.Tensor:
        """Return the flat errors of a parameter."""
        if name not in self._residuals:
            parameter = self._parameters[name]
            self._residuals[name] = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        return self._residuals[name]

    def _residual_of(self, bucket: dist.GradBucket) -> torch.Tensor | None:
        """Return the errors of a bucket, in the order of its parameters, which DDP changes after the first step."""
        if not self._parameters:  # without error feedback
            return None
        names = [self._names[id(each)] for each in bucket.parameters()]
        known = self._buckets.get(bucket.index())
        if known is not None and known[0] == names:
            return known[1]
        flat = torch.cat(earlier := [self._residual(name) for name in names])
        for each in earlier if flat.device.type != "cpu" else ():
            each.record_stream(torch.accelerator.current_stream(flat.device))
        lengths = [self._parameters[name].numel() for name in names]
        self._residuals.update(zip(names, flat.split(lengths), strict=True))
        self._buckets[bucket.index()] = names, flat
        return flat


def hook(state: State, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients as `all_reduce` does, for `DistributedDataParallel.register_comm_hook`.

    Three threads take turns: one quantises pieces, one sums shards, one writes results, while others are on the wire. So
    neither the backward pass nor the next bucket waits for this one.

    If it fails, so do all later calls with this State. A failure of this rank alone, such as for lack of memory, ends the
    session: other ranks raise PeerLostError. With another backend they wait until this process ends.
    """
    number = next(state._calls)  # counts also if what follows fails: the next call is another one
    buffer = bucket.buffer()
    _check(buffer, None)
    device = buffer.device
    stream = None if device.type == "cpu" else state._streams.setdefault(device, torch.Stream(device))
    result = Result(buffer, stream, state._failure)
    begin, combine, finish = state._stages

    def begin_all() -> None:
        pieces = divide(Call(state.rank, state.size, True, number, bucket.index()), buffer, state._residual_of(bucket))
        for piece in pieces:
            piece.begin(state._exchange)
            combine.put(result.step(partial(combine_one, piece, last=piece is pieces[-1])))

    def combine_one(piece: Piece, last: bool) -> None:
        piece.combine(state._gather)
        finish.put(result.step(piece.finish, last))

    begin.put(result.step(begin_all if state.size > 1 else lambda: None, last=state.size == 1))
    return result.future
