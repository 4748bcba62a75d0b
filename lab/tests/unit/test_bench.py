"""The benchmark's arithmetic: intervals, samples that are found again, the bytes of stages, sizes and rates, the text."""

from __future__ import annotations

import io
import json
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from ringfence.collectives import Collective
from ringfence.collectives.counts import count
from ringfence.errors import ConfigurationError
from ringfence_lab.bench import machine, memory_use, names
from ringfence_lab.bench.intervals import interval, ratios, resolution
from ringfence_lab.bench.measure import Measured
from ringfence_lab.bench.netns import bits_per_second, burst_bytes
from ringfence_lab.bench.result_table import machine_text, results_text
from ringfence_lab.bench.results import result
from ringfence_lab.bench.samples import FILE, Samples
from ringfence_lab.bench.units import bytes_of, size_text, time_text
from ringfence_lab.progress import Progress
from tests.limits import HANG

CASE: dict[str, Any] = {
    "kind": "collective", "operation": "all_reduce", "size": 1 << 20, "workers": 2, "busy": False,
    "hosts": 0, "rate": None, "machine": "m",
    "variants": ["gloo-a", "gloo-b", "ringfence", "ringfence-unsealed", "tls"],
}  # fmt: skip


def sample(seconds: float, **more: Any) -> dict[str, Any]:
    return {"seconds": seconds, "cpu": 2 * seconds, "sent": 100, "repeats": 1, **more}


# -- intervals ------------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=20))
def test_an_interval_holds_its_median_and_lies_within_the_values(values: list[float]) -> None:
    found = interval(values)
    assert min(values) <= found.low <= found.median <= found.high <= max(values)


def test_an_interval_is_the_percentile_bootstrap_of_scipy() -> None:
    draw = random.Random(3)
    values = sorted(draw.gauss(1, 0.2) for _ in range(15))
    theirs = scipy.stats.bootstrap((values,), np.median, method="percentile", rng=1).confidence_interval
    found = interval(values)
    for ours, other in ((found.low, theirs.low), (found.high, theirs.high)):
        ranks = np.searchsorted(values, [ours, other])
        assert abs(int(ranks[0]) - int(ranks[1])) <= 1  # both are one of the values, or lie between two neighbours


def test_an_interval_covers_the_true_median_about_as_often_as_it_says() -> None:
    draw = random.Random(1)
    trials = [interval([draw.gauss(1, 0.2) for _ in range(15)]) for _ in range(200)]
    covered = sum(found.low <= 1 <= found.high for found in trials)
    assert 170 <= covered < 200


def test_ratios_are_taken_round_by_round() -> None:
    assert ratios([3, 30], [1, 10], [2, 20]) == [2, 2]


def test_the_resolution_is_how_far_the_baseline_differs_from_itself() -> None:
    assert resolution([1.0, 1.0, 1.0]) == 0
    assert resolution([1.1] * 5) == pytest.approx(0.1)
    assert resolution([0.8] * 5) == pytest.approx(0.2)


def test_a_result_compares_every_variant_with_both_runs_of_the_baseline() -> None:
    both = [{"gloo-a": sample(1), "gloo-b": sample(3)}, {"gloo-a": sample(2), "gloo-b": sample(2)}]
    shares = [{"seal": 0.25, "rest": 0.75}, {"seal": 0.75, "rest": 0.25}]
    rounds = [
        {**gloo, "ringfence": sample(1, stages=share), "ringfence-unsealed": sample(0.5)}
        for gloo, share in zip(both, shares, strict=True)
    ]
    found = result(Measured(CASE, rounds))
    assert [line.variant for line in found.lines] == CASE["variants"][:4]  # tls took no part
    sealed = found.lines[2]
    assert sealed.ratio == (0.5, 0.5, 0.5)
    assert found.sealed_over == {"ringfence-unsealed": (2, 2, 2)}
    assert sealed.stages == {"seal": 0.5, "rest": 0.5}
    assert sealed.cpu_ns_per_byte == pytest.approx(2e9 / (2 << 20))
    text = results_text([found])
    assert "0.50 [0.50, 0.50]" in text
    assert "ringfence over: ringfence-unsealed 2.00 [2.00, 2.00]" in text
    assert json.loads(json.dumps(found.as_json()))["variants"][2]["ratio"]["median"] == 0.5


