"""Join a run: publish an address, dial the parent, let the children in, come back with a roster.

    membership.py    what a worker comes back with
    join_loop.py         the loop: one selectors loop in the calling thread does all of it
    credentials.py      what it verifies by and shows, and the keys in it
    listener.py      where others reach this worker
    beside.py        what may block, out of the loop's way: the store, the resolver, devices and services
    collect.py       this worker's own evidence, which may take a while
    verification.py  peers' proofs, verified beside the loop
    shares.py        CPU time of unauthenticated peers, shared by address
    parent.py        where the parent is, when to try again, when to give up
    refusals.py      children that refuse this worker, and when that is final
    waiting.py       what a join waits for, in words
    peer.py          one connection, from unauthenticated peer to neighbour

What the store says is only where to try: an address in it may be old, wrong or hostile. Who answers there is settled by
admission. Who fails it costs an attempt and gets nothing. Only who answers for the parent itself, and keeps failing or
refusing for some seconds without a break, ends the join: a store can do that by the address it names, as it can by naming none.
"""

from __future__ import annotations

from ringfence.join.listener import listen
from ringfence.join.loop import join
from ringfence.join.membership import Membership
from ringfence.join.parent import Store

__all__ = ["Membership", "Store", "join", "listen"]
