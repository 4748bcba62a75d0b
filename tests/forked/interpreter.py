"""Run a program in this process as `python` would, and end as it does."""

from __future__ import annotations

import builtins
import collections
import io
import logging
import multiprocessing
import os
import runpy
import sys
import tempfile
import time
import types
import warnings
from importlib.machinery import SourceFileLoader
from types import TracebackType
from typing import Any

from tests.forked.command import Command
from tests.forked.packages import Packages, top

HERE = os.path.dirname(os.path.abspath(__file__))
FLAG_NAMES = {
    "B": "dont_write_bytecode",
    "E": "ignore_environment",
    "S": "no_site",
    "P": "safe_path",
    "s": "no_user_site",
}
OF_THE_ZYGOTE = sys.flags
kept: list[Any] = []  # modules of the zygote that the program does not see


class Replaced(BaseException):
    """The program has replaced itself by another command of this interpreter."""

    def __init__(self, command: Command) -> None:
        self.command = command


def run(command: Command, packages: Packages, path: list[str]) -> None:
    """Run a command. Raises SystemExit, or KeyboardInterrupt, or returns: the caller lets the interpreter end with it."""
    renew(packages)
    for name in [name for name in sys.modules if top(name) == "tests" or name == "__main__"]:
        kept.append(sys.modules.pop(name))
    while True:
        try:
            start(command, packages, path)
            return
        except Replaced as other:
            command = other.command
        except SystemExit:
            raise
        except KeyboardInterrupt as interrupt:
            show(interrupt)
            sys.excepthook = lambda *error: None  # it has been shown; the interpreter ends itself by SIGINT
            raise
        except BaseException as error:
            show(error)
            sys.exit(1)


def show(error: BaseException) -> None:
    trace: TracebackType | None = error.__traceback__
    while trace is not None and os.path.dirname(trace.tb_frame.f_code.co_filename) == HERE:
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)


def renew(packages: Packages) -> None:
    """Make new what each start has anew and a fork has copied."""
    tempfile.tempdir = None
    tempfile._name_sequence = None  # type: ignore[attr-defined]
    multiprocessing.current_process().authkey = os.urandom(32)
    packages.module("numpy").random.seed()  # torch's first seed is a constant; a fork seeds `random`
    with warnings.catch_warnings():  # what was shown once is shown again
        warnings.onceregistry.clear()  # type: ignore[attr-defined]


def start(command: Command, packages: Packages, path: list[str]) -> None:
    os.environ.clear()
    os.environ.update(command.environ)
    time.tzset()
    flags = set(command.flags)
    isolated = "I" in flags
    reads_environment = not isolated and "E" not in flags
    open_streams("u" in flags or (reads_environment and bool(os.environ.get("PYTHONUNBUFFERED"))))
    set_flags(flags, dont_write_bytecode=reads_environment and bool(os.environ.get("PYTHONDONTWRITEBYTECODE")))
    sys.executable = command.executable
    sys.orig_argv = list(command.arguments)
    if "S" in flags:
        path = [entry for entry in path if entry.startswith(sys.base_prefix) and "-packages" not in entry]
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep) if reads_environment else []
    sys.path[:] = [*(os.path.abspath(entry) for entry in entries if entry), *path]
    packages.hide()
    execute(command.program, first=not isolated and "P" not in flags)


def execute(program: tuple[str, ...], first: bool) -> None:
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main  # the second for multiprocessing, which is imported
    kind, *rest = program
    if kind == "-m":
        sys.argv = ["-m", *rest[1:]]
        sys.path[:0] = [os.getcwd()] if first else []
        runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
    elif kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path[:0] = [""] if first else []
        exec(compile(rest[0] + "\n", "<string>", "exec", dont_inherit=True), main.__dict__)
    else:
        sys.argv = [kind, *rest]
        sys.path[:0] = [os.path.dirname(os.path.realpath(kind))] if first else []
        file = os.path.abspath(kind)
        loader = SourceFileLoader("__main__", file)
        main.__dict__.update(__file__=file, __cached__=None, __loader__=loader)
        exec(compile(loader.get_data(file), file, "exec", dont_inherit=True), main.__dict__)


def set_flags(letters: set[str], **of_environment: int) -> None:
    names = [name for name in dir(OF_THE_ZYGOTE) if not name.startswith(("_", "n_")) and name not in ("count", "index")]
    values = {name: getattr(OF_THE_ZYGOTE, name) for name in names} | of_environment
    if "I" in letters:
        letters = letters | {"E", "P", "s"}
        values["isolated"] = 1
    for letter in letters & set(FLAG_NAMES):
        values[FLAG_NAMES[letter]] = type(values[FLAG_NAMES[letter]])(1)
    sys.flags = collections.namedtuple("flags", names)(**values)  # type: ignore[misc, assignment]
    sys.dont_write_bytecode = bool(values["dont_write_bytecode"])


def open_streams(unbuffered: bool) -> None:
    """Open stdin, stdout and stderr, and have handlers of logging that packages have added write there."""
    old = {sys.stdout: "stdout", sys.stderr: "stderr"}
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        new = stream(number, f"<{name}>", getattr(sys, f"__{name}__"), unbuffered)
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)
    for reference in logging._handlerList:  # type: ignore[attr-defined]
        handler = reference()
        if isinstance(handler, logging.StreamHandler) and handler.stream in old:
            handler.stream = getattr(sys, old[handler.stream])
    kept.extend(old)  # closing them is the end of the interpreter's business


def stream(number: int, name: str, like: Any, unbuffered: bool) -> io.TextIOWrapper:
    raw = io.FileIO(number, "r" if number == 0 else "w", closefd=False)
    raw.name = name  # type: ignore[assignment]
    buffer: Any = io.BufferedReader(raw) if number == 0 else raw if unbuffered else io.BufferedWriter(raw)
    lines = not unbuffered and (number == 2 or raw.isatty())
    text = io.TextIOWrapper(buffer, like.encoding, like.errors, "\n", lines, unbuffered)
    text.mode = raw.mode[0]  # type: ignore[misc]
    return text
