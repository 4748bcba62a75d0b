"""Unauthenticated peers that dial a worker, in memory: each costs one read of fixed size and its own connection."""

from __future__ import annotations

import pytest

from ringfence.collectives import Collective
from ringfence.dataplane.request import Request
from ringfence.errors import AuthenticationError, ProtocolError
from ringfence.keys import (
    KEM_CIPHERTEXT_BYTES,
    LINK_HELLO_SECONDS,
    LINK_PENDING,
    LINK_PENDING_PER_ADDRESS,
    NONCE_BYTES,
    Secret,
)
from ringfence.link.frames import Call
from ringfence.link.hello import CONFIRM_BYTES, HELLO_BYTES, REPLY_BYTES, Lane, LinkHello, Reply, write_hello
from ringfence.runtime.communicator import group_digest
from tests.in_memory_network import MemoryStream, Pipe
from tests.memory_cluster import World
from tests.unit.runtime_calls import submit_everywhere

NONCE = bytes(range(NONCE_BYTES))
WORLD = group_digest("world", (0, 1, 2))


def settle(world: World) -> None:
    """Drive until no byte moves and no work is due."""
    world.run([Request(Call(0), float("inf"))])


def dial(world: World, data: bytes, address: int = 0) -> MemoryStream:
    """Dial worker 1 and send some bytes."""
    stream = world.wires.connect(address, 1)
    if data:
        stream.send(memoryview(data))
    settle(world)
    return stream


def answer(stream: MemoryStream) -> bytes | None:
    """Return the bytes of the answer: b"" if there is none yet, None if the connection is closed."""
    buffer = bytearray(2 * REPLY_BYTES)
    try:
        count = stream.recv_into(memoryview(buffer))
    except BlockingIOError:
        return b""
    return bytes(buffer[:count]) if count else None


def still_works(world: World) -> None:
    assert all(engine.failure is None for engine in world.engines)
    bound = submit_everywhere(world, Collective.ALL_REDUCE, 100)
    world.run([each.request for each in bound])
    assert all(each.request.done and each.right() for each in bound)


def hello(world: World, **changes: object) -> bytes:
    greeting = LinkHello(0, 1, Lane.COLLECTIVE, WORLD, NONCE)._replace(**changes)  # type: ignore[arg-type]
    return write_hello(world.engines[0].keys.session_key, greeting)


@pytest.mark.parametrize("data", [b"\0" * HELLO_BYTES, b"GET / HTTP/1.1\r\n" * 100, b"\xff" * 100_000], ids=len)
def test_garbage_is_refused_without_an_answer(data: bytes) -> None:
    world = World(3)
    stream = dial(world, data)
    assert answer(stream) is None and not world.engines[1].acceptor.pending
    still_works(world)


@pytest.mark.promise("An unauthenticated peer on a link gets one fixed-size read, a deadline and a bounded queue.")
def test_no_more_is_read_from_an_unauthenticated_peer_than_a_hello() -> None:
    world = World(3)
    stream = dial(world, hello(world) + bytes(2000))
    assert len(answer(stream) or b"") == REPLY_BYTES
    left = len(stream.outgoing.delivered) + len(stream.outgoing.written)
    assert left >= 2000 - CONFIRM_BYTES
    still_works(world)


@pytest.mark.promise("An unauthenticated peer on a link gets one fixed-size read, a deadline and a bounded queue.")
@pytest.mark.parametrize("words", ["none", "half a hello", "a hello"])
def test_a_silent_connection_is_closed_at_the_deadline(words: str) -> None:
    world = World(3)
    data = {"none": b"", "half a hello": hello(world)[:50], "a hello": hello(world)}[words]
    stream = dial(world, data)
    answer(stream)
    assert world.engines[1].next_deadline() == LINK_HELLO_SECONDS
    world.wait(LINK_HELLO_SECONDS - 0.1)
    assert len(world.engines[1].acceptor.pending) == 1
    world.wait(0.1)
    settle(world)
    assert not world.engines[1].acceptor.pending and answer(stream) is None
    still_works(world)


