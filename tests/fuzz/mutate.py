"""Inputs without coverage: seeds that are changed a little, the same ones for the same number."""

from __future__ import annotations

import random
from collections.abc import Iterator

_NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)


def inputs(seeds: list[bytes], longest: int, words: tuple[bytes, ...], number: int = 0) -> Iterator[bytes]:
    """Every seed as it is, then changed ones without end."""
    yield from seeds
    chance = random.Random(number)
    while True:
        data = bytearray(chance.choice(seeds))
        for _ in range(1 << chance.randrange(5)):
            _change(data, chance, seeds, words)
        yield bytes(data[:longest])


def _change(data: bytearray, chance: random.Random, seeds: list[bytes], words: tuple[bytes, ...]) -> None:
    place = chance.randrange(len(data) + 1)
    count = chance.randrange(1, 33)
    match chance.randrange(9):
        case 0 if data:
            data[place % len(data)] ^= 1 << chance.randrange(8)
        case 1 if data:
            data[place % len(data)] = chance.randrange(256)
        case 2:
            data[place:place] = chance.randbytes(count)
        case 3:
            del data[place : place + count]
        case 4:
            data[place:place] = data[chance.randrange(len(data) + 1) :][:count]
        case 5:  # a length or a number that is at its edge
            width = chance.choice((1, 2, 3, 4, 8))
            value = chance.choice(_NUMBERS) & ((1 << 8 * width) - 1)
            data[place : place + width] = value.to_bytes(width, chance.choice(("big", "little")))
        case 6:
            other = chance.choice(seeds)
            start = chance.randrange(len(other) + 1)
            data[place:] = other[start:]
        case 7:
            del data[place:]
        case _ if words:
            data[place : place + chance.choice((0, count))] = chance.choice(words)
