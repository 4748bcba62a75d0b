"""Errors of the compiled data plane: reused descriptors, streams with invalid results, reentrant calls.

Under scripts/sanitize, the address sanitizer fails every test that reads or writes freed memory.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from ringfence.collectives.schedule import Action, Step
from ringfence.dataplane import _core, buffers, endpoint
from ringfence.link.frames import FRAME_BYTES, HEADER_BYTES

# -- sockets that others close -------------------------------------------------------------------------------------------


def reuse(number: int) -> tuple[socket.socket, socket.socket]:
    """Return a pair of sockets, one of which has this descriptor number."""
    for _ in range(100):
        pair = socket.socketpair()
        if number in (pair[0].fileno(), pair[1].fileno()):
            return pair
    raise AssertionError("the number was not given out again")


@pytest.mark.promise("A frame is never written to a socket that reuses the descriptor of a closed one.")
@pytest.mark.parametrize("plane", [_core.Endpoint, endpoint.Endpoint], ids=["compiled", "python"])
def test_a_frame_is_not_written_to_a_reused_descriptor(plane: Any) -> None:
    here, there = socket.socketpair()
    end = plane(deque(), set(), _core.Pool() if plane is _core.Endpoint else buffers.Pool())
    end.stream, end.writable = here, True
    number = here.fileno()
    here.close()
    others = reuse(number)
    with there, others[0], others[1]:
        end.put(memoryview(b"a sealed frame"))
        with pytest.raises(OSError, match="Bad file descriptor"):
            end.flush()
        for other in others:
            other.setblocking(False)
            with pytest.raises(BlockingIOError):
                other.recv(100)


def test_nothing_is_read_from_a_reused_descriptor() -> None:
    here, there = socket.socketpair()
    end, _ = receiver(here)
    number = here.fileno()
    here.close()
    others = reuse(number)
    with there, others[0], others[1]:
        for other in others:
            other.send(b"not for a link")
        with pytest.raises(OSError, match="Bad file descriptor"):
            _core.receive(end)
        assert [other.recv(100) for other in others] == [b"not for a link"] * 2


# -- errors --------------------------------------------------------------------------------------------------------------


class Raises:
    def __bool__(self) -> bool:
        raise LookupError("no truth")


class Counter:
    """A sealer or opener, as far as a frame's header needs one."""

    counter = 0


class Stream:
    """A stream whose methods return what the test sets."""

    def __init__(self, moves: Callable[[Any], Any]) -> None:
        self.send = self.recv_into = moves


class Receiver(_core.Endpoint):  # type: ignore[misc,name-defined]
    def length_of_other(self, header: bytes) -> int:
        return FRAME_BYTES


def receiver(stream: Any, length: int = 100) -> tuple[Any, Any]:
    """Return an endpoint that expects one segment."""
    pool = _core.Pool()
    end = Receiver(deque(), set(), pool)
    run = make_run(Action.RECV, end, pool, length)
    end.stream, end.open, end.readable, end.opener = stream, True, True, Counter()
    run.start()
    return end, run


def sender(sealer: Any = None) -> tuple[Any, Any]:
    """Return an endpoint that has one segment to seal and send."""
    pool = _core.Pool()
    end = _core.Endpoint(deque(), set(), pool)
    run = make_run(Action.SEND, end, pool, 100)
    end.stream, end.open, end.writable, end.sealer = Stream(len), True, True, sealer
    run.start()
    return end, run


def make_run(action: Action, end: Any, pool: Any, length: int, views: list[Any] | None = None) -> Any:
    class Group:
        def inbox(self, peer: int) -> Any:
            return end

        outbox = inbox

    program = _core.compile((Step(action, 0, peer=1),), ((),), ((),), (0,), ((),), (-1,), 1)
    views = [memoryview(bytearray(length))] if views is None else views
    return _core.Execution(
        Group(), program, 1, bytes(24), views, None, None, None, 0, lambda: None, 0, bytes(16), pool, 1
    )


@pytest.mark.parametrize("place", range(3))
def test_a_state_without_a_truth_value_is_an_error(place: int) -> None:
    end = _core.Endpoint(deque(), set(), _core.Pool())
    state: list[Any] = [False] * 3
    state[place] = Raises()
    with pytest.raises(LookupError):
        end.notify(*state)
    assert not end.queued


