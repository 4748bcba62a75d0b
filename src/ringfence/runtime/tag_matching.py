"""Tag matching: the point-to-point links of a communicator, and the receives that accept any source."""

from __future__ import annotations

from collections import deque

from ringfence.errors import PeerLostError
from ringfence.runtime.events import CollectiveScope, LinkContext
from ringfence.runtime.point_to_point import PointToPointLink, Transfer


class TagMatcher:
    """The point-to-point links of a communicator, and the receives that accept any source."""

    def __init__(self, context: LinkContext, scope: CollectiveScope) -> None:
        self._context = context
        self._scope = scope
        self._senders: dict[int, PointToPointLink] = {}
        self._receivers: dict[int, PointToPointLink] = {}
        self._any: dict[int, deque[Transfer]] = {}

    def send(self, transfer: Transfer, peer: int) -> None:
        """Submit a send to a peer."""
        link = self._senders.get(peer)
        if link is None:
            link = self._senders[peer] = PointToPointLink(self._context, self._scope, peer, self.match_any)
            link.dial()
        link.post_send(transfer)

    def receive(self, transfer: Transfer, peer: int | None) -> None:
        """Submit a receive from a peer, or from any source if `peer` is None."""
        if peer is not None:
            self.receiver(peer).post_recv(transfer)
            return
        tag = transfer.call.tag
        self._any.setdefault(tag, deque()).append(transfer)
        for link in self._receivers.values():
            self.match_any(link, tag)
        self.check_senders()

    def check_senders(self) -> None:
        """Raise PeerLostError if a receive accepts any source and all other members have left.

        A worker that left has nothing on its way: its payloads would have been requested.
        """
        waiting = next((queue[0] for queue in self._any.values() if queue), None)
        others = {*self._scope.ranks} - {self._context.rank}
        if waiting is not None and others <= self._context.departed:
            raise PeerLostError(
                f"{waiting.describe()} accepts any source, and no other member of group {self._scope.name!r} is left"
            )

    def receiver(self, peer: int) -> PointToPointLink:
        """Return the link on which payloads of a peer arrive."""
        link = self._receivers.get(peer)
        if link is None:
            link = self._receivers[peer] = PointToPointLink(self._context, self._scope, peer, self.match_any)
        return link

    def match_any(self, link: PointToPointLink, tag: int) -> None:
        """Match unclaimed offers with receives that accept any source."""
        waiting = self._any.get(tag)
        while waiting and link.offers.get(tag, 0) > link.next_recv.get(tag, 0):
            link.post_recv(waiting.popleft())

    def links(self) -> list[PointToPointLink]:
        return [*self._senders.values(), *self._receivers.values()]
