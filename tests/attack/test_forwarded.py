"""A group member off the path alters a forwarded frame, with help from an attacker that can change bytes on the wire.

All members hold the key under which an origin seals a forwarded segment, and with the key it is easy to find another
ciphertext with the same GCM tag. The hop tag covers the header and the origin's tag, not the ciphertext, because that costs
more than 3 % (docs/security/limitations.md has the figure). So a member needs no link key to rewrite what others forward,
except for one block of 16 bytes that balances the change. Without the group's keys the same change is rejected.
"""

from __future__ import annotations

import os

import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from ringfence import keys
from ringfence.collectives import Thresholds
from ringfence.errors import AuthenticationError
from ringfence.keys import TAG_BYTES, Secret
from ringfence.link.frames import HEADER_BYTES, Type
from tests.attack.wire_messages import Kind, MessageSplitter
from tests.in_memory_network import Pipe
from tests.memory_cluster import World, broadcast

BLOCK = 16
CHAIN = Thresholds(small=64, chain_slice=32)  # 0 -> 1 -> 2 -> 3, sealed by rank 0
PATH, HELPER = (0, 1), 3
REDUCTION = 0xE1 << 120  # of GCM's field


def times(left: int, right: int) -> int:
    """The product in GCM's field (NIST SP 800-38D, section 6.3)."""
    product = 0
    for bit in range(127, -1, -1):
        if right >> bit & 1:
            product ^= left
        left = left >> 1 ^ (REDUCTION if left & 1 else 0)
    return product


def power(base: int, exponent: int) -> int:
    result = 1 << 127
    while exponent:
        if exponent & 1:
            result = times(result, base)
        base, exponent = times(base, base), exponent >> 1
    return result


def with_the_same_tag(key: bytes, change: bytes, balance: int) -> bytes:
    """The change of a ciphertext, with block number `balance` replaced so that the tag stays as it is."""
    encryptor = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
    hash_key = int.from_bytes(encryptor.update(bytes(BLOCK)), "big")
    blocks = [int.from_bytes(change[at : at + BLOCK], "big") for at in range(0, len(change), BLOCK)]
    blocks[balance] = 0
    total = 0
    for position, block in enumerate(blocks):
        total ^= times(block, power(hash_key, len(blocks) - position + 1))
    inverse = power(power(hash_key, len(blocks) - balance + 1), (1 << 128) - 2)
    blocks[balance] = times(total, inverse)
    return b"".join(block.to_bytes(BLOCK, "big") for block in blocks)


def origin_key(instance: Secret, rank: int) -> bytes:
    secret = keys.expand(instance, keys.ORIGIN + rank.to_bytes(4, "big") + bytes(8))
    return keys.expand(secret, keys.SEGMENT_KEY, 44).reveal()[:32]


class Forger:
    """Reads one hop from its beginning, and XORs `change` into its forwarded frames if it is set."""

    def __init__(self) -> None:
        self.change = b""
        self._splitters: dict[int, MessageSplitter] = {}
        self.forged = 0

    def see(self, pipe: Pipe, data: bytes) -> bytes:
        known = id(pipe) in self._splitters
        if (pipe.sender, pipe.receiver) != PATH or not (known or data.startswith(b"RFL1")):
            return data
        splitter = self._splitters.setdefault(id(pipe), MessageSplitter(True))
        passed = b"".join(self._forge(message.data, message.kind) for message in splitter.feed(data))
        assert not splitter.remainder()
        return passed

    def _forge(self, data: bytes, kind: Kind) -> bytes:
        if kind is not Kind.FRAME or data[0] != Type.FORWARD or not self.change:
            return data
        self.forged += 1
        body = bytes(a ^ b for a, b in zip(data[HEADER_BYTES : -2 * TAG_BYTES], self.change, strict=True))
        return data[:HEADER_BYTES] + body + data[HEADER_BYTES + len(body) :]


def attack(instance_of: str) -> tuple[World, list[torch.Tensor], list, Forger, torch.Tensor]:
    """Rank 0 broadcasts. The wire from 0 to 1 is changed with the keys of rank 3, the end of the chain, or with random keys."""
    world = World(4, seed=7, table=CHAIN)
    forger = Forger()
    opening = [
        world.submit(communicator, broadcast(communicator, torch.zeros(64)))
        for communicator in world.communicators.values()
    ]
    world.run(opening, forger.see)
    honest, wanted = torch.arange(64, dtype=torch.float32), torch.full((64,), 666.0)
    change = bytes(a ^ b for a, b in zip(honest.numpy().tobytes(), wanted.numpy().tobytes(), strict=True))
    member = world.communicators[HELPER].origin._instance
    assert member is not None
    instance = member if instance_of == "member" else Secret(os.urandom(32))
    forger.change = with_the_same_tag(origin_key(instance, 0), change, balance=15)
    tensors = [honest.clone() if rank == 0 else torch.zeros(64) for rank in range(4)]
    requests = [
        world.submit(communicator, broadcast(communicator, tensors[rank]))
        for rank, communicator in world.communicators.items()
    ]
    world.run(requests, forger.see)
    return world, tensors, requests, forger, wanted


@pytest.mark.promise("A member can alter what others of its group forward, if it can also change bytes on the wire.")
def test_a_member_off_the_path_can_rewrite_what_is_forwarded() -> None:
    """A limitation, not a promise."""
    _, tensors, requests, forger, wanted = attack("member")
    assert forger.forged == 1
    assert all(request.done and request.error is None for request in requests)
    for tensor in tensors[1:]:
        assert torch.equal(tensor[:60], wanted[:60]) and not torch.equal(tensor[60:], wanted[60:])


@pytest.mark.promise("A peer without a group's keys cannot alter a segment that the group's members forward.")
def test_a_peer_without_the_keys_cannot_rewrite_what_is_forwarded() -> None:
    world, tensors, requests, forger, _ = attack("outsider")
    assert forger.forged == 1
    assert all(isinstance(engine.failure, Exception) for engine in world.engines)
    assert isinstance(world.engines[1].failure, AuthenticationError)
    assert all(request.error is not None for request in requests[1:])
    assert all(not tensor.any() for tensor in tensors[1:])
