"""What workers log when a session has formed: run, roster, and a warning about the default run id."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.integration.test_join_policy import Site, environments
from tests.pool import Pool, values

HERE, THERE = {"RINGFENCE_INTERFACE": "127.0.0.1"}, {"RINGFENCE_INTERFACE": "127.0.0.2"}
NO_NAME = {"RINGFENCE_RUN_ID": None, "TORCHELASTIC_RUN_ID": None}
WARNING = "this run has no id of its own (it is 'none')"


@pytest.fixture(scope="module")
def pair() -> Iterator[Pool]:
    with Pool() as pool:
        pool.check(speak_up, 2, None)
        yield pool


def speak_up() -> None:
    logger = logging.getLogger("ringfence")
    logger.setLevel(logging.INFO)
    logger.addHandler(logging.StreamHandler(sys.stderr))


def logged(pair: Pool, *each: Mapping[str, str | None]) -> list[str]:
    """Return what each worker writes while they form a session."""
    before = [pair.workers[rank].log.stat().st_size for rank in range(2)]
    values(pair.join("ringfence", 2, env=each, renew=True))
    return [pair.workers[rank].log.read_bytes()[start:].decode() for rank, start in enumerate(before)]


def test_rank_0_prints_run_and_generation(pair: Pool) -> None:
    name = {"RINGFENCE_RUN_ID": "ablation 7", "RINGFENCE_GENERATION": "3"}
    first, second = logged(pair, {**HERE, **name}, {**THERE, **name})
    assert re.search(r"ringfence: 2 workers, run ablation 7, generation 3, session [0-9a-f]{8}, AES-256-GCM, ", first)
    assert "ringfence: 2 workers" not in second
    assert WARNING not in first + second


def test_rank_0_prints_how_many_workers_each_proof_admitted(pair: Pool, tmp_path: Path) -> None:
    either = environments(Site(tmp_path), "either")
    first, _ = logged(pair, either[0], either[1])
    assert "X25519MLKEM768, admitted 1 by certificate, 1 by shared secret" in first
    first, _ = logged(pair, either[1], either[2])
    assert "X25519MLKEM768, admitted by certificate" in first


def test_a_world_of_one_reports_no_proof(pair: Pool) -> None:
    before = pair.workers[0].log.stat().st_size
    values(pair.join("ringfence", 1, renew=True))
    text = pair.workers[0].log.read_bytes()[before:].decode()
    assert "ringfence: 1 worker, " in text and "AES-256-GCM, no other worker, so no proof\n" in text


@pytest.mark.promise("Runs with different ids or generations cannot be spliced, even with one secret.")
def test_rank_0_warns_of_a_default_run_id_on_several_machines(pair: Pool) -> None:
    first, second = logged(pair, {**HERE, **NO_NAME}, {**THERE, **NO_NAME})
    assert first.count(WARNING) == 1
    assert "Set RINGFENCE_RUN_ID, or torchrun's --rdzv-id" in first
    assert WARNING not in second


def test_a_default_run_id_on_one_machine_causes_no_warning(pair: Pool) -> None:
    first, _ = logged(pair, {**HERE, **NO_NAME}, {**HERE, **NO_NAME})
    assert "run none, generation" in first
    assert WARNING not in first


def test_every_worker_logs_the_whole_roster_digest(pair: Pool) -> None:
    """In full: an attacker that makes two rosters could make a few digits of their digests agree."""
    digests = []
    for rank, text in enumerate(logged(pair, HERE, HERE)):
        digests += re.findall(rf"worker {rank} of 2 holds the roster ([0-9a-f]{{64}})\b", text)
    assert len(digests) == 2
    assert len(set(digests)) == 1


def test_rank_0_logs_the_admitted_workers(pair: Pool) -> None:
    first, second = logged(pair, HERE, THERE)
    assert re.search(r"worker 0 was admitted by shared secret: shared secret, 127\.0\.0\.1:\d+", first)
    assert re.search(r"worker 1 was admitted by shared secret: shared secret, 127\.0\.0\.2:\d+", first)
    assert "was admitted by shared secret" not in second  # it would say the same; it does so when it debugs
