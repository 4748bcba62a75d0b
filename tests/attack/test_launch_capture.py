"""An unmodified script on two machines under `ringfence run`: what a capture of all traffic and all listeners give away."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.attack.launched import PORT, RUN_ID, Run, launched, says_nothing
from tests.integration.launch_script import OBJECT, SENTENCE
from tests.integration.netns import Hosts

pytestmark = pytest.mark.timeout(600)

ROUNDING = 1e-6  # weights are below 1


def in_base64(word: bytes) -> list[bytes]:
    """A word within base64, which c10d's rendezvous uses, at each of the three places where it can begin."""
    found = [base64.b64encode(bytes(shift) + word) for shift in range(3)]
    return [each[(4 * shift + 2) // 3 : -4] for shift, each in enumerate(found)]


# What stock torchrun sends in plaintext, by what it is. Any of the patterns shows it.
SECRETS = {
    "tensor": [SENTENCE[:40]],
    "object": [OBJECT[:30].encode()],
    "keys of torch": [b"default_pg"],
    "keys of torchelastic": [b"torchelastic/role_info"],
    "run id": [RUN_ID.encode()],
    "state of the rendezvous": [b"_NodeDesc", *in_base64(b"_NodeDesc")],
}
# What ringfence writes into the store and into messages about rounds.
OURS = [b"ringfence/", b'"generation"', b'"agent"']


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts() as both:
        yield both


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("launched")


@pytest.fixture(scope="module")
def sealed(hosts: Hosts, folder: Path) -> Run:
    (folder / "sealed").mkdir()
    return launched("sealed", hosts, folder / "sealed", garbage=True)


@pytest.fixture(scope="module")
def stock(hosts: Hosts, folder: Path) -> Run:
    (folder / "stock").mkdir()
    return launched("stock", hosts, folder / "stock", garbage=False)


@pytest.mark.promise("Under `ringfence run`, tensors, objects, the store and the rendezvous are not sent in plaintext.")
@pytest.mark.parametrize("kind", SECRETS)
def test_the_capture_shows_nothing(sealed: Run, kind: str) -> None:
    assert sum(capture.size for capture in sealed.captures) > len(SENTENCE) + len(OBJECT)
    assert not any(sealed.contains(pattern) for pattern in SECRETS[kind])


@pytest.mark.promise("Under `ringfence run`, tensors, objects, the store and the rendezvous are not sent in plaintext.")
def test_the_capture_shows_nothing_of_the_sealed_store(sealed: Run) -> None:
    assert not any(sealed.contains(pattern) for pattern in OURS)


@pytest.mark.promise("Under `ringfence run`, tensors, objects, the store and the rendezvous are not sent in plaintext.")
@pytest.mark.nightly
@pytest.mark.real_start  # forked agents of stock torchrun do not end: so are all tests that start them
@pytest.mark.parametrize("kind", SECRETS)
def test_the_same_search_finds_all_under_torchrun(stock: Run, kind: str) -> None:
    assert any(stock.contains(pattern) for pattern in SECRETS[kind])


@pytest.mark.promise("Under `ringfence run`, no listener answers an unauthenticated client, and none is a TCPStore.")
def test_no_listener_answers_an_unauthenticated_client(sealed: Run) -> None:
    """Neither silence, nor the query of a TCPStore's client, nor garbage, nor TLS without a certificate."""
    assert PORT in [each.address[1] for each in sealed.listeners]
    for listener in sealed.listeners:
        assert says_nothing(listener.to_query), listener
        assert says_nothing(listener.to_garbage), listener
        assert not listener.to_tls, listener


@pytest.mark.promise("Under `ringfence run`, no listener answers an unauthenticated client, and none is a TCPStore.")
@pytest.mark.nightly
@pytest.mark.real_start
def test_the_store_of_torchrun_answers_the_same_query(stock: Run) -> None:
    assert any(not says_nothing(listener.to_query) for listener in stock.listeners)


@pytest.mark.promise("An unmodified script trains under `ringfence run` to the weights of torchrun with Gloo.")
@pytest.mark.nightly
@pytest.mark.real_start
def test_the_weights_are_those_of_torchrun(sealed: Run, stock: Run) -> None:
    """But for rounding: Gloo adds the gradients of four workers in another order."""
    ours, theirs = (torch.load(io.BytesIO(run.weights)) for run in (sealed, stock))
    assert len(ours) == len(theirs) == 4
    for one, two in zip(ours, theirs, strict=True):
        assert float((one - two).abs().max()) <= ROUNDING
