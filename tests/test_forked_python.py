"""Interpreters that `tests.forked` forks behave as those that are started."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.forked import asking, command
from tests.forked.asking import Started, Zygote
from tests.limits import HANG

# What a program sees of its process and its interpreter.
REPORT = """
import gc, json, os, resource, signal, sys, tempfile
number = os.open(os.devnull, os.O_RDONLY)
os.close(number)
flags = {name: getattr(sys.flags, name) for name in ("isolated", "no_site", "safe_path", "ignore_environment")}
print(json.dumps({
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "executable": sys.executable, "flags": flags,
    "environ": dict(os.environ), "folder": os.getcwd(), "umask": os.umask(0), "main": sorted(sys.modules["__main__"].__dict__),
    "name": __name__, "file": globals().get("__file__"), "parent": os.getppid(),
    "own session": os.getsid(0) == os.getpid(), "own group": os.getpgid(0) == os.getpid(),
    "session": os.getsid(0) if os.getsid(0) != os.getpid() else None,
    "group": os.getpgid(0) if os.getpgid(0) != os.getpid() else None,
    "limits": resource.getrlimit(resource.RLIMIT_NOFILE), "affinity": sorted(os.sched_getaffinity(0)),
    "priority": os.getpriority(os.PRIO_PROCESS, 0), "next descriptor": number, "temporary": tempfile.gettempdir(),
    "signals": [str(signal.getsignal(n)).partition(" at 0x")[0] for n in range(1, 32)],
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "descriptors": [n for n in range(3, 100) if os.path.exists(f"/proc/self/fd/{n}")],
    "inheritable": [os.get_inheritable(n) for n in (0, 1, 2)],
    "streams": [[s.encoding, s.errors, s.line_buffering, s.write_through, s.name, s.mode, type(s.buffer).__name__]
                for s in (sys.stdin, sys.stdout, sys.stderr)],
    "packages": sorted({n.partition(".")[0] for n in sys.modules} & {"torch", "numpy", "OpenSSL", "ringfence"}),
    "tests": "tests" in sys.modules, "gc": gc.isenabled(), "threads": len(os.listdir("/proc/self/task")),
    "no bytecode": sys.dont_write_bytecode,
}, sort_keys=True))
"""
# In a network namespace of its own, as `ringfence demo` starts its workers. A forked process has the zygote's command line.
NESTED = """
import ctypes, os, subprocess, sys
if os.geteuid() == 0:
    assert ctypes.CDLL(None).unshare(0x40000000) == 0
