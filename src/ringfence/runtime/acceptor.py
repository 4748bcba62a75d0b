"""The acceptor of a worker: connections that have no link yet.

They are pending connections, peer verifications, and authenticated connections for a group that this worker has not created
yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ringfence.dataplane.endpoint import Stream
from ringfence.errors import AuthenticationError, ProtocolError, RingfenceError
from ringfence.keys import LINK_PENDING, LINK_PENDING_PER_ADDRESS
from ringfence.runtime.communicator import Communicator
from ringfence.runtime.events import LinkContext, PeerLink
from ringfence.runtime.links import Arrival, Link
from ringfence.runtime.peer_verification import LinkVerifier, PairScope, VerificationLink
from ringfence.runtime.pending import PendingConnection
from ringfence.runtime.registry import Communicators


class _RefusedLink(Link):
    """Tells the dialler of a destroyed group that the group is gone."""

    def work(self) -> None:
        """Do nothing: BYE has been sent."""


class Acceptor:
    """Accepts connections until a link takes them over, and runs the peer verifications that this worker starts."""

    def __init__(
        self, context: LinkContext, communicators: Communicators, peer_verifier: LinkVerifier | None = None
    ) -> None:
        self.peer_verifier = peer_verifier
        self.pending: set[PendingConnection] = set()
        self.verification_links: dict[int, VerificationLink] = {}  # in progress, by worker
        self.verified: set[int] = set()  # workers that this worker has presented its proof to
        self._context = context
        self._communicators = communicators
        self._parked: dict[bytes, list[Arrival]] = {}
        self._channels: Sequence[Callable[[Arrival], None]] = ()

    # -- channels ----------------------------------------------------------------------------------------------------

    @property
    def channels(self) -> int:
        """The number of channels that a dialler may name."""
        return 1 + len(self._channels)

    def pass_on(self, channels: Sequence[Callable[[Arrival], None]]) -> None:
        """Pass the authenticated connections of further channels on, from channel 1 on."""
        self._channels = channels

    def adopt(self, arrival: Arrival) -> None:
        """Take a connection over that another acceptor has authenticated. Raises as its link does."""
        if self._context.events.failed:
            arrival.stream.close()
            return
        try:
            self._deliver(arrival)
        except AuthenticationError:
            return  # closes only this connection

    # -- unauthenticated peers ---------------------------------------------------------------------------------------

    def accept(self, stream: Stream, address: str, is_local: bool = False) -> None:
        """Accept a connection. Above the limits, the oldest pending connection of the same address, or of all, is closed."""
        if self._context.events.failed:
            stream.close()
            return
        unauthenticated = [connection for connection in self.pending if connection.presenting_worker is None]
        same = [connection for connection in unauthenticated if connection.address == address]
        candidates = same if len(same) >= LINK_PENDING_PER_ADDRESS else unauthenticated
        if len(same) >= LINK_PENDING_PER_ADDRESS or len(unauthenticated) >= LINK_PENDING:
            min(candidates, key=lambda connection: (connection.known, connection.queued, connection.deadline)).close()
        connection = PendingConnection(self._context, self, stream, address, is_local)
        self.pending.add(connection)
        self._context.network.watch(stream, connection)
        connection.wake()

    def on_authenticated(self, connection: PendingConnection, arrival: Arrival) -> None:
        """Give the stream of an authenticated dialler to its link, or keep it until its group is created."""
        verifier, hello = self.peer_verifier, arrival.hello
        if verifier is not None and verifier.due(hello.sender) and not verifier.verified(hello.sender):
            self.pending.discard(connection)
            self._hang_up(arrival.stream)
            raise ProtocolError(f"worker {hello.sender} dialled a link before it had presented its proof")
        if hello.channel:
            self._context.network.forget(arrival.stream)
            self._channels[hello.channel - 1](arrival)
        self.pending.discard(connection)  # after it was passed on: the thread of its channel always finds it somewhere
        if not hello.channel:
            self._deliver(arrival)

    def _deliver(self, arrival: Arrival) -> None:
        hello = arrival.hello
        communicator = self._communicators.active.get(hello.group)
        if communicator is not None:
            self._hand_over(communicator, arrival)
        elif self._communicators.is_destroyed(hello.group):
            self._refuse(arrival)
        else:
            self._parked.setdefault(hello.group, []).append(arrival)

    def on_closed(self, connection: PendingConnection, worker: int | None) -> None:
        """Drop a closed connection. A worker that has left the run may be missed now, if this was its last dial."""
        self.pending.discard(connection)
        if worker is not None:
            self._context.events.call_soon(partial(self._context.events.check_departed, worker))

    def open(self, communicator: Communicator) -> None:
        """Hand over the connections of members that dialled a group before this worker created it."""
        while self._parked.get(communicator.digest):  # a failure closes the others
            arrival = self._parked[communicator.digest].pop(0)
            try:
                self._hand_over(communicator, arrival)
            except AuthenticationError:
                continue  # closes only this connection
            except RingfenceError as error:
                self._context.events.fail(error, arrival.hello.sender)
        self._parked.pop(communicator.digest, None)

    def _hand_over(self, communicator: Communicator, arrival: Arrival) -> None:
        hello, stream = arrival.hello, arrival.stream
        try:
            if hello.sender not in communicator.ranks:
                raise AuthenticationError(
                    f"worker {hello.sender} dialled group {communicator.name!r}, of which it is not a member"
                )
            link = communicator.reached_by(hello)
            if link.stream is not None:
                raise ProtocolError(f"worker {hello.sender} dialled the same link twice")
            self._context.network.watch(stream, link)
            link.attach(arrival)
        except BaseException:
            self._hang_up(stream)  # or the network would keep its file descriptor number
            raise

    def _refuse(self, arrival: Arrival) -> None:
        """Send BYE to the dialler of a destroyed group, as a link of that group would have done."""
        hello = arrival.hello
        link = _RefusedLink(self._context, PairScope(digest=hello.group, removed=True), hello.sender)
        link.attach(arrival._replace(memory=None))
        link.send_bye()

    def is_connecting(self, worker: int, lane: int, digest: bytes, channel: int = 0) -> bool:
        """Return whether a pending connection is for this worker, lane, group and channel. Any thread may call it."""
        return any(connection.is_for(worker, lane, digest, channel) for connection in tuple(self.pending))

    def _hang_up(self, stream: Stream) -> None:
        self._context.network.forget(stream)
        stream.close()

    # -- peer verification -------------------------------------------------------------------------------------------

    def may_dial(self, link: PeerLink) -> bool:
        """Return whether a link may be dialled. If not, verify its worker first; the link is dialled afterwards."""
        worker = link.worker
        if self.needs_no_verification(worker):
            return True
        verification = self.verification_links.get(worker)
        if verification is None:
            verification = self.verification_links[worker] = VerificationLink(self._context, worker, self)
            verification.dial()
        verification.waiting.append(link)
        return False

    def needs_no_verification(self, worker: int) -> bool:
        """Return whether a worker has been verified, or need not be. Any thread may call it."""
        return self.peer_verifier is None or worker in self.verified or not self.peer_verifier.due(worker)

    def replace_verification(self, link: VerificationLink) -> None:
        """Replace an earlier attempt to verify the same worker."""
        self.verification_links[link.worker] = link

    def on_verified(self, link: VerificationLink) -> None:
        """Dial the links that waited. Both sides have verified: the acceptor presents its proof only after it has."""
        self.verified.add(link.worker)
        del self.verification_links[link.worker]
        for waiting in link.waiting:
            self._context.events.call_soon(waiting.dial)  # later, so that a local OSError is not blamed on that worker

    def on_presentation(self, worker: int) -> None:
        """Close older connections on which this worker presented its proof: it has abandoned them."""
        for connection in [each for each in self.pending if each.presenting_worker == worker]:
            connection.close()

    # -- closing -----------------------------------------------------------------------------------------------------

    def expire(self, now: float) -> None:
        """Close silent connections. A connection with unread bytes is served first: this worker may have been stopped."""
        for connection in [each for each in self.pending if each.deadline <= now and not each.queued]:
            connection.close()

    def close(self) -> None:
        """Close all connections that have no link, and end the peer verifications."""
        for verification in self.verification_links.values():
            verification.close()
        for connection in list(self.pending):
            connection.close()
        for waiting in self._parked.values():
            for arrival in waiting:
                self._hang_up(arrival.stream)
        self._parked.clear()

    def forget(self) -> list[Stream]:
        """Drop keys and policy in a forked child; return the streams whose descriptors are to be closed."""
        streams = [arrival.stream for parked in self._parked.values() for arrival in parked]
        open_connections: list[PendingConnection | VerificationLink] = [
            *self.pending,
            *self.verification_links.values(),
        ]
        streams += [each.stream for each in open_connections if each.stream is not None]
        for each in open_connections:
            each.stream = None  # its descriptor number will be reused
            each.forget()
        self.peer_verifier = None  # it holds the policy
        self._parked.clear()
        self.pending.clear()
        self.verification_links.clear()
        return streams
