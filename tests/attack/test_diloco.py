"""What a capture between two sites shows of an outer step: nothing of what they have changed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ringfence
from tests.attack.eavesdrop import Capture
from tests.integration.netns import ADDRESSES, Hosts
from tests.pool import Pool

SENTENCE = b"what the first site has learnt from its patients."[:48]  # whole float32 numbers, all of them finite
WORDS = len(SENTENCE) // 4
COPIES = 4096


def learnt() -> torch.Tensor:
    return torch.frombuffer(bytearray(SENTENCE * COPIES), dtype=torch.float32)


def outer_step() -> bool:
    """Train to parameters whose pseudo-gradient is the sentence."""
    model = torch.nn.Linear(WORDS * COPIES, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    with ringfence.DiLoCo(model, inner, torch.optim.SGD(model.parameters(), lr=1.0), every=1):
        model.weight.grad = learnt()[None]
        inner.step()
    return model.weight[0].equal(-learnt())


def all_reduce() -> bool:
    found = learnt()
    dist.all_reduce(found)
    return found.equal(2 * learnt())


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts() as both:
        yield both


@pytest.mark.promise("Tensors and objects do not appear in plaintext on the wire.")
def test_a_capture_shows_no_pseudo_gradient(hosts: Hosts) -> None:
    """And the same search finds what Gloo sends."""
    shown = []
    with Pool([hosts.prefix(side) for side in ADDRESSES]) as pool:
        for backend, work in (("ringfence", outer_step), ("gloo", all_reduce)):
            env: list[dict[str, Any]] = [
                {"RINGFENCE_INTERFACE": address, "GLOO_SOCKET_IFNAME": "cable"} for address in ADDRESSES.values()
            ]
            with Capture(hosts.names["switch"], "to-far") as capture:
                assert pool.check(work, 2, backend, env=env) == [True] * 2
            capture.assert_complete()
            assert capture.size > len(SENTENCE) * COPIES
            shown.append(capture.contains([SENTENCE[:24]]))
    assert shown == [False, True]
