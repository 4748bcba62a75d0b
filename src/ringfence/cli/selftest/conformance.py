"""Every collective as one rank calls it, and what torch computes on the host; the conformance tests run them too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from ringfence.cli.selftest.device import Setting
from ringfence.cli.selftest.report import Outcome, right, wrong

LAYOUTS: Final = ("plain", "offset", "transposed", "every_second")
MODES: Final = ("sync", "async", "future")  # how to wait

_DTYPES: Final = ("float32", "bfloat16", "int64", "float16", "uint8", "float64", "complex64")
_SIZES: Final = (1, 1237, 0, 302_401)
_QUICK_DTYPES: Final = 3
_QUICK_SIZES: Final = 2  # so many of them with every layout
_ROWS: Final = 3  # of a transposed view

Results = list[tuple[Tensor, Tensor]]  # actual, expected


@dataclass(frozen=True)
class Case:
    """One call of one collective by all members of a group."""

    collective: str
    dtype: str
    op: str  # "" if nothing is reduced
    size: int  # elements in each rank's part (times three rows if transposed)
    layout: str
    world: int
    mode: str
    group: str

    def __str__(self) -> str:
        what = f"{self.collective} {self.op}".strip()
        where = f"world {self.world}, {self.group}, {self.mode}"
        return f"{what}, {self.dtype} x {self.size}, {self.layout}, {where}"


class Call:
    """One case on one rank of its group: reproducible values, views with guarded gaps, and the expected result."""

    def __init__(self, case: Case, number: int, group: Any, device: torch.device) -> None:
        self.case = case
        self.device = device
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.root = number % self.size
        self.rows = _ROWS if case.layout == "transposed" else case.size
        self.dtype: torch.dtype = getattr(torch, case.dtype)
        self.number = number
        self._guards: list[tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]] = []
        self._unchanged: list[tuple[Tensor, Tensor]] = []

    @property
    def op(self) -> Any:
        return getattr(dist.ReduceOp, self.case.op)

    def values(self, rank: int, slot: int = 0, rows: int | None = None) -> Tensor:
        """The values of a rank for a slot of this case, which every rank can compute: small, so that results are exact."""
        shape = self.shape(self.rows if rows is None else rows)
        step = self.size if self.case.op == "AVG" else 1
        values = (torch.arange(shape.numel()) * 7 + rank * 3 + slot * 2 + self.number) % 5 * step
        return values.to(self.dtype).reshape(shape)

    def all_values(self, slot: int = 0) -> list[Tensor]:
        """The values of all ranks for a slot."""
        return [self.values(rank, slot) for rank in range(self.size)]

    def sent(self, slot: int = 0, rows: int | None = None) -> Tensor:
        """A tensor with the values of this rank, which the collective may only read."""
        return self.place(self.values(self.rank, slot, rows), unchanged=True)

    def shape(self, rows: int) -> torch.Size:
        return torch.Size((rows, self.case.size)) if self.case.layout == "transposed" else torch.Size((rows,))

    def empty(self, rows: int | None = None) -> Tensor:
        """A tensor for a result, in the layout of the case, in memory with guarded gaps."""
        shape = self.shape(self.rows if rows is None else rows)
        base, view = _layout(self.case.layout, shape, self.dtype)
        base = base.to(self.device)
        self._guards.append((base, base.clone(), view))
        return view(base)

    def place(self, values: Tensor, unchanged: bool = False) -> Tensor:
        """A tensor with values; `unchanged`: the collective may only read it."""
        tensor = self.empty(values.shape[0])
        tensor.copy_(values)
        if unchanged:
            self._unchanged.append((tensor, values))
        return tensor

    def call(self, collective: Callable[..., Any], *args: Any, **keywords: Any) -> None:
        """Call the collective on this group and wait in the mode of the case."""
        pending = collective(*args, group=self.group, async_op=self.case.mode != "sync", **keywords)
        if self.case.mode == "future" and isinstance(pending, dist.Work):
            pending = pending.get_future()
        if self.case.mode != "sync":  # torch's coalesced collectives return a future themselves
            pending.wait()

    def reduced(self, slot: int = 0) -> Tensor:
        """The expected reduction of what all ranks have for a slot."""
        operands = torch.stack(self.all_values(slot))
        if self.case.op == "MAX":
            return operands.amax(0)
        return (operands.sum(0) / (self.size if self.case.op == "AVG" else 1)).to(self.dtype)

    def same(self, actual: Tensor, expected: Tensor) -> Tensor:
        """Compare the elements of a result."""
        return actual == expected

    def run(self) -> str:
        """Call the collective; describe what is wrong: in a result, or a write outside its tensors. Empty: all is right."""
        faults = [self._fault(*each) for each in {**REDUCING, **MOVING}[self.case.collective](self)]
        return next(filter(None, [*faults, self._damage()]), "")

    def _fault(self, actual: Tensor, expected: Tensor) -> str:
        actual = actual.cpu()
        if actual.shape != expected.shape:
            return f"shape {tuple(actual.shape)} instead of {tuple(expected.shape)}"
        same = self.same(actual, expected)
        if bool(same.all()):
            return ""
        where = int((~same).flatten().nonzero()[0])
        values = f"{actual.flatten()[where].item()} instead of {expected.flatten()[where].item()}"
        return f"{int((~same).sum())} of {same.numel()} elements differ, first at {where}: {values}"

    def _damage(self) -> str:
        for tensor, values in self._unchanged:
            if not torch.equal(tensor.cpu(), values):
                return "an input was changed"
        for base, untouched, view in self._guards:
            untouched, written = untouched.cpu(), base.cpu()
            view(untouched).copy_(view(written))
            if not torch.equal(written, untouched):
                return "memory between the elements of a view was written"
        return ""


def _layout(layout: str, shape: torch.Size, dtype: torch.dtype) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return memory and a function that returns a view of that shape in it."""
    count = shape.numel()
    match layout:
        case "plain":
            return torch.ones(count, dtype=dtype), lambda base: base.view(shape)
        case "offset":
            return torch.ones(count + 8, dtype=dtype), lambda base: base[5 : 5 + count].view(shape)
        case "transposed":
            return torch.ones(count, dtype=dtype), lambda base: base.view(shape[1], shape[0]).T
        case "every_second":
            return torch.ones(2 * count, dtype=dtype), lambda base: base[::2].view(shape)
    raise ValueError(layout)


