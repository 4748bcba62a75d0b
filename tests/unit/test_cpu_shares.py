"""CPU shares: addresses share CPU time fairly, and none of them starves."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest

from ringfence import keys
from ringfence.admission.binding import Binding
from ringfence.admission.policy import Evidence, Policy
from ringfence.admission.proofs.secret import SharedSecret
from ringfence.errors import AdmissionError
from ringfence.session.join import verification
from ringfence.session.join.cpu_shares import CpuShares
from ringfence.session.join.verification import Verification
from tests.unit.admission_samples import SECRET, worker


def serve(shares: CpuShares, backlog: Counter[str], costs: dict[str, float], pieces: int) -> Iterator[str]:
    """Serve a backlog as the loop does, piece by piece."""
    for _ in range(pieces):
        address = min((each for each in backlog if backlog[each]), key=shares.start_tag)
        backlog[address] -= 1
        shares.charge(address, costs[address])
        yield address


def test_overloaded_addresses_get_equal_shares() -> None:
    costs = {"a": 0.001, "b": 0.005, "c": 0.02}
    counted = Counter(serve(CpuShares(), Counter(dict.fromkeys(costs, 10_000)), costs, 5000))
    spent = [counted[each] * costs[each] for each in costs]
    assert max(spent) - min(spent) <= 2 * max(costs.values())


def test_a_new_address_is_served_next() -> None:
    shares, costs = CpuShares(), {"attacker": 1.0, "child": 0.001}
    backlog = Counter({"attacker": 10_000})
    list(serve(shares, backlog, costs, 1000))
    backlog["child"] = 1
    assert "child" in list(serve(shares, backlog, costs, 2))


def test_past_work_does_not_delay_an_address() -> None:
    """An attacker at the address of an honest worker must not exhaust anything there for good."""
    shares, costs = CpuShares(), {"shared": 5.0, "other": 0.001}
    list(serve(shares, Counter({"shared": 1000}), costs, 1000))
    backlog = Counter({"shared": 1, "other": 10_000})
    costs["shared"] = 0.001
    waited = list(serve(shares, backlog, costs, 5100)).index("shared")
    assert waited * costs["other"] <= 5.0 + costs["other"], "no longer than the last piece of work took"


def test_a_series_of_new_addresses_does_not_starve_an_old_one() -> None:
    shares, costs = CpuShares(), dict.fromkeys(map(str, range(10_000)), 0.01)
    costs["child"] = 0.01
    list(serve(shares, Counter({"child": 3}), costs, 3))
    backlog = Counter({"child": 1})
    served = []
    for count in range(1000):
        backlog[str(count)] = 1
        served += list(serve(shares, backlog, costs, 1))
    assert served.index("child") <= keys.ADMISSION_PENDING


def test_the_number_of_tags_is_bounded() -> None:
    shares, chance = CpuShares(), random.Random(1)
    for count in range(10_000):
        shares.charge(str(count), chance.random())
    assert len(shares._tags) <= 257


# -- the queue ------------------------------------------------------------------------------------------------------


class Fake:
    """The part of a peer that the queue uses."""

    def __init__(self, address: str) -> None:
        self.address = address


class Spending:
    """Verifies nothing, and reports a given CPU time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: dict[str, float]) -> None:
        self.order: list[str] = []
        self._seconds = seconds
        monkeypatch.setattr(verification, "_verify", self.verify)

    def verify(self, policy: Policy, evidence: Evidence) -> tuple[AdmissionError, float]:
        name = evidence.proof.decode()
        self.order.append(name)
        return AdmissionError(name), self._seconds[name]


def evidence(name: str) -> Evidence:
    return Evidence(worker(1).entry, 1, name.encode(), Binding(name.encode()))


def drain(queue: Verification, count: int) -> list[str]:
    found: list[str] = []
    while len(found) < count:
        found += [str(each) for _, each in queue.finished()]
    return found


@pytest.fixture
def policy() -> Policy:
    return Policy((SharedSecret(SECRET, "run-7"),))


def test_a_queue_serves_the_cheapest_address_first_and_in_order(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = {"a1": 1.0, "a2": 1.0, "a3": 1.0, "b1": 0.1, "b2": 0.1}
    spending = Spending(monkeypatch, costs)
    queue = Verification(lambda: policy, CpuShares())
    for name in costs:
        queue.start(Fake(name[0]), evidence(name))  # type: ignore[arg-type]
    drain(queue, 5)
    queue.close()
    assert spending.order == ["a1", "b1", "b2", "a2", "a3"]


def test_a_disconnected_peer_is_not_verified(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    spending = Spending(monkeypatch, dict.fromkeys(("one", "two", "three"), 0.0))
    queue, peers = Verification(lambda: policy, CpuShares()), [Fake("a"), Fake("a"), Fake("a")]
    for peer, name in zip(peers, ("one", "two", "three"), strict=True):
        queue.start(peer, evidence(name))  # type: ignore[arg-type]
    queue.cancel(peers[1])  # type: ignore[arg-type]
    assert drain(queue, 2) == ["one", "three"]
    queue.close()
    assert spending.order == ["one", "three"]
