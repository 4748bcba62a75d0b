"""The example of a learner and its actors learns, sends each byte of weights once, and refuses what is no trajectory."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ringfence as ringfence_package
from ringfence.config.private_files import new_secret_file
from ringfence.errors import MismatchError
from tests.cli.command import ringfence
from tests.integration.test_readme import ROOT
from tests.pool import ON_TWO_MACHINES, Failure, Pool
from tests.progress_thread import between_steps

EXAMPLE = ROOT / "examples" / "learner_and_actors.py"
WORLD, UPDATES = 4, 40
WEIGHTS, HEADER, STEP = 549_908, 16, 16  # bytes
Sent = dict[int, tuple[int, int]]  # worker -> bytes that were sealed, and bytes that stayed inside the machine


def sent() -> Sent:
    return {
        peer.worker: (peer.sealed_sent, peer.local_sent) for peer in between_steps(ringfence_package.counters).peers
    }


def trained() -> tuple[list[float], Sent]:
    """What the learner returns, and what this worker has sent to each other one."""
    dist.barrier()  # opens the group
    before = sent()
    returns = runpy.run_path(str(EXAMPLE))["train"](UPDATES)
    return returns, {
        worker: (sealed - before.get(worker, (0, 0))[0], local - before.get(worker, (0, 0))[1])
        for worker, (sealed, local) in sent().items()
    }


@pytest.mark.parametrize(
    ("way", "weights"),
    [
        # From worker to worker, with the learner's ciphertext.
        ("ringfence", {(0, 1): "sealed", (1, 2): "sealed", (2, 3): "sealed"}),
        # Workers 0 and 2 share a machine, and 1 and 3 another one: the weights leave that of the learner once.
        (ON_TWO_MACHINES, {(0, 1): "sealed", (0, 2): "local", (1, 3): "local"}),
    ],
)
def test_the_learner_seals_weights_once_for_all_actors(
    pool: Pool, way: str, weights: dict[tuple[int, int], str]
) -> None:
    results = pool.check(trained, WORLD, way, renew=True)
    returns = results[0][0]
    assert len(returns) == UPDATES
    assert sum(returns[:5]) / 5 < -18 and sum(returns[-5:]) / 5 > -9  # 6 steps are the fewest on average

    found = {(rank, peer): bytes_ for rank, (_, sent_) in enumerate(results) for peer, bytes_ in sent_.items()}
    steps = [found.pop((actor, 0)) for actor in range(1, WORLD)]
    total = round(-sum(returns) * 16 * (WORLD - 1))  # of 16 episodes of each actor
    assert sum(map(sum, steps)) == UPDATES * HEADER * (WORLD - 1) + total * STEP
    whole = WEIGHTS * UPDATES
    expected = {pair: (whole, 0) if kind == "sealed" else (0, whole) for pair, kind in weights.items()}
    assert {pair: bytes_ for pair, bytes_ in found.items() if any(bytes_)} == expected


def refuse() -> list[str] | None:
    """Worker 1 sends what is no trajectory of update 0; return what the learner says of each."""
    example, wrong = runpy.run_path(str(EXAMPLE)), torch.ones(5, 4)
    wrong[3, 3] = float("nan")
    if dist.get_rank() == 1:
        for header in ([1, 5], [0, 0], [0, 10**12]):
            dist.send(torch.tensor(header), 0)
        example["send"](wrong, 0)
        example["send"](-wrong[:3], 0)
        dist.send(torch.tensor([0, 5]), 0)
        dist.send(torch.ones(6, 4), 0)
        return None
    errors = []
    for _ in range(5):
        with pytest.raises(ValueError, match="actor 1") as raised:
            example["receive"](1, 0)
        errors.append(str(raised.value))
    with pytest.raises(MismatchError, match="dtype and element count"):
        example["receive"](1, 0)
    return errors


def test_the_learner_refuses_what_is_no_trajectory(pool: Pool) -> None:
    errors = pool.run(refuse, 2, renew=True)[0]
    assert not isinstance(errors, Failure), errors
    assert [error.partition("announces ")[2].partition(" in ")[0] for error in errors[:3]] == [
        "5 steps of update 1",
        "0 steps of update 0",
        f"{10**12} steps of update 0",
    ]
    assert all("no trajectory" in error for error in errors[3:])


def test_the_command_of_the_example(tmp_path: Path) -> None:
    new_secret_file(tmp_path / "run.secret")
    words = ("run", "--nproc-per-node", str(WORLD), str(EXAMPLE), "--updates", "1")
    done = ringfence(*words, folder=tmp_path, RINGFENCE_SECRET_FILE="run.secret", RINGFENCE_SAME_HOST="sealed")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^update 0: mean return -1\d\.\d\d$", done.stdout, re.MULTILINE)
    sealed = dict(re.findall(r"^to worker (\d): (\d+) bytes sealed, 0 in shared memory$", done.stdout, re.MULTILINE))
    assert WEIGHTS <= int(sealed["1"]) < WEIGHTS + 1000 and int(sealed["2"]) < 1000 and int(sealed["3"]) < 1000