def test_memory_is_that_of_the_worst_worker_and_nothing_is_left_out() -> None:
    mib = 1 << 20
    ranks = [
        {
            "start": 100 * mib,
            "warm": 110 * mib,
            "peak": 150 * mib,
            "tensor": 25 * mib,
            "links": 2,
            "socket_buffers": mib,
        },
        {
            "start": 100 * mib,
            "warm": 104 * mib,
            "peak": 131 * mib,
            "tensor": 25 * mib,
            "links": 2,
            "socket_buffers": mib,
        },
    ]
    rounds = [{f"rank {rank}": each for rank, each in enumerate(ranks)}]
    found = memory_use.result(Measured({"variants": ["ringfence"], "size": 25 * mib, "workers": 2}, rounds))
    assert (found.beyond, found.per_link, found.made) == (15 * mib, 7.5 * mib, 10 * mib)
    assert re.search(r"15.0 MiB +7.5 MiB +10.0 MiB", memory_use.results_text([found]))


PEAK = """
from ringfence_lab.bench.kernel_counters import peak_bytes, reset_peak, resident_bytes
reset_peak()
before = peak_bytes()
block = bytearray(b"x" * (64 << 20))
assert peak_bytes() - before >= 63 << 20
del block
reset_peak()
assert peak_bytes() - resident_bytes() < 8 << 20
"""


@pytest.mark.processes
def test_the_peak_starts_again_from_what_is_resident() -> None:
    """In a process of its own: this one may give back meanwhile what earlier tests have left."""
    subprocess.run([sys.executable, "-c", PEAK], check=True, timeout=HANG)


# -- samples --------------------------------------------------------------------------------------------------------


def test_samples_are_found_again_by_exactly_their_settings(tmp_path: Path) -> None:
    first = Samples(tmp_path)
    first.begin({"cpu": "x"}, "ringfence bench", "today")
    first.add(CASE, {"gloo-a": sample(1)})
    first.add(CASE, {"gloo-a": sample(2)})
    again = Samples(tmp_path)
    assert [samples["gloo-a"]["seconds"] for samples in again.rounds(dict(reversed(CASE.items())))] == [1, 2]
    for name, other in {"size": 8, "workers": 4, "machine": "n", "rate": "1gbit", "busy": True}.items():
        assert again.rounds({**CASE, name: other}) == []


def test_samples_of_the_two_data_planes_are_never_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RINGFENCE_DATAPLANE", raising=False)
    compiled = machine.facts()
    monkeypatch.setenv("RINGFENCE_DATAPLANE", "python")
    slow = machine.facts()
    assert slow == {**compiled, "data_plane": "python"}  # the compiled one goes without saying
    assert machine.digest(slow) != machine.digest(compiled)
    assert machine_text(slow).split() == [*f"{machine_text(compiled)}; data plane in Python".split()]


@pytest.mark.processes
def test_facts_need_no_torch() -> None:
    """A study that only says that it is in use, or what it would measure, should not take seconds to say it."""
    program = "import sys; from ringfence_lab.bench import machine; machine.facts(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=HANG).returncode == 0


def test_a_line_that_was_cut_off_is_dropped_and_the_rest_is_kept(tmp_path: Path) -> None:
    Samples(tmp_path).add(CASE, {"gloo-a": sample(1)})
    with (tmp_path / FILE).open("a") as file:
        file.write('{"run": "x", "case": {')
    cut = Samples(tmp_path)
    assert len(cut.rounds(CASE)) == 1
    cut.add(CASE, {"gloo-a": sample(2)})
    assert len(Samples(tmp_path).rounds(CASE)) == 2


