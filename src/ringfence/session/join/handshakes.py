"""The handshakes of a join: every pending connection, from TLS to mutual admission (spec/admission.md).

A pending connection belongs to an unauthenticated peer. It has limits on time, bytes and CPU time; a peer that exceeds one or
breaks the protocol is dropped, and nothing else changes. Once a child's proof was accepted, only the join's own deadline is
left: for the child the handshake may be over, so dropping it would end its join. Proofs are collected and verified in
background threads.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from ringfence import keys
from ringfence.admission.binding import Role
from ringfence.admission.handshake import Handshake, Refusal, State
from ringfence.admission.messages import Hello, Proof
from ringfence.admission.policy import INSTANT_KINDS, SIGNING_KINDS, Policy, Prover, Verdict, verdict
from ringfence.errors import ConfigurationError, EvidenceError, PeerLostError, ProtocolError
from ringfence.session.join.collect import Collector, Outcome, try_prove
from ringfence.session.join.connections import Connections
from ringfence.session.join.cpu_shares import CpuShares
from ringfence.session.join.peer import Peer
from ringfence.session.join.pending_limits import excess
from ringfence.session.join.verification import Verification
from ringfence.transport.tls import Credentials, Tls, TlsStream


class HandshakeEvents(Protocol):
    """What the owner of the handshakes is told. A method that raises ends the join, unless it says otherwise."""

    def is_reading(self) -> bool:
        """Whether messages are handled now, or stay in their buffers."""

    def on_admitted(self, peer: Peer) -> None:
        """Both sides have admitted each other. A ProtocolError, raised while `peer.rank` is None, drops the peer."""

    def on_refused(self, peer: Peer, refusal: Refusal) -> str:
        """One side refused the other. Returns the reason for which the connection is dropped."""

    def on_dropped(self, peer: Peer, reason: str, refusal: Refusal | None) -> None:
        """The connection was closed before both sides were admitted."""

    def on_no_proof(self, error: Exception) -> None:
        """This worker could not collect a proof; it will try again on the next connection."""


class Handshakes:
    """Drives all pending connections of a join."""

    def __init__(
        self,
        hello: Hello,
        credentials: Credentials,
        policy: Policy,
        prover: Prover,
        connections: Connections,
        events: HandshakeEvents,
        current: Callable[[], Policy] | None = None,
    ) -> None:
        """`current`: returns the policy for the next proof, if its files may have changed since `policy` was read."""
        self._hello = hello
        self._credentials = credentials
        self._policy = policy
        self._prover = prover
        self._connections = connections
        self._events = events
        self._shares = CpuShares()
        self._evidence_takes_time = not set(policy.kinds) <= SIGNING_KINDS
        self.collector = Collector(prover)
        self.verification = Verification(current or (lambda: policy), self._shares)
        connections.add_source(self.collector)
        connections.add_source(self.verification)

    # -- connections ------------------------------------------------------------------------------------------------

    def accept(self, connection: socket.socket, host: str, ranks: frozenset[int]) -> None:
        """Start a handshake as the parent with a peer that must be one of `ranks`."""
        with self._shares.charged(host):
            self._enforce_limits(self._add(connection, host, Role.PARENT, ranks))

    def dial(self, connection: socket.socket, address: str, rank: int) -> Peer:
        """Start a handshake as the child with a peer that must be `rank`. The connection is not established yet."""
        peer = self._add(connection, address, Role.CHILD, frozenset({rank}))
        peer.connecting = True
        return peer

    def _add(self, connection: socket.socket, address: str, role: Role, ranks: frozenset[int]) -> Peer:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream = TlsStream(connection, Tls(self._credentials, server=role is Role.PARENT))
        handshake = Handshake(role, self._hello, ranks, policy=None, prover=None)
        peer = Peer(stream, handshake, address, self._connections.waited + keys.ADMISSION_SECONDS)
        self._connections.pending.append(peer)
        return peer

    def _enforce_limits(self, newcomer: Peer) -> None:
        dropped = excess(self._connections.pending, newcomer)
        if dropped is not None:
            self.drop(*dropped)

    def drop(self, peer: Peer, reason: str, refusal: Refusal | None = None) -> None:
        """Close a pending connection."""
        self._connections.set_events(peer, 0)
        self.verification.cancel(peer)
        self._connections.pending.remove(peer)
        peer.stream.close()
        self._events.on_dropped(peer, reason, refusal)

    @contextlib.contextmanager
    def drop_on_error(self, peer: Peer) -> Iterator[None]:
        """Drop the peer if it breaks the protocol or disconnects. Errors of an admitted neighbour are raised."""
        try:
            yield
        except (ProtocolError, PeerLostError) as error:
            if peer.rank is not None:
                raise
            self.drop(peer, str(error))

    # -- messages ---------------------------------------------------------------------------------------------------

    def serve(self, ready: list[tuple[Peer, int]]) -> set[Peer]:
        """Handle ready connections within a slice of CPU time, the addresses that used the least CPU time first.

        Returns the connections that were not handled.
        """
        ready.sort(key=lambda each: self._shares.start_tag(each[0].address))
        end = time.thread_time() + keys.ADMISSION_SLICE_SECONDS
        for position, (peer, events) in enumerate(ready):
            if time.thread_time() >= end:
                return {left for left, _ in ready[position:]}
            if self._is_pending(peer):
                self._serve(peer, events)
        return set()

    def _is_pending(self, peer: Peer) -> bool:
        return peer in self._connections.pending

    def _serve(self, peer: Peer, events: int) -> None:
        before = time.thread_time()
        with self.drop_on_error(peer):
            if peer.connecting:
                peer.finish_connect()
            elif events & selectors.EVENT_WRITE:
                peer.flush()
            if events & selectors.EVENT_READ:
                peer.read()
                self._receive(peer)
                if self._is_pending(peer):
                    peer.check_cost()
        if peer.rank is None:
            spent = time.thread_time() - before
            peer.cpu_seconds += spent
            self._shares.charge(peer.address, spent)

    def _receive(self, peer: Peer) -> None:
        """Handle the buffered messages of a pending connection, up to a step that has to wait."""
        while self._is_pending(peer) and self._events.is_reading() and peer.handshake.state is not State.VERIFY:
            message = peer.frames.next()
            if message is None:
                return
            peer.send(peer.handshake.receive(message))
            self._after_step(peer)

    def _after_step(self, peer: Peer) -> None:
        if peer.handshake.state is State.DONE:
            self._events.on_admitted(peer)
        elif peer.handshake.refusal is not None:
            refusal = peer.handshake.refusal
            self.drop(peer, self._events.on_refused(peer, refusal), refusal)
        else:
            self._continue(peer)

    def _continue(self, peer: Peer) -> None:
        """Start what the handshake waits for on this side, and extend the peer's time: evidence takes a while on both."""
        handshake = peer.handshake
        if handshake.role is Role.PARENT and handshake.state is State.PROOF:  # its hello was accepted by this step
            self._enforce_limits(peer)
            if not self._is_pending(peer):
                return
        if handshake.role is Role.PARENT and handshake.state is State.ADMIT:
            peer.expires = float("inf")
        elif self._evidence_takes_time:
            peer.expires = self._connections.waited + self._step_seconds(peer)
        if handshake.unverified is not None and handshake.unverified.kind in INSTANT_KINDS:
            self._decide(peer, verdict(self._policy, handshake.unverified))
            return
        if handshake.unverified is not None:
            peer.pause(self._connections.waited)
            self.verification.start(peer, handshake.unverified)
        if handshake.state is State.COLLECT:
            self._collect(peer)

    def _step_seconds(self, peer: Peer) -> float:
        """How long the next step of a peer may take. A device answers one query at a time, so the children of one queue."""
        if not self._evidence_takes_time or not peer.hello_accepted:
            return keys.ADMISSION_SECONDS
        handshake = peer.handshake
        queues = handshake.state is State.COLLECT or (handshake.role, handshake.state) == (Role.CHILD, State.PROOF)
        return keys.EVIDENCE_SECONDS * (keys.TREE_FANOUT + 1 if queues else 1)

    # -- what threads have finished -----------------------------------------------------------------------------------

    def dispatch(self, source: object) -> bool:
        """Take what is finished if `source` is a source of these handshakes; return whether it is. Raises EvidenceError."""
        if source is self.verification:
            self._take_verdicts()
        elif source is self.collector:
            self._take_proofs()
        else:
            return False
        return True

    # -- verdicts on peers' proofs ----------------------------------------------------------------------------------

    def _take_verdicts(self) -> None:
        """Continue the handshakes whose proofs have been verified."""
        for peer, found in self.verification.finished():
            if self._is_pending(peer):
                with self.drop_on_error(peer):
                    peer.resume(self._connections.waited)
                    self._decide(peer, found)
                    self._receive(peer)  # what arrived meanwhile

    def _decide(self, peer: Peer, found: Verdict) -> None:
        peer.send(peer.handshake.decide(found))
        self._after_step(peer)

    # -- this worker's own proof ------------------------------------------------------------------------------------

    def _collect(self, peer: Peer) -> None:
        peer.collecting_since = time.monotonic()
        binding = peer.handshake.own_binding
        if self._prover.kind in SIGNING_KINDS:
            self._present(peer, try_prove(self._prover, binding))
        elif self.collector.full:
            self.drop(peer, "this worker still collects evidence for other connections")
        else:
            self.collector.start(peer, binding)

    def _take_proofs(self) -> None:
        """Present the proofs that have been collected. Raises EvidenceError if this machine can give none at all."""
        for peer, outcome in self.collector.finished():
            if isinstance(outcome, EvidenceError):
                raise outcome
            if self._is_pending(peer) and peer.handshake.state is State.COLLECT:
                self._present(peer, outcome)

    def _present(self, peer: Peer, outcome: Outcome) -> None:
        if isinstance(outcome, Proof):
            self.collector.failure_window.reset()
            peer.presented_at = time.time()
            peer.send(peer.handshake.present(outcome))
            self._continue(peer)
        else:
            self._drop_without_proof(peer, outcome)

    def _drop_without_proof(self, peer: Peer, error: Exception) -> None:
        """Drop a connection for which no proof could be collected: a service is down, or a device is busy.

        The next connection tries again. Raises EvidenceError once that has failed for EVIDENCE_SECONDS.
        """
        seconds = self.collector.failure_window.record(peer.collecting_since, time.monotonic())
        is_over = seconds >= keys.EVIDENCE_SECONDS
        if not is_over:
            self._events.on_no_proof(error)
        self.drop(peer, "this worker could not collect a proof")
        if is_over:
            rank = self._hello.entry.rank
            raise EvidenceError(f"rank {rank} could not collect a proof for {seconds:.0f} s: {error}") from error

    # -- time -------------------------------------------------------------------------------------------------------

    def seconds_left(self) -> list[float]:
        """For each pending connection, the seconds of waiting until it expires."""
        return [peer.expires - self._connections.waited for peer in self._connections.pending]

    def expire(self, unserved: set[Peer]) -> None:
        """Drop the connections whose time is up, except those with data that was not read yet."""
        waited = self._connections.waited
        for peer in [each for each in self._connections.pending if waited >= each.expires and each not in unserved]:
            if not self._is_pending(peer):
                continue
            seconds = self._step_seconds(peer)
            if peer.handshake.state is State.COLLECT:
                text = (
                    f"this machine gave no evidence within {seconds:.0f} s; check its kernel, driver or token service"
                )
                self._drop_without_proof(peer, ConfigurationError(text))
            else:
                self.drop(peer, f"no answer within {seconds:.0f} s")

    def close(self) -> None:
        """Stop the background work. Threads that still run end by themselves."""
        self.collector.close()
        self.verification.close()

    def forget(self) -> None:
        """Drop all keys, even if references to this object remain, such as in the frames of an exception."""
        vars(self).clear()
