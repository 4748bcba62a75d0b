"""The record of one session: a thread that writes what other threads hand it, so that no collective waits for a disk.

Entries wait in a queue of bounded length. A record with a gap would be worse than none, so whatever cannot be written ends the
record, with a warning; and the session, if the policy requires a record (spec/record.md).
"""

from __future__ import annotations

import contextlib
import platform
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ringfence import keys
from ringfence.admission.encoding import escape
from ringfence.config.settings import Settings
from ringfence.errors import AbortedError, ConfigurationError, ProtocolError, RecordError, RingfenceError
from ringfence.log import LOGGER as _log
from ringfence.record import begin, code, folder, heads, log
from ringfence.record.begin import JoinRecord
from ringfence.record.json_object import Json
from ringfence.record.log_file import Blobs, LogFile, log_name, open_folder
from ringfence.release import RELEASE
from ringfence.runtime.counters import PeerCounters
from ringfence.runtime.engine import Engine
from ringfence.session.head_exchange import HeadExchange
from ringfence.session.join import Store
from ringfence.session.join.background import Background
from ringfence.transport.fork import register_fork_cleanup

_TEXT: Final = 4096  # characters of an error that are recorded
_LISTED: Final = 256  # peers or points in one entry
_BATCH_SECONDS: Final = keys.RECORD_SIGN_SECONDS / 2  # between two signatures
_COLLECT_SECONDS: Final = 2.0  # that the end of a session waits for what is collected at its begin
_CLOSE_SECONDS: Final = 10.0  # that the end of a session may take on a slow disk


@dataclass(frozen=True)
class _Previous:
    """The last session of this process that was recorded."""

    run_id: str
    generation: str
    rank: int
    head: str


_previous: _Previous | None = None


def recorder_for(settings: Settings) -> Recorder | None:
    """Return what will record a session, or None if it is not to be recorded. Raises ConfigurationError."""
    if settings.record is not None:
        return Recorder(settings)
    if settings.record_required:
        raise ConfigurationError(
            "the policy requires a record of the run (record): set RINGFENCE_RECORD to a folder that only you can open, or "
            "start the run with `ringfence run --record FOLDER`"
        )
    return None


