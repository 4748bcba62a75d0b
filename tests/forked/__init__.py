"""Python interpreters that tests start, forked from one that has imported torch (1.8 s of CPU for each real start).

`subprocess.Popen` of this interpreter, or of `ringfence` and `torchrun` of this installation, asks a **zygote**: a process with
a single thread that has imported torch and other packages, and nothing of ringfence. The zygote forks twice, and the
process in between ends; with PR_SET_CHILD_SUBREAPER, the new process is then a child of the process that asked. It has a
zygote of its own for what it starts, so that a launcher's workers are forked too. Every process that asks uses its own.

| module | |
|---|---|
| `command` | which command lines and environments can be forked |
| `asking` | the process that asks: in place of parts of subprocess, multiprocessing and os |
| `zygote` | the process that forks |
| `attributes` | what the kernel keeps for a process and an exec would have passed on |
| `packages` | imported packages that a program finds when it imports them |
| `interpreter` | run a program as `python` does |
| `plugin` | pytest's options, markers and counts |

The new process has, as after a real start: process id, parent, session, process group, working folder, umask, descriptors,
ignored and blocked signals, limits, affinity, environment, arguments, flags, import path, streams, temporary folder, random
numbers, authentication key of multiprocessing. It ends as an interpreter does (atexit, destructors, exit code), but for the
packages of the zygote, which are not freed one by one. They are not in `sys.modules` until the program imports
them; torch's entry points are run then.

What differs, so that a test that depends on it needs the marker `real_start`:
- `/proc/PID/cmdline`, `environ` and the largest resident memory are the zygote's; the process has one more child, its zygote.
- Modules of the standard library that torch imports are in `sys.modules` from the start.
- Hashes of strings are the same in all processes of a zygote.
- A command that has replaced itself by exec() of this interpreter, before it imported anything, keeps what it had imported.

`--real-starts` turns all this off, but for the workers of `tests.pool`.
"""
