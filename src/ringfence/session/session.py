"""A worker's session from admission to its end, shared by the process groups whose workers are its members."""

from __future__ import annotations

import atexit
import contextlib
import ipaddress
import logging
import os
import socket
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ringfence import keys
from ringfence.admission.renewal import Renewals
from ringfence.admission.roster import Worker
from ringfence.collectives import Thresholds
from ringfence.config.cores import default_channels, usable_cores
from ringfence.config.interfaces import speed_of
from ringfence.config.settings import Settings
from ringfence.dataplane import info, native
from ringfence.errors import AbortedError, ConfigurationError, ProtocolError
from ringfence.log import LOGGER as _log
from ringfence.log import announce
from ringfence.runtime import staging_times
from ringfence.runtime.channels import ChannelEngine
from ringfence.runtime.engine import Engine
from ringfence.runtime.events import Platform
from ringfence.runtime.link_keys import LinkKeys
from ringfence.runtime.progress import ProgressLoop
from ringfence.session import metrics, recording
from ringfence.session.fresh_credentials import FreshCredentials
from ringfence.session.join import Membership, join, listen
from ringfence.session.members import Members
from ringfence.session.proof_thread import ProofThread
from ringfence.session.rendezvous_warning import warn_of_open_rendezvous
from ringfence.transport.alarm import Alarm
from ringfence.transport.fork import canary, in_child, register_fork_cleanup
from ringfence.transport.tcp import TcpNetwork, raise_limit_of_files


