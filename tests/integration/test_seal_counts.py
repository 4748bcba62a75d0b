"""What sealing costs, counted: how often a cipher processes each byte of a collective, and where the plaintext lies.

A second pass of the cipher over every byte, or a copy of the tensor before it, makes collectives dearer and no result wrong.
So does more Python around a small tensor.
`python -m tests.measure speed` measures the time that they take.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy
import pytest
import torch
import torch.distributed as dist
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

import ringfence
from ringfence.keys import SEGMENT_BYTES, Secret
from ringfence.link import seal
from ringfence.link.seal import Sealer
from ringfence.runtime.link_keys import LinkKeys
from tests.integration.slowed import TIMES, SlowSealer
from tests.integration.test_byte_counts import meet
from tests.pool import Pool

# Calls of ringfence's Python functions for 4 KiB: 87 before a run was observed, 107 before they were counted.
MOST_CALLS = 90
PART = 5 * SEGMENT_BYTES + 4 * 40  # bytes of the tensor for each worker: several segments and one that is not full


class Passes(NamedTuple):
    """What the ciphers of one worker did: calls, bytes, and how many of these were bytes of the caller's tensors."""

    seals: int
    sealed: int
    sealed_in_place: int  # read from a tensor
    opens: int
    opened: int
    opened_in_place: int  # written to a tensor


# -- in the workers ----------------------------------------------------------------------------------------------------

_calls: list[tuple[str, int, int]] = []  # "seal" or "open", the address and length of the plaintext


class CountedCipher:
    """AES-GCM of `cryptography`; it records the plaintext of every call that encrypts or decrypts data."""

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)

    def encrypt_into(self, nonce: Any, plaintext: Any, authenticated: Any, target: Any) -> int:
        _record("seal", plaintext)
        return self._cipher.encrypt_into(nonce, plaintext, authenticated, target)

    def decrypt_into(self, nonce: Any, sealed: Any, authenticated: Any, target: Any) -> int:
        _record("open", target)
        return self._cipher.decrypt_into(nonce, sealed, authenticated, target)

    def __getattr__(self, name: str) -> Any:  # `encrypt` and `decrypt`: tags of frames that are passed on
        return getattr(self._cipher, name)


def _record(what: str, plaintext: Any) -> None:
    length = memoryview(plaintext).nbytes
    if length:
        _calls.append((what, numpy.frombuffer(plaintext, numpy.uint8).ctypes.data, length))


class CopyingSealer(Sealer):
    """Seals a copy of every frame."""

    def seal_into(self, header: Any, plaintext: Any, target: memoryview) -> None:
        super().seal_into(header, bytes(plaintext), target)


MUTANTS: dict[str, type[Sealer]] = {"several seals": SlowSealer, "a copy": CopyingSealer}


def count_ciphers(mutant: str) -> None:
    """Count in this process, from its next session on."""
    seal.AESGCM = CountedCipher  # type: ignore[attr-defined, assignment]
    if mutant:

        def sealer(self: LinkKeys, secret: Secret) -> Sealer:
            return MUTANTS[mutant](secret, self.alive)

        LinkKeys.sealer = sealer  # type: ignore[method-assign]


def all_reduce(whole: torch.Tensor, _: torch.Tensor) -> None:
    dist.all_reduce(whole)


def all_gather(whole: torch.Tensor, part: torch.Tensor) -> None:
    dist.all_gather_single(whole, part)


def reduce_scatter(whole: torch.Tensor, part: torch.Tensor) -> None:
    dist.reduce_scatter_single(part, whole)


def broadcast(whole: torch.Tensor, _: torch.Tensor) -> None:
    dist.broadcast(whole, 0)


def passes(call: Callable[[torch.Tensor, torch.Tensor], None]) -> Passes:
    """Call a collective twice, so that its links exist, and return what the ciphers did in the second call."""
    ranks = dist.get_world_size()
    whole, part = torch.ones(ranks * PART // 4), torch.ones(PART // 4)
    call(whole, part)
    meet(f"{call.__name__} warm")
    _calls.clear()
    meet(f"{call.__name__} counted")
    call(whole, part)
    meet(f"{call.__name__} done")
    inside = [range(each.data_ptr(), each.data_ptr() + each.nbytes) for each in (whole, part)]
    found: list[int] = []
    for what in ("seal", "open"):
        lengths = [(address, length) for kind, address, length in _calls if kind == what]
        in_place = sum(length for address, length in lengths if any(address in memory for memory in inside))
        found += [len(lengths), sum(length for _, length in lengths), in_place]
    return Passes(*found)


def calls_of_python() -> int:
    """Return how many functions of ringfence the cheapest of some all-reduces of 4 KiB calls: others have to poll again."""
    tensor, numbers = torch.ones(1024), [0]
    inside = str(Path(ringfence.__file__).parent)

    def count(frame: FrameType, event: str, _: Any) -> None:
        numbers[-1] += event == "call" and frame.f_code.co_filename.startswith(inside)

    for _ in range(60):
        sys.setprofile(count)
        dist.all_reduce(tensor)
        sys.setprofile(None)
        numbers.append(0)
    return min(numbers[:-1])


# -- in the test -------------------------------------------------------------------------------------------------------


def expected(call: Callable[..., None], ranks: int, rank: int) -> Passes:
    """What is necessary: each worker reads its own contribution from its tensor, and writes results to it, without a copy.

    In between, an all-reduce and a reduce-scatter add up parts beside the tensor.
    """
    if call is broadcast:
        count, size = -(-ranks * PART // SEGMENT_BYTES), ranks * PART
        return Passes(count, size, size, 0, 0, 0) if rank == 0 else Passes(0, 0, 0, count, size, size)
    sealed, sealed_in_place, opened, opened_in_place = {  # in parts of the tensor
        all_reduce: (ranks, 2, 2 * (ranks - 1), ranks - 1),
        all_gather: (1, 1, ranks - 1, ranks - 1),  # sealed once: others pass it on as it is
        reduce_scatter: (ranks - 1, 1, ranks - 1, 0),
    }[call]
    each = -(-PART // SEGMENT_BYTES)
    return Passes(
        *(sealed * each, sealed * PART, sealed_in_place * PART),
        *(opened * each, opened * PART, opened_in_place * PART),
    )


@pytest.fixture(scope="module")
def workers(pool: Pool) -> Iterator[Pool]:
    with pool.fresh() as fresh:
        fresh.check(count_ciphers, 4, None, args=("",))
        yield fresh


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("call", [all_reduce, all_gather, reduce_scatter, broadcast], ids=lambda call: call.__name__)
def test_each_byte_is_sealed_and_opened_once_where_it_lies(
    workers: Pool, call: Callable[..., None], ranks: int
) -> None:
    found = workers.check(passes, ranks, args=(call,), renew=True)
    assert found == [expected(call, ranks, rank) for rank in range(ranks)]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_counts_show_unnecessary_work(pool: Pool, mutant: str) -> None:
    necessary = expected(all_reduce, 2, 0)
    with pool.fresh() as fresh:
        fresh.check(count_ciphers, 2, None, args=(mutant,))
        for found in fresh.check(passes, 2, args=(all_reduce,)):
            assert found.opened == necessary.opened
            if mutant == "several seals":
                assert found.sealed == (1 + TIMES) * necessary.sealed
            else:
                assert found.sealed == necessary.sealed and found.sealed_in_place == 0


def test_a_small_collective_calls_little_python(pool: Pool) -> None:
    """In the thread that calls it, on links that exist. On a busy machine the background thread does a part of it."""
    for found in pool.check(calls_of_python, 2, renew=True):
        assert 20 < found <= MOST_CALLS