inner = "import os; print(os.readlink('/proc/self/ns/net'), '.zy' + 'gote' in open('/proc/self/cmdline').read())"
network, forked = subprocess.run([sys.executable, "-c", inner], stdout=subprocess.PIPE, text=True).stdout.split()
assert network == os.readlink("/proc/self/ns/net")
print("forked" if forked == "True" else "started", end="")
"""


@pytest.fixture(scope="module")
def zygote() -> Zygote:
    return asking.state.zygote or Zygote.of(os.environ)


class Both:
    """The same command, started and forked."""

    def __init__(self, zygote: Zygote) -> None:
        class Forked(subprocess.Popen):
            def _execute_child(self, *positional: Any) -> None:
                before = asking.state.forked
                asking.execute(self, zygote, positional)
                assert asking.state.forked == before + 1, "it was started"

        self.forked = Forked

    def __call__(self, *arguments: str, given: str | None = None, **options: Any) -> Iterator[tuple[int, str, str]]:
        for kind in (Started, self.forked):
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            with kind([sys.executable, *arguments], text=True, **pipes, **options) as process:
                out, error = process.communicate(given, timeout=HANG)
                yield process.returncode, out, error


@pytest.fixture(scope="module")
def both(zygote: Zygote) -> Both:
    return Both(zygote)


def same(results: Iterator[tuple[int, str, str]]) -> tuple[int, str, str]:
    started, forked = results
    if started[1].startswith("{") and forked[1].startswith("{"):
        was, now = json.loads(started[1]), json.loads(forked[1])
        assert {name: now[name] for name in now if now[name] != was[name]} == {}
    assert forked == started
    return forked


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "report.py").write_text(REPORT)
    return tmp_path / "report.py"


@pytest.mark.parametrize("flags", [(), ("-u",), ("-P",), ("-I",), ("-IS",), ("-u", "-B", "-E")], ids="".join)
@pytest.mark.parametrize(
    "kind", ["code", *(pytest.param(kind, marks=pytest.mark.nightly) for kind in ("module", "script"))]
)
def test_a_program_sees_the_same(both: Both, script: Path, kind: str, flags: tuple[str, ...]) -> None:
    program = {"code": ("-c", REPORT), "module": ("-m", "report"), "script": ("report.py",)}[kind]
    environ = {**os.environ, "PYTHONPATH": str(script.parent), "TMPDIR": str(script.parent), "A": "b"}
    code, out, error = same(both(*flags, *program, "one", "-two", cwd=script.parent, env=environ, umask=0o027))
    if kind != "module" or not any("I" in flag or "P" in flag or "E" in flag for flag in flags):
        assert (code, error, json.loads(out)["environ"]["A"]) == (0, "", "b")


def test_sessions_groups_and_the_parent(both: Both) -> None:
    for options in ({}, {"start_new_session": True}, {"process_group": 0}):
        _, out, _ = same(both("-c", REPORT, env=dict(os.environ), **options))
        assert json.loads(out)["parent"] == os.getpid()


def test_limits_affinity_and_signals_of_the_process_that_asks(both: Both) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    processors = os.sched_getaffinity(0)
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
        os.sched_setaffinity(0, {min(processors)})
        _, out, _ = same(both("-c", REPORT, env=dict(os.environ)))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        signal.signal(signal.SIGUSR1, before)
        os.sched_setaffinity(0, processors)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    seen = json.loads(out)
    assert (seen["limits"][0], seen["affinity"]) == (soft - 1, [min(processors)])
    assert signal.SIGUSR2 in seen["blocked"]


ENDS = {
    "": 0,
    "import sys; sys.exit(3)": 3,
    "import sys; sys.exit('text')": 1,
    "raise ValueError('text')": 1,
    "def f():\n    1 / 0\nf()": 1,
    "import os; print('lost'); os._exit(4)": 4,
    "import os; os.kill(os.getpid(), 9)": -9,
    "import os; os.kill(os.getpid(), 15)": -15,
    "import os; os.kill(os.getpid(), 2)": -2,
    "import os; os.abort()": -6,
    "print('a', end=''); import sys; print('b', file=sys.stderr, end='')": 0,
    "print(input() + input())": 0,
    "import atexit; atexit.register(print, 'at the end')": 0,
    "import threading; threading.Timer(0.01, print, ['after the end']).start()": 0,
    "class A:\n    def __del__(self): print('freed')\na = A()": 0,
    "import ctypes; ctypes.CDLL(None).printf(b'from C')": 0,
    "import sys; sys.excepthook = lambda *error: print(error[0]); 1 / 0": 1,
    "f(": 1,
    "import no_such_module": 1,
    "import os, sys; sys.stdout.close()": 0,
}


@pytest.mark.parametrize("program", ENDS)
def test_output_and_exit_codes(both: Both, program: str) -> None:
    assert same(both("-c", program, given="x\ny\n"))[0] == ENDS[program]


def test_a_module_that_does_not_exist_and_one_that_fails(both: Both, tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("raise KeyError('as asked')\n")
    assert same(both("-m", "no_such_module", cwd=tmp_path))[0] == 1
    assert "as asked" in same(both("-m", "fails", cwd=tmp_path))[2]
    assert "as asked" in same(both("fails.py", cwd=tmp_path))[2]


@pytest.mark.nightly
def test_torch_is_imported_when_the_program_does(both: Both) -> None:
    program = """
