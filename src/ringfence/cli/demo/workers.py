"""Start the demo's two workers as processes, have them all-reduce, and read their answers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from ringfence import own_process
from ringfence.errors import RingfenceError

SENTENCE: Final = b"These are weights that nobody but us should read. "  # what the tensor's bytes spell
ANSWER_SECONDS: Final = 240.0  # a busy machine may take long to import torch
LEAVING_SECONDS: Final = 5.0


class DemoError(RingfenceError):
    """The demo could not run, so it proves nothing either way."""


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C and SIGTERM: a worker that was started and is not yet in the list would be left behind."""
    came: list[int] = []
    handlers = {
        number: signal.signal(number, lambda number, frame: came.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for each in came:
        signal.raise_signal(each)


class Workers:
    """Two workers with one backend; `environments` holds what each is to find in its environment."""

    def __init__(self, backend: str, folder: Path, environments: Sequence[Mapping[str, str]]) -> None:
        store = folder / f"{backend}.store"
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed in __exit__, as the workers write to it)
        self._workers: list[tuple[subprocess.Popen[bytes], socket.socket]] = []
        try:
            for rank, extra in enumerate(environments):
                with uninterrupted():
                    self._workers.append(self._start(backend, rank, store, extra))
        except BaseException:
            self._end(at_once=True)
            raise

    def _start(
        self, backend: str, rank: int, store: Path, extra: Mapping[str, str]
    ) -> tuple[subprocess.Popen[bytes], socket.socket]:
        from ringfence.config.settings import inherited  # late, so that `doctor` starts where cryptography is missing

        ours, theirs = socket.socketpair()
        ours.settimeout(ANSWER_SECONDS)
        command = own_process.command("ringfence.cli.demo.worker", backend, str(rank), str(store))
        with theirs:
            process = subprocess.Popen(  # noqa: S603 (our own interpreter and module)
                [*command, str(theirs.fileno())],
                env={**inherited(os.environ), "OMP_NUM_THREADS": "1", **extra},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
            )
        return process, ours

    def add_up(self) -> list[dict[str, str]]:
        """Have both add up once; what each answers, worker 0 first."""
        for _, channel in self._workers:
            with contextlib.suppress(OSError):  # it is gone: reading its answer says so
                channel.sendall(b"add up\n")
        return [self._answer(rank, channel) for rank, (_, channel) in enumerate(self._workers)]

    def _answer(self, rank: int, channel: socket.socket) -> dict[str, str]:
        line = b""
        try:
            while not line.endswith(b"\n"):
                byte = channel.recv(1)
                if not byte:
                    raise ConnectionResetError
                line += byte
        except TimeoutError:
            raise DemoError(f"worker {rank} of the demo did not answer within {ANSWER_SECONDS:.0f} s") from None
        except ConnectionResetError:
            raise DemoError(f"worker {rank} of the demo ended early: {self._last_words(rank)}") from None
        answer: dict[str, str] = json.loads(line)
        return answer

    def _last_words(self, rank: int) -> str:
        """The last line that the workers wrote, once this one has had the time to write it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._workers[rank][0].wait(LEAVING_SECONDS)
        self._log.seek(0)
        return next((line for line in reversed(self._log.read().splitlines()) if line.strip()), "no output")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(at_once=kind is not None)  # after an error, or Ctrl-C, nobody asks how they leave

    def _end(self, *, at_once: bool) -> None:
        for process, channel in self._workers:
            channel.close()  # a worker whose parent hangs up leaves its group and ends
            if at_once:
                process.kill()
        for process, _ in self._workers:
            try:
                process.wait(LEAVING_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._log.close()
