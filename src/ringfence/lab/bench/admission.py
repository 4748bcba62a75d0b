"""What admission costs as a run grows: whole worlds of workers in one process, with real TLS, real proofs, no sockets.

Every worker draws its own keys, shakes hands with its parent and its children, verifies them, checks and passes on entries,
gets the whole roster and finds itself and its neighbours in it. Its CPU time is clocked stage by stage, its bytes are counted
with TLS. What is left out is the network, and what is shared is the interpreter: the time that passes here says nothing,
the time a worker works does.

That everybody parses and verifies everybody's entry is n² work for one interpreter (16.8 million entries of 4,096 workers). A
number of verifiers, drawn at random, do it as a worker does and are clocked; the others compare the roster, byte by byte,
with one that a verifier has passed, and are left out of the means of these stages. `verifiers=None` has everybody do it.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from ringfence import keys
from ringfence.admission.binding import Channel, Role
from ringfence.admission.entry import Entry
from ringfence.admission.handshake import Handshake, State
from ringfence.admission.messages import (
    HANDSHAKE,
    TREE,
    Entries,
    Frames,
    Hello,
    Message,
    Welcome,
    encode,
    tree_frame_limit,
)
from ringfence.admission.roster import Roster
from ringfence.admission.tree import Outgoing, Phase, Terms, Tree, children_of, parent_of
from ringfence.errors import RingfenceError
from ringfence.lab.bench.admission_proofs import PROOFS, Admission
from ringfence.transport.tls import Credentials, Tls

STAGES: Final = ("keys", "handshakes", "entries", "roster", "check", "go")
_RUN: Final = "bench-admission"
_SUITES: Final = (keys.SUITE_AES_256_GCM,)
_STAGE_OF: Final[dict[type, str]] = {Entries: "entries", Welcome: "roster"}  # else "go"


@dataclass(frozen=True)
class Cost:
    """What one world cost its workers."""

    workers: int
    depth: int  #                        edges from rank 0 to the furthest worker
    handshakes_mean: float  #            TLS handshakes that a worker takes part in
    handshakes_max: int
    bytes_mean: float  #                 that a worker sends, TLS included
    bytes_max: int
    cpu_mean: dict[str, float]  #        seconds by stage; of "roster" and "check" that of the verifiers
    verifiers: int  #                       workers that checked the whole roster by themselves
    cpu_root: dict[str, float]  #        of rank 0, which takes everybody's entry

    @property
    def cpu(self) -> float:
        return sum(self.cpu_mean.values())

    @property
    def way(self) -> float:
        """CPU seconds that follow on each other from the first handshake to the last worker's go, the network left out.

        Handshakes are made side by side, five at most by one worker; rank 0 takes all entries; the roster is read and passed
        on level by level, and then checked by all at the same time.
        """
        mean = self.cpu_mean
        handshakes = mean["handshakes"] / self.handshakes_mean * self.handshakes_max
        return mean["keys"] + handshakes + self.cpu_root["entries"] + (self.depth + 1) * mean["roster"] + mean["check"]

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "cpu_seconds": self.cpu, "way_seconds": self.way}


def admit(
    size: int,
    verifiers: int | None = None,
    proof: str = "secret",
    seed: int = 0,
    say: Callable[[str], None] = lambda what: None,
) -> Cost:
    """Admit a world of `size` workers by one kind of proof, and see that everyone came into one session."""
    say(f"{size} workers: keys")
    draw = random.Random(seed)  # noqa: S311 (the order in which workers happen to come)
    chosen = range(size) if verifiers is None or verifiers >= size else draw.sample(range(size), verifiers)
    world = _World(size, frozenset(chosen), PROOFS[proof](_RUN))
    order = list(range(1, size))
    draw.shuffle(order)
    world.deliver(0, world.workers[0].tree.begin())
    for count, rank in enumerate(order):
        if count % 64 == 0:
            say(f"{size} workers: {count} admitted")
        world.connect(rank)
    say(f"{size} workers: the roster goes down")
    world.settle()
    return world.cost()


# -- a world ----------------------------------------------------------------------------------------------------------


class _Twin(Tree):
    """A tree that accepts a verdict on a roster equal to the verifier's. Only the benchmark has it."""

    verdict: Roster | None = None

    def _seal(self, welcome: Welcome) -> Roster:
        return super()._seal(welcome) if self.verdict is None else self.verdict