@pytest.mark.parametrize(
    "changes",
    [
        {"receiver": 2},
        {"sender": 3},
        {"sender": 2**32 - 1},
        {"lane": 6},
        {"lane": 5},
        {"lane": 4},
        {"lane": 3},
        {"lane": 2},
    ],
    ids=[
        "for another worker",
        "from a rank outside the world",
        "from far beyond",
        "in no lane",
        "point-to-point inside a machine",
        "a collective inside a machine",
        "in the lane of Unix sockets",
        "a peer verification that is not needed",
    ],
)
def test_a_hello_with_wrong_fields_is_refused(changes: dict[str, int]) -> None:
    world = World(3)
    stream = dial(world, hello(world, **changes))
    assert answer(stream) is None and not world.engines[1].acceptor.pending
    still_works(world)


def test_a_hello_of_another_session_is_refused() -> None:
    world = World(3)
    stream = dial(world, write_hello(Secret(bytes(32)), LinkHello(0, 1, Lane.COLLECTIVE, WORLD, NONCE)))
    assert answer(stream) is None
    still_works(world)


@pytest.mark.promise("An unauthenticated peer on a link gets one fixed-size read, a deadline and a bounded queue.")
def test_a_replayed_hello_does_not_authenticate() -> None:
    world = World(3)
    heard: dict[tuple[int, int], bytes] = {}

    def listen(pipe: Pipe, data: bytes) -> bytes:
        heard[pipe.sender, pipe.receiver] = heard.get((pipe.sender, pipe.receiver), b"") + data
        return data

    bound = submit_everywhere(world, Collective.ALL_REDUCE, 10)
    world.run([each.request for each in bound], listen)
    forth, back = heard[0, 1], heard[1, 0]
    greeting, confirm = forth[:HELLO_BYTES], forth[HELLO_BYTES : HELLO_BYTES + CONFIRM_BYTES]
    links = {rank: len(communicator.inboxes) for rank, communicator in world.communicators.items()}
    stream = dial(world, greeting)
    reply = answer(stream)
    assert reply is not None and len(reply) == REPLY_BYTES and reply not in back
    stream.send(memoryview(confirm))  # the confirmation of then, for the reply of now
    settle(world)
    assert answer(stream) is None
    assert {rank: len(communicator.inboxes) for rank, communicator in world.communicators.items()} == links
    still_works(world)


@pytest.mark.promise("An unauthenticated peer on a link gets one fixed-size read, a deadline and a bounded queue.")
@pytest.mark.parametrize("unauthenticated_peers", [1, 7], ids=["one address", "many addresses"])
def test_a_flood_closes_only_its_own_connections(unauthenticated_peers: int) -> None:
    world = World(3)
    engine = world.engines[1]
    for number in range(200):
        world.wires.connect(100 + number % unauthenticated_peers, 1)
        assert len(engine.acceptor.pending) <= LINK_PENDING
        for address in {connection.address for connection in engine.acceptor.pending}:
            same = [connection for connection in engine.acceptor.pending if connection.address == address]
            assert len(same) <= LINK_PENDING_PER_ADDRESS
    still_works(world)
    world.wait(LINK_HELLO_SECONDS)
    assert not engine.acceptor.pending


