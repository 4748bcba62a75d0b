"""ringfence groups beside a default group of another backend: one session for each set of members."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import ringfence
from ringfence.backend import sessions
from ringfence.errors import ConfigurationError, RingfenceError
from tests.integration.inside import alone, hybrid_losses
from tests.pool import Failure, Pool

WORLD = 4
OVERLAPPING = ((0, 1), (1, 2), (2, 3), (3, 0))  # each worker is in two of them


@pytest.fixture(scope="module")
def workers() -> Iterator[Pool]:
    """Separate workers: a default Gloo group beside configured credentials logs warnings."""
    with Pool() as pool:
        yield pool


def error_of(call: Any, *args: Any) -> str:
    try:
        call(*args)
    except ConfigurationError as error:
        return str(error)
    return ""


def threads() -> int:
    return sum(thread.name == "ringfence" for thread in threading.enumerate())


def sum_of(group: Any) -> float:
    tensor = torch.full((1000,), float(dist.get_rank() + 1))
    dist.all_reduce(tensor, group=group)
    return float(tensor[0].item())


# -- the mesh ---------------------------------------------------------------------------------------------------------


def outer_mesh() -> tuple[list[str], list[float], float]:
    """An outer dimension of ringfence in a run whose default group is Gloo."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"), backend_override={"outer": "ringfence"})
    kinds = [type(mesh.get_group(name)).__name__ for name in ("outer", "inner")]
    losses, _ = hybrid_losses(mesh)
    return kinds, losses, sum_of(mesh.get_group("outer"))


def test_an_outer_dimension_needs_no_group_of_every_worker(workers: Pool) -> None:
    results = workers.check(outer_mesh, WORLD, "gloo", renew=True)
    reference = alone()
    for rank, (kinds, losses, total) in enumerate(results):
        assert kinds == ["RingfenceProcessGroup", "ProcessGroup"]
        assert losses == pytest.approx(reference, rel=1e-5)
        assert total == (4.0 if rank % 2 == 0 else 6.0)  # ranks 0 and 2, or 1 and 3


# -- several sessions -------------------------------------------------------------------------------------------------


def overlapping() -> dict[str, Any]:
    """Two sessions on each worker at a time; one is replaced; all end with their groups."""
    rank = dist.get_rank()
    groups = {ranks: dist.new_group(list(ranks), backend="ringfence") for ranks in OVERLAPPING}
    mine = {ranks: groups[ranks] for ranks in OVERLAPPING if rank in ranks}
    found: dict[str, Any] = {"sums": [sum_of(group) for group in mine.values()], "threads": threads()}
    found["sessions"] = len({id(group._session) for group in mine.values()})
    found["keys"] = len({group._session.engine.keys.session_key.reveal() for group in mine.values()})
    found["ambiguous"] = error_of(ringfence.workers) and error_of(ringfence.counters)
    found["workers"] = [len(ringfence.workers(group)) for group in mine.values()]
    found["counted"] = [ringfence.counters(group).operations["all_reduce"] for group in mine.values()]
    again = {ranks: dist.new_group(list(reversed(ranks)), backend="ringfence") for ranks in OVERLAPPING}
    found["shared"] = [again[ranks]._session is mine[ranks]._session for ranks in mine]
    found["again"] = [sum_of(again[ranks]) for ranks in mine]
    for ranks, group in mine.items():
        dist.destroy_process_group(group)
        assert sum_of(again[ranks]) > 0  # the session lives on with its second group
    for ranks in mine:
        dist.destroy_process_group(again[ranks])
    found["left"] = (threads(), len(sessions._open))
    anew = {ranks: dist.new_group(list(ranks), backend="ringfence") for ranks in OVERLAPPING}
    found["anew"] = [sum_of(anew[ranks]) for ranks in mine]
    dist.barrier()
    dist.destroy_process_group()
    found["end"] = (threads(), len(sessions._open))
    return found


