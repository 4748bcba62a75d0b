"""The cost of admission as a run grows: groups of workers in one process, with real TLS and real proofs, without sockets.

Every worker generates its keys, performs the handshakes with its parent and its children, verifies them, checks and forwards
entries, receives the roster and finds itself and its neighbours in it. Its CPU time is measured stage by stage, and its bytes
are counted with TLS. The network is left out and all workers share one interpreter, so only CPU times are meaningful here, not
elapsed times.

If every worker parsed and verified every entry, one interpreter would have n² work (16.8 million entries of 4,096 workers). A
random sample of workers, the verifiers, does so and is measured; the others compare the roster, byte by byte, with one that a
verifier has accepted, and are left out of the means of these stages. `verifiers=None` makes every worker a verifier.
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
from ringfence.admission.agreement import Signers
from ringfence.admission.binding import Role, TlsValues
from ringfence.admission.entry import Entry
from ringfence.admission.handshake import Handshake, State
from ringfence.admission.messages import (
    HANDSHAKE,
    TREE,
    Entries,
    Go,
    Hello,
    Message,
    MessageSplitter,
    Welcome,
    encode,
    tree_frame_limit,
)
from ringfence.admission.roster import Roster
from ringfence.admission.tree import CHECKING, Outgoing, Phase, Terms, Tree, children_of, parent_of
from ringfence.errors import RingfenceError
from ringfence.transport.tls import Credentials, Tls
from ringfence_lab.bench.admission_proofs import PROOFS, Admission

STAGES: Final = ("keys", "handshakes", "entries", "roster", "check", "go", "agreement")
_BY_VERIFIERS: Final = ("roster", "check", "go", "agreement")  # stages that the others shorten
_RUN: Final = "bench-admission"
_SUITES: Final = (keys.SUITE_AES_256_GCM,)
_PART_BYTES: Final = 1 << 16
_STAGE_OF: Final[dict[type, str]] = {Entries: "entries", Welcome: "roster"}  # else "go"


@dataclass(frozen=True)
class AdmissionCost:
    """The cost of admitting one group, for its workers."""

    workers: int
    depth: int  #                        edges from rank 0 to the furthest worker
    handshakes_mean: float  #            TLS handshakes that a worker takes part in
    handshakes_max: int
    bytes_mean: float  #                 that a worker sends, TLS included
    bytes_max: int
    bytes_go_mean: float  #              of these, acknowledgements and GO: the digest and the signatures of the roster
    bytes_go_max: int
    cpu_mean: dict[str, float]  #        seconds by stage; from "roster" on that of the verifiers
    verifiers: int  #                       workers that checked the whole roster by themselves
    cpu_root: dict[str, float]  #        of rank 0, which receives every entry

    @property
    def cpu(self) -> float:
        return sum(self.cpu_mean.values())

    @property
    def critical_path(self) -> float:
        """CPU seconds on the longest chain from the first handshake to the last worker's GO, without the network.

        Handshakes run side by side, at most five on one worker; rank 0 receives all entries; the roster is read and forwarded
        level by level, and then checked by all workers at the same time; and so are its signatures.
        """
        mean = self.cpu_mean
        handshakes = mean["handshakes"] / self.handshakes_mean * self.handshakes_max
        passed_on = (self.depth + 1) * (mean["roster"] + mean["go"])
        return mean["keys"] + handshakes + self.cpu_root["entries"] + passed_on + mean["check"] + mean["agreement"]

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "cpu_seconds": self.cpu, "critical_path_seconds": self.critical_path}


def admit(
    size: int,
    verifiers: int | None = None,
    proof: str = "secret",
    seed: int = 0,
    say: Callable[[str], None] = lambda what: None,
) -> AdmissionCost:
    """Admit `size` workers by one kind of proof, check that all of them are in one session, and return the cost."""
    say(f"{size} workers: keys")
    draw = random.Random(seed)  # noqa: S311 (the order in which workers arrive)
    chosen = range(size) if verifiers is None or verifiers >= size else draw.sample(range(size), verifiers)
    group = _Group(size, frozenset(chosen), PROOFS[proof](_RUN))
    order = list(range(1, size))
    draw.shuffle(order)
    group.deliver(0, group.workers[0].tree.begin())
    for count, rank in enumerate(order):
        if count % 64 == 0:
            say(f"{size} workers: {count} admitted")
        group.connect(rank)
    say(f"{size} workers: the roster is distributed")
    group.settle()
    return group.cost()


# -- a group ----------------------------------------------------------------------------------------------------------


class _Twin(Tree):
    """A tree that accepts a roster, and signatures, equal to those that a verifier accepted. For the benchmark only."""

    verdict: tuple[Roster, Signers] | None = None

    def _seal(self, welcome: Welcome) -> tuple[Roster, Signers]:
        found = super()._seal(welcome) if self.verdict is None else self.verdict
        self.sealed = found
        return found

    def _check_agreement(self, go: Go) -> None:
        if self.verdict is None:
            super()._check_agreement(go)


class _Worker:
    """One worker: its keys, its position in the tree, and its counters."""

    def __init__(self, rank: int, size: int, admission: Admission, verify: bool) -> None:
        self.verify = verify
        self.welcome: tuple[bytes, Welcome] | None = None  # that it is about to verify, and the bytes it came in
        self.bytes_go = 0  # sent in Acknowledge and Go
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

    def drop_roster(self) -> None:
        """Keep only the digest of the roster: thousands of workers in one process would not fit otherwise."""
        session = self.tree.session
        assert session is not None
        self.tree.session = replace(session, roster=replace(session.roster, admitted=()))


class _Endpoint:
    """A worker's endpoint of one connection."""

    def __init__(self, worker: _Worker, role: Role, peer: int) -> None:
        self.worker = worker
        self.tls = Tls(worker.credentials, server=role is Role.PARENT)
        self.handshake = Handshake(role, worker.hello, frozenset({peer}), worker.policy, worker.prover)
        self.frames = MessageSplitter(HANDSHAKE, keys.ADMISSION_BYTES)
        worker.handshakes += 1

    def outgoing(self) -> bytes:
        data = self.tls.outgoing()
        self.worker.sent += len(data)
        return data

    def send(self, data: bytes) -> bytes:
        """Return the TLS records of a message."""
        parts = []
        for part in _parts(data):
            self.tls.send(part)
            parts.append(self.outgoing())
        return b"".join(parts)

    def receive(self, data: bytes) -> bytes:
        """Return the plaintext of TLS records."""
        return b"".join(map(self.tls.receive, _parts(data)))

    def advance(self, data: bytes) -> None:
        """Advance the handshake: process received bytes and write the answers to TLS."""
        self.frames.feed(self.tls.receive(data))
        if self.tls.established and self.handshake.state is State.IDLE:
            channel = TlsValues(self.tls.own_key_digest, self.tls.peer_key_digest, self.tls.exporter())
            self._send(self.handshake.begin(channel))
        while (message := self.frames.next()) is not None:
            self._send(self.handshake.receive(message))
        if self.handshake.refusal is not None:
            raise RingfenceError(f"the benchmark's own workers refuse each other: {self.handshake.refusal.text}")

    def _send(self, messages: Sequence[Message]) -> None:
        for message in messages:
            self.tls.send(encode(message))

    @property
    def done(self) -> bool:
        return self.handshake.state is State.DONE


