"""A store that hands out ranks and world sizes can split a job; `min_workers` prevents it."""

from __future__ import annotations

import pytest

from ringfence.admission.proofs import kinds
from ringfence.config.settings import Settings
from tests.integration.join_cluster import SECRET, MemoryStore, World

ONE_RUN = {"run_id": "run-7", "generation": "3"}


def no_files(path: str, limit: int) -> bytes:
    raise AssertionError("this policy names no file")


def settings(least: int) -> Settings:
    text = f"version = 1\nmin_workers = {least}\n[[admit]]\n[admit.secret]\n"
    return Settings(SECRET, policy=kinds.read(text.encode(), no_files), **ONE_RUN)  # type: ignore[arg-type]


def halves(least: int, sizes: tuple[int, ...] = (2, 2)) -> list[World]:
    """A job of four workers with one run id and one secret. The store gives each part its own world."""
    worlds = [World(size, store=MemoryStore()) for size in sizes]
    for world in worlds:
        world.start(range(world.size), dict.fromkeys(range(world.size), settings(least)))
    return worlds


@pytest.mark.promise("Without `min_workers` a store can split a job into sessions that train apart.")
def test_without_a_minimum_a_store_can_split_the_job_in_two() -> None:
    """All four workers are admitted, in two sessions. min_workers exists for this reason."""
    one, two = halves(least=1)
    assert one.members()[0].roster.digest != two.members()[0].roster.digest
    one.close()
    two.close()


@pytest.mark.promise("A store that splits the job is refused by every worker, if `min_workers` is the job's size.")
def test_a_job_split_in_two_is_refused_by_every_worker() -> None:
    for world in halves(least=4):
        for rank in range(world.size):
            error = world.error(rank)
            assert "was started in a run of 2 workers; its policy asks for at least 4 (min_workers)" in error
        assert world.store.lookups == 0, "the worker asked the store first"


@pytest.mark.promise("A store that splits the job is refused by every worker, if `min_workers` is the job's size.")
def test_a_world_of_one_worker_is_refused() -> None:
    """A worker alone needs no proof of others: it would train on its share of the data and succeed."""
    for world in halves(least=4, sizes=(1, 1, 1, 1)):
        assert "a run of 1 worker; its policy" in world.error(0)


def test_the_whole_job_is_admitted_under_the_same_policy() -> None:
    (world,) = halves(least=4, sizes=(4,))
    assert [member.world_size for member in world.members()] == [4, 4, 4, 4]
    world.close()


def test_workers_with_different_minimums_are_refused() -> None:
    world = World(2)
    world.start([0], {0: settings(1)})
    world.start([1], {1: settings(2)})
    for rank in range(2):
        assert "have different policies" in world.error(rank)
