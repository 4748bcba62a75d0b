"""Attacks on the launcher: code through the rendezvous, and hostile messages at the host of the store."""

from __future__ import annotations

import base64
import json
import os
import pickle
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from ringfence.config.private_files import new_secret_file
from tests import ports
from tests.attack.launched import RINGFENCE, answer_to, says_nothing, store_query
from tests.integration.test_readme import environment

ATTACK_SECONDS = 90.0  # for a launcher to start and to unpickle
REFUSED_SECONDS = 3.0  # stock torchrun reads its state ten times in a second
STORE_SECONDS = 20.0  # for a store to answer; ringfence closes the connection at once
WORKER = "import sys; print('started', flush=True); sys.stdin.readline()"


class Payload:
    """Unpickled, it writes the id of the process that does so to a named pipe."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"echo $PPID > '{self._mark}'",)


class Launcher:
    """Agents that wait for their workers, which wait for input."""

    def __init__(self, commands: list[list[str]], folder: Path) -> None:
        self._read, output = os.pipe()
        line, self._write = os.pipe()
        script = folder / "worker.py"
        script.write_text(WORKER)
        new_secret_file(folder / "secret")
        settings = {**environment(folder), "RINGFENCE_SECRET_FILE": str(folder / "secret")}
        with open(folder / "errors", "wb") as errors:
            self.agents = [
                subprocess.Popen(
                    [*command, str(script)], stdin=line, stdout=output, stderr=errors, env=settings, cwd=folder
                )
                for command in commands
            ]
        self._files = [self._read, self._write, output, line]
        end, seen = time.monotonic() + ATTACK_SECONDS, b""
        while seen.count(b"started") < len(commands) and time.monotonic() < end:
            if select.select([self._read], [], [], 1.0)[0]:
                seen += os.read(self._read, 4096)
        assert seen.count(b"started") == len(commands), (folder / "errors").read_text()[-2000:]

    def listeners(self) -> set[tuple[str, int]]:
        """Return where the agents and their workers listen on TCP."""
        groups = {agent.pid for agent in self.agents}
        processes = groups | {int(each) for pid in groups for each in _children(pid)}
        lines = subprocess.run(["ss", "-tlnpH"], check=True, capture_output=True, text=True).stdout.splitlines()
        ours = [line for line in lines if processes & {int(pid) for pid in re.findall(r"pid=(\d+)", line)}]
        return {("127.0.0.1", int(line.split()[3].rpartition(":")[2])) for line in ours}

    def finish(self) -> list[int]:
        """Let the workers end; return the exit codes of the agents."""
        os.close(self._write)  # the end of their input
        self._files.remove(self._write)
        return [agent.wait(ATTACK_SECONDS) for agent in self.agents]

    def close(self) -> None:
        for agent in self.agents:
            agent.kill()
            agent.wait()
        for descriptor in self._files:
            os.close(descriptor)


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


@contextmanager
def launched(commands: list[list[str]], folder: Path) -> Iterator[Launcher]:
    launcher = Launcher(commands, folder)
    try:
        yield launcher
    finally:
        launcher.close()


@contextmanager
def marker(path: Path) -> Iterator[int]:
    """A named pipe: what is written to it is the marker."""
    os.mkfifo(path)
    descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def poison(address: tuple[str, int], mark: Path) -> bool:
    """Replace the state of a c10d rendezvous at this address; return whether there was one."""
    if says_nothing(answer_to(store_query(), address, STORE_SECONDS)):
        return False
    store = dist.TCPStore(*address, is_master=False, timeout=timedelta(seconds=30), wait_for_workers=False)
    names = [key for key in store.list_keys() if "torch.rendezvous." in key and key.count(".") == 2]
    for name in names:
        store.set(name.lstrip("/"), base64.b64encode(pickle.dumps(Payload(mark))).decode())
    return bool(names)


@pytest.mark.promise(
    "A peer that reaches a launcher's port cannot run code in it, as it can with torchrun's rendezvous."
)
def test_the_attack_runs_code_in_torchrun(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    with (
        marker(mark) as pipe,
        launched([[sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1"]], tmp_path) as torchrun,
    ):
        assert any(poison(address, mark) for address in torchrun.listeners())
        ready, _, _ = select.select([pipe], [], [], ATTACK_SECONDS)
        assert ready and int(os.read(pipe, 100)) == torchrun.agents[0].pid


@pytest.mark.promise(
    "A peer that reaches a launcher's port cannot run code in it, as it can with torchrun's rendezvous."
)
def test_the_attack_runs_no_code_in_ringfence_run(tmp_path: Path) -> None:
    mark, port = tmp_path / "mark", ports.port()
    options = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-id", "attacked"]
    endpoint = ["--rdzv-endpoint", f"127.0.0.1:{port}"]
    commands = [[*RINGFENCE, "run", *options, *endpoint, "--node-rank", str(rank)] for rank in range(2)]
    with marker(mark) as pipe, launched(commands, tmp_path) as run:
        assert ("127.0.0.1", port) in run.listeners()
        assert not any(poison(address, mark) for address in run.listeners())
        ready, _, _ = select.select([pipe], [], [], REFUSED_SECONDS)
        assert not ready, "code of the attacker ran"
        assert run.finish() == [0, 0]


@pytest.mark.promise(
    "Malformed, forged and replayed messages do not stop the host of the store, and nothing is unpickled."
)
@pytest.mark.long
@pytest.mark.timeout(3600)
def test_hostile_messages_disturb_no_admitted_agent(full: bool) -> None:
    """2,000 messages, or 100,000 with --full."""
    messages = 100_000 if full else 2_000
    command = [sys.executable, "-m", "tests.attack.launch_attacks", "--messages", str(messages)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3500, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    print(done.stdout)
    assert found["messages"] >= messages
    assert not found["problems"], found["problems"][:3]
    assert found["unpickled"] == 0
    assert found["admitted"] == found["admitted_with_secret"], "the host admitted a peer that has no secret"
    assert found["descriptors_left"] == 0
    assert 1 <= found["warnings"] <= 1 + found["seconds_in_all"] / 10, "refused peers flood the log"
    assert found["calls_between_messages"] >= 40, "an admitted agent waits until the attack has ended"
