"""What a record costs: CPU time of a training step, bytes a worker writes in an hour, an audit, a manifest. Prints figures.

python -m tests.integration.record_cost step
python -m tests.integration.record_cost audit
python -m tests.integration.record_cost manifest
"""

from __future__ import annotations

import hashlib
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ringfence.backend import sessions
from ringfence.link.tag_chain import TagChain
from ringfence.record import heads
from ringfence.record.log_file import Blobs, LogFile, log_name, open_folder
from ringfence.session.recording import Recorder
from tests.integration.test_record import until
from tests.pool import Pool
from tests.unit import run_samples as samples
from tests.unit.evidence_samples import BY_CERTIFICATE, HEAD

ROUNDS, STEPS = 8, 150
WORKERS, MINUTES = 64, 1667  # 100,000 steps of a second
FRAMES = 10_000_000  # that passed in each direction of a connection
DATA_BYTES = 4 << 30


def cpu_of_steps(steps: int) -> tuple[float, float]:
    """CPU seconds of this process, all its threads, for so many steps of DDP; and how many of them a record takes.

    These are those of its thread, and those of hashing as many tags as there were, which other threads do.
    """
    recorders = sessions.recorders()
    for each in recorders:
        until(each._collected.is_set)  # what a session does once
    model = DistributedDataParallel(torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4))))
    given = torch.ones(64, 512)
    for _ in range(5):
        model(given).sum().backward()
    dist.barrier()
    tags, spent = _recorded(recorders)
    before = time.process_time()
    for _ in range(steps):
        model(given).sum().backward()
    total = time.process_time() - before
    tags, spent = (after - first for after, first in zip(_recorded(recorders), (tags, spent), strict=True))
    return total, spent + tags * _seconds_a_tag()


def _recorded(recorders: Sequence[Recorder]) -> tuple[float, float]:
    """How many tags were hashed, and the CPU seconds of the threads that write."""
    tags = seconds = 0.0
    for each in recorders:
        assert each._thread is not None and each._thread.ident is not None
        seconds += time.clock_gettime(time.pthread_getcpuclockid(each._thread.ident))
        tags += sum(chain._frames for chain in each._chains._chains)
    return tags, seconds


def _seconds_a_tag(count: int = 100_000) -> float:
    chain, frame = TagChain(1, bytes(32), 0, 0), memoryview(bytes(1000))
    before = time.thread_time()
    for _ in range(count):
        chain.add(1, frame[-16:])
    return (time.thread_time() - before) / count


def measure_step() -> None:
    """In turns without a record, with one, and without one again; ratios of the same round."""
    for world in (2, 4):
        with tempfile.TemporaryDirectory() as folder, Pool() as pool:
            ratios: dict[str, list[float]] = {"with": [], "without, again": []}
            own: list[float] = []
            written = seconds = 0.0
            for number in range(ROUNDS):
                found = {}
                turns = ["without", "with", "without, again"]
                for which in turns if number % 2 else reversed(turns):
                    record = Path(folder) / f"{number}"
                    env = {"RINGFENCE_RECORD": str(record)} if which == "with" else {}
                    began = time.monotonic()
                    parts = pool.check(cpu_of_steps, world, args=(STEPS,), env=env, renew=True)
                    found[which] = sum(total for total, _ in parts)
                    pool.leave()
                    if which == "with":
                        own.append(sum(record for _, record in parts) / found[which])
                        seconds += time.monotonic() - began
                        written += sum(path.stat().st_size for path in record.glob("*.jsonl"))
                for which, values in ratios.items():
                    values.append(found[which] / found["without"])
            for which, values in ratios.items():
                low, middle, high = (statistics.quantiles(values, n=4)[at] for at in range(3))
                print(
                    f"{world} workers, CPU of a step {which} over without: {middle:.4f} [{low:.4f}, {high:.4f}]",
                    flush=True,
                )
            print(f"{world} workers, of which its thread and the hashing of tags take: {statistics.median(own):.4f}")
            print(f"{world} workers: {written / ROUNDS / world / 1e3:.1f} kB a worker for {seconds / ROUNDS:.0f} s")


