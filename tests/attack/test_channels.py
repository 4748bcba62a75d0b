"""Attacks on links with several channels: a relay between worker processes moves frames from one channel to another."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from ringfence.errors import RingfenceError
from tests.attack.attacker import AttackPlan
from tests.attack.relay import Relay
from tests.attack.wire_messages import ConnectionId, Kind, Wire, WireMessage
from tests.limits import FAR, FAR_OUTAGE, HANG
from tests.pool import Pool, values

pytestmark = pytest.mark.processes

COUNT = 2_000_000  # of float32, so that both channels are used
SECONDS = 5.0  # timeout of a call on a link that the attacker does not let open


class Splicer(Relay):
    """Exchanges what two channels carry between the same two workers, once both have been authenticated.

    Each gets a frame of the other at once. One that gets nothing would only be slow: its worker would wait for the timeout.
    """

    def __init__(self, world: int, first_frame: int, replay: bool = False) -> None:
        super().__init__(world, AttackPlan())
        self.first_frame = first_frame
        self.replay = replay  # send a frame on both channels, instead of exchanging
        self.spliced = 0

    def forward(self, wire: Wire, message: WireMessage) -> bytes:
        out = super().forward(wire, message)
        frames = sum(each.kind is Kind.FRAME for each in wire.passed)
        other = self._other_channel(wire)
        if message.kind is not Kind.FRAME or frames <= self.first_frame or other is None:
            return out
        self.spliced += 1
        self.inject(other, message.data)
        return out if self.replay else next(each.data for each in reversed(other.passed) if each.kind is Kind.FRAME)

    def _other_channel(self, wire: Wire) -> Wire | None:
        """The same direction of the same link on the other channel, if its handshake is complete."""
        for other in self.wires:
            if other is not wire and other.from_dialler == wire.from_dialler and _is_twin(wire, other):
                done = {each.kind for each in other.passed}
                return other if Kind.FRAME in done else None
        return None


def _is_twin(wire: Wire, other: Wire) -> bool:
    mine, its = wire.connection, other.connection
    if mine is None or its is None or mine.lane:
        return False
    return its == ConnectionId(mine.sender, mine.receiver, mine.lane, 1 - mine.channel, mine.group)


class Renumberer(Relay):
    """Changes the number of the channel in the hellos of one channel."""

    def __init__(self, world: int, channel: int, to: int) -> None:
        super().__init__(world, AttackPlan())
        self.channel, self.to, self.changed = channel, to, 0

    def forward(self, wire: Wire, message: WireMessage) -> bytes:
        out = super().forward(wire, message)
        if message.kind is Kind.HELLO and message.data[6] == 0 and message.data[7] == self.channel:
            self.changed += 1
            return out[:7] + bytes([self.to]) + out[8:]
        return out


def reduce_all(seconds: float) -> tuple[str, bool]:
    """Run all-reduces until one fails; return the error, and whether all results were right."""
    dist.group.WORLD.set_timeout(timedelta(seconds=seconds))
    right = True
    for number in range(20):
        tensor = torch.full((COUNT,), float(number))
        try:
            dist.all_reduce(tensor)
        except RingfenceError as error:
            return f"{type(error).__name__}: {error}", right
        right &= bool((tensor == number * dist.get_world_size()).all())
    return "", right


def attacked(pool: Pool, relay: Relay, world: int, seconds: float = FAR) -> list[tuple[str, bool]]:
    """Return what `reduce_all` found on each worker, behind a relay; `seconds` is the timeout of a call."""
    with relay:
        environments = [{**each, **FAR_OUTAGE, "RINGFENCE_CHANNELS": "2"} for each in relay.environments()]
        values(pool.join("ringfence", world, seconds=FAR, env=environments, renew=True))
        return values(pool.start(reduce_all, world, (seconds,)).wait(HANG))


def test_without_an_attack_all_results_are_right(pool: Pool) -> None:
    relay = Splicer(2, first_frame=1 << 30)
    assert attacked(pool, relay, 2) == [("", True)] * 2
    seen = {wire.connection.channel for wire in relay.wires if wire.connection is not None}
    assert seen == {0, 1} and not relay.spliced


@pytest.mark.promise("Frames of one channel do not open on another channel of the same two workers.")
@pytest.mark.parametrize("replay", [False, True], ids=["exchanged", "copied"])
@pytest.mark.parametrize(("world", "first_frame"), [(2, 1), (2, 30), (3, 10)])
def test_two_channels_cannot_be_exchanged(pool: Pool, world: int, first_frame: int, replay: bool) -> None:
    """All workers fail, none with a wrong number, and those that open the frames say why."""
    relay = Splicer(world, first_frame, replay)
    found = attacked(pool, relay, world)
    assert relay.spliced
    for text, right in found:
        assert text and right and "CollectiveTimeoutError" not in text
    assert any("does not authenticate" in text for text, _ in found)


@pytest.mark.promise("A hello for a channel that the run does not have is refused before anything is computed for it.")
@pytest.mark.parametrize(("channel", "to"), [(1, 0), (0, 1), (1, 2), (1, 255)])
def test_a_channel_cannot_be_renumbered_on_the_wire(pool: Pool, channel: int, to: int) -> None:
    relay = Renumberer(2, channel, to)
    found = attacked(pool, relay, 2, SECONDS)
    assert relay.changed
    for text, right in found:
        assert text and right
