"""The counters of a worker as an OpenMetrics file, for the textfile collector of Prometheus' node exporter."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from ringfence.admission.roster import Worker
from ringfence.config.settings import Settings
from ringfence.errors import ConfigurationError
from ringfence.log import LOGGER as _log
from ringfence.runtime.counters import Counters
from ringfence.runtime.engine import Engine

EVERY_SECONDS: Final = 15.0  # Prometheus' default scrape interval


_PER_WORKER: Final = (
    ("payload_sent_bytes", "payload_sent", "Bytes of tensors sent to a worker."),
    ("payload_received_bytes", "payload_received", "Bytes of tensors received from a worker."),
    ("local_sent_bytes", "local_sent", "Bytes of tensors sent to a worker inside this machine, not sealed."),
    (
        "local_received_bytes",
        "local_received",
        "Bytes of tensors received from a worker inside this machine, not sealed.",
    ),
    (
        "wire_sent_bytes",
        "wire_sent",
        "Bytes of sealed frames sent to a worker, without the headers of TCP and IP.",
    ),
    (
        "wire_received_bytes",
        "wire_received",
        "Bytes of sealed frames received from a worker, without the headers of TCP and IP.",
    ),
    ("waits", "waits", "Number of times a collective waited for a frame of a worker."),
    ("wait_seconds", "waited_seconds", "Time that collectives waited for frames of a worker."),
)
_UNITS: Final = ("bytes", "seconds")


def openmetrics(counters: Counters, run_id: str, workers: Sequence[Worker]) -> str:
    """Format counters as OpenMetrics. Prometheus' older format has no info metrics, so admitted workers are gauges of 1."""
    lines: list[str] = []
    mine = {"run": run_id, "rank": str(counters.rank)}
    lines += _family("operations", "counter", "Operations that succeeded.")
    lines += [_sample("operations_total", {**mine, "operation": name}, n) for name, n in counters.operations.items()]
    lines += _family("oldest_wait_seconds", "gauge", "Age of the oldest operation in progress.")
    lines.append(_sample("oldest_wait_seconds", mine, counters.oldest_wait_seconds))
    for name, field, text in _PER_WORKER:
        lines += _family(name, "counter", text)
        lines += [
            _sample(f"{name}_total", {**mine, "worker": str(peer.worker)}, getattr(peer, field))
            for peer in counters.peers
        ]
    lines += _family("stage_seconds", "counter", "Time in a stage of the data plane, if RINGFENCE_STAGE_TIMES is set.")
    lines += [
        _sample("stage_seconds_total", {**mine, "worker": str(peer.worker), "stage": stage}, seconds)
        for peer in counters.peers
        for stage, seconds in peer.stage_seconds.items()
    ]
    lines += _family("staging_seconds", "counter", "Time of calls on device tensors, if RINGFENCE_STAGE_TIMES is set.")
    lines += [
        _sample("staging_seconds_total", {**mine, "stage": stage}, seconds)
        for stage, seconds in counters.staging_seconds.items()
    ]
    lines += _family("admitted", "gauge", "The workers of this run and what admitted them.")
    for worker in workers:
        about = {"address": worker.address, "admitted_by": worker.admitted_by, "identity": worker.identity}
        lines.append(_sample("admitted", {**mine, "worker": str(worker.rank), **about}, 1))
    return "\n".join([*lines, "# EOF\n"])


def _family(name: str, kind: str, text: str) -> Iterator[str]:
    yield f"# TYPE ringfence_{name} {kind}"
    unit = name.rpartition("_")[2]
    if unit in _UNITS:
        yield f"# UNIT ringfence_{name} {unit}"
    yield f"# HELP ringfence_{name} {text}"


def _sample(name: str, labels: Mapping[str, str], value: float) -> str:
    each = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
    return f"ringfence_{name}{{{each}}} {value}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def path_of(settings: Settings, label: str) -> Path | None:
    """The file for this worker's counters, or None; `label` replaces {rank}.

    Raises ConfigurationError if its directory is not writable.
    """
    if not settings.metrics_file:
        return None
    path = Path(settings.metrics_file.replace("{rank}", label))
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
        raise ConfigurationError(
            f"worker {label} cannot write RINGFENCE_METRICS_FILE: {path.parent} is not a writable directory"
        )
    return path


class MetricsFile(threading.Thread):
    """Writes the file at the start, at intervals and at the end, in its own thread: a slow disk must not delay a collective."""

    def __init__(self, path: Path, run_id: str, engine: Engine, workers: Sequence[Worker]) -> None:
        super().__init__(name="ringfence-metrics", daemon=True)
        self._path = path
        self._run_id = run_id
        self._engine = engine
        self._workers = workers
        self._ended = threading.Event()
        self.start()

    def run(self) -> None:
        warned = False
        while True:
            try:
                self._write()
            except OSError as error:
                if not warned:
                    _log.warning("cannot write counters to %s: %s", self._path, error.strerror or error)
                warned = True
            if self._ended.wait(EVERY_SECONDS):
                return

    def close(self) -> None:
        """Write the file a last time and stop."""
        self._ended.set()
        self.join(timeout=5)
        with contextlib.suppress(OSError):
            self._write()

    def _write(self) -> None:
        """Replace the file atomically."""
        temporary = self._path.with_name(f".{self._path.name}.{secrets.token_hex(8)}")
        try:
            with temporary.open("x") as file:  # "x": does not follow a link that exists
                file.write(openmetrics(self._engine.counters(), self._run_id, self._workers))
            temporary.replace(self._path)
        finally:
            temporary.unlink(missing_ok=True)
