"""`ringfence.rejoin()`: workers that are left after a loss join the next round in their own process."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

import ringfence as ringfence_package
from ringfence.config.private_files import new_secret_file
from ringfence.errors import ConfigurationError
from tests.cli.command import ringfence
from tests.integration.chaos import kill, tails
from tests.integration.chaos_nodes import Nodes, Shape, is_spare
from tests.integration.rejoins import SCRIPT, Watched
from tests.integration.soak import soak
from tests.limits import HANG

pytestmark = pytest.mark.timeout(900)  # several waits, each with a limit of its own

pytestmark = pytest.mark.real_start  # processes are found by their command lines
FLAGS = ("--rejoin", "--rdzv-conf", "spares=0.1,last_call_timeout=1")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the weights after a training that lost nothing."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with Nodes(Shape("ringfence", 2, 1, flags=FLAGS, script=SCRIPT), folder) as nodes:
        run = Watched(nodes)
        for node in range(2):
            nodes.start(node)
        return str(run.wait(nodes.digest))


@pytest.mark.nightly  # test_audit.py has a kill and a rejoin in the gate
def test_the_other_worker_stays_when_one_is_killed(undisturbed: str, tmp_path: Path) -> None:
    """The worker that is left keeps its process and loses no step; the weights are those of a training without a kill."""
    with Nodes(Shape("ringfence", 2, 1, flags=FLAGS, script=SCRIPT), tmp_path) as nodes:
        run = Watched(nodes)
        for node in range(2):
            nodes.start(node)
        run.wait(lambda: nodes.last_step() >= 10)
        stays, victim = nodes.workers(0)[0], nodes.workers(1)[0]
        run.wait(lambda: any(is_spare(pid) for pid, _ in nodes.processes(1)))
        killed = time.time()
        kill([victim])
        print(f"from the kill to the next step of both: {run.all_step(killed, 2) - killed:.2f} s")
        digest = run.wait(nodes.digest)
        for agent in nodes.agents.values():
            assert agent.wait(HANG) == 0, tails(tmp_path)
        of_rank_0 = [each for each in run.steps() if each["rank"] == 0]
        assert {each["pid"] for each in of_rank_0} == {stays}
        assert [each["step"] for each in of_rank_0] == list(range(40))
        assert digest == undisturbed
        assert nodes.left_over() == []


@pytest.mark.nightly
def test_four_workers_go_on_as_three_and_grow_to_four(tmp_path: Path) -> None:
    """A node is killed and comes back. The other three workers keep their processes and lose no step."""
    shape = Shape("ringfence", 4, 1, min_nodes=3, steps=4000, flags=("--rejoin",), script=SCRIPT)
    with Nodes(shape, tmp_path) as nodes:
        run = Watched(nodes)
        for node in range(4):
            nodes.start(node)
        run.all_step(0.0, 4)
        stay = {nodes.workers(node)[0] for node in range(3)}
        killed = time.time()
        nodes.kill_node(3)
        shrunk = run.all_step(killed, 3)
        nodes.start(3)
        grown = run.all_step(shrunk, 4)
        print(f"4 to 3: {shrunk - killed:.1f} s, of which 2 s wait for the fourth; 3 to 4: {grown - shrunk:.1f} s")
        run.wait(lambda: len(run.steps(grown)) >= 20)
        for node in range(3):
            assert {each["pid"] for each in run.steps(killed) if each["rank"] == node} <= stay
        of_rank_0 = [each["step"] for each in run.steps() if each["rank"] == 0]
        assert of_rank_0 == list(range(len(of_rank_0)))


@pytest.mark.nightly
@pytest.mark.long
def test_losses_leave_nothing_behind(tmp_path: Path) -> None:
    """Agents, and a worker that rejoins, hold as much at the end as at the beginning. CI: a minute."""
    assert soak(tmp_path, 60.0).problems() == []


# -- one machine ------------------------------------------------------------------------------------------------------


TWICE = """
import os, torch, torch.distributed as dist, ringfence
dist.init_process_group("gloo")
for _ in range(2):
    before = os.environ["RINGFENCE_GENERATION"]
    ringfence.rejoin()
    total = torch.ones(1)
    dist.all_reduce(total)
    changed = os.environ["RINGFENCE_GENERATION"] != before
    os.write(1, f"{changed} {os.environ['TORCHELASTIC_RESTART_COUNT']} {total.item()}\\n".encode())
"""

ONE_STAYS = """
import os, signal, torch.distributed as dist, ringfence
count = os.environ["TORCHELASTIC_RESTART_COUNT"]
os.write(1, f"{count}\\n".encode())  # before the group exists: no worker rejoins until both have
dist.init_process_group("gloo")
if count == "0":
    ringfence.rejoin() if os.environ["RANK"] == "0" else signal.pause()
dist.destroy_process_group()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    new_secret_file(tmp_path / "secret")
    return tmp_path


def run_script(text: str, folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(text)
    return ringfence("run", *flags, "script.py", folder=folder, RINGFENCE_SECRET_FILE="secret")


@pytest.mark.nightly
def test_rejoining_counts_as_a_restart(folder: Path) -> None:
    done = run_script(TWICE, folder, "--nproc-per-node", "2", "--rejoin", "--max-restarts", "1")
    assert done.returncode == 1
    assert done.stdout.splitlines() == ["True 1 2.0"] * 2
    assert "this worker cannot rejoin: no restarts are left (--max-restarts)" in done.stderr


@pytest.mark.nightly
def test_without_the_flag_it_is_refused(folder: Path) -> None:
    done = run_script(TWICE, folder, "--nproc-per-node", "1")
    assert done.returncode == 1
    assert "this worker cannot rejoin: start it with `ringfence run --rejoin`" in done.stderr


@pytest.mark.nightly
def test_a_worker_that_does_not_rejoin_is_started_again_with_the_others(folder: Path) -> None:
    flags = ("--nproc-per-node", "2", "--rdzv-conf", "rejoin=0.5", "--max-restarts", "1")
    done = run_script(ONE_STAYS, folder, *flags)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == ["0", "0", "1", "1"]


def test_without_an_agent_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RINGFENCE_AGENT", raising=False)
    for call in (ringfence_package.rejoin, ringfence_package.round_ended):
        with pytest.raises(ConfigurationError, match="start the script with `ringfence run --rejoin`"):
            call()
