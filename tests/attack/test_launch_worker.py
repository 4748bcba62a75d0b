"""Workers of `ringfence run` that could lose its protection: other users, other stores, and a torch without the hooks."""

from __future__ import annotations

import logging
import multiprocessing
import os
import re
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch.distributed as dist

from ringfence.config.private_files import new_secret_file
from ringfence.errors import ConfigurationError, PeerLostError
from ringfence.launch import worker
from ringfence.launch.agent_client import AgentClient
from ringfence.launch.agent_loop import AgentLoop
from ringfence.launch.host import OWN, Host
from ringfence.launch.messages import CallResult, Operation, from_json
from ringfence.launch.rounds import RoundLimits
from ringfence.launch.store_state import StoreState
from tests.attack.eavesdrop import Capture, namespace
from tests.attack.launched import RINGFENCE
from tests.integration.test_readme import environment
from tests.limits import HANG

pytestmark = pytest.mark.processes

SECONDS = 120.0
OTHER_USER = 1234


# -- the agent's socket -----------------------------------------------------------------------------------------------


@pytest.fixture
def agent() -> Iterator[AgentLoop]:
    """An agent of a run on one machine."""
    state = StoreState(secrets.token_hex(8), RoundLimits(1, 1), dist.HashStore)
    state.rounds.attach(OWN, "own", 0)
    loop = AgentLoop(lambda connections, deliver: Host(state, connections, deliver))
    yield loop
    loop.stop()


def as_other_user(pipe: Connection, path: str) -> None:
    """Connect to the agent's socket; report what comes of it."""
    os.setresuid(OTHER_USER, OTHER_USER, OTHER_USER)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(HANG)
        try:
            connection.connect(path)
            pipe.send(f"received {connection.recv(100)!r}")
        except OSError as error:
            pipe.send(type(error).__name__)


def result_as_other_user(path: str) -> str:
    context = multiprocessing.get_context("fork")
    pipe, theirs = context.Pipe()
    child = context.Process(target=as_other_user, args=(theirs, path))
    child.start()
    assert pipe.poll(HANG)
    found = str(pipe.recv())
    child.join(HANG)
    return found


@pytest.mark.promise("The agent's socket serves processes of its own user only.")
def test_another_user_cannot_reach_the_agents_socket(agent: AgentLoop) -> None:
    assert result_as_other_user(agent.path) == "PermissionError"


@pytest.mark.promise("The agent's socket serves processes of its own user only.")
def test_another_user_is_refused_whatever_the_modes_of_files(
    agent: AgentLoop, caplog: pytest.LogCaptureFixture
) -> None:
    os.chmod(Path(agent.path).parent, 0o755)
    os.chmod(agent.path, 0o777)
    with caplog.at_level(logging.WARNING):
        assert result_as_other_user(agent.path) in ("received b''", "ConnectionResetError")
    assert f"refused a process of user {OTHER_USER}" in caplog.text
    assert AgentClient(agent.path).ask(Operation.STATUS).result is CallResult.OK


def serve_as_other_user(pipe: Connection, path: str) -> None:
    """Listen at a path as another user, until the pipe is closed."""
    os.setgid(OTHER_USER)
    os.setuid(OTHER_USER)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        os.chmod(path, 0o777)
        listener.listen()
        pipe.send("listening")
        pipe.poll(None)


@pytest.fixture
def impostor() -> Iterator[str]:
    """The path of a socket at which another user listens in the place of this user's agent."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        path = f"{folder}/agent"
        pipe, theirs = multiprocessing.get_context("fork").Pipe()
        child = multiprocessing.get_context("fork").Process(target=serve_as_other_user, args=(theirs, path))
        child.start()
        theirs.close()
        assert pipe.recv() == "listening"
        yield path
        pipe.close()
        child.kill()
        child.join()


@pytest.mark.promise("A worker calls no agent of another user.")
def test_a_worker_refuses_an_agent_of_another_user(impostor: str) -> None:
    """It would believe its store's values, among them the addresses of other workers."""
    with pytest.raises(PeerLostError, match=f"user {OTHER_USER} listens there"):
        AgentClient(impostor).ask(Operation.STATUS)
    with pytest.raises(ConfigurationError, match=f"user {OTHER_USER} listens there"):
        worker._end_with_agent(impostor)


# -- a worker's torch -------------------------------------------------------------------------------------------------


