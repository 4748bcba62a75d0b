"""A worker's session: one session from admission to goodbye, shared by all process groups of the process."""

from __future__ import annotations

import atexit
import contextlib
import ipaddress
import logging
import os
import resource
import socket
import traceback
from collections import Counter
from typing import Any

from ringfence import keys, metrics
from ringfence.collectives import Table
from ringfence.dataplane import info, native
from ringfence.errors import AbortedError, ProtocolError
from ringfence.join import Membership, join, listen
from ringfence.log import LOGGER as _log
from ringfence.log import announce
from ringfence.rendezvous import warn_of_open_rendezvous
from ringfence.runtime.engine import Engine
from ringfence.runtime.events import Platform
from ringfence.runtime.link_keys import LinkKeys
from ringfence.runtime.progress import ProgressLoop
from ringfence.settings import Settings
from ringfence.transport.alarm import Alarm
from ringfence.transport.fork import canary, in_child, register_fork_cleanup
from ringfence.transport.tcp import TcpNetwork

_OPEN_FILES = 1 << 16  # of a worker in a large world, if the system allows it; by default many give 1024


class Session:
    """The engine of one session and the loop that drives it."""

    engine_type: type[Engine] = Engine
    keys_type: type[LinkKeys] = LinkKeys
    table: Table = Table()  # the proposal of rank 0; what the roster brings counts

    def __init__(self, store: Any, rank: int, world_size: int, timeout: float) -> None:
        self.left = False
        self._held = 0
        self._age_limit: Alarm | None = None
        self._metrics: metrics.MetricsFile | None = None
        self._names: Counter[tuple[str, tuple[int, ...]]] = Counter()
        start = _Start()
        try:
            start.settings = settings = Settings.from_environment(os.environ, _host_of(store))
            warn_of_open_rendezvous()
            _raise_limit_of_files()
            _warn_of_loopback(settings, world_size)
            metrics_path = metrics.path_of(settings, rank)
            start.listener = listener = listen(settings)
            address = settings.link_address(listener.getsockname()[:2])
            limit = min(timeout, settings.join_timeout)
            start.member = member = join(store, rank, world_size, settings, address, limit, self.table.to_bytes())
            self.generation = settings.generation
            self._begin(start, member, listener, settings.outage)
        except BaseException as error:
            start.fail(error)
            raise
        settings.forget()
        atexit.register(self.leave)
        if metrics_path is not None:
            self._metrics = metrics.MetricsFile(metrics_path, settings.run_id, self.engine, self.workers)
        if settings.stage_times:
            native.stages(True)
        self._announce(settings, member)

    def _begin(self, start: _Start, member: Membership, listener: socket.socket, outage: float) -> None:
        """The engine and its loop take over what the join has brought."""
        start.network = self.network = TcpNetwork(
            listener, [(entry.host, entry.port) for entry in member.roster.entries], outage
        )
        start.engine = self.engine = self.engine_type(
            rank=member.rank,
            world_size=member.world_size,
            keys=self.keys_type(
                session_key=member.session_key,
                private_key=member.link_private_key,
                public_keys=[entry.public_key for entry in member.roster.entries],
                alive=canary(),
            ),
            network=self.network,
            table=Table.from_bytes(member.table),
            edges=member.edges,
            peer_verifier=member.peer_verifier,
            platform=Platform(outage=outage),
        )
        self.workers = member.roster.workers
        self.engine.requests.worker_names = [str(worker) for worker in self.workers]
        self.loop = ProgressLoop(self.engine, self.network, member.edges)
        try:
            self._age_limit = self._limit_age(member)
        except BaseException:
            self.leave(seconds=0.0)  # the connections are the loop's: it closes them
            raise

    def _announce(self, settings: Settings, member: Membership) -> None:
        """Rank 0 tells people what has formed."""
        size = member.world_size
        if member.rank == 0:
            slow = "" if native.COMPILED else f"\nthe data plane is not the compiled one: {info.why_not()}"
            announce(
                f"{size} worker{'s' if size > 1 else ''}, run {settings.run_id}, generation "
                f"{settings.generation}, session {member.roster.digest[:4].hex()}, {keys.SUITE_NAMES[member.suite]}, "
                f"{_how_admitted(member)}{slow}"
            )
            _warn_of_a_run_without_a_name(settings.run_id, {entry.host for entry in member.roster.entries})
        # In full: who shows two rosters to two workers chooses both, and can make them agree in a few digits.
        _log.info("worker %d of %d holds the roster %s", member.rank, size, member.roster.digest.hex())
        for worker in self.workers:  # rank 0 for all: in a large run each of them would say the same
            level = logging.INFO if member.rank == 0 else logging.DEBUG
            _log.log(level, "worker %d was admitted by %s: %s", worker.rank, worker.admitted_by, worker)

    def wire_name(self, name: str, ranks: tuple[int, ...]) -> str:
        """A group's name on the wire. torch gives a name again after its group was destroyed, perhaps not yet everywhere."""
        self._names[name, ranks] += 1
        count = self._names[name, ranks]
        return name if count == 1 else f"{name}#{count}"

    @property
    def over(self) -> bool:
        """Whether this process has no part in it: it has left, or is a fork of the one that has."""
        return self.left or in_child(self.engine.keys.alive)

    def hold(self) -> None:
        """A group was made that keeps this session alive."""
        self._held += 1

    def let_go(self) -> bool:
        """It was destroyed; whether it was the last one."""
        self._held -= 1
        return self._held == 0

    def leave(self, finish: bool = False, seconds: float | None = None) -> None:
        """Say goodbye. Also called at exit, for scripts that do not destroy their process group.

        `finish`: first the collectives that are under way, as others may wait for them. Not at exit: that may be the way
        out of an exception, of which those who wait are to hear at once. What was reported as sent still leaves then, if
        nothing is under way; for all of this a leaver has so many `seconds`, by default those of the engine's farewell.
        """
        if not self.over:
            self.left = True
            atexit.unregister(self.leave)
            if self._age_limit is not None:
                self._age_limit.cancel()
            self.loop.leave(self.engine.drain_timeout if seconds is None else seconds, finish)
            if self._metrics is not None:
                self._metrics.close()

    def _limit_age(self, member: Membership) -> Alarm | None:
        """Who was verified long ago may have lost what it was verified by. So the policy may say how long a verification lasts.

        Every worker keeps the time by its own clock, which goes on while the machine is suspended; the first one to reach it
        ends the session for all.
        """
        if member.max_session_age is None:
            return None
        age = member.max_session_age
        return Alarm("ringfence age", member.verified_at + age, lambda: self._expire(age))

    def _expire(self, age: int) -> None:
        text = (
            f"this session has reached {age} s, the policy's max_session_age: all workers must be verified again. "
            "Destroy the process group and initialise it anew, with a higher RINGFENCE_GENERATION"
        )
        with contextlib.suppress(ProtocolError):  # this worker is leaving already
            self.loop.abort(AbortedError(text))