def test_a_clock_state_without_a_truth_value_is_an_error() -> None:
    with pytest.raises(LookupError):
        _core.stages(Raises())  # type: ignore[arg-type]
    assert set(_core.stages(False)) == {"seal", "open", "reduce", "send", "receive", "lock"}


@pytest.mark.parametrize("plane", [_core.Endpoint, endpoint.Endpoint], ids=["compiled", "python"])
@pytest.mark.parametrize("moved", [-1, -7, 6, 1 << 62])
def test_an_impossible_result_of_send_is_an_error(plane: Any, moved: int) -> None:
    end = plane(deque(), set(), _core.Pool() if plane is _core.Endpoint else buffers.Pool())
    end.stream, end.writable = Stream(lambda data: moved), True
    end.put(memoryview(b"frame"))
    with pytest.raises(ValueError, match="a stream"):
        end.flush()


@pytest.mark.parametrize("got", [-1, -7, FRAME_BYTES, 1 << 62])
def test_an_impossible_result_of_recv_into_is_an_error(got: int) -> None:
    end, _ = receiver(Stream(lambda room: got))
    with pytest.raises(ValueError, match="a stream"):
        _core.receive(end)


@pytest.mark.parametrize("result", [None, "5", 1 << 80], ids=str)
def test_a_result_that_is_not_a_number_is_an_error(result: Any) -> None:
    end, _ = receiver(Stream(lambda room: result))
    with pytest.raises((TypeError, OverflowError)):
        _core.receive(end)


def test_a_link_without_keys_raises() -> None:
    writer, _ = sender()
    del writer.sealer
    with pytest.raises(RuntimeError, match="no keys"):
        _core.send(writer)
    reader, _ = receiver(Stream(lambda room: 0))
    del reader.opener
    with pytest.raises(RuntimeError, match="no keys"):
        _core.receive(reader)


def test_a_closed_link_reads_nothing() -> None:
    end, _ = receiver(None)
    with pytest.raises(RuntimeError, match="closed"):
        _core.receive(end)


def test_a_pool_that_rejects_a_size_keeps_its_size() -> None:
    """It would write past its array of 64 slots."""
    pool = _core.Pool(2)
    with pytest.raises(ValueError, match="at most"):
        pool.__init__(1000)  # type: ignore[misc]
    taken = [pool.take() for _ in range(200)]
    for segment in taken:
        pool.give(segment)
    assert [pool.take(), pool.take()] == [taken[1], taken[0]]
    assert pool.take() not in taken


@pytest.mark.parametrize("kind", [_core.Segment, _core.SegmentSlice, _core.Program], ids=lambda kind: kind.__name__)
def test_types_with_memory_cannot_be_instantiated(kind: Any) -> None:
    for make in (kind, lambda: object.__new__(kind), lambda: kind.__new__(kind)):
        with pytest.raises(TypeError):
            make()


def test_an_endpoint_is_initialised_once() -> None:
    end = _core.Endpoint(deque(), set(), _core.Pool())
    with pytest.raises(RuntimeError, match="already initialized"):
        end.__init__(deque(), set(), _core.Pool())  # type: ignore[misc]


def test_an_execution_is_started_once() -> None:
    _, run = receiver(Stream(len))
    with pytest.raises(RuntimeError, match="was started before"):
        run.start()


def test_a_finished_step_is_not_executed_again() -> None:
    end, run = sender(sealing(lambda: None))
    entry = end.queue[0]
    _core.send(end)
    end.queue.append(entry)
    with pytest.raises(ValueError, match="is done"):
        _core.send(end)
    del run


def test_a_queue_of_another_type_is_refused() -> None:
    end, _ = sender()
    end.queue[0] = 5
    with pytest.raises(TypeError, match="tuples"):
        _core.send(end)


def sealing(meanwhile: Callable[[], Any]) -> Any:
    """A sealer that calls a function of the test first."""

    class Sealer:
        counter = 0

        def seal_into(self, header: Any, plaintext: Any, target: memoryview) -> None:
            assert len(header) == HEADER_BYTES
            meanwhile()
            target[: len(plaintext)] = plaintext

    return Sealer()


