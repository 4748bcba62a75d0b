"""`ringfence bench` as a user runs it: a table, JSON, going on where it was stopped, and nothing left behind."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import ringfence
from tests.limits import HANG

QUICK = ("bench", "collectives", "--workers", "2", "--sizes", "4KiB", "--variants", "ringfence")


def samples(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def test_a_short_run_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    """Two rounds, then four: the first two are not measured again; then nothing is."""
    first = ringfence(*QUICK, "--rounds", "2", "--results", str(tmp_path))
    assert first.returncode == 0, first.stderr
    assert re.search(r"^ringfence +[\d.]+ (µs|ms) +[\d.]+ \[[\d.]+, [\d.]+\] +[\d.]+ ns/B", first.stdout, re.M)
    assert re.search(r"Gloo / Gloo\s±[\d.]+$", first.stdout, re.M)
    assert "all_reduce, 4 KiB, float32, 2 workers, loopback, TCP, 2 rounds" in first.stdout
    assert first.stderr == ""  # no progress bar where nobody watches
    start, *rounds = samples(tmp_path)
    assert start["machine"]["cpu"]
    assert start["machine"]["versions"]["torch"]
    assert start["machine"]["gloo"]["threads"] >= 1
    assert start["command"] == f"ringfence {' '.join(QUICK)} --rounds 2"  # without a path of this machine
    assert [line["round"] for line in rounds] == [0, 1]

    more = ringfence(*QUICK, "--rounds", "4", "--results", str(tmp_path), "--json")
    assert more.returncode == 0, more.stderr
    (result,) = json.loads(more.stdout)["results"]
    assert result["rounds"] == 4
    assert [line["variant"] for line in result["variants"]] == ["gloo-a", "gloo-b", "ringfence"]
    kept = samples(tmp_path)
    assert [line["round"] for line in kept if "round" in line] == [0, 1, 2, 3]
    assert kept[1:3] == rounds

    again = ringfence(*QUICK, "--rounds", "4", "--results", str(tmp_path), "--json")
    assert json.loads(again.stdout)["results"] == [result]
    assert samples(tmp_path) == kept


def test_bytes_between_and_inside_machines_are_those_of_the_schedule(tmp_path: Path) -> None:
    """Three workers on two machines: two of them share one."""
    command = (
        "bench",
        "collectives",
        "--workers",
        "3",
        "--hosts",
        "2",
        "--sizes",
        "4KiB,1MiB",
        "--variants",
        "ringfence",
    )
    done = ringfence(*command, "--rounds", "1", "--results", str(tmp_path))
    assert done.returncode == 0, done.stderr
    said = re.findall(r"ringfence: [\d.]+ [KM]iB sealed, [\d.]+ [KM]iB inside machines", done.stdout)
    assert len(said) == " ".join(done.stdout.split()).count("its schedules say the same") == 2
    again = ringfence(*command, "--rounds", "1", "--results", str(tmp_path), "--json")
    for result in json.loads(again.stdout)["results"]:
        (sealed,) = (line for line in result["variants"] if line["variant"] == "ringfence")
        assert sealed["counted"] == result["predicted"] and sealed["counted"]["local"] > 0
        assert 1 <= sealed["wire_bytes"] / sealed["counted"]["wire"] < 1.1  # the kernel also counts Gloo's barriers


def test_a_profile_shows_shares(tmp_path: Path) -> None:
    done = ringfence(*QUICK, "--rounds", "1", "--results", str(tmp_path), "--profile")
    assert done.returncode == 0, done.stderr
    assert re.search(r"ringfence-profiled: seal \d+%, open \d+%, .*reduce \d+%, send \d+%", done.stdout)


def test_device_tensors_are_compared_with_host_tensors(tmp_path: Path) -> None:
    command = (*QUICK[:-2], "--device", "sim", "--copy-rate", "2,10", "--rounds", "1", "--results", str(tmp_path))
    done = ringfence(*command, "--profile", "--confidential", timeout=HANG)
    assert done.returncode == 0, done.stderr
    shown = " ".join(done.stdout.split())
    for rate in (2, 10):
        assert f"4 KiB, float32, on sim, copies at {rate} GB/s, confidential mode, 2 workers" in shown
    assert re.search(r"host / host ±[\d.]+", shown)
    assert re.search(r"^ringfence +[\d.]+ (µs|ms) +[\d.]+ \[[\d.]+, [\d.]+\] +[\d.]+ ns/B", done.stdout, re.M)
    assert re.search(r"staging: caller \d+%, fill \d+%, network \d+%, stall \d+%, drain \d+% of", shown)
    assert "each of 1 passes: slot" in shown
    again = json.loads(ringfence(*command, "--profile", "--confidential", "--json").stdout)["results"]
    assert [each["case"]["copy_rate"] for each in again] == [2e9, 10e9]
    for each in again:
        lines = {line["variant"]: line for line in each["variants"]}
        assert list(lines) == ["host-a", "host-b", "ringfence", "ringfence-unsealed", "ringfence-profiled"]
        assert lines["ringfence"]["ratio"]["median"] > 0
        assert "staging" not in lines["ringfence"]
        assert round(lines["ringfence-profiled"]["staging"]["passes"]) == 1  # the last of many calls may not have ended


@pytest.mark.nightly
def test_training_is_measured(tmp_path: Path) -> None:
    command = ("bench", "train", "--models", "gpt2-tiny", "--workers", "2", "--rounds", "1", "--results", str(tmp_path))
    done = ringfence(*command, "--variants", "ringfence", "--bucket-cap-mb", "default,1", timeout=HANG)
    assert done.returncode == 0, done.stderr
    for buckets in ("default buckets", "buckets of 1 MiB"):
        block = done.stdout.split(f"gpt2-tiny, ddp, {buckets}, 2 workers")[1]
        assert re.search(r"^ringfence +[\d.]+ m?s +[\d.]+ \[[\d.]+, [\d.]+\] +[\d.]+ s ", block, re.M)


def test_a_busy_caller_burdens_every_variant_alike(tmp_path: Path) -> None:
    done = ringfence(*QUICK[:-1], "ringfence,tls", "--rounds", "1", "--busy", "--results", str(tmp_path), "--json")
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(done.stdout)["results"]
    assert result["case"]["busy"] is True
    assert [line["variant"] for line in result["variants"]] == ["gloo-a", "gloo-b", "ringfence", "tls"]


@pytest.mark.nightly
def test_single_calls_are_timed_one_by_one() -> None:
    done = ringfence("bench", "latency", "--rounds", "1", "--json", timeout=HANG)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["command"] == "ringfence bench latency" and found["rounds"] == 1
    assert [(each["size"], each["gloo"]["calls"]) for each in found["sizes"]] == [
        (4 << 10, 60), (64 << 10, 60), (1 << 20, 30), (25 << 20, 6)
    ]  # fmt: skip
    for each in found["sizes"]:
        for name in ("gloo", "ringfence"):
            assert 0 < each[name]["median_after_barrier"] <= each[name]["p95_after_barrier"]


@pytest.mark.nightly
def test_memory_beyond_the_tensors_is_measured(tmp_path: Path) -> None:
    """The link's promise is 16 MiB; what a copy of the whole tensor would take is far more."""
    command = ("bench", "memory", "--sizes", "64MiB", "--workers", "2", "--rounds", "1", "--results", str(tmp_path))
    done = ringfence(*command, "--json")
    assert done.returncode == 0, done.stderr
    gloo, sealed = json.loads(done.stdout)["results"]
    assert [gloo["variant"], sealed["variant"]] == ["gloo-b", "ringfence"]
    for each in (gloo, sealed):
        assert each["links"] >= 1
        assert each["beyond"] == pytest.approx(each["per_link"] * each["links"])
    assert 0 < sealed["per_link"] < 16 << 20
    again = ringfence(*command)
    assert "MiB" in again.stdout
    assert len([line for line in samples(tmp_path) if "round" in line]) == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("collectives", "--rate", "1gbit"), "--hosts"),
        (("collectives", "--delay", "10ms"), "add --hosts"),
        (("collectives", "--delay", "10"), "such as 50ms"),
        (("link", "--delay", "1ms", "--jitter", "2ms"), "--jitter must not be longer"),
        (("link", "--loss", "1"), "such as 0.1%"),
        (("train", "--variants", "int8"), "int8"),
        (("collectives", "--workers", "1"), "at least two workers"),
        (("collectives", "--hosts", "4", "--workers", "2"), "one for each host"),
        (("collectives", "--hosts", "2", "--workers", "2", "--rate", "fast"), "1gbit"),
        (("collectives", "--busy", "--ops", "broadcast"), "all_reduce"),
        (("collectives", "--sizes", "4KB"), "25MiB"),
        (("collectives", "--variants", "nccl"), "none of gloo-a"),
        (("train", "--bucket-cap-mb", "25,none"), "positive number"),
        (("memory", "--workers", "0"), "not a number from 1"),
        (("memory", "--workers", "1"), "two workers"),
        (("train", "--strategy", "fsdp2", "--variants", "tls"), "process groups"),
        (("collectives", "--copy-rate", "2"), "--device sim"),
        (("collectives", "--confidential"), "--device sim"),
        (("collectives", "--device", "sim", "--copy-rate", "fast"), "'fast' is no positive number"),
        (("collectives", "--device", "cuda", "--copy-rate", "2"), "--device sim"),
        (("collectives", "--device", "sim", "--variants", "nccl"), "nccl does not know tensors on sim"),
        (("collectives", "--device", "sim", "--variants", "tls"), "'tls' is none of host-a"),
        (("collectives", "--device", "sim", "--busy"), "leave out --device"),
        (("collectives", "--device", "cuda", "--workers", "2", "--sizes", "4KiB"), "torch has no accelerator"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_a_reason(
    arguments: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    done = ringfence("bench", *arguments, folder=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr


def namespaces(process: subprocess.Popen[str]) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout
    return [name for name in listed.split() if name.startswith(f"rfb{process.pid}-")]


def read_until(terminal: int, wanted: str) -> str:
    """What a terminal shows until it shows this."""
    shown = ""
    while wanted not in shown:
        shown += os.read(terminal, 4096).decode()
    return shown


@pytest.mark.nightly
def test_a_long_link_is_measured_and_used(tmp_path: Path) -> None:
    shown = ringfence("bench", "link", "--rate", "1gbit", "--delay", "5ms", "--json", timeout=HANG)
    assert shown.returncode == 0, shown.stderr
    found = json.loads(shown.stdout)
    assert found["set"] == {"delay": 0.005, "jitter": 0.0, "loss": 0.0, "rate": 10**9}
    assert found["measured"]["delay"] >= 0.005 and 0 < found["measured"]["rate"] < 1.05e9
    command = ("bench", "collectives", "--workers", "2", "--sizes", "64KiB", "--variants", "ringfence,int8")
    options = ("--hosts", "2", "--delay", "5ms", "--jitter", "1ms", "--loss", "0.1%", "--rounds", "1")
    done = ringfence(*command, *options, "--results", str(tmp_path), timeout=HANG)
    assert done.returncode == 0, done.stderr
    assert "2 hosts, 5 ms ± 1 ms, loss 0.1 %" in " ".join(done.stdout.split())
    assert re.search(r"int8: [\d.]+ KiB sealed", done.stdout)
    (measured,) = samples(tmp_path)[1:]
    assert measured["case"]["link"] == {"delay": 0.005, "jitter": 0.001, "loss": 0.001}
    assert measured["samples"]["int8"]["seconds"] >= 2 * 0.004  # two exchanges, one after the other


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "terminated"])
def test_interrupted_between_limited_hosts_it_leaves_its_samples_and_nothing_else(tmp_path: Path, ending: int) -> None:
    terminal, theirs = pty.openpty()
    command = [sys.executable, "-m", "ringfence.cli", *QUICK, "--hosts", "2", "--rate", "1gbit"]
    process = subprocess.Popen(
        [*command, "--rounds", "100000", "--results", str(tmp_path)], stderr=theirs, stdout=subprocess.PIPE, text=True
    )
    os.close(theirs)
    try:
        read_until(terminal, " 3/100000")
        assert len(namespaces(process)) == 3  # two hosts and the bridge
    finally:
        process.send_signal(ending)
        process.communicate(timeout=HANG)
        os.close(terminal)
    assert process.returncode == 130
    assert namespaces(process) == []
    rounds = samples(tmp_path)[1:]
    assert len(rounds) >= 3
    assert rounds[0]["case"]["rate"] == "1gbit"
    assert rounds[0]["case"]["burst"] == 256 << 10


def test_bounds_name_each_layout_and_what_they_rest_on() -> None:
    done = ringfence("bench", "bounds", "--json", timeout=HANG)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["machine"]["source"] and found["stages"]["busy"]["seal"] > 0
    sealed, shared = (
        next(each for each in found["bounds"] if (each["layout"], each["operation"]) == (layout, "all_reduce"))
        for layout in ("2 x 1", "1 x 4")
    )
    assert sealed["seconds"] > shared["seconds"] > 0 == shared["shares"]["seal"]
