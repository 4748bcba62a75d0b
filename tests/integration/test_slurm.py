"""The batch script of the guide runs under Slurm itself: a controller and two nodes on this machine."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringfence.config.private_files import new_secret_file
from tests import ports
from tests.integration.test_readme import ROOT, environment
from tests.limits import HANG

SCRIPT = ROOT / "examples/slurm/train.sbatch"
CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SchedulerType=sched/builtin
MpiDefault=none
ReturnToService=2
KillWait=2
FirstJobId={first_job}
NodeName={host} NodeHostname={host} NodeAddr=127.0.0.1 Port={first_port} CPUs=1
NodeName={host}-2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second_port} CPUs=1
PartitionName=all Nodes={host},{host}-2 Default=YES State=UP
"""


class Cluster:
    """Slurm's daemons, and an environment for its commands."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {**environment(folder), "SLURM_CONF": str(folder / "slurm.conf")}
        self.host = socket.gethostname().partition(".")[0]
        (folder / "state").mkdir()
        (folder / "munge.key").write_bytes(secrets.token_bytes(128))
        (folder / "munge.key").chmod(0o600)
        numbers = {name: ports.port() for name in ("controller_port", "first_port", "second_port")}
        text = CONFIGURATION.format(host=self.host, folder=folder, first_job=job_with_a_free_port(), **numbers)
        (folder / "slurm.conf").write_text(text)

    def command(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        """A command of Slurm's, from the folder in which a user has the examples."""
        return subprocess.run(
            words,
            cwd=ROOT,
            env=self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=HANG,
        )

    def logs(self) -> str:
        return "\n".join(f"{file.name}:\n{file.read_text()}" for file in sorted(self.folder.glob("*.log")))


def job_with_a_free_port() -> int:
    """A job number whose port, which the script computes, is this process's."""
    for number in range(1, 100):
        if ports.claim(range(29400 + number, 29401 + number)):
            return number
    raise AssertionError("all ports from 29401 to 29499 are in use")


@contextlib.contextmanager
def daemon(*words: str | Path, env: dict[str, str]) -> Iterator[None]:
    process = subprocess.Popen(
        words, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait(HANG)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("slurm")
    made = Cluster(folder)
    munged = ["munged", "--force", f"--socket={folder}/munge.socket", f"--key-file={folder}/munge.key"]
    munged += [f"--{name}-file={folder}/munged.{name}" for name in ("log", "pid", "seed")]
    subprocess.run(munged, check=True, stdin=subprocess.DEVNULL, capture_output=True)  # returns when it listens
    with contextlib.ExitStack() as daemons:
        daemons.callback(lambda: os.kill(int((folder / "munged.pid").read_text()), signal.SIGTERM))
        daemons.enter_context(daemon("slurmctld", "-D", env=made.env))
        for name in (made.host, f"{made.host}-2"):
            daemons.enter_context(daemon("slurmd", "-D", "-N", name, env=made.env))
        ready = made.command("srun", "--nodes=2", "true")  # returns when both nodes have registered
        assert ready.returncode == 0, ready.stderr + made.logs()
        yield made
        made.command("scancel", "--quiet", "--signal=KILL", "--full", "--user=root")  # if a test failed


@pytest.mark.nightly
def test_the_script_forms_one_run_over_all_nodes(cluster: Cluster) -> None:
    secret = cluster.folder / ".config/ringfence/train.secret"
    secret.parent.mkdir(parents=True)
    new_secret_file(secret)
    done = cluster.command("sbatch", "--wait", f"--output={cluster.folder}/train-%j.log", SCRIPT)
    (job,) = re.findall(r"^Submitted batch job (\d+)$", done.stdout, re.MULTILINE)
    printed = (cluster.folder / f"train-{job}.log").read_text()
    assert done.returncode == 0, printed + done.stderr + cluster.logs()
    assert len(re.findall(rf"^0: ringfence: .* 4 workers, run {job}, ", printed, re.MULTILINE)) == 1
    losses = [float(loss) for loss in re.findall(r"^0: .*loss ([\d.]+)$", printed, re.MULTILINE)]
    assert losses[-1] < losses[0]


def test_a_misspelt_option_of_the_script_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    text = SCRIPT.read_text()
    misspelt = tmp_path / "train.sbatch"
    misspelt.write_text(text.replace("--ntasks-per-node=1", "--task-per-nodes=1"))
    assert misspelt.read_text() != text
    done = cluster.command("sbatch", "--test-only", misspelt)
    assert done.returncode != 0
    assert "task-per-nodes" in done.stderr


def test_every_option_of_the_script_is_known(cluster: Cluster) -> None:
    done = cluster.command("sbatch", "--test-only", SCRIPT)
    assert done.returncode == 0, done.stderr