@pytest.mark.parametrize("use", ["put", "flush", "send", "receive"])
def test_an_endpoint_is_not_reentrant(use: str) -> None:
    """A frame that is put or sent during another call would free the buffer that the call uses."""
    uses: dict[str, Callable[[], Any]] = {
        "put": lambda: end.put(bytearray(b"between")),
        "flush": lambda: end.flush(),
        "send": lambda: _core.send(end),
        "receive": lambda: _core.receive(end),
    }
    end, _ = sender(sealing(uses[use]))
    with pytest.raises(RuntimeError, match=r"while it moved bytes|still being written"):
        _core.send(end)
    assert not end.pending
    for stream in (Stream(lambda data: uses[use]()),):
        end, _ = receiver(stream)
        with pytest.raises(RuntimeError, match=r"while it moved bytes|still being written"):
            _core.receive(end)
        end.stream, end.writable = stream, True
        end.put(b"frame")
        with pytest.raises(RuntimeError, match=r"while it moved bytes|still being written"):
            end.flush()


def test_an_interrupted_endpoint_can_be_used_again() -> None:
    def interrupted(data: Any) -> int:
        raise KeyboardInterrupt

    end = _core.Endpoint(deque(), set(), _core.Pool())
    end.stream, end.writable = Stream(interrupted), True
    end.put(b"frame")
    with pytest.raises(KeyboardInterrupt):
        end.flush()
    written = bytearray()
    end.stream = Stream(lambda data: written.extend(data) or len(data))
    assert end.flush() and bytes(written) == b"frame"


@pytest.mark.parametrize("which", ["sealer", "stream"])
def test_an_attribute_replaced_during_its_call_stays_alive(which: str) -> None:
    end, _ = sender(sealing(lambda: setattr(end, which, None)))
    if which == "sealer":
        _core.send(end)
        assert end.sealer is None
    else:
        with pytest.raises(RuntimeError, match="closed"):
            _core.send(end)


@pytest.mark.parametrize("plane", [_core.Endpoint, endpoint.Endpoint], ids=["compiled", "python"])
def test_a_frame_does_not_replace_an_unsent_one(plane: Any) -> None:
    end = plane(deque(), set(), _core.Pool() if plane is _core.Endpoint else buffers.Pool())
    end.put(memoryview(b"one"))
    with pytest.raises(RuntimeError, match="still being written"):
        end.put(memoryview(b"two"))


@pytest.mark.parametrize(
    "views",
    [[memoryview(bytearray(8)).cast("I")], [bytearray(8)], [None], [memoryview(bytearray(8))[::2]]],
    ids=["of integers", "no view", "nothing", "with gaps"],
)
def test_an_execution_accepts_only_views_of_bytes(views: list[Any]) -> None:
    with pytest.raises((TypeError, BufferError)):
        make_run(Action.SEND, None, _core.Pool(), 8, views)


def test_an_execution_copies_its_list_of_views() -> None:
    views = [memoryview(bytearray(8))]
    run = make_run(Action.SEND, None, _core.Pool(), 8, views)
    view = views.pop()
    with pytest.raises(BufferError):
        view.release()  # it is the run's memory
    del run
    view.release()


@pytest.mark.parametrize(
    "changes",
    [
        {"ordinals": (1 << 32,)},
        {"ordinals": (1 << 63,)},
        {"steps": ((0, 0, 1, -1, 0, 0xFFFFFFFF, True),)},
        {"steps": ((0, 0, 1, -1, 0, 1 << 40, True),)},
        {"steps": ((0, 0, 1, -1, 0, -2, True),)},
        {"steps": (), "dependencies": (), "wakes": (), "ordinals": (), "sharers": (), "heirs": (), "chunks": -1},
    ],
    ids=str,
)
def test_a_number_too_large_for_a_header_is_refused(changes: dict[str, Any]) -> None:
    parts: dict[str, Any] = {
        "steps": (Step(Action.SEND, 0, 1),),
        "dependencies": ((),),
        "wakes": ((),),
        "ordinals": (0,),
        "sharers": ((),),
        "heirs": (-1,),
        "chunks": 1,
        **changes,
    }
    with pytest.raises((ValueError, OverflowError)):
        _core.compile(*parts.values())
