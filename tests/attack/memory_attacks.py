"""The attacker's seat at the wires of a world in memory, and a trial played before it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from random import Random

import pytest

from ringfence.collectives import Table
from ringfence.errors import AbortedError, MismatchError, RingfenceError
from ringfence.keys import Secret
from ringfence.link.frames import FORWARD_OVERHEAD
from ringfence.transport.in_memory import Pipe
from tests.attack.attacker import Attack, Recording, Seat, Strike
from tests.attack.trials import KINDS, Round, Watched, submit
from tests.attack.wire_messages import Wire
from tests.memory_cluster import World

SEGMENT = 256
PASS = 4 * SEGMENT
TABLES = (  # what a few hundred bytes are run as
    Table(),  # few messages: doubling, binomial trees, Bruck
    Table(small=64, ring_slice=32, chain_slice=32),  # rings and chains
    Table(small=64, ring_slice=1 << 40, chain_slice=1 << 40),  # trees
)
ELEMENTS = (1, 7, 40, 150, 300)  # of one part; 300: several segments in several passes
NOBODY = Strike()
AFTERWARDS = 25.0  # seconds in which every timer and every deadline has run out


def small_segments(patch: pytest.MonkeyPatch) -> None:
    """Cut segments and passes small, so that a short tensor has several of both."""
    sizes = {"SEGMENT_BYTES": SEGMENT, "PASS_BYTES": PASS, "FRAME_BYTES": SEGMENT + FORWARD_OVERHEAD}
    for name, module in list(sys.modules.items()):
        if name.startswith("ringfence."):
            for constant, value in sizes.items():
                if hasattr(module, constant):
                    patch.setattr(module, constant, value)


@dataclass(frozen=True)
class Scenario:
    """What the workers do in a trial."""

    size: int
    table: int
    capacity: int  # of a pipe
    together: bool  # all rounds under way at once, or one after the other
    rounds: tuple[Round, ...]

    @classmethod
    def drawn(cls, draw: Random) -> Scenario:
        size = draw.choice((2, 3, 4))
        count = draw.choice((1, 1, 2, 3))
        rounds = tuple(
            Round(draw.randrange(2), draw.choice(KINDS), draw.choice(ELEMENTS), draw.randrange(size))
            for _ in range(count)
        )
        capacity = draw.choice((1 << 22, 1 << 22, 300))
        return cls(size, draw.randrange(len(TABLES)), capacity, draw.random() < 0.5, rounds)

    def world(self, seed: int, session: int = 0) -> World:
        """The same seed gives the same workers' keys; another session gives another session key."""
        world = World(self.size, seed, TABLES[self.table], self.capacity)
        if session:
            for engine in world.engines:
                engine.keys.session_key = Secret(Random(session).randbytes(32))
        return world


class MemorySeat(Seat):
    """At the wires of a world in memory."""

    def __init__(self, world: World, strike: Strike) -> None:
        super().__init__(strike)
        self._world = world
        self._pipes: dict[int, Pipe] = {}
        self._by_pipe: dict[int, Wire] = {}
        self._own: set[int] = set()  # the attacker's own connections
        self._known = 0

    # -- what a blow may use -----------------------------------------------------------------------------------------

    def put(self, wire: Wire, data: bytes) -> None:
        pipe = self._pipes[id(wire)]
        pipe.delivered += data
        if pipe.reader is not None:
            pipe.reader.notify(True, False)

    def cut(self, wire: Wire) -> None:
        self._pipes[id(wire)].ended = True

    def dial(self, receiver: int, data: bytes) -> None:
        self._find_wires()
        stream = self._world.wires.connect(receiver, receiver)
        self._own.update(id(end.outgoing) for end in self._world.wires.streams[-2:])
        self._known = len(self._world.wires.streams)
        stream.outgoing.written += data

    # -- watching ----------------------------------------------------------------------------------------------------

    def change(self, pipe: Pipe, data: bytes) -> bytes:
        """What `Wires.deliver` passes on in place of what a worker wrote."""
        if id(pipe) in self._own:
            return data
        self._find_wires()
        wire = self._by_pipe[id(pipe)]
        if pipe.writer is not None:
            pipe.writer.notify(False, True)  # the tape takes all there is
        return b"".join([self.pass_on(wire, unit) for unit in wire.tape.feed(data)])

    def _find_wires(self) -> None:
        """Dialler and acceptor of a connection stand next to each other in the list of streams."""
        streams = self._world.wires.streams
        for index in range(self._known, len(streams)):
            pipe = streams[index].outgoing
            wire = Wire(index // 2, from_dialler=index % 2 == 0)
            self._by_pipe[id(pipe)] = wire
            self._pipes[id(wire)] = pipe
            self.wires.append(wire)
        self._known = len(streams)


@dataclass
class Outcome:
    """How a trial ended."""

    struck: bool
    faults: list[str]
    errors: list[RingfenceError]  # of the engines that found out for themselves
    units: int = 0
    recording: Recording = field(default_factory=dict)

    @property
    def word(self) -> str:
        return type(self.errors[0]).__name__ if self.errors else "no effect"


def play(scenario: Scenario, seed: int, strike: Strike = NOBODY, session: int = 0) -> Outcome:
    """One trial: a fresh world, its rounds under attack, and the verification."""
    draw = Random(seed)
    world = scenario.world(seed, session)
    communicators = [
        list(world.communicators.values()),
        list(world.add_communicator("twin", range(scenario.size)).values()),
    ]
    seat = MemorySeat(world, strike)
    watched: list[Watched] = []
    for number, one in enumerate(scenario.rounds):
        watched += submit(one, communicators[one.communicator], draw)
        if not scenario.together or number == len(scenario.rounds) - 1:
            world.run([each.request for each in watched], seat.change)
    _let_time_pass(world, seat, watched)
    return _verify(world, seat, watched, strike.attack)


def _let_time_pass(world: World, seat: MemorySeat, watched: list[Watched]) -> None:
    """Second by second, as timers and what they lead to come one after the other."""
    requests = [each.request for each in watched]
    while world.now < AFTERWARDS and not all(request.done for request in requests):
        world.wait(1.0)
        world.run(requests, seat.change)
    world.wait(2.0)  # a suspicion may still be waiting
    for engine in world.engines:
        engine.run_ready()


def _verify(world: World, seat: MemorySeat, watched: list[Watched], attack: Attack | None) -> Outcome:
    faults = [fault for each in watched if (fault := each.fault())]
    failures = [engine.failure for engine in world.engines]
    if any(failures) and not all(failures):
        faults.append(f"some workers failed and others did not: {failures}")
    if any(failures) and (attack is None or attack.harmless):
        faults.append(f"what must not disturb anybody did: {failures}")
    named = [error for error in failures if error is not None and not isinstance(error, AbortedError)]
    faults += [
        f"bytes of an unauthenticated peer were believed: {error!r}"
        for error in named
        if isinstance(error, MismatchError)
    ]
    if seat.must_be_noticed and not named:
        faults.append("nobody noticed that a frame was attacked")
    return Outcome(seat.struck, faults, named, seat.units, seat.recording())
