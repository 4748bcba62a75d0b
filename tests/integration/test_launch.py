"""Agents, their rounds and their store: real TLS, sockets and threads, in one process; and `ringfence run` itself."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousTimeoutError,
)

from ringfence.admission.messages import Hello
from ringfence.cli import main
from ringfence.config.private_files import new_secret_file
from ringfence.errors import ConfigurationError
from ringfence.keys import CALL_BYTES
from ringfence.launch import agent_admission
from ringfence.launch.handler import SealedRendezvous, create
from ringfence.launch.messages import AgentCall, Operation
from tests import ports
from tests.cli.command import ringfence
from tests.integration.join_cluster import Warnings
from tests.limits import FAR, HANG

SET_BY_AGENTS = ("RINGFENCE_GENERATION", "RINGFENCE_RUN_ID", "RINGFENCE_AGENT", "RINGFENCE_REQUIRE")

Start = Callable[..., SealedRendezvous]


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start the agent of a node; all of them end with the test."""
    new_secret_file(tmp_path / "secret")
    for name in SET_BY_AGENTS:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("RINGFENCE_SECRET_FILE", str(tmp_path / "secret"))
    started: list[SealedRendezvous] = []

    def start(port: int, rank: int | None, nodes: int | tuple[int, int] = 2, **config: object) -> SealedRendezvous:
        low, high = (nodes, nodes) if isinstance(nodes, int) else nodes
        given = {"join_timeout": FAR, "last_call_timeout": 0.2, **config, **({} if rank is None else {"rank": rank})}
        found = create(RendezvousParameters("ringfence", f"127.0.0.1:{port}", "job", low, high, None, **given))
        started.append(found)
        return found

    yield start
    for each in reversed(started):
        each.loop.stop()


def joined(*agents: SealedRendezvous) -> list[RendezvousInfo]:
    """The round that these agents form together."""
    found: dict[int, RendezvousInfo] = {}

    def join(place: int, agent: SealedRendezvous) -> None:
        found[place] = agent.next_rendezvous()

    threads = [threading.Thread(target=join, args=(place, agent)) for place, agent in enumerate(agents)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG)
    return [found[place] for place in range(len(agents))]


def generation() -> str:
    return os.environ["RINGFENCE_GENERATION"]


# -- rounds -----------------------------------------------------------------------------------------------------------


def test_agents_on_two_nodes_form_rounds_with_one_generation_each(agent: Start) -> None:
    port = ports.port()
    one, zero = agent(port, 1), agent(port, 0)
    rounds = joined(zero, one)
    assert [(each.rank, each.world_size) for each in rounds] == [(0, 2), (1, 2)]
    first = generation()
    assert zero.num_nodes_waiting() == one.num_nodes_waiting() == 0
    joined(one, zero)
    assert first.split(".")[0] == generation().split(".")[0]
    assert (first.split(".")[1], generation().split(".")[1]) == ("1", "2")


def test_a_host_that_starts_anew_has_another_incarnation(agent: Start) -> None:
    port = ports.port()
    zero, one = agent(port, 0), agent(port, 1)
    joined(zero, one)
    first = generation()
    zero.loop.stop()
    again = agent(port, 0)
    joined(again, one)
    assert first.split(".")[0] != generation().split(".")[0]


def test_values_of_one_node_reach_the_other_and_end_with_their_round(agent: Start) -> None:
    port = ports.port()
    zero, one = agent(port, 0), agent(port, 1)
    near, far = (each.store for each in joined(zero, one))
    near.set("key", b"\x00\xff")
    assert far.get("key") == b"\x00\xff"
    failed: list[BaseException] = []

    def wait() -> None:
        try:
            far.wait(["never"], timedelta(seconds=30))
        except dist.DistStoreError as error:
            failed.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    joined(one, zero)
    thread.join(HANG)
    assert "has ended" in str(failed[0])


def test_a_value_beyond_the_limit_is_refused_with_its_size(agent: Start) -> None:
    store = agent(0, None, 1).next_rendezvous().store
    largest = CALL_BYTES - len(AgentCall(1, Operation.SET, generation(), 0, (b"key", b"")).body())
    store.set("key", bytes(largest))
    assert len(store.get("key")) == largest
    for refused in (lambda: store.set("key", bytes(largest + 1)), lambda: store.append("key", bytes(largest + 1))):
        with pytest.raises(
            dist.DistStoreError, match=r"of 'key' is too long: it has 16777217 bytes.* 16777216 \(16 MiB"
        ):
            refused()
    with pytest.raises(dist.DistStoreError, match="it has 65538 keys and values"):
        store.multi_set([str(number) for number in range(32769)], [b""] * 32769)
    store.set("key", b"small")  # the agent is still there
    assert store.get("key") == b"small"