@pytest.mark.promise("An unauthenticated peer on a link gets one fixed-size read, a deadline and a bounded queue.")
def test_a_flood_of_replayed_hellos_closes_its_own_connections() -> None:
    """If every pending connection has sent a hello, the oldest is closed; a dialling worker is the newest."""
    world = World(3)
    engine, greeting = world.engines[1], hello(world)
    streams = []
    for number in range(LINK_PENDING + 20):
        world.now = number / 1000  # each is a moment younger than the last
        streams.append(dial(world, greeting, 100 + number % 7))
        assert len(engine.acceptor.pending) <= LINK_PENDING
    assert all(connection.known for connection in engine.acceptor.pending)
    heard = [answer(stream) for stream in streams]
    assert all(len(reply or b"") == REPLY_BYTES for reply in heard), "a replayed hello is answered, once"
    open_now = [answer(stream) == b"" for stream in streams]
    assert sorted(open_now) == open_now and sum(open_now) == LINK_PENDING, "the oldest were displaced"
    dial(world, b"", 100)
    assert sum(not connection.known for connection in engine.acceptor.pending) == 1
    newest = dial(world, greeting, 100)
    assert all(connection.known for connection in engine.acceptor.pending), (
        "connections without a hello are closed first"
    )
    assert len(answer(newest) or b"") == REPLY_BYTES
    still_works(world)
    world.wait(LINK_HELLO_SECONDS)
    assert not engine.acceptor.pending


def shake_hands(world: World, sender: int, communicator: bytes) -> MemoryStream:
    """Connect `sender`, which holds its keys, to worker 1."""
    greeting = LinkHello(sender, 1, Lane.COLLECTIVE, communicator, NONCE)
    stream = dial(world, world.engines[sender].keys.hello_bytes(greeting), sender)
    reply = answer(stream)
    assert reply is not None and len(reply) == REPLY_BYTES
    stream.send(memoryview(world.engines[sender].keys.confirm(greeting, reply)[0]))
    settle(world)
    return stream


def test_a_worker_cannot_join_a_group_of_others() -> None:
    world = World(3)
    pair = world.add_communicator("pair", (0, 1))
    stream = shake_hands(world, 2, pair[1].digest)
    assert answer(stream) is None and not pair[1].inboxes
    still_works(world)


def test_the_session_key_alone_does_not_authenticate_a_dialler() -> None:
    """Worker 2 claims to be worker 0: it can make the hello, but not the confirmation."""
    world = World(3)
    greeting = LinkHello(0, 1, Lane.COLLECTIVE, WORLD, NONCE)
    stream = dial(world, hello(world), 2)
    reply = answer(stream)
    assert reply is not None
    keys = world.engines[2].keys
    with pytest.raises(AuthenticationError, match="does not hold its key"):
        keys.confirm(greeting, reply)
    guess = keys._handshake(1, greeting, Reply.read(reply).nonce)
    ciphertext = bytes(KEM_CIPHERTEXT_BYTES)
    stream.send(memoryview(ciphertext + guess.dialler_confirms(Reply.read(reply).kem_key, ciphertext)))
    settle(world)
    assert answer(stream) is None and not world.communicators[1].inboxes
    still_works(world)


def test_a_second_dial_of_one_link_aborts_the_session() -> None:
    world = World(3)
    still_works(world)
    shake_hands(world, 0, WORLD)
    failure = world.engines[1].failure
    assert isinstance(failure, ProtocolError) and "worker 0 dialled the same link twice" in str(failure)


def test_an_acceptor_must_hold_the_key_of_its_worker() -> None:
    world = World(2)
    bound = submit_everywhere(world, Collective.ALL_REDUCE, 10)

    def answer_falsely(pipe: Pipe, data: bytes) -> bytes:
        return data if pipe.sender == 0 else data[:-1] + bytes([data[-1] ^ 1])

    world.run([each.request for each in bound], answer_falsely)
    assert isinstance(bound[0].request.error, AuthenticationError)
    assert "worker 1 does not hold its key" in str(bound[0].request.error)


@pytest.mark.promise("A worker with a public key of low order gets no link.")
def test_a_dialler_with_a_key_of_low_order_is_refused() -> None:
    """The shared secret would be zero, which any attacker knows."""
    world = World(3)
    world.engines[1].keys._public_keys = [bytes(32), *world.engines[1].keys._public_keys[1:]]
    stream = dial(world, hello(world))
    assert answer(stream) is None
    assert world.engines[1].failure is None and not world.engines[1].acceptor.pending
