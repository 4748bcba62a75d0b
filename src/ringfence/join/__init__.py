"""Join a run: publish an address, dial the parent, let the children in, come back with a roster.

    membership.py  what a worker comes back with
    climb.py       the loop: one selectors loop in the calling thread does all of it
    listener.py    where others reach this worker
    collect.py     this worker's own evidence, which may take a while
    parent.py      where the parent is, when to try again, when to give up
    peer.py        one connection, from stranger to neighbour

What the store says is only where to try: an address in it may be old, wrong or hostile. Who answers there is settled by
admission, and nobody who fails it can end the join.
"""

from __future__ import annotations

from ringfence.join.climb import join
from ringfence.join.listener import listen
from ringfence.join.membership import Membership
from ringfence.join.parent import Store

__all__ = ["Membership", "Store", "join", "listen"]
