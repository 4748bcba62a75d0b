"""The rewriting of what a group forwards (test_forwarded.py), between worker processes behind a hostile relay."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from ringfence.errors import RingfenceError
from ringfence.keys import LINK_VERSIONS, TAG_BYTES
from ringfence.link.frames import Type
from tests.attack.attacker import AttackPlan
from tests.attack.forgery import EVERY_HOP, forged, origin_key
from tests.attack.relay import Relay
from tests.attack.test_shared_memory import shared_files
from tests.attack.wire_messages import Kind, Wire, WireMessage
from tests.limits import FAR, FAR_OUTAGE, HANG
from tests.pool import IN_SHARED_MEMORY, Pool, values

pytestmark = pytest.mark.processes
# test_forwarded.py has the data plane in Python in the gate, in memory
PLANES = pytest.mark.parametrize("plane", ["compiled", pytest.param("python", marks=pytest.mark.nightly)])

WORLD = 4
PATH, HELPER = (0, 1), 3  # worker 0 sends to worker 1, and worker 3 knows the group's keys
HONEST, WANTED = 1.0, 666.0
ONE_CHANNEL, TWO_CHANNELS = 150_000, 600_000  # of float32: over the bounds of the chain, and of a second channel
HOSTS = ("127.0.1.1", "127.0.1.2", "127.0.1.2", "127.0.1.3")  # workers 1 and 2 share memory


class Rewriter(Relay):
    """Rewrites what worker 0 sealed and sends to worker 1, once it has the origin keys."""

    def __init__(self, hosts: tuple[str, ...] = ()) -> None:
        super().__init__(WORLD, AttackPlan(), hosts)
        self.keys: dict[bytes, bytes] = {}  # of worker 0, by group instance
        self.versions: set[int] = set()  # in hellos
        self.forged = 0

    def forward(self, wire: Wire, message: WireMessage) -> bytes:
        out = super().forward(wire, message)
        link = wire.connection
        if message.kind is Kind.HELLO:
            self.versions.add(message.data[4])
        passes = link is not None and (link.sender, link.receiver) == PATH and wire.from_dialler
        if message.kind is not Kind.FRAME or not passes or message.header.type != Type.FORWARD or not self.keys:
            return out
        self.forged += 1
        honest, wanted = (torch.tensor([value]).numpy().tobytes() for value in (HONEST, WANTED))
        return forged(message.data, self.keys[message.header.instance], honest, wanted)


class Received(NamedTuple):
    """What a worker has after a broadcast."""

    error: str
    honest: int  # how many elements are those of worker 0
    changed: int  # or what the attacker wants in their place


def broadcast(count: int) -> Received:
    tensor = torch.full((count,), HONEST if dist.get_rank() == 0 else 0.0)
    error = ""
    try:
        dist.broadcast(tensor, 0)
    except RingfenceError as failure:
        error = f"{type(failure).__name__}: {failure}"
    return Received(error, int((tensor == HONEST).sum()), int((tensor == WANTED).sum()))


def origin_keys() -> dict[bytes, bytes]:
    """What this member knows: the origin keys of worker 0 on each channel."""
    (communicator,) = dist.group.WORLD._session.engine.communicators.active.values()
    every = (communicator, *communicator.channels)
    return {each.instance: origin_key(each.origin._instance, 0) for each in every}


def attacked(pool: Pool, relay: Rewriter, backend: str, count: int, extra: dict[str, str]) -> list[Received]:
    """Broadcast twice behind the relay, which rewrites the second time with what worker 3 knows."""
    with relay:
        environments = [{**each, **FAR_OUTAGE, **extra} for each in relay.environments()]
        values(pool.join(backend, WORLD, seconds=FAR, env=environments, renew=True))
        first = values(pool.start(broadcast, WORLD, (count,)).wait(HANG))
        assert first == [Received("", count, 0)] * WORLD
        relay.keys = values(pool.start(origin_keys, WORLD).wait(HANG))[HELPER]
        assert len(relay.keys) == int(extra.get("RINGFENCE_CHANNELS", "1"))
        mapped = values(pool.start(shared_files, WORLD).wait(HANG))
        assert bool(mapped[1] & mapped[2]) == (backend == IN_SHARED_MEMORY)
        return values(pool.start(broadcast, WORLD, (count,)).wait(HANG))


CASES = {
    "a chain": ("ringfence", ONE_CHANNEL, {}, ()),
    "channels": ("ringfence", TWO_CHANNELS, {"RINGFENCE_CHANNELS": "2"}, ()),
    "shared memory": (IN_SHARED_MEMORY, ONE_CHANNEL, {}, HOSTS),
}


@pytest.mark.promise("A member can alter what others of its group forward, if it can also change bytes on the wire.")
@PLANES
@pytest.mark.parametrize("case", ["a chain", "shared memory"])
def test_a_member_off_the_path_rewrites_a_broadcast(pool: Pool, plane: str, case: str) -> None:
    """A limitation of the default, not a promise."""
    backend, count, extra, hosts = CASES[case]
    relay = Rewriter(hosts)
    with pool.fresh([["env", f"RINGFENCE_DATAPLANE={plane}"]] * WORLD) as workers:
        found = attacked(workers, relay, backend, count, extra)
    assert relay.forged and relay.versions == {LINK_VERSIONS[False]}
    for received in found[1:]:
        assert received.error == "" and received.changed >= count - relay.forged * TAG_BYTES // 4


@pytest.mark.promise('With `forwarded = "every_hop"`, only workers on its path can alter what is forwarded.')
@PLANES
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.nightly) if case == "channels" else case for case in CASES]
)
def test_a_broadcast_is_not_rewritten_if_every_hop_authenticates(
    pool: Pool, tmp_path: Path, plane: str, case: str
) -> None:
    backend, count, extra, hosts = CASES[case]
    (tmp_path / "policy.toml").write_text(EVERY_HOP)
    relay = Rewriter(hosts)
    with pool.fresh([["env", f"RINGFENCE_DATAPLANE={plane}"]] * WORLD) as workers:
        found = attacked(workers, relay, backend, count, extra | {"RINGFENCE_POLICY": str(tmp_path / "policy.toml")})
    assert relay.forged and relay.versions == {LINK_VERSIONS[True]}
    assert all(received.error and not received.changed for received in found[1:])
    assert found[1].error.startswith("AuthenticationError: ") and f"(from worker {PATH[0]})" in found[1].error
