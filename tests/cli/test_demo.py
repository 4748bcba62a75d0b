"""`ringfence demo`: its parts do what they say, and the whole story comes true."""

from __future__ import annotations

import os
import re
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence.cli import demo
from ringfence.cli.demo import capture, viewer
from ringfence.cli.demo.relay import Relay, flip_middle_bit
from ringfence.cli.demo.workers import SENTENCE, DemoError, Workers
from tests.cli.longest_lines import COLUMNS, longest
from tests.integration.test_readme import MARKED, ROOT, marked, run
from tests.limits import HANG

DEMO = (ROOT / "docs" / "tutorials" / "demo.md").read_text()
OUTPUT = re.compile(r"<!-- output of ringfence demo -->\n```text\n(.*?)```\n", re.DOTALL)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the demo prints when it runs as the README and the tutorial say, with a policy of another run around."""
    assert MARKED.findall(DEMO) == [marked("ringfence demo")]
    return run(
        f"export RINGFENCE_POLICY=of/another/run.toml\n{marked('ringfence demo')}", tmp_path_factory.mktemp("user")
    )


@pytest.mark.promise("A flipped bit during training raises on every worker, and the error names the sender.")
def test_all_checks_of_the_demo_pass(told: str) -> None:
    assert told.rstrip().endswith("All checks passed.")
    assert "the sentence can be read" in told  # the search can find it
    assert re.search(r"yes  the sentence is nowhere in [\d,]+ bytes", told)
    words = " ".join(told.split())
    assert re.search(r"worker 0: AbortedError: worker 1 reported AuthenticationError: .*from worker 0", words)
    assert re.search(r"worker 1: AuthenticationError: .*from worker 0", words)
    assert " NO " not in told


def test_the_demo_prints_what_the_tutorial_shows(told: str) -> None:
    assert masked(told) == masked("\n".join(OUTPUT.findall(DEMO)))


def test_the_demo_fits_80_columns(told: str) -> None:
    line = longest(told)
    assert len(line) <= COLUMNS, line


def masked(output: str) -> list[str]:
    """Without what differs from run to run: the dumped bytes, large numbers, what was pending, blank lines."""
    text = re.sub(r"^ *[0-9a-f]{8}  [0-9a-f]{2} .*$", "(dump)", output, flags=re.MULTILINE)
    text = re.sub(r"^(   worker \d: \w+: ).*\n(?: {13}.*\n)*", r"\1(report)\n", text, flags=re.MULTILINE)
    text = re.sub(r"\d[\d,]{2,}", "N", text)
    return [line.rstrip() for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize("step", [b"1. ", b"2. "])
def test_sigterm_leaves_no_files_and_no_workers(tmp_path: Path, step: bytes) -> None:
    """SIGTERM to the command alone, as from a supervisor: no secret on the disk, and no worker."""
    demo = subprocess.Popen(
        [sys.executable, "-m", "ringfence.cli", "demo"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        start_new_session=True,
    )
    with demo:
        assert demo.stdout is not None
        assert any(line.startswith(step) for line in demo.stdout)
        assert list(tmp_path.iterdir())
        demo.terminate()
        _, said = demo.communicate(timeout=HANG)
    assert (demo.returncode, said) == (130, b"")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ProcessLookupError):
        os.killpg(demo.pid, 0)


def test_a_sentence_is_found_and_shown() -> None:
    sighting = viewer.look([b"\0" * 100, b"\0" * 40 + SENTENCE * 2], SENTENCE, lines=2)
    assert sighting.captured == 100 + 40 + 2 * len(SENTENCE)
    assert sighting.times == 2
    assert sighting.dump.splitlines()[0].startswith("00000020  00 00 00 00 00 00 00 00 54 68")
    assert "These ar" in sighting.dump


def test_a_sentence_that_is_not_there_is_not_found() -> None:
    sighting = viewer.look([b"abc", bytes(range(200))], SENTENCE)
    assert sighting.times == 0
    assert sighting.dump.startswith("00000030  30 31")


def test_without_packets_nothing_is_shown() -> None:
    assert viewer.look([], SENTENCE) == viewer.Sighting(0, 0, "")


def packet(payload: bytes, protocol: int = socket.IPPROTO_TCP) -> bytes:
    """An IPv4 packet from 127.0.0.1 port 1 to 127.0.0.2 port 2, padded as a link layer may."""
    tcp = struct.pack(">HHIIBBHHH", 1, 2, 0, 0, 5 << 4, 0, 0, 0, 0)
    length = 20 + len(tcp) + len(payload)
    ip = struct.pack(">BBHHHBBH4s4s", 0x45, 0, length, 0, 0, 64, protocol, 0, b"\x7f\0\0\1", b"\x7f\0\0\2")
    return ip + tcp + payload + b"padding"


def test_the_payload_of_a_packet_is_cut_out_exactly() -> None:
    assert capture.tcp_payload(packet(b"hello")) == (b"\x7f\0\0\1\x7f\0\0\2\0\1\0\2", b"hello")


def test_packets_without_tcp_payload_are_ignored() -> None:
    assert capture.tcp_payload(packet(b"")) is None
    assert capture.tcp_payload(packet(b"hello", socket.IPPROTO_UDP)) is None


@given(st.binary(max_size=80))
def test_any_packet_can_be_parsed(data: bytes) -> None:
    parsed = capture.tcp_payload(data)
    assert parsed is None or parsed[1] in data


@given(st.binary(min_size=1, max_size=50))
def test_exactly_one_bit_is_flipped(data: bytes) -> None:
    changed = flip_middle_bit(data)
    assert sum((a ^ b).bit_count() for a, b in zip(data, changed, strict=True)) == 1


Passage = tuple[Relay, socket.socket, socket.socket]


@pytest.fixture
def passage() -> Iterator[Passage]:
    """A relay, and the two ends that talk through it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        relay = Relay(listener.getsockname())
        dialler = socket.create_connection(relay.address, timeout=HANG)
        worker, _ = listener.accept()
    worker.settimeout(HANG)
    yield relay, dialler, worker
    for end in (dialler, worker, relay):
        end.close()