class _Group:
    def __init__(self, size: int, verifiers: frozenset[int], admission: Admission) -> None:
        self.size = size
        self.workers = [_Worker(rank, size, admission, rank in verifiers) for rank in range(size)]
        # A roster's frame, and what a verifier made of it; likewise of Go, which every worker sends on as it came.
        self._verified: tuple[bytes, Welcome, tuple[Roster, Signers]] | None = None
        self._go: tuple[bytes, Go] | None = None
        self.ends: dict[tuple[int, int], _Endpoint] = {}  # (worker, peer)
        self._wires: dict[tuple[int, int], deque[tuple[bytes, str]]] = defaultdict(deque)  # in order, as TLS demands
        self._queued: list[tuple[int, int]] = []  # wires, as a stack: few rosters are alive at a time

    def connect(self, child: int) -> None:
        """Connect a worker to its parent; both admit each other."""
        parent = parent_of(child)
        assert parent is not None
        with self.workers[child].clock("handshakes"):
            one = _Endpoint(self.workers[child], Role.CHILD, parent)
        with self.workers[parent].clock("handshakes"):
            two = _Endpoint(self.workers[parent], Role.PARENT, child)
        ends = (one, two)
        turn, data = 0, b""
        while not (one.done and two.done):
            end = ends[turn % 2]
            with end.worker.clock("handshakes"):
                end.advance(data)
                data = end.outgoing()
            turn += 1
        self.ends[child, parent], self.ends[parent, child] = ends
        for end in ends:
            end.tls.admit()
            end.frames.allow(TREE, tree_frame_limit(self.size))
        digest, kind = two.handshake.child_proof_digest, two.handshake.child_kind
        assert digest is not None
        assert kind is not None
        self.workers[parent].tree.attach_child(self.workers[child].entry, digest, kind)
        self.deliver(child, self.workers[child].tree.attach_parent(self.workers[parent].entry, digest))
        if len(self.ends) < 2 * (self.size - 1):
            self.settle()

    def deliver(self, sender: int, outgoing: Sequence[Outgoing]) -> None:
        """Queue a worker's messages for their receivers."""
        for peer, message in outgoing:
            stage, end = _STAGE_OF.get(type(message), "go"), self.ends[sender, peer]
            with end.worker.clock(stage):
                data = end.send(encode(message))
            if stage == "go":
                end.worker.bytes_go += len(data)
            self._wires[sender, peer].append((data, stage))
            self._queued.append((sender, peer))

    def settle(self) -> None:
        """Deliver messages until none is queued."""
        while self._queued:
            sender, peer = self._queued.pop()
            data, stage = self._wires[sender, peer].popleft()
            end = self.ends[peer, sender]
            with end.worker.clock(stage):
                answers = self._take(end, sender, end.receive(data))
            self.deliver(peer, answers)
            while end.worker.tree.phase in CHECKING:
                self.deliver(peer, self._check(end.worker))

    def _take(self, end: _Endpoint, sender: int, plain: bytes) -> list[Outgoing]:
        worker, answers = end.worker, list[Outgoing]()
        if self._verified is not None and not worker.verify and plain == self._verified[0]:
            worker.tree.verdict = self._verified[2]
            return worker.tree.take(sender, self._verified[1])
        if self._go is not None and not worker.verify and plain == self._go[0]:
            return worker.tree.take(sender, self._go[1])
        end.frames.feed(plain)
        while (message := end.frames.next()) is not None:
            answers += worker.tree.take(sender, message)
            if isinstance(message, Welcome):
                worker.verify, worker.welcome = True, (plain, message)
            elif isinstance(message, Go):
                self._go = (plain, message)
        return answers

    def _check(self, worker: _Worker) -> list[Outgoing]:
        stage = "check" if worker.tree.phase is Phase.CHECK else "agreement"
        with worker.clock(stage):
            answers = worker.tree.check()
        if stage == "agreement":
            return answers
        if worker.welcome is not None and worker.tree.session is not None:
            self._verified, worker.welcome = (*worker.welcome, worker.tree.sealed), None
        worker.drop_roster()
        return answers

    def cost(self) -> AdmissionCost:
        digests = {worker.tree.session.roster.digest if worker.tree.session else b"" for worker in self.workers}
        if len(digests) != 1 or any(worker.tree.phase is not Phase.GO for worker in self.workers):
            raise RingfenceError("the benchmark's workers are not in one session")
        counts = ((worker.handshakes, worker.sent, worker.bytes_go) for worker in self.workers)
        handshakes, sent, sent_go = zip(*counts, strict=True)
        return AdmissionCost(
            workers=self.size,
            depth=depth_of(self.size),
            handshakes_mean=statistics.fmean(handshakes),
            handshakes_max=max(handshakes),
            bytes_mean=statistics.fmean(sent),
            bytes_max=max(sent),
            bytes_go_mean=statistics.fmean(sent_go),
            bytes_go_max=max(sent_go),
            cpu_mean={stage: self._mean(stage) for stage in STAGES},
            verifiers=sum(worker.verify for worker in self.workers),
            cpu_root={stage: self.workers[0].cpu[stage] / 1e9 for stage in STAGES},
        )

    def _mean(self, stage: str) -> float:
        counted = [worker for worker in self.workers if worker.verify or stage not in _BY_VERIFIERS]
        return statistics.fmean(worker.cpu[stage] for worker in counted) / 1e9