class Recorder:
    """The record of one session. Any thread may call its methods; in a forked child they do nothing."""

    def __init__(self, settings: Settings) -> None:
        """Make the folder and the key. Raises ConfigurationError if the folder cannot be used."""
        assert settings.record is not None
        self._folder, self._required = settings.record, settings.record_required
        self._policy = settings.policy  # with its files as they are used at this join
        open_folder(self._folder)
        self._key: Ed25519PrivateKey | None = Ed25519PrivateKey.generate()
        self.public_key = self._key.public_key().public_bytes_raw()
        self.head = ""  # the digest of the last signature in the log, in hexadecimal form
        self._file: LogFile | None = None
        self._entries: deque[tuple[str, Json]] = deque()
        self._changed = threading.Condition()  # reentrant: a signal handler may add an entry
        self._open = True
        self._closing, self._collected = threading.Event(), threading.Event()
        self._background: Background[None] = Background()
        self._thread: threading.Thread | None = None
        register_fork_cleanup(self)

    def begin(self, store: Store, join: JoinRecord, engine: Engine, abort: Callable[[AbortedError], None]) -> None:
        """Start writing, in another thread. `abort` ends the session if the policy requires what cannot be written."""
        self._store, self._join, self._engine, self._abort = store, join, engine, abort
        self._chains = engine.keys.record_tags()
        self._thread = threading.Thread(target=self._run, name="ringfence record", daemon=True)
        self._thread.start()

    def add(self, kind: str, fields: Json) -> None:
        """Record an entry soon. Never blocks."""
        if not self._open:
            return
        with self._changed:
            if len(self._entries) < keys.RECORD_QUEUE:
                self._entries.append((kind, fields))
                self._changed.notify()
                return
        self._give_up(RecordError(f"{keys.RECORD_QUEUE:,} entries wait for the disk"))

    def close(self) -> None:
        """Record the end of the session, and wait for the disk, but not for long."""
        if not self._open or self._thread is None:
            return
        with self._changed:
            self._closing.set()
            self._changed.notify()
        self._thread.join(_CLOSE_SECONDS)
        if self._thread.is_alive():
            _log.warning("the end of this session is not in its record: %s does not answer", self._folder)

    def forget(self) -> None:
        """Drop the key and the file, without a lock: a forked child must not write."""
        self._open = False
        self._key = None
        self._background.forget()
        file, self._file = self._file, None
        if file is not None:
            file.close()

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            file, own_head = self._begin()
            self._background.start("ringfence record of heads", lambda: self._collect(own_head))
            self._write_until_closed(file)
            self._remember()
        except (OSError, RingfenceError) as error:
            self._give_up(error)
        finally:
            self._background.close()
            self.forget()

    def _begin(self) -> tuple[LogFile, bytes]:
        """Write the first line, and sign it. Return the log, and what the other workers are told of the one before."""
        join, rank, blobs = self._join, self._engine.rank, Blobs(self._folder)
        own = join.listings[rank].entry
        versions = {"ringfence": RELEASE, "torch": str(torch.__version__), "python": platform.python_version()}
        assert self._key is not None
        before = folder.previous_head(self._folder, own.run_id, rank)
        fields = begin.fields_of(
            join, rank, self.public_key, blobs, policy=self._policy, versions=versions, before=before
        )
        self._policy = None
        self._file = file = LogFile(self._folder, log_name(join.roster_digest, rank), self._key)
        file.append(log.BEGIN, fields)
        if _previous is not None and _previous.run_id == own.run_id:
            said = {"generation": _previous.generation, "rank": _previous.rank, "before": _previous.head}
            file.append("rejoined", said)
        self._sign(file)
        return file, heads.state(join, rank, before, self._key)

    def _collect(self, own_head: bytes) -> None:
        """Record what may take long: the code, and the heads of other workers' previous logs.

        In a thread of its own, because a store that does not answer blocks its caller for ever.
        """
        blobs = Blobs(self._folder)
        try:
            self.add("code", code.fields_of_run(blobs))
            found = HeadExchange(self._store, self._join, self._engine.rank, self._closing).run(own_head)
            missing = len(self._join.listings) - len(found)
            self.add("heads", {"list": blobs.put(heads.encode(found)) if found else "", "missing": missing})
        except (OSError, RingfenceError) as error:
            self._give_up(error)
        finally:
            self._collected.set()

    def _write_until_closed(self, file: LogFile) -> None:
        peers_due, peers, lost = time.monotonic() + keys.RECORD_PEERS_SECONDS, _peers(self._engine), False
        while not self._closing.is_set():
            with self._changed:
                self._changed.wait_for(lambda: self._entries or self._closing.is_set(), keys.RECORD_SIGN_SECONDS)
            if not lost and (said := self._failure()) is not None:
                lost = True
                file.append("lost", said)
            if time.monotonic() >= peers_due:
                peers_due += keys.RECORD_PEERS_SECONDS
                peers = self._append_traffic(file, peers)
            self._append_entries(file)
            self._sign(file)
            self._closing.wait(_BATCH_SECONDS)  # so that a signature covers many entries
        self._collected.wait(_COLLECT_SECONDS)
        if not self._open:  # something could not be written
            return
        self._append_entries(file)
        failure = self._failure()
        if failure is not None and not lost:
            file.append("lost", failure)
        self._append_traffic(file)
        how = "left" if failure is None else "failed"
        file.append(log.END, {"how": how, "text": "" if failure is None else failure["text"]})
        self._sign(file)

    def _append_entries(self, file: LogFile) -> None:
        while self._entries:
            file.append(*self._entries.popleft())

    def _sign(self, file: LogFile) -> None:
        file.sign()
        self.head = file.head.hex()

    def _failure(self) -> Json | None:
        """Return what is recorded of the session's failure, if it has failed."""
        blamed, error = self._engine.blamed, self._engine.failure
        return None if blamed is None else {"worker": blamed, "text": escape(str(error), _TEXT)}

    def _append_traffic(self, file: LogFile, before: list[list[int]] | None = None) -> list[list[int]]:
        """Record the counters, if they have changed or this is the end, and what passed; return the counters."""
        found = _peers(self._engine)
        for at in range(0, max(1, len(found)) if found != before else 0, _LISTED):
            file.append("peers", {"peers": found[at : at + _LISTED]})
        passed = self._chains.take()
        for at in range(0, len(passed), _LISTED):
            file.append("passed", {"points": passed[at : at + _LISTED]})
        return found

    def _remember(self) -> None:
        global _previous
        own = self._join.listings[self._engine.rank].entry
        _previous = _Previous(own.run_id, own.generation, own.rank, self.head)

    def _give_up(self, error: Exception) -> None:
        """Stop recording: what follows would have a gap."""
        if not self._open:
            return
        self._open = False
        self._engine.keys.chains = None
        self._closing.set()
        reason = getattr(error, "strerror", None) or error
        text = f"worker {self._engine.rank} no longer writes a record of this session to {self._folder}: {reason}"
        _log.warning("%s", text)
        if self._required:
            with contextlib.suppress(ProtocolError):  # this worker is leaving
                self._abort(AbortedError(f"{text}. The policy requires a record (record)"))


def _peers(engine: Engine) -> list[list[int]]:
    return [_peer(each) for each in engine.counters().peers]


def _peer(found: PeerCounters) -> list[int]:
    sealed, shared = (found.sealed_sent, found.sealed_received), (found.local_sent, found.local_received)
    return [found.worker, *sealed, *shared, found.wire_sent, found.wire_received]
