"""The rendezvous that torchrun creates for `--rdzv-backend=ringfence` (entry point in `torchrun.py`).

`ringfence run` uses the same. Each round has a generation, which the host draws and which reaches the workers in
RINGFENCE_GENERATION; torchrun's restart count is not used for anything.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
import time
from collections.abc import Callable
from typing import Any, Final

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from ringfence import keys
from ringfence.admission.encoding import Reader
from ringfence.admission.entry import GENERATION_BYTES, WORLD_LIMIT
from ringfence.config.interfaces import LOOPBACK, address_of_interface, parse_address
from ringfence.config.settings import Settings
from ringfence.errors import ConfigurationError, PeerLostError
from ringfence.guard import AGENT, REQUIRE
from ringfence.launch.agent_admission import AgentAdmission
from ringfence.launch.agent_client import AgentClient
from ringfence.launch.agent_loop import AgentLoop, NewUpstream, Upstream
from ringfence.launch.elastic_agent import use_sealed_agent
from ringfence.launch.host import OWN, Host
from ringfence.launch.host_link import HostLink
from ringfence.launch.messages import Answer, CallResult, Notice, Operation, from_json, number_of, text_of
from ringfence.launch.rounds import RoundLimits
from ringfence.launch.store import AgentStore
from ringfence.launch.store_state import StoreState
from ringfence.session.join.connections import Connections
from ringfence.transport.tcp import raise_limit_of_files, resolve

NAME: Final = "ringfence"
DEFAULT_PORT: Final = 29400
# Torch's names for what its own rendezvous has too.
_OPTIONS: Final = ("join_timeout", "last_call_timeout", "rank", "rejoin", "spares")
_UNUSED: Final = "timeout"  # torchrun always passes it, for its static rendezvous
_NO_PORT: Final = 1  # MASTER_PORT where nothing listens: only a worker without the hooks of `worker.py` would dial it
_LEAVE_SECONDS: Final = 5.0
_CAUSE_SECONDS: Final = 3.0  # for the node on which something failed to say so
_LINGER_SECONDS: Final = 5.0  # of the host, beyond the outage timeout
_MACHINE_SECONDS: Final = 60.0  # for this machine to tell what evidence it can provide


class SealedRendezvous(RendezvousHandler):  # type: ignore[misc]  # torch is untyped here
    """One agent's view of the rounds. Its methods are those that torchrun calls."""

    def __init__(self, loop: AgentLoop, options: Options, outage: float) -> None:
        self.loop = loop
        self.options = options
        self._outage = outage  # seconds after which a silent agent is lost
        self._client = AgentClient(loop.path)
        self.generation = ""  # of the round that this agent is in
        self._over_since: float | None = None  # when this agent saw that its round is over
        self.failure = ""  # what failed on this node in the round before
        self.workers_run = True  # whether workers of this node can still call `ringfence.rejoin()`

    def get_backend(self) -> str:
        return NAME

    @property
    def use_agent_store(self) -> bool:
        """Workers are clients: also one without our hooks opens no listener."""
        return True

    def get_run_id(self) -> str:
        return self.options.run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the next round. What is put into the environment here reaches the workers."""
        end = time.monotonic() + self.options.join_timeout
        answer = self._ask(Operation.JOIN, self.options.join_timeout, self._cause())
        while answer.result is CallResult.LOST and time.monotonic() < end:
            answer = self._ask(Operation.JOIN, max(0.001, end - time.monotonic()), self._cause())
        if answer.result is CallResult.CLOSED and not answer.text:
            raise RendezvousGracefulExitError("the run has finished")
        if answer.result is CallResult.CLOSED:
            raise RendezvousClosedError(answer.text)
        if answer.result in (CallResult.TIMEOUT, CallResult.LOST):
            raise RendezvousTimeoutError(
                f"no round of {self.options.nodes} nodes formed within {self.options.join_timeout:g} s"
                + (f": {answer.text}" if answer.text else "")
            )
        if answer.result is not CallResult.OK:
            raise RendezvousConnectionError(answer.text)
        found = from_json(answer.parts[0])
        self.generation = text_of(found, "generation", GENERATION_BYTES)
        self._over_since, self.failure = None, ""
        os.environ.update(
            {
                "RINGFENCE_GENERATION": self.generation,
                "RINGFENCE_RUN_ID": self.options.run_id,
                AGENT: self.loop.path,
                REQUIRE: "1",
            }
        )
        return RendezvousInfo(
            AgentStore(self._client, self.generation),
            number_of(found, "rank", WORLD_LIMIT),
            number_of(found, "nodes", WORLD_LIMIT),
            RendezvousStoreInfo(*self.options.master),
        )

    def is_closed(self) -> bool:
        notice = self._notice()
        return notice is not None and bool(notice.closed)

    def set_closed(self) -> None:
        self._ask(Operation.CLOSE, _LEAVE_SECONDS, b"", b"an agent has closed the rendezvous")

    def num_nodes_waiting(self) -> int:
        """Return 1 if the workers have to be started again for the next round, otherwise 0. Never waits for the network."""
        if not self.is_round_over:
            return 0
        if self.options.rejoin_within is None or not self.workers_run:
            return 1
        now = time.monotonic()
        self._over_since = now if self._over_since is None else self._over_since
        return int(now >= self._over_since + self.options.rejoin_within)

    @property
    def is_round_over(self) -> bool:
        """Whether the workers have to join the next round. Raises RendezvousClosedError if this agent is no member any more."""
        notice = self._notice()
        if notice is None:
            return False
        if notice.replaced:
            raise RendezvousClosedError(
                f"another agent has joined as node {self.options.rank}: this one is not part of the run any more. If two "
                "nodes were given the same --node-rank, correct it"
            )
        return notice.ends(self.generation)

    def report_success(self) -> bool:
        """Tell the host that the workers of this node have succeeded; return whether it knows."""
        return self._ask(Operation.DONE, _LEAVE_SECONDS).result is CallResult.OK

    @property
    def is_finished(self) -> bool:
        """Whether the workers of all nodes have succeeded."""
        notice = self._notice()
        return notice is not None and notice.finished and notice.generation == self.generation

    def shutdown(self) -> bool:
        """Leave. If the run has not finished, no further round forms: this node will not come back by itself."""
        if self.loop.is_alive:
            if self.is_finished:
                self._ask(Operation.LEAVE, _LEAVE_SECONDS)
            else:
                reason = f"the workers of node {self.options.name} failed for good"
                self._ask(Operation.CLOSE, _LEAVE_SECONDS, self._cause(), reason.encode())
                self._wait_for_cause()
            self.loop.stop(self._outage + _LINGER_SECONDS)
        return True

    def _cause(self) -> bytes:
        """What failed on this node, as the others are told."""
        return f"{self.failure}, on {socket.gethostname()}".encode() if self.failure else b""

    def _wait_for_cause(self) -> None:
        """Workers of this node have failed because others did: wait a moment until another agent says why. It is logged."""
        end = time.monotonic() + _CAUSE_SECONDS
        while not self.failure and time.monotonic() < end:
            notice = self._notice()
            if notice is None or notice.cause:
                return
            time.sleep(_CAUSE_SECONDS / 100)

    def _notice(self) -> Notice | None:
        answer = self._ask(Operation.STATUS, 0.0)
        return Notice.read(Reader(answer.parts[0])) if answer.parts else None

    def _ask(self, operation: Operation, seconds: float, *parts: bytes) -> Answer:
        try:
            return self._client.ask(operation, parts, seconds=seconds)
        except PeerLostError as error:
            raise RendezvousConnectionError(str(error)) from error


class Options:
    """What torchrun passes, checked. Raises ConfigurationError, which says what to change."""

    def __init__(self, params: RendezvousParameters) -> None:
        unknown = sorted(set(params.config) - {*_OPTIONS, _UNUSED})
        if unknown:
            raise ConfigurationError(f"--rdzv-conf {unknown[0]}: the ringfence rendezvous knows {', '.join(_OPTIONS)}")
        self.run_id = str(params.run_id)
        self.limits = RoundLimits(
            params.min_nodes,
            params.max_nodes,
            _seconds(params, "last_call_timeout", keys.LAST_CALL_SECONDS),
        )
        self.join_timeout = _seconds(params, "join_timeout", keys.ROUND_SECONDS)
        # How long workers run before spares are started for them, in seconds; None: there are no spares.
        self.spares_after = _seconds(params, "spares", 0.0) if "spares" in params.config else None
        # How long workers may take to call `ringfence.rejoin()`, in seconds; None: they are always started again.
        self.rejoin_within = _seconds(params, "rejoin", 0.0) if "rejoin" in params.config else None
        self.is_alone = params.max_nodes == 1
        self.endpoint = (LOOPBACK, 0) if self.is_alone else _endpoint(params.endpoint)
        self.rank = _rank(params)
        self.is_host = self.is_alone or (_is_here(self.endpoint[0]) if self.rank is None else self.rank == 0)
        self.master = (LOOPBACK, _NO_PORT) if self.is_alone else self.endpoint

    @property
    def nodes(self) -> str:
        low, high = self.limits.min_nodes, self.limits.max_nodes
        return str(low) if low == high else f"{low} to {high}"

    @property
    def name(self) -> str:
        """How messages name this node."""
        return socket.gethostname() if self.rank is None else str(self.rank)


def create(params: RendezvousParameters) -> SealedRendezvous:
    """Create the rendezvous of this agent, and start its thread.

    Raises ConfigurationError if an option, the policy or a credential is wrong, or if the host cannot listen.
    """
    options = Options(params)
    environ = {**os.environ, "TORCHELASTIC_RUN_ID": options.run_id}
    settings = Settings.from_environment({**environ, "MASTER_ADDR": options.master[0]} if options.is_alone else environ)
    options.run_id = settings.run_id
    use_sealed_agent()
    raise_limit_of_files()
    return SealedRendezvous(AgentLoop(_upstream(options, settings)), options, settings.outage)


def _upstream(options: Options, settings: Settings) -> NewUpstream:
    agent = secrets.token_hex(16)
    admission = None
    if not options.is_alone:
        try:
            admission = AgentAdmission.of(
                settings,
                rank=0 if options.is_host else options.rank or 1,
                nodes=options.limits.max_nodes,
                endpoint=options.endpoint,
                seconds=_MACHINE_SECONDS,
            )
        except TimeoutError:
            raise ConfigurationError(
                f"this machine did not tell within {_MACHINE_SECONDS:.0f} s what evidence it can provide: check its kernel and "
                "its drivers (dmesg, nvidia-smi)"
            ) from None

    def new(connections: Connections, deliver: Callable[[Answer | Notice], None]) -> Upstream:
        if not options.is_host:
            assert admission is not None
            return HostLink(
                endpoint=options.endpoint,
                admission=admission,
                attachment={"agent": agent, "rank": options.rank},
                connections=connections,
                deliver=deliver,
                outage=settings.outage,
            )
        state = StoreState(secrets.token_hex(8), options.limits, dist.HashStore, node_0=OWN)
        state.rounds.attach(OWN, agent, 0)
        listener = None if options.is_alone else _listen(options.endpoint)
        return Host(state, connections, deliver, admission, listener, settings.outage)

    return new


def _listen(endpoint: tuple[str, int]) -> socket.socket:
    """Listen at the endpoint's address, not on all interfaces."""
    wanted = os.environ.get("RINGFENCE_INTERFACE")
    try:
        address = (address_of_interface(wanted), endpoint[1]) if wanted else resolve(*endpoint)[1][:2]
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        listener = socket.create_server(address, family=family, backlog=keys.ADMISSION_PENDING * 8)
    except (OSError, PeerLostError) as error:
        raise ConfigurationError(
            f"node 0 hosts the store and cannot listen at {endpoint[0]}:{endpoint[1]}: "
            f"{getattr(error, 'strerror', None) or error}. The endpoint must be an address of node 0; set "
            "RINGFENCE_INTERFACE if it listens on another one"
        ) from error
    listener.setblocking(False)
    return listener


