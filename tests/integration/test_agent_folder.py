"""Folders of agents that were killed are removed by the next agent of the same user, and no others."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ringfence.launch import agent_folder
from tests.limits import HANG

pytestmark = pytest.mark.processes

KILLED = """
import os, signal
from ringfence.session.join.connections import Connections
from ringfence.launch.agent_loop import AgentLoop
from ringfence.launch.host import Host
from ringfence.launch.rounds import RoundLimits
from ringfence.launch.store_state import StoreState

def host(connections, deliver):
    return Host(StoreState("incarnation", RoundLimits(1, 1), dict), connections, deliver)

print(AgentLoop(host).path, flush=True)
{ending}
"""


def started(folder: Path, ending: str) -> Path:
    """The socket of an agent whose process has ended."""
    command = [sys.executable, "-c", KILLED.format(ending=ending)]
    environment = {**os.environ, "TMPDIR": str(folder)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG)
    assert done.stdout, done.stderr
    return Path(done.stdout.strip())


def folder_with(parent: Path, name: str) -> Path:
    """The path of a socket in a new folder that is named like that of an agent on this machine."""
    (parent / f"{agent_folder.prefix()}{name}").mkdir(mode=0o700)
    return parent / f"{agent_folder.prefix()}{name}" / agent_folder.SOCKET


def refusing(path: Path) -> Path:
    """A socket as a killed process leaves it."""
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(path))
    return path


@pytest.fixture
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose name leaves room for the path of a Unix socket."""
    return tmp_path_factory.mktemp("f")


def test_the_next_agent_removes_the_folder_of_a_killed_one(short: Path) -> None:
    left = started(short, "os.kill(os.getpid(), signal.SIGKILL)")
    assert left.is_socket()
    started(short, "")  # which ends by itself, and removes its own folder
    assert list(short.iterdir()) == []


def test_only_sockets_that_refuse_are_removed(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = refusing(folder_with(short, "gone"))
    live = folder_with(short, "live")
    file = folder_with(short, "file")
    file.touch()
    early = folder_with(short, "early")
    with_more = refusing(folder_with(short, "with-more"))
    (with_more.parent / "more").touch()
    named_otherwise = short / "ringfence-other"
    named_otherwise.mkdir()
    refusing(named_otherwise / agent_folder.SOCKET)
    (short / "target").mkdir()
    target = refusing(short / "target" / agent_folder.SOCKET)
    (short / f"{agent_folder.prefix()}link").symlink_to(short / "target")
    with socket.socket(socket.AF_UNIX) as door, socket.socket(socket.AF_UNIX) as probe:
        agent_folder.listen(door, str(live), 0)
        probe.connect(str(live))  # its backlog is full now: it is busy, and not gone
        agent_folder.remove_abandoned(str(short))
        assert live.is_socket()
    assert not gone.parent.exists()
    assert file.is_file() and early.parent.is_dir() and target.is_socket()
    assert (named_otherwise / agent_folder.SOCKET).is_socket()
    assert (with_more.parent / "more").is_file()


def test_folders_of_other_users_are_left(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = refusing(folder_with(short, "other"))
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    agent_folder.remove_abandoned(str(short))
    assert other.is_socket()
    monkeypatch.undo()
    agent_folder.remove_abandoned(str(short))
    assert not other.parent.exists()
