"""Groups inside one machine that use another backend, where the policy permits it (`inside_machine`).

A group may be one if all its members have proved to each other that they are on one machine. Its backend is bound to the
loopback interface, and finds its peers over sealed links. Any other group is sealed, whatever a script asks for. The members
decide together, by sealed exchanges: either all of them use the backend, or none does.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from ringfence.backend.sealed_group import SealedGroup
from ringfence.backend.sealed_store import SealedStore
from ringfence.errors import AbortedError, ProtocolError
from ringfence.guard import plaintext_allowed
from ringfence.log import LOGGER as _log
from ringfence.runtime.communicator import group_digest
from ringfence.runtime.same_machine import MachineProof, place
from ringfence.session.session import Session

LOOPBACK: Final = "127.0.0.1"
# NCCL reads these when it connects, which is at the first collective: they stay set. "=": this interface and no other that
# begins with its name.
NCCL_SETTINGS: Final = {
    "NCCL_SOCKET_IFNAME": "=lo",
    "NCCL_NET": "Socket",
    "NCCL_NET_PLUGIN": "none",
    "NCCL_IB_DISABLE": "1",
    "NCCL_COLLNET_ENABLE": "0",
    "NCCL_MNNVL_ENABLE": "0",
}
CONNECT_LATER: Final = frozenset({"nccl"})  # need the store after their construction, for their first collective
_INTRODUCTION: Final = -5  # a tag


# The stores of groups inside a machine: torch's C++ code holds no reference that keeps one alive.
_groups: weakref.WeakKeyDictionary[Any, SealedStore] = weakref.WeakKeyDictionary()


def session_of(group: Any) -> Session | None:
    """Return the session of a group inside a machine; None for any other group."""
    found = _groups.get(group)
    return None if found is None else found.session


def is_inside(group: Any) -> bool:
    """Return whether a process group is of another backend, with members that have proved to be on one machine."""
    return group in _groups


def _connect(sealed: SealedGroup, devices: dict[str, str], timeout: timedelta) -> dist.ProcessGroup:
    """Return a process group of torch's own class: a subclass in Python holds the interpreter's lock in every call.

    While Gloo's threads wait for that lock, such a call could wait for them.
    """
    store = SealedStore(sealed, timeout)
    group = dist.ProcessGroup(dist.PrefixStore("group", store), sealed.rank(), sealed.size())
    _groups[group] = store
    group._set_default_backend(_type(devices))
    made: dict[str, Any] = {}
    for device, name in devices.items():
        if name not in made:
            with plaintext_allowed():  # the proof that all members are on one machine allows it
                made[name] = MAKERS[name](dist.PrefixStore(name, store), sealed, timeout)
        group._register_backend(torch.device(device), _type({device: name}), made[name])
    group._set_group_name(sealed.getGroupName())
    group._set_group_desc(sealed.getGroupDesc())
    _gather(sealed, b"\1")  # all members have connected, so none needs the sealed group any more, except:
    if made.keys() & CONNECT_LATER:
        weakref.finalize(group, _end, sealed).atexit = False
    else:
        _end(sealed)
    return group


def _end(sealed: SealedGroup) -> None:
    with contextlib.suppress(ProtocolError):  # this worker has left the run
        sealed.shutdown()


def inside_or_sealed(sealed: SealedGroup, asked: str | None, timeout: timedelta) -> dist.ProcessGroup | SealedGroup:
    """Return the group that a script gets that asks for the backend `asked`: inside one machine, or the sealed group itself.

    All members call it. Raises what ends the session if they cannot agree in time, or if the backend fails to connect.
    """
    permitted = set(sealed._session.terms.inside_machine)
    devices = _devices(asked)
    if not devices or not set(devices.values()) <= permitted or sealed.size() == 1:
        return sealed
    obstacle = _obstacle(sealed, set(devices.values()))
    ranks = ", ".join(map(str, sealed._ranks))
    if obstacle:
        _log.info("the group of ranks %s asks for %s and is sealed: %s", ranks, asked, obstacle)
        return sealed
    try:
        group = _connect(sealed, devices, timeout)
    except BaseException as error:
        text = f"worker {sealed._session.engine.rank}: {asked} inside this machine failed to connect: {error}"
        with contextlib.suppress(ProtocolError):  # the session has ended
            sealed._session.loop.abort(AbortedError(text))  # others wait for it
        raise
    _log.info("the group of ranks %s uses %s inside one machine, without sealing", ranks, asked)
    return group


def _devices(asked: str | None) -> dict[str, str]:
    """Return the backend for each type of device; empty if none is named."""
    if asked is None:
        return {}
    return dict(dist.distributed_c10d.BackendConfig(dist.Backend(asked)).get_device_backend_map())


def _type(devices: dict[str, str]) -> Any:
    """Return torch's type of the backend of the first device."""
    return dist.Backend.backend_type_map[next(iter(devices.values()))]


