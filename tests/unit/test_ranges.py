"""Ranges of torch.profiler: a range ends with its collective, but never after its profile."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import torch
from torch.profiler import profile

from ringfence.backend import ranges


def open_range() -> tuple[Any, Any]:
    """Return a request whose range is open, and the future that ends the range."""
    request, before = SimpleNamespace(on_end=None), set(ranges._open)
    ranges._open_range("all_reduce", request, [torch.ones(3)])  # type: ignore[arg-type]
    (ended,) = ranges._open - before
    return request, ended


def test_a_range_ends_with_its_collective() -> None:
    with profile() as done:
        request, ended = open_range()
        request.on_end()
        request.on_end()  # an interrupted end is repeated
        assert ended.done()
    (event,) = [event for event in done.events() if event.name == "ringfence:all_reduce"]
    assert event.time_range.end >= event.time_range.start and not ranges._open


def test_a_range_stays_open_if_its_profile_ends_first() -> None:
    """torch has freed the range's event by then: ending the range, or deleting it, would write to that memory."""
    with profile() as done:
        request, ended = open_range()
    del done
    gc.collect()
    with profile():  # another one does not make it safe
        request.on_end()
    assert not ended.done() and ended in ranges._left_open and not ranges._open