class _Worker:
    """One worker: its keys, its place in the tree, what it has done so far."""

    def __init__(self, rank: int, size: int, admission: Admission, verify: bool) -> None:
        self.verify = verify
        self.welcome: tuple[bytes, Welcome] | None = None  # that it is about to verify, and the bytes it came in
        self.cpu = dict.fromkeys(STAGES, 0)  # nanoseconds
        self.sent = 0
        self.handshakes = 0
        self.policy, self.prover = admission(rank)
        with self.clock("keys"):
            self.credentials = Credentials()
            public_key = X25519PrivateKey.generate().public_key().public_bytes_raw()
            address = (f"10.{rank >> 16 & 255}.{rank >> 8 & 255}.{rank & 255}", 20000)
            self.entry = Entry(_RUN, "0", rank, size, public_key, self.credentials.key_digest, *address)
            self.hello = Hello(self.entry, self.policy.digest, _SUITES, self.policy.kinds)
            terms = Terms(keys.Secret(public_key), b"", _SUITES)
            self.tree = _Twin(self.entry, self.policy, self.prover, terms)

    @contextmanager
    def clock(self, stage: str) -> Iterator[None]:
        start = time.thread_time_ns()
        try:
            yield
        finally:
            self.cpu[stage] += time.thread_time_ns() - start

    def handshake(self, role: Role, peers: frozenset[int]) -> Handshake:
        return Handshake(role, self.hello, peers, self.policy, self.prover)

    def forget_the_others(self) -> None:
        """A worker on a machine of its own keeps its roster; thousands in one process keep its digest."""
        session = self.tree.session
        assert session is not None
        self.tree.session = replace(session, roster=replace(session.roster, admitted=()))


class _End:
    """A worker's end of one connection."""

    def __init__(self, worker: _Worker, role: Role, peer: int) -> None:
        self.worker = worker
        self.tls = Tls(worker.credentials, server=role is Role.PARENT)
        self.handshake = worker.handshake(role, frozenset({peer}))
        self.frames = Frames(HANDSHAKE, keys.ADMISSION_BYTES)
        worker.handshakes += 1

    def outgoing(self) -> bytes:
        data = self.tls.outgoing()
        self.worker.sent += len(data)
        return data

    def shake(self, data: bytes) -> None:
        """One turn of the handshake: take what came, answer into TLS."""
        self.frames.feed(self.tls.receive(data))
        if self.tls.established and self.handshake.state is State.IDLE:
            channel = Channel(self.tls.own_key_digest, self.tls.peer_key_digest, self.tls.exporter())
            self._say(self.handshake.begin(channel))
        while (message := self.frames.next()) is not None:
            self._say(self.handshake.receive(message))
        if self.handshake.refusal is not None:
            raise RingfenceError(f"the benchmark's own workers refuse each other: {self.handshake.refusal.text}")

    def _say(self, messages: Sequence[Message]) -> None:
        for message in messages:
            self.tls.send(encode(message))

    @property
    def done(self) -> bool:
        return self.handshake.state is State.DONE


class _World:
    def __init__(self, size: int, verifiers: frozenset[int], admission: Admission) -> None:
        self.size = size
        self.workers = [_Worker(rank, size, admission, rank in verifiers) for rank in range(size)]
        self._verified: tuple[bytes, Welcome, Roster] | None = None  # a roster's frame, and what a verifier made of it
        self.ends: dict[tuple[int, int], _End] = {}  # (worker, peer)
        self._wires: dict[tuple[int, int], deque[tuple[bytes, str]]] = defaultdict(deque)  # in order, as TLS demands
        self._under_way: list[tuple[int, int]] = []  # wires, as a stack: few rosters are alive at a time

    def connect(self, child: int) -> None:
        """The child dials its parent; both admit each other."""
        parent = parent_of(child)
        assert parent is not None
        with self.workers[child].clock("handshakes"):
            one = _End(self.workers[child], Role.CHILD, parent)
        with self.workers[parent].clock("handshakes"):
            two = _End(self.workers[parent], Role.PARENT, child)
        ends = (one, two)
        turn, data = 0, b""
        while not (one.done and two.done):
            end = ends[turn % 2]
            with end.worker.clock("handshakes"):
                end.shake(data)
                data = end.outgoing()
            turn += 1
        self.ends[child, parent], self.ends[parent, child] = ends
        for end in ends:
            end.frames.allow(TREE, tree_frame_limit(self.size))
        digest, kind = two.handshake.child_proof_digest, two.handshake.child_kind
        assert digest is not None
        assert kind is not None
        self.workers[parent].tree.attach_child(self.workers[child].entry, digest, kind)
        self.deliver(child, self.workers[child].tree.attach_parent(self.workers[parent].entry, digest))
        if len(self.ends) < 2 * (self.size - 1):
            self.settle()

    def deliver(self, sender: int, outgoing: Sequence[Outgoing]) -> None:
        """Put a worker's messages on their way."""
        for peer, message in outgoing:
            stage, end = _STAGE_OF.get(type(message), "go"), self.ends[sender, peer]
            with end.worker.clock(stage):
                end.tls.send(encode(message))
                data = end.outgoing()
            self._wires[sender, peer].append((data, stage))
            self._under_way.append((sender, peer))

    def settle(self) -> None:
        """Until nothing is under way."""
        while self._under_way:
            sender, peer = self._under_way.pop()
            data, stage = self._wires[sender, peer].popleft()
            end = self.ends[peer, sender]
            with end.worker.clock(stage):
                answers = self._take(end, sender, end.tls.receive(data))
            self.deliver(peer, [*answers, *self._check(end.worker)])

    def _take(self, end: _End, sender: int, plain: bytes) -> list[Outgoing]:
        worker, answers = end.worker, list[Outgoing]()
        if self._verified is not None and not worker.verify and plain == self._verified[0]:
            worker.tree.verdict = self._verified[2]
            return worker.tree.take(sender, self._verified[1])
        end.frames.feed(plain)
        while (message := end.frames.next()) is not None:
            answers += worker.tree.take(sender, message)
            if isinstance(message, Welcome):
                worker.verify, worker.welcome = True, (plain, message)
        return answers

    def _check(self, worker: _Worker) -> list[Outgoing]:
        if worker.tree.phase is not Phase.CHECK:
            return []
        with worker.clock("check"):
            answers = worker.tree.check()
        if worker.welcome is not None and worker.tree.session is not None:
            self._verified, worker.welcome = (*worker.welcome, worker.tree.session.roster), None
        worker.forget_the_others()
        return answers

    def cost(self) -> Cost:
        digests = {worker.tree.session.roster.digest if worker.tree.session else b"" for worker in self.workers}
        if len(digests) != 1 or any(worker.tree.phase is not Phase.GO for worker in self.workers):
            raise RingfenceError("the benchmark's workers did not come into one session")
        return Cost(
            workers=self.size,
            depth=depth_of(self.size),
            handshakes_mean=statistics.fmean(worker.handshakes for worker in self.workers),
            handshakes_max=max(worker.handshakes for worker in self.workers),
            bytes_mean=statistics.fmean(worker.sent for worker in self.workers),
            bytes_max=max(worker.sent for worker in self.workers),
            cpu_mean={stage: self._mean(stage) for stage in STAGES},
            verifiers=sum(worker.verify for worker in self.workers),
            cpu_root={stage: self.workers[0].cpu[stage] / 1e9 for stage in STAGES},
        )

    def _mean(self, stage: str) -> float:
        counted = [worker for worker in self.workers if worker.verify or stage not in ("roster", "check")]
        return statistics.fmean(worker.cpu[stage] for worker in counted) / 1e9


