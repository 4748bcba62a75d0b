"""Climb the tree: publish an address, dial the parent, let the children in, come back with a roster.

One selectors loop in the calling thread does all of it. What the store says is only where to try: an address in it may
be old, wrong or hostile. Who answers there is settled by admission, and nobody who fails it can end the join.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Protocol

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from ringfence import keys
from ringfence.admission.binding import Channel, Role
from ringfence.admission.entry import Entry
from ringfence.admission.handshake import Handshake, Refusal, State
from ringfence.admission.messages import (
    HANDSHAKE,
    TREE,
    Failure,
    Frames,
    Hello,
    Message,
    Reason,
    encode,
    tree_frame_limit,
)
from ringfence.admission.policy import Policy, Prover
from ringfence.admission.proofs.secret import SharedSecret
from ringfence.admission.roster import Roster
from ringfence.admission.tree import Outgoing, Phase, Terms, Tree, children_of, parent_of
from ringfence.control import ControlEdge
from ringfence.errors import AdmissionError, ConfigurationError, PeerLostError, ProtocolError
from ringfence.settings import Settings, format_address, parse_address
from ringfence.transport.tls import Credentials, Tls, TlsStream

_log = logging.getLogger(__name__)

_SUITES: Final = (keys.SUITE_AES_256_GCM,)
_FIRST_RETRY: Final = 0.02  # seconds; doubles up to
_LAST_RETRY: Final = 1.0
_REPORT_SECONDS: Final = 1.0
# A worker of this very run that refuses us will not change its mind; an address that is about to be replaced may
# have answered. So ask again for a little while, then give up.
_PATIENCE_SECONDS: Final = 3.0
_FINAL: Final = frozenset({Reason.WORLD_SIZE, Reason.POLICY, Reason.SUITE, Reason.PROOF})


class Store(Protocol):
    """As much of torch.distributed.Store as a join needs."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...


@dataclass(frozen=True)
class Membership:
    """A worker's place in one epoch. Nothing else opens the runtime's door."""

    rank: int
    world_size: int
    roster: Roster
    epoch_key: keys.Secret
    link_private_key: X25519PrivateKey = field(repr=False)
    suite: int
    table: bytes
    admitted_by: str
    edges: tuple[ControlEdge, ...] = field(repr=False)


