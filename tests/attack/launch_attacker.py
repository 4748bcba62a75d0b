"""The attacking process of `launch_attacks`: reads where the host of the store listens, sends messages, reports as JSON.

Unauthenticated peers send noise, halves of handshakes, wrong proofs, no proofs and recordings. Admitted agents send malformed
and impossible calls. No torch is imported here.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from ringfence import keys
from ringfence.admission import encoding
from ringfence.admission.binding import Role, TlsValues
from ringfence.admission.handshake import Handshake, State
from ringfence.admission.messages import HANDSHAKE, Admit, Hello, Message, MessageSplitter, Proof, Refuse, encode
from ringfence.config.settings import Settings
from ringfence.errors import ProtocolError
from ringfence.launch.agent_admission import AgentAdmission
from ringfence.launch.messages import FROM_HOST, AgentCall, Answer, CallResult, Operation
from ringfence.transport.tls import Tls

THREADS = 8  # concurrent peers, each with an address of its own
SECONDS = 30.0  # for the host to answer
RUN_ID = "hostile"


@dataclass(frozen=True)
class Task:
    """What the attacker is told. It has the run's secret: some of its peers are admitted before they attack."""

    port: int
    secret: str  # in hexadecimal
    generation: str
    messages: int
    seed: int

    def admission(self, secret: bytes | None = None) -> AgentAdmission:
        settings = Settings(secret=keys.Secret(secret or bytes.fromhex(self.secret)), run_id=RUN_ID)
        return AgentAdmission.of(settings, rank=1, nodes=2, endpoint=("127.0.0.1", self.port), seconds=60)


class Connection:
    """One connection to the host, from an address of its own, which records what it sends."""

    def __init__(self, port: int, number: int) -> None:
        source = (f"127.0.0.{2 + number % THREADS}", 0)
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=SECONDS, source_address=source)
        self.sent = b""

    def send(self, data: bytes) -> None:
        self.sent += data
        with contextlib.suppress(ConnectionError):
            self.socket.sendall(data)

    def answer(self) -> bytes:
        """Send no more, and return what the host sends until it closes the connection."""
        received = b""
        with contextlib.suppress(ConnectionError), self.socket:
            self.socket.shutdown(socket.SHUT_WR)
            while piece := self.socket.recv(1 << 16):
                received += piece
        return received


class Agent:
    """A peer that speaks TLS and the messages of an admission."""

    def __init__(self, connection: Connection, admission: AgentAdmission) -> None:
        self.connection = connection
        self.admission = admission
        self.frames = MessageSplitter(HANDSHAKE, keys.ADMISSION_BYTES)
        self.tls = Tls(admission.credentials, server=False)
        self.handshake = Handshake(Role.CHILD, admission.hello, frozenset({0}), admission.policy, admission.prover)
        while not self.tls.established:
            assert self._exchange(), "the host closed the connection during the TLS handshake"

    def channel(self) -> TlsValues:
        return TlsValues(self.tls.own_key_digest, self.tls.peer_key_digest, self.tls.exporter())

    def send(self, data: bytes) -> None:
        self.tls.send(data)
        self.connection.send(self.tls.outgoing())

    def receive(self) -> Message | None:
        """Return the next message, or None if the host has closed the connection."""
        while (message := self.frames.next()) is None:
            if not self._exchange():
                return None
        return message

    def prove(self) -> bool:
        """Go through the admission; return whether both sides have admitted each other."""
        self.send(b"".join(map(encode, self.handshake.begin(self.channel()))))
        while self.handshake.state is not State.DONE:
            message = self.receive()
            if message is None or isinstance(message, Refuse):
                return False
            self.send(b"".join(map(encode, self.handshake.receive(message))))
        self.frames.allow(FROM_HOST, keys.CALL_BYTES)
        return True

    def close(self) -> None:
        self.connection.socket.close()

    def _exchange(self) -> bool:
        self.connection.send(self.tls.outgoing())
        try:
            data = self.connection.socket.recv(1 << 16)
            self.frames.feed(self.tls.receive(data))
        except (ConnectionError, ProtocolError):
            return False
        return bool(data)


