"""Reads what torch.profiler.ExecutionTraceObserver writes: the graph of operators in Chakra's schema, as JSON.

It names every collective with its size and has no times. Computing has to be given, or comes from a Kineto trace of the run.
"""

from __future__ import annotations

import contextlib
import json
from itertools import pairwise
from typing import Any, Final, NamedTuple

from ringfence.errors import ConfigurationError
from ringfence_lab.plan.recorded import (
    MOST_CALLS,
    MOST_WORKERS,
    Gradient,
    Recording,
    Window,
    elements_of,
    is_collective,
    listed,
    mapping,
    whole_number,
)

_GROUPS: Final = "## process_group:init ##"
_STEP: Final = "ProfilerStep#"
_ACCUMULATE: Final = "torch::autograd::AccumulateGrad"
_MOST: Final = 1 << 44
_LONGEST: Final = 200
_MOST_NODES: Final = 10_000_000


class _Node(NamedTuple):
    """A collective."""

    number: int
    name: str
    elements: int | None
    dtype: str
    group: int


class ExecutionTraceReader:
    """Takes the nodes one by one. A node's number stands for its time: numbers are given in the order of calls."""

    def __init__(self, name: str) -> None:
        self._found = Recording(name, timed=False, shapes=True)
        self._said: list[_Node] = []
        self._calls: list[_Node] = []
        self._steps: list[int] = []  # the nodes that begin a step
        self._count = 0

    def take(self, node: dict[str, Any]) -> None:
        """Take one node."""
        name, number = node.get("name"), whole_number(node.get("id"), _MOST)
        self._count += 1
        if self._count > _MOST_NODES:
            raise ConfigurationError(f"{self._found.name} has more than {_MOST_NODES:,} nodes: record fewer steps")
        if not isinstance(name, str) or number is None:
            return
        if name == _GROUPS:
            self._groups(listed(mapping(node.get("inputs")).get("values")))
        elif name.startswith(_STEP) and name.removeprefix(_STEP).isdigit():
            self._steps.append(number)
        elif name == _ACCUMULATE:
            shapes = listed(mapping(node.get("inputs")).get("shapes"))
            elements = elements_of(shapes[0]) if shapes else None
            if elements:
                self._found.gradients.append(Gradient(float(number), elements))
        elif name == "record_param_comms":
            self._of_parameters(number, node)
        elif name.startswith("c10d::") and is_collective(name):
            self._of_c10d(number, node)

    def _groups(self, values: list[Any]) -> None:
        """The groups are JSON within a string; the largest is the whole job."""
        for value in values:
            with contextlib.suppress(ValueError, RecursionError):
                for group in listed(json.loads(value) if isinstance(value, str) else None):
                    size = whole_number(mapping(group).get("group_size"), MOST_WORKERS) or 0
                    self._found.workers = max(size, self._found.workers or 0) or None
                    backend = str(mapping(group).get("backend_config") or "")
                    self._found.backend = "nccl" if "nccl" in backend else "gloo" if "gloo" in backend else ""

    def _of_parameters(self, number: int, node: dict[str, Any]) -> None:
        attributes = {str(each.get("name")): each.get("value") for each in map(mapping, listed(node.get("attrs")))}
        name = attributes.get("collective_name")
        if not isinstance(name, str) or name in ("wait", "init"):
            return
        sizes = [whole_number(attributes.get(key), _MOST) for key in ("in_msg_nelems", "out_msg_nelems")]
        elements = None if None in sizes else max(each or 0 for each in sizes)
        group = whole_number(attributes.get("pg_size"), MOST_WORKERS) or 0
        self._keep(self._said, _Node(number, name[:_LONGEST], elements, str(attributes.get("dtype"))[:32], group))

    def _of_c10d(self, number: int, node: dict[str, Any]) -> None:
        """The largest tensor among the first two arguments is the whole, which is what a gather returns."""
        inputs = mapping(node.get("inputs"))
        shapes, types = listed(inputs.get("shapes")), listed(inputs.get("types"))
        tensors = [
            (elements_of(shape) or 0, kind[-32:])
            for shape, kind in list(zip(shapes, types, strict=False))[:2]
            if isinstance(kind, str) and "Tensor(" in kind
        ]
        elements, kind = max(tensors, default=(0, ""))
        dtype = kind.rpartition("Tensor(")[2].partition(")")[0]
        self._keep(self._calls, _Node(number, node["name"][:_LONGEST], elements or None, dtype, 0))

    def _keep(self, where: list[_Node], node: _Node) -> None:
        if len(where) >= MOST_CALLS:
            raise ConfigurationError(f"{self._found.name} has more than {MOST_CALLS:,} collectives: record fewer steps")
        where.append(node)

    def finish(self) -> Recording:
        """Return what was found. Where there are nodes of `record_param_comms`, which say most, those of c10d are left out."""
        found = self._found
        for node in self._said or self._calls:
            at = float(node.number)
            found.add(node.name, node.elements, node.dtype, node.group or found.workers, (at, at, at))
        if found.workers is None:
            found.workers = max((call.group for call in found.calls), default=0) or None
        found.calls.sort(key=lambda call: call.issued)
        found.gradients.sort()
        bounds = [*sorted(self._steps), _MOST]
        found.windows = [Window(step, float(start), float(end)) for step, (start, end) in enumerate(pairwise(bounds))]
        return found
