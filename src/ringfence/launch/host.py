"""The host of the store: admits other agents over TLS, and serves their calls and those of its own agent."""

from __future__ import annotations

import contextlib
import itertools
import logging
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from typing import Final

from ringfence import keys
from ringfence.admission import encoding
from ringfence.admission.handshake import Refusal
from ringfence.errors import EvidenceError, PeerLostError, ProtocolError
from ringfence.launch.agent_admission import AgentAdmission
from ringfence.launch.messages import TO_HOST, AgentCall, Answer, Notice
from ringfence.launch.store_state import Outgoing, StoreState
from ringfence.session.join.connections import Connections
from ringfence.session.join.peer import Peer
from ringfence.transport.outage import CHECK_SECONDS, OutageWatch
from ringfence.transport.tcp import EXHAUSTED
from ringfence.transport.tcp import refusal as refusal_text

_log = logging.getLogger(__name__)

OWN: Final = 0  # the client number of the host's own agent
_EXHAUSTED_SECONDS: Final = 1.0
_WARN_SECONDS: Final = 10.0  # between warnings of refused peers: any peer can claim to be of this run


class Host:
    """Serves a `StoreState`. With `admission` and a listener, also to agents of other machines."""

    def __init__(
        self,
        state: StoreState,
        connections: Connections,
        deliver: Callable[[Answer | Notice], None],
        admission: AgentAdmission | None = None,
        listener: socket.socket | None = None,
        outage: float = keys.OUTAGE_SECONDS,
    ) -> None:
        """`outage`: seconds without an answer until an agent is lost."""
        self.state = state
        self._outage = outage
        self._outages = OutageWatch(
            outage, self._agents, self._on_outage, lambda _: None, self._on_silence, self._name_of
        )
        self._check_at = 0.0
        self._connections = connections
        self._deliver = deliver
        self._peers: dict[int, Peer] = {}
        self._last = OWN
        self._warn_at = 0.0
        self._listener = listener
        self._accept_at = float("inf")  # when to accept again, after this machine had no descriptors left
        self._handshakes = None if admission is None else admission.handshakes(connections, self)
        if admission is not None:
            self._ranks = frozenset(range(1, admission.hello.entry.world_size))
        if listener is not None:
            connections.add_source(listener)

    # -- what the agent's loop calls --------------------------------------------------------------------------------

    def send(self, call: AgentCall) -> None:
        """Carry out a call of the host's own agent."""
        self._carry_out(OWN, call)

    def dispatch(self, key: selectors.SelectorKey, events: int) -> bool:
        """Handle an event of the listener, an admitted agent or background work; return whether it was one."""
        source = key.data
        if source is self._listener:
            self._accept()
        elif isinstance(source, Peer) and source.rank is not None:
            self._serve(source, events)
        else:
            with self._logged_without_proof():
                return self._handshakes is not None and self._handshakes.dispatch(source)
        return True

    def serve_pending(self, ready: list[tuple[Peer, int]]) -> None:
        """Handle events of unauthenticated peers, within a slice of CPU time."""
        if self._handshakes is not None:
            with self._logged_without_proof():
                self._handshakes.expire(self._handshakes.serve(ready))

    def settle(self, now: float) -> None:
        """Do what is due."""
        if now >= self.state.next_at():
            self._send_all(self.state.tick(now))
        if self._peers and now >= self._check_at:
            self._check_at = now + CHECK_SECONDS
            self._outages.check()
        if now >= self._accept_at and self._listener is not None:
            self._accept_at = float("inf")
            self._connections.set_events(self._listener, selectors.EVENT_READ)

    def next_at(self, now: float) -> float:
        """Return when `settle` or `serve_pending` has something to do."""
        pending = [] if self._handshakes is None else self._handshakes.seconds_left()
        check = self._check_at if self._peers else float("inf")
        return min([self.state.next_at(), self._accept_at, check, *(now + left for left in pending)])

    @property
    def is_left(self) -> bool:
        """Whether no other agent needs this host any more."""
        return self.state.rounds.is_left

    def close(self) -> None:
        for peer in list(self._peers.values()):
            peer.stream.close()
        if self._handshakes is not None:
            self._handshakes.close()
        if self._listener is not None:
            self._listener.close()

    # -- admitted agents --------------------------------------------------------------------------------------------

    def _serve(self, peer: Peer, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                peer.stream.flush()
            if events & selectors.EVENT_READ:
                peer.read()
                self._receive(peer)
        except (ProtocolError, PeerLostError) as error:
            self._disconnect(peer, str(error))
        else:
            self._watch(peer)

    def _receive(self, peer: Peer) -> None:
        assert peer.rank is not None
        while peer.rank in self._peers and (message := peer.frames.next()) is not None:
            assert isinstance(message, AgentCall)
            self._carry_out(peer.rank, message)

    def _carry_out(self, client: int, call: AgentCall) -> None:
        self._send_all(self.state.call(client, call, time.monotonic()))

    def _send_all(self, outgoing: list[Outgoing]) -> None:
        for client, messages in itertools.groupby(outgoing, key=lambda each: each[0]):
            if client == OWN:
                for _, message in messages:
                    self._deliver(message)
            elif client in self._peers:
                self._peers[client].send(message for _, message in messages)
                self._watch(self._peers[client])
        for client in self.state.rounds.take_stale():
            if client in self._peers:
                self._disconnect(self._peers[client], "it has to be verified again for the next round")

    def _watch(self, peer: Peer) -> None:
        if peer.rank in self._peers:
            write = selectors.EVENT_WRITE if peer.stream.wants_write else 0
            self._connections.set_events(peer, selectors.EVENT_READ | write)

    def _disconnect(self, peer: Peer, reason: str, *, lost: bool = False) -> None:
        assert peer.rank is not None
        if self._peers.pop(peer.rank, None) is None:
            return
        _log.info("the agent at %s disconnected: %s", peer.address, reason)
        self._connections.set_events(peer, 0)
        peer.stream.close()
        self._send_all(self.state.disconnect(peer.rank, time.monotonic(), f"{peer.address}: {reason}", lost=lost))

    # -- outages ----------------------------------------------------------------------------------------------------

    def _agents(self) -> list[tuple[int, Peer, socket.socket]]:
        return [(client, peer, peer.stream.socket) for client, peer in self._peers.items()]

    def _name_of(self, client: int) -> str:
        return f"node {self.state.rounds.rank_of(client)} at {self._peers[client].address}"

    def _on_outage(self, peer: Peer) -> None:
        """Send something: the kernel repeats it until there is an answer, so both sides know when the outage is over."""
        peer.send([self.state.rounds.notice])
        self._watch(peer)

    def _on_silence(self, client: int) -> None:
        text = f"no answer for {self._outage:g} s (RINGFENCE_OUTAGE_TIMEOUT)"
        self._disconnect(self._peers[client], text, lost=True)

    # -- unauthenticated peers --------------------------------------------------------------------------------------

    def _accept(self) -> None:
        assert self._listener is not None
        assert self._handshakes is not None
        try:
            connection, (address, *_) = self._listener.accept()
        except OSError as error:
            if error.errno in EXHAUSTED:  # the listener stays readable: pause
                _log.warning("cannot accept connections of agents: %s", refusal_text(error))
                self._connections.set_events(self._listener, 0)
                self._accept_at = time.monotonic() + _EXHAUSTED_SECONDS
            return
        self._handshakes.accept(connection, address, self._ranks)

    @contextlib.contextmanager
    def _logged_without_proof(self) -> Iterator[None]:
        """Log that this machine gives no evidence, and stay: agents that are admitted need this host."""
        try:
            yield
        except EvidenceError as error:
            self.on_no_proof(error)

    def is_reading(self) -> bool:
        return True

    def on_admitted(self, peer: Peer) -> None:
        self._connections.pending.remove(peer)
        self._last += 1
        peer.admit(self._last, TO_HOST, keys.CALL_BYTES, self._outage)
        self._peers[self._last] = peer
        self.state.rounds.admit(self._last)
        _log.info("admitted the agent at %s", peer.address)
        try:
            self._receive(peer)  # what arrived meanwhile
        except (ProtocolError, PeerLostError) as error:
            self._disconnect(peer, str(error))
        else:
            self._watch(peer)

    def on_refused(self, peer: Peer, refusal: Refusal) -> str:
        action = "refused by" if refusal.by_peer else "refused"
        text = f"{action} the agent at {peer.address}: {encoding.escape(refusal.text, 2 * keys.REFUSAL_TEXT_BYTES)}"
        now = time.monotonic()
        if refusal.proven:
            self._send_all(self.state.close(text, now))
        if refusal.same_run and now >= self._warn_at:  # claims to be of this run; others are noise
            self._warn_at = now + _WARN_SECONDS
            _log.warning("%s", text)
        return text

    def on_dropped(self, peer: Peer, reason: str, refusal: Refusal | None) -> None:
        _log.debug("dropped the peer at %s: %s", peer.address, reason)

    def on_no_proof(self, error: Exception) -> None:
        _log.warning("this agent could not collect a proof for another one: %s", error)
