"""Masks: keystreams of AES-256-CTR that pairs of workers share; one adds and the other subtracts (spec/private-sum.md, 5)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from ringfence import keys
from ringfence.keys import Secret

_ZEROS: Final = bytes(keys.PRIVATE_SUM_BLOCK_BYTES)
_AES_BLOCK: Final = 16  # for which `update_into` wants room beside its output


@dataclass(frozen=True)
class Pair:
    """What this worker shares with another. The worker of the lower rank adds the mask, the other one subtracts it."""

    seed: Secret = field(repr=False)
    adds: bool


class Keystreams:
    """The masks of one contribution, from its beginning on. Used once."""

    def __init__(self, pairs: Sequence[Pair], call: int) -> None:
        self._streams = []
        for pair in pairs:
            key, counter = keys.private_sum_mask(pair.seed, call)
            self._streams.append((Cipher(algorithms.AES(key), modes.CTR(counter)).encryptor(), pair.adds))
        self._buffer = bytearray(len(_ZEROS) + _AES_BLOCK)

    def add_to(self, words: torch.Tensor) -> None:
        """Add the next words of each keystream to integers, at most a block of them. Sums wrap.

        Words are little-endian, as torch's tensors are on every processor that it supports.
        """
        nbytes = words.numel() * words.element_size()
        if not nbytes:
            return
        keystream = torch.frombuffer(self._buffer, dtype=words.dtype, count=words.numel())
        for stream, adds in self._streams:
            stream.update_into(memoryview(_ZEROS)[:nbytes], self._buffer)
            if adds:
                words.add_(keystream)
            else:
                words.sub_(keystream)
