"""An attacker on the pipes of a cluster in memory, and one trial under its attack."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from random import Random

import pytest

from ringfence.collectives import Thresholds
from ringfence.errors import AbortedError, MismatchError, RingfenceError
from ringfence.keys import Secret
from ringfence.link.frames import FORWARD_OVERHEAD
from tests.attack.attacker import Attack, Attacker, AttackPlan, Recording
from tests.attack.trials import KINDS, CheckedRequest, GroupCall, submit
from tests.attack.wire_messages import Wire
from tests.in_memory_network import Pipe
from tests.memory_cluster import World

SEGMENT = 256
PASS = 4 * SEGMENT
TABLES = (  # which schedules a few hundred bytes use
    Thresholds(),  # few messages: doubling, halving, binomial trees
    Thresholds(small=64, chain_slice=32),  # rings and chains
    Thresholds(small=64, ring_group=0, apart_bytes=128, chain_slice=1 << 40),  # halving, parts apart or not, and trees
)
ELEMENTS = (1, 7, 40, 150, 300)  # of one part; 300: several segments in several passes
NO_ATTACK = AttackPlan()
TIME_LIMIT = 25.0  # seconds in which every timer and every deadline has run out


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
    concurrent: bool  # all calls under way at once, or one after the other
    calls: tuple[GroupCall, ...]
    covers: bool = False  # whether the tags of links cover what is forwarded

    @classmethod
    def draw(cls, random: Random) -> Scenario:
        size = random.choice((2, 3, 4))
        count = random.choice((1, 1, 2, 3))
        calls = tuple(
            GroupCall(random.randrange(2), random.choice(KINDS), random.choice(ELEMENTS), random.randrange(size))
            for _ in range(count)
        )
        capacity = random.choice((1 << 22, 1 << 22, 300))
        return cls(size, random.randrange(len(TABLES)), capacity, random.random() < 0.5, calls)

    def world(self, seed: int, session: int = 0) -> World:
        """The same seed gives the same workers' keys; another session gives another session key."""
        world = World(self.size, seed, TABLES[self.table], self.capacity, covers=self.covers)
        if session:
            for engine in world.engines:
                engine.keys.session_key = Secret(Random(session).randbytes(32))
        return world


class MemoryAttacker(Attacker):
    """An attacker on the pipes of a cluster in memory."""

    def __init__(self, world: World, plan: AttackPlan) -> None:
        super().__init__(plan)
        self._world = world
        self._pipes: dict[int, Pipe] = {}
        self._by_pipe: dict[int, Wire] = {}
        self._own: set[int] = set()  # the attacker's own connections
        self._known = 0

    # -- for actions ---------------------------------------------------------------------------------------------------

    def inject(self, wire: Wire, data: bytes) -> None:
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

    # -- forwarding ---------------------------------------------------------------------------------------------------

    def change(self, pipe: Pipe, data: bytes) -> bytes:
        """Return what `Wires.deliver` passes on in place of what a worker wrote."""
        if id(pipe) in self._own:
            return data
        self._find_wires()
        wire = self._by_pipe[id(pipe)]
        if pipe.writer is not None:
            pipe.writer.notify(False, True)  # the splitter takes all there is
        return b"".join([self.forward(wire, message) for message in wire.splitter.feed(data)])

    def _find_wires(self) -> None:
        """Track new connections. Dialler and acceptor are adjacent in the list of streams."""
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

    attacked: bool
    faults: list[str]
    errors: list[RingfenceError]  # of the engines that detected it themselves
    message_count: int = 0
    recording: Recording = field(default_factory=dict)

    @property
    def label(self) -> str:
        return type(self.errors[0]).__name__ if self.errors else "no effect"


def run_trial(scenario: Scenario, seed: int, plan: AttackPlan = NO_ATTACK, session: int = 0) -> Outcome:
    """Run one trial: a fresh cluster, its calls under attack, and the checks."""
    random = Random(seed)
    world = scenario.world(seed, session)
    communicators = [
        list(world.communicators.values()),
        list(world.add_communicator("twin", range(scenario.size)).values()),
    ]
    attacker = MemoryAttacker(world, plan)
    checked: list[CheckedRequest] = []
    for number, call in enumerate(scenario.calls):
        checked += submit(call, communicators[call.communicator], random)
        if not scenario.concurrent or number == len(scenario.calls) - 1:
            world.run([each.request for each in checked], attacker.change)  # type: ignore[misc]
    _advance_time(world, attacker, checked)
    return _check(world, attacker, checked, plan.attack)


def _advance_time(world: World, attacker: MemoryAttacker, checked: list[CheckedRequest]) -> None:
    """Advance second by second, because a timer may start another."""
    requests = [each.request for each in checked]
    while world.now < TIME_LIMIT and not all(request.done for request in requests):
        world.wait(1.0)
        world.run(requests, attacker.change)  # type: ignore[arg-type]
    world.wait(2.0)  # a suspicion may still be waiting
    for engine in world.engines:
        engine.run_ready()


def _check(world: World, attacker: MemoryAttacker, checked: list[CheckedRequest], attack: Attack | None) -> Outcome:
    faults = [fault for each in checked if (fault := each.fault())]
    failures = [engine.failure for engine in world.engines]
    if any(failures) and not all(failures):
        faults.append(f"some workers failed and others did not: {failures}")
    if any(failures) and (attack is None or attack.harmless):
        faults.append(f"a harmless attack failed the session: {failures}")
    named = [error for error in failures if error is not None and not isinstance(error, AbortedError)]
    faults += [
        f"unauthenticated bytes were taken as a worker's: {error!r}"
        for error in named
        if isinstance(error, MismatchError)
    ]
    if attacker.must_be_detected and not named:
        faults.append("no worker detected the attack on a frame")
    return Outcome(attacker.attacked is not None, faults, named, attacker.message_count, attacker.recording())
