"""The door from torch.distributed: the process group.

Each method says what memory a collective is about, as parts of the buffers that its schedule names, and hands it to the
runtime. Every group of the process, also one that asks for "gloo", is made here over the session's sealed links.
"""

from __future__ import annotations

import functools
import os
import sys
import types
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ringfence.binding import (
    Output,
    as_input,
    bytes_of,
    copies_back,
    dtype_code,
    even_parts,
    in_place,
    output,
    parts_of,
    reduction_of,
    same_layout,
)
from ringfence.collectives import Buffer, Collective, choose
from ringfence.errors import CollectiveTimeoutError, ConfigurationError, UnsupportedError
from ringfence.link.frames import Call
from ringfence.runtime.exchange import Transfer
from ringfence.runtime.operation import POINT_TO_POINT, CollectiveOperation
from ringfence.session import Session
from ringfence.sparse import sparse_all_reduce
from ringfence.work import RingfenceWork

_OLDEST_TORCH = (2, 13)
_BARRIER_ARRIVE, _BARRIER_GO = -1, -2  # tags that no user can name

_session: Session | None = None


def create(options: Any, backend_options: Any) -> RingfenceProcessGroup:
    """What init_process_group calls. The first group of a process is admitted; the others live in its epoch."""
    global _session
    _check_torch()
    ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    first = not options.global_ranks_in_group or _session is None or _session.left
    if first:
        if ranks != tuple(range(options.group_size)):
            raise ConfigurationError(f"the first ringfence group must hold every worker; this one holds {ranks}")
        _session = Session(options.store, options.group_rank, options.group_size, options.timeout.total_seconds())
    assert _session is not None
    name = str(options.group_id)
    return RingfenceProcessGroup(_session, ranks, options.timeout, name, options.store, owns_session=first)


def _check_torch() -> None:
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < _OLDEST_TORCH:
        raise ConfigurationError(f"ringfence needs torch 2.13 or newer; this is {torch.__version__}")
    if os.environ.get("TORCH_DISTRIBUTED_USE_TORCHCOMMS", "0") not in ("", "0"):
        raise ConfigurationError("TORCH_DISTRIBUTED_USE_TORCHCOMMS bypasses process groups, and ringfence: unset it")


