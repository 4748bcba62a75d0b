"""Where an attacker sits: sees every message of every link, deals one blow, and passes on the rest.

Two seats exist, at the wires of a world in memory and in a TCP relay between processes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from tests.attack.wire_messages import Kind, Place, Unit, Wire

Recording = dict[tuple[Place, bool], list[Unit]]  # of another run: what each direction of each connection carried
Blow = Callable[["Seat", Wire, Unit], bytes | None]


@dataclass(frozen=True)
class Attack:
    """A blow, whether the run must survive it, and whether it changes nothing and only adds bytes."""

    blow: Blow
    harmless: bool = False
    adding: bool = False

    @property
    def name(self) -> str:
        return self.blow.__name__.replace("_", " ")


@dataclass(frozen=True)
class Strike:
    """One attack, from which unit on it is tried, and what its attacker has recorded before."""

    attack: Attack | None = None  # None: nobody does anything
    at: int = 0
    draw: Random = field(default_factory=Random)
    other_run: Recording = field(default_factory=dict)  #        other workers, other keys
    other_generation: Recording = field(default_factory=dict)  # the same run, another session


class Seat:
    """One attacker before one group of workers."""

    def __init__(self, strike: Strike) -> None:
        self.strike = strike
        self.draw = strike.draw
        self.wires: list[Wire] = []
        self.units = 0
        self.hit: tuple[Attack, Unit] | None = None  # which blow was dealt, and to what

    @property
    def struck(self) -> bool:
        return self.hit is not None

    @property
    def must_be_noticed(self) -> bool:
        """Whether the blow must fail the session. Three may stay without effect, and no other.

        The run must survive some attacks. A connection that fails before both ends have confirmed it is dialled again.
        Bytes that are added to a wire are not noticed if nobody reads there again: behind the last frame that a worker
        waits for, or towards a worker that only sends on this connection.
        """
        if self.hit is None:
            return False
        attack, unit = self.hit
        return not attack.harmless and not attack.adding and unit.kind is Kind.FRAME

    def put(self, wire: Wire, data: bytes) -> None:
        """Add bytes to a wire, now."""
        raise NotImplementedError

    def cut(self, wire: Wire) -> None:
        """End a wire after what has been put on it."""
        raise NotImplementedError

    def dial(self, receiver: int, data: bytes) -> None:
        """Connect to a worker as an unauthenticated peer, send it something, and stay."""
        raise NotImplementedError

    def recording(self) -> Recording:
        """What has passed, by connection and direction."""
        return {(wire.place, wire.from_dialler): list(wire.passed) for wire in self.wires if wire.place is not None}

    def pass_on(self, wire: Wire, unit: Unit) -> bytes:
        """What travels on in place of a unit."""
        if unit.kind is Kind.HELLO:
            for half in self.wires:
                if half.number == wire.number:
                    half.place = Place.of(unit.data)
        self.units += 1
        out = self._deal(wire, unit)
        wire.passed.append(unit)
        return out

    def _deal(self, wire: Wire, unit: Unit) -> bytes:
        if wire.script is not None:
            return wire.script.pop(0) if wire.script else b""
        held, wire.held = wire.held, b""
        attack = self.strike.attack
        if attack is not None and not self.struck and self.units > self.strike.at:
            dealt = attack.blow(self, wire, unit)
            if dealt is not None:
                self.hit = attack, unit
                return dealt + held
        return unit.data + held
