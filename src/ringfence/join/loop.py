"""The loop of a join: a listener, a call to the parent, pending unauthenticated peers, admitted neighbours, one deadline."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import selectors
import socket
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from ringfence import keys
from ringfence.admission import encoding
from ringfence.admission.binding import Role
from ringfence.admission.entry import Entry
from ringfence.admission.handshake import Handshake, Refusal, State
from ringfence.admission.messages import Failure, Hello, Proof
from ringfence.admission.peer_verification import PeerVerifier, Presentation, all_sign
from ringfence.admission.policy import INSTANT_KINDS, SIGNING_KINDS, Policy, Prover, Verdict, verdict
from ringfence.admission.roster import Roster
from ringfence.admission.tree import Outgoing, Phase, Terms, Tree, children_of, parent_of
from ringfence.errors import AdmissionError, ConfigurationError, EvidenceError, PeerLostError, ProtocolError
from ringfence.join.background import Background
from ringfence.join.collect import Collector, Outcome, attempt
from ringfence.join.credentials import JoinCredentials
from ringfence.join.diagnostics import FIRST_WARNING, NEXT_WARNING, explain
from ringfence.join.listener import listen
from ringfence.join.membership import Membership
from ringfence.join.parent import FINAL, AddressBook, Place, Search, Store
from ringfence.join.peer import Peer
from ringfence.join.refusals import Refusals
from ringfence.join.cpu_shares import Shares
from ringfence.join.verification import Verification
from ringfence.settings import Settings
from ringfence.transport.alarm import boot_seconds
from ringfence.transport.fork import register_fork_cleanup, unregister_fork_cleanup
from ringfence.transport.tcp import EXHAUSTED, connect, refusal
from ringfence.transport.tls import Credentials, Tls, TlsStream

_log = logging.getLogger(__name__)

_SUITES: Final = (keys.SUITE_AES_256_GCM,)
_REPORT_SECONDS: Final = 1.0
# While the roster goes down nobody is listened to: what they say is about a roster that is not verified yet. After the go,
# what follows on a connection is the control plane's.
_DEAF: Final = (Phase.CHECK, Phase.GO)


def join(
    store: Store,
    rank: int,
    world_size: int,
    settings: Settings,
    link_address: tuple[str, int],
    timeout: float,
    table: bytes,
    *,
    admission: tuple[Policy, Prover] | None = None,
) -> Membership:
    """Be admitted to the run; rank 0's `table` is everyone's. Blocks at most `timeout` seconds.

    `admission`, what verifies others and what this worker shows, comes from the settings unless it is handed in: tests do,
    with roots of their own.
    """
    deadline, proving = time.monotonic() + timeout, JoinCredentials(settings)
    try:
        verifying = admission or _ask_machine(proving, rank, timeout)
        hybrid = verifying[0].key_agreement == keys.KEY_AGREEMENTS[0]
        credentials, private_key = Credentials(hybrid=hybrid), X25519PrivateKey.generate()
        public_key = private_key.public_key().public_bytes_raw()
        run, generation = settings.run_id, settings.generation
        entry = Entry(run, generation, rank, world_size, public_key, credentials.key_digest, *link_address)
        join_loop = _JoinLoop(store, settings, entry, credentials, private_key, (timeout, deadline), table, verifying)
        del credentials, private_key  # the join's alone: where it forgets them, nobody has them
        return join_loop.run()
    finally:
        proving.close()


def _run_name(settings: Settings) -> str:
    return f"run '{settings.run_id}', generation {settings.generation}"


def _ask_machine(credentials: JoinCredentials, rank: int, timeout: float) -> tuple[Policy, Prover]:
    run = _run_name(credentials.settings)
    silent = (
        f"rank {rank} has asked its own machine what evidence it can give, and has no answer: see what its kernel and its "
        "drivers do (dmesg, nvidia-smi)"
    )

    def complain() -> None:
        _log.warning("%s, has not formed after %.0f of %g s; %s", run, FIRST_WARNING, timeout, silent)

    try:
        return credentials.admission(timeout, FIRST_WARNING, complain)
    except TimeoutError:
        raise AdmissionError(f"{run}, did not form within {timeout:g} s; {silent}") from None


class _JoinLoop:
    def __init__(
        self,
        store: Store,
        settings: Settings,
        entry: Entry,
        credentials: Credentials,
        private_key: X25519PrivateKey,
        limits: tuple[float, float],
        table: bytes,
        admission: tuple[Policy, Prover],
    ) -> None:
        now = time.monotonic()
        self._settings = settings
        self._entry = entry
        self._credentials = credentials
        self._private_key = private_key
        self._timeout, self._deadline = limits  # for people; on time.monotonic()'s clock
        self._policy, self._prover = admission
        self._hello = Hello(entry, self._policy.digest, _SUITES, self._policy.kinds)
        terms = Terms(keys.Secret(os.urandom(keys.SECRET_BYTES)), table, _SUITES)
        self._tree = Tree(entry, self._policy, self._prover, terms)
        self._children = frozenset(children_of(entry.rank, entry.world_size))
        self._book = AddressBook(store, entry)
        parent = parent_of(entry.rank)
        self._search = None if parent is None else Search(self._book, entry.rank, parent, now)
        self._selector = selectors.DefaultSelector()
        self._collector = Collector(self._prover)
        self._selector.register(self._collector, selectors.EVENT_READ, self._collector)
        self._background: Background[Place | str | None] = (
            Background()
        )  # the store and the resolver, which may fall silent
        self._selector.register(self._background, selectors.EVENT_READ, self._background)
        self._shares = Shares()
        self._verification = Verification(self._policy, self._shares)
        self._selector.register(self._verification, selectors.EVENT_READ, self._verification)
        self._waited = 0.0  # seconds in which this worker waited for others: peers' time runs by this clock only
        self._takes_time = not set(self._policy.kinds) <= SIGNING_KINDS
        self._listener: socket.socket | None = None
        self._unauthenticated: list[Peer] = []  # the oldest first
        self._dialled: Peer | None = None  # the parent to be, an unauthenticated peer too
        self._edges: dict[int, Peer] = {}
        self._address = (entry.host, entry.port)  # where others reach this worker
        self._report_at = now + _REPORT_SECONDS
        self._warn_at = now + FIRST_WARNING
        self._refused: dict[int, str] = {}  # claimed rank: why; our own: why there was no proof to show
        self._refusals = Refusals()
        self._failure: Failure | None = None
        self._verified_at: float | None = None  # the first neighbour
        self._presentation: Presentation | None = (
            None  # what the first who had to be convinced was shown: the parent; rank 0's first child
        )

    def run(self) -> Membership:
        register_fork_cleanup(self)
        try:
            self._deliver(self._tree.begin())
            if self._children:
                self._open_door()
            self._loop()
            return self._membership()
        except BaseException as error:
            self._give_up(error)
            raise
        finally:
            self._close_door()
            unregister_fork_cleanup(self)
            self.forget()  # what is the membership's is there; whoever keeps an error keeps its frames, and in them this

    # -- the loop ---------------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        while self._tree.phase is not Phase.GO or any(peer.stream.wants_write for peer in self._edges.values()):
            now = time.monotonic()
            if now >= self._deadline:
                raise AdmissionError(self._late(now))
            self._dial_if_due(now)
            self._report_if_due(now)
            self._warn_if_due(now)
            self._refusals.check(self._entry.rank, self._children - self._edges.keys(), now)
            if self._check_when_passed_on():
                continue
            self._watch()
            crowd = []
            for key, events in self._wait(now):
                if key.data is None:
                    self._accept()
                elif key.data is self._background:
                    self._take_places()
                elif key.data is self._collector:
                    self._take_evidence()
                elif key.data is self._verification:
                    self._take_verdicts()
                elif key.data in self._edges.values():
                    self._serve(key.data, events)
                else:
                    crowd.append((key.data, events))
            self._expire(self._serve_crowd(crowd))

    def _wait(self, now: float) -> list[tuple[selectors.SelectorKey, int]]:
        """What is ready. Time counts against peers only in here: what this worker does meanwhile is not their fault."""
        pause, began = self._pause(now), time.monotonic()
        found = self._selector.select(pause)
        self._waited += time.monotonic() - began
        return found

    def _serve_crowd(self, crowd: list[tuple[Peer, int]]) -> set[Peer]:
        """Serve unauthenticated peers, those first whose address has cost the least; who is left when the time is up."""
        crowd.sort(key=lambda each: self._shares.mark(each[0].address))
        end = time.thread_time() + keys.ADMISSION_SLICE_SECONDS
        for place, (peer, events) in enumerate(crowd):
            if time.thread_time() >= end:
                return {left for left, _ in crowd[place:]}
            if peer in self._unauthenticated:
                self._serve(peer, events)
        return set()

    def _pause(self, now: float) -> float:
        moments = [self._deadline, self._report_at, self._warn_at]
        if self._search is not None:
            moments.append(self._search.next_at)
        left = [moment - now for moment in moments]
        left += [peer.expires - self._waited for peer in self._unauthenticated]
        return max(0.0, min(left))

    def _watch(self) -> None:
        """Select for what each connection waits for."""
        for peer in (*self._unauthenticated, *self._edges.values()):
            writing = peer.connecting or peer.stream.wants_write
            reading = not peer.connecting and self._tree.phase not in _DEAF
            events = (selectors.EVENT_WRITE if writing else 0) | (selectors.EVENT_READ if reading else 0)
            if events == peer.watched:
                continue
            if not peer.watched:
                self._selector.register(peer, events, peer)
            elif events:
                self._selector.modify(peer, events, peer)
            else:
                self._selector.unregister(peer)
            peer.watched = events

    def _serve(self, peer: Peer, events: int) -> None:
        """One connection has something for us. What an unauthenticated peer costs is charged to its address."""
        before = time.thread_time()
        with self._blame(peer):
            if peer.connecting:
                peer.connected()
            elif events & selectors.EVENT_WRITE:
                peer.flush()
            if events & selectors.EVENT_READ:
                peer.read()
                self._take_messages(peer)
                if peer in self._unauthenticated:  # neither admitted nor turned away
                    peer.check_cost()
        if peer.rank is None:
            spent = time.thread_time() - before
            peer.cpu_seconds += spent
            self._shares.charge(peer.address, spent)

    @contextlib.contextmanager
    def _blame(self, peer: Peer) -> Iterator[None]:
        """An unauthenticated peer's fault costs the unauthenticated peer; a neighbour's ends the session."""
        try:
            yield
        except (ProtocolError, PeerLostError) as error:
            if peer.rank is not None:
                raise AdmissionError(f"rank {peer.rank} was lost while the run was forming: {error}") from error
            self._drop(peer, str(error))

    def _take_messages(self, peer: Peer) -> None:
        while self._listens_to(peer) and (message := peer.frames.next()) is not None:
            if peer.rank is not None:
                if isinstance(message, Failure):
                    self._failure = message  # passed on as it came
                self._deliver(self._tree.take(peer.rank, message))
                continue
            peer.send(peer.handshake.receive(message))
            self._after_step(peer)
            if peer.rank is None and peer not in self._unauthenticated:
                return

    def _listens_to(self, peer: Peer) -> bool:
        return self._tree.phase not in _DEAF and peer.handshake.state is not State.VERIFY

    def _after_step(self, peer: Peer) -> None:
        if peer.handshake.state is State.DONE:
            self._attach(peer)
        elif peer.handshake.refusal is not None:
            self._turn_away(peer, peer.handshake.refusal)
        else:
            self._go_on(peer)

    def _decide(self, peer: Peer, found: Verdict) -> None:
        peer.send(peer.handshake.decide(found))
        self._after_step(peer)

    def _take_verdicts(self) -> None:
        """Proofs have been verified, of whoever is still there."""
        for peer, found in self._verification.finished():
            if peer in self._unauthenticated:
                with self._blame(peer):
                    peer.resume(self._waited)
                    self._decide(peer, found)
                    if peer in self._unauthenticated:
                        self._take_messages(peer)  # what came meanwhile

    def _go_on(self, peer: Peer) -> None:
        """Extend the deadlines after a step: collecting evidence takes time on both sides."""
        handshake, now = peer.handshake, time.monotonic()
        if handshake.role is Role.PARENT and handshake.state is State.PROOF:  # it has just said hello
            self._make_room(peer)
            if peer not in self._unauthenticated:
                return
        if self._takes_time:
            peer.expires = self._waited + self._patience(peer)
        if handshake.unverified is not None and handshake.unverified.kind in INSTANT_KINDS:
            self._decide(peer, verdict(self._policy, handshake.unverified))
            return
        if handshake.unverified is not None:
            peer.pause(self._waited)
            self._verification.start(peer, handshake.unverified)
        if handshake.state is not State.COLLECT:
            return
        peer.collecting_since = now
        if self._prover.kind in SIGNING_KINDS:
            self._show(peer, attempt(self._prover, handshake.wanted))
        elif self._collector.full:
            self._drop(peer, "this worker still collects evidence for others")
        else:
            self._collector.start(peer, handshake.wanted)

    def _patience(self, peer: Peer) -> float:
        """Seconds until the next step of an unauthenticated peer. A device answers one query at a time, so children queue."""
        if not self._takes_time or not peer.greeted:
            return keys.ADMISSION_SECONDS
        handshake = peer.handshake
        in_turn = handshake.state is State.COLLECT or (handshake.role, handshake.state) == (Role.CHILD, State.PROOF)
        return keys.EVIDENCE_SECONDS * (keys.TREE_FANOUT + 1 if in_turn else 1)

    def _take_evidence(self) -> None:
        """Evidence has been collected, for whoever is still there."""
        for peer, outcome in self._collector.finished():
            if isinstance(outcome, EvidenceError):
                raise outcome  # it will not get better by asking again
            if peer in self._unauthenticated and peer.handshake.state is State.COLLECT:
                self._show(peer, outcome)

    def _show(self, peer: Peer, outcome: Outcome) -> None:
        if isinstance(outcome, Proof):
            self._collector.failure_window.end()
            peer.shown_at = time.time()
            peer.send(peer.handshake.show(outcome))
            self._go_on(peer)
        else:
            self._go_without_proof(peer, outcome)

    def _check_when_passed_on(self) -> bool:
        """When the children have the roster, as far as the kernel is concerned: verify it while they do."""
        if self._tree.phase is not Phase.CHECK or any(peer.stream.wants_write for peer in self._edges.values()):
            return False
        self._deliver(self._tree.check())
        for peer in self._edges.values():
            with self._blame(peer):
                self._take_messages(peer)  # what came meanwhile
        return True

    def _deliver(self, outgoing: Iterable[Outgoing]) -> None:
        for peer, message in outgoing:
            self._edges[peer].send([message])

    def _report_if_due(self, now: float) -> None:
        if now >= self._report_at:
            self._report_at = now + _REPORT_SECONDS
            self._deliver(self._tree.report())

    def _warn_if_due(self, now: float) -> None:
        """Who has its neighbours leaves it to rank 0 to say who is missing: a thousand workers need not say it."""
        if now < self._warn_at:
            return
        waited, self._warn_at = self._timeout - (self._deadline - now), now + NEXT_WARNING
        if self._search is not None or self._entry.rank == 0 or not self._children <= self._edges.keys():
            _log.warning("%s", self._known(now, f"has not formed after {waited:.0f} of {self._timeout:g} s"))

    # -- unauthenticated peers ------------------------------------------------------------------------------------------

    def _open_door(self) -> None:
        self._listener = listen(self._settings)
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        host, port = self._listener.getsockname()[:2]
        self._address = address = self._settings.admission_address((host, port))
        self._background.start("ringfence publishes", lambda: self._book.publish(address))

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connection, (host, *_) = self._listener.accept()
        except OSError as error:
            if error.errno in EXHAUSTED:  # it would be reported again, without end
                raise ConfigurationError(f"rank {self._entry.rank}, joining: {refusal(error)}") from error
            return  # gone before we looked
        with self._shares.charged(host):
            self._make_room(self._meet(connection, host, Role.PARENT, self._children))

    def _make_room(self, newcomer: Peer) -> None:
        """Those who have not said the right hello and those who have are each held to a limit; beyond it somebody goes.

        Of the first, the oldest: a child says hello in milliseconds, and one that is about to must not be driven out by those
        who wait for a verdict. Of the others, anyone of the address that has most of them: a child's evidence may take
        seconds, anybody may say hello, and if the oldest went, a crowd that does would drive out every child that collects.
        """
        crowd = [each for each in self._unauthenticated if each.greeted is newcomer.greeted and not each.passed]
        crowd = [each for each in crowd if each is not self._dialled]
        if newcomer.greeted:
            if len(crowd) > keys.ADMISSION_PENDING:
                largest, _ = Counter(each.address for each in crowd).most_common(1)[0]
                self._drop(
                    secrets.choice([each for each in crowd if each.address == largest]),
                    "too many unauthenticated peers",
                )
            return
        same = [each for each in crowd if each.address == newcomer.address]
        if len(same) > keys.ADMISSION_PENDING_PER_ADDRESS:
            self._drop(same[0], "too many unauthenticated peers from one address")
        elif len(crowd) > keys.ADMISSION_PENDING:
            self._drop(crowd[0], "too many unauthenticated peers")

    def _meet(self, connection: socket.socket, address: str, role: Role, ranks: frozenset[int]) -> Peer:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream = TlsStream(connection, Tls(self._credentials, server=role is Role.PARENT))
        handshake = Handshake(role, self._hello, ranks, None, None)
        peer = Peer(stream, handshake, address, self._waited + keys.ADMISSION_SECONDS)
        self._unauthenticated.append(peer)
        return peer

    def _attach(self, peer: Peer) -> None:
        """Both sides have admitted: from here on the peer is a neighbour."""
        handshake = peer.handshake
        assert handshake.admitted is not None
        assert handshake.child_proof_digest is not None
        assert handshake.child_kind is not None
        entry = handshake.admitted.entry
        if self._verified_at is None:
            self._verified_at = boot_seconds()
        if handshake.role is Role.PARENT:
            self._tree.attach_child(entry, handshake.child_proof_digest, handshake.child_kind)
        assert handshake.shown is not None
        if handshake.role is Role.CHILD or (self._entry.rank == 0 and self._presentation is None):
            self._presentation = Presentation.of(handshake.shown, peer.shown_at)
        peer.become_neighbour(entry.rank, entry.world_size, self._settings.outage)
        self._unauthenticated.remove(peer)
        self._edges[entry.rank] = peer
        self._refusals.end(entry.rank)
        if handshake.role is Role.CHILD:
            self._search = self._dialled = None
            self._deliver(self._tree.attach_parent(entry, handshake.child_proof_digest))

    def _turn_away(self, peer: Peer, refusal: Refusal) -> None:
        who = "refused by the worker" if refusal.by_peer else "refused the worker"
        text = f"{who} at {peer.address}: {encoding.escape(refusal.text, 2 * keys.REFUSAL_TEXT_BYTES)}"
        claimed = peer.handshake.peer
        if claimed is not None and (refusal.same_run or peer is self._dialled):
            rank = claimed.entry.rank
            if rank not in self._refused:  # once: an unauthenticated peer must not be able to fill a log
                _log.warning("rank %d, joining, %s", self._entry.rank, text)
            self._refused[rank] = text
            if refusal.proven and refusal.reason in FINAL and rank in self._children:
                self._refusals.add(rank, time.monotonic(), text)
        self._drop(peer, text, refusal)

    def _go_without_proof(self, peer: Peer, error: Exception) -> None:
        """Evidence could not be had just now: a service is down, a device is busy. The next attempt asks again, for a while."""
        seconds = self._collector.failure_window.failed(peer.collecting_since, time.monotonic())
        if seconds >= keys.EVIDENCE_SECONDS:
            raise EvidenceError(
                f"rank {self._entry.rank} has had no proof to show for {seconds:.0f} s: {error}"
            ) from error
        text = f"has no proof to show: {encoding.escape(str(error), keys.REFUSAL_TEXT_BYTES)}"
        if self._entry.rank not in self._refused:
            _log.warning("rank %d, joining, %s; it will try again", self._entry.rank, text)
        self._refused[self._entry.rank] = text
        self._drop(peer, "there was no proof to show")

    def _expire(self, unserved: set[Peer]) -> None:
        """Drop who has used up its time, unless what it sent still waits to be read."""
        late = [peer for peer in self._unauthenticated if self._waited >= peer.expires and peer not in unserved]
        for peer in late:
            if peer not in self._unauthenticated:
                continue
            seconds = self._patience(peer)
            if peer.handshake.state is State.COLLECT:
                text = f"gave no evidence within {seconds:.0f} s; see what its kernel or service does"
                self._go_without_proof(peer, ConfigurationError(f"this machine {text}"))
            else:
                self._drop(peer, f"no answer within {seconds:.0f} s")

    def _drop(self, peer: Peer, reason: str, refusal: Refusal | None = None) -> None:
        self._forget(peer)
        self._verification.cancel(peer)
        self._unauthenticated.remove(peer)
        peer.stream.close()
        if peer is self._dialled and self._search is not None:
            self._dialled = None
            self._search.retry(time.monotonic(), reason if refusal else f"{peer.address}: {reason}", refusal)

    def _forget(self, peer: Peer) -> None:
        if peer.watched:
            self._selector.unregister(peer)
            peer.watched = 0

    # -- the parent -------------------------------------------------------------------------------------------------

    def _dial_if_due(self, now: float) -> None:
        if self._search is not None and now >= self._search.next_at:
            self._search.begin(now)
            self._background.start("ringfence looks for its parent", self._search.look)

    def _take_places(self) -> None:
        """The store has taken this worker's address, or has said where the parent is."""
        for place in self._background.finished():
            if self._search is not None and place is not None:
                self._search.end()
                self._dial(self._search, place)

    def _dial(self, search: Search, place: Place | str) -> None:
        if isinstance(place, str):
            search.retry(time.monotonic(), place)
            return
        try:
            connection = socket.socket(place.family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        except OSError as error:  # a family that this machine does not have, no descriptor left
            search.retry(time.monotonic(), f"{place.text}: {error.strerror}")
            return
        self._dialled = self._meet(connection, place.text, Role.CHILD, frozenset({search.parent}))
        self._dialled.connecting = True
        with self._blame(self._dialled):
            connect(connection, place.address)  # how it went is asked when the socket is writable

    # -- the end ----------------------------------------------------------------------------------------------------

    def _membership(self) -> Membership:
        session = self._tree.session
        assert session is not None
        for peer in self._edges.values():
            self._forget(peer)
        return Membership(
            rank=self._entry.rank,
            world_size=self._entry.world_size,
            roster=session.roster,
            session_key=keys.session_key(session.session_secret, session.roster.digest),
            link_private_key=self._private_key,
            suite=session.suite,
            table=session.table,
            key_agreement=" and ".join(sorted({peer.stream.tls.group or "" for peer in self._edges.values()})),
            edges=tuple(self._edges[rank].become_edge() for rank in sorted(self._edges)),
            peer_verifier=self._peer_verifier(session.roster),
            max_session_age=self._policy.max_session_age,
            verified_at=boot_seconds() if self._verified_at is None else self._verified_at,
        )

    def _peer_verifier(self, roster: Roster) -> PeerVerifier | None:
        if all_sign(roster):
            return None  # all are verified: nothing of the policy is needed any more
        own = self._entry.rank
        return PeerVerifier(self._policy, roster, own, self._presentation, time.time(), self._timeout)

    def _give_up(self, error: BaseException) -> None:
        """Tell the neighbours, so that nobody waits for a deadline to learn what is known here."""
        failure = self._failure or Failure(self._entry.rank, str(error) or type(error).__name__)
        for peer in self._edges.values():
            peer.send([failure])
            peer.stream.close()

    def _close_door(self) -> None:
        if self._listener is not None:
            self._listener.close()
        for peer in self._unauthenticated:
            peer.stream.close()
        self._selector.close()
        self._collector.close()
        self._verification.close()
        self._background.close()

    def forget(self) -> None:
        """Hold no key and no descriptor. In a forked child, listener, connections and threads' answers see to themselves."""
        self._selector.close()
        self._tree.forget()
        vars(self).clear()

    def _late(self, now: float) -> str:
        limit = "the shorter of RINGFENCE_JOIN_TIMEOUT and torch's timeout"
        return self._known(now, f"did not form within {self._timeout:g} s ({limit})")

    def _known(self, now: float, state: str) -> str:
        """What is known of the run in this state, and of who is missing."""
        known = explain(self._entry, self._address, self._tree, self._search, self._refused, now)
        return f"{_run_name(self._settings)}, {state}; {known}"
