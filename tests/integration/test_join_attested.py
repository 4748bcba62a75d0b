"""Processes admit each other by fresh hardware evidence under a test root; all others are refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.integration.admitted_worker import assert_refused
from tests.integration.attested_worker import Chip, Plan, run
from tests.unit import snp_mint, tdx_mint
from tests.unit.test_collect import VCEK, table


def tdx_chip(**changes: Any) -> Chip:
    return lambda data, level: tdx_mint.foundry().quote(data, **changes) + bytes(100)  # type: ignore[arg-type]


def snp_chip(product: str = "milan", **changes: Any) -> Chip:
    return lambda data, level: snp_mint.foundry(product).report(data, **changes)  # type: ignore[arg-type]


def plan(kind: str, product: str = "milan") -> Plan:
    """A worker of this kind, in a world where TDX and SEV-SNP of that product line are both admitted."""
    td, vm = tdx_mint.foundry(), snp_mint.foundry(product)
    auxblob = table((VCEK, vm.certificate()))
    return Plan(kind, td.rules, td.root, vm.rules, {product: vm.pem}, auxblob)


def only(kind: str, made: Plan) -> Plan:
    """The same worker, in a world of its own kind only."""
    if kind == "tdx":
        return replace(made, snp_rules=None, snp_roots=None)
    return replace(made, tdx_rules=None, tdx_root=None)


def joined(said: list[tuple[object, ...]]) -> list[object]:
    """Everybody has the same roster and the same keys; how they were admitted."""
    assert {each[0] for each in said} == {"joined"}, said
    assert len({each[1:3] for each in said}) == 1
    return list(said[0][3])  # type: ignore[call-overload]


def errors_of(folder: Path, plans: list[Plan], chips: list[Chip]) -> Callable[[float], list[dict[str, str]]]:
    """What `assert_refused` calls with a patience: workers none of which joins."""

    def errors(patience: float) -> list[dict[str, str]]:
        said = run(folder / f"store-{patience:g}", plans, chips, timeout=patience)
        return [{str(kind): str(text)} for kind, text in said]

    return errors


def test_tdx_guests_admit_each_other(tmp_path: Path) -> None:
    said = run(tmp_path / "store", [only("tdx", plan("tdx"))] * 3, [tdx_chip()] * 3)
    assert joined(said) == ["TDX"]


def test_sev_snp_guests_admit_each_other(tmp_path: Path) -> None:
    said = run(tmp_path / "store", [only("snp", plan("snp", "turin"))] * 3, [snp_chip("turin")] * 3)
    assert joined(said) == ["SEV-SNP"]


def test_guests_of_both_kinds_admit_each_other(tmp_path: Path) -> None:
    plans, chips = [plan("tdx"), plan("snp"), plan("tdx"), plan("snp")], [tdx_chip(), snp_chip()] * 2
    assert joined(run(tmp_path / "store", plans, chips)) == ["SEV-SNP", "TDX"]


@pytest.mark.promise("Evidence that takes long to collect does not stop a run, and collections are limited.")
def test_a_run_forms_with_slow_evidence(tmp_path: Path) -> None:
    """Rank 0 collects for four children, one after the other, and that takes longer than one report may take.

    The last one waits for its turn: nobody hangs up, and no report is made in vain.
    """
    asked: Counter[int] = Counter()

    def counting(rank: int) -> Chip:
        def chip(data: bytes, level: int) -> bytes:
            asked[rank] += 1
            return snp_chip()(data, level)

        return chip

    slow = replace(only("snp", plan("snp")), seconds=2.0, patience=7.5)
    said = run(tmp_path / "store", [slow] * 5, [counting(rank) for rank in range(5)])
    assert joined(said) == ["SEV-SNP"]
    assert asked == {0: 4, 1: 1, 2: 1, 3: 1, 4: 1}
    assert max(each[4] for each in said) >= 10.0, said  # type: ignore[type-var, operator]  # of the worker that began first


def test_a_guest_with_another_measurement_is_refused(tmp_path: Path) -> None:
    plans = [plan("tdx"), plan("tdx"), plan("snp")]
    chips = [tdx_chip(), tdx_chip(changes={376: bytes(48)}), snp_chip()]
    reasons = ["", "TDX refuses rank 1: its rtmr1 is 0000", "1 of 3 workers are missing: rank 1"]
    assert_refused(reasons, errors_of(tmp_path, plans, chips))  # all: a session is complete or it is nothing


def test_a_replayed_report_is_refused(tmp_path: Path) -> None:
    """A chip that answers with a report made before, however genuine: it carries other bytes, and the collector sees it."""
    stale = snp_mint.foundry().report(bytes(64))
    plans = [only("snp", plan("snp"))] * 2
    reasons = ["", "has other report data than requested"]
    assert_refused(reasons, errors_of(tmp_path, plans, [snp_chip(), lambda data, level: stale]))


@pytest.mark.promise("A policy cannot name a root of trust for hardware.")
def test_production_verifiers_refuse_what_a_test_root_signed(tmp_path: Path) -> None:
    """The same workers under the pinned roots, which is all that a policy file can lead to."""
    made = replace(only("snp", plan("snp")), snp_roots=None)
    reasons = ["", "was not issued under a pinned root of AMD"]
    assert_refused(reasons, errors_of(tmp_path / "snp", [made] * 2, [snp_chip()] * 2))
    made = replace(only("tdx", plan("tdx")), tdx_root=None)
    reasons = ["", "TDX refuses rank 1: the quote does not verify"]
    assert_refused(reasons, errors_of(tmp_path / "tdx", [made] * 2, [tdx_chip()] * 2))