import sys
print("torch" in sys.modules, "numpy" in sys.modules)
import numpy
print("torch" in sys.modules, numpy.__spec__.origin)
import torch
print(torch.ones(2), torch.__spec__.origin)
print(type(torch.__loader__), "ringfence" in sys.modules, "torch.distributed" in sys.modules)
print(torch.get_num_threads(), torch.is_grad_enabled(), torch.get_default_dtype())
"""
    for value in ("0", "1"):
        environ = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": value}
        _, out, _ = same(both("-c", program, env=environ))
        assert f"SourceFileLoader'> {value == '1'} True" in out


def test_a_package_that_stands_before_the_imported_one(both: Both, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("print('another one')\n")
    assert same(both("-c", "import torch", cwd=tmp_path))[1] == "another one\n"


def test_random_numbers_are_new_in_each_process(both: Both) -> None:
    program = """
import multiprocessing, random, numpy, torch
print(random.random(), numpy.random.rand(), torch.rand(1).item(), multiprocessing.current_process().authkey.hex())
"""
    seen = [out.split() for _ in range(2) for _, out, _ in both("-c", program)]
    assert all(len({row[column] for row in seen}) == 4 for column in range(4))


def test_passed_descriptors_have_their_numbers(both: Both) -> None:
    reading, writing = os.pipe()
    os.dup2(writing, 77)
    try:
        program = (
            "import os, sys; os.write(int(sys.argv[1]), b'from the child'); print(os.get_inheritable(int(sys.argv[1])))"
        )
        assert same(both("-c", program, "77", pass_fds=[77]))[1] == "True\n"
        assert os.read(reading, 100) == b"from the child" * 2
    finally:
        for number in (reading, writing, 77):
            os.close(number)


def test_every_number_can_be_passed(both: Both) -> None:
    program = """
import gc, os, subprocess, sys
numbers = [os.dup(0) for _ in range(40)]
inner = "import gc, os, sys; gc.collect(); print(*[os.fstat(int(each)).st_mode for each in sys.argv[1:]])"
done = subprocess.run([sys.executable, "-c", inner, *map(str, numbers)], pass_fds=numbers, capture_output=True, text=True)
print(numbers, done.returncode, done.stdout, done.stderr)
"""
    assert "[3, 4, 5" in same(both("-c", program))[1]


def test_a_grandchild_is_forked_too_and_ends_with_its_code(both: Both) -> None:
    program = """
import os, subprocess, sys
inner = "import os, sys, torch; print(os.getppid(), torch.ones(1)); sys.exit(7)"
done = subprocess.run([sys.executable, "-c", inner], capture_output=True, text=True)
print(done.returncode, done.stdout.replace(str(os.getpid()), "the parent"), done.stderr)
"""
    assert same(both("-c", program))[1] == "7 the parent tensor([1.])\n \n"


def test_what_a_forked_process_starts_is_forked(both: Both) -> None:
    started, forked = (out for _, out, _ in both("-c", NESTED))
    assert (started, forked) == ("started", "forked")


def test_multiprocessing_spawns(both: Both, tmp_path: Path) -> None:
    (tmp_path / "spawns.py").write_text("""
import multiprocessing
def double(number): return 2 * number
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        print(pool.map(double, range(4)))
""")
    assert same(both("spawns.py", cwd=tmp_path)) == (0, "[0, 2, 4, 6]\n", "")


def test_a_program_becomes_another_by_exec(both: Both, tmp_path: Path) -> None:
    (tmp_path / "first.py").write_text("import os, sys\nos.execvp(sys.argv[1], sys.argv[1:])\n")
    same(both("-IS", "first.py", sys.executable, "-c", REPORT, "argument", cwd=tmp_path, env=dict(os.environ)))
    assert same(both("first.py", sys.executable, "-c", "print(1)", cwd=tmp_path))[1] == "1\n"
    assert same(both("first.py", "echo", "words", cwd=tmp_path))[1] == "words\n"


def test_orphans_are_not_children_of_the_process_that_asked(both: Both) -> None:
    program = """
