"""How the members of a group are spread over machines, as far as the roster says: it only chooses schedules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Machines = tuple[tuple[int, ...], ...]  # for each machine its workers, in order; (): none share a machine


def spread(hosts: Iterable[object]) -> Machines:
    """Group workers, which are numbered from 0, by their hosts."""
    found: dict[object, list[int]] = {}
    for worker, host in enumerate(hosts):
        found.setdefault(host, []).append(worker)
    return tuple(map(tuple, found.values())) if any(len(workers) > 1 for workers in found.values()) else ()


def within(machines: Machines, ranks: Sequence[int]) -> Machines:
    """Return the same for a group of these workers, whose members are numbered from 0."""
    machine_of = {worker: machine for machine, workers in enumerate(machines) for worker in workers}
    return spread(machine_of.get(worker, -1 - worker) for worker in ranks)


def are_even(machines: Machines) -> bool:
    """Return whether every machine has the same number of workers, more than one."""
    return len({len(workers) for workers in machines}) == 1