# -- the collectives -------------------------------------------------------------------------------------------------


def all_reduce(at: Call) -> Results:
    tensor = at.place(at.values(at.rank))
    at.call(dist.all_reduce, tensor, op=at.op)
    return [(tensor, at.reduced())]


def all_reduce_coalesced(at: Call) -> Results:
    tensors = [at.place(at.values(at.rank, slot)) for slot in range(3)]
    at.call(dist.all_reduce_coalesced, tensors, op=at.op)
    return [(tensor, at.reduced(slot)) for slot, tensor in enumerate(tensors)]


def coalescing_manager(at: Call) -> Results:
    tensors = [at.place(at.values(at.rank, slot)) for slot in range(3)]
    with dist._coalescing_manager(group=at.group, device=at.device, async_ops=True) as pending:
        for tensor in tensors:
            dist.all_reduce(tensor, op=at.op, group=at.group)
    pending.wait()
    return [(tensor, at.reduced(slot)) for slot, tensor in enumerate(tensors)]


def reduce(at: Call) -> Results:
    tensor = at.place(at.values(at.rank), unchanged=at.rank != at.root)
    at.call(dist.reduce, tensor, op=at.op, group_dst=at.root)
    return [(tensor, at.reduced())] if at.rank == at.root else []


def reduce_scatter(at: Call) -> Results:
    output = at.empty()
    at.call(dist.reduce_scatter, output, [at.sent(slot) for slot in range(at.size)], op=at.op)
    return [(output, at.reduced(at.rank))]


def reduce_scatter_tensor(at: Call) -> Results:
    output = at.empty()
    parts = torch.cat([at.values(at.rank, slot) for slot in range(at.size)])
    at.call(dist.reduce_scatter_tensor, output, at.place(parts, unchanged=True), op=at.op)
    return [(output, at.reduced(at.rank))]