def listen(settings: Settings) -> socket.socket:
    """A non-blocking listener on the chosen interface, in the chosen range of ports."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    for port in settings.ports or (0,):
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.bind((settings.host, port))
            listener.listen(128)
        except OSError as error:
            listener.close()
            reason = error.strerror
            continue
        listener.setblocking(False)
        return listener
    where = f"ports {settings.ports[0]}-{settings.ports[-1]} of " if settings.ports else ""
    raise ConfigurationError(
        f"cannot listen on {where}{settings.host}: {reason}; set RINGFENCE_INTERFACE or RINGFENCE_PORTS"
    )


def join(
    store: Store,
    rank: int,
    world_size: int,
    settings: Settings,
    link_address: tuple[str, int],
    timeout: float,
    table: bytes,
) -> Membership:
    """Be admitted to the run. Blocks until the epoch begins, at most `timeout` seconds; rank 0's `table` is everyone's."""
    joiner = _Join(store, rank, world_size, settings, link_address, timeout, table)
    return joiner.run()


class _Peer:
    """One connection, from first contact until the epoch begins. `rank` is set once both sides have admitted."""

    def __init__(self, stream: TlsStream, handshake: Handshake, address: str, expires: float) -> None:
        self.stream = stream
        self.handshake = handshake
        self.address = address
        self.expires = expires
        self.connecting = False
        self.rank: int | None = None
        self.frames = Frames(HANDSHAKE, keys.ADMISSION_BYTES)

    def fileno(self) -> int:
        return self.stream.fileno()

    def send(self, messages: Iterable[Message]) -> None:
        """A failed write is not reported here: what the peer said last is still to be read, and then the end."""
        with contextlib.suppress(PeerLostError):
            for message in messages:
                self.stream.send(encode(message))

    def flush(self) -> None:
        with contextlib.suppress(PeerLostError):
            self.stream.flush()

    def read(self) -> None:
        """Take what has arrived. The handshake begins as soon as TLS is up."""
        data = self.stream.receive()
        self.flush()  # TLS's own answers
        tls = self.stream.tls
        if tls.established and self.handshake.state is State.IDLE:
            self.send(self.handshake.begin(Channel(tls.own_key_digest, tls.peer_key_digest, tls.exporter())))
        self.frames.feed(data)

    def check_stranger(self, now: float) -> None:
        """What an unadmitted peer may cost: so many bytes, so many seconds."""
        if self.rank is None and self.stream.received > keys.ADMISSION_BYTES:
            raise ProtocolError(f"more than {keys.ADMISSION_BYTES} bytes before being admitted")
        if self.rank is None and now >= self.expires:
            raise PeerLostError(f"no answer within {keys.ADMISSION_SECONDS:.0f} s")


class _Join:
    """The loop's state: a listener, a call to the parent, pending strangers, admitted neighbours."""

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        settings: Settings,
        link_address: tuple[str, int],
        timeout: float,
        table: bytes,
    ) -> None:
        self._store = store
        self._settings = settings
        self._started = time.monotonic()
        self._timeout = timeout
        self._deadline = self._started + timeout
        self._credentials = Credentials()
        self._private_key = X25519PrivateKey.generate()
        self._policy, self._prover = _policy(settings)
        self._entry = Entry(
            settings.run_id,
            settings.generation,
            rank,
            world_size,
            self._private_key.public_key().public_bytes_raw(),
            self._credentials.key_digest,
            *link_address,
        )
        self._hello = Hello(self._entry, self._policy.digest, _SUITES, self._policy.kinds)
        terms = Terms(keys.Secret(os.urandom(keys.SECRET_BYTES)), table, _SUITES)
        self._tree = Tree(self._entry, self._policy, self._prover, terms)
        self._parent = parent_of(rank)
        self._children = frozenset(children_of(rank, world_size))
        self._selector = selectors.DefaultSelector()
        self._listener: socket.socket | None = None
        self._pending: set[_Peer] = set()  # strangers, the parent that is being dialled among them
        self._edges: dict[int, _Peer] = {}
        self._dialled: _Peer | None = None
        self._dial_at = self._started
        self._retry = _FIRST_RETRY
        self._report_at = self._started + _REPORT_SECONDS
        self._parent_trouble = "it has not published an address in the store"
        self._refused_since: float | None = None
        self._refused_children: dict[int, str] = {}
        self._failure: Failure | None = None

    def run(self) -> Membership:
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

    # -- the loop ---------------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        while self._tree.phase is not Phase.GO or any(peer.stream.wants_write for peer in self._edges.values()):
            now = time.monotonic()
            if now >= self._deadline:
                raise AdmissionError(self._late())
            self._expire(now)
            self._dial_if_due(now)
            if now >= self._report_at:
                self._report_at = now + _REPORT_SECONDS
                self._deliver(self._tree.report())
            self._watch()
            for key, events in self._selector.select(self._pause(now)):
                if key.data is None:
                    self._accept()
                elif key.data in self._pending or key.data in self._edges.values():
                    self._serve(key.data, events)

    def _pause(self, now: float) -> float:
        moments = [self._deadline, self._report_at, *(peer.expires for peer in self._pending)]
        if self._dial_wanted():
            moments.append(self._dial_at)
        return max(0.0, min(moments) - now)

    def _watch(self) -> None:
        """Select for what each connection waits for."""
        for peer in (*self._pending, *self._edges.values()):
            writing = peer.connecting or peer.stream.wants_write
            reading = not peer.connecting and self._tree.phase is not Phase.GO
            events = (selectors.EVENT_WRITE if writing else 0) | (selectors.EVENT_READ if reading else 0)
            known = self._selector.get_map().get(peer.fileno())
            if known is None and events:
                self._selector.register(peer, events, peer)
            elif known is not None and not events:
                self._selector.unregister(peer)
            elif known is not None and known.events != events:
                self._selector.modify(peer, events, peer)

    def _serve(self, peer: _Peer, events: int) -> None:
        """One connection has something for us. A stranger's fault costs the stranger; a neighbour's ends the epoch."""
        try:
            if peer.connecting:
                self._connected(peer)
            elif events & selectors.EVENT_WRITE:
                peer.flush()
            if events & selectors.EVENT_READ:
                peer.read()
                self._take_messages(peer)
            peer.check_stranger(time.monotonic())
        except (ProtocolError, PeerLostError) as error:
            if peer.rank is not None:
                raise AdmissionError(f"rank {peer.rank} was lost while the run was forming: {error}") from error
            self._drop(peer, str(error))

    def _take_messages(self, peer: _Peer) -> None:
        # After the go, what follows on this connection is the control plane's.
        while self._tree.phase is not Phase.GO and (message := peer.frames.next()) is not None:
            if peer.rank is not None:
                if isinstance(message, Failure):
                    self._failure = message
                self._deliver(self._tree.receive(peer.rank, message))
                continue
            peer.send(peer.handshake.receive(message))
            if peer.handshake.state is State.DONE:
                self._attach(peer)
            elif peer.handshake.refusal is not None:
                self._refused(peer, peer.handshake.refusal)
                return

    def _deliver(self, outgoing: Iterable[Outgoing]) -> None:
        for peer, message in outgoing:
            self._edges[peer].send([message])

    # -- strangers and children -------------------------------------------------------------------------------------

    def _open_door(self) -> None:
        self._listener = listen(self._settings)
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        bound = self._listener.getsockname()[:2]
        self._store.set(self._store_key(self._entry.rank), format_address(self._settings.admission_address(bound)))

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connection, address = self._listener.accept()
        except OSError:
            return  # gone before we looked
        crowd = Counter(peer.address for peer in self._pending)
        host = address[0]
        if crowd.total() >= keys.ADMISSION_PENDING or crowd[host] >= keys.ADMISSION_PENDING_PER_ADDRESS:
            connection.close()
            return
        self._add(connection, host, Role.PARENT)

    def _add(self, connection: socket.socket, address: str, role: Role) -> _Peer:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ranks = self._children if role is Role.PARENT else frozenset({self._parent or 0})
        stream = TlsStream(connection, Tls(self._credentials, server=role is Role.PARENT))
        handshake = Handshake(role, self._hello, ranks, self._policy, self._prover)
        peer = _Peer(stream, handshake, address, time.monotonic() + keys.ADMISSION_SECONDS)
        self._pending.add(peer)
        return peer

    def _attach(self, peer: _Peer) -> None:
        """Both sides have admitted: from here on the peer is a neighbour."""
        handshake = peer.handshake
        assert handshake.admitted is not None and handshake.child_proof_digest is not None
        entry = handshake.admitted.entry
        if handshake.role is Role.PARENT:
            self._tree.attach_child(entry, handshake.child_proof_digest)
        peer.rank = entry.rank
        peer.frames.allow(TREE, tree_frame_limit(entry.world_size))
        self._pending.discard(peer)
        self._edges[entry.rank] = peer
        _keep_alive(peer.stream.socket)
        if handshake.role is Role.CHILD:
            self._dialled = None
            self._deliver(self._tree.attach_parent(entry, handshake.child_proof_digest))

    def _refused(self, peer: _Peer, refusal: Refusal) -> None:
        whose = "refused by" if refusal.by_peer else "refused"
        text = f"{whose} the worker at {peer.address}: {refusal.text}"
        claimed = peer.handshake.peer
        if peer is self._dialled:
            self._weigh(refusal, text)
        elif refusal.same_run and claimed is not None and self._refused_children.get(claimed.entry.rank) != text:
            self._refused_children[claimed.entry.rank] = text
            _log.warning("rank %d, waiting for rank %d: %s", self._entry.rank, claimed.entry.rank, text)
        self._drop(peer, text)

    def _expire(self, now: float) -> None:
        for peer in [peer for peer in self._pending if now >= peer.expires]:
            self._drop(peer, f"no answer within {keys.ADMISSION_SECONDS:.0f} s")

    def _drop(self, peer: _Peer, reason: str) -> None:
        self._forget(peer)
        self._pending.discard(peer)
        peer.stream.close()
        if peer is self._dialled:
            self._dialled = None
            self._retry_later(f"{peer.address}: {reason}")

    def _forget(self, peer: _Peer) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(peer)

    # -- the parent -------------------------------------------------------------------------------------------------

    def _dial_wanted(self) -> bool:
        return self._parent is not None and self._parent not in self._edges and self._dialled is None

    def _dial_if_due(self, now: float) -> None:
        if not self._dial_wanted() or now < self._dial_at:
            return
        address = self._parent_address()
        if address is None:
            self._retry_later(self._parent_trouble)
            return
        name = format_address(address)
        try:
            family, kind, protocol, _, target = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
            connection = socket.socket(family, kind, protocol)
        except OSError as error:
            self._retry_later(f"{name}: {error.strerror}")
            return
        connection.setblocking(False)
        peer = self._dialled = self._add(connection, name, Role.CHILD)
        peer.connecting = True
        connection.connect_ex(target)  # how it went is asked when the socket is writable

    def _connected(self, peer: _Peer) -> None:
        error = peer.stream.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise PeerLostError(os.strerror(error))
        peer.connecting = False
        peer.flush()

    def _parent_address(self) -> tuple[str, int] | None:
        """Read afresh each time: what stood there a moment ago may be left over from an earlier start."""
        assert self._parent is not None
        key = self._store_key(self._parent)
        try:
            value = self._store.get(key) if self._store.check([key]) else None
        except RuntimeError as error:
            raise AdmissionError(
                f"the store failed while rank {self._entry.rank} looked for its parent: {error}"
            ) from error
        if value is None:
            return None
        try:
            return parse_address(value.decode("ascii", "replace"), "store address")
        except ConfigurationError as error:
            self._parent_trouble = str(error)
            return None

    def _retry_later(self, trouble: str) -> None:
        self._parent_trouble = trouble
        self._dial_at = time.monotonic() + self._retry
        self._retry = min(2 * self._retry, _LAST_RETRY)

    def _weigh(self, refusal: Refusal, text: str) -> None:
        """A refusal by a worker of this very run is final if it lasts; any other is an old address, or a stranger's."""
        if not refusal.same_run or refusal.reason not in _FINAL:
            return
        now = time.monotonic()
        self._refused_since = self._refused_since or now
        if now >= self._refused_since + _PATIENCE_SECONDS:
            raise AdmissionError(f"rank {self._entry.rank} was not admitted by rank {self._parent}: {text}")

    def _store_key(self, rank: int) -> str:
        entry = self._entry
        world = keys.digest(b"ringfence store key\0", entry.run_id.encode(), entry.generation.encode())
        return f"ringfence/{world[:12].hex()}/{rank}"

    # -- the end ----------------------------------------------------------------------------------------------------

    def _membership(self) -> Membership:
        epoch = self._tree.epoch
        assert epoch is not None
        edges = []
        for rank, peer in sorted(self._edges.items()):  # the parent has the lowest rank
            self._forget(peer)
            _limit_silence(peer.stream.socket)
            edges.append(ControlEdge(rank, peer.stream.socket, peer.stream.tls, peer.frames.rest()))
        return Membership(
            rank=self._entry.rank,
            world_size=self._entry.world_size,
            roster=epoch.roster,
            epoch_key=keys.epoch_key(epoch.epoch_secret, epoch.roster.digest),
            link_private_key=self._private_key,
            suite=epoch.suite,
            table=epoch.table,
            admitted_by=epoch.roster.admitted[self._entry.rank].how,
            edges=tuple(edges),
        )

    def _give_up(self, error: BaseException) -> None:
        """Tell the neighbours, so that nobody waits for a deadline to learn what is known here."""
        failure = self._failure or Failure(self._entry.rank, str(error) or type(error).__name__)
        for peer in self._edges.values():
            peer.send([failure])
            self._forget(peer)
            peer.stream.close()

    def _close_door(self) -> None:
        if self._listener is not None:
            self._listener.close()
        for peer in self._pending:
            peer.stream.close()
        self._selector.close()

    def _late(self) -> str:
        """What is known of who is missing, at the deadline."""
        entry, waiting = self._entry, self._tree.waiting
        missing, named = (waiting.missing, list(waiting.ranks)) if waiting else (0, [])
        if not waiting or self._parent is None:
            named = self._tree.missing()
            missing = len(named)
        parts = [f"run '{entry.run_id}', generation {entry.generation}, did not form within {self._timeout:g} s"]
        if self._parent is not None and self._parent not in self._edges:
            parts.append(
                f"rank {entry.rank} was not admitted by its parent, rank {self._parent} ({self._parent_trouble})"
            )
        if missing:
            ranks = ", ".join(map(str, named[:16])) + (", ..." if missing > len(named[:16]) else "")
            parts.append(f"{missing} of {entry.world_size} workers are missing: ranks {ranks}")
        parts += [f"rank {rank} {text}" for rank, text in sorted(self._refused_children.items())]
        parts.append("see that they run, hold the same secret, and can reach each other (RINGFENCE_INTERFACE)")
        return "; ".join(parts)


def _policy(settings: Settings) -> tuple[Policy, Prover]:
    """What admits to this run, and what this worker shows. Other kinds of proof come in here."""
    shared = SharedSecret(settings.secret, settings.run_id)
    return Policy((shared,)), shared


def _keep_alive(connection: socket.socket) -> None:
    """A silent host is noticed within 9 s, by its kernel: a busy Python is not silent."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def _limit_silence(connection: socket.socket) -> None:
    """Unacknowledged data ends the connection too. Only now, when all that is sent fits the kernel's buffers."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 9000)