class Attacker:
    """Sends messages of all kinds in turn. An unexpected answer raises AssertionError."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._valid = task.admission()
        self._forged = task.admission(b"another secret of 32 bytes......")
        agent = Agent(Connection(task.port, 0), self._valid)
        assert agent.prove(), "the secret is right"
        self._recording = agent.connection.sent
        agent.close()
        self.admitted = 1
        self.sent: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._left = task.messages

    def run(self, number: int) -> None:
        kinds: list[Callable[[random.Random, int], int]]
        kinds = [self._noise, self._truncated, self._wrong_secret, self._no_proof, self._replayed, self._admitted]
        chance = random.Random(f"{self._task.seed} {number}")
        for kind in itertools.cycle(kinds):
            with self._lock:
                if self._left <= 0:
                    return
            count = kind(chance, number)
            with self._lock:
                self._left -= count
                self.sent[kind.__name__.strip("_")] += count

    # -- unauthenticated peers --------------------------------------------------------------------------------------

    def _noise(self, chance: random.Random, number: int) -> int:
        connection = Connection(self._task.port, number)
        connection.send(chance.choice([b"", b"\x16\x03\x01"]) + chance.randbytes(chance.randrange(1, 4096)))
        answer = connection.answer()
        assert not answer or answer[0] == 21, "the host answered noise with other than an alert"
        return 1

    def _truncated(self, chance: random.Random, number: int) -> int:
        """The beginning of a handshake, cut or with a changed byte."""
        hello = bytearray(Tls(self._valid.credentials, server=False).outgoing())
        if chance.random() < 0.5:
            hello[chance.randrange(len(hello))] ^= 1 << chance.randrange(8)
        connection = Connection(self._task.port, number)
        connection.send(bytes(hello[: chance.randrange(1, len(hello) + 1)]))
        connection.answer()
        return 1

    def _wrong_secret(self, chance: random.Random, number: int) -> int:
        agent = Agent(Connection(self._task.port, number), self._forged)
        assert not agent.prove(), "a peer with another secret was admitted"
        agent.close()
        return 1

    def _no_proof(self, chance: random.Random, number: int) -> int:
        """A valid hello, then a call, an admission by the peer itself, a forged proof or noise, but no valid proof."""
        agent = Agent(Connection(self._task.port, number), self._valid)
        agent.send(encode(self._hello(chance)))
        forged = Proof(self._valid.prover.kind, chance.randbytes(32))
        call = AgentCall(1, Operation.COUNT, self._task.generation)
        agent.send(chance.choice([encode(call), encode(Admit()), encode(forged), chance.randbytes(64)]))
        while (message := agent.receive()) is not None:
            assert isinstance(message, Hello | Refuse), f"the host sent {type(message).__name__} without a proof"
        agent.close()
        return 1

    def _hello(self, chance: random.Random) -> Hello:
        hello = self._valid.hello
        if chance.random() < 0.5:
            return hello
        changed: dict[str, object] = chance.choice([{"rank": 0}, {"world_size": 3}, {"run_id": "other"}, {"port": 1}])
        return replace(hello, entry=replace(hello.entry, **changed))  # type: ignore[arg-type]

    def _replayed(self, chance: random.Random, number: int) -> int:
        connection = Connection(self._task.port, number)
        connection.send(self._recording)
        connection.answer()
        return 1

    # -- admitted agents --------------------------------------------------------------------------------------------

    def _admitted(self, chance: random.Random, number: int) -> int:
        agent = Agent(Connection(self._task.port, number), self._valid)
        assert agent.prove(), "the secret is right"
        with self._lock:
            self.admitted += 1
        calls = chance.sample(impossible_calls(self._task.generation), 3)
        for call in calls:
            agent.send(encode(call))
            answer = agent.receive()
            assert isinstance(answer, Answer) and answer.number == call.number, call
            assert answer.result in (CallResult.ENDED, CallResult.REFUSED), (call, answer)
        agent.send(chance.choice(malformed_frames(self._task.generation)))
        assert agent.receive() is None, "the host answered a malformed message"
        agent.close()
        return len(calls) + 1


def impossible_calls(generation: str) -> list[AgentCall]:
    """Calls that are well formed and get an answer, but change nothing."""
    parts = (b"worker", b"forged")
    large = b"9" * 30
    return [
        AgentCall(1, Operation.SET, "another.1", parts=parts),
        AgentCall(2, Operation.GET, "", 1000, (b"worker",)),
        AgentCall(3, Operation.APPEND, generation + "1", parts=parts),
        AgentCall(4, Operation.SET, generation, parts=(b"odd", b"1", b"worker")),
        AgentCall(5, Operation.ADD, generation, parts=(b"hostile", large)),
        AgentCall(6, Operation.ADD, generation, parts=(b"hostile", b"not a number")),
        AgentCall(7, Operation.GET, generation, 1000, (b"\xff\xfe",)),
        AgentCall(8, Operation.COMPARE_SET, generation, parts=(b"worker",)),
        AgentCall(9, Operation.JOIN, milliseconds=1000),  # without having attached
    ]


def malformed_frames(generation: str) -> list[bytes]:
    """Frames that end the connection of the agent that sends them."""
    good = AgentCall(10, Operation.SET, generation, parts=(b"worker", b"forged")).body()

    def frame(body: bytes, kind: int = AgentCall.TYPE, length: int | None = None) -> bytes:
        return encoding.number(kind, 1) + encoding.number(len(body) if length is None else length, 4) + body

    def attach(data: bytes) -> bytes:
        return encode(AgentCall(10, Operation.ATTACH, parts=(data,)))

    return [
        frame(good[:4] + b"\x63" + good[5:]),  # an unknown operation
        frame(good, length=0xFFFF_FFFF),
        frame(good, length=keys.CALL_BYTES + 1),
        frame(good, kind=200),
        frame(good, kind=Answer.TYPE),
        frame(good + b"trailing"),
        frame(good[:-3]),
        encode(AgentCall(10, Operation.JOIN, milliseconds=keys.CALL_LIMIT_MILLISECONDS + 1)),
        frame(AgentCall(10, Operation.SET, generation).body()[:-4] + encoding.number(keys.CALL_PARTS + 1, 4)),
        encode(AgentCall(10, Operation.STATUS)),
        encode(AgentCall(10, Operation.ATTACH)),
        attach(b"not JSON"),
        attach(b"[" * 100_000),
        attach(b'{"agent": 5, "rank": 1}'),
        attach(b'{"agent": "a", "rank": -1}'),
        attach(b'{"agent": "a", "rank": 1e99}'),
        attach(b'{"agent": "\\ud800", "rank": 1}'),
    ]


def main() -> int:
    os.nice(19)  # as if it were another machine
    task = Task(**json.loads(sys.stdin.readline()))
    attacker = Attacker(task)
    problems: list[str] = []

    def attack(number: int) -> None:
        try:
            attacker.run(number)
        except Exception as error:
            problems.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=attack, args=(number,)) for number in range(THREADS)]
    first = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    last = time.monotonic()
    report = {"sent": attacker.sent, "admitted": attacker.admitted, "problems": problems, "first": first, "last": last}
    json.dump(report, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
