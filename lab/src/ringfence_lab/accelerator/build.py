"""Builds C++ of the lab, once for each user: the library of the simulated accelerator, for each torch, and programs."""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import stat
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from ringfence.errors import ConfigurationError

SOURCES: Final = Path(__file__).parent / "csrc"
LIBRARY: Final = "libringfence_sim.so"
MESSAGES: Final = "compiler.log"  # what the compiler said, beside the library
FLAGS: Final = (
    *("-std=c++20", "-O1", "-fPIC", "-shared", "-s", "-fvisibility=hidden"),
    *("-Wall", "-Wextra", "-DAT_PER_OPERATOR_HEADERS"),
)
PROGRAM_FLAGS: Final = ("-std=c++20", "-O2", "-s", "-Wall", "-Wextra")
BUILD_SECONDS: Final = 600.0  # the most that a build may take


def library(torch_folder: Path, torch_version: str, cxx11_abi: bool, sources: Path = SOURCES) -> Path:
    """Return the path of the built library; build it if there is none for these sources, this torch and this compiler.

    Several processes may call this at once: one of them builds. The compiler is $CXX, or g++. Raises ConfigurationError if
    it or torch's headers are missing, if the build fails, or if another user could change the folder of the library.
    """
    include = torch_folder / "include"
    if not (include / "ATen" / "ATen.h").exists():
        raise ConfigurationError(
            f"the simulated accelerator needs torch's C++ headers, and {include} has none: install torch from its wheel"
        )
    compiler = _compiler()
    defines = f"-D_GLIBCXX_USE_CXX11_ABI={int(cxx11_abi)}"
    digest = hashlib.sha256("\0".join([_version_of(compiler), *FLAGS, defines]).encode())
    for file in sorted(sources.glob("*.[ch]pp")):
        digest.update(f"\0{file.name}\0".encode() + file.read_bytes())
    folder = _cache_folder(f"{torch_version}-{digest.hexdigest()[:16]}")
    return _once(folder / LIBRARY, lambda target: _compile(compiler, [*FLAGS, defines], torch_folder, sources, target))


def program(source: Path) -> Path:
    """Return the path of the program that is built of one source file; build it if there is none for this source and
    this compiler. Raises ConfigurationError as `library` does.
    """
    compiler = _compiler()
    digest = hashlib.sha256("\0".join([_version_of(compiler), *PROGRAM_FLAGS]).encode() + source.read_bytes())
    folder = _cache_folder(f"{source.stem}-{digest.hexdigest()[:16]}")
    return _once(
        folder / source.stem, lambda target: _run([compiler, *PROGRAM_FLAGS, str(source), "-o", str(target)], "")
    )


def _once(built: Path, build: Callable[[Path], str]) -> Path:
    """Build a file in a folder of its own, unless it is there. `build` gets a path and returns the compiler's messages."""
    if built.exists():
        return built
    with (built.parent / "lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be building, for BUILD_SECONDS at most
        if not built.exists():
            temporary = built.parent / f".{secrets.token_hex(8)}{built.suffix}"
            try:
                messages = build(temporary)
                (built.parent / MESSAGES).write_text(messages)
                temporary.rename(built)
            finally:
                temporary.unlink(missing_ok=True)
    return built


def _compiler() -> str:
    return os.environ.get("CXX") or "g++"


def _version_of(compiler: str) -> str:
    try:
        return subprocess.run(  # noqa: S603 - the user's own compiler
            [compiler, "--version"], capture_output=True, text=True, check=True, timeout=60
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigurationError(
            f"this part of the lab needs a C++ compiler, and {compiler} does not run ({error}): "
            "install g++ (on Debian `apt-get install g++`), or name another compiler in CXX"
        ) from error


def _compile(compiler: str, flags: list[str], torch_folder: Path, sources: Path, target: Path) -> str:
    """Compile all sources as one unit, since torch's headers take most of the time; return the compiler's messages."""
    include, libraries = torch_folder / "include", torch_folder / "lib"
    unit = "".join(f'#include "{file.name}"\n' for file in sorted(sources.glob("*.cpp")))
    command = [compiler, *flags, f"-I{sources}", "-isystem", str(include)]
    command += ["-isystem", str(include / "torch" / "csrc" / "api" / "include")]
    command += ["-x", "c++", "-", "-o", str(target), f"-L{libraries}", "-lc10", "-ltorch_cpu", "-ltorch"]
    return _run(command, unit)


def _run(command: Sequence[str], unit: str) -> str:
    """Run the compiler; return its messages."""
    try:
        done = subprocess.run(  # noqa: S603 - the user's own compiler
            command, input=unit, capture_output=True, text=True, timeout=BUILD_SECONDS
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigurationError(f"C++ of the lab could not be built: {error}") from error
    if done.returncode != 0:
        raise ConfigurationError(
            f"C++ of the lab could not be built; {command[0]} says:\n{done.stderr.strip()[-4000:]}"
        )
    return done.stderr


# -- the folder of the library --------------------------------------------------------------------------------------


def _cache_folder(name: str) -> Path:
    """Return a folder that nobody else can change: a library in it is loaded into the process."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    try:
        base.mkdir(parents=True, exist_ok=True)
        folder = _own_folder(base / "ringfence", others=0o022)
        return _own_folder(_own_folder(folder / "accelerator", others=0o077) / name, others=0o077)
    except OSError as error:
        raise ConfigurationError(
            f"cannot make a folder for what is built: {error}. Set XDG_CACHE_HOME to a folder of yours"
        ) from error


def _own_folder(folder: Path, others: int) -> Path:
    """Create a folder if it is missing; raise ConfigurationError unless it is this user's and has none of these bits."""
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigurationError(f"{folder} is not a folder: remove it")
    if status.st_uid != os.geteuid():
        raise ConfigurationError(
            f"{folder} belongs to another user (uid {status.st_uid}), who could replace the library of the simulated "
            "accelerator: remove it, or set XDG_CACHE_HOME to a folder of yours"
        )
    if status.st_mode & others:
        raise ConfigurationError(
            f"others could use {folder} to replace the library of the simulated accelerator: run `chmod 700 {folder}`"
        )
    return folder