def depth_of(size: int) -> int:
    """Edges from rank 0 to the last rank, which is on the lowest level."""
    depth, rank = 0, size - 1
    while rank:
        rank, depth = (rank - 1) // keys.TREE_FANOUT, depth + 1
    return depth


# -- what a larger world costs ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """y = fixed + slope × x."""

    fixed: float
    slope: float

    def at(self, x: float) -> float:
        return self.fixed + self.slope * x


def fit(xs: Sequence[float], ys: Sequence[float]) -> Line:
    """By least squares of the error itself, not of its share: large worlds weigh most, and larger ones are foretold."""
    x_mean, y_mean = statistics.fmean(xs), statistics.fmean(ys)
    spread = sum((x - x_mean) ** 2 for x in xs)
    if not spread:
        return Line(y_mean, 0.0)
    slope = sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True)) / spread
    return Line(y_mean - slope * x_mean, slope)


def predict(costs: Sequence[Cost], workers: int) -> Cost:
    """What a world of this size costs, from what each stage depends on.

    Keys, and the last word to begin, cost the same in any world; so does one handshake. An entry is passed on once on each
    level, and rank 0 takes all of them. The roster holds everybody, and everybody gets it.
    """
    sizes, depth = [float(cost.workers) for cost in costs], depth_of(workers)
    handshakes = 2 * (workers - 1) / workers
    one_handshake = statistics.median(cost.cpu_mean["handshakes"] / cost.handshakes_mean for cost in costs)

    def same(value: Callable[[Cost], float]) -> float:
        return statistics.median(value(cost) for cost in costs)

    def by_size(value: Callable[[Cost], float]) -> float:
        return fit(sizes, [value(cost) for cost in costs]).at(workers)

    def by_depth(value: Callable[[Cost], float]) -> float:
        return fit([float(cost.depth) for cost in costs], [value(cost) for cost in costs]).at(depth)

    return Cost(
        workers=workers,
        depth=depth,
        handshakes_mean=handshakes,
        handshakes_max=max(1 + len(children_of(1, workers)), len(children_of(0, workers))),
        bytes_mean=by_size(lambda cost: cost.bytes_mean),
        bytes_max=round(by_size(lambda cost: cost.bytes_max)),
        cpu_mean={
            "keys": same(lambda cost: cost.cpu_mean["keys"]),
            "handshakes": one_handshake * handshakes,
            "entries": by_depth(lambda cost: cost.cpu_mean["entries"]),
            "roster": by_size(lambda cost: cost.cpu_mean["roster"]),
            "check": by_size(lambda cost: cost.cpu_mean["check"]),
            "go": same(lambda cost: cost.cpu_mean["go"]),
        },
        verifiers=0,
        cpu_root={
            "keys": same(lambda cost: cost.cpu_root["keys"]),
            "handshakes": one_handshake * len(children_of(0, workers)),
            "entries": by_size(lambda cost: cost.cpu_root["entries"]),
            "roster": by_size(lambda cost: cost.cpu_root["roster"]),
            "check": by_size(lambda cost: cost.cpu_root["check"]),
            "go": same(lambda cost: cost.cpu_root["go"]),
        },
    )
