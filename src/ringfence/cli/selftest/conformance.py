"""Every collective on device tensors, compared with results computed on the host. Values are small, so sums are exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from ringfence.cli.selftest.device import Setting
from ringfence.cli.selftest.outcome import Outcome, right, wrong

DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.float64, torch.complex64)
QUICK_DTYPES: Final = (torch.float32, torch.bfloat16, torch.int64)
SIZES: Final = (1, 1680, 0, 302_400)  # rows of a transposed tensor can be divided among up to eight workers
QUICK_SIZES: Final = 2  # so many of them with every view
VIEWS: Final = ("contiguous", "offset", "every second", "transposed")
_LENGTH: Final = 2  # of the second dimension of a transposed tensor

Pairs = list[tuple[Tensor, Tensor]]  # what is on the device, what is expected


@dataclass(frozen=True)
class Case:
    """A tensor of one type, size and view; `salt` makes its values differ from those of other cases."""

    at: Setting
    dtype: torch.dtype
    size: int
    view: str
    salt: int

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} x {self.size}, {self.view}"

    def values(self, rank: int, slot: int = 0, size: int | None = None) -> Tensor:
        """Return what a rank contributes, on the host: numbers from 0 to 4."""
        size = self.size if size is None else size
        return ((torch.arange(size) * 7 + rank * 3 + slot * 2 + self.salt) % 5).to(self.dtype)

    def place(self, values: Tensor) -> Tensor:
        """Return these values on the device, in this case's view."""
        device = self.at.device
        if self.view == "offset":
            memory = torch.zeros(len(values) + 3, dtype=self.dtype, device=device)
            tensor = memory[3:]
        elif self.view == "every second":
            tensor = torch.zeros(len(values), 2, dtype=self.dtype, device=device)[:, 0]
        elif self.view == "transposed" and len(values) and len(values) % (_LENGTH * self.at.size) == 0:
            tensor = torch.zeros(_LENGTH, len(values) // _LENGTH, dtype=self.dtype, device=device).t()
            values = values.view(tensor.shape)
        else:
            tensor = torch.zeros(len(values), dtype=self.dtype, device=device)
        tensor.copy_(values)
        return tensor

    def empty(self, size: int | None = None) -> Tensor:
        size = self.size if size is None else size
        return self.place(torch.full((size,), 9).to(self.dtype))

    def sum(self, slot: int = 0) -> Tensor:
        return sum((self.values(rank, slot) for rank in range(self.at.size)), torch.zeros(self.size, dtype=self.dtype))

    def all_values(self, slot: int = 0) -> list[Tensor]:
        return [self.values(rank, slot) for rank in range(self.at.size)]


def all_reduce(case: Case) -> Pairs:
    tensor = case.place(case.values(case.at.rank))
    dist.all_reduce(tensor)
    pairs = [(tensor, case.sum())]
    if not case.dtype.is_complex:
        largest = case.place(case.values(case.at.rank))
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        pairs.append((largest, torch.stack(case.all_values()).amax(0) if case.size else case.values(0)))
    if case.dtype is torch.float32:
        mean = case.place(case.values(case.at.rank) * case.at.size)
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        pairs.append((mean, case.sum()))
    return pairs


def broadcast(case: Case) -> Pairs:
    root = case.at.size - 1
    sent = case.place(case.values(case.at.rank))
    reduced = case.place(case.values(case.at.rank))
    dist.broadcast(sent, root)
    dist.reduce(reduced, root)
    return [(sent, case.values(root)), *([(reduced, case.sum())] if case.at.rank == root else [])]


def all_gather(case: Case) -> Pairs:
    outputs, whole = [case.empty() for _ in range(case.at.size)], case.empty(case.size * case.at.size)
    dist.all_gather(outputs, case.place(case.values(case.at.rank)))
    dist.all_gather_into_tensor(whole, case.place(case.values(case.at.rank)))
    return [*zip(outputs, case.all_values(), strict=True), (whole, torch.cat(case.all_values()))]


def reduce_scatter(case: Case) -> Pairs:
    mine = [case.values(case.at.rank, slot) for slot in range(case.at.size)]
    listed, whole = case.empty(), case.empty()
    dist.reduce_scatter(listed, [case.place(each) for each in mine])
    dist.reduce_scatter_tensor(whole, case.place(torch.cat(mine)))
    return [(listed, case.sum(case.at.rank)), (whole, case.sum(case.at.rank))]


def all_to_all(case: Case) -> Pairs:
    mine = [case.values(case.at.rank, slot) for slot in range(case.at.size)]
    outputs, whole = [case.empty() for _ in mine], case.empty(case.size * case.at.size)
    dist.all_to_all(outputs, [case.place(each) for each in mine])
    dist.all_to_all_single(whole, case.place(torch.cat(mine)))
    expected = case.all_values(case.at.rank)
    return [*zip(outputs, expected, strict=True), (whole, torch.cat(expected))]


def scatter(case: Case) -> Pairs:
    first = case.at.rank == 0
    part = case.empty()
    outputs = [case.empty() for _ in range(case.at.size)] if first else None
    dist.scatter(part, [case.place(case.values(0, slot)) for slot in range(case.at.size)] if first else None, 0)
    dist.gather(case.place(case.values(case.at.rank)), outputs, 0)
    gathered = list(zip(outputs, case.all_values(), strict=True)) if outputs else []
    return [(part, case.values(0, case.at.rank)), *gathered]


def point_to_point(case: Case) -> Pairs:
    """Send to the next rank and receive from the previous one, twice."""
    at = case.at
    after, before = (at.rank + 1) % at.size, (at.rank - 1) % at.size
    received, batched = case.empty(), case.empty()
    sending = dist.isend(case.place(case.values(at.rank)), after)
    dist.recv(received, before)
    sending.wait()
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, case.place(case.values(at.rank, 1)), after),
            dist.P2POp(dist.irecv, batched, before),
        ]
    )
    for work in works:
        work.wait()
    return [(received, case.values(before)), (batched, case.values(before, 1))]