@pytest.mark.promise("A peer that has not proved its rank cannot end a join.")
def test_an_impostor_of_the_host_ends_no_agent(agent: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has another secret and refuses the agent. The agent says so, and joins once the host is there."""
    port, secret = ports.port(), os.environ["RINGFENCE_SECRET_FILE"]
    new_secret_file(tmp_path / "other")
    monkeypatch.setenv("RINGFENCE_SECRET_FILE", str(tmp_path / "other"))
    impostor = agent(port, 0)
    monkeypatch.setenv("RINGFENCE_SECRET_FILE", secret)
    with Warnings() as warnings:
        one = agent(port, 1)
        warnings.wait_for(lambda texts: any("secret" in text and "keeps trying" in text for text in texts))
        impostor.loop.stop()
    assert [each.rank for each in joined(agent(port, 0), one)] == [0, 1]


@pytest.mark.promise(
    "Workers of different versions or policies that prove themselves end the join at once, on both sides."
)
@pytest.mark.parametrize("newer", range(2))
def test_agents_of_different_versions_end_at_once(agent: Start, monkeypatch: pytest.MonkeyPatch, newer: int) -> None:
    def hello(**fields: Any) -> Hello:
        return Hello(**fields, version=2, release="0.9.3") if fields["entry"].rank == newer else Hello(**fields)

    monkeypatch.setattr(agent_admission, "Hello", hello)
    port = ports.port()
    zero, one = agent(port, 0), agent(port, 1)
    for each, kind in ((one, RendezvousConnectionError), (zero, RendezvousClosedError)):
        with pytest.raises(kind, match=r"install one release on all machines, such as 0\.9\.3"):
            each.next_rendezvous()


def test_a_host_that_is_not_there_is_named(agent: Start) -> None:
    port = ports.port()
    with pytest.raises(RendezvousTimeoutError, match=f"127.0.0.1:{port}, is not reached: Connection refused"):
        agent(port, 1, join_timeout=1.0).next_rendezvous()


def test_a_node_that_failed_for_good_ends_the_others(agent: Start) -> None:
    port = ports.port()
    zero, one = agent(port, 0), agent(port, 1)
    joined(zero, one)
    one.shutdown()
    with pytest.raises(RendezvousClosedError, match="node 1 failed for good"):
        zero.next_rendezvous()


def test_nodes_come_and_go_within_the_limits(agent: Start) -> None:
    port = ports.port()
    zero, one = agent(port, 0, (1, 2)), agent(port, 1, (1, 2))
    assert [each.world_size for each in joined(zero, one)] == [2, 2]
    one.loop.stop()
    assert [each.world_size for each in joined(zero)] == [1]
    again = agent(port, 1, (1, 2))
    grown: list[RendezvousInfo] = []
    thread = threading.Thread(target=lambda: grown.append(again.next_rendezvous()))
    thread.start()
    while not zero.num_nodes_waiting():
        assert thread.is_alive()
    assert zero.next_rendezvous().world_size == 2
    thread.join(HANG)
    assert grown[0].world_size == 2


@pytest.mark.parametrize(
    ("rank", "nodes", "config", "text"),
    [
        (2, 2, {}, "node rank 2"),
        (0, 2, {"read_timeout": 5}, "read_timeout"),
        (0, 2, {"join_timeout": "soon"}, "join_timeout=soon"),
    ],
)
def test_wrong_options_are_named(agent: Start, rank: int, nodes: int, config: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        agent(ports.port(), rank, nodes, **config)


# -- the store, as torch's C++ code uses it ---------------------------------------------------------------------------


def test_the_store_behaves_as_torchs_own(agent: Start) -> None:
    """Every call goes through a PrefixStore, which is C++, as the stores of process groups do."""
    ours = agent(0, None, 1).next_rendezvous().store
    for base in (ours, dist.HashStore()):
        store = dist.PrefixStore("outer", dist.PrefixStore("inner", base))
        store.set("text", "value")
        store.set("bytes", b"\x00\xff")
        assert (store.get("text"), store.get("bytes")) == (b"value", b"\x00\xff")
        assert [store.add("count", 5), store.add("count", -2)] == [5, 3]
        assert (store.check(["text", "count"]), store.check(["none"])) == (True, False)
        assert store.compare_set("swap", "", "one") == b"one"
        assert store.compare_set("swap", "two", "three") == b"one"
        assert store.compare_set("swap", "one", "three") == b"three"
        store.multi_set(["a", "b"], ["1", "2"])
        assert store.multi_get(["a", "b"]) == [b"1", b"2"]
        store.append("text", "more")
        assert store.get("text") == b"valuemore"
        assert (store.delete_key("a"), store.delete_key("a")) == (True, False)
        assert store.num_keys() == 5
        store.wait(["b"], timedelta(seconds=5))
        with pytest.raises(dist.DistStoreError):
            store.wait(["never"], timedelta(milliseconds=50))
        store.set_timeout(timedelta(milliseconds=50))


def test_threads_of_one_worker_do_not_wait_for_each_other(agent: Start) -> None:
    store = dist.PrefixStore("threads", agent(0, None, 1).next_rendezvous().store)
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda: found.append(store.get("late"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    store.set("late", "value")
    for thread in threads:
        thread.join(HANG)
    assert found == [b"value"] * 8


# -- the command ------------------------------------------------------------------------------------------------------

UNMODIFIED = """
import torch, torch.distributed as dist
for arguments in ["gloo"], ["nccl"], ["cpu:gloo,cuda:nccl"], []:
    dist.init_process_group(*arguments)
    x = torch.ones(4)
    dist.all_reduce(x)
    group = dist.new_group([0, 1], backend="gloo")
    dist.all_reduce(x, group=group)
    if dist.get_rank() == 0:
        print("backend", dist.get_backend(), type(group).__name__, x.tolist(), dist.get_world_size())
    dist.destroy_process_group()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    new_secret_file(tmp_path / "secret")
    return tmp_path


SEALED = "backend ringfence RingfenceProcessGroup [4.0, 4.0, 4.0, 4.0] 2\n" * 4


@pytest.mark.parametrize("launcher", [["ringfence.cli", "run"], ["torch.distributed.run", "--rdzv-backend=ringfence"]])
def test_an_unmodified_script_is_sealed(folder: Path, launcher: list[str]) -> None:
    (folder / "script.py").write_text(UNMODIFIED)
    command = [sys.executable, "-m", *launcher, "--nproc-per-node=2", "script.py"]
    settings = {**os.environ, "RINGFENCE_SECRET_FILE": "secret", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=settings, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stderr
    assert done.stdout == SEALED
    assert "are ringfence's in this run" in done.stderr
    assert "rendezvous has no authentication" not in done.stderr


def test_a_script_that_fails_is_restarted_and_then_reported(folder: Path) -> None:
    script = 'import os, torch; open("starts", "a").write("x"); raise SystemExit(3)'
    (folder / "script.py").write_text(script)
    words = ("run", "--nproc-per-node", "1", "--max-restarts", "1", "script.py")
    done = ringfence(*words, folder=folder, RINGFENCE_SECRET_FILE="secret")
    assert done.returncode == 1
    assert (folder / "starts").read_text() == "xx"
    assert "exitcode  : 3" in done.stderr


def test_a_worker_ends_with_its_agent_also_before_it_imports_torch(folder: Path) -> None:
    script = 'import os, signal; os.write(1, b"%d\\n" % os.getpid()); signal.pause()'
    (folder / "script.py").write_text(script)
    command = [sys.executable, "-m", "ringfence.cli", "run", "--nproc-per-node", "1", "script.py"]
    settings = {**os.environ, "RINGFENCE_SECRET_FILE": "secret"}
    with subprocess.Popen(command, cwd=folder, env=settings, stdout=subprocess.PIPE) as agent:
        assert agent.stdout is not None
        worker = os.pidfd_open(int(agent.stdout.readline()))
        agent.kill()
    ended, _, _ = select.select([worker], [], [], HANG)
    os.close(worker)
    assert ended


def test_torch_imports_our_rendezvous_without_a_word() -> None:
    """torch loads handlers while it imports its own modules, also in processes that have nothing to do with torchrun."""
    program = "import torch.distributed.checkpoint, sys; print('ringfence.launch.handler' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG)
    assert (done.stdout, done.stderr) == ("False\n", "")


SPARED = """
import os, pathlib, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(1)
dist.all_reduce(x)
line = f"{'ringfence.launch.spares' in sys.orig_argv} {__name__} {sys.argv[1:]} {x.item()}\\n"
os.write(1, line.encode())  # at once: two workers write
siblings = pathlib.Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children")
while os.environ["RINGFENCE_GENERATION"].endswith(".1"):  # fail once there are spares
    children = [pathlib.Path(f"/proc/{child}/cmdline").read_bytes() for child in siblings.read_text().split()]
    if sum(b"ringfence.launch.spares" in each for each in children) == 2:
        sys.exit(1)
dist.destroy_process_group()
"""


@pytest.mark.real_start  # a worker looks for the spares by their command lines
@pytest.mark.nightly
def test_spares_take_the_places_of_workers_that_failed(folder: Path) -> None:
    (folder / "script.py").write_text(SPARED)
    flags = ("--nproc-per-node", "2", "--max-restarts", "1", "--rdzv-conf", "spares=0.1")
    done = ringfence("run", *flags, "script.py", "word", folder=folder, RINGFENCE_SECRET_FILE="secret")
    assert done.returncode == 0, done.stderr
    lines = [f"{spare} __main__ ['word'] 2.0" for spare in (False, False, True, True)]
    assert done.stdout.splitlines() == lines


@pytest.mark.parametrize(
    ("words", "variables", "text"),
    [
        (["--rdzv-backend", "c10d", "script.py"], {}, "has no authentication"),
        (["--nnodes", "2", "script.py"], {}, "several nodes need --rdzv-endpoint"),
        (["script.py"], {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, "TORCH_DEVICE_BACKEND_AUTOLOAD"),
        (["no.py"], {"RINGFENCE_SECRET_FILE": "missing"}, "cannot read the secret"),
    ],
)
def test_what_cannot_be_protected_is_refused_before_it_starts(
    words: list[str],
    variables: dict[str, str],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in {"TORCHELASTIC_SIGNALS_TO_HANDLE": "", **variables}.items():
        monkeypatch.setenv(name, value)
    assert main(["run", *words]) == 2
    assert text in " ".join(capsys.readouterr().err.split())