def measure_audit() -> None:
    """Write the logs of a large run with the writer itself, and audit them in a process of its own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "record"
        with patch.object(os, "fdatasync", lambda file: None):  # of 64 disks, this machine has one
            size = write_large(folder)
        (Path(name) / "claims.toml").write_text('run = "run-7"\ncomplete = true\nsealed = true\n')
        command = [sys.executable, "-m", "ringfence.cli", "audit", str(folder), "--claims", f"{name}/claims.toml"]
        began = time.monotonic()
        done = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
        memory = 0
        while done.poll() is None:
            memory = max(memory, memory_of_session(done.pid))
            with suppress(subprocess.TimeoutExpired):
                done.wait(0.1)
        took, used = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
        print(
            f"{WORKERS} workers, {WORKERS * MINUTES:,} entries of counts, {size / 1e6:,.0f} MB: exit {done.returncode}"
        )
        cpu = used.ru_utime + used.ru_stime
        print(f"  {took:.1f} s, {cpu:.1f} s of CPU, {memory / 1e6:.2f} GB in all its processes together")


def memory_of_session(leader: int) -> int:
    """Kilobytes that the processes of a session hold now; what several share counts once."""
    found = 0
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.getsid(int(path.name)) == leader:
                lines = (path / "smaps_rollup").read_text().splitlines()
                found += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return found


def write_large(folder: Path) -> int:
    open_folder(folder)
    blobs = Blobs(folder)
    hosts = tuple(f"10.0.0.{rank // 8}" for rank in range(WORKERS))
    run = replace(samples.SITE.run(HEAD + BY_CERTIFICATE), size=WORKERS, hosts=hosts)
    begins = [run.begin(rank, blobs) for rank in range(WORKERS)]
    roster = bytes.fromhex(begins[0].fields["roster"])
    made = {rank: heads.state(run.join(rank), rank, "", run.session.record_key(rank)) for rank in range(WORKERS)}
    listed = blobs.put(heads.encode({rank: heads.parse(made[rank], rank, roster, run.listings) for rank in made}))
    counts = (*(1 << power for power in range(17)), *range(2 << 16, FRAMES, 1 << 16), FRAMES)
    for rank, begin in enumerate(begins):
        file = LogFile(folder, log_name(roster, rank), run.session.record_key(rank))
        file.append("begin", begin.fields)
        file.append("heads", {"list": listed, "missing": 0})
        for minute in range(1, MINUTES + 1):
            file.append("peers", {"peers": [_peer(run.hosts, rank, other, minute) for other in _others(rank)]})
            file.sign()
        points = [
            [(rank + step) % WORKERS, "ab" * 32, 0, int(step != 1), count, hashlib.sha256(b"%d" % count).hexdigest()]
            for step in (1, WORKERS - 1)
            for count in counts
        ]
        for at in range(0, len(points), 256):
            file.append("passed", {"points": points[at : at + 256]})
        file.append("end", {"how": "left", "text": ""})
        file.sign()
        file.close()
    return sum(path.stat().st_size for path in folder.glob("*.jsonl"))


def _others(rank: int) -> list[int]:
    return [other for other in range(WORKERS) if other != rank]


def _peer(hosts: tuple[str, ...], rank: int, other: int, minute: int) -> list[int]:
    sent = minute * 60 * (1 << 24) + other
    return [other, *([0, 0, sent, sent] if hosts[rank] == hosts[other] else [sent, sent, 0, 0]), sent, sent]


def measure_manifest() -> None:
    """Beside one core that hashes the same bytes, already in memory both times."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "data"
        folder.mkdir()
        block = os.urandom(1 << 26)
        for number in range(DATA_BYTES // len(block)):
            (folder / f"{number:03}").write_bytes(block)
        began, cpu = time.monotonic(), time.process_time()
        for path in sorted(folder.iterdir()):
            hashlib.sha256(path.read_bytes())
        print(
            f"{DATA_BYTES / 1e9:.2f} GB by one core: {time.monotonic() - began:.1f} s, {time.process_time() - cpu:.1f} s of CPU"
        )
        began = time.monotonic()
        subprocess.run([sys.executable, "-m", "ringfence.cli", "record", "data", str(folder)], cwd=name, check=True)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        print(f"  its manifest: {time.monotonic() - began:.1f} s, {used.ru_utime + used.ru_stime:.1f} s of CPU")


MEASURED: dict[str, Callable[[], None]] = {"step": measure_step, "audit": measure_audit, "manifest": measure_manifest}

if __name__ == "__main__":
    from tests.integration import record_cost  # workers look for functions by the name of the module

    record_cost.MEASURED[sys.argv[1]]()