class RingfenceProcessGroup(dist.ProcessGroup):  # type: ignore[misc]  # torch is untyped here
    """A process group over sealed links."""

    def __init__(
        self,
        session: Session,
        ranks: tuple[int, ...],
        timeout: timedelta,
        name: str,
        store: Any = None,
        owns_session: bool = False,
    ) -> None:
        engine = session.engine
        super().__init__(ranks.index(engine.rank), len(ranks))
        self._session = session
        self._loop = session.loop
        self._ranks = ranks
        self._timeout = timeout
        self._name = name
        self._description = "undefined"
        self._store = store
        self._coalescing: list[RingfenceWork] | None = None
        self._added: Any = None
        self._mine = ranks.index(engine.rank)
        self._count = len(ranks)
        self._owns_session = owns_session

    # -- what torch asks a group about itself ------------------------------------------------------------------------

    def getBackendName(self) -> str:
        return "ringfence"

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def getGroupDesc(self) -> str:
        return self._description

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> RingfenceProcessGroup:
        return self

    def get_group_store(self) -> Any:
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    _set_default_timeout = set_timeout

    def new_group(
        self,
        ranks: Sequence[int] | None = None,
        timeout: timedelta | None = None,
        pg_options: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
    ) -> RingfenceProcessGroup | None:
        """Every new group of the process, whatever backend it names: there is no way around the sealed links."""
        members = tuple(range(self._session.engine.world_size)) if ranks is None else tuple(ranks)
        if self._session.engine.rank not in members:
            return None
        group = RingfenceProcessGroup(self._session, members, timeout or self._timeout, group_name or "")
        group.setGroupDesc(group_desc or "undefined")
        return group

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
    ) -> RingfenceProcessGroup | None:
        """The same for ranks of this group."""
        return self.new_group([self._ranks[rank] for rank in ranks], timeout, opts, group_name, group_desc)

    def abort(self) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """The first group's end is the session's; another group only closes its own links."""
        if self._owns_session:
            self._session.leave()
        elif self._added is not None and not self._session.left:
            lazy, self._added = self._added, None
            self._loop.ask(lambda: self._session.engine.remove_group(lazy.get()))
            self._loop.wake()

    # -- submitting --------------------------------------------------------------------------------------------------

    @property
    def _group(self) -> Any:
        """The runtime's group; added at first use, when torch has given the group its name."""
        if self._added is None:
            engine = self._session.engine
            self._added = _Lazy(lambda: engine.add_group(self._name, self._ranks))
        return self._added

    def _deadline(self, options: Any) -> float:
        timeout = getattr(options, "timeout", None)
        if timeout is None or timeout.total_seconds() <= 0:
            timeout = self._timeout
        return self._session.engine.clock() + float(timeout.total_seconds())

    def _submit(
        self,
        kind: Collective,
        parts: dict[Buffer, list[torch.Tensor]],
        options: Any,
        outputs: list[Any],
        *,
        writes: Sequence[Output] = (),
        reduction: Any = None,
        root: int = 0,
        elements: int = 0,
        weight: int = 0,
        even: bool = True,
    ) -> RingfenceWork:
        """Choose the schedule, bind it, hand it over."""
        dtype = next((tensor.dtype for tensors in parts.values() for tensor in tensors), torch.uint8)
        code, combine, average = reduction_of(reduction, dtype) if reduction is not None else (0, None, False)
        engine = self._session.engine
        schedule = choose(kind, self._count, self._mine, root, weight, engine.table, average=average, even=even)
        call = Call(kind, code, dtype_code(dtype), schedule.identifier, root, elements)
        bound = {buffer: parts_of(schedule, buffer, tensors) for buffer, tensors in parts.items()}
        keep = (parts, outputs, writes)
        operation = CollectiveOperation(call, self._deadline(options), keep, schedule, bound, dtype, combine)
        operation.after = copies_back(writes)
        group = self._group
        self._loop.ask(lambda: engine.submit(group.get(), operation))
        return self._work([operation], outputs, wake=getattr(options, "asyncOp", True))

    def _work(self, operations: list[Any], outputs: list[Any], wake: bool) -> RingfenceWork:
        if wake:
            self._loop.wake()
        work = RingfenceWork(self._loop, operations, outputs)
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    def _finished(self, outputs: list[Any]) -> RingfenceWork:
        """The Work of something that has been done already."""
        return self._work([], outputs, wake=False)

    def _together(self, works: Sequence[RingfenceWork]) -> RingfenceWork:
        operations = [operation for work in works for operation in work.operations]
        return RingfenceWork(self._loop, operations, [tensor for work in works for tensor in work.outputs])

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalescing = []

    def _end_coalescing(self, device: torch.device) -> RingfenceWork:
        works, self._coalescing = self._coalescing or [], None
        return self._together(works)

    # -- collectives -------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> RingfenceWork:
        (tensor,) = _one(tensors)
        options = options or dist.AllreduceOptions()
        if tensor.is_sparse:
            return sparse_all_reduce(self, tensor, options)
        data = in_place(tensor)
        return self._submit(
            Collective.ALL_REDUCE,
            {Buffer.DATA: [data.memory]},
            options,
            [tensor],
            writes=[data],
            reduction=options.reduceOp,
            elements=tensor.numel(),
            weight=bytes_of(tensor),
        )

    def allreduce_coalesced(self, tensors: list[torch.Tensor], options: Any = None) -> RingfenceWork:
        return self._together([self.allreduce([tensor], options) for tensor in tensors])

    def broadcast(self, tensors: list[torch.Tensor], options: Any = None) -> RingfenceWork:
        (tensor,) = _one(tensors)
        options = options or dist.BroadcastOptions()
        data = in_place(tensor)
        return self._submit(
            Collective.BROADCAST,
            {Buffer.DATA: [data.memory]},
            options,
            [tensor],
            writes=[data],
            root=options.rootRank,
            elements=tensor.numel(),
            weight=bytes_of(tensor),
        )

    def reduce(self, tensors: list[torch.Tensor], options: Any = None) -> RingfenceWork:
        (tensor,) = _one(tensors)
        options = options or dist.ReduceOptions()
        data = in_place(tensor)
        parts = {Buffer.INPUT: [data.memory]}
        if self._mine == options.rootRank:
            parts[Buffer.OUTPUT] = [data.memory]
        return self._submit(
            Collective.REDUCE,
            parts,
            options,
            [tensor],
            writes=[data] if self._mine == options.rootRank else [],
            reduction=options.reduceOp,
            root=options.rootRank,
            elements=tensor.numel(),
            weight=bytes_of(tensor),
        )

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], options: Any = None
    ) -> RingfenceWork:
        works = [self._all_gather(outs, tensor, options) for outs, tensor in zip(outputs, inputs, strict=True)]
        return works[0] if len(works) == 1 else self._together(works)

    def _all_gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor, options: Any) -> RingfenceWork:
        self._expect_one_per_rank(outputs, "output")
        if outputs[self._mine].numel() != tensor.numel():
            raise ValueError(f"all_gather: output {self._mine} and the input differ in size")
        same_layout([tensor, *outputs])
        total = sum(out.numel() for out in outputs)
        writes = [output(out) for out in outputs]
        return self._submit(
            Collective.ALL_GATHER,
            {Buffer.INPUT: [as_input(tensor)], Buffer.OUTPUT: [each.memory for each in writes]},
            options,
            outputs,
            writes=writes,
            elements=total,
            weight=total * tensor.element_size(),
            even=all(out.numel() == tensor.numel() for out in outputs),
        )

    def all_gather_single(self, out: torch.Tensor, tensor: torch.Tensor, options: Any = None) -> RingfenceWork:
        if out.numel() != tensor.numel() * self._count:
            raise ValueError(
                f"all_gather: the output ({out.numel()}) is not {self._count} inputs ({tensor.numel()}) long"
            )
        same_layout([tensor, out])
        write = output(out)
        return self._submit(
            Collective.ALL_GATHER,
            {Buffer.INPUT: [as_input(tensor)], Buffer.OUTPUT: even_parts(write.memory, self._count)},
            options,
            [out],
            writes=[write],
            elements=out.numel(),
            weight=bytes_of(out),
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
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], options: Any = None
    ) -> RingfenceWork:
        (tensor,) = _one(inputs)
        options = options or dist.GatherOptions()
        parts = {Buffer.INPUT: [as_input(tensor)]}
        writes: list[Output] = []
        results: list[torch.Tensor] = []
        if self._mine == options.rootRank:
            (results,) = outputs
            self._expect_one_per_rank(results, "output")
            same_layout([tensor, *results], equal=True)
            writes = [output(out) for out in results]
            parts[Buffer.OUTPUT] = [each.memory for each in writes]
        return self._submit(
            Collective.GATHER,
            parts,
            options,
            results or [tensor],
            writes=writes,
            root=options.rootRank,
            elements=tensor.numel(),
            weight=bytes_of(tensor) * self._count,
        )

    def scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], options: Any = None
    ) -> RingfenceWork:
        (out,) = _one(outputs)
        options = options or dist.ScatterOptions()
        write = output(out)
        parts = {Buffer.OUTPUT: [write.memory]}
        if self._mine == options.rootRank:
            (tensors,) = inputs
            self._expect_one_per_rank(tensors, "input")
            same_layout([out, *tensors], equal=True)
            parts[Buffer.INPUT] = [as_input(tensor) for tensor in tensors]
        return self._submit(
            Collective.SCATTER,
            parts,
            options,
            [out],
            writes=[write],
            root=options.rootRank,
            elements=out.numel(),
            weight=bytes_of(out) * self._count,
        )

    def reduce_scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], options: Any = None
    ) -> RingfenceWork:
        works = [self._reduce_scatter(out, tensors, options) for out, tensors in zip(outputs, inputs, strict=True)]
        return works[0] if len(works) == 1 else self._together(works)

    def _reduce_scatter(self, out: torch.Tensor, tensors: list[torch.Tensor], options: Any) -> RingfenceWork:
        self._expect_one_per_rank(tensors, "input")
        if tensors[self._mine].numel() != out.numel():
            raise ValueError(f"reduce_scatter: input {self._mine} and the output differ in size")
        same_layout([out, *tensors])
        options = options or dist.ReduceScatterOptions()
        total = sum(tensor.numel() for tensor in tensors)
        write = output(out)
        return self._submit(
            Collective.REDUCE_SCATTER,
            {Buffer.INPUT: [as_input(tensor) for tensor in tensors], Buffer.OUTPUT: [write.memory]},
            options,
            [out],
            writes=[write],
            reduction=options.reduceOp,
            elements=total,
            weight=total * out.element_size(),
            even=all(tensor.numel() == out.numel() for tensor in tensors),
        )

    def reduce_scatter_single(self, out: torch.Tensor, tensor: torch.Tensor, options: Any = None) -> RingfenceWork:
        if tensor.numel() != out.numel() * self._count:
            raise ValueError(
                f"reduce_scatter: the input ({tensor.numel()}) is not {self._count} outputs ({out.numel()}) long"
            )
        return self._reduce_scatter(out, even_parts(as_input(tensor), self._count), options)

    def reduce_scatter_single_coalesced(
        self, outs: list[torch.Tensor], tensors: list[torch.Tensor], options: Any = None
    ) -> RingfenceWork:
        return self._together([self.reduce_scatter_single(o, t, options) for o, t in zip(outs, tensors, strict=True)])

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], options: Any = None) -> RingfenceWork:
        self._expect_one_per_rank(outputs, "output")
        self._expect_one_per_rank(inputs, "input")
        return self._all_to_all(outputs, inputs, outputs, options, even=False)

    def all_to_all_single(
        self,
        out: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        options: Any = None,
    ) -> RingfenceWork:
        write = output(out)
        outputs = _split(write.memory, out, output_splits, self._count)
        inputs = _split(as_input(tensor), tensor, input_splits, self._count)
        even = not output_splits and not input_splits  # only then does every rank know it of every other
        return self._all_to_all(outputs, inputs, [out], options, even, [write])

    def _all_to_all(
        self,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        results: list[torch.Tensor],
        options: Any,
        even: bool,
        writes: list[Output] | None = None,
    ) -> RingfenceWork:
        same_layout([*outputs, *inputs])
        if outputs[self._mine].numel() != inputs[self._mine].numel():
            raise ValueError(
                "all_to_all: what this rank sends to itself and what it receives from itself differ in size"
            )
        if writes is None:
            writes = [output(out) for out in outputs]
            outputs = [each.memory for each in writes]
            inputs = [as_input(tensor) for tensor in inputs]
        return self._submit(
            Collective.ALL_TO_ALL,
            {Buffer.INPUT: inputs, Buffer.OUTPUT: outputs},
            options,
            results,
            writes=writes,
            elements=outputs[0].numel() if even else 0,
            weight=bytes_of(outputs[0]) * self._count if even else 0,
            even=even,
        )

    def barrier(self, opts: Any = None) -> RingfenceWork:
        return self._submit(Collective.BARRIER, {}, opts, [])

    # -- point to point ----------------------------------------------------------------------------------------------

    def send(self, tensors: list[torch.Tensor], destination: int, tag: int = 0) -> RingfenceWork:
        (tensor,) = _one(tensors)
        self._expect_peer(destination)
        memory = as_input(tensor)
        transfer = self._transfer(memory, tag, tensor)
        group, engine = self._group, self._session.engine
        self._loop.ask(lambda: engine.send(group.get(), transfer, destination))
        return self._work([transfer], [tensor], wake=True)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int = 0) -> RingfenceWork:
        self._expect_peer(source)
        return self._receive(tensors, source, tag)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> RingfenceWork:
        return self._receive(tensors, None, tag)

    def _receive(self, tensors: list[torch.Tensor], source: int | None, tag: int) -> RingfenceWork:
        (tensor,) = _one(tensors)
        write = output(tensor)
        transfer = self._transfer(write.memory, tag, (write, tensor))
        transfer.after = write.copy_back
        group, engine = self._group, self._session.engine
        self._loop.ask(lambda: engine.receive(group.get(), transfer, source))
        return self._work([transfer], [tensor], wake=True)

    def _transfer(self, memory: torch.Tensor, tag: int, keep: Any, deadline: float | None = None) -> Transfer:
        call = Call(POINT_TO_POINT, dtype=dtype_code(memory.dtype), elements=memory.numel(), tag=tag)
        (view,) = parts_of(None, Buffer.DATA, [memory])
        return Transfer(call, self._deadline(None) if deadline is None else deadline, (keep, memory), view)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier that names who did not come: rank 0 hears every rank, then lets all go."""
        limit = self._session.engine.clock() + float((timeout or self._timeout).total_seconds())
        empty = torch.empty(0, dtype=torch.uint8)
        if self._mine:
            self._plain_send(empty, 0, _BARRIER_ARRIVE, limit).wait()
            self._plain_receive(empty, 0, _BARRIER_GO, limit + 1).wait()
            return
        peers = range(1, self._count)
        arrivals = {peer: self._plain_receive(empty, peer, _BARRIER_ARRIVE, float("inf")) for peer in peers}
        missing = [peer for peer, work in arrivals.items() if not self._arrived(work, limit)]
        if missing:
            names = ", ".join(str(self._ranks[peer]) for peer in missing)
            error = CollectiveTimeoutError(f"monitored_barrier: worker {names} did not arrive in time")
            self._loop.ask(lambda: self._session.engine.fail(error, self._ranks[missing[0]]))
            self._loop.wake()
            raise error
        for peer in peers:
            self._plain_send(empty, peer, _BARRIER_GO, limit + 1).wait()

    def _arrived(self, work: RingfenceWork, limit: float) -> bool:
        (operation,) = work.operations
        self._loop.wait(operation, max(0.0, limit - self._session.engine.clock()))
        if operation.done:
            work.wait()
        return operation.done

    def _plain_send(self, tensor: torch.Tensor, peer: int, tag: int, deadline: float) -> RingfenceWork:
        transfer = self._transfer(tensor, tag, tensor, deadline)
        group, engine = self._group, self._session.engine
        self._loop.ask(lambda: engine.send(group.get(), transfer, peer))
        return self._work([transfer], [tensor], wake=True)

    def _plain_receive(self, tensor: torch.Tensor, peer: int, tag: int, deadline: float) -> RingfenceWork:
        transfer = self._transfer(tensor, tag, tensor, deadline)
        group, engine = self._group, self._session.engine
        self._loop.ask(lambda: engine.receive(group.get(), transfer, peer))
        return self._work([transfer], [tensor], wake=True)

    # -- checks ------------------------------------------------------------------------------------------------------

    def _expect_one_per_rank(self, tensors: Sequence[torch.Tensor], what: str) -> None:
        if len(tensors) != self._count:
            raise ValueError(
                f"one {what} tensor for each of the {self._count} ranks is needed, {len(tensors)} were given"
            )

    def _expect_peer(self, rank: int) -> None:
        if not 0 <= rank < self._count or rank == self._mine:
            raise ValueError(f"rank {rank} is no other rank of this group of {self._count}")

    # The names that torch used before 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


class _Lazy:
    """A group that the driving thread adds when the first operation reaches it."""

    __slots__ = ("_group", "_make")

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._group: Any = None

    def get(self) -> Any:
        if self._group is None:
            self._group = self._make()
        return self._group


def _one(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    if len(tensors) != 1:
        raise UnsupportedError(f"one tensor per call is supported, {len(tensors)} were given")
    return tensors


def _split(memory: torch.Tensor, tensor: torch.Tensor, splits: list[int], count: int) -> list[torch.Tensor]:
    """The parts of an all-to-all: splits count rows of dimension 0; none means equal parts."""
    rows = tensor.size(0) if tensor.dim() else 1
    if not splits:
        if rows % count:
            raise ValueError(f"all_to_all: dimension 0 is {rows}, which {count} ranks do not divide; give split sizes")
        return even_parts(memory, count)
    if len(splits) != count or sum(splits) != rows:
        raise ValueError(f"all_to_all: split sizes {splits} do not add up to dimension 0 ({rows}) over {count} ranks")
    row = memory.numel() // rows if rows else 0
    return list(memory.split([split * row for split in splits]))


def _outside_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep torch.compile out: it would trace these methods when compiled code calls a collective.

    torch has a decorator for that, which imports its compiler (seconds) at the first call. Here it is imported only by
    who compiles.
    """
    disabled: Callable[..., Any] | None = None

    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        nonlocal disabled
        if disabled is None:
            dynamo = sys.modules.get("torch._dynamo")
            if dynamo is None or not hasattr(dynamo, "disable"):
                return function(*args, **kwargs)
            disabled = dynamo.disable(function)
        return disabled(*args, **kwargs)

    return inner


for _class in (RingfenceProcessGroup, RingfenceWork):
    for _key, _value in list(vars(_class).items()):
        if isinstance(_value, types.FunctionType) and _key != "__init__":
            setattr(_class, _key, _outside_dynamo(_value))
