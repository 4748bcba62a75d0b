"""Which command lines and environments a forked interpreter can have."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SCRIPTS = ("ringfence", "torchrun")  # of this installation
FLAGS = frozenset("BEIPSsu")
WITH_TORCH = (
    "bench",
    "demo",
    "doctor",
    "run",
    "selftest",
    "study",
)  # in workers; the others start faster than a fork ends
REAL_MODULES = (
    "pytest",
    "pip",
    "venv",
)  # they start interpreters that are not this one, or have this plugin themselves
NETWORK_NAMESPACES = "/var/run/netns"
NAMESPACE_FILES = "/etc/netns"  # `ip netns exec` mounts what is there

# What an interpreter, the C library, torch or OpenSSL reads once, when it starts.
FIXED = (
    *(
        "PYTHON",
        "TORCH_",
        "TORCHDYNAMO",
        "TORCHINDUCTOR",
        "PYTORCH",
        "OMP_",
        "GOMP_",
        "KMP_",
        "MKL_",
        "OPENBLAS_",
        "NPY_",
    ),
    *("LD_", "MALLOC_", "GLIBC_", "LC_", "LANG", "OPENSSL_", "COVERAGE_", "ASAN_", "LSAN_", "UBSAN_"),
)
READ_LATER = (
    *("PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"),
    *("TORCH_DEVICE_BACKEND_AUTOLOAD", "TORCH_NCCL_", "TORCHINDUCTOR_CACHE_DIR"),
)


@dataclass(frozen=True)
class Command:
    """A command line that a forked interpreter can run."""

    executable: str
    arguments: tuple[str, ...]  # of the interpreter, as sys.orig_argv has them
    flags: str  # the letters of its options
    program: tuple[str, ...]  # "-c" or "-m" with what follows it, or a script with its arguments
    environ: dict[str, str]
    namespace: str | None = None  # the file of a network namespace


def fixed(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that must be the same for a forked interpreter as for its zygote."""
    return {
        name: value for name, value in environ.items() if name.startswith(FIXED) and not name.startswith(READ_LATER)
    }


def parse(arguments: Sequence[str], environ: Mapping[str, str], folder: str) -> Command | None:
    """Return the command of these arguments in this folder; None if it needs a real start."""
    environ, namespace, words = dict(environ), None, list(arguments)
    while words and words[0] in ("env", "ip"):
        if words[:3] == ["ip", "netns", "exec"] and len(words) > 4 and namespace is None:
            namespace = os.path.join(NETWORK_NAMESPACES, words[3])
            if not os.path.exists(namespace) or os.path.exists(os.path.join(NAMESPACE_FILES, words[3])):
                return None
            words = words[4:]
        elif words[0] == "env":
            words.pop(0)
            while words and "=" in words[0] and not words[0].startswith(("-", "=")):
                name, _, value = words.pop(0).partition("=")
                environ[name] = value
        else:
            return None
    executable = found(words[0], environ, folder) if words else None
    if executable is None:
        return None
    if os.path.basename(executable) in SCRIPTS:
        words = [sys.executable, executable, *words[1:]]
        executable = sys.executable
    flags = ""
    position = 1
    while position < len(words) and words[position].startswith("-") and words[position] not in ("-c", "-m"):
        letters = words[position][1:]
        if not letters or set(letters) - FLAGS:
            return None
        flags += letters
        position += 1
    program = tuple(words[position:])
    if not is_runnable(program, folder) or customizes(environ):
        return None
    return Command(executable, tuple(words), flags, program, environ, namespace)


def found(word: str, environ: Mapping[str, str], folder: str) -> str | None:
    """Return the path of this interpreter, or of a script of this installation, that a command's first word stands for."""
    binaries = os.path.dirname(sys.executable)
    path = word if os.path.isabs(word) else None if "/" in word else shutil.which(word, path=environ.get("PATH"))
    if path is None or os.path.dirname(path) != binaries or not os.access(path, os.X_OK):
        return None
    if os.path.basename(path) in SCRIPTS or os.path.realpath(path) == os.path.realpath(sys.executable):
        return path
    return None


def is_runnable(program: Sequence[str], folder: str) -> bool:
    if program[:2] == ("-m", "ringfence.cli") or (program and os.path.basename(program[0]) == "ringfence"):
        words = program[2:] if program[0] == "-m" else program[1:]
        return words[:1] in [(name,) for name in WITH_TORCH] or words[:2] == ("checkpoint", "convert")
    if program[:1] in (("-c",), ("-m",)):
        return len(program) > 1 and not (program[0] == "-m" and program[1] in REAL_MODULES)
    return bool(program) and os.path.isfile(os.path.join(folder, program[0]))


def customizes(environ: Mapping[str, str]) -> bool:
    """Return whether an interpreter with this environment would run code of its own before the program."""
    folders = environ.get("PYTHONPATH", "").split(os.pathsep)
    names = ("sitecustomize.py", "usercustomize.py")
    return any(os.path.exists(os.path.join(folder, name)) for folder in folders if folder for name in names)
