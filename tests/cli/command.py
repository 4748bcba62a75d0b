"""Run the `ringfence` command as a user does: a process of its own, an environment that holds nothing of ours."""

from __future__ import annotations

import contextlib
import io
import os
import resource
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from ringfence.cli import main
from tests.limits import HANG


def ringfence(
    *arguments: str,
    folder: Path | None = None,
    timeout: float = HANG,
    python: str = sys.executable,
    room: int | None = None,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """The finished command, with its output as text.

    `python`: the interpreter of another installation. `room`: how many bytes any file takes, as if the disk were full.
    """

    def limit() -> None:
        if room is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))

    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RINGFENCE_")}
    return subprocess.run(
        [python, "-m", "ringfence.cli", *arguments],
        cwd=folder,
        env={**inherited, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        preexec_fn=None if room is None else limit,  # with one, the interpreter cannot be forked
    )


def ringfence_here(*arguments: str, folder: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """The same command in this process, for tests of what it prints: it starts no interpreter.

    The command must not change signals, limits or modules. Every command also has a test that starts it as a user does.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RINGFENCE_")}
    output, errors = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    with (
        mock.patch.dict(os.environ, {**kept, **environment}, clear=True),
        contextlib.chdir(folder or Path.cwd()),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
    ):
        try:
            code = main(arguments)
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 0
    said, complained = (stream.buffer.getvalue().decode() for stream in (output, errors))  # type: ignore[attr-defined]
    return subprocess.CompletedProcess(arguments, code, said, complained)


def installation_without(folder: Path, *packages: str) -> str:
    """The interpreter of a new environment that has all that this one has, but for these packages."""
    venv.create(folder, symlinks=True)
    theirs = next(folder.glob("lib/python*/site-packages"))
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if entry.name.removeprefix("__editable__.").partition("-")[0].partition(".")[0].lower() not in packages:
            (theirs / entry.name).symlink_to(entry)
    return str(folder / "bin" / "python")


def installation_with_changed_torch(folder: Path, added: str) -> str:
    """The interpreter of a new environment that has all that this one has, with lines added to torch's distributed_c10d."""
    python = installation_without(folder, "torch")
    ours, theirs = Path(sysconfig.get_path("purelib")), next(folder.glob("lib/python*/site-packages"))
    for description in ours.glob("torch-*.dist-info"):
        (theirs / description.name).symlink_to(description)
    changed = Path("torch", "distributed", "distributed_c10d.py")
    for part in reversed(changed.parents[:-1]):  # what lies beside it is linked
        (theirs / part).mkdir()
        for entry in (ours / part).iterdir():
            if entry.name != "__pycache__" and not changed.is_relative_to(part / entry.name):
                (theirs / part / entry.name).symlink_to(entry)
        (theirs / part / "__pycache__").mkdir()
        for compiled in (ours / part / "__pycache__").glob("*.pyc"):  # which takes seconds for torch
            if not compiled.name.startswith(f"{changed.stem}."):
                (theirs / part / "__pycache__" / compiled.name).symlink_to(compiled)
    (theirs / changed).write_text((ours / changed).read_text() + added)
    return python


@contextmanager
def unprivileged(folder: Path) -> Iterator[None]:
    """As a user who is not root and can enter this folder; root may read whatever its mode is."""
    root, modes = os.geteuid() == 0, {}
    try:
        if root:
            for above in (folder, *folder.parents):
                if not (mode := above.stat().st_mode) & 0o001:
                    modes[above] = mode
                    above.chmod(mode | 0o001)
            os.seteuid(65534)
        yield
    finally:
        if root:
            os.seteuid(0)
            for above, mode in modes.items():
                above.chmod(mode)
