"""An agent's connection to the host of the store: dials it, proves itself, and dials again when the connection is lost."""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from ringfence import keys
from ringfence.admission import encoding
from ringfence.admission.handshake import Refusal
from ringfence.errors import EvidenceError, PeerLostError, ProtocolError
from ringfence.launch.agent_admission import AgentAdmission
from ringfence.launch.messages import FROM_HOST, AgentCall, Answer, CallResult, Notice, Operation, refused, to_json
from ringfence.session.join.background import Background
from ringfence.session.join.connections import Connections
from ringfence.session.join.peer import Peer
from ringfence.transport.outage import CHECK_SECONDS, OutageWatch, dial_briefly
from ringfence.transport.tcp import connect, resolve

_log = logging.getLogger(__name__)

_ATTACH: Final = 0  # the number of the call that attaches; others begin at 1
_FIRST_RETRY: Final = 0.05  # seconds; doubles up to
_LAST_RETRY: Final = 1.0
_SILENT_DIAL: Final = 10.0  # until a host that does not answer is reported


class HostLink:
    """Passes calls to the host, and its answers and notices to `deliver`.

    Calls that are in progress when the connection is lost are answered with LOST: whether the host carried them out is
    unknown. Calls that may wait are kept until the host is reached; those that may not are answered with LOST.
    """

    def __init__(
        self,
        *,
        endpoint: tuple[str, int],
        admission: AgentAdmission,
        attachment: dict[str, Any],
        connections: Connections,
        deliver: Callable[[Answer | Notice], None],
        outage: float,
    ) -> None:
        self._endpoint = endpoint
        self._attachment = attachment
        self._connections = connections
        self._deliver = deliver
        self._outage = outage
        self._outages = OutageWatch(
            outage, self._host, lambda _: None, lambda _: None, self._on_silence, lambda _: self._host_name()
        )
        self._check_at = 0.0
        self._handshakes = admission.handshakes(connections, self)
        self._background: Background[tuple[int, Any] | str] = Background()
        connections.add_source(self._background)
        self._peer: Peer | None = None  # the admitted connection
        self._attached = False
        self._sent: dict[int, AgentCall] = {}
        self._waiting: dict[int, tuple[AgentCall, float]] = {}
        self._dial_at, self._pause = 0.0, _FIRST_RETRY
        self._down_since = time.monotonic()
        self._warned = False
        self._problem = "it was not dialled yet"
        self._final = ""  # why this agent will not be admitted

    # -- what the agent's loop calls --------------------------------------------------------------------------------

    def send(self, call: AgentCall) -> None:
        """Pass a call to the host, now or once it is reached."""
        if self._final:
            self._deliver(refused(call.number, self._final))
        elif self._attached:
            self._pass_on(call)
        elif call.milliseconds:
            self._waiting[call.number] = call, time.monotonic() + call.milliseconds / 1000
        else:
            self._deliver(Answer(call.number, CallResult.LOST))

    def dispatch(self, key: selectors.SelectorKey, events: int) -> bool:
        """Handle an event of the connection or of background work; return whether it was one."""
        if key.data is self._background:
            for target in self._background.finished():
                self._dial(target)
        elif key.data is self._peer:
            self._serve(events)
        else:
            with self._final_without_proof():
                return self._handshakes.dispatch(key.data)
        return True

    def serve_pending(self, ready: list[tuple[Peer, int]]) -> None:
        with self._final_without_proof():
            self._handshakes.expire(self._handshakes.serve(ready))

    def settle(self, now: float) -> None:
        """Dial if that is due, and end waits."""
        for call, until in list(self._waiting.values()):
            if now >= until:
                del self._waiting[call.number]
                self._deliver(Answer(call.number, CallResult.TIMEOUT, (self._unreachable().encode(),)))
        if self._peer is None and now >= self._dial_at and not self._final:
            self._dial_at = float("inf")
            self._background.start("ringfence resolves", self._resolve)
        if self._peer is None and now >= self._down_since + _SILENT_DIAL:
            self._warn()
        if self._peer is not None and now >= self._check_at:
            self._check_at = now + CHECK_SECONDS
            self._outages.check()

    def next_at(self, now: float) -> float:
        moments = [until for _, until in self._waiting.values()]
        if self._peer is None and not self._final:
            moments.append(self._dial_at)
            if not self._warned:
                moments.append(self._down_since + _SILENT_DIAL)
        if self._peer is not None:
            moments.append(self._check_at)
        return min([float("inf"), *moments, *(now + left for left in self._handshakes.seconds_left())])

    is_left = True  # nobody needs this agent to stay

    def close(self) -> None:
        if self._peer is not None:
            self._peer.stream.close()
        self._handshakes.close()
        self._background.close()

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            _log.warning("%s; this agent keeps trying", self._unreachable())

    def _unreachable(self) -> str:
        text = f"the host of the store, {self._host_name()}, is not reached: {self._problem}"
        return encoding.escape(text, keys.REFUSAL_TEXT_BYTES)

    def _host_name(self) -> str:
        return f"node 0 at {self._endpoint[0]}:{self._endpoint[1]}"

    # -- dialling ---------------------------------------------------------------------------------------------------

    def _resolve(self) -> tuple[int, Any] | str:
        try:
            return resolve(*self._endpoint)
        except PeerLostError as error:
            return str(error)

    def _dial(self, target: tuple[int, Any] | str) -> None:
        if isinstance(target, str):
            self._retry(target)
            return
        try:
            connection = socket.socket(target[0], socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        except OSError as error:
            self._retry(error.strerror or str(error))
            return
        dial_briefly(connection)
        peer = self._handshakes.dial(connection, f"{self._endpoint[0]}:{self._endpoint[1]}", 0)
        with self._handshakes.drop_on_error(peer):
            connect(connection, target[1])

    def _retry(self, problem: str) -> None:
        self._problem = problem
        self._dial_at = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, _LAST_RETRY)

    @contextlib.contextmanager
    def _final_without_proof(self) -> Iterator[None]:
        """Give up if this machine gives no evidence."""
        try:
            yield
        except EvidenceError as error:
            self._fail(str(error))

    def _fail(self, reason: str) -> None:
        """Give up: all calls, also later ones, are refused."""
        self._final = reason
        calls = [*self._sent.values(), *(call for call, _ in self._waiting.values())]
        self._sent.clear()
        self._waiting.clear()
        for call in calls:
            self._deliver(refused(call.number, reason))

    # -- the connection ---------------------------------------------------------------------------------------------

    def _serve(self, events: int) -> None:
        assert self._peer is not None
        try:
            if events & selectors.EVENT_WRITE:
                self._peer.stream.flush()
            if events & selectors.EVENT_READ:
                self._peer.read()
                self._receive()
        except (ProtocolError, PeerLostError) as error:
            self._disconnect(str(error))
        self._watch()

    def _receive(self) -> None:
        while self._peer is not None and (message := self._peer.frames.next()) is not None:
            if isinstance(message, Answer) and message.number == _ATTACH:
                self._on_attached(message)
            elif isinstance(message, Answer) and self._sent.pop(message.number, None) is None:
                raise ProtocolError("an answer to no call")
            else:
                assert isinstance(message, Answer | Notice)
                self._deliver(message)

    def _on_attached(self, answer: Answer) -> None:
        if answer.result is not CallResult.OK:
            self._fail(f"the host of the store refused this agent: {answer.text}")
            return
        self._attached, self._warned, self._pause = True, False, _FIRST_RETRY
        waiting, self._waiting = self._waiting, {}
        for call, _ in waiting.values():
            self._pass_on(call)

    def _pass_on(self, call: AgentCall) -> None:
        assert self._peer is not None
        self._sent[call.number] = call
        self._peer.send([call])
        self._watch()

    def _watch(self) -> None:
        if self._peer is not None:
            write = selectors.EVENT_WRITE if self._peer.stream.wants_write else 0
            self._connections.set_events(self._peer, selectors.EVENT_READ | write)

    def _disconnect(self, reason: str) -> None:
        assert self._peer is not None
        _log.info("the connection to the host of the store is lost: %s", reason)
        self._connections.set_events(self._peer, 0)
        self._peer.stream.close()
        self._peer, self._attached = None, False
        self._down_since, self._warned = time.monotonic(), False
        self._retry(reason)
        sent, self._sent = self._sent, {}
        for number in sent:
            self._deliver(Answer(number, CallResult.LOST))

    # -- outages ----------------------------------------------------------------------------------------------------

    def _host(self) -> list[tuple[int, Peer, socket.socket]]:
        return [] if self._peer is None else [(0, self._peer, self._peer.stream.socket)]

    def _on_silence(self, _: int) -> None:
        self._disconnect(f"no answer for {self._outage:g} s (RINGFENCE_OUTAGE_TIMEOUT)")

    # -- events of the handshake ------------------------------------------------------------------------------------

    def is_reading(self) -> bool:
        return True

    def on_admitted(self, peer: Peer) -> None:
        self._connections.pending.remove(peer)
        peer.admit(0, FROM_HOST, keys.CALL_BYTES, self._outage)
        self._peer = peer
        peer.send([AgentCall(_ATTACH, Operation.ATTACH, parts=(to_json(self._attachment),))])
        try:
            self._receive()
        except (ProtocolError, PeerLostError) as error:
            self._disconnect(str(error))
        self._watch()

    def on_refused(self, peer: Peer, refusal: Refusal) -> str:
        action = "refused by" if refusal.by_peer else "refused"
        text = f"{action} it: {encoding.escape(refusal.text, 2 * keys.REFUSAL_TEXT_BYTES)}"
        if refusal.proven:
            self._problem = text
            self._fail(self._unreachable())
        return text

    def on_dropped(self, peer: Peer, reason: str, refusal: Refusal | None) -> None:
        """Dial again, whatever was refused, if this peer has not proved that it is the host."""
        if self._final:
            return
        self._retry(reason)
        if refusal is not None:
            self._warn()

    def on_no_proof(self, error: Exception) -> None:
        _log.warning("this agent could not collect a proof: %s", error)