def broadcast(at: Call) -> Results:
    tensor = at.place(at.values(at.rank))
    at.call(dist.broadcast, tensor, group_src=at.root)
    return [(tensor, at.values(at.root))]


def all_gather(at: Call) -> Results:
    outputs = [at.empty() for _ in range(at.size)]
    at.call(dist.all_gather, outputs, at.sent())
    return [*zip(outputs, at.all_values(), strict=True)]


def all_gather_uneven(at: Call) -> Results:
    rows = [at.rows + rank % 3 for rank in range(at.size)]
    outputs = [at.empty(count) for count in rows]
    at.call(dist.all_gather, outputs, at.sent(rows=rows[at.rank]))
    return [(output, at.values(rank, rows=rows[rank])) for rank, output in enumerate(outputs)]


def all_gather_into_tensor(at: Call) -> Results:
    output = at.empty(at.rows * at.size)
    at.call(dist.all_gather_into_tensor, output, at.sent())
    return [(output, torch.cat(at.all_values()))]


def all_gather_coalesced(at: Call) -> Results:
    inputs = [at.sent(slot) for slot in range(2)]
    outputs = [[at.empty() for _ in inputs] for _ in range(at.size)]
    at.call(dist.all_gather_coalesced, outputs, inputs)
    return [(t, at.values(rank, slot)) for rank, row in enumerate(outputs) for slot, t in enumerate(row)]


def all_gather_object(at: Call) -> Results:
    objects: list[Any] = [None] * at.size
    dist.all_gather_object(objects, {"tensor": at.sent()}, group=at.group)
    return [(each["tensor"], at.values(rank)) for rank, each in enumerate(objects)]


def gather(at: Call) -> Results:
    outputs = [at.empty() for _ in range(at.size)] if at.rank == at.root else None
    at.call(dist.gather, at.sent(), outputs, group_dst=at.root)
    return [*zip(outputs, at.all_values(), strict=True)] if outputs else []


def scatter(at: Call) -> Results:
    inputs = [at.place(at.values(at.root, slot), unchanged=True) for slot in range(at.size)]
    output = at.empty()
    at.call(dist.scatter, output, inputs if at.rank == at.root else None, group_src=at.root)
    return [(output, at.values(at.root, at.rank))]


def all_to_all(at: Call) -> Results:
    return _all_to_all(at, lambda sender, receiver: at.rows)


def all_to_all_uneven(at: Call) -> Results:
    return _all_to_all(at, lambda sender, receiver: at.rows + (sender + 2 * receiver) % 3)


def _all_to_all(at: Call, rows: Callable[[int, int], int]) -> Results:
    outputs = [at.empty(rows(peer, at.rank)) for peer in range(at.size)]
    at.call(dist.all_to_all, outputs, [at.sent(peer, rows(at.rank, peer)) for peer in range(at.size)])
    return [(output, at.values(peer, at.rank, rows(peer, at.rank))) for peer, output in enumerate(outputs)]


def all_to_all_single(at: Call) -> Results:
    return _all_to_all_single(at, lambda sender, receiver: at.rows, even=True)


def all_to_all_single_uneven(at: Call) -> Results:
    return _all_to_all_single(at, lambda sender, receiver: at.rows * (receiver % 2) + sender % 3, even=False)


def _all_to_all_single(at: Call, rows: Callable[[int, int], int], even: bool) -> Results:
    received = [rows(peer, at.rank) for peer in range(at.size)]
    sent = [rows(at.rank, peer) for peer in range(at.size)]
    parts = torch.cat([at.values(at.rank, peer, count) for peer, count in enumerate(sent)])
    output = at.empty(sum(received))
    splits: dict[str, Any] = {} if even else {"output_split_sizes": received, "input_split_sizes": sent}
    at.call(dist.all_to_all_single, output, at.place(parts, unchanged=True), **splits)
    return [(output, torch.cat([at.values(peer, at.rank, count) for peer, count in enumerate(received)]))]


