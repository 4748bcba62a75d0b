"""Services that stop answering during a join: the store, a nameserver or a driver.

The deadline holds.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pynvml
import pytest
from torch.distributed import TCPStore

from ringfence.config.settings import Settings
from ringfence.errors import AdmissionError
from ringfence.session.join import diagnostics, join
from ringfence.session.join.parent import AddressBook
from tests.integration.join_cluster import SECRET, Admissions, Clock, MemoryStore, World
from tests.integration.test_admit_by_gpu_and_token import write_gpu_policy
from tests.limits import FAR, HANG
from tests.unit import nvidia_mint
from tests.unit.admission_samples import worker
from tests.unit.nvml_driver import Driver

TIMEOUT = 2.0
STORE_TIMEOUT = timedelta(seconds=FAR)  # of a call of the store: a join that waits for it hangs
SERVER = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""
CLIENT = """
import sys
from datetime import timedelta
from torch.distributed import TCPStore
from ringfence.session.join import join
from ringfence.config.settings import Settings
from tests.integration.join_cluster import SECRET
store = TCPStore("127.0.0.1", int(sys.argv[1]), None, False, timeout=timedelta(seconds=600), wait_for_workers=False)
print("ready", flush=True)
sys.stdin.readline()
try:
    join(store, 1, 2, Settings(SECRET), ("127.0.0.1", 1), 1.0, b"")
finally:
    print("over", flush=True)
"""
ROOT = Path(__file__).parents[2]
NAMESERVER = "nameserver 127.0.0.1\noptions timeout:30 attempts:5\n"  # 150 s, the most that there is


@pytest.fixture
def server() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A store of torch in a process of its own, and its port."""
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


@pytest.mark.promise("A store or a resolver that does not answer holds no join beyond its timeout.")
def test_a_join_with_a_silent_store_ends_at_its_deadline(
    server: tuple[subprocess.Popen[str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    process, port = server
    store = Listening(TCPStore("127.0.0.1", port, None, False, timeout=STORE_TIMEOUT, wait_for_workers=False))
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    clock, world = Clock(monkeypatch, store_answers=False), World(2, store=cast(MemoryStore, store))
    world.start([1])
    assert store.asked.wait(HANG)
    clock.advance(FAR)
    error = world.error(1)
    assert error.startswith("AdmissionError") and "did not form within 600 s" in error
    assert "rank 1 did not reach its parent, rank 0: the store has not answered for 6" in error
    process.send_signal(signal.SIGCONT)


def test_a_store_that_ends_with_its_worker_does_not_hide_the_error(
    server: tuple[subprocess.Popen[str], int],
) -> None:
    """All workers have one deadline, and the store ends with one of them: the thread that asked it comes back just then."""
    process, port = server
    command = [sys.executable, "-c", CLIENT, str(port)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        assert client.stdin is not None
        client.stdin.write("\n")
        client.stdin.flush()
        assert client.stdout.readline() == "over\n"
        process.kill()
        _, said = client.communicate(timeout=HANG)
    assert "AdmissionError" in said
    assert client.returncode == 1


class Stuck(Driver):
    """A driver that blocks until it is released."""

    def __init__(self, root: nvidia_mint.Issuer) -> None:
        super().__init__(root)
        self.may_answer = threading.Event()

    def nvmlInitWithFlags(self, flags: int) -> int:
        assert self.may_answer.wait(2 * HANG)
        return super().nvmlInitWithFlags(flags)


def test_a_join_with_a_silent_driver_ends_at_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker asks how many GPUs there are before it dials, to know which of its rules it can satisfy."""
    top = nvidia_mint.root()
    driver = Stuck(top)
    monkeypatch.setattr(pynvml, "nvmlLib", driver)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    monkeypatch.setattr(diagnostics, "FIRST_WARNING", TIMEOUT / 4)
    write_gpu_policy(tmp_path, top)
    world = World(2, timeout=TIMEOUT)
    world.start([0], {0: Settings.from_environment({"RINGFENCE_POLICY": str(tmp_path / "policy.toml")})})
    error = world.error(0)  # a join that waits for its driver hangs
    driver.may_answer.set()
    silent = "rank 0 asked its own machine what evidence it can provide and got no answer: check its kernel"
    assert silent in error
    assert [silent in record.message for record in caplog.records] == [True]


def test_a_worker_serves_its_children_while_the_store_is_silent(
    server: tuple[subprocess.Popen[str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 of six waits for a store that is stopped; its child is admitted, and hears at once what became of it."""
    process, port = server
    store = Listening(TCPStore("127.0.0.1", port, None, False, timeout=STORE_TIMEOUT, wait_for_workers=False))
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    clock, admissions = Clock(monkeypatch, store_answers=False), Admissions(monkeypatch)
    inner = World(6, store=cast(MemoryStore, store))
    inner.start([1])
    leaf = World(6, timeout=2 * FAR, store=store.published)
    leaf.start([5])
    assert store.asked.wait(HANG)
    admissions.wait_for_pairs(1)
    clock.advance(FAR)
    assert "rank 1 ended the join" in leaf.error(5)
    assert "the store has not answered" in inner.error(1)
    process.send_signal(signal.SIGCONT)


class Listening:
    """A store of torch; what is written to it can also be read where it does not fall silent."""

    def __init__(self, store: TCPStore) -> None:
        self._store = store
        self.published = MemoryStore()
        self.asked = threading.Event()  # for an address

    def set(self, key: str, value: str, /) -> None:
        self.published.set(key, value)
        self._store.set(key, value)

    def get(self, key: str, /) -> bytes:
        return self._store.get(key)

    def check(self, keys: list[str], /) -> bool:
        self.asked.set()
        return self._store.check(keys)


def ask_the_silent() -> None:
    """In a namespace of its own: a nameserver that takes questions, and a store that names a host."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as nameserver:
        nameserver.bind(("127.0.0.1", 53))
        store = MemoryStore()
        AddressBook(store, worker(0, 2).entry).publish(("parent.example", 4000))
        try:
            join(store, 1, 2, Settings(SECRET, "run-7", "3"), ("127.0.0.1", 1), TIMEOUT, b"")
        except AdmissionError as error:
            print(error)


@pytest.mark.promise("A store or a resolver that does not answer holds no join beyond its timeout.")
def test_a_join_with_a_slow_resolver_ends_at_its_deadline(tmp_path: Path) -> None:
    (tmp_path / "resolv.conf").write_text(NAMESERVER)
    (tmp_path / "nsswitch.conf").write_text("hosts: files dns\n")
    script = 'ip link set lo up && mount --bind "$1/resolv.conf" /etc/resolv.conf && '
    script += 'mount --bind "$1/nsswitch.conf" /etc/nsswitch.conf && exec "$2" -m tests.integration.test_join_silence'
    command = ["unshare", "--mount", "--net", "sh", "-c", script, "sh", str(tmp_path), sys.executable]
    # A process that waits for its resolver before it ends takes longer than this.
    result = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, timeout=HANG)
    (error,) = result.stdout.splitlines()
    assert "did not form within 2 s" in error
    assert "rank 0: the resolver, asked for parent.example, has not answered for" in error


if __name__ == "__main__":
    ask_the_silent()
