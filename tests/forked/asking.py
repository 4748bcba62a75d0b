"""The process that starts interpreters: asks its zygote where it can, in place of subprocess and multiprocessing's own way."""

from __future__ import annotations

import ctypes
import dataclasses
import inspect
import multiprocessing.util
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tests.forked import attributes
from tests.forked.command import SCRIPTS, Command, fixed, parse
from tests.forked.interpreter import Replaced
from tests.forked.packages import STANDARD, top

ROOT = Path(__file__).resolve().parent.parent.parent
LONGEST = 100_000  # bytes of a request; a longer one is started
MOST_PASSED = 200
PROGRAM = "import sys; sys.path.append({root!r}); from tests.forked.zygote import main; sys.path.pop(); main({number})"


def unreplaced(function: Any) -> Any:
    """Return what this stood for: in a forked process that imports this module too, it has been replaced already."""
    return getattr(function, "unreplaced", function)


real_execute_child = unreplaced(subprocess.Popen._execute_child)  # type: ignore[attr-defined]
real_spawn = unreplaced(multiprocessing.util.spawnv_passfds)
real_execve = os.execve
parameters = inspect.signature(real_execute_child)


class Started(subprocess.Popen):
    """A real start, whatever is in place of Popen's way."""

    _execute_child = real_execute_child