def send_recv(at: Call) -> Results:
    """Around the ring of ranks, with a tag; "future" as one batch."""
    if at.size == 1:
        return []
    after, before = (at.rank + 1) % at.size, (at.rank - 1) % at.size
    outgoing, incoming = at.sent(), at.empty()
    if at.case.mode == "sync" and at.rank == 0:
        dist.send(outgoing, group=at.group, group_dst=after, tag=7)
        dist.recv(incoming, group=at.group, group_src=before, tag=7)
    elif at.case.mode == "sync":
        dist.recv(incoming, group=at.group, group_src=before, tag=7)
        dist.send(outgoing, group=at.group, group_dst=after, tag=7)
    elif at.case.mode == "async":
        sending = dist.isend(outgoing, group=at.group, group_dst=after, tag=7)
        dist.irecv(incoming, group=at.group, group_src=before, tag=7).wait()
        sending.wait()
    else:
        pairs = ((dist.isend, outgoing, after), (dist.irecv, incoming, before))
        batch = [dist.P2POp(call, tensor, group=at.group, tag=7, group_peer=peer) for call, tensor, peer in pairs]
        for work in dist.batch_isend_irecv(batch):
            work.wait()
    return [(incoming, at.values(before))]


def _by_name(*functions: Callable[[Call], Results]) -> dict[str, Callable[[Call], Results]]:
    return {function.__name__: function for function in functions}


REDUCING: Final = _by_name(
    all_reduce, all_reduce_coalesced, coalescing_manager, reduce, reduce_scatter, reduce_scatter_tensor
)
MOVING: Final = _by_name(
    broadcast,
    all_gather,
    all_gather_uneven,
    all_gather_into_tensor,
    all_gather_coalesced,
    all_gather_object,
    gather,
    scatter,
    all_to_all,
    all_to_all_uneven,
    all_to_all_single,
    all_to_all_single_uneven,
    send_recv,
)


# -- the self-test ---------------------------------------------------------------------------------------------------


CHECKS: Final = {
    "all_reduce": ("all_reduce",),
    "broadcast": ("broadcast", "reduce"),
    "all_gather": ("all_gather", "all_gather_uneven", "all_gather_into_tensor"),
    "reduce_scatter": ("reduce_scatter", "reduce_scatter_tensor"),
    "all_to_all": ("all_to_all", "all_to_all_uneven", "all_to_all_single", "all_to_all_single_uneven"),
    "scatter": ("scatter", "gather"),
    "point_to_point": ("send_recv",),
    "coalesced": ("all_reduce_coalesced", "coalescing_manager", "all_gather_coalesced", "all_gather_object"),
}


def cases(name: str, at: Setting) -> Iterator[Case]:
    """Yield every type at one size, every size and every layout with float32, of each collective of a check."""
    dtypes = [dtype for dtype in _DTYPES[: _QUICK_DTYPES if at.quick else None] if _is_supported(dtype, at.device)]
    rows = [(dtype, 1237, "plain") for dtype in dtypes]
    for place, size in enumerate(_SIZES):
        some = LAYOUTS[:1] if at.quick and place >= _QUICK_SIZES else LAYOUTS
        rows += [("float32", size, layout) for layout in some]
    for collective in CHECKS[name]:
        every = ("SUM", "MAX", "AVG") if collective == "all_reduce" else ("SUM",)
        for op in every if collective in REDUCING else ("",):
            for number, (dtype, size, layout) in enumerate(rows):
                if not (op == "MAX" and dtype == "complex64"):  # complex numbers have no order
                    yield Case(collective, dtype, op, size, layout, at.size, MODES[number % 3], "world")


def _is_supported(dtype: str, device: torch.device) -> bool:
    try:
        torch.zeros(2, dtype=getattr(torch, dtype), device=device).cpu()
    except (RuntimeError, TypeError):
        return False
    return True


def check(name: str, at: Setting) -> Outcome:
    """Run one collective over all cases. A worker with wrong numbers goes on, so that no other waits for it."""
    wrongs: list[str] = []
    count = 0
    for case in cases(name, at):
        if text := Call(case, count, dist.group.WORLD, at.device).run():
            wrongs.append(f"{case}: {text}")
        count += 1
    return wrong(f"{len(wrongs)} of {count} cases, the first: {wrongs[0]}") if wrongs else right(f"{count} cases")
