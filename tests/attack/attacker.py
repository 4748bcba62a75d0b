"""An attacker on the wire: sees every message of every link, attacks one of them, and forwards the rest.

It exists in two forms: on the pipes of a cluster in memory, and in a TCP relay between processes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from tests.attack.wire_messages import ConnectionId, Kind, Wire, WireMessage

Recording = dict[tuple[ConnectionId, bool], list[WireMessage]]  # what each direction of each connection carried
Action = Callable[["Attacker", Wire, WireMessage], bytes | None]


@dataclass(frozen=True)
class Attack:
    """What is done to a message, whether the run must survive it, and whether it only adds bytes."""

    action: Action
    harmless: bool = False
    adds_bytes: bool = False

    @property
    def name(self) -> str:
        return self.action.__name__.replace("_", " ")


@dataclass(frozen=True)
class AttackPlan:
    """One attack, the first message that it is tried on, and what the attacker has recorded before."""

    attack: Attack | None = None  # None: the attacker only forwards
    first_message: int = 0
    random: Random = field(default_factory=Random)
    other_run: Recording = field(default_factory=dict)  #        other workers, other keys
    other_generation: Recording = field(default_factory=dict)  # the same run, another session


class Attacker:
    """One attacker on all links of one group of workers."""

    def __init__(self, plan: AttackPlan) -> None:
        self.plan = plan
        self.random = plan.random
        self.wires: list[Wire] = []
        self.message_count = 0
        self.attacked: tuple[Attack, WireMessage] | None = None  # which attack was carried out, and on what

    @property
    def must_be_detected(self) -> bool:
        """Whether the attack must fail the session. Three kinds may remain without effect, and no other.

        The run must survive some attacks. A connection that fails before both ends have confirmed it is dialled again.
        Bytes that are added to a wire are not detected if no worker reads there again: behind the last frame that a
        worker waits for, or towards a worker that only sends on this connection.
        """
        if self.attacked is None:
            return False
        attack, message = self.attacked
        return not attack.harmless and not attack.adds_bytes and message.kind is Kind.FRAME

    def inject(self, wire: Wire, data: bytes) -> None:
        """Add bytes to a wire, now."""
        raise NotImplementedError

    def cut(self, wire: Wire) -> None:
        """End a wire after what has been written to it."""
        raise NotImplementedError

    def dial(self, receiver: int, data: bytes) -> None:
        """Connect to a worker as an unauthenticated peer, send data, and keep the connection open."""
        raise NotImplementedError

    def recording(self) -> Recording:
        """Return the messages so far, by connection and direction."""
        return {
            (wire.connection, wire.from_dialler): list(wire.passed)
            for wire in self.wires
            if wire.connection is not None
        }

    def forward(self, wire: Wire, message: WireMessage) -> bytes:
        """Return the bytes that travel on in place of a message."""
        if message.kind is Kind.HELLO:
            for direction in self.wires:
                if direction.number == wire.number:
                    direction.connection = ConnectionId.of(message.data)
        self.message_count += 1
        out = self._attack(wire, message)
        wire.passed.append(message)
        return out

    def _attack(self, wire: Wire, message: WireMessage) -> bytes:
        if wire.replacement is not None:
            return wire.replacement.pop(0) if wire.replacement else b""
        delayed, wire.delayed = wire.delayed, b""
        attack = self.plan.attack
        if attack is not None and self.attacked is None and self.message_count > self.plan.first_message:
            changed = attack.action(self, wire, message)
            if changed is not None:
                self.attacked = attack, message
                return changed + delayed
        return message.data + delayed
