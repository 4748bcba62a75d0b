"""The join of one worker: a selector loop in the calling thread, with one deadline.

The loop accepts children, dials the parent, passes messages of the admission tree between admitted neighbours, and returns
when the session has begun. `handshakes.py` handles the connections until they are admitted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import time
from collections.abc import Iterable, Iterator
from typing import Final

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from ringfence import keys
from ringfence.admission import encoding
from ringfence.admission.binding import Role
from ringfence.admission.entry import Entry
from ringfence.admission.handshake import Refusal
from ringfence.admission.messages import TREE, Failure, Hello, tree_frame_limit
from ringfence.admission.peer_verification import PeerVerifier, Presentation, all_sign
from ringfence.admission.policy import Policy, PolicyTerms, Prover
from ringfence.admission.roster import Roster
from ringfence.admission.tree import CHECKING, Outgoing, Phase, Terms, Tree, children_of, parent_of
from ringfence.config.settings import Settings
from ringfence.errors import AdmissionError, PeerLostError, ProtocolError
from ringfence.session.join import diagnostics
from ringfence.session.join.connections import Connections
from ringfence.session.join.credentials import JoinCredentials
from ringfence.session.join.diagnostics import Deadline, Diagnostics, run_name
from ringfence.session.join.dialler import Dialler
from ringfence.session.join.handshakes import Handshakes
from ringfence.session.join.listener import JoinListener, listen_locally
from ringfence.session.join.membership import Membership, record_of
from ringfence.session.join.parent import AddressBook, ParentSearch, Store
from ringfence.session.join.peer import Peer
from ringfence.transport.alarm import boot_seconds
from ringfence.transport.fork import register_fork_cleanup, unregister_fork_cleanup
from ringfence.transport.tls import Credentials
from ringfence.transport.unix import LocalNetwork

_log = logging.getLogger(__name__)

_REPORT_SECONDS: Final = 1.0
# In CHECK the roster that neighbours refer to is not verified yet. After GO, which AGREE precedes, what follows on a connection
# belongs to the control plane.
_NOT_READING: Final = (*CHECKING, Phase.GO)


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
    record_key: bytes | None = None,
) -> Membership:
    """Join the run that `settings` names. Blocks for at most `timeout` seconds.

    Args:
        store: Where workers publish their admission addresses. It is not trusted.
        rank: The rank of this worker.
        world_size: The number of workers.
        settings: The run, the credentials and where to listen.
        link_address: Where other workers dial this one's links.
        timeout: Seconds until the run must have formed.
        table: The schedule table; that of rank 0 is used by all workers.
        admission: The policy and the prover. Default: those of the settings. Tests pass their own, with other roots.
        record_key: The public key of this worker's record, if it writes one.

    Returns:
        The membership, with the roster and the keys of the session.

    Raises:
        AdmissionError: The run did not form in time, or this worker was not admitted.
        ConfigurationError: This machine cannot listen, or has no credential for its own policy.
    """
    deadline = Deadline(timeout, time.monotonic() + timeout)
    with contextlib.closing(JoinCredentials(settings)) as own:
        admission = admission or _admission(own, rank, timeout)
        hybrid = admission[0].key_agreement == keys.KEY_AGREEMENTS[0]
        credentials = Credentials(hybrid=hybrid, record_key=record_key)
        private_key = X25519PrivateKey.generate()
        entry = Entry(
            run_id=settings.run_id,
            generation=settings.generation,
            rank=rank,
            world_size=world_size,
            public_key=private_key.public_key().public_bytes_raw(),
            tls_key_digest=credentials.key_digest,
            host=link_address[0],
            port=link_address[1],
        )
        join_loop = JoinLoop(
            store=store,
            settings=settings,
            entry=entry,
            credentials=credentials,
            private_key=private_key,
            deadline=deadline,
            table=table,
            admission=admission,
        )
        del credentials, private_key  # the loop holds the only references, and drops them at its end
        return join_loop.run()


def _admission(credentials: JoinCredentials, rank: int, timeout: float) -> tuple[Policy, Prover]:
    """The policy and the prover of the settings; querying this machine for evidence may block."""
    run = run_name(credentials.settings.run_id, credentials.settings.generation)
    silent = (
        f"rank {rank} asked its own machine what evidence it can provide and got no answer: check its kernel and its "
        "drivers (dmesg, nvidia-smi)"
    )
    first = diagnostics.FIRST_WARNING

    def warn() -> None:
        _log.warning("%s, has not formed after %.0f of %g s; %s", run, first, timeout, silent)

    try:
        return credentials.admission(timeout=timeout, warn_after=first, warn=warn)
    except TimeoutError:
        raise AdmissionError(f"{run}, did not form within {timeout:g} s; {silent}") from None


class JoinLoop:
    """One worker's join. Call `run()` once."""

    def __init__(
        self,
        *,
        store: Store,
        settings: Settings,
        entry: Entry,
        credentials: Credentials,
        private_key: X25519PrivateKey,
        deadline: Deadline,
        table: bytes,
        admission: tuple[Policy, Prover],
    ) -> None:
        now = time.monotonic()
        self._settings = settings
        self._entry = entry
        self._private_key = private_key
        self._credentials = credentials
        self._deadline = deadline
        self._policy, prover = admission
        terms = Terms(keys.Secret(os.urandom(keys.SECRET_BYTES)), table, keys.SUITES)
        self._tree = Tree(entry, self._policy, prover, terms)
        self._children = frozenset(children_of(entry.rank, entry.world_size))
        self._connections = Connections()
        hello = Hello(entry=entry, policy_digest=self._policy.digest, suites=keys.SUITES, kinds=self._policy.kinds)
        self._handshakes = Handshakes(hello, credentials, self._policy, prover, self._connections, events=self)
        book, parent = AddressBook(store, entry), parent_of(entry.rank)
        search = None if parent is None else ParentSearch(book, parent, now)
        self._dialler = Dialler(book, search, self._handshakes)
        self._connections.add_source(self._dialler)
        self._acceptor: JoinListener | None = None
        self._local: LocalNetwork | None = None  # once there is a session key
        self._diagnostics = Diagnostics(entry, self._tree, deadline, now)
        self._report_at = now + _REPORT_SECONDS
        self._failure: Failure | None = None  # reported by a neighbour
        self._verified_at: float | None = None  # the first neighbour
        # The proof that this worker presented to its parent; rank 0: to its first child.
        self._presentation: Presentation | None = None

    def run(self) -> Membership:
        """Join, and return the membership. Raises as `join` does."""
        register_fork_cleanup(self)
        try:
            self._deliver(self._tree.begin())
            if self._children:
                self._listen()
            self._loop()
            return self._membership()
        except BaseException as error:
            self._announce_failure(error)
            raise
        finally:
            self._close()
            unregister_fork_cleanup(self)
            self.forget()  # an exception that is kept keeps its frames, and through them this object

    # -- the loop ---------------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        while self._tree.phase is not Phase.GO or self._connections.has_unsent():
            now = time.monotonic()
            if now >= self._deadline.at:
                raise AdmissionError(self._diagnostics.timeout_message(now, self._dialler.search))
            self._dialler.dial_if_due(now)
            self._report_if_due(now)
            self._diagnostics.warn_if_due(now, self._dialler.search, complete=self._has_all_neighbours())
            if self._check_once_sent():
                continue
            self._connections.watch(reading=self.is_reading())
            pending = [each for each in self._connections.wait(self._pause(now)) if not self._dispatch(*each)]
            self._handshakes.expire(self._handshakes.serve([(key.data, events) for key, events in pending]))

    def _dispatch(self, key: selectors.SelectorKey, events: int) -> bool:
        """Handle everything but pending connections; return whether it was handled."""
        if key.data is self._acceptor:
            self._accept()
        elif key.data is self._dialler:
            self._dialler.take_targets()
        elif self._handshakes.dispatch(key.data):
            return True
        elif self._connections.is_neighbour(key.data):
            self._serve_neighbour(key.data, events)
        else:
            return False
        return True

    def _pause(self, now: float) -> float:
        """Seconds until something is due without an event."""
        moments = [self._deadline.at, self._report_at, self._diagnostics.warn_at, self._dialler.next_at]
        return max(0.0, min([moment - now for moment in moments] + self._handshakes.seconds_left()))

    def _has_all_neighbours(self) -> bool:
        return self._dialler.search is None and self._children <= self._connections.neighbours.keys()

    def _listen(self) -> None:
        self._acceptor = JoinListener(self._settings, self._entry.rank)
        self._connections.add_source(self._acceptor)
        self._diagnostics.address = self._acceptor.address
        self._dialler.publish(self._acceptor.address)

    def _accept(self) -> None:
        assert self._acceptor is not None
        accepted = self._acceptor.accept()
        if accepted is not None:
            self._handshakes.accept(*accepted, self._children)

    # -- admitted neighbours ----------------------------------------------------------------------------------------

    def _serve_neighbour(self, peer: Peer, events: int) -> None:
        with self._lost_on_error(peer):
            if events & selectors.EVENT_WRITE:
                peer.flush()
            if events & selectors.EVENT_READ:
                peer.read()
                self._receive(peer)

    @contextlib.contextmanager
    def _lost_on_error(self, peer: Peer) -> Iterator[None]:
        """End the join if a neighbour breaks the protocol or disconnects."""
        try:
            yield
        except (ProtocolError, PeerLostError) as error:
            raise AdmissionError(f"rank {peer.rank} was lost while the run was forming: {error}") from error

    def _receive(self, peer: Peer) -> None:
        """Handle the buffered messages of a neighbour."""
        assert peer.rank is not None
        while self.is_reading() and (message := peer.frames.next()) is not None:
            if isinstance(message, Failure):
                self._failure = message  # passed on unchanged
            self._deliver(self._tree.take(peer.rank, message))

    def _check_once_sent(self) -> bool:
        """Verify the roster, or its signatures, once they were sent to the children, which verify at the same time."""
        if self._tree.phase not in CHECKING or self._connections.has_unsent():
            return False
        outgoing = self._tree.check()
        if self._local is None and self._tree.session is not None:
            # Before this worker acknowledges the roster: workers of this machine dial it once all have.
            self._local = listen_locally(self._tree.session, self._entry.rank, self._policy)
        self._deliver(outgoing)
        for peer in self._connections.neighbours.values():
            with self._lost_on_error(peer):
                self._receive(peer)  # what arrived meanwhile
        return True

    def _deliver(self, outgoing: Iterable[Outgoing]) -> None:
        for rank, message in outgoing:
            self._connections.neighbours[rank].send([message])

    def _report_if_due(self, now: float) -> None:
        if now >= self._report_at:
            self._report_at = now + _REPORT_SECONDS
            self._deliver(self._tree.report())

    # -- events of the handshakes -----------------------------------------------------------------------------------

    def is_reading(self) -> bool:
        return self._tree.phase not in _NOT_READING

    def on_admitted(self, peer: Peer) -> None:
        """Turn a pending connection into a neighbour of the admission tree."""
        handshake = peer.handshake
        assert handshake.admitted is not None and handshake.presented is not None
        assert handshake.child_proof_digest is not None and handshake.child_kind is not None
        entry = handshake.admitted.entry
        if self._verified_at is None:
            self._verified_at = boot_seconds()
        if handshake.role is Role.PARENT:
            self._tree.attach_child(entry, handshake.child_proof_digest, handshake.child_kind)
        if handshake.role is Role.CHILD or (self._entry.rank == 0 and self._presentation is None):
            self._presentation = Presentation.of(handshake.presented, peer.presented_at)
        peer.admit(entry.rank, TREE, tree_frame_limit(entry.world_size), self._settings.outage)
        self._connections.pending.remove(peer)
        self._connections.neighbours[entry.rank] = peer
        with self._lost_on_error(peer):
            if handshake.role is Role.CHILD:
                self._dialler.on_admitted()
                self._deliver(self._tree.attach_parent(entry, handshake.child_proof_digest))
            self._receive(peer)

    def on_refused(self, peer: Peer, refusal: Refusal) -> str:
        action = "refused by the worker" if refusal.by_peer else "refused the worker"
        text = f"{action} at {peer.address}: {encoding.escape(refusal.text, 2 * keys.REFUSAL_TEXT_BYTES)}"
        claimed = peer.handshake.peer
        if claimed is not None and (refusal.same_run or self._dialler.is_dialled(peer)):
            self._diagnostics.record_refusal(claimed.entry.rank, text)
        if refusal.proven:
            raise AdmissionError(f"rank {self._entry.rank} {text}")
        return text

    def on_dropped(self, peer: Peer, reason: str, refusal: Refusal | None) -> None:
        self._dialler.on_dropped(peer, reason, refusal)

    def on_no_proof(self, error: Exception) -> None:
        self._diagnostics.record_no_proof(error)

    # -- the end ----------------------------------------------------------------------------------------------------

    def _membership(self) -> Membership:
        session, neighbours = self._tree.session, self._connections.neighbours
        again = self._policy.verify_every is not None
        assert session is not None
        local, self._local = self._local, None
        for peer in neighbours.values():
            self._connections.set_events(peer, 0)
        return Membership(
            rank=self._entry.rank,
            world_size=self._entry.world_size,
            roster=session.roster,
            session_key=keys.session_key(session.session_secret, session.roster.digest),
            link_private_key=self._private_key,
            suite=session.suite,
            table=session.table,
            key_agreement=" and ".join(sorted({peer.stream.tls.group or "" for peer in neighbours.values()})),
            edges=tuple(neighbours[rank].become_edge(verified_again=again) for rank in sorted(neighbours)),
            peer_verifier=self._peer_verifier(session.roster),
            policy_digest=self._policy.digest,
            terms=PolicyTerms(**self._policy.terms()),  # without its verifiers, which may hold a key
            local=local,
            verified_at=boot_seconds() if self._verified_at is None else self._verified_at,
            record=record_of(session, self._entry, self._policy, self._presentation, self._credentials),
        )

    def _peer_verifier(self, roster: Roster) -> PeerVerifier | None:
        if all_sign(roster):
            return None  # the roster's endorsements have verified every worker
        return PeerVerifier(
            policy=self._policy,
            roster=roster,
            own=self._entry.rank,
            presentation=self._presentation,
            formed=time.time(),
            join_timeout=self._deadline.timeout,
        )

    def _announce_failure(self, error: BaseException) -> None:
        """Tell the neighbours why this worker's join failed, so that they need not wait for their deadline."""
        failure = self._failure or Failure(self._entry.rank, str(error) or type(error).__name__)
        for peer in self._connections.neighbours.values():
            peer.send([failure])
            peer.stream.close()

    def _close(self) -> None:
        if self._acceptor is not None:
            self._acceptor.close()
        self._connections.close_pending()
        self._handshakes.close()
        self._dialler.close()

    def forget(self) -> None:
        """Drop all keys and descriptors. In a forked child, listener, connections and threads' results drop their own."""
        self._connections.forget()
        self._handshakes.forget()
        self._tree.forget()
        if self._local is not None:
            self._local.close()
        vars(self).clear()
