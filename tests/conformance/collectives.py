"""Every collective as one rank calls it, with the expected results."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.conformance.cases import Case
from tests.conformance.setting import CPU, Setting

RIGHT = "right"
Results = list[tuple[Tensor, Tensor]]  # actual, expected


def all_reduce(at: Setting) -> Results:
    tensor = at.place(at.values(at.rank))
    at.call(dist.all_reduce, tensor, op=at.op)
    return [(tensor, at.reduced([at.values(rank) for rank in range(at.size)]))]


def all_reduce_coalesced(at: Setting) -> Results:
    tensors = [at.place(at.values(at.rank, slot)) for slot in range(3)]
    at.call(dist.all_reduce_coalesced, tensors, op=at.op)
    return [(t, at.reduced([at.values(rank, slot) for rank in range(at.size)])) for slot, t in enumerate(tensors)]


def reduce(at: Setting) -> Results:
    tensor = at.place(at.values(at.rank), unchanged=at.rank != at.root)
    at.call(dist.reduce, tensor, op=at.op, group_dst=at.root)
    if at.rank != at.root:
        return []
    return [(tensor, at.reduced([at.values(rank) for rank in range(at.size)]))]


def reduce_scatter(at: Setting) -> Results:
    output = at.empty()
    inputs = [at.place(at.values(at.rank, slot), unchanged=True) for slot in range(at.size)]
    at.call(dist.reduce_scatter, output, inputs, op=at.op)
    return [(output, at.reduced([at.values(rank, at.rank) for rank in range(at.size)]))]


def reduce_scatter_tensor(at: Setting) -> Results:
    output = at.empty()
    parts = torch.cat([at.values(at.rank, slot) for slot in range(at.size)])
    at.call(dist.reduce_scatter_tensor, output, at.place(parts, unchanged=True), op=at.op)
    return [(output, at.reduced([at.values(rank, at.rank) for rank in range(at.size)]))]


def broadcast(at: Setting) -> Results:
    tensor = at.place(at.values(at.rank))
    at.call(dist.broadcast, tensor, group_src=at.root)
    return [(tensor, at.values(at.root))]


def all_gather(at: Setting) -> Results:
    outputs = [at.empty() for _ in range(at.size)]
    at.call(dist.all_gather, outputs, at.place(at.values(at.rank), unchanged=True))
    return [(output, at.values(rank)) for rank, output in enumerate(outputs)]


def all_gather_uneven(at: Setting) -> Results:
    rows = [at.rows + rank % 3 for rank in range(at.size)]
    outputs = [at.empty(count) for count in rows]
    at.call(dist.all_gather, outputs, at.place(at.values(at.rank, rows=rows[at.rank]), unchanged=True))
    return [(output, at.values(rank, rows=rows[rank])) for rank, output in enumerate(outputs)]


def all_gather_into_tensor(at: Setting) -> Results:
    output = at.empty(at.rows * at.size)
    at.call(dist.all_gather_into_tensor, output, at.place(at.values(at.rank), unchanged=True))
    return [(output, torch.cat([at.values(rank) for rank in range(at.size)]))]


def all_gather_coalesced(at: Setting) -> Results:
    inputs = [at.place(at.values(at.rank, slot), unchanged=True) for slot in range(2)]
    outputs = [[at.empty() for _ in inputs] for _ in range(at.size)]
    at.call(dist.all_gather_coalesced, outputs, inputs)
    return [(t, at.values(rank, slot)) for rank, row in enumerate(outputs) for slot, t in enumerate(row)]


def gather(at: Setting) -> Results:
    outputs = [at.empty() for _ in range(at.size)] if at.rank == at.root else None
    at.call(dist.gather, at.place(at.values(at.rank), unchanged=True), outputs, group_dst=at.root)
    return [(output, at.values(rank)) for rank, output in enumerate(outputs or [])]


def scatter(at: Setting) -> Results:
    inputs = [at.place(at.values(at.root, slot), unchanged=True) for slot in range(at.size)]
    output = at.empty()
    at.call(dist.scatter, output, inputs if at.rank == at.root else None, group_src=at.root)
    return [(output, at.values(at.root, at.rank))]


def all_to_all(at: Setting) -> Results:
    return _all_to_all(at, lambda sender, receiver: at.rows)


def all_to_all_uneven(at: Setting) -> Results:
    return _all_to_all(at, lambda sender, receiver: at.rows + (sender + 2 * receiver) % 3)


def _all_to_all(at: Setting, rows: Callable[[int, int], int]) -> Results:
    outputs = [at.empty(rows(peer, at.rank)) for peer in range(at.size)]
    inputs = [at.place(at.values(at.rank, peer, rows(at.rank, peer)), unchanged=True) for peer in range(at.size)]
    at.call(dist.all_to_all, outputs, inputs)
    return [(output, at.values(peer, at.rank, rows(peer, at.rank))) for peer, output in enumerate(outputs)]


def all_to_all_single(at: Setting) -> Results:
    return _all_to_all_single(at, lambda sender, receiver: at.rows, even=True)


def all_to_all_single_uneven(at: Setting) -> Results:
    return _all_to_all_single(at, lambda sender, receiver: at.rows * (receiver % 2) + sender % 3, even=False)


def _all_to_all_single(at: Setting, rows: Callable[[int, int], int], even: bool) -> Results:
    received = [rows(peer, at.rank) for peer in range(at.size)]
    sent = [rows(at.rank, peer) for peer in range(at.size)]
    parts = torch.cat([at.values(at.rank, peer, count) for peer, count in enumerate(sent)])
    output = at.empty(sum(received))
    splits: dict[str, Any] = {} if even else {"output_split_sizes": received, "input_split_sizes": sent}
    at.call(dist.all_to_all_single, output, at.place(parts, unchanged=True), **splits)
    return [(output, torch.cat([at.values(peer, at.rank, count) for peer, count in enumerate(received)]))]


def send_recv(at: Setting) -> Results:
    """Around the ring of ranks, with a tag."""
    if at.size == 1:
        return []
    after, before = (at.rank + 1) % at.size, (at.rank - 1) % at.size
    outgoing, incoming = at.place(at.values(at.rank), unchanged=True), at.empty()
    if at.case.mode != "sync":
        works = [
            dist.isend(outgoing, group=at.group, group_dst=after, tag=7),
            dist.irecv(incoming, group=at.group, group_src=before, tag=7),
        ]
        for work in works:
            work.wait()
    elif at.rank == 0:
        dist.send(outgoing, group=at.group, group_dst=after, tag=7)
        dist.recv(incoming, group=at.group, group_src=before, tag=7)
    else:
        dist.recv(incoming, group=at.group, group_src=before, tag=7)
        dist.send(outgoing, group=at.group, group_dst=after, tag=7)
    return [(incoming, at.values(before))]


COLLECTIVES: dict[str, Callable[[Setting], Results]] = {
    function.__name__: function
    for function in (
        all_reduce,
        all_reduce_coalesced,
        reduce,
        reduce_scatter,
        reduce_scatter_tensor,
        broadcast,
        all_gather,
        all_gather_uneven,
        all_gather_into_tensor,
        all_gather_coalesced,
        gather,
        scatter,
        all_to_all,
        all_to_all_uneven,
        all_to_all_single,
        all_to_all_single_uneven,
        send_recv,
    )
}


def outcome(case: Case, number: int, group: Any, device: torch.device) -> str:
    """Run one case; return RIGHT, "wrong: ..." or "refused: ..."."""
    at = Setting(case, number, group, device)
    try:
        results = COLLECTIVES[case.collective](at)
    except (RuntimeError, ValueError, TypeError) as error:
        return f"refused: {type(error).__name__}: {error}".splitlines()[0]
    faults = [fault for actual, expected in results if (fault := at.fault(actual, expected))]
    if damage := at.damage():
        faults.append(damage)
    return f"wrong: {faults[0]}" if faults else RIGHT


def groups_of(world: int) -> dict[str, list[int]]:
    """The groups of the cases, as global ranks."""
    return {
        "world": list(range(world)),
        "evens": list(range(0, world, 2)),
        "upper": list(range(world // 2, world)),
    }


def play(cases: Sequence[tuple[int, Case]], device: torch.device = CPU) -> list[str | None]:
    """Run all cases in order, on tensors of a device; the result is None where this rank is not a member."""
    warnings.simplefilter("ignore")
    members = groups_of(dist.get_world_size())
    groups = {name: dist.new_group(ranks) for name, ranks in members.items() if name != "world"}
    groups["world"] = dist.group.WORLD
    try:
        return [
            outcome(case, number, groups[case.group], device) if dist.get_rank() in members[case.group] else None
            for number, case in cases
        ]
    finally:
        for name, group in groups.items():
            if name != "world" and dist.get_rank() in members[name]:
                dist.destroy_process_group(group)
