"""The variants on the side of a worker: each runs a collective, or begins it and reports when it is done."""

from __future__ import annotations

import importlib
import os
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

from ringfence.backend.process_group import RingfenceProcessGroup
from ringfence.collectives import Thresholds
from ringfence.guard import plaintext_allowed
from ringfence.hooks import int8
from ringfence.session.session import Session
from ringfence_lab.bench import names, operations, tunnels
from ringfence_lab.bench.byte_counts import Traffic
from ringfence_lab.bench.device import CopiesBeside
from ringfence_lab.bench.operations import Tensors
from ringfence_lab.bench.profile import ProfiledSession, Stages
from ringfence_lab.bench.rings import HopByHopRing, Ring, TlsRing
from ringfence_lab.bench.unsealed import UnsealedSession

_ALWAYS: Final = 1 << 62  # bytes


class WorkerVariant:
    """A variant. `group` is None if it is not a process group, `stages` if it has no clocks."""

    group: Any = None
    stages: Stages | None = None
    tolerance = 0.0  # of sums, relative

    def counted(self) -> Traffic | None:
        """Return what this worker has sent in sealed frames and inside its machine; None if nobody counts it."""
        return None

    def offers(self, operation: str) -> bool:
        """Return whether the variant has this collective."""
        return True

    def run(self, operation: str, tensors: Tensors) -> None:
        """Execute a collective."""
        raise NotImplementedError

    def begin(self, operation: str, tensors: Tensors) -> Any:
        """Begin a collective; return what has `is_completed` and `wait`."""
        raise NotImplementedError


class AloneVariant(WorkerVariant):
    """A step without communication. It takes part in steps, not in collectives."""

    def offers(self, operation: str) -> bool:
        return False


class Place(NamedTuple):
    """The rank of a worker and its environment."""

    rank: int
    size: int
    host: str
    folder: Path
    store: Any
    timeout: timedelta
    device: torch.device | None = None  # of the tensors; None: the host


class GroupVariant(WorkerVariant):
    """A process group of torch.distributed."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self._engine = group._session.engine if isinstance(group, RingfenceProcessGroup) else None
        self.stages = getattr(self._engine, "stages", None)

    def run(self, operation: str, tensors: Tensors) -> None:
        operations.call(operation, tensors, self.group)

    def begin(self, operation: str, tensors: Tensors) -> Any:
        return operations.call(operation, tensors, self.group, asynchronous=True)

    def counted(self) -> Traffic | None:
        if self._engine is None:
            return None
        peers = self._engine.counters().peers
        return Traffic(
            sum(peer.sealed_sent for peer in peers),
            sum(peer.wire_sent for peer in peers),
            sum(peer.local_sent for peer in peers),
        )


class Int8Variant(GroupVariant):
    """ringfence's own sum with int8 on the wire."""

    tolerance = 1e-6  # of sums of equal values, which are multiples of their block's scale

    def __init__(self, group: Any) -> None:
        super().__init__(group)
        self._thread = ThreadPoolExecutor(1)

    def offers(self, operation: str) -> bool:
        return operation == "all_reduce"

    def run(self, operation: str, tensors: Tensors) -> None:
        int8.all_reduce(tensors.whole, self.group)

    def begin(self, operation: str, tensors: Tensors) -> Any:
        future = self._thread.submit(self.run, operation, tensors)
        return SimpleNamespace(is_completed=future.done, wait=future.result)


class DeviceVariant(GroupVariant):
    """A process group on device tensors. A run ends when its results are on the device."""

    def run(self, operation: str, tensors: Tensors) -> None:
        super().run(operation, tensors)
        torch.accelerator.synchronize()


class HostVariant(GroupVariant):
    """ringfence on host tensors, while the copies of the same call on device tensors run beside it."""

    def __init__(self, group: Any, place: Place) -> None:
        super().__init__(group)
        assert place.device is not None
        self._rank = place.rank
        self._copies = CopiesBeside(place.device)
        self._on_device: Tensors
        self._blocking = False

    def prepare(self, tensors: Tensors, confidential: bool) -> None:
        """Take the tensors that are copied; the collective itself gets others."""
        self._on_device, self._blocking = tensors, confidential

    def run(self, operation: str, tensors: Tensors) -> None:
        self._copies.start(operation, self._on_device, self._rank, self._blocking)
        super().run(operation, tensors)
        self._copies.finish()