def coalesced(case: Case) -> Pairs:
    tensors = [case.place(case.values(case.at.rank, slot)) for slot in range(3)]
    with dist._coalescing_manager(device=case.at.device, async_ops=True) as pending:
        for tensor in tensors:
            dist.all_reduce(tensor)
    pending.wait()
    objects: list[Any] = [None] * case.at.size
    dist.all_gather_object(objects, {"tensor": case.place(case.values(case.at.rank))})
    pairs = [(tensor, case.sum(slot)) for slot, tensor in enumerate(tensors)]
    return [*pairs, *((each["tensor"], case.values(rank)) for rank, each in enumerate(objects))]


COLLECTIVES: Final[dict[str, Callable[[Case], Pairs]]] = {
    each.__name__: each
    for each in (all_reduce, broadcast, all_gather, reduce_scatter, all_to_all, scatter, point_to_point, coalesced)
}


def cases(at: Setting) -> Iterator[Case]:
    """Yield every type at one size, every size and every view with float32."""
    dtypes = [dtype for dtype in (QUICK_DTYPES if at.quick else DTYPES) if _is_supported(dtype, at.device)]
    salt = 0
    for dtype in dtypes:
        yield Case(at, dtype, 1237, "contiguous", salt := salt + 1)
    for number, size in enumerate(SIZES):
        for view in VIEWS[:1] if at.quick and number >= QUICK_SIZES else VIEWS:
            yield Case(at, torch.float32, size, view, salt := salt + 1)


def _is_supported(dtype: torch.dtype, device: torch.device) -> bool:
    try:
        torch.zeros(2, dtype=dtype, device=device).cpu()
    except (RuntimeError, TypeError):
        return False
    return True


def check(name: str, at: Setting) -> Outcome:
    """Run one collective over all cases. A worker with wrong numbers goes on, so that no other waits for it."""
    wrongs: list[str] = []
    count = 0
    for case in cases(at):
        pairs = COLLECTIVES[name](case)
        torch.accelerator.synchronize()
        wrongs += [f"{case}: {text}" for actual, expected in pairs if (text := _difference(actual, expected))][:1]
        count += 1
    return wrong(f"{len(wrongs)} of {count} cases, the first: {wrongs[0]}") if wrongs else right(f"{count} cases")


def _difference(actual: Tensor, expected: Tensor) -> str:
    """Return the first element that is not as expected, or nothing."""
    found, wanted = actual.cpu().reshape(-1), expected.reshape(-1)
    if torch.equal(found, wanted):
        return ""
    where = int((found != wanted).nonzero()[0])
    return f"element {where} is {found[where].item()}, not {wanted[where].item()}"
