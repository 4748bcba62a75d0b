"""The compiled module as an object: each copy has its own state and types, is freed with them, and uses the stable ABI."""

from __future__ import annotations

import gc
import importlib.util
import socket
import weakref
from collections import deque
from typing import Any

import pytest

from ringfence.dataplane import _core

TYPES = ("Segment", "SegmentSlice", "Pool", "Program", "Endpoint", "Execution")


def another_copy() -> Any:
    """Load the module again from its file."""
    spec = importlib.util.spec_from_file_location("ringfence.dataplane._core", _core.__file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def collect() -> None:
    """Collect garbage: first objects in cycles, then the module that their pool kept alive."""
    gc.collect()
    gc.collect()


def test_each_copy_of_the_module_has_its_own_types() -> None:
    other = another_copy()
    assert [name for name in TYPES if getattr(other, name) is getattr(_core, name)] == []


def test_objects_of_one_copy_are_refused_by_another() -> None:
    other = another_copy()
    with pytest.raises(TypeError):
        other.Endpoint(deque(), set(), _core.Pool())
    with pytest.raises(TypeError, match="takes a Segment"):
        other.Pool().give(_core.Pool().take())
    with pytest.raises(TypeError, match="not an initialized Endpoint"):
        other.send(_core.Endpoint(deque(), set(), _core.Pool()))
    program = _core.compile((), (), (), (), (), (), 0)
    with pytest.raises(TypeError):
        other.Execution(None, program, 1, bytes(24), [], None, None, None, 0, len, 0, bytes(16), other.Pool(), 1)


def test_a_copy_is_freed_with_its_types_and_objects() -> None:
    module = another_copy()

    class Derived(module.Endpoint):  # type: ignore[misc,name-defined]
        pass

    pool = module.Pool()
    end = Derived(deque(), set(), pool)
    end.itself = end
    pool.give(pool.take())
    watched = [weakref.ref(thing) for thing in (module, Derived, *(getattr(module, name) for name in TYPES))]
    del module, Derived, pool, end
    collect()
    assert [reference() for reference in watched] == [None] * len(watched)


def one_object(kind: str) -> tuple[Any, weakref.ref[Any]]:
    """Return an object of a copy of the module, and a weak reference to that copy, which nothing else refers to."""
    module = another_copy()
    pool = module.Pool()
    made = {"segment": pool.take(), "pool": pool, "end": module.Endpoint(deque(), set(), pool)}[kind]
    return made, weakref.ref(module)


def test_a_segment_keeps_the_module_it_needs() -> None:
    segment, module = one_object("segment")
    collect()
    assert module() is not None and len(segment.view) > 0
    del segment
    collect()
    assert module() is None


def test_a_pool_keeps_the_module_it_needs() -> None:
    pool, module = one_object("pool")
    collect()
    pool.give(pool.take())
    assert module() is not None
    del pool
    collect()
    assert module() is None


def test_an_endpoint_keeps_the_module_it_needs() -> None:
    end, module = one_object("end")
    collect()
    end.notify(True, True)
    assert module() is not None and end.flush()
    del end
    collect()
    assert module() is None


@pytest.mark.parametrize("name", TYPES)
def test_the_types_cannot_be_changed(name: str) -> None:
    kind = getattr(_core, name)
    with pytest.raises(TypeError, match="immutable"):
        kind.changed = True
    with pytest.raises(TypeError):
        object.__new__(kind)


def test_an_object_cannot_be_given_another_type() -> None:
    class Other:
        pass

    pool = _core.Pool()
    with pytest.raises(TypeError):
        pool.__class__ = Other
    for name in set(TYPES) - {"Endpoint"}:
        with pytest.raises(TypeError, match="not an acceptable base type"):
            type("Derived", (getattr(_core, name),), {})


def test_release_gil_takes_a_truth_value() -> None:
    class Undecided:
        def __bool__(self) -> bool:
            raise ValueError("undecided")

    for on in (True, False):
        _core.release_gil(on)
    with pytest.raises(ValueError, match="undecided"):
        _core.release_gil(Undecided())


@pytest.mark.parametrize("on", [True, False])
def test_large_pieces_pass_through_a_socket_with_and_without_the_gil(on: bool) -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours, theirs:
        _core.release_gil(on)
        try:
            blocked: set[Any] = set()
            end = _core.Endpoint(deque(), blocked, _core.Pool())
            end.stream, end.writable = ours, True
            data, received = bytes(range(256)) * 4096, bytearray()
            end.put(memoryview(data))
            while not end.flush():
                assert end in blocked
                received += theirs.recv(1 << 20)
                end.writable = True
            while len(received) < len(data):
                received += theirs.recv(1 << 20)
        finally:
            _core.release_gil(False)
    assert received == data and not blocked


def test_an_uninitialised_endpoint_is_refused() -> None:
    bare = _core.Endpoint.__new__(_core.Endpoint)
    for use in (
        bare.wake,
        bare.flush,
        lambda: bare.notify(True, True),
        lambda: bare.put(b""),
        lambda: _core.send(bare),
    ):
        with pytest.raises(TypeError, match="not an initialized Endpoint"):
            use()
