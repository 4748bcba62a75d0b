"""The network in memory behaves like non-blocking sockets, and a test controls every byte."""

from __future__ import annotations

import pytest

from tests.in_memory_network import MemoryStream, Pipe, Wires


class Listener:
    """A handler that records its notifications."""

    def __init__(self) -> None:
        self.told: list[tuple[bool, bool]] = []

    def notify(self, readable: bool, writable: bool) -> None:
        self.told.append((readable, writable))


def connected(capacity: int = 100) -> tuple[Wires, MemoryStream, MemoryStream]:
    wires, accepted = Wires(capacity), []
    wires.serve(1, lambda stream, address: accepted.append((stream, address)))
    near = wires.connect(0, 1)
    ((far, address),) = accepted
    assert address == "0"
    return wires, near, far


def write(stream: MemoryStream, data: bytes) -> int:
    return stream.send(memoryview(data))


def read(stream: MemoryStream, count: int) -> bytes:
    buffer = bytearray(count)
    return bytes(buffer[: stream.recv_into(memoryview(buffer))])


def test_bytes_arrive_in_order_on_delivery() -> None:
    wires, near, far = connected()
    assert write(near, b"one ") == 4 and write(near, b"two") == 3
    with pytest.raises(BlockingIOError):
        read(far, 10)
    assert wires.deliver()
    assert read(far, 5) == b"one t" and read(far, 10) == b"wo"
    with pytest.raises(BlockingIOError):
        read(far, 10)


def test_directions_are_independent() -> None:
    wires, near, far = connected()
    write(near, b"forth")
    write(far, b"back")
    wires.deliver()
    assert read(far, 10) == b"forth" and read(near, 10) == b"back"


def test_full_pipe_blocks_until_it_is_read() -> None:
    wires, near, far = connected(capacity=10)
    writer = Listener()
    near.watched_by(writer)
    assert write(near, bytes(25)) == 10
    with pytest.raises(BlockingIOError):
        write(near, b"x")
    wires.deliver()
    with pytest.raises(BlockingIOError):
        write(near, b"x")
    assert read(far, 4) == bytes(4)
    assert writer.told[-1] == (False, True) and write(near, bytes(25)) == 4


def test_reader_is_notified_of_a_delivery() -> None:
    wires, near, far = connected()
    reader = Listener()
    far.watched_by(reader)
    write(near, b"x")
    assert not reader.told
    wires.deliver()
    assert reader.told == [(True, False)]


def test_bytes_are_delivered_once() -> None:
    wires, near, _ = connected()
    write(near, b"x")
    assert wires.deliver() and not wires.deliver()


def test_bytes_written_before_close_arrive_before_the_end() -> None:
    wires, near, far = connected()
    write(near, b"last words")
    near.close()
    while wires.deliver():
        pass
    assert read(far, 20) == b"last words" and read(far, 20) == b""


def test_closed_stream_cannot_write() -> None:
    _, near, _ = connected()
    near.close()
    with pytest.raises(BrokenPipeError):
        write(near, b"x")


def test_deliver_can_change_all_bytes() -> None:
    wires, near, far = connected()
    seen = []

    def change(pipe: Pipe, data: bytes) -> bytes:
        seen.append((pipe.sender, pipe.receiver, data))
        return data.replace(b"pay 1", b"pay 9")

    write(near, b"pay 1")
    write(far, b"ok")
    wires.deliver(change)
    assert seen == [(0, 1, b"pay 1"), (1, 0, b"ok")]
    assert read(far, 10) == b"pay 9" and read(near, 10) == b"ok"
