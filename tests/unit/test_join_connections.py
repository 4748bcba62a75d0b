"""The sources of a join's selector: which events each is selected for."""

from __future__ import annotations

import selectors
import socket

from ringfence.session.join.connections import Connections

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


def test_each_source_is_selected_for_its_last_events() -> None:
    one, other = socket.socketpair()
    with one, other:
        connections = Connections()
        connections.set_events(one, 0)  # of an agent that is lost before it was ever selected for
        for events, ready in ((WRITE, WRITE), (READ | WRITE, WRITE), (READ, 0), (0, 0), (WRITE, WRITE)):
            connections.set_events(one, events)
            found = connections.wait(0.0)
            assert [(key.data, seen) for key, seen in found] == ([(one, ready)] if ready else [])
        connections.forget()
