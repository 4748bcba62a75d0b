"""A store that hands out ranks and sizes can split a job into worlds that train apart; `min_workers` is against it."""

from __future__ import annotations

import time

import pytest

from ringfence.admission.proofs import kinds
from ringfence.settings import Settings
from tests.integration.join_cluster import SECRET, MemoryStore, World

ONE_RUN = {"run_id": "run-7", "generation": "3"}


def no_files(path: str, limit: int) -> bytes:
    raise AssertionError("this policy names no file")


def settings(least: int) -> Settings:
    text = f"version = 1\nmin_workers = {least}\n[[admit]]\n[admit.secret]\n"
    return Settings(SECRET, policy=kinds.read(text.encode(), no_files), **ONE_RUN)  # type: ignore[arg-type]


def halves(least: int, sizes: tuple[int, ...] = (2, 2)) -> list[World]:
    """A job of four workers, of one run, with one secret. Its store shows each part a world of its own."""
    worlds = [World(size, timeout=10.0, store=MemoryStore()) for size in sizes]
    for world in worlds:
        world.start(range(world.size), dict.fromkeys(range(world.size), settings(least)))
    return worlds


@pytest.mark.promise("Without `min_workers` a store can split a job into sessions that train apart.")
def test_without_a_minimum_a_store_can_split_the_job_in_two() -> None:
    """The attack, where nothing stands against it: all four are admitted, in two sessions. It is why min_workers exists."""
    one, two = halves(least=1)
    assert one.members()[0].roster.digest != two.members()[0].roster.digest
    one.close()
    two.close()


@pytest.mark.promise("A store that splits the job is refused by every worker, if `min_workers` is the job's size.")
def test_a_store_that_splits_the_job_in_two_is_refused_by_every_worker_at_once() -> None:
    started = time.monotonic()
    for world in halves(least=4):
        for rank in range(world.size):
            error = world.error(rank)
            assert "was told that the run has 2 workers; its policy asks for at least 4 (min_workers)" in error
        assert world.store.lookups == 0, "it was known before anybody was asked"
    assert time.monotonic() - started < 5


@pytest.mark.promise("A store that splits the job is refused by every worker, if `min_workers` is the job's size.")
def test_a_store_that_makes_every_worker_a_world_of_its_own_is_refused() -> None:
    """A world of one would need nobody's proof: it would train alone, on its share of the data, and call it done."""
    for world in halves(least=4, sizes=(1, 1, 1, 1)):
        assert "the run has 1 worker; its policy" in world.error(0)


def test_the_whole_job_is_admitted_under_the_same_policy() -> None:
    (world,) = halves(least=4, sizes=(4,))
    assert [member.world_size for member in world.members()] == [4, 4, 4, 4]
    world.close()


def test_workers_with_different_minimums_find_out_and_name_both() -> None:
    world = World(2, timeout=6.0)
    world.start([0], {0: settings(1)})
    world.start([1], {1: settings(2)})
    assert "have different policies" in world.error(1)
    assert "have different policies" in world.error(0)
