"""A member of a group rewrites what others forward, with the help of an attacker that can change bytes on the wire.

All members hold the key under which an origin seals a forwarded segment, and with the key it is easy to find another
ciphertext with the same GCM tag: all blocks are free but one, which balances the change.
"""

from __future__ import annotations

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from ringfence import keys
from ringfence.keys import Secret
from ringfence.link.frames import HEADER_BYTES, read_header

BLOCK = 16
EVERY_HOP = 'version = 1\nforwarded = "every_hop"\n[[admit]]\n[admit.secret]\n'  # the policy that prevents it
_REDUCTION = 0xE1 << 120  # of GCM's field


def times(left: int, right: int) -> int:
    """The product in GCM's field (NIST SP 800-38D, section 6.3)."""
    product = 0
    for bit in range(127, -1, -1):
        if right >> bit & 1:
            product ^= left
        left = left >> 1 ^ (_REDUCTION if left & 1 else 0)
    return product


def with_the_same_tag(key: bytes, change: bytes) -> bytes:
    """The change of a ciphertext, with its last block replaced so that the tag stays as it is."""
    encryptor = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
    hash_key = int.from_bytes(encryptor.update(bytes(BLOCK)), "big")
    total = 0
    for at in range(0, len(change) - BLOCK, BLOCK):
        total = times(total ^ int.from_bytes(change[at : at + BLOCK], "big"), hash_key)
    return change[:-BLOCK] + total.to_bytes(BLOCK, "big")


def origin_key(instance: Secret, rank: int) -> bytes:
    secret = keys.expand(instance, keys.ORIGIN + rank.to_bytes(4, "big") + bytes(8))
    return keys.expand(secret, keys.SEGMENT_KEY, 44).reveal()[:32]


def forged(frame: bytes, key: bytes, honest: bytes, wanted: bytes) -> bytes:
    """Change what a forwarded frame opens to. The plaintext repeats `honest`, and becomes repetitions of `wanted`."""
    end = HEADER_BYTES + read_header(frame[:HEADER_BYTES]).length
    pattern = bytes(a ^ b for a, b in zip(honest, wanted, strict=True))
    change = with_the_same_tag(key, pattern * ((end - HEADER_BYTES) // len(pattern)))
    body = bytes(a ^ b for a, b in zip(frame[HEADER_BYTES:end], change, strict=True))
    return frame[:HEADER_BYTES] + body + frame[end:]