class Zygote:
    """The zygote of this process, and what its processes have in common with it."""

    def __init__(self, channel: socket.socket | None, variables: Mapping[str, str]) -> None:
        self._channel = channel  # None: it has yet to be started
        self._environ = dict(os.environ)
        self._variables = dict(variables)
        self._unchangeable = attributes.unchangeable()
        self._owner = os.getpid()
        self._lock = threading.Lock()

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Zygote:
        """Return a zygote with these variables. It is started when it is first used."""
        zygote = cls(None, fixed(environ))
        zygote._environ = dict(environ)
        return zygote

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        without = ("PYTHONPATH", "PYTHONUNBUFFERED")
        with theirs:
            self._process = Started(
                [sys.executable, "-c", PROGRAM.format(root=str(ROOT), number=theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={name: value for name, value in self._environ.items() if name not in without},
                cwd="/",
            )
        return ours

    def can_fork(self, command: Command) -> bool:
        return (
            self._owner == os.getpid()
            and fixed(command.environ) == self._variables
            and attributes.unchangeable() == self._unchangeable
        )

    def fork(self, command: Command, descriptors: Mapping[int, int], **options: Any) -> int | None:
        """Fork a command with descriptors of this process under numbers of its own. Returns its process id, or None."""
        request = pickle.dumps(
            {"command": dataclasses.asdict(command), "namespace": command.namespace, "descriptors": list(descriptors)}
            | attributes.inherited()
            | options
        )
        if len(request) > LONGEST or len(descriptors) > MOST_PASSED:
            return None
        reading, writing = os.pipe()
        with self._lock, open(reading, "rb") as answer:
            try:
                if self._channel is None:
                    self._channel = self._start()
                before = subreaper()
                attributes.LIBC.prctl(attributes.PR_SET_CHILD_SUBREAPER, 1)
                socket.send_fds(self._channel, [request], [writing, *descriptors.values()])
            finally:
                os.close(writing)
            try:
                said = answer.read()
            finally:
                attributes.LIBC.prctl(attributes.PR_SET_CHILD_SUBREAPER, before)
        if not said.strip().isdigit():
            raise RuntimeError(f"no interpreter could be forked: {said.decode() or 'its zygote has ended'}")
        return int(said)


def subreaper() -> int:
    value = ctypes.c_int()
    attributes.LIBC.prctl(attributes.PR_GET_CHILD_SUBREAPER, ctypes.byref(value))
    return value.value


@dataclasses.dataclass
class State:
    """How this process starts interpreters."""

    zygote: Zygote | None = None
    real: bool = False  # as a test with the marker wants
    forked: int = 0
    started: int = 0


state = State()


def install(zygote: Zygote) -> None:
    """Have this process ask a zygote for the interpreters that it starts."""
    state.zygote = zygote
    subprocess.Popen._execute_child = execute_child  # type: ignore[attr-defined]
    multiprocessing.util.spawnv_passfds = spawn  # type: ignore[assignment]


def uninstall() -> None:
    state.zygote = None
    subprocess.Popen._execute_child = real_execute_child  # type: ignore[attr-defined]
    multiprocessing.util.spawnv_passfds = real_spawn


def execute_child(self: Any, *positional: Any) -> None:
    """In place of Popen._execute_child."""
    execute(self, None if state.real else state.zygote, positional)


def execute(popen: Any, zygote: Zygote | None, positional: Sequence[Any]) -> None:
    """Do what Popen._execute_child does with a process of this zygote, if it can have one."""
    asked = parameters.bind(popen, *positional).arguments
    given = [asked["args"]] if isinstance(asked["args"], (str, bytes, os.PathLike)) else list(asked["args"])
    words = [os.fsdecode(word) for word in given]
    command = ordinary(asked, words) if zygote is not None else None
    pid = None
    if command is not None and zygote is not None and zygote.can_fork(command):
        sys.audit("subprocess.Popen", command.executable, asked["args"], asked["cwd"], asked["env"])
        streams = {0: asked["p2cread"], 1: asked["c2pwrite"], 2: asked["errwrite"]}
        descriptors = {number: number if mine == -1 else mine for number, mine in streams.items()}
        pid = zygote.fork(
            command,
            descriptors | {number: number for number in asked["pass_fds"]},
            folder=folder_of(asked["cwd"]),
            new_session=bool(asked["start_new_session"]),
            new_group=None if asked["process_group"] == -1 else asked["process_group"],
            has_zygote=getattr(popen, "has_zygote", True),
            **({} if asked["umask"] == -1 else {"umask": asked["umask"]}),
        )
    if pid is None:
        state.started += is_python(words)
        real_execute_child(popen, *positional)
        return
    state.forked += 1
    popen.pid = pid
    popen._child_created = True
    popen._close_pipe_fds(*(asked[name] for name in list(asked)[-17:] if name.startswith(("p2c", "c2p", "err"))))


def ordinary(asked: Mapping[str, Any], words: Sequence[str]) -> Command | None:
    """Return the command of a Popen that asks for nothing that only a real start can do."""
    usual = {"executable": None, "preexec_fn": None, "gid": None, "gids": None, "uid": None}
    if any(asked[name] is not value for name, value in usual.items()) or asked["shell"] or not asked["close_fds"]:
        return None
    try:
        folder = folder_of(asked["cwd"])
        for number, name in enumerate(("p2cread", "c2pwrite", "errwrite")):
            os.fstat(number if asked[name] == -1 else asked[name])
    except OSError:
        return None
    environ = os.environ if asked["env"] is None else asked["env"]
    variables = {os.fsdecode(name): os.fsdecode(value) for name, value in environ.items()}
    return parse(words, variables, folder) if os.path.isdir(folder) else None


def folder_of(cwd: Any) -> str:
    return os.path.join(os.getcwd(), os.fsdecode(cwd)) if cwd is not None else os.getcwd()


def is_python(words: Sequence[str]) -> bool:
    names = (sys.executable, *(os.path.join(os.path.dirname(sys.executable), name) for name in SCRIPTS))
    return any(word in (*names, *SCRIPTS) for word in words[:8])


def spawn(path: Any, arguments: Sequence[Any], passed: Sequence[int]) -> int:
    """In place of multiprocessing.util.spawnv_passfds."""
    words = [os.fsdecode(path), *map(os.fsdecode, arguments[1:])]
    zygote = None if state.real else state.zygote
    command = (
        parse(words, os.environ, os.getcwd()) if zygote is not None and "resource_tracker" not in words[-1] else None
    )
    if command is not None and zygote is not None and zygote.can_fork(command):
        descriptors = {number: number for number in (0, 1, 2, *map(int, passed))}
        options = {"folder": os.getcwd(), "new_session": False, "new_group": None, "has_zygote": True}
        pid = zygote.fork(command, descriptors, **options)
        if pid is not None:
            state.forked += 1
            return pid
    state.started += is_python(words)
    return int(real_spawn(path, arguments, passed))


execute_child.unreplaced = real_execute_child  # type: ignore[attr-defined]
spawn.unreplaced = real_spawn  # type: ignore[attr-defined]


class Forked(subprocess.Popen):
    """A process that is forked wherever it can be, without a zygote of its own: for the workers of `tests.pool`."""

    has_zygote = False
    _zygotes: dict[tuple[tuple[str, str], ...], Zygote] = {}  # noqa: RUF012 - shared by all

    def _execute_child(self, *positional: Any) -> None:
        environ = parameters.bind(self, *positional).arguments["env"]
        key = (("", str(os.getpid())), *sorted(fixed(environ).items()))
        usual = state.zygote
        if usual is not None and usual._variables == fixed(environ):
            self._zygotes.setdefault(key, usual)
        if key not in self._zygotes:
            self._zygotes[key] = Zygote.of(environ)
        execute(self, self._zygotes[key], positional)


# -- a program that replaces itself -------------------------------------------------------------------------------------


def replace_exec() -> None:
    """Let a program that has imported nothing yet become another command of this interpreter without an exec."""
    at_first = set(sys.modules)

    def execve(path: Any, arguments: Sequence[Any], environ: Mapping[str, str]) -> NoReturn:
        words = [os.fsdecode(path), *map(os.fsdecode, arguments[1:])]
        imported = {top(name) for name in set(sys.modules) - at_first}
        if imported <= STANDARD and threading.active_count() == 1 and "-I" in sys.orig_argv[1][:2]:
            command = parse(words, environ, os.getcwd())
            zygote = state.zygote
            if command is not None and zygote is not None and not command.namespace and zygote.can_fork(command):
                close_as_exec_does(zygote)
                raise Replaced(command)
        real_execve(path, list(arguments), environ)
        raise AssertionError("not reached")

    os.execve = execve  # type: ignore[assignment]
    os.execv = lambda path, arguments: execve(path, arguments, os.environ)  # type: ignore[assignment]


def close_as_exec_does(zygote: Zygote) -> None:
    own = zygote._channel.fileno() if zygote._channel is not None else -1
    open_ones = [number for number in attributes.open_descriptors() if number > 2 and number != own]
    for number in open_ones:
        try:
            if not os.get_inheritable(number):
                os.close(number)
        except OSError:  # the one of the listing
            continue
    ignored = [number for number in attributes.SIGNALS if signal.getsignal(number) == signal.SIG_IGN]
    attributes.restore_signals(ignored, sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())))
