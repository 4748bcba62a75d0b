"""The acceptor of a worker: everybody who has no link yet.

Pending connections: unauthenticated peers, workers under peer verification, workers that dialled a group before it was made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from ringfence.errors import AuthenticationError, ProtocolError, RingfenceError
from ringfence.keys import LINK_PENDING, LINK_PENDING_PER_ADDRESS
from ringfence.runtime.connection import Inbox
from ringfence.runtime.peer_verification import Pair, PeerVerifier, VerificationLink
from ringfence.runtime.pending import PendingConnection

if TYPE_CHECKING:
    from ringfence.dataplane.endpoint import Stream
    from ringfence.link.hello import Hello, LinkSecrets
    from ringfence.runtime.communicator import Communicator
    from ringfence.runtime.connection import Link
    from ringfence.runtime.engine import Engine


class Acceptor:
    """Who comes to one worker in one session, and whom it calls on, until a link has them."""

    def __init__(self, engine: Engine, peer_verifier: PeerVerifier | None) -> None:
        self.peer_verifier = peer_verifier
        self.pending: set[PendingConnection] = set()
        self.verification_links: dict[int, VerificationLink] = {}  # under way
        self.met: set[int] = set()  # those to whom this worker has introduced itself
        self._engine = engine
        self._parked: dict[bytes, list[tuple[Hello, Stream, LinkSecrets]]] = {}

    # -- unauthenticated peers ------------------------------------------------------------------------------------------

    def accept(self, stream: Stream, address: str) -> None:
        """Somebody dialled. A flood of unauthenticated peers costs itself its oldest connections, nobody else's."""
        if self._engine.failure is not None:  # the memory of what was pending is no longer ours
            stream.close()
            return
        unauthenticated_peers = [connection for connection in self.pending if connection.verifies_peer is None]
        same = [connection for connection in unauthenticated_peers if connection.address == address]
        crowd = same if len(same) >= LINK_PENDING_PER_ADDRESS else unauthenticated_peers
        if len(same) >= LINK_PENDING_PER_ADDRESS or len(unauthenticated_peers) >= LINK_PENDING:
            min(crowd, key=lambda connection: (connection.known, connection.queued, connection.deadline)).close()
        connection = PendingConnection(self._engine, stream, address)
        self.pending.add(connection)
        self._engine.network.watch(stream, connection)
        connection.wake()

    def admitted(self, connection: PendingConnection, stream: Stream, hello: Hello, secrets: LinkSecrets) -> None:
        """A dialler has shown that it is who it says."""
        self.pending.discard(connection)
        known = self.peer_verifier
        if known is not None and known.due(hello.sender) and not known.verified(hello.sender):
            self._hang_up(stream)
            raise ProtocolError(f"worker {hello.sender} dialled a link before it had shown its proof")
        communicator = self._engine.communicators.get(hello.group)
        if communicator is not None:
            self._hand_over(communicator, hello, stream, secrets)
        elif hello.group in self._engine.past:
            self._turn_away(hello, stream, secrets)
        else:
            self._parked.setdefault(hello.group, []).append((hello, stream, secrets))

    def open(self, communicator: Communicator) -> None:
        """This worker has made a group: those who dialled it early are let through."""
        while self._parked.get(communicator.digest):  # a failure hangs up on the rest
            hello, stream, secrets = self._parked[communicator.digest].pop(0)
            try:
                self._hand_over(communicator, hello, stream, secrets)
            except AuthenticationError:
                continue  # as in the pending connection: it costs the unauthenticated peer its connection
            except RingfenceError as error:
                self._engine.fail(error, hello.sender)
        self._parked.pop(communicator.digest, None)

    def _hand_over(self, communicator: Communicator, hello: Hello, stream: Stream, secrets: LinkSecrets) -> None:
        try:
            if hello.sender not in communicator.ranks:
                raise AuthenticationError(
                    f"worker {hello.sender} dialled group {communicator.name!r}, which it is not in"
                )
            link = communicator.reached_by(hello)
            if link.stream is not None:
                raise ProtocolError(f"worker {hello.sender} dialled the same link twice")
            self._engine.network.watch(stream, link)
            link.attach(stream, secrets)
        except BaseException:
            self._hang_up(stream)  # or the network would keep its number, which will be somebody else's
            raise

    def _turn_away(self, hello: Hello, stream: Stream, secrets: LinkSecrets) -> None:
        """It dialled a group that this worker has destroyed: it hears what it would have heard on a link of it."""
        link = Inbox(self._engine, cast("Communicator", Pair((hello.sender,), hello.group, removed=True)), 0)
        link.attach(stream, secrets)
        link.say_bye()

    def hears(self, link: Link) -> bool:
        """Whether somebody who has said who it is is about to reach this link."""
        return any(connection.dials(link) for connection in self.pending)

    def _hang_up(self, stream: Stream) -> None:
        self._engine.network.forget(stream)
        stream.close()

    # -- peer verifications -----------------------------------------------------------------------------------------------

    def is_verified(self, link: Link) -> bool:
        """Whether the two ends of a link know each other. If not, they are introduced, and then it is dialled."""
        worker = link.worker
        if self.peer_verifier is None or worker in self.met or not self.peer_verifier.due(worker):
            return True
        peer_verification = self.verification_links.get(worker)
        if peer_verification is None:
            peer_verification = self.verification_links[worker] = VerificationLink(self._engine, worker)
            peer_verification.dial()
        peer_verification.waiting.append(link)
        return False

    def verify_by(self, peer_verification: VerificationLink) -> None:
        """This one takes the place of an earlier attempt."""
        self.verification_links[peer_verification.worker] = peer_verification

    def on_verified(self, peer_verification: VerificationLink) -> None:
        """Both have verified: the acceptor shows its proof only to those who pass."""
        self.met.add(peer_verification.worker)
        del self.verification_links[peer_verification.worker]
        for link in peer_verification.waiting:
            self._engine.call_soon(link.dial)  # not in that worker's turn: what this machine refuses is not its fault

    def peer_presented(self, worker: int) -> None:
        """A worker begins to show its proof. It has one connection for that: an older one is what it gave up."""
        for connection in [each for each in self.pending if each.verifies_peer == worker]:
            connection.close()

    # -- the end -----------------------------------------------------------------------------------------------------

    def expire(self, now: float) -> None:
        """Hang up on the silent. Who has said something is heard first: it was this worker that was late, if it was stopped."""
        for connection in [each for each in self.pending if each.deadline <= now and not each.queued]:
            connection.close()

    def close(self) -> None:
        """Hang up on those who dialled and have no link yet, or they would wait for an answer; and introduce nobody."""
        for peer_verification in self.verification_links.values():
            peer_verification.close()
        for connection in list(self.pending):
            connection.close()
        for waiting in self._parked.values():
            for _, stream, _ in waiting:
                self._hang_up(stream)
        self._parked.clear()

    def forget(self) -> list[Stream]:
        """In a forked child: everybody is the parent's. The streams whose descriptors are to be closed."""
        streams = [stream for parked in self._parked.values() for _, stream, _ in parked]
        known: list[PendingConnection | VerificationLink] = [*self.pending, *self.verification_links.values()]
        streams += [each.stream for each in known if each.stream is not None]
        for each in known:
            each.stream = None  # its number will be somebody else's
            each.forget()
        self.peer_verifier = None  # and with them the policy
        self._parked.clear()
        self.pending.clear()
        self.verification_links.clear()
        return streams
