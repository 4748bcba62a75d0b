"""Unauthenticated peers dial the links of a running job over real sockets: they are dropped, and the job is not affected."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ringfence import keys
from ringfence.link.hello import HELLO_BYTES, Lane, LinkHello, write_hello
from tests.limits import HANG
from tests.pool import Pool, values

WORLD = 3


def session() -> Any:
    return dist.group.WORLD._session


def link_addresses() -> list[tuple[str, int]]:
    """Where the workers listen for links."""
    return list(session().network._addresses)


def all_reduce() -> float:
    tensor = torch.full((1000,), float(dist.get_rank() + 1))
    dist.all_reduce(tensor)
    return float(tensor.sum().item())


def forged_hello(sender: int, receiver: int) -> bytes:
    """A well-formed hello under a key that is not the session's."""
    hello = LinkHello(sender, receiver, Lane.COLLECTIVE, os.urandom(32), os.urandom(keys.NONCE_BYTES))
    return write_hello(keys.Secret(os.urandom(32)), hello)


def reply_to(address: tuple[str, int], data: bytes) -> bytes:
    """Return what an unauthenticated peer receives before the worker closes the connection."""
    with socket.create_connection(address, timeout=HANG) as peer:
        received = b""
        try:
            peer.sendall(data)
            while chunk := peer.recv(4096):
                received += chunk
        except ConnectionError:
            pass
        return received


@pytest.mark.promise("An unauthenticated peer on a link gets one fixed-size read, a deadline and a bounded queue.")
@pytest.mark.parametrize(
    "data",
    [bytes(HELLO_BYTES), b"GET / HTTP/1.1\r\n\r\n" * 20, b"\x16\x03\x01\x02\x00\x01" * 40, b"\xff" * 100_000],
    ids=["zeros", "http", "tls", "much"],
)
def test_garbage_on_a_link_port_is_dropped_without_a_reply(pool: Pool, data: bytes) -> None:
    expected = values(pool.run(all_reduce, WORLD))
    addresses = values(pool.start(link_addresses, WORLD).wait(HANG))[0]
    for address in addresses:
        assert reply_to(tuple(address), data) == b""
    assert values(pool.start(all_reduce, WORLD).wait(HANG)) == expected == [6000.0] * WORLD


@pytest.mark.promise("An unauthenticated peer on a link gets one fixed-size read, a deadline and a bounded queue.")
def test_a_forged_hello_is_dropped_without_a_reply(pool: Pool) -> None:
    """It names existing ranks and has keys of another session."""
    expected = values(pool.run(all_reduce, WORLD))
    addresses = values(pool.start(link_addresses, WORLD).wait(HANG))[0]
    for receiver, address in enumerate(addresses):
        for sender in range(WORLD):
            assert reply_to(tuple(address), forged_hello(sender, receiver)) == b""
    assert values(pool.start(all_reduce, WORLD).wait(HANG)) == expected
