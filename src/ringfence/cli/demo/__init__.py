"""`ringfence demo`: what a network sees of a tensor with Gloo and with ringfence, and what a flipped bit causes.

workers.py, worker.py  the two workers, from here and from inside
capture.py, relay.py   who listens: a capture of the loopback, and a relay that can flip a bit
viewer.py              bytes as text
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ringfence.cli import requirements, terminal
from ringfence.cli.demo import capture as wire
from ringfence.cli.demo import viewer
from ringfence.cli.demo.relay import Relay
from ringfence.cli.demo.workers import SENTENCE, DemoError, Workers

LOOPBACK: Final = "127.0.0.1"
PORTS_PER_WORKER: Final = 4  # the first is the links', and a relay stands before it

DESCRIPTION = """\
Two workers on this machine all-reduce a tensor whose bytes spell a sentence, while this process captures their traffic.

  1. With Gloo, PyTorch's own backend, the sentence can be read on the wire.
  2. With ringfence, a relay that copies every byte cannot read it.
  3. The relay flips one bit: both workers abort, and the error names the sender.

The demo takes about 20 seconds, uses only the loopback interface and leaves no files behind.{root}
"""

NOT_ROOT = """ Step 1 captures packets, which needs root or a system that allows user
namespaces; without either, it is skipped.
"""

EXIT_CODES = """\
exit codes:
  0  all checks passed
  1  a check failed
  2  the demo could not run
"""


def add_to(commands: terminal.Commands) -> None:
    """Add `demo` to the command line."""
    demo = commands.add_parser(
        "demo",
        help="see what a network sees, with and without ringfence",
        description=DESCRIPTION.format(root="" if os.geteuid() == 0 else NOT_ROOT),
        epilog=EXIT_CODES,
    )
    demo.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the three steps; the exit code is 0 only if every check passes."""
    requirements.workers()
    requirements.backend()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends workers and removes files as on Ctrl-C
    private = wire.enter_private_network()
    capture = wire.open_capture()
    with tempfile.TemporaryDirectory(prefix="ringfence-demo-") as name:
        folder = Path(name)
        readable = gloo_is_readable(folder, capture, private)
        sealed, refused = ringfence_is_not(folder, capture)
    print()
    if readable and sealed and refused:
        print("All checks passed.")
        return 0
    print("Some checks FAILED: see above.")
    return 1


def gloo_is_readable(folder: Path, capture: wire.Capture | None, private: bool) -> bool:
    """Run step 1: capture what Gloo sends."""
    heading("1. Gloo, PyTorch's own backend. An eavesdropper sees:")
    if capture is None:
        terminal.say("(skipped: capturing needs root, or a system that allows user namespaces)", "   ")
        return True
    with Workers("gloo", folder, [{"GLOO_SOCKET_IFNAME": "lo"}] * 2) as workers:
        answers = workers.add_up()
    sighting = viewer.look(capture.streams(), SENTENCE)
    show(sighting)
    if not private:
        terminal.say(
            "(no private network here: the loopback traffic of other programs was captured and dropped)", "   "
        )
    return verdict(sums_are_right(answers), "both workers have the right sum") & verdict(
        sighting.times > 0, f"the sentence can be read, {sighting.times} times in {sighting.captured:,} bytes"
    )


def ringfence_is_not(folder: Path, capture: wire.Capture | None) -> tuple[bool, bool]:
    """Run steps 2 and 3, with the same two workers."""
    from ringfence.config.private_files import new_secret_file

    heading("2. ringfence, through a relay that copies every byte. The relay sees:")
    secret = folder / "demo.secret"
    new_secret_file(secret)
    lowest = free_ports(2 * PORTS_PER_WORKER)
    ports = [lowest, lowest + PORTS_PER_WORKER]
    relays = [Relay((LOOPBACK, first)) for first in ports]
    environments = [
        {
            "RINGFENCE_SECRET_FILE": str(secret),
            "RINGFENCE_INTERFACE": LOOPBACK,
            "RINGFENCE_PORTS": f"{first}-{first + PORTS_PER_WORKER - 1}",
            "RINGFENCE_ADVERTISE": "{}:{}".format(*relay.address),
            "RINGFENCE_SAME_HOST": "sealed",  # each worker stands for a machine of its own
        }
        for first, relay in zip(ports, relays, strict=True)
    ]
    try:
        with Workers("ringfence", folder, environments) as workers:
            sealed = nothing_is_read(workers, relays, capture)
            refused = flipped_bit_is_refused(workers, relays[1])
    finally:
        for relay in relays:
            relay.close()
    return sealed, refused


def nothing_is_read(workers: Workers, relays: Sequence[Relay], capture: wire.Capture | None) -> bool:
    """Step 2: the same tensor, the same search."""
    answers = workers.add_up()
    relayed = [stream for relay in relays for stream in relay.streams()]
    heard = capture.streams() if capture is not None else []
    show(viewer.look(relayed, SENTENCE))
    sighting = viewer.look(relayed + heard, SENTENCE)
    return (
        verdict(sums_are_right(answers), "both workers have the right sum")
        & verdict(sum(map(len, relayed)) > 0, "the tensor went through the relay")
        & verdict(sighting.times == 0, f"the sentence is nowhere in {sighting.captured:,} bytes")
    )


def flipped_bit_is_refused(workers: Workers, relay: Relay) -> bool:
    """Step 3: one bit of what worker 0 sends to worker 1."""
    heading("3. ringfence, and the relay flips one bit on the way from worker 0 to worker 1:")
    relay.flip_a_bit()
    answers = workers.add_up()
    for rank, answer in enumerate(answers):
        said = f"{answer['error']}: {answer['message']}" if "error" in answer else "no error"
        terminal.say(said, f"   worker {rank}: ")
    print()
    return (
        verdict(relay.flipped.is_set(), "one bit was flipped")
        & verdict(all("error" in answer for answer in answers), "both workers aborted")
        & verdict(all("from worker 0" in answer.get("message", "") for answer in answers), "both errors name worker 0")
    )


def sums_are_right(answers: Sequence[dict[str, str]]) -> bool:
    return all(answer.get("sum") == "right" for answer in answers)


def free_ports(count: int) -> int:
    """Return the first of `count` consecutive free ports of the loopback interface. Raises DemoError."""
    for first in range(20_000, 60_000, count):
        with contextlib.ExitStack() as probes, contextlib.suppress(OSError):
            for port in range(first, first + count):
                probes.enter_context(socket.create_server((LOOPBACK, port)))
            return first
    raise DemoError("no free ports on the loopback")


def heading(text: str) -> None:
    print(f"\n{text}\n", flush=True)


def show(sighting: viewer.Sighting) -> None:
    for line in sighting.dump.splitlines():
        print(f"   {line}")
    print()


def verdict(true: bool, claim: str) -> bool:
    """Print whether a claim holds, and return it."""
    print(f"   {'yes' if true else 'NO '}  {claim}", flush=True)
    return true
