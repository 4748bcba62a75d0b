"""The nodes of a training run, as processes of this machine: started, killed, started again, and cleaned up by process id."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ringfence.config.private_files import new_secret_file
from tests import ports
from tests.integration.test_readme import environment
from tests.limits import HANG

Launcher = Literal["ringfence", "torchrun", "torchrun-c10d"]
LAUNCHERS: tuple[Launcher, ...] = ("ringfence", "torchrun", "torchrun-c10d")
SCRIPT = Path(__file__).with_name("chaos_training.py")
RUN, NODE = (
    "CHAOS_RUN",
    "CHAOS_NODE",
)  # environment variables that mark every process of a run, also one without a parent


@dataclass(frozen=True)
class Shape:
    """What is started: how many nodes with how many workers each, by which launcher."""

    launcher: Launcher = "ringfence"
    nodes: int = 2
    workers: int = 2
    backend: str = "gloo"
    steps: int = 40
    min_nodes: int | None = None  # elastic: continues with as few nodes
    restarts: int = 5  # --max-restarts
    flags: tuple[str, ...] = ()  # more of `ringfence run`
    script: tuple[str, ...] = (str(SCRIPT),)

    @property
    def ranks(self) -> int:
        return self.nodes * self.workers


def alive(pid: int) -> bool:
    """Return whether a process runs. One that has ended and that no parent has waited for does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def is_spare(pid: int) -> bool:
    """Return whether a process was started as a spare; it may have become a worker since."""
    try:
        return b"ringfence.launch.spares" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def kill(pids: Sequence[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class Nodes:
    """The agents of a run, their workers, and the log that the workers write.

    Args:
        shape: how many nodes and workers, and what starts them.
        folder: for the log, the checkpoints and the output of each agent; made if it does not exist.
    """

    def __init__(self, shape: Shape, folder: Path) -> None:
        self.shape = shape
        self.folder = folder
        self.events: list[dict[str, Any]] = []
        self.agents: dict[int, subprocess.Popen[bytes]] = {}
        self._run = uuid.uuid4().hex
        self._port = ports.port()
        self._starts = 0
        self._offset = 0
        self._partial = b""
        folder.mkdir(parents=True, exist_ok=True)
        if shape.launcher == "ringfence":
            new_secret_file(folder / "secret")

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill_all()

    def command(self, node: int) -> list[str]:
        """Return the command of a node's agent."""
        shape = self.shape
        count = str(shape.nodes) if shape.min_nodes is None else f"{shape.min_nodes}:{shape.nodes}"
        common = ["--nnodes", count, "--nproc-per-node", str(shape.workers), "--max-restarts", str(shape.restarts)]
        common += ["--rdzv-id", self._run[:8]]
        endpoint = ["--rdzv-endpoint", f"127.0.0.1:{self._port}"]
        torchrun = [sys.executable, "-m", "torch.distributed.run"]
        match shape.launcher:
            case "ringfence":
                start = [
                    sys.executable,
                    "-m",
                    "ringfence.cli",
                    "run",
                    "--node-rank",
                    str(node),
                    *endpoint,
                    *shape.flags,
                ]
                start += ["--rdzv-conf", "last_call_timeout=2"] if shape.min_nodes else []
            case "torchrun":
                start = [*torchrun, "--node-rank", str(node), "--master-addr", "127.0.0.1"]
                start += ["--master-port", str(self._port)]
            case "torchrun-c10d":
                start = [*torchrun, "--rdzv-backend", "c10d", *endpoint, "--local-addr", "127.0.0.1"]
                start += ["--rdzv-conf", f"is_host={int(node == 0)},last_call_timeout=2"]
        return [*start, *common, *shape.script, shape.backend, str(self.folder), str(shape.steps)]

    def start(self, node: int) -> None:
        """Start the agent of a node, in a process group of its own. Its output goes to a file of the folder."""
        variables = environment(Path.home()) | {RUN: self._run, NODE: str(node), "GLOO_SOCKET_IFNAME": "lo"}
        if self.shape.launcher == "ringfence":
            variables["RINGFENCE_SECRET_FILE"] = str(self.folder / "secret")
        self._starts += 1
        with open(self.folder / f"agent-{node}-{self._starts}.log", "wb") as output:
            self.agents[node] = subprocess.Popen(
                self.command(node),
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def processes(self, node: int | None = None) -> Iterator[tuple[int, dict[str, str]]]:
        """Yield process id and initial environment of all processes of a node, or of the run."""
        marks = {RUN: self._run} if node is None else {RUN: self._run, NODE: str(node)}
        for entry in os.listdir("/proc"):
            if not entry.isdigit():
                continue
            try:
                raw = Path(f"/proc/{entry}/environ").read_bytes()
            except OSError:  # it has ended, or belongs to someone else
                continue
            if self._run.encode() not in raw:
                continue
            variables = dict(each.split("=", 1) for each in raw.decode(errors="replace").split("\0") if "=" in each)
            if marks.items() <= variables.items():
                yield int(entry), variables

    def workers(self, node: int) -> list[int]:
        """Return the process ids of a node's workers, by local rank."""
        logged = {event["pid"] for event in self.events}
        found = [
            (int(variables["LOCAL_RANK"]), pid)
            for pid, variables in self.processes(node)
            if "LOCAL_RANK" in variables and (pid in logged or not is_spare(pid))
        ]
        if not found:  # workers may be forked from a process that has imported torch: they have its initial environment
            found = [(0, pid) for pid, _ in self.processes(node) if pid in logged]
        return [pid for _, pid in sorted(found)]

    def kill_node(self, node: int) -> list[int]:
        """Kill the agent and all other processes of a node. Return their ids."""
        pids = [self.agents[node].pid, *(pid for pid, _ in self.processes(node) if pid != self.agents[node].pid)]
        kill(pids)
        self.agents[node].wait(HANG)
        kill([pid for pid, _ in self.processes(node)])  # a process that the agent had just started
        return pids

    def read_events(self) -> None:
        """Add to `events` what workers have logged since the last call."""
        try:
            with open(self.folder / "events", "rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return
        self._offset += len(data)
        *lines, self._partial = (self._partial + data).split(b"\n")
        self.events += [json.loads(line) for line in lines]

    def last_step(self) -> int:
        """Return the largest step that any worker has finished, -1 if there is none."""
        return max((event["step"] for event in self.events if event["event"] == "step"), default=-1)

    def digest(self) -> str | None:
        """Return the SHA-256 of the final weights, None if the training has not ended."""
        path = self.folder / "digest"
        return path.read_text() if path.exists() else None

    def left_over(self, seconds: float = 5.0) -> list[int]:
        """Return the processes of the run that are there after this long, once all agents have ended."""
        end = time.monotonic() + seconds
        while (found := [pid for pid, _ in self.processes()]) and time.monotonic() < end:
            time.sleep(0.05)
        return found

    def kill_all(self) -> None:
        """Kill every process of the run and wait for the agents. Processes that appear meanwhile are killed, too."""
        end = time.monotonic() + 20
        while (found := [pid for pid, _ in self.processes()]) and time.monotonic() < end:
            kill(found)
            time.sleep(0.02)
        for agent in self.agents.values():
            agent.kill()
            agent.wait(HANG)