@pytest.fixture
def variables(agent: AgentLoop) -> dict[str, str]:
    """The environment of a worker that this agent has started."""
    joined = AgentClient(agent.path).ask(Operation.JOIN, seconds=30.0)
    return {
        **os.environ,
        "RINGFENCE_AGENT": agent.path,
        "RINGFENCE_REQUIRE": "1",
        "RINGFENCE_GENERATION": str(from_json(joined.parts[0])["generation"]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }


def python(script: str, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=SECONDS, check=False)


LISTENS = """
import torch.distributed as dist
from ringfence.errors import ConfigurationError
for arguments in [dict(is_master=True), dict(world_size=1, is_master=True, wait_for_workers=False)]:
    try:
        dist.TCPStore("127.0.0.1", 0, **arguments)
    except ConfigurationError as error:
        print("refused:", error)
try:
    dist.TCPStore("127.0.0.1", 0, 1, True)
except ConfigurationError as error:
    print("refused:", error)
store, rank, size = next(dist.rendezvous("tcp://127.0.0.1:0?rank=0&world_size=1"))
store.set("key", "value")
print("store:", type(store.underlying_store if hasattr(store, "underlying_store") else store).__name__)
"""


@pytest.mark.promise("A script under `ringfence run` that opens a TCPStore is refused.")
def test_a_store_that_listens_is_refused(variables: dict[str, str]) -> None:
    done = python(LISTENS, variables)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("refused: this script opens a TCPStore") == 3
    assert "store: AgentStore" in done.stdout


# A torch of another version, whose module lacks a function.
LACKS = """
import importlib.abc, importlib.machinery, sys
MODULE, NAME = {module!r}, {name!r}

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def without(module):
            execute(module)
            setattr(module, NAME + "_of_another_version", module.__dict__.pop(NAME))

        spec.loader.exec_module = without
        return spec

sys.meta_path.insert(0, Finder())
import torch
print("imported")
"""


@pytest.mark.promise("If torch lacks a function that `ringfence run` replaces, `import torch` fails in its workers.")
@pytest.mark.real_start  # the program changes torch while it is imported
@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch.distributed.rendezvous", "_create_c10d_store"),
        ("torch.distributed.distributed_c10d", "_new_process_group_helper"),
    ],
    ids=["store", "process group"],
)
def test_import_fails_without_a_hook(variables: dict[str, str], module: str, name: str) -> None:
    done = python(LACKS.format(module=module, name=name), variables)
    assert done.returncode != 0
    assert "imported" not in done.stdout
    assert "ringfence" in done.stderr.splitlines()[-1] or name in done.stderr.splitlines()[-1], done.stderr[-1000:]


# -- a worker whose torch does not load ringfence ---------------------------------------------------------------------

UNPROTECTED = """
import datetime, os, sys
import torch.distributed as dist
print("ringfence" in sys.modules, os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"], flush=True)
try:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=2))
except Exception as error:
    listening = [line.split()[1] for line in open("/proc/self/net/tcp") if line.split()[3] == "0A"]
    listening += [line.split()[1] for line in open("/proc/self/net/tcp6") if line.split()[3] == "0A"]
    print(f"failed: {type(error).__name__}, listening: {listening}", flush=True)
    sys.exit(3)
print("formed a group", flush=True)
"""


@pytest.mark.promise(
    "A worker of `ringfence run` whose torch does not load ringfence forms no group and sends nothing."
)
def test_a_worker_that_does_not_load_ringfence_fails_closed(tmp_path: Path) -> None:
    """Its script is started through a wrapper that switches off what loads ringfence into torch."""
    new_secret_file(tmp_path / "secret")
    script = tmp_path / "script.py"
    script.write_text(UNPROTECTED)
    wrapper = ["env", "TORCH_DEVICE_BACKEND_AUTOLOAD=0", sys.executable, str(script)]
    settings = {**environment(tmp_path), "RINGFENCE_SECRET_FILE": str(tmp_path / "secret")}
    with namespace(f"rf-worker-{os.getpid()}") as place:
        command = ["ip", "netns", "exec", place, *RINGFENCE, "run", "--nproc-per-node", "2", "--no-python", *wrapper]
        with Capture(place) as capture:
            done = subprocess.run(
                command, env=settings, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS, check=False
            )
    assert done.returncode == 1, done.stderr[-2000:]
    assert re.findall(r"^(\w+) 0$", done.stdout, re.M) == ["False"] * 2
    failures = re.findall(r"^failed: (\w+), listening: \[\]$", done.stdout, re.M)
    assert failures and set(failures) <= {"DistNetworkError", "DistStoreError"}, done.stdout
    assert "formed a group" not in done.stdout
    capture.assert_complete()
    assert not any(capture.flows()), "bytes were sent over TCP"
