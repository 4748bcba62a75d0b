"""Hostile messages at the host of the store while an admitted agent works: real sockets, TLS and threads.

`python -m tests.attack.launch_attacks --messages 100000` prints a line of JSON: what was sent, how long calls took, and what
went wrong.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import pickle
import secrets
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import torch.distributed as dist

from ringfence import keys
from ringfence.config.settings import Settings
from ringfence.launch.agent_admission import AgentAdmission
from ringfence.launch.agent_client import AgentClient
from ringfence.launch.agent_loop import AgentLoop
from ringfence.launch.host import OWN, Host
from ringfence.launch.host_link import HostLink
from ringfence.launch.messages import CallResult, Operation, from_json
from ringfence.launch.rounds import RoundLimits
from ringfence.launch.store_state import StoreState
from tests.attack.launch_attacker import RUN_ID, Task

ALONE_SECONDS = 1.0
PAUSE_SECONDS = 0.005
LIMIT_SECONDS = 3000.0
SETTLE_SECONDS = 60.0


class Unpickled:
    """Counts what this process unpickles from now on."""

    def __init__(self) -> None:
        self.count = 0
        self._enabled = True
        sys.addaudithook(self._hook)  # also called by the module in C
        for name in ("load", "loads", "Unpickler"):
            setattr(pickle, name, self._counting(getattr(pickle, name)))

    def _hook(self, event: str, _: tuple[object, ...]) -> None:
        if event == "pickle.find_class" and self._enabled:
            self.count += 1

    def _counting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return original(*args, **kwargs)

        return call


class Admissions(logging.Handler):
    """Counts the agents that the host has admitted, and its warnings, by its log."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.count = self.warnings = 0
        log = logging.getLogger("ringfence.launch.host")
        log.setLevel(logging.INFO)
        log.propagate = False
        log.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.count += record.getMessage().startswith("admitted")
        self.warnings += record.levelno >= logging.WARNING


class Service:
    """The host of the store and one other agent, in a round of two nodes."""

    def __init__(self) -> None:
        self.secret = secrets.token_bytes(32)
        listener = socket.create_server(("127.0.0.1", 0), backlog=keys.ADMISSION_PENDING * 8)
        listener.setblocking(False)
        self.port = int(listener.getsockname()[1])
        limits = RoundLimits(2, 2)
        state = StoreState(secrets.token_hex(8), limits, dist.HashStore)
        state.rounds.attach(OWN, "host", 0)
        self._host = AgentLoop(
            lambda connections, deliver: Host(state, connections, deliver, self._admission(0), listener)
        )
        self._agent = AgentLoop(
            lambda connections, deliver: HostLink(
                endpoint=("127.0.0.1", self.port),
                admission=self._admission(1),
                attachment={"agent": "agent", "rank": 1},
                connections=connections,
                deliver=deliver,
                outage=keys.OUTAGE_SECONDS,
            )
        )
        self.client = AgentClient(self._agent.path)
        clients = (AgentClient(self._host.path), self.client)
        with ThreadPoolExecutor(2) as threads:
            answers = list(threads.map(lambda client: client.ask(Operation.JOIN, seconds=60.0), clients))
        assert [answer.result for answer in answers] == [CallResult.OK] * 2, answers
        self.generation = str(from_json(answers[0].parts[0])["generation"])

    def _admission(self, rank: int) -> AgentAdmission:
        settings = Settings(secret=keys.Secret(self.secret), run_id=RUN_ID)
        return AgentAdmission.of(settings, rank=rank, nodes=2, endpoint=("127.0.0.1", self.port), seconds=60)

    def stop(self) -> None:
        self._agent.stop()
        self._host.stop()


class Caller:
    """Makes calls through the admitted agent, checks each answer and takes its time."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._count = 0
        self.times: list[float] = []
        self.answered: list[float] = []  # when, by the monotonic clock of the machine
        self.wrong: list[str] = []

    def work(self) -> None:
        self._count += 1
        value = str(self._count).encode()
        self._expect((), Operation.SET, b"worker", value)
        self._expect((value,), Operation.GET, b"worker")
        self._expect((value,), Operation.ADD, b"counter", b"1")
        self._expect((b"1",), Operation.CHECK, b"worker", b"counter")

    def _expect(self, expected: tuple[bytes, ...], operation: Operation, *parts: bytes) -> None:
        began = time.perf_counter()
        answer = self._service.client.ask(operation, parts, scope=self._service.generation, seconds=60.0)
        self.times.append(time.perf_counter() - began)
        self.answered.append(time.monotonic())
        if answer.result is not CallResult.OK or answer.parts != expected:
            self.wrong.append(f"{operation.name}: {answer.result.name} {answer.parts!r}, not {expected!r}")


def _has_ended(process: subprocess.Popen[str]) -> bool:
    """Whether a process has ended, after a pause: a caller without pauses would leave no CPU to the attacker."""
    try:
        process.wait(PAUSE_SECONDS)
    except subprocess.TimeoutExpired:
        return False
    return True


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def attack(messages: int, seed: int) -> dict[str, Any]:
    """Send that many messages; return what happened."""
    started = time.monotonic()
    admissions, unpickled, service = Admissions(), Unpickled(), Service()
    caller = Caller(service)
    end = time.monotonic() + ALONE_SECONDS
    while time.monotonic() < end:
        caller.work()
    alone, caller.times = caller.times, []
    before = descriptors()
    task = Task(service.port, service.secret.hex(), service.generation, messages, seed)
    command = [sys.executable, "-m", "tests.attack.launch_attacker"]
    began = time.monotonic()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as attacker:
        assert attacker.stdin is not None and attacker.stdout is not None
        inside = descriptors() - before  # the pipes of the attacker
        attacker.stdin.write(json.dumps(asdict(task)) + "\n")
        attacker.stdin.flush()
        while not _has_ended(attacker) and time.monotonic() < began + LIMIT_SECONDS:
            caller.work()
        attacker.kill()
        seconds = time.monotonic() - began
        report = json.loads(attacker.stdout.read())
    assert inside == 2
    end = time.monotonic() + SETTLE_SECONDS
    during, caller.times = caller.times, []
    while descriptors() > before and time.monotonic() < end:
        caller.work()  # each call is a turn of the host's loop, which closes what the attacker left
    found = {
        "messages": sum(report["sent"].values()),
        "sent": report["sent"],
        "seconds": round(seconds, 1),
        "problems": [*report["problems"], *caller.wrong],
        "seconds_in_all": time.monotonic() - started,
        "calls": len(during),
        "calls_between_messages": sum(report["first"] < moment < report["last"] for moment in caller.answered),
        "median_ms": round(1000 * statistics.median(during), 2),
        "p99_ms": round(1000 * sorted(during)[len(during) * 99 // 100], 2),
        "worst_ms": round(1000 * max(during), 1),
        "worst_alone_ms": round(1000 * max(alone), 1),
        "unpickled": unpickled.count,
        "admitted": admissions.count,
        "admitted_with_secret": report["admitted"] + 1,
        "descriptors_left": descriptors() - before,
        "warnings": admissions.warnings,
    }
    service.stop()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.attack.launch_attacks", description=__doc__)
    parser.add_argument("--messages", type=int, default=3000, help="how many are sent (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="another one gives other messages (default: %(default)s)")
    arguments = parser.parse_args()
    print(json.dumps(attack(arguments.messages, arguments.seed)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
