"""The benchmark of admission: its groups are admitted for real, and its predictions hold where they can be checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ringfence import keys
from ringfence.admission import tree
from ringfence.admission.messages import MessageSplitter
from ringfence.admission.proofs import certificate
from ringfence.admission.proofs.secret import SharedSecret
from ringfence.errors import RingfenceError
from ringfence_lab.bench import admission, admission_proofs
from ringfence_lab.bench.admission import STAGES, admit, depth_of, extrapolated, predict


class Work:
    """Stands for the clock: the time that has passed is the work that was done, in nanoseconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done = 0
        self._patch = monkeypatch
        monkeypatch.setattr(admission, "time", self)

    def thread_time_ns(self) -> int:
        return self.done

    def count(self, owner: object, name: str, amount: Callable[..., int]) -> None:
        """Count calls of a function; `amount` returns how much work one is."""
        original = getattr(owner, name)

        def counted(*arguments: Any) -> Any:
            self.done += amount(*arguments)
            return original(*arguments)

        self._patch.setattr(owner, name, counted)


@pytest.mark.parametrize("size", [2, 6, 21])
def test_the_cost_of_a_group_counts_what_its_workers_do(size: int) -> None:
    cost = admit(size)
    edges = size - 1
    assert cost.handshakes_mean == pytest.approx(2 * edges / size)
    assert cost.handshakes_max <= 1 + keys.TREE_FANOUT
    assert set(cost.cpu_mean) == set(cost.cpu_root) == set(STAGES)
    assert all(seconds > 0 for seconds in cost.cpu_mean.values())
    assert cost.bytes_mean * size > edges * size * 100, "every edge carries the whole roster"
    assert cost.critical_path > 0


def test_workers_with_certificates_are_admitted_too_and_pay_for_signatures(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work(monkeypatch)
    work.count(certificate, "verify", lambda *_: 1)
    by_certificate, by_secret = admit(21, proof="certificate"), admit(21)
    # Each verifies the listings of the 20 others once; some have done so when the entries passed.
    assert 19 < 1e9 * by_certificate.cpu_mean["check"] <= 20
    assert by_secret.cpu_mean["check"] == 0
    assert by_certificate.bytes_mean > 2 * by_secret.bytes_mean


def test_those_who_do_not_verify_the_roster_are_in_the_same_session_and_not_in_its_mean(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work = Work(monkeypatch)
    work.count(MessageSplitter, "feed", lambda _, data: len(data))
    some, everyone = admit(40, verifiers=3), admit(40)
    assert 3 <= some.verifiers <= 5
    assert everyone.verifiers == 40
    assert some.bytes_mean == pytest.approx(everyone.bytes_mean, rel=0.02)
    assert everyone.cpu_mean["roster"] > 0
    assert some.cpu_mean["roster"] == pytest.approx(everyone.cpu_mean["roster"], rel=0.05), "the mean is over verifiers"


def test_a_worker_that_comes_late_passes_up_many_entries_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose subtree was there before it: several messages go up one connection at once."""
    monkeypatch.setattr(tree, "ENTRIES_PER_MESSAGE", 2)
    assert admit(60, seed=1).workers == 60


def test_a_world_whose_workers_do_not_agree_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    class Torn(SharedSecret):
        def __init__(self, secret: keys.Secret, run_id: str) -> None:
            super().__init__(keys.Secret(secret.reveal()[::-1] if made else secret.reveal()), run_id)
            made.append(1)

    made: list[int] = []
    monkeypatch.setattr(admission_proofs, "SharedSecret", Torn)
    with pytest.raises(RingfenceError, match="refuse each other"):
        admit(2)


def test_the_depth_is_that_of_the_tree() -> None:
    assert [depth_of(size) for size in (1, 2, 5, 6, 21, 22, 4096, 16384)] == [0, 1, 1, 2, 2, 3, 6, 7]


def test_a_fit_finds_the_line_that_is_there() -> None:
    assert [extrapolated([1, 2, 10], [12, 14, 30], x) for x in (0, 1, 100)] == pytest.approx([10, 12, 210])
    assert extrapolated([3, 3], [5, 5], 100) == 5
    assert extrapolated([1, 2], [2, 1], 100) == 0, "no cost is below zero"


def test_a_prediction_of_bytes_comes_true() -> None:
    """Bytes, unlike seconds, do not depend on the machine: a world of 170 is predicted from smaller ones within 5 %."""
    costs = [admit(size) for size in (10, 30, 85)]
    predicted, measured = predict(costs, 170), admit(170)
    assert predicted.depth == measured.depth
    assert predicted.handshakes_mean == measured.handshakes_mean
    assert predicted.handshakes_max == measured.handshakes_max
    assert predicted.bytes_mean == pytest.approx(measured.bytes_mean, rel=0.05)
