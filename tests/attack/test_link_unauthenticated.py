"""Unauthenticated peers that dial the links of a run under way over real sockets: they are refused, and nobody notices."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ringfence import keys
from ringfence.link.hello import HELLO_BYTES, Hello, Lane, write_hello
from tests.pool import Pool, values

WORLD = 3


def session() -> Any:
    from ringfence import backend

    return backend._session


def link_addresses() -> list[tuple[str, int]]:
    """Where the workers listen for links; every member knows it, and so may anybody who scans ports."""
    return list(session().network._addresses)


def all_reduce() -> float:
    tensor = torch.full((1000,), float(dist.get_rank() + 1))
    dist.all_reduce(tensor)
    return float(tensor.sum().item())


def unauthenticated_hello(sender: int, receiver: int) -> bytes:
    """Well formed to the last byte, by somebody who is not of this session and has no key of it."""
    hello = Hello(sender, receiver, Lane.COLLECTIVE, os.urandom(32), os.urandom(keys.NONCE_BYTES))
    return write_hello(keys.Secret(os.urandom(32)), hello)


def hung_up_on(address: tuple[str, int], words: bytes) -> bytes:
    """What an unauthenticated peer hears before the worker hangs up."""
    with socket.create_connection(address, timeout=20) as unauthenticated_peer:
        heard = b""
        try:
            unauthenticated_peer.sendall(words)
            while data := unauthenticated_peer.recv(4096):
                heard += data
        except ConnectionError:
            pass
        return heard


@pytest.mark.promise("An unauthenticated peer on a link gets one fixed-size read, a deadline and a bounded queue.")
@pytest.mark.parametrize(
    "words",
    [bytes(HELLO_BYTES), b"GET / HTTP/1.1\r\n\r\n" * 20, b"\x16\x03\x01\x02\x00\x01" * 40, b"\xff" * 100_000],
    ids=["zeros", "http", "tls", "much"],
)
def test_an_unauthenticated_peer_that_dials_a_link_is_shown_the_door_without_a_word(pool: Pool, words: bytes) -> None:
    expected = values(pool.run(all_reduce, WORLD))
    addresses = values(pool.start(link_addresses, WORLD).wait(60))[0]
    for address in addresses:
        assert hung_up_on(tuple(address), words) == b""
    assert values(pool.start(all_reduce, WORLD).wait(60)) == expected == [6000.0] * WORLD


@pytest.mark.promise("An unauthenticated peer on a link gets one fixed-size read, a deadline and a bounded queue.")
def test_an_unauthenticated_peer_that_says_it_is_a_worker_is_shown_the_door(pool: Pool) -> None:
    """It names ranks that exist and holds keys of another session: one MAC is checked, and that is all it costs."""
    expected = values(pool.run(all_reduce, WORLD))
    addresses = values(pool.start(link_addresses, WORLD).wait(60))[0]
    for receiver, address in enumerate(addresses):
        for sender in range(WORLD):
            assert hung_up_on(tuple(address), unauthenticated_hello(sender, receiver)) == b""
    assert values(pool.start(all_reduce, WORLD).wait(60)) == expected