def test_a_file_that_holds_no_samples_is_refused(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("hello\n")
    with pytest.raises(ConfigurationError, match="line 1"):
        Samples(tmp_path)


def test_samples_that_cannot_be_written_are_refused_with_their_file(tmp_path: Path) -> None:
    samples = Samples(tmp_path / "results")
    (tmp_path / "results").rmdir()
    with pytest.raises(ConfigurationError, match=r"cannot write .*samples\.jsonl: No such file .* before is kept"):
        samples.begin({}, "ringfence bench", "2026-11-15")


# -- the bytes of stages --------------------------------------------------------------------------------------------


def moved(operation: str, size: int, ranks: int) -> tuple[int, ...]:
    """Bytes that are sent, opened, sealed and reduced, over all ranks."""
    found = [count(Collective[operation.upper()], ranks, size, rank=rank) for rank in range(ranks)]
    columns = [(each.sealed, each.opened, each.encrypted, each.reduced) for each in found]
    return tuple(map(sum, zip(*columns, strict=True)))


@pytest.mark.parametrize("operation", names.OPERATIONS)
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_large_collectives_move_the_necessary_bytes_and_no_more(operation: str, ranks: int) -> None:
    size = 24 << 20
    sent, opened, sealed, _ = moved(operation, size, ranks)
    assert sent == opened == names.necessary_bytes(operation, size, ranks)
    assert sealed <= sent


def test_what_is_forwarded_is_sealed_once() -> None:
    size = 24 << 20
    assert moved("all_gather", size, 4)[2] == size
    assert moved("all_reduce", size, 4)[2:] == (3 * size + size, 3 * size)


# -- words and numbers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"), [("4KiB", 4096), ("25MiB", 25 << 20), ("0.5 KiB", 512), ("8", 8), ("1GiB", 1 << 30)]
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert bytes_of(text) == size


@pytest.mark.parametrize("text", ["", "0", "3", "4KB", "-4KiB", "4 kib", "1e3"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="such as 4KiB"):
        bytes_of(text)


@pytest.mark.parametrize(("size", "text"), [(100, "100 B"), (4096, "4 KiB"), (25 << 20, "25 MiB"), (1 << 30, "1 GiB")])
def test_sizes_are_written(size: int, text: str) -> None:
    assert size_text(size) == text


@pytest.mark.parametrize(("seconds", "text"), [(12e-6, "12 µs"), (0.0035, "3.50 ms"), (1.5, "1.500 s")])
def test_times_are_written(seconds: float, text: str) -> None:
    assert time_text(seconds) == text


def test_rates_and_their_bursts() -> None:
    assert bits_per_second("2.5gbit") == 2_500_000_000
    assert burst_bytes("10gbit") == 2_500_000
    assert burst_bytes("100mbit") == 256 << 10  # room for the largest packets
    for wrong in ("1", "gbit", ".gbit", "0gbit", "0.0kbit", "1.2.3gbit", "1gbps", f"{10**400}gbit"):
        with pytest.raises(ConfigurationError):
            bits_per_second(wrong)


def test_progress_is_shown_on_a_terminal_and_nowhere_else() -> None:
    terminal, file = io.StringIO(), io.StringIO()
    for stream in (terminal, file):
        progress = Progress(4, Console(file=stream, force_terminal=stream is terminal, color_system=None, width=80))
        progress.step("one")
        progress.end()
    assert re.search(r"1/4 .* one", terminal.getvalue())
    assert file.getvalue() == ""


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_progress_never_wraps(columns: int) -> None:
    """A second line would stay when the bar is redrawn."""
    terminal = io.StringIO()
    progress = Progress(4, Console(file=terminal, force_terminal=True, color_system=None, width=columns))
    progress.say("x" * 300)
    progress.end()
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue()).replace("\r", "\n").splitlines()
    assert max(map(len, lines)) <= columns
    assert sum("0/4" in line for line in lines) == len([line for line in lines if line.strip()])
