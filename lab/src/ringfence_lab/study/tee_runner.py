"""Measures rounds of gpu-tee cells: rings between the devices of one process, and ringfence between workers with one each."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ringfence_lab.accelerator.tee import Tee
from ringfence_lab.bench import names
from ringfence_lab.bench.measure import placements_for
from ringfence_lab.bench.samples import Case, Round
from ringfence_lab.bench.tee_variants import tee_of
from ringfence_lab.bench.worker_pool import RINGS, Placement, WorkerPool
from ringfence_lab.study.cells import Pool, Step


class TeeMachines:
    """The processes that measure gpu-tee cells with the same number of devices and the same rate between hosts."""

    def __init__(self, rings: WorkerPool, sealed: WorkerPool | None) -> None:
        self._rings = rings
        self._sealed = sealed

    @property
    def facts(self) -> dict[str, Any]:
        """What a reader of the samples wants to know of the processes."""
        return self._rings.facts

    def rounds_of(self, case: Case, trace: Sequence[Step]) -> Callable[[int], Round]:
        """Prepare a case, which checks every result, and return a function that measures one round of it."""
        tees = {name: _as_json(tee_of(name, case["tee"], dilation)) for name, dilation in case["dilations"].items()}
        rings = {name: tee for name, tee in tees.items() if name != names.TEE_SEALED}
        steps = list(trace)
        self._rings.tell("prepare_tee", steps=steps, tees=rings, operation=case["operation"])
        if self._sealed is not None and names.TEE_SEALED in tees:
            self._sealed.tell("prepare_tee", steps=steps, tees={names.TEE_SEALED: tees[names.TEE_SEALED]})

        def measure(number: int) -> Round:
            order = list(rings)
            random.Random(number).shuffle(order)  # noqa: S311 (an order, not a secret)
            found = self._rings.measure("train", turns=[(name, 1) for name in order])
            if self._sealed is not None and names.TEE_SEALED in tees:
                found |= self._sealed.measure("train", turns=[(names.TEE_SEALED, 1)])
            return {name: _undilated(sample, case["dilations"][name]) for name, sample in found.items()}

        return measure


@contextlib.contextmanager
def machines_for(pool: Pool) -> Iterator[TeeMachines]:
    """Start the processes; leaving ends them."""
    with contextlib.ExitStack() as stack:
        rings = stack.enter_context(WorkerPool([Placement()], module=RINGS, devices=pool.workers))
        sealed = None
        if pool.hosts:
            placements = stack.enter_context(placements_for(pool.workers, pool.hosts, pool.rate))
            sealed = stack.enter_context(WorkerPool(placements, [names.TEE_SEALED], names.SIMULATED))
        yield TeeMachines(rings, sealed)


def _as_json(tee: Tee) -> dict[str, Any]:
    found = dataclasses.asdict(tee)
    return {name: value for name, value in found.items() if name not in ("name", "origins")}


def _undilated(sample: Mapping[str, Any], dilation: float) -> dict[str, Any]:
    """Return a sample in simulated seconds, with what passed on this machine beside them."""
    actual = sample.get("dilation", dilation)  # a ring raises it where the machine is too slow
    return {**sample, "seconds": sample["seconds"] / actual, "dilation": actual}
