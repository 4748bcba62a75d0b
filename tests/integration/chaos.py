"""Kill workers, agents and nodes of a training at random moments, and measure whether and when it goes on.

A run starts the nodes, kills what its plan says, starts agents again that ended with anything but 0, as a scheduler does, and
waits until all agents have exited with 0 or a bound has passed. `scripts/chaos` does many runs; tests do a few.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from tests.integration.chaos_nodes import Nodes, Shape, alive, kill
from tests.limits import HANG

Case = Literal["worker", "agent", "node", "host"]
CASES: tuple[Case, ...] = ("worker", "agent", "node", "host")
BEGIN = 60.0  # seconds within which an undisturbed training must take its first step, or a kill must find its victim
NEVER = 60.0  # seconds after the last kill: a training that has not gone on until then never does
FINISH = 30.0  # seconds for the steps that are left once all ranks go on
BACK = 1.0  # seconds until the scheduler starts an agent again
ORPHANED = (
    15.0  # seconds after the end of their agent: workers that still run are orphans, even if they were just starting
)
TRAINED_ON = 1.0  # seconds after the end of their agent: workers that still take steps are orphans
POLL = 0.02
STOLEN = 120.0  # seconds by which time that the hypervisor gave to others extends a bound at most
LAST = 4  # steps before the end in which nothing is killed: an agent that has finished cannot take part any more


def stolen() -> float:
    """Return the seconds, on average over the processors, in which the hypervisor ran something else since boot."""
    with open("/proc/stat") as file:
        return int(file.readline().split()[8]) / os.sysconf("SC_CLK_TCK") / (os.cpu_count() or 1)


@dataclass(frozen=True)
class Kill:
    """What is killed and when: `delay` seconds after a step was taken, or after the nodes or the last kill (step None)."""

    case: Case
    node: int
    worker: int  # local rank, for the case `worker`
    step: int | None
    delay: float


@dataclass(frozen=True)
class Plan:
    """A run that a seed and an index determine."""

    seed: int
    index: int
    case: Case
    kills: tuple[Kill, ...]


@dataclass(frozen=True)
class Baseline:
    """What an undisturbed run did."""

    digest: str
    first_step: float  # seconds from the start of the agents to the first step of all ranks
    first_worker: float  # seconds from the start of the agents to the first worker
    seconds: float


@dataclass
class Hit:
    """A kill that was made. Times are in seconds; None: it did not happen."""

    case: Case
    node: int
    at: float  # since the start of the run
    phase: str  # start: no worker had taken a step, training: one had, restart: none had since the kill before
    step: int  # the last one before
    time: float  # of the clock
    pids: list[int]
    next_step: float | None = None  # from the kill until all ranks have taken a step
    since_restart: float | None = None  # the same from the start of the new agent
    workers_ended: float | None = None  # from the kill of an agent alone until its workers had ended
    trained_on: bool = False  # workers of an agent that was killed alone took further steps
    stolen: float = 0.0  # part of next_step in which the hypervisor ran something else


@dataclass
class Outcome:
    """A run and what became of it."""

    launcher: str
    nodes: int
    workers: int
    seed: int
    index: int
    case: str
    hits: list[Hit] = field(default_factory=list)
    finished: bool = False
    identical: bool = False
    orphans: int = 0  # processes left after the last agent
    gave_up: int = 0  # agents that ended with an error of their own
    seconds: float = 0.0
    stolen: float = 0.0  # part of it in which the hypervisor ran something else
    problem: str = ""

    @property
    def never(self) -> bool:
        return any(hit.next_step is None for hit in self.hits[-1:])

    @property
    def orphaned(self) -> bool:
        """Whether workers survived their agent."""
        alone = [hit for hit in self.hits if hit.case == "agent"]
        bound = ORPHANED + self.stolen
        return self.orphans > 0 or any(
            hit.trained_on or hit.workers_ended is None or hit.workers_ended > bound for hit in alone
        )

    @property
    def passed(self) -> bool:
        return (
            bool(self.hits) and self.finished and self.identical and not (self.never or self.orphaned or self.gave_up)
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"never": self.never, "orphaned": self.orphaned, "passed": self.passed}


def draw(seed: int, index: int, cases: Sequence[Case], shape: Shape, baseline: Baseline) -> Plan:
    """Draw the kills of a run: half of them before the first step; a quarter of the runs is hit twice."""
    chance = random.Random(f"{seed}/{index}")
    case = cases[index % len(cases)]
    kills = []
    for again in (False, True)[: 1 + (chance.random() < 0.25)]:
        node = {"host": 0, "node": chance.randrange(1, max(2, shape.nodes))}.get(case, chance.randrange(shape.nodes))
        worker = chance.randrange(shape.workers)
        early, step = chance.random() < 0.5, chance.randrange(shape.steps - LAST - 1)
        starting = baseline.first_step - (baseline.first_worker if case == "worker" else 0)  # workers are waited for
        if again:
            kills.append(Kill(case, node, worker, None, chance.uniform(0, 1.2 * baseline.first_step)))
        else:
            delay = chance.uniform(0, starting if early else 0.1)
            kills.append(Kill(case, node, worker, None if early else step, delay))
    return Plan(seed, index, case, tuple(kills))


def undisturbed(shape: Shape, folder: Path) -> Baseline:
    """Run the training without a kill.

    Raises:
        RuntimeError: if it does not end well in time; the message has the end of the agents' output.
    """
    with Nodes(shape, folder) as nodes:
        began, before = time.time(), stolen()
        for node in range(shape.nodes):
            nodes.start(node)
        while any(agent.poll() is None for agent in nodes.agents.values()):
            if time.time() > began + BEGIN + FINISH + min(STOLEN, stolen() - before):
                break
            time.sleep(POLL)
        ended = time.time()
        nodes.read_events()
        digest = nodes.digest()
        if digest is None or any(agent.poll() != 0 for agent in nodes.agents.values()):
            raise RuntimeError(f"The undisturbed training failed. {tails(folder)}")
        steps = [event["time"] for event in nodes.events if event["event"] == "step" and event["step"] == 0]
        first = min(event["time"] for event in nodes.events)
        if left := nodes.left_over():
            raise RuntimeError(f"The undisturbed training left processes: {left}")
        return Baseline(digest, max(steps) - began, first - began, ended - began)


def tails(folder: Path, characters: int = 1500) -> str:
    """Return the end of each agent's output."""
    logs = sorted(folder.glob("agent-*.log"))
    return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-characters:]}" for log in logs)