def test_the_relay_passes_bytes_on_and_keeps_a_copy(passage: Passage) -> None:
    relay, dialler, worker = passage
    dialler.sendall(b"there")
    assert worker.recv(100) == b"there"
    worker.sendall(b"and back")
    assert dialler.recv(100) == b"and back"
    assert sorted(relay.streams()) == [b"and back", b"there"]


def test_the_relay_flips_one_bit_once_and_only_toward_the_worker(
    passage: Passage,
) -> None:
    relay, dialler, worker = passage
    relay.flip_a_bit()
    worker.sendall(b"and back")
    assert dialler.recv(100) == b"and back"
    assert not relay.flipped.is_set()
    dialler.sendall(b"\0\0\0")
    assert worker.recv(100) == b"\0\1\0"
    assert relay.flipped.is_set()
    dialler.sendall(b"\0\0\0")
    assert worker.recv(100) == b"\0\0\0"


def test_the_end_of_a_connection_passes_through_the_relay(
    passage: Passage,
) -> None:
    _, dialler, worker = passage
    dialler.shutdown(socket.SHUT_WR)
    assert worker.recv(100) == b""


def test_without_capture_the_gloo_step_is_skipped_with_a_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.gloo_is_readable(tmp_path, None, private=False)
    assert "skipped: capturing needs root" in capsys.readouterr().out


def test_the_choice_of_the_data_plane_reaches_the_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGFENCE_DATAPLANE", "fast")
    with (
        Workers("ringfence", tmp_path, [{}, {}]) as workers,
        pytest.raises(DemoError, match="RINGFENCE_DATAPLANE is 'fast'"),
    ):
        workers.add_up()


def test_a_worker_that_ends_early_is_reported_with_its_last_line(tmp_path: Path) -> None:
    with Workers("no-such-backend", tmp_path, [{}]) as workers, pytest.raises(DemoError, match="no-such-backend"):
        workers.add_up()
