"""A schedule prepared for execution: the dependents of each step, and the position of each message on the wire."""

from __future__ import annotations

from typing import Any, NamedTuple

from ringfence.collectives.schedule import Action, Buffer, Dependency, Schedule, Step
from ringfence.dataplane.native import compile_program


class Program(NamedTuple):
    """A schedule with the tables that an execution looks up for each step."""

    schedule: Schedule
    steps: tuple[Step, ...]
    dependencies: tuple[tuple[Dependency, ...], ...]
    wakes: tuple[tuple[int, ...], ...]  #     the steps that depend on this one
    ordinals: tuple[int, ...]  # index of the message among those to or from the same peer: the header's `step`
    forwarded_by: tuple[tuple[int, ...], ...]  # for a RECV: the SENDs that forward its ciphertext
    typed: frozenset[int]  #                  chunks that are reduced or scaled, not only moved
    compiled: Any  #                          the same for the compiled data plane


_programs: dict[int, Program] = {}


def program(schedule: Schedule) -> Program:
    """Return the program of a schedule. It is cached, as is the schedule of each group size."""
    found = _programs.get(id(schedule))
    if found is None or found.schedule is not schedule:
        if len(_programs) > 4096:
            _programs.clear()
        found = _programs[id(schedule)] = _compile(schedule)
    return found


def _compile(schedule: Schedule) -> Program:
    steps = schedule.steps
    wakes: list[list[int]] = [[] for _ in steps]
    for index, needed in enumerate(schedule.dependencies):
        for dependency in needed:
            wakes[dependency.step].append(index)
    wakes_of, ordinals, forwarders = tuple(map(tuple, wakes)), _ordinals(steps), _forwarders(steps)
    return Program(
        schedule=schedule,
        steps=steps,
        dependencies=schedule.dependencies,
        wakes=wakes_of,
        ordinals=ordinals,
        forwarded_by=forwarders,
        typed=frozenset(
            chunk
            for step in steps
            if step.action in (Action.REDUCE, Action.SCALE)
            for chunk in (step.chunk, step.other)
            if chunk >= 0
        ),
        compiled=compile_program(
            steps,
            schedule.dependencies,
            wakes_of,
            ordinals,
            _sharers(schedule, forwarders),
            _fused_sends(schedule),
            len(schedule.chunks),
        ),
    )


def _ordinals(steps: tuple[Step, ...]) -> tuple[int, ...]:
    """The k-th message to a peer is the k-th message received there, so k identifies it at both endpoints."""
    seen: dict[tuple[bool, int], int] = {}
    ordinals = []
    for step in steps:
        pair = (step.action is Action.SEND, step.peer)
        ordinals.append(seen.get(pair, 0))
        if step.peer >= 0:
            seen[pair] = seen.get(pair, 0) + 1
    return tuple(ordinals)


def _forwarders(steps: tuple[Step, ...]) -> tuple[tuple[int, ...], ...]:
    sends: dict[tuple[int, int], list[int]] = {}
    for index, step in enumerate(steps):
        if step.action is Action.SEND and step.origin >= 0:
            sends.setdefault((step.chunk, step.origin), []).append(index)
    return tuple(
        tuple(send for send in sends.get((step.chunk, step.origin), ()) if send > index)
        if step.action is Action.RECV and step.origin >= 0
        else ()
        for index, step in enumerate(steps)
    )


def _sharers(schedule: Schedule, forwarders: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """For each step, the SENDs that reuse its ciphertext, received or sealed as the origin, or its copy in shared memory."""
    alike: dict[tuple[int, int, int, tuple[Dependency, ...]], list[int]] = {}
    for index, (step, needed) in enumerate(zip(schedule.steps, schedule.dependencies, strict=True)):
        if step.action is Action.SEND:  # the same writers: the same bytes
            alike.setdefault((step.chunk, step.origin, step.label, needed), []).append(index)
    return tuple(
        tuple(other for other in alike[step.chunk, step.origin, step.label, needed] if other != index)
        if step.action is Action.SEND
        else forwarders[index]
        for index, (step, needed) in enumerate(zip(schedule.steps, schedule.dependencies, strict=True))
    )


def _fused_sends(schedule: Schedule) -> tuple[int, ...]:
    """For each REDUCE, the only SEND that reads its result before it is overwritten (fused in the compiled plane); or -1."""
    fused = [-1] * len(schedule.steps)
    if any(place.parts > 1 for place in schedule.chunks):  # then chunks may overlap without being the same
        return tuple(fused)
    touching: dict[int, list[int]] = {}
    for index, step in enumerate(schedule.steps):
        for chunk in {step.chunk, step.other} - {-1}:
            touching.setdefault(chunk, []).append(index)
    for chunk, indices in touching.items():
        for index, after, last in zip(indices, indices[1:], [*indices[2:], -1], strict=False):
            step, following = schedule.steps[index], schedule.steps[after]
            is_sum = step.action is Action.REDUCE and step.chunk == chunk
            if is_sum and following.action is Action.SEND and following.origin < 0 and _is_dead(schedule, chunk, last):
                fused[index] = after
    return tuple(fused)


def _is_dead(schedule: Schedule, chunk: int, index: int) -> bool:
    """Return whether the chunk is overwritten or unused from this step on."""
    if index < 0:
        return schedule.chunks[chunk].buffer is Buffer.SCRATCH
    step = schedule.steps[index]
    return step.chunk == chunk and step.other != chunk and step.action in (Action.RECV, Action.REDUCE, Action.COPY)