class _Start:
    """What a session holds before its loop does: neither a forked child nor the error of a failed start keeps a key."""

    def __init__(self) -> None:
        self.settings: Settings | None = None
        self.listener: socket.socket | None = None
        self.member: Membership | None = None
        self.network: TcpNetwork | None = None
        self.engine: Engine | None = None
        register_fork_cleanup(self)

    def fail(self, error: BaseException) -> None:
        """Tell the neighbours, close everything, and clear the frames that the error keeps: the next attempt reads anew."""
        if self.member is not None:
            self.member.give_up(str(error) or type(error).__name__)
        self.forget()
        found: BaseException | None = error
        while found is not None:
            traceback.clear_frames(found.__traceback__)
            found = found.__cause__ or found.__context__

    def forget(self) -> None:
        if self.settings is not None:
            self.settings.forget()
        if self.member is not None:
            self.member.forget()
        if self.engine is not None:
            self.engine.forget()
        for each in (self.listener, self.network):
            if each is not None:
                each.close()


def _how_admitted(member: Membership) -> str:
    """For people: by which groups rank 0 agreed on keys, and how many workers were admitted by which proof."""
    if member.world_size == 1:
        return "no other worker, so no proof"
    counts = Counter(admitted.how for admitted in member.roster.admitted)
    if len(counts) == 1:
        return f"{member.key_agreement}, admitted by {next(iter(counts))}"
    each = ", ".join(f"{count} by {how}" for how, count in sorted(counts.items()))
    return f"{member.key_agreement}, admitted {each}"


def _warn_of_a_run_without_a_name(run_id: str, hosts: set[str]) -> None:
    """Runs of one size with one secret and one name are one to admission, so a store that lies could mix their workers."""
    if run_id == Settings.run_id and len(hosts) > 1:
        _log.warning(
            "this run has no name of its own (its id is %r): whoever runs the rendezvous store could splice it with another "
            "such run of the same secret or policy. Set RINGFENCE_RUN_ID, or torchrun's --rdzv-id, to a name for each run.",
            run_id,
        )


def _raise_limit_of_files() -> None:
    """Every link is a descriptor, and a worker may have several to each other one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # a sandbox may forbid it; then the limit is what it was
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _host_of(store: Any) -> str | None:
    """Where a TCPStore is, under the prefixes that torch puts before it; None for a store that is on no machine."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "host", None)


def _warn_of_loopback(settings: Settings, world_size: int) -> None:
    """A machine's own name is often the loopback in its /etc/hosts: then its workers tell the others an address of no use."""
    here = os.environ.get("LOCAL_WORLD_SIZE", "")
    if settings.advertise or not here.isdecimal() or int(here) >= world_size:
        return
    if ipaddress.ip_address(settings.host).is_loopback:
        _log.warning(
            "this worker listens on %s, which no other machine reaches, and torchrun started %s of %d workers here. If the "
            "others are on other machines, set RINGFENCE_INTERFACE, or a MASTER_ADDR that is no loopback here",
            settings.host,
            here,
            world_size,
        )