# -- the decision -----------------------------------------------------------------------------------------------------


def _obstacle(sealed: SealedGroup, names: set[str]) -> str:
    """Return why the group must be sealed, equal on all members; empty if all have proved to be on one machine."""
    engine, ranks = sealed._session.engine, sealed._ranks
    digest = group_digest(sealed._wire_name, ranks)
    proof = MachineProof(engine.keys, engine.rank, ranks, digest)  # listens, before the others are told
    try:
        available = bytes([all(AVAILABLE[name]() for name in names)])
        hints = _gather(sealed, available + engine.keys.machine_hint(digest, place()))
        if not all(hint[0] for hint in hints):
            return _named(ranks, [hint[0] for hint in hints], "torch on {} lacks this backend")
        if len(set(hints)) > 1:
            return "its members are on different machines, or of different users"
        _verify_peers(sealed)
        proved = proof.run()
        answers = _gather(sealed, bytes([proved == set(ranks) - {engine.rank}]))
        if proof.refusals:
            _log.warning("worker %d could not prove one machine: %s", engine.rank, proof.refusals)
        return "" if all(answer[0] for answer in answers) else _named(ranks, [a[0] for a in answers], "{} has no proof")
    finally:
        proof.close()


def _named(ranks: tuple[int, ...], good: list[int], text: str) -> str:
    return text.format("worker " + ", ".join(str(rank) for rank, fine in zip(ranks, good, strict=True) if not fine))


def _gather(sealed: SealedGroup, mine: bytes) -> list[bytes]:
    """Exchange bytes of one length over the sealed group, within its timeout."""
    data = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    out = torch.empty(len(mine) * sealed.size(), dtype=torch.uint8, device="cpu")
    sealed.all_gather_single(out, data).wait()
    received = bytes(out.numpy())
    return [received[start : start + len(mine)] for start in range(0, len(received), len(mine))]


def _verify_peers(sealed: SealedGroup) -> None:
    """Open a link between every two members if workers verify each other on links: the backend links them all."""
    if sealed._session.engine.acceptor.peer_verifier is None:
        return
    limit = sealed._session.engine.clock() + sealed._timeout.total_seconds()
    empty = torch.empty(0, dtype=torch.uint8, device="cpu")
    peers = [peer for peer in range(sealed.size()) if peer != sealed.rank()]
    works = [sealed._plain_receive(empty, peer, _INTRODUCTION, limit) for peer in peers]
    works += [sealed._plain_send(empty, peer, _INTRODUCTION, limit) for peer in peers]
    for work in works:
        work.wait()


# -- backends, bound to the loopback interface ------------------------------------------------------------------------


def _gloo(store: Any, sealed: SealedGroup, timeout: timedelta) -> Any:
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
    return _made(dist.ProcessGroupGloo, options, store, sealed, timeout)


def _nccl(store: Any, sealed: SealedGroup, timeout: timedelta) -> Any:
    os.environ.update(NCCL_SETTINGS)
    return _made(dist.ProcessGroupNCCL, dist.ProcessGroupNCCL.Options(), store, sealed, timeout)


def _made(kind: Any, options: Any, store: Any, sealed: SealedGroup, timeout: timedelta) -> Any:
    """Create a backend with the members and the name of the sealed group."""
    options._timeout = timeout
    options.global_ranks_in_group = list(sealed._ranks)
    options.group_name = sealed.getGroupName()
    backend = kind(store, sealed.rank(), sealed.size(), options)
    backend._set_sequence_number_for_group()
    return backend


MAKERS: Final[dict[str, Callable[[Any, SealedGroup, timedelta], Any]]] = {"gloo": _gloo, "nccl": _nccl}
AVAILABLE: Final[dict[str, Callable[[], bool]]] = {
    "gloo": dist.is_gloo_available,
    "nccl": lambda: dist.is_nccl_available() and torch.cuda.is_available(),
}
