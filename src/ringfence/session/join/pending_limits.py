"""Limits on the number of pending connections: which one is dropped when there are too many."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Sequence

from ringfence import keys
from ringfence.admission.binding import Role
from ringfence.session.join.peer import Peer


def excess(pending: Sequence[Peer], newcomer: Peer) -> tuple[Peer, str] | None:
    """Return the accepted connection to drop after `newcomer` was added or its hello was accepted, and why.

    Connections whose hello was accepted and those without one have separate limits. Among those without, the oldest is
    dropped: a child sends its hello within milliseconds, and must not be displaced by peers that wait for a verdict. Among the
    others, a random one of the address with the most connections is dropped: a child's evidence may take seconds, and any
    peer can send a valid hello, so dropping the oldest would let a crowd displace every child that still collects.
    """
    if len(pending) <= min(keys.ADMISSION_PENDING, keys.ADMISSION_PENDING_PER_ADDRESS):
        return None
    peers = [
        each
        for each in pending
        if each.handshake.role is Role.PARENT  # accepted, not dialled
        and each.hello_accepted is newcomer.hello_accepted
        and not each.proof_accepted
    ]
    if newcomer.hello_accepted:
        if len(peers) > keys.ADMISSION_PENDING:
            largest, _ = Counter(each.address for each in peers).most_common(1)[0]
            return secrets.choice([each for each in peers if each.address == largest]), "too many pending connections"
        return None
    same = [each for each in peers if each.address == newcomer.address]
    if len(same) > keys.ADMISSION_PENDING_PER_ADDRESS:
        return same[0], "too many pending connections from one address"
    if len(peers) > keys.ADMISSION_PENDING:
        return peers[0], "too many pending connections"
    return None
