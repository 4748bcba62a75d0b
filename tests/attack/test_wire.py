"""Workers reduce, broadcast, send and train on a known pattern, and a capture of every byte does not contain it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ringfence.hooks import int8
from ringfence.link import frames
from ringfence.link.hello import CONFIRM_BYTES, HELLO_BYTES
from tests.attack.eavesdrop import Capture, namespace
from tests.pool import Pool

PATTERN = torch.tensor([0x3F9D7A13, 0x40C5E2B7, 0x3E81D94F, 0x41276CA5], dtype=torch.int32).view(torch.float32)
COPIES = 1024
LARGE = 40 * COPIES  # copies: more than 512 KiB


def patterned(copies: int = COPIES) -> torch.Tensor:
    return PATTERN.repeat(copies)


def searched() -> list[bytes]:
    """The 16 bytes of the pattern, of its half and double, which averaging produces, and of four copies as int8."""
    codes = (PATTERN * 127 / PATTERN.max()).round().to(torch.int8).repeat(4)
    return [bytes(each.numpy().tobytes()) for each in (PATTERN, PATTERN / 2, PATTERN * 2, codes)]


# -- what the workers run: each returns how many bytes of pattern it sends ------------------------------------------


def reduce() -> int:
    """Rank 0 has the pattern and rank 1 zeros: the sum is the pattern."""
    tensor = patterned() if dist.get_rank() == 0 else torch.zeros(4 * COPIES)
    dist.all_reduce(tensor)
    assert torch.equal(tensor, patterned())
    return tensor.nbytes


def reduce_int8() -> int:
    """The same with int8 on the wire: both exchanges send the pattern's codes."""
    tensor = patterned() if dist.get_rank() == 0 else torch.zeros(4 * COPIES)
    int8.all_reduce(tensor)
    assert torch.allclose(tensor, patterned(), atol=PATTERN.max().item() / 126)
    return tensor.numel()


def broadcast_object() -> int:
    objects = [patterned().numpy().tobytes() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(objects, src=0)
    assert objects[0] == patterned().numpy().tobytes()
    return len(objects[0])


def send() -> int:
    tensor = patterned() if dist.get_rank() == 0 else torch.zeros(4 * COPIES)
    if dist.get_rank() == 0:
        dist.send(tensor, 1)
    else:
        dist.recv(tensor, 0)
    assert torch.equal(tensor, patterned())
    return tensor.nbytes


def train() -> int:
    """Weights, inputs and gradients all hold the pattern; DDP broadcasts the first and averages the last."""
    model = nn.Linear(4 * COPIES, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(patterned().view(1, -1))
    parallel = DistributedDataParallel(model)
    inputs = patterned() if dist.get_rank() == 0 else torch.zeros(4 * COPIES)
    parallel(inputs).sum().backward()
    assert torch.equal(model.weight.grad.flatten(), patterned() / 2)
    return model.weight.nbytes


def broadcast() -> int:
    """Large enough for the second worker to forward what the first has sealed."""
    tensor = patterned(LARGE) if dist.get_rank() == 0 else torch.zeros(4 * LARGE)
    dist.broadcast(tensor, src=0)
    assert torch.equal(tensor, patterned(LARGE))
    return tensor.nbytes


def all_gather() -> int:
    """Every worker forwards the parts of others."""
    gathered = torch.zeros(3 * 4 * LARGE)
    dist.all_gather_into_tensor(gathered, patterned(LARGE))
    assert torch.equal(gathered, patterned(3 * LARGE))
    return gathered.nbytes


WORK = {  # with the size of the world
    reduce: 2, reduce_int8: 2, broadcast_object: 2, send: 2, train: 2, broadcast: 3, all_gather: 3
}  # fmt: skip
FORWARDING = (broadcast, all_gather)


# -- the tests ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place() -> Iterator[str]:
    with namespace(f"rf-wire-{os.getpid()}") as name:
        yield name


@pytest.fixture(scope="module")
def workers(place: str) -> Iterator[Pool]:
    with Pool(prefixes=[["ip", "netns", "exec", place]] * max(WORK.values())) as pool:
        yield pool


def captured(workers: Pool, place: str, backend: str, work: Callable[[], int]) -> tuple[Capture, int]:
    """Capture all bytes from before admission to after the work; return them and the least number of bytes of pattern."""
    with Capture(place) as capture:
        given = workers.check(work, WORK[work], backend, renew=True)
    capture.assert_complete()
    return capture, given[0]


def forwarded(flow: bytes) -> int:
    """Return how many bytes of a flow came in FORWARD frames; 0 if the flow is no link."""
    if not flow.startswith(b"RFL1"):
        return 0
    place, found = HELLO_BYTES + CONFIRM_BYTES, 0
    while place + frames.HEADER_BYTES <= len(flow):
        header = frames.read_header(flow[place : place + frames.HEADER_BYTES])
        place += frames.frame_bytes(header)
        found += header.length if header.type == frames.Type.FORWARD else 0
    assert place == len(flow)
    return found


@pytest.mark.promise("Tensors and objects do not appear in plaintext on the wire.")
@pytest.mark.parametrize("work", WORK, ids=lambda work: work.__name__)
def test_the_pattern_does_not_appear_on_the_wire(workers: Pool, place: str, work: Callable[[], int]) -> None:
    capture, given = captured(workers, place, "ringfence", work)
    assert capture.size > given
    assert not capture.contains(searched())
    if work in FORWARDING:
        assert sum(map(forwarded, capture.flows())) >= 2 * patterned(LARGE).nbytes, "nothing was forwarded"


@pytest.mark.promise("Tensors and objects do not appear in plaintext on the wire.")
@pytest.mark.parametrize("work", WORK, ids=lambda work: work.__name__)
def test_the_same_search_finds_the_pattern_with_gloo(workers: Pool, place: str, work: Callable[[], int]) -> None:
    capture, given = captured(workers, place, "gloo", work)
    assert capture.size > given
    assert capture.contains(searched())
