"""Join a run: publish an address, dial the parent, admit the children, return with the roster and the session's keys.

    loop.py            join(): one selector loop in the calling thread
    handshakes.py      pending connections, from TLS to mutual admission
    pending_limits.py  how many there may be, and which one is dropped
    connections.py     pending connections and neighbours under one selector
    peer.py            one connection
    dialler.py         dials the parent
    parent.py          where the parent is, when to dial again, when its refusal is final
    listener.py        listens on the interface and ports of the settings, and for workers of this machine
    collect.py         this worker's own proofs, collected in the background
    verification.py    peers' proofs, verified in the background
    cpu_shares.py      CPU time of unauthenticated peers, shared between addresses
    background.py      threads for what may block: the store, the resolver, devices and services
    credentials.py     policy and credentials of a join
    provers.py         from settings to a policy and a prover
    diagnostics.py     what a join waits for, for warnings and errors
    membership.py      the result

The store's addresses are hints: they may be stale, wrong or hostile. Admission decides about the peer at an address. A peer
that fails it costs one attempt and learns nothing, and no refusal of a peer that has proved nothing ends the join.
"""

from __future__ import annotations

from ringfence.session.join.listener import listen
from ringfence.session.join.loop import join
from ringfence.session.join.membership import Membership
from ringfence.session.join.parent import Store

__all__ = ["Membership", "Store", "join", "listen"]