class Run:
    """One run of a plan. `go` returns its outcome; every process of the run has ended then."""

    def __init__(self, shape: Shape, plan: Plan, baseline: Baseline, folder: Path, never: float = NEVER) -> None:
        self._shape = shape
        self._plan = plan
        self._baseline = baseline
        self._never = never
        self._nodes = Nodes(shape, folder)
        self._back: dict[int, float] = {}  # nodes whose agent is to be started again, and when
        self._restarted: dict[int, float] = {}  # when the agent of a node was started again the last time
        self._step_seen: float | None = None  # when the step that the next kill waits for was first seen
        self._outcome = Outcome(shape.launcher, shape.nodes, shape.workers, plan.seed, plan.index, plan.case)
        self._began = 0.0
        self._stolen = 0.0  # until the start of the run
        self._stolen_before = 0.0  # until the last kill

    def go(self) -> Outcome:
        outcome = self._outcome
        with self._nodes:
            self._began, self._stolen = time.time(), stolen()
            for node in range(self._shape.nodes):
                self._nodes.start(node)
            kills = list(self._plan.kills)
            while time.time() < self._deadline(bool(kills)):
                self._nodes.read_events()
                self._restart_agents()
                self._observe()
                if kills and self._too_late():
                    kills.clear()
                if kills and self._due(kills[0]) and self._strike(kills[0]):
                    kills.pop(0)
                    self._step_seen = None
                if not kills and not self._back and all(agent.poll() == 0 for agent in self._nodes.agents.values()):
                    outcome.finished = True
                    break
                time.sleep(POLL)
            outcome.seconds, outcome.stolen = time.time() - self._began, stolen() - self._stolen
            self._nodes.read_events()
            self._observe()
            self._conclude()
        return outcome

    def _deadline(self, kills_left: bool) -> float:
        since = self._stolen_before if self._outcome.hits else self._stolen
        return self._bound(kills_left) + min(STOLEN, stolen() - since)

    def _bound(self, kills_left: bool) -> float:
        hits = self._outcome.hits
        if not hits or kills_left:
            return (hits[-1].time if hits else self._began) + BEGIN + FINISH
        if hits[-1].next_step is None:
            return hits[-1].time + self._never
        return hits[-1].time + hits[-1].next_step + FINISH

    def _too_late(self) -> bool:
        return self._nodes.last_step() >= self._shape.steps - LAST or self._nodes.digest() is not None

    def _due(self, planned: Kill) -> bool:
        now = time.time()
        if planned.step is not None:
            if self._step_seen is None and self._nodes.last_step() >= planned.step:
                self._step_seen = now
            return self._step_seen is not None and now >= self._step_seen + planned.delay
        if self._outcome.hits:
            return now >= self._outcome.hits[-1].time + planned.delay
        if planned.case == "worker":  # counted from the first worker on
            if self._step_seen is None and any(event["event"] == "start" for event in self._nodes.events):
                self._step_seen = now
            return self._step_seen is not None and now >= self._step_seen + planned.delay
        return now >= self._began + planned.delay

    def _strike(self, planned: Kill) -> bool:
        """Kill what the plan says. Return False if the victim does not run at the moment."""
        nodes, node = self._nodes, planned.node
        agent = nodes.agents[node]
        if agent.poll() is not None:
            return False
        pids: list[int] = []
        if planned.case == "worker":
            found = nodes.workers(node)
            if not found:
                return False
            pids = [found[min(planned.worker, len(found) - 1)]]
            now = time.time()
            kill(pids)
        elif planned.case == "agent":
            now, pids = time.time(), nodes.workers(node)
            agent.kill()
            agent.wait(HANG)
            pids = sorted({*pids, *nodes.workers(node)})
        else:
            now, pids = time.time(), nodes.kill_node(node)
        if planned.case != "worker":
            self._back[node] = time.time() + BACK
        nodes.read_events()
        self._stolen_before = stolen()
        hits = self._outcome.hits
        stepped = any(event["event"] == "step" and event["time"] <= now for event in nodes.events)
        phase = "start" if not stepped else "restart" if hits and hits[-1].next_step is None else "training"
        hits.append(Hit(planned.case, node, now - self._began, phase, nodes.last_step(), now, pids))
        return True

    def _restart_agents(self) -> None:
        for node, agent in self._nodes.agents.items():
            if node not in self._back and agent.poll() not in (None, 0):
                self._outcome.gave_up += 1
                self._back[node] = time.time() + BACK
        for node in [node for node, due in self._back.items() if time.time() >= due]:
            del self._back[node]
            self._restarted[node] = time.time()
            self._nodes.start(node)

    def _observe(self) -> None:
        """Note for the last kill whether all ranks go on, and whether the workers of a killed agent have ended."""
        if not self._outcome.hits:
            return
        steps = [event for event in self._nodes.events if event["event"] == "step"]
        for hit in [hit for hit in self._outcome.hits if hit.case == "agent"]:
            if hit.workers_ended is None and not any(alive(pid) for pid in hit.pids):
                hit.workers_ended = time.time() - hit.time
            hit.trained_on = any(event["pid"] in hit.pids and event["time"] > hit.time + TRAINED_ON for event in steps)
        hit = self._outcome.hits[-1]
        if hit.next_step is not None:
            return
        # A step that was in progress may end after the kill. What follows is of a new process, or of a new round.
        before = {(event["pid"], event["round"]) for event in steps if event["time"] <= hit.time}
        first: dict[int, float] = {}
        for event in steps:
            old = event["pid"] in hit.pids or (event["pid"], event["round"]) in before
            if event["time"] > hit.time and not old:
                first.setdefault(event["rank"], event["time"])
        if len(first) == self._shape.ranks:
            hit.next_step = max(first.values()) - hit.time
            hit.stolen = stolen() - self._stolen_before
            if hit.node in self._restarted and hit.case != "worker":
                hit.since_restart = max(first.values()) - self._restarted[hit.node]

    def _conclude(self) -> None:
        outcome = self._outcome
        outcome.identical = self._nodes.digest() == self._baseline.digest
        if outcome.finished:
            outcome.orphans = len(self._nodes.left_over())
        states = {node: agent.poll() for node, agent in self._nodes.agents.items()}
        if not outcome.finished:
            outcome.problem = f"agents {states}, last step {self._nodes.last_step()} of {self._shape.steps}"
        elif not outcome.identical:
            outcome.problem = "other weights than without a kill"
        elif not outcome.hits:
            outcome.problem = "the training ended before the kill"
