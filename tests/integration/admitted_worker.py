"""One worker in a process of its own: joins as its environment says, says how it went, and leaves. Needs no torch.

    python -m tests.integration.admitted_worker FOLDER RANK WORLD_SIZE

The store is a folder: one file a key, put in place whole.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ringfence import keys
from ringfence.config.settings import Settings
from ringfence.errors import RingfenceError
from ringfence.runtime.control import Bye
from ringfence.session.join import Membership, join
from tests.limits import FAR, HANG

ROOT = Path(__file__).parents[2]
TIMEOUT = FAR
PATIENCE = (8.0, 45.0)  # seconds that a worker waits for one that it refuses; longer if the machine was too busy


class FolderStore:
    """The store methods that a join uses."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def set(self, key: str, value: str, /) -> None:
        new = self._file(f"{key}.{os.getpid()}")
        new.write_text(value)
        new.rename(self._file(key))

    def get(self, key: str, /) -> bytes:
        return self._file(key).read_bytes()

    def check(self, keys: list[str], /) -> bool:
        return all(self._file(key).exists() for key in keys)

    def _file(self, key: str) -> Path:
        return self._folder / key.replace("/", "_")


def run_workers(
    folder: Path, environments: Sequence[Mapping[str, str]], timeout: float = TIMEOUT
) -> list[dict[str, str]]:
    """Start a worker for each environment, and collect their results: {"by", "roster", "key"} or {"error"}."""
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("RINGFENCE_", "TORCHELASTIC"))
    }
    store = tempfile.mkdtemp(prefix="store-", dir=folder)
    workers = []
    for rank, environment in enumerate(environments):
        command: list[Any] = [
            sys.executable,
            "-m",
            "tests.integration.admitted_worker",
            store,
            str(rank),
            str(len(environments)),
            str(timeout),
        ]
        workers.append(
            subprocess.Popen(command, cwd=ROOT, env={**inherited, **environment}, stdout=subprocess.PIPE, text=True)
        )
    return [json.loads(worker.communicate(timeout=HANG)[0]) for worker in workers]


def assert_refused(
    reasons: Sequence[str],
    run: Callable[[float], Sequence[Mapping[str, str]]],
    patiences: Sequence[float] = PATIENCE,
) -> None:
    """Run workers with a patience; each has the reason of its rank in its error."""
    for patience in patiences:
        found = [each["error"] for each in run(patience)]
        if all(reason in error for reason, error in zip(reasons, found, strict=True)):
            return
    raise AssertionError(found)


def goodbye(member: Membership) -> dict[str, str]:
    """Leave the session, and return the result of an admitted worker."""
    for edge in member.edges:
        edge.send(Bye(member.rank))
        edge.close()
    key = keys.digest(b"test", member.session_key.reveal()).hex()
    own = member.roster.admitted[member.rank]
    return {"by": own.proof_name, "roster": member.roster.digest.hex(), "key": key}


def main(folder: str, rank: str, world_size: str, timeout: str) -> dict[str, str]:
    try:
        settings = Settings.from_environment(os.environ)
        store = FolderStore(Path(folder))
        member = join(store, int(rank), int(world_size), settings, ("127.0.0.1", 1), float(timeout), b"")
    except RingfenceError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return goodbye(member)


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
