"""Prints the CPU time and memory that the host of a launch spends on its agents until their first round forms.

    python -m tests.integration.launch_host_cost 512 2048
    python -m tests.integration.launch_host_cost 512 --profile

The host is a process of its own, with the thread, sockets and TLS of `ringfence run`. The agents are connections of one process
from addresses of their own, which prove a shared secret. One process answers for all, so some of them dial at a time: as many
answer within milliseconds as if each had a machine.
"""

from __future__ import annotations

import argparse
import cProfile
import ipaddress
import itertools
import multiprocessing
import pstats
import resource
import secrets
import selectors
import socket
import time
from multiprocessing.connection import Connection

import torch.distributed as dist

from ringfence import keys
from ringfence.config.settings import Settings
from ringfence.launch import host_link
from ringfence.launch.agent_admission import AgentAdmission
from ringfence.launch.agent_client import AgentClient
from ringfence.launch.agent_loop import AgentLoop
from ringfence.launch.host import OWN, Host
from ringfence.launch.host_link import HostLink
from ringfence.launch.messages import AgentCall, Answer, CallResult, Notice, Operation
from ringfence.launch.rounds import RoundLimits
from ringfence.launch.store_state import StoreState
from ringfence.session.join.connections import Connections
from ringfence.transport.tcp import raise_limit_of_files

SECONDS = 3600.0
AT_ONCE = 16
FIRST_ADDRESS = ipaddress.ip_address("127.1.0.1")


def admission(secret: bytes, rank: int, nodes: int, port: int) -> AgentAdmission:
    settings = Settings(secret=keys.Secret(secret), run_id="cost")
    return AgentAdmission.of(settings, rank=rank, nodes=nodes, endpoint=("127.0.0.1", port), seconds=60)


def host(secret: bytes, agents: int, pipe: Connection, profiled: bool) -> None:
    """Serve so many agents; send the port, then the CPU time of this process until the round has formed."""
    raise_limit_of_files()
    listener = socket.create_server(("127.0.0.1", 0), backlog=keys.ADMISSION_PENDING * 8)
    listener.setblocking(False)
    port = int(listener.getsockname()[1])
    state = StoreState("host", RoundLimits(agents + 1, agents + 1), dist.HashStore, node_0=OWN)
    state.rounds.attach(OWN, "host", 0)
    own = admission(secret, 0, agents + 1, port)
    profile = cProfile.Profile(time.thread_time)  # of CPU: other processes do not count

    class Loop(AgentLoop):
        def _run(self) -> None:
            if profiled:
                profile.enable()
            super()._run()
            profile.disable()

    loop = Loop(lambda connections, deliver: Host(state, connections, deliver, own, listener))
    client = AgentClient(loop.path)
    before, memory = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pipe.send(port)
    answer = client.ask(Operation.JOIN, seconds=SECONDS)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
    pipe.send((answer.result, time.process_time() - before, grown))
    pipe.recv()
    loop.stop()
    if profiled:
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)


class Agent:
    """A connection to the host, without the thread and the socket that an agent has for its workers."""

    def __init__(self, own: AgentAdmission, rank: int, port: int) -> None:
        self.is_attached = False
        self.answer: Answer | None = None  # to its join
        self._connections = Connections()
        self.descriptor = self._connections._selector.fileno()  # type: ignore[attr-defined]  # epoll can be polled
        self._link = HostLink(
            endpoint=("127.0.0.1", port),
            admission=own,
            attachment={"agent": f"agent{rank}", "rank": rank},
            connections=self._connections,
            deliver=self._take,
            outage=keys.OUTAGE_SECONDS,
        )
        self._link.send(AgentCall(1, Operation.JOIN, "", round(SECONDS * 1000), (b"",)))

    def _take(self, message: Answer | Notice) -> None:
        self.is_attached = True  # the host tells it of the rounds then
        self.answer = message if isinstance(message, Answer) else self.answer

    def turn(self) -> float:
        """Do what is due; return when there will be something to do."""
        now = time.monotonic()
        self._link.settle(now)
        self._connections.watch(reading=True)
        ready = self._connections.wait(0.0)
        self._link.serve_pending([(key.data, events) for key, events in ready if not self._link.dispatch(key, events)])
        self._connections.watch(reading=True)
        return self._link.next_at(now)


def run_agents(secret: bytes, count: int, port: int) -> None:
    """Let so many agents join, `AT_ONCE` of them dialling at a time."""
    raise_limit_of_files()
    numbers = itertools.count()
    bind = lambda stream: stream.bind((str(FIRST_ADDRESS + next(numbers)), 0))  # noqa: E731
    setattr(host_link, "dial_briefly", bind)  # noqa: B010 (each dials from an address of its own)
    own = admission(secret, 1, count + 1, port)
    due: dict[Agent, float] = {}
    started = joined = 0
    with selectors.DefaultSelector() as ready:
        while joined < count:
            while started < count and sum(not each.is_attached for each in due) < AT_ONCE:
                started += 1
                due[agent := Agent(own, started, port)] = 0.0
                ready.register(agent.descriptor, selectors.EVENT_READ, agent)
            now = time.monotonic()
            events = {key.data for key, _ in ready.select(0.01)}
            for agent in events | {each for each, at in due.items() if at <= now}:
                due[agent] = agent.turn()
                if agent.answer is not None:
                    assert agent.answer.result is CallResult.OK, agent.answer
                    ready.unregister(agent.descriptor)
                    del due[agent]
                    joined += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("agents", type=int, nargs="+")
    parser.add_argument("--profile", action="store_true", help="print where the host's thread spends it")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    secret = secrets.token_bytes(32)
    for count in options.agents:
        here, there = context.Pipe()
        process = context.Process(target=host, args=(secret, count, there, options.profile))
        process.start()
        began = time.monotonic()
        run_agents(secret, count, here.recv())
        result, spent, grown = here.recv()
        assert result is CallResult.OK
        print(
            f"{count} agents: {spent:.2f} s of CPU at the host, {1000 * spent / count:.2f} ms and {grown / count:.0f} KiB "
            f"each; a round after {time.monotonic() - began:.1f} s",
            flush=True,
        )
        here.send(None)
        process.join()


if __name__ == "__main__":
    main()
