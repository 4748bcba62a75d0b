"""Functions to inspect a run: the admitted workers and the counters."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ringfence
from ringfence.errors import ConfigurationError
from tests.integration.test_join_policy import BY_BOTH, BY_CERTIFICATE, Site
from tests.pool import Pool


def everybody() -> list[dict[str, Any]]:
    return [dataclasses.asdict(worker) for worker in ringfence.workers()]


def test_every_worker_lists_the_admitted_workers(pool: Pool) -> None:
    results = pool.check(everybody, 3)
    assert results[0] == results[1] == results[2]
    assert [each["rank"] for each in results[0]] == [0, 1, 2]
    for each in results[0]:
        assert each["admitted_by"] == "shared secret" and each["identity"] == ""
        assert each["address"].startswith("127.0.0.1:") and int(each["address"].rpartition(":")[2]) > 0
    for field, length in (("public_key", 64), ("proof_digest", 64), ("address", None)):
        found = {each[field] for each in results[0]}
        assert len(found) == 3 and (length is None or {len(each) for each in found} == {length})


@pytest.mark.parametrize(
    ("policy", "by"), [(BY_CERTIFICATE, "certificate"), (BY_BOTH, "shared secret and certificate")]
)
def test_identity_is_the_name_in_the_certificate(pool: Pool, tmp_path: Path, policy: str, by: str) -> None:
    site = Site(tmp_path)
    certificates = [site.certificate(f"w{rank}") for rank in range(3)]
    env = [{**site.policy(policy), **site.secret(), **certificate} for certificate in certificates]
    for result in pool.check(everybody, 3, env=env):
        assert [each["identity"] for each in result] == [f"spiffe://example.org/worker/w{rank}" for rank in range(3)]
        assert {each["admitted_by"] for each in result} == {by}


def none_left() -> str:
    dist.destroy_process_group()
    with pytest.raises(ConfigurationError) as caught:
        ringfence.workers()
    return str(caught.value)


def test_observing_without_a_process_group_raises(pool: Pool) -> None:
    with pool.fresh() as workers:
        assert all("no ringfence process group" in text for text in workers.check(none_left, 2))


def under_debug(level: str) -> tuple[float, str]:
    """A matching collective and a mismatch: torch's debug level does not change the error."""
    dist.set_debug_level(getattr(dist.DebugLevel, level))
    group = dist.new_group()
    tensor = torch.ones(4)
    dist.all_reduce(tensor, group=group)
    total = tensor[0].item()
    with pytest.raises(ringfence.RingfenceError) as caught:
        dist.all_reduce(tensor, dist.ReduceOp.MAX if dist.get_rank() else dist.ReduceOp.SUM, group)
    return total, str(caught.value)


@pytest.mark.parametrize("level", ["OFF", "DETAIL"])
def test_mismatch_names_both_collectives_at_any_debug_level(pool: Pool, level: str) -> None:
    with pool.fresh() as workers:
        for total, text in workers.check(under_debug, 2, args=(level,)):
            assert total == 2.0
            assert "all_reduce #2 (4 x float32, max)" in text and "all_reduce #2 (4 x float32, sum)" in text