# -- options ----------------------------------------------------------------------------------------------------------


def _endpoint(text: str) -> tuple[str, int]:
    if not text:
        raise ConfigurationError("several nodes need --rdzv-endpoint HOST:PORT, an address of node 0")
    host = text.rpartition(":")[0] if text.rpartition(":")[2].isdecimal() else ""
    return parse_address(text if host else f"{text}:{DEFAULT_PORT}", "--rdzv-endpoint")


def _rank(params: RendezvousParameters) -> int | None:
    text = params.config.get("rank")
    if text is None:
        return None
    if not str(text).isdecimal() or int(text) >= params.max_nodes:
        raise ConfigurationError(
            f"node rank {text}: give each node a different number from 0 to {params.max_nodes - 1}"
        )
    return int(text)


def _seconds(params: RendezvousParameters, name: str, default: float) -> float:
    text: Any = params.config.get(name, default)
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 < value < keys.CALL_LIMIT_MILLISECONDS / 1000:
        raise ConfigurationError(f"--rdzv-conf {name}={text}: write a number of seconds")
    return value


def _is_here(host: str) -> bool:
    """Whether a host name or address is one of this machine."""
    try:
        family, address = resolve(host, 0)
        if ipaddress.ip_address(address[0]).is_loopback:
            return True
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address[0], 0))
    except (OSError, PeerLostError):
        return False
    return True
