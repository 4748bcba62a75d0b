"""Workers that advertise a name: it is resolved where it is dialled, of whatever family, or the error says whose it is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests import ports
from tests.pool import Failure, Pool, values

HOSTS = "127.0.0.1 localhost\n127.0.0.1 four.example\n::1 six.example\n"


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pool]:
    """Two workers that know the names above."""
    hosts = tmp_path / "hosts"
    hosts.write_text(HOSTS)
    prefix = ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', str(hosts)]
    with Pool([prefix, prefix]) as workers:
        yield workers


def add() -> float:
    tensor = torch.ones(1000)
    dist.all_reduce(tensor)
    return tensor[0].item()


@pytest.mark.parametrize(
    ("name", "host"),
    [("four.example", "127.0.0.1"), pytest.param("six.example", "::1", marks=pytest.mark.nightly)],
)
def test_a_worker_is_dialled_by_its_name(pair: Pool, name: str, host: str) -> None:
    port = ports.port()
    named = {
        "RINGFENCE_INTERFACE": host,
        "RINGFENCE_PORTS": str(port),
        "RINGFENCE_ADVERTISE": f"{name}:{port}",
    }
    assert pair.check(add, 2, env=[{}, named]) == [2.0, 2.0]


def test_an_unresolvable_name_is_reported_with_its_worker(pair: Pool) -> None:
    results = pair.run(add, 2, env=[{}, {"RINGFENCE_ADVERTISE": "nowhere.invalid:4000"}])
    assert all(isinstance(result, Failure) for result in results)
    assert results[0].type == "PeerLostError"
    assert "worker 1 cannot be dialled: nowhere.invalid does not resolve on this machine" in results[0].message
    assert "RINGFENCE_ADVERTISE" in results[0].message
    assert results[1].type in ("AbortedError", "PeerLostError")
    assert "nowhere.invalid" in results[1].message


@pytest.mark.nightly
def test_an_unreachable_address_is_reported_with_its_worker(pair: Pool) -> None:
    """A broadcast address: the kernel says so at once, and sends nothing. It may be an outage, so the worker tries on."""
    outage = {"RINGFENCE_OUTAGE_TIMEOUT": "2"}
    results = pair.run(add, 2, env=[outage, {**outage, "RINGFENCE_ADVERTISE": "255.255.255.255:4000"}])
    text = "worker 1 cannot be dialled at 255.255.255.255, port 4000: Network is unreachable"
    assert results[0].type == "PeerLostError"
    assert "worker 1: no answer for 2 s" in results[0].message
    assert text in results[0].message
    assert "RINGFENCE_ADVERTISE there" in results[0].message
    assert text in results[1].message


@pytest.mark.nightly
def test_a_parent_that_advertises_a_name_is_found_by_it(pair: Pool) -> None:
    block = ports.block()
    named = {
        "RINGFENCE_INTERFACE": "::1",
        "RINGFENCE_ADVERTISE": f"six.example:{block[0]}",
        "RINGFENCE_PORTS": f"{block[0]}-{block[-1]}",
    }
    assert values(pair.join("ringfence", 2, env=[named, {"RINGFENCE_INTERFACE": "::1"}])) == [None, None]