import subprocess, sys
print(subprocess.Popen([sys.executable, "-c", "input()"], stdin=int(sys.argv[1]), stdout=subprocess.DEVNULL).pid)
"""
    reading, writing = os.pipe()
    try:
        with both.forked(
            [sys.executable, "-c", program, str(reading)], stdout=subprocess.PIPE, pass_fds=[reading]
        ) as process:
            orphan = int(process.communicate(timeout=HANG)[0])
        assert Path(f"/proc/{orphan}/stat").read_text().rpartition(")")[2].split()[1] != str(os.getpid())
    finally:
        os.close(reading)
        os.close(writing)


def test_a_stopped_and_a_killed_process(both: Both) -> None:
    program = [sys.executable, "-c", "print(1, flush=True); input()"]
    for kind in (Started, both.forked):
        with kind(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stdout.readline() == b"1\n"
            process.send_signal(signal.SIGSTOP)
            assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
            process.kill()
            assert process.wait(HANG) == -signal.SIGKILL


FORKED = (
    [sys.executable, "-c", "x"],
    [sys.executable, "-u", "-m", "x", "-W"],
    ["env", "A=1", sys.executable, "-c", "x"],
    [os.path.join(os.path.dirname(sys.executable), "torchrun"), "x"],
    [sys.executable, "-m", "ringfence.cli", "run", "x"],
)
NOT_FORKED = (
    ["python-of-another", "-c", "x"],
    [sys.executable],
    [sys.executable, "-"],
    [sys.executable, "-W", "error", "-c", "x"],
    [sys.executable, "-X", "dev", "-c", "x"],
    [sys.executable, "-c"],
    [sys.executable, "no_such_file.py"],
    [sys.executable, "-m", "pytest"],
    [sys.executable, "-m", "ringfence.cli", "policy"],  # imports no torch
    [os.path.realpath(sys.executable), "-c", "x"],  # has other packages
    ["env", "-i", sys.executable, "-c", "x"],
    ["taskset", "1", sys.executable, "-c", "x"],
    ["ip", "netns", "exec", "no-such-namespace", sys.executable, "-c", "x"],
    ["sh", "-c", "x"],
)


def test_which_commands_are_forked() -> None:
    assert all(command.parse(words, os.environ, "/") for words in FORKED)
    assert not any(command.parse(words, os.environ, "/") for words in NOT_FORKED)


@pytest.mark.parametrize("name", ["PYTHONHASHSEED", "TORCH_LOGS", "OMP_NUM_THREADS", "LD_PRELOAD", "MALLOC_ARENA_MAX"])
def test_what_is_read_once_cannot_change(zygote: Zygote, name: str) -> None:
    words = [sys.executable, "-c", "x"]
    changed = command.parse(words, {**os.environ, name: "7"}, "/")
    usual = command.parse(words, {**os.environ, "RINGFENCE_SECRET": "7", "TORCH_NCCL_X": "7"}, "/")
    assert changed is not None and usual is not None
    assert not zygote.can_fork(changed)
    assert zygote.can_fork(usual)


def test_what_only_a_start_can_do_is_started(zygote: Zygote) -> None:
    usual: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True}
    words = [sys.executable, "-c", "import os; print(os.getppid())"]
    different: list[dict[str, Any]] = [
        {"preexec_fn": lambda: None},
        {"close_fds": False},
        {"executable": sys.executable},
        {"user": os.geteuid()},
    ]
    before = asking.state.forked
    for options in different:
        with subprocess.Popen(words, **usual, **options) as process:
            assert process.communicate(timeout=HANG)[0] == f"{os.getpid()}\n"
    assert asking.state.forked == before


@pytest.mark.real_start
def test_the_marker_has_interpreters_started() -> None:
    before = asking.state.forked
    assert subprocess.run([sys.executable, "-c", "pass"], timeout=HANG).returncode == 0
    assert asking.state.forked == before


def test_a_zygote_of_another_process_is_not_asked(both: Both) -> None:
    program = """
import os, subprocess, sys
child = os.fork()
if not child:
    os._exit(subprocess.run([sys.executable, "-c", "import sys; sys.exit(5)"]).returncode)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert same(both("-c", program))[1] == "5\n"