class Session:
    """The engine of one session and the progress loop that drives it.

    Subclasses in the lab replace `engine_type` and `keys_type` for measurements.
    """

    engine_type: type[Engine] = Engine
    keys_type: type[LinkKeys] = LinkKeys
    table: Thresholds = Thresholds()  # proposed by rank 0; all workers use the one in the roster

    def __init__(self, store: Any, rank: int, world_size: int, timeout: float, members: Members | None = None) -> None:
        """Join, and start the progress loop. `members`: who forms the session, if it is not the whole run."""
        self.left = False
        self.members = members
        self._held = 0
        self._channels: list[ProgressLoop] = []  # above channel 0
        self._age_limit: Alarm | None = None
        self._proofs: ProofThread | None = None  # if the policy has workers verified again
        self._metrics: metrics.MetricsFile | None = None
        self.recorder: recording.Recorder | None = None
        self._names: Counter[tuple[str, tuple[int, ...]]] = Counter()
        start = _Start()
        try:
            start.settings = settings = Settings.from_environment(os.environ, _host_of(store))
            run_id, label = settings.run_id, str(rank)
            if members is not None:
                start.settings = settings = replace(settings, run_id=members.run_name(run_id))
                label = members.file_label(rank, run_id)
            warn_of_open_rendezvous()
            raise_limit_of_files()
            _warn_of_loopback(settings, world_size)
            metrics_path = metrics.path_of(settings, label)
            start.recorder = recorder = recording.recorder_for(settings)
            start.listener = listener = listen(settings)
            address = settings.link_address(listener.getsockname()[:2])
            limit = min(timeout, settings.join_timeout)
            start.member = member = join(
                store,
                rank,
                world_size,
                settings,
                address,
                limit,
                _proposed(self.table, settings, world_size).to_bytes(),
                record_key=None if recorder is None else recorder.public_key,
            )
            _check_channels(Thresholds.from_bytes(member.table), settings)
            self.generation = settings.generation
            self._begin(start, member, listener, settings)
            if recorder is not None and member.record is not None:
                recorder.begin(store, member.record, self.engine, self.loop.abort)
                self.recorder = recorder
        except BaseException as error:
            start.fail(error)
            raise
        settings.forget()
        atexit.register(self.leave)
        if metrics_path is not None:
            self._metrics = metrics.MetricsFile(metrics_path, settings.run_id, self.engine, self.workers)
        if settings.stage_times:
            native.stages(True)
            staging_times.start()
        self._announce(settings, member)
        if member.rank == 0:
            _warn_of_default_run_id(run_id, {entry.host for entry in member.roster.entries})

    def _begin(self, start: _Start, member: Membership, listener: socket.socket, settings: Settings) -> None:
        """Create the engine and its progress loop from the result of the join."""
        outage = settings.outage
        start.network = self.network = TcpNetwork(
            listener, [(entry.host, entry.port) for entry in member.roster.entries], outage, member.local
        )
        start.engine = self.engine = self.engine_type(
            rank=member.rank,
            world_size=member.world_size,
            keys=self.keys_type(
                session_key=member.session_key,
                private_key=member.link_private_key,
                public_keys=[entry.public_key for entry in member.roster.entries],
                alive=canary(),
                covers=member.terms.forwarded != keys.FORWARDED[0],
            ),
            network=self.network,
            table=Thresholds.from_bytes(member.table),
            edges=member.edges,
            peer_verifier=member.peer_verifier,
            platform=Platform(outage=outage),
        )
        self.workers = member.roster.workers
        self.terms = member.terms
        self.engine.requests.worker_names = [self._name_of(worker) for worker in self.workers]
        if self.members is not None:
            self.engine.note = f" (workers are numbered within the group of {self.members})"
        self._start_channels(member, outage)
        if member.terms.verify_every is not None and member.world_size > 1:
            self._proofs = ProofThread(
                Renewals(member.roster, member.rank),
                member.terms.verify_every,
                FreshCredentials(os.environ, settings.run_id, member.policy_digest),
                self.engine,
            )
        try:
            self.loop = ProgressLoop(self.engine, self.network, member.edges)
        except BaseException:
            self._end_channels()
            raise
        try:
            self._age_limit = self._limit_age(member)
            if self._proofs is not None:
                self._proofs.start()
        except BaseException:
            self.leave(seconds=0.0)  # the progress loop owns the connections and closes them
            raise

    def _start_channels(self, member: Membership, outage: float) -> None:
        """Start the threads of further channels, which have nothing to do until a group uses them."""
        alone = member.world_size == 1 or len(self.network.machines) == 1  # no group is spread over machines
        count = 1 if alone else self.engine.table.channels
        addresses = [(entry.host, entry.port) for entry in member.roster.entries]
        networks = [TcpNetwork(None, addresses, outage) for _ in range(1, count)]
        engines = [ChannelEngine(self.engine, channel, network) for channel, network in enumerate(networks, 1)]
        self.engine.open_channels(engines)
        if engines:
            native.release_gil()
        try:
            for engine, network in zip(engines, networks, strict=True):
                self._channels.append(ProgressLoop(engine, network, ()))
        except BaseException:
            self._end_channels()
            raise

    def _end_channels(self) -> None:
        while self._channels:
            self._channels.pop().leave(0.0)

    def _name_of(self, worker: Worker) -> str:
        return str(worker) if self.members is None else f"rank {self.members.ranks[worker.rank]}, {worker}"

    def _announce(self, settings: Settings, member: Membership) -> None:
        """Print the summary of the session on rank 0, and log the roster."""
        size = member.world_size
        if member.rank == 0:
            who = "" if self.members is None else f" ({self.members})"
            slow = "" if native.COMPILED else f"\nthe data plane is not the compiled one: {info.SLOWER}"
            announce(
                f"{size} worker{'s' if size > 1 else ''}{who}, run {settings.run_id}, generation "
                f"{settings.generation}, session {member.roster.digest[:4].hex()}, {keys.SUITE_NAMES[member.suite]}, "
                f"{_how_admitted(member)}{_where_sealed(member)}{slow}"
            )
        # In full: an attacker that gives two workers different rosters can make a few digits of their digests agree.
        _log.info("worker %d of %d holds the roster %s", member.rank, size, member.roster.digest.hex())
        for worker in self.workers:  # at INFO only on rank 0: all workers would log the same
            level = logging.INFO if member.rank == 0 else logging.DEBUG
            _log.log(level, "worker %d was admitted by %s: %s", worker.rank, worker.admitted_by, worker)

    def ranks_of(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return the ranks in this session of workers that are given by their ranks in the default group."""
        if self.members is None:
            return tuple(ranks)
        places = {rank: place for place, rank in enumerate(self.members.ranks)}
        return tuple(places[rank] for rank in ranks)

    def default_ranks(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return the ranks in the default group of workers that are given by their ranks in this session."""
        return tuple(ranks if self.members is None else (self.members.ranks[rank] for rank in ranks))

    def wire_name(self, name: str, ranks: tuple[int, ...]) -> str:
        """Return the name of a group on the wire.

        torch reuses the name of a destroyed group, which other workers may not have destroyed yet, so a number is added.
        """
        self._names[name, ranks] += 1
        count = self._names[name, ranks]
        return name if count == 1 else f"{name}#{count}"

    @property
    def over(self) -> bool:
        """Whether this process has left the session, or is a forked child."""
        return self.left or in_child(self.engine.keys.alive)

    def hold(self) -> None:
        """Count a process group that keeps this session alive."""
        self._held += 1

    def let_go(self) -> bool:
        """Count its destruction; return whether it was the last one."""
        self._held -= 1
        return self._held == 0

    def leave(self, finish: bool = False, seconds: float | None = None) -> None:
        """Leave the run and close all connections. Also called at exit, if the script did not destroy its process group.

        With `finish`, collectives in progress are completed first, because other workers may wait for them. At exit they
        are not: an exception may be the reason, and waiting workers should learn of it at once. Data that was reported as
        sent is still sent if nothing is in progress. All of this takes at most `seconds`, by default the engine's drain
        timeout.
        """
        if not self.over:
            self.left = True
            atexit.unregister(self.leave)
            if self._age_limit is not None:
                self._age_limit.cancel()
            if self._proofs is not None:
                self._proofs.close()
            try:
                self.loop.leave(self.engine.drain_timeout if seconds is None else seconds, finish)
            finally:
                self._end_channels()
            if self.recorder is not None:
                self.recorder.close()
            if self._metrics is not None:
                self._metrics.close()

    def _limit_age(self, member: Membership) -> Alarm | None:
        """Start the timer of the policy's `max_session_age`, if set: a verification may not be valid for ever.

        Each worker measures by its own clock, which advances while the machine is suspended. The first to reach the limit
        aborts the session for all.
        """
        age = member.terms.max_session_age
        if age is None:
            return None
        return Alarm("ringfence age", member.verified_at + age, lambda: self._expire(age))

    def _expire(self, age: int) -> None:
        text = (
            f"this session has reached {age} s, the policy's max_session_age: all workers must be verified again. "
            "Destroy the process group and initialise it anew, with a higher RINGFENCE_GENERATION"
        )
        with contextlib.suppress(ProtocolError):  # this worker is leaving
            self.loop.abort(AbortedError(text))


class _Start:
    """What a session holds until its progress loop owns it, so that neither a forked child nor a failed start keeps a key."""

    def __init__(self) -> None:
        self.settings: Settings | None = None
        self.listener: socket.socket | None = None
        self.member: Membership | None = None
        self.network: TcpNetwork | None = None
        self.engine: Engine | None = None
        self.recorder: recording.Recorder | None = None
        register_fork_cleanup(self)

    def fail(self, error: BaseException) -> None:
        """Report the error to the neighbours, close everything, and clear the frames that the traceback refers to."""
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
        if self.recorder is not None:
            self.recorder.forget()
        for each in (self.listener, self.network):
            if each is not None:
                each.close()


def _proposed(table: Thresholds, settings: Settings, world_size: int) -> Thresholds:
    """Return the thresholds that rank 0 gives the run. A launcher says how many workers share this machine."""
    workers = _workers_here() or world_size
    found = settings.channels or default_channels(usable_cores(), workers, speed_of(settings.host))
    return replace(table, channels=found)


def _workers_here() -> int | None:
    """Return how many workers the launcher started on this machine, if it says so."""
    here = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(here) if here.isdecimal() else None


def _check_channels(table: Thresholds, settings: Settings) -> None:
    """Raise ConfigurationError if this worker is to have another number of channels than the run."""
    if settings.channels not in (None, table.channels):
        raise ConfigurationError(
            f"RINGFENCE_CHANNELS is {settings.channels} here, and rank 0 gave the run {table.channels}: set it to the same "
            "number on every worker, or on rank 0 only"
        )


def _how_admitted(member: Membership) -> str:
    """Return the key agreement of rank 0, and how many workers were admitted by which proof."""
    if member.world_size == 1:
        return "no other worker, so no proof"
    counts = Counter(admitted.proof_name for admitted in member.roster.admitted)
    if len(counts) == 1:
        return f"{member.key_agreement}, admitted by {next(iter(counts))}"
    each = ", ".join(f"{count} by {how}" for how, count in sorted(counts.items()))
    return f"{member.key_agreement}, admitted {each}"


def _where_sealed(member: Membership) -> str:
    """Return what is sealed, and what workers of one machine exchange without sealing."""
    if member.world_size == 1:
        return ""
    shares = member.local is not None and any(len(workers) > 1 for workers in member.local.machines)
    inside = [*(["shared memory"] if shares else []), *member.terms.inside_machine]
    return f"; sealed between machines, {' or '.join(inside)} inside one" if inside else "; all traffic is sealed"


def _warn_of_default_run_id(run_id: str, hosts: set[str]) -> None:
    """Warn if the run has no id of its own: a malicious store could mix the workers of two such runs."""
    if run_id == Settings.run_id and len(hosts) > 1:
        _log.warning(
            "this run has no id of its own (it is %r): a malicious rendezvous store could mix its workers with those of "
            "another run that has the same secret or policy. Set RINGFENCE_RUN_ID, or torchrun's --rdzv-id, to a different "
            "id for each run.",
            run_id,
        )


def _host_of(store: Any) -> str | None:
    """Return the host of a TCPStore, under the prefix stores that torch adds; None for other stores."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "host", None)


def _warn_of_loopback(settings: Settings, world_size: int) -> None:
    """Warn of a loopback address in a run over several machines: /etc/hosts often maps the host name to it."""
    here = _workers_here()
    if settings.advertise or here is None or here >= world_size:
        return
    if ipaddress.ip_address(settings.host).is_loopback:
        _log.warning(
            "this worker listens on %s, which other machines cannot reach, and torchrun started %d of %d workers here. If the "
            "others are on other machines, set RINGFENCE_INTERFACE, or a MASTER_ADDR that is not a loopback address",
            settings.host,
            here,
            world_size,
        )