def _parts(data: bytes) -> Iterator[bytes]:
    """Split a message: the buffers of TLS never shrink, and thousands of workers in one process have one each."""
    return (data[start : start + _PART_BYTES] for start in range(0, len(data), _PART_BYTES))


def depth_of(size: int) -> int:
    """Edges from rank 0 to the last rank, which is on the lowest level."""
    depth, rank = 0, size - 1
    while rank:
        rank, depth = (rank - 1) // keys.TREE_FANOUT, depth + 1
    return depth


# -- prediction of larger groups -------------------------------------------------------------------------------------


def extrapolated(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Fit a line by least squares of the absolute error, and return its value at `x`: at least 0, as costs are.

    Large groups weigh most, because larger ones are predicted.
    """
    if len(set(xs)) == 1:
        return statistics.fmean(ys)
    slope, fixed = statistics.linear_regression(xs, ys)
    return max(0.0, fixed + slope * x)


def predict(costs: Sequence[AdmissionCost], workers: int) -> AdmissionCost:
    """Predict the cost of a group of `workers` workers from the costs of smaller groups.

    Keys and a handshake cost the same in any group. An entry is forwarded once on each level of the tree, and
    rank 0 receives all of them. The roster contains every worker, and every worker receives it.
    """
    sizes, depths = [float(cost.workers) for cost in costs], [float(cost.depth) for cost in costs]
    depth, children = depth_of(workers), len(children_of(0, workers))
    handshakes = 2 * (workers - 1) / workers
    one_handshake = statistics.median(cost.cpu_mean["handshakes"] / cost.handshakes_mean for cost in costs)

    def by_size(value: Callable[[AdmissionCost], float]) -> float:
        return extrapolated(sizes, [value(cost) for cost in costs], workers)

    def seconds(of: Callable[[AdmissionCost], dict[str, float]]) -> dict[str, float]:
        found = {stage: by_size(lambda cost, stage=stage: of(cost)[stage]) for stage in STAGES}  # type: ignore[misc]
        return {**found, "keys": statistics.median(of(cost)["keys"] for cost in costs)}

    forwarded = extrapolated(depths, [cost.cpu_mean["entries"] for cost in costs], depth)
    return AdmissionCost(
        workers=workers,
        depth=depth,
        handshakes_mean=handshakes,
        handshakes_max=max(1 + len(children_of(1, workers)), children),
        bytes_mean=by_size(lambda cost: cost.bytes_mean),
        bytes_max=round(by_size(lambda cost: cost.bytes_max)),
        bytes_go_mean=by_size(lambda cost: cost.bytes_go_mean),
        bytes_go_max=round(by_size(lambda cost: cost.bytes_go_max)),
        cpu_mean={
            **seconds(lambda cost: cost.cpu_mean),
            "handshakes": one_handshake * handshakes,
            "entries": forwarded,
        },
        verifiers=0,
        cpu_root={**seconds(lambda cost: cost.cpu_root), "handshakes": one_handshake * children},
    )