def test_a_worker_takes_part_in_several_sessions_and_ends_them(workers: Pool) -> None:
    results = workers.check(overlapping, WORLD, "gloo", renew=True)
    for rank, found in enumerate(results):
        sums = [float(sum(each + 1 for each in ranks)) for ranks in OVERLAPPING if rank in ranks]
        assert found["sums"] == found["again"] == found["anew"] == sums
        assert found["threads"] == found["sessions"] == found["keys"] == 2
        assert "this process has 2 ringfence sessions" in found["ambiguous"]
        assert found["workers"] == [2, 2] and found["counted"] == [1, 1]
        assert found["shared"] == [True, True]
        assert found["left"] == found["end"] == (0, 0)


def within_everyone() -> tuple[bool, int, int]:
    everyone = dist.new_group(backend="ringfence")
    groups = [dist.new_group(ranks, backend="ringfence") for ranks in ([0, 2], [1, 3])]
    mine = groups[dist.get_rank() % 2]
    assert sum_of(mine) in (4.0, 6.0)
    return mine._session is everyone._session, len(ringfence.workers()), threads()


def test_groups_use_the_session_of_all_workers_if_there_is_one(workers: Pool) -> None:
    assert workers.check(within_everyone, WORLD, "gloo", renew=True) == [(True, WORLD, 1)] * WORLD


# -- names and limits -------------------------------------------------------------------------------------------------


def lose_rank_3() -> str:
    """Worker 1 of the session of ranks 1 and 3 dies."""
    groups = [dist.new_group(ranks, backend="ringfence") for ranks in ([0, 2], [1, 3])]
    mine = groups[dist.get_rank() % 2]
    sum_of(mine)
    dist.barrier()
    if dist.get_rank() == 3:
        os._exit(3)
    try:
        while dist.get_rank() == 1:
            sum_of(mine)
    except RingfenceError as error:
        return str(error)
    return ""


def test_an_error_says_which_workers_are_numbered(workers: Pool) -> None:
    results = workers.run(lose_rank_3, WORLD, "gloo", renew=True)
    assert isinstance(results[3], Failure) and results[3].type == "Death"
    assert "worker 1" in results[1] and results[1].endswith("(workers are numbered within the group of ranks 1, 3)")
    assert results[0] == results[2] == ""


def open_pairs() -> None:
    for ranks in ([0, 2], [1, 3]):
        dist.new_group(ranks, backend="ringfence")


def test_min_workers_counts_the_members_of_the_session(workers: Pool, tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text("version = 1\nmin_workers = 4\n\n[[admit]]\n[admit.secret]\n")
    env = {"RINGFENCE_POLICY": str(policy)}
    for result in workers.run(open_pairs, WORLD, "gloo", env=env, renew=True):
        assert isinstance(result, Failure) and result.type == "AdmissionError"
        assert "a run of 2 workers; its policy asks for at least 4 (min_workers)" in result.message


def advertise_twice() -> str:
    ranks = [0, 1]
    dist.new_group(ranks, backend="ringfence")
    return error_of(lambda: dist.new_group([dist.get_rank()], backend="ringfence", use_local_synchronization=True))


def test_one_advertised_port_serves_one_session(workers: Pool) -> None:
    """No link is dialled here, so the port may be any."""
    env = [{"RINGFENCE_ADVERTISE": f"127.0.0.1:{29700 + rank}"} for rank in range(3)]
    for rank, text in enumerate(workers.check(advertise_twice, 3, "gloo", env=env, renew=True)):
        assert ("RINGFENCE_ADVERTISE names one port" in text) == (rank < 2)


def two_metrics_files(folder: str) -> list[str]:
    groups = [dist.new_group(list(ranks), backend="ringfence") for ranks in OVERLAPPING]
    dist.barrier()
    dist.destroy_process_group()
    del groups
    return sorted(path.name for path in Path(folder).glob(f"run-{os.environ['RANK']}-*.prom"))


def test_each_session_writes_its_own_metrics(workers: Pool, tmp_path: Path) -> None:
    env = {"RINGFENCE_METRICS_FILE": str(tmp_path / "run-{rank}.prom")}
    for names in workers.check(two_metrics_files, WORLD, "gloo", args=(str(tmp_path),), env=env, renew=True):
        assert len(names) == 2