class RingVariant(WorkerVariant):
    """One of the rings of this benchmark."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self.thread = ThreadPoolExecutor(1)

    def offers(self, operation: str) -> bool:
        return operation != "all_to_all"  # it has two neighbours and no other connection

    def run(self, operation: str, tensors: Tensors) -> None:
        whole, part, _ = tensors
        match operation:
            case "all_reduce":
                self.ring.all_reduce(whole)
            case "all_gather":
                self.ring.all_gather(whole, part)
            case "reduce_scatter":
                self.ring.reduce_scatter(part, whole)
            case _:
                self.ring.broadcast(whole)

    def begin(self, operation: str, tensors: Tensors) -> Any:
        future = self.thread.submit(self.run, operation, tensors)
        return SimpleNamespace(is_completed=future.done, wait=future.result)


class RingSession(Session):
    """Sums everything in a ring. This and the next two check the choices of the selection table and of the planner."""

    table = Thresholds(small=0, ring_group=_ALWAYS)


class HalvingSession(Session):
    table = Thresholds(small=0, ring_group=0)


class DoublingSession(Session):
    table = Thresholds(small=_ALWAYS)


_SESSIONS: Final[dict[str, type[Session]]] = {
    "ringfence": Session,
    "ringfence-unsealed": UnsealedSession,
    "ringfence-profiled": ProfiledSession,
    "ringfence-ring": RingSession,
    "ringfence-halving": HalvingSession,
    "ringfence-doubling": DoublingSession,
}
_RINGS: Final[dict[str, type[Ring]]] = {"plain-ring": Ring, "hop-by-hop": HopByHopRing, "tls": TlsRing}


def make(name: str, place: Place) -> WorkerVariant:
    """Return a variant by name. "package.module:Class" names a session class, for tests of the benchmark."""
    if place.device is not None:
        return _make_on_device(name, place)
    if name == "gloo-a":
        return GroupVariant(dist.group.WORLD)
    if name == "gloo-b":
        with plaintext_allowed():
            return GroupVariant(dist.new_group(backend="gloo"))
    if name == "int8":
        return Int8Variant(_group_over(Session, name))
    if name == "gloo-int8":
        with plaintext_allowed():
            return Int8Variant(dist.new_group(backend="gloo"))
    if name in names.TUNNELS:
        return GroupVariant(_gloo_over(tunnels.interface(name)))
    if name == names.ALONE:
        return AloneVariant()
    if name in _RINGS:
        return RingVariant(_RINGS[name](place.store, name, place.rank, place.size, place.host, place.folder))
    if name in _SESSIONS:
        return GroupVariant(_group_over(_SESSIONS[name], name))
    return GroupVariant(_group_over(*_session_named(name)))


def _gloo_over(interface: str) -> Any:
    """Return a group of Gloo whose connections use an interface: Gloo reads its name whenever a group is made."""
    before = os.environ["GLOO_SOCKET_IFNAME"]
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    try:
        with plaintext_allowed():
            return dist.new_group(backend="gloo")
    finally:
        os.environ["GLOO_SOCKET_IFNAME"] = before


def _make_on_device(name: str, place: Place) -> WorkerVariant:
    if name in names.HOST:
        return HostVariant(_group_over(Session, name), place)
    if name in names.CUDA_VARIANTS:
        with plaintext_allowed():
            return DeviceVariant(dist.new_group(backend=name))
    if name in _SESSIONS:
        return DeviceVariant(_group_over(_SESSIONS[name], name))
    return DeviceVariant(_group_over(*_session_named(name)))


def _session_named(name: str) -> tuple[type[Session], str]:
    module, _, qualname = name.partition(":")
    return getattr(importlib.import_module(module), qualname), qualname.lower()


def _group_over(session_type: type[Session], name: str) -> Any:
    """Return a subgroup of the default Gloo group with its own session.

    torch makes groups by the name of a registered backend; these names exist in the benchmark's workers only.
    """

    def create(options: Any, backend_options: Any) -> RingfenceProcessGroup:
        session = session_type(options.store, options.group_rank, options.group_size, options.timeout.total_seconds())
        ranks = tuple(range(options.group_size))
        return RingfenceProcessGroup(
            session, ranks, options.timeout, str(options.group_id), options.store, holds_session=True
        )

    backend = f"bench-{name}"
    accelerator = torch.accelerator.current_accelerator()
    devices = ["cpu", *([] if accelerator is None else [accelerator.type])]
    dist.Backend.register_backend(backend, create, extended_api=True, devices=devices)
    return dist.new_group(backend=backend)


def gloo_facts() -> dict[str, Any]:
    """Return the options of the baseline."""
    options = dist.group.WORLD._get_backend(torch.device("cpu")).options
    return {"threads": options._threads, "devices": len(options._devices)}
