"""What is claimed of a run, and whether its record shows it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ringfence.cli import main
from ringfence.errors import PolicyError
from ringfence.record import claims, log, sessions
from ringfence.record.claims import NOT_SHOWN, REFUTED, SHOWN, Record, Verdict
from ringfence.record.log_file import LogFile
from tests.unit import run_samples as samples
from tests.unit.evidence_samples import Run, bundle_run, snp_run, tdx_run, test_roots

__all__ = ["test_roots"]
pytestmark = pytest.mark.usefixtures("test_roots")


def evaluated(folder: Path, text: str = samples.CLAIMS) -> dict[str, Verdict]:
    found = claims.evaluate(Record.read(folder), claims.read(text.encode(), "claims.toml"))
    return {verdict.claim.partition(":")[0]: verdict for verdict in found}


def states(found: dict[str, Verdict]) -> set[str]:
    return {each.state for each in found.values()}


@pytest.fixture
def logs(tmp_path: Path) -> list[Path]:
    """The logs of the first session, then those of the second, by rank."""
    return samples.write(tmp_path / "record")


def test_all_claims_of_a_run_with_a_kill_and_a_rejoin_are_shown(logs: list[Path]) -> None:
    found = evaluated(logs[0].parent)
    assert states(found) == {SHOWN}, found
    assert len(found) == 10
    assert all(each.reasons for each in found.values())


def test_what_workers_presented_is_kept_by_the_whole_digest_of_their_roster(logs: list[Path]) -> None:
    """The first digits, which are in the names of logs, can be made alike for two sessions."""
    found = Record.read(logs[0].parent)
    rosters = [session.roster for session in found.sessions]
    assert set(found.shown) == {(roster, rank) for roster in rosters for rank in range(3)}
    assert {len(roster) for roster in rosters} == {64}


def test_a_shared_secret_names_nobody(tmp_path: Path) -> None:
    samples.write(tmp_path, samples.sessions_by_secret())
    found = evaluated(tmp_path)
    assert found["what workers presented admits them"].state == NOT_SHOWN
    assert found["what workers presented admits them"].is_met  # nobody has claimed it
    assert found["nobody else was admitted"].state == NOT_SHOWN and not found["nobody else was admitted"].is_met
    assert found["complete"].state == SHOWN


Change = Callable[[list[Path]], Any]


def cut(number: int, signatures: int) -> Change:
    """Cut a log after so many signatures."""

    def change(logs: list[Path]) -> None:
        lines = logs[number].read_bytes().splitlines(keepends=True)
        marked = [at for at, line in enumerate(lines, 1) if b'"kind":"signature"' in line]
        logs[number].write_bytes(b"".join(lines[: marked[signatures - 1]]))

    return change


def remove(*numbers: int) -> Change:
    return lambda logs: [logs[number].unlink() for number in numbers]


def flip(logs: list[Path]) -> None:
    content = bytearray(logs[1].read_bytes())
    content[len(content) // 2] ^= 1
    logs[1].write_bytes(content)


def append_run(logs: list[Path]) -> None:
    """Add the log of another run."""
    other = samples.write(logs[0].parent.parent / "other", samples.sessions_by_secret())
    (logs[0].parent / other[3].name).write_bytes(other[3].read_bytes())
    for blob in (other[3].parent / "blobs").iterdir():
        (logs[0].parent / "blobs" / blob.name).write_bytes(blob.read_bytes())


@pytest.mark.promise("`ringfence audit --claims` names each log, session or claim that a record does not show.")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (cut(0, 2), "rank 0: its log has no end, and no other worker recorded its loss"),
        (cut(2, 2), "began after a log of rank 2 that is missing or was cut"),
        (cut(3, 3), "the last session did not end well"),
        (remove(2), "rank 2: its log is missing"),
        (remove(0, 1, 2), "began after a log of rank 0 that is missing or was cut"),
        (remove(3, 4, 5), "the last session did not end well, so another may have followed"),
        (flip, "is refused: entry"),
        (append_run, "its log is missing"),
    ],
)
def test_what_is_left_out_is_named(logs: list[Path], change: Change, reason: str) -> None:
    change(logs)
    found = evaluated(logs[0].parent)["complete"]
    assert found.state == REFUTED
    assert any(reason in each for each in found.reasons), found.reasons


def test_a_worker_whose_log_is_missing_is_not_shown_to_have_run_this_code(logs: list[Path]) -> None:
    logs[4].unlink()
    found = evaluated(logs[0].parent)
    for claim in (
        "nobody else was admitted",
        "only this code ran",
        "nothing left a machine unsealed",
        "the run is run-7",
    ):
        assert found[claim].state == NOT_SHOWN, claim
        assert "rank 1: its log is missing" in found[claim].reasons[0]


WORK = (
    "complete",
    "only this code ran",
    "only these data were used",
    "nothing left a machine unsealed",
    "these checkpoints descend from the run",
)
NOT_TAKEN_UP = "rank 2: this worker was lost, and no later log took up its log"
Lines = Callable[..., samples.Entries]


class TestCutLog:
    """A log that may have been cut does not show what its worker did."""

    @pytest.fixture
    def patch(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[Lines], None]:
        """Change what workers record: the function gets the session, the rank and the entries."""
        honest = samples.lines

        def apply(change: Lines) -> None:
            def lines(run: Run, rank: int, blobs: Any, first: bool) -> samples.Entries:
                return change(first, rank, honest(run, rank, blobs, first))

            monkeypatch.setattr(samples, "lines", lines)

        return apply

    @staticmethod
    def write(folder: Path, is_taken_up: bool) -> list[Path]:
        """Write a run in which the folder of the lost worker's replacement has its log, or is empty."""
        first, second = samples.sessions()
        logs, heads = samples.write_session(folder, first, is_first=True)
        if not is_taken_up:
            heads[samples.KILLED] = ""
        return logs + samples.write_session(folder, second, heads)[0]

    @pytest.mark.promise("A log of a run that was changed is refused, with the entry named, or says less than before.")
    @pytest.mark.parametrize("is_taken_up", [False, True])
    def test_no_cut_makes_a_refuted_claim_shown(
        self, tmp_path: Path, patch: Callable[[Lines], None], is_taken_up: bool
    ) -> None:
        def lie(first: bool, rank: int, entries: samples.Entries) -> samples.Entries:
            if not first or rank != samples.KILLED:
                return entries
            changed: dict[str, dict[str, Any]] = {
                "code": {"digest": "ee" * 32},
                "data": {"root": "ee" * 32},
                "peers": {"peers": [[0, 0, 0, 5, 5, 0, 0]]},
            }
            found = [(kind, {**fields, **changed.get(kind, {})}) for kind, fields in entries]
            return [*found, ("checkpoint", {"action": "read", "anchor": "ee" * 32})]

        patch(lie)
        logs = self.write(tmp_path, is_taken_up)
        found = evaluated(tmp_path)
        assert {found[claim].state for claim in WORK[1:]} == {REFUTED}
        content = logs[2].read_bytes()
        signatures = content.count(b'"kind":"signature"')
        for kept in range(1, signatures):
            cut(2, kept)(logs)
            found = evaluated(tmp_path)
            assert found["complete"].state == (REFUTED if is_taken_up else NOT_SHOWN)
            assert SHOWN not in {found[claim].state for claim in WORK}, kept
            undecided = [found[claim] for claim in WORK if found[claim].state == NOT_SHOWN]
            assert all(NOT_TAKEN_UP in each.reasons[0] for each in undecided), undecided
            logs[2].write_bytes(content)
        logs[2].unlink()
        found = evaluated(tmp_path)
        assert {found[claim].state for claim in WORK[1:3]} == {NOT_SHOWN}

    def test_a_lost_worker_whose_log_no_later_one_names_leaves_its_work_undecided(self, tmp_path: Path) -> None:
        self.write(tmp_path, is_taken_up=False)
        found = evaluated(tmp_path)
        assert {claim for claim, each in found.items() if each.state != SHOWN} == set(WORK)
        for claim in WORK:
            assert found[claim].state == NOT_SHOWN and len(found[claim].reasons) == 1
            assert NOT_TAKEN_UP in found[claim].reasons[0]

    def test_a_log_of_the_same_session_does_not_take_up_another(
        self, tmp_path: Path, patch: Callable[[Lines], None]
    ) -> None:
        def name(first: bool, rank: int, entries: samples.Entries) -> samples.Entries:
            named = ("rejoined", {"generation": "3", "rank": samples.KILLED, "before": head})
            return [named, *entries] if first and rank == 0 else entries

        head = log.read(self.write(tmp_path / "first", is_taken_up=False)[2].open("rb")).head.hex()
        patch(name)
        self.write(tmp_path / "second", is_taken_up=False)
        assert evaluated(tmp_path / "second")["complete"].state != SHOWN

    @pytest.mark.parametrize("change", [cut(1, 4), cut(4, 5), remove(1), remove(0, 1, 2)])
    def test_a_log_without_an_end_shows_no_claim_of_work(self, logs: list[Path], change: Change) -> None:
        change(logs)
        found = evaluated(logs[0].parent)
        assert {found[claim].state for claim in WORK} <= {NOT_SHOWN, REFUTED}, found
        assert found["only this code ran"].state == NOT_SHOWN

    @pytest.mark.parametrize("rank", [1, samples.KILLED])
    def test_a_log_without_its_code_does_not_show_which_code_ran(
        self, tmp_path: Path, patch: Callable[[Lines], None], rank: int
    ) -> None:
        patch(
            lambda first, each, entries: [entry for entry in entries if each != rank or not first or entry[0] != "code"]
        )
        self.write(tmp_path, is_taken_up=True)
        found = evaluated(tmp_path)
        assert {claim for claim, each in found.items() if each.state != SHOWN} == {"only this code ran"}
        assert found["only this code ran"].reasons[0].endswith(f"rank {rank}: its log has no entry of its code")

    @pytest.mark.parametrize(
        ("moved", "reason"),
        [(1, "rank 1: its log has no counts of bytes at its end"), (samples.KILLED, "")],
        ids=["a worker that stayed", "the lost one"],
    )
    def test_counts_are_those_of_the_end(
        self, tmp_path: Path, patch: Callable[[Lines], None], moved: int, reason: str
    ) -> None:
        """Those of a lost worker's last minute are missing, and its peers on other machines have them."""

        def early(first: bool, rank: int, entries: samples.Entries) -> samples.Entries:
            counts = [entry for entry in entries if entry[0] == "peers"]
            others = [entry for entry in entries if entry[0] != "peers"]
            return [*counts, *others] if first and rank == moved else entries

        patch(early)
        self.write(tmp_path, is_taken_up=True)
        found = evaluated(tmp_path)
        assert {each.state for claim, each in found.items() if claim != WORK[3]} == {SHOWN}
        assert found[WORK[3]].state == (NOT_SHOWN if reason else SHOWN)
        assert reason in found[WORK[3]].reasons[0]

    def test_two_lost_workers_on_two_machines_have_no_counts_of_each_other(
        self, tmp_path: Path, patch: Callable[[Lines], None]
    ) -> None:
        def lose(first: bool, rank: int, entries: samples.Entries) -> samples.Entries:
            if first and rank == 0:
                entries = [entry for entry in entries if entry[0] != "end"]
            return (
                [*entries[:-1], ("lost", {"worker": 0, "text": ""}), *entries[-1:]] if first and rank == 1 else entries
            )

        patch(lose)
        self.write(tmp_path, is_taken_up=True)
        found = evaluated(tmp_path)
        assert {each.state for claim, each in found.items() if claim != WORK[3]} == {SHOWN}, found
        assert found[WORK[3]].state == NOT_SHOWN
        assert "rank 0: neither it nor rank 2, on another machine, counted until the end" in found[WORK[3]].reasons[0]


def test_a_file_that_vanishes_during_an_audit_refuses_one_proof(
    logs: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be verified of one worker does not end the audit of the others."""
    honest = sessions.sessions_of

    def and_remove(states: Any) -> Any:
        with logs[1].open("rb") as stream:
            part = log.read(stream).begin.fields["presentation"]["parts"][0]
        (logs[1].parent / "blobs" / part["proof"]).unlink()
        return honest(states)

    monkeypatch.setattr("ringfence.record.claims.sessions_of", and_remove)
    found = evaluated(logs[0].parent)["what workers presented admits them"]
    assert found.state == REFUTED and any("rank 1: proof: the file" in each for each in found.reasons)


@pytest.mark.processes  # a large audit starts some
def test_a_fork_of_the_run_is_named(tmp_path: Path) -> None:
    """Two sessions that both follow the first: one of them was meant to stay unseen."""
    first, second = samples.sessions()
    _, heads = samples.write_session(tmp_path, first, is_first=True)
    for run in (second, replace(second, name="third")):
        samples.write_session(tmp_path, run, heads)
    found = evaluated(tmp_path)["complete"]
    assert found.state == REFUTED
    assert "follows the same log: the run was forked" in found.reasons[0]


@pytest.mark.parametrize(
    ("changed", "claim", "state", "reason"),
    [
        ('run = "run-8"', "the run is run-8", REFUTED, "its run is run-7"),
        ('workers = "spiffe://example.org/worker/0"', "nobody else was admitted", REFUTED, "worker/1 was admitted"),
        (f'scripts = "{"00" * 32}"', "only this code ran", REFUTED, f"train.py with the digest {samples.SCRIPT}"),
        (f'packages = "{"00" * 32}"', "only this code ran", REFUTED, "its packages have the digest"),
        (f'data = "{"00" * 32}"', "only these data were used", REFUTED, f"data with the root {samples.ROOT}"),
        (f'checkpoints = "{"00" * 32}"', "these checkpoints descend from the run", REFUTED, "was written"),
        ('[attested]\nkinds = "tdx"', "all workers are attested", NOT_SHOWN, "no evidence of kind tdx"),
    ],
)
def test_a_claim_that_does_not_hold(logs: list[Path], changed: str, claim: str, state: str, reason: str) -> None:
    found = evaluated(logs[0].parent, changed)[claim]
    assert found.state == state
    assert reason in found.reasons[0]


def test_a_checkpoint_that_the_run_did_not_write_is_named_unless_it_is_claimed_as_the_beginning(tmp_path: Path) -> None:
    """A run of its own, which began with a checkpoint of another run."""
    _, second = samples.sessions()
    samples.write_session(tmp_path / "record", second)
    claim = f'checkpoints = "{samples.LATER}"\n'
    found = evaluated(tmp_path / "record", claim)["these checkpoints descend from the run"]
    assert found.state == REFUTED and f"it read {samples.MODEL}" in found.reasons[0]
    claim += f'started_from = "{samples.MODEL}"\n'
    assert evaluated(tmp_path / "record", claim)["these checkpoints descend from the run"].state == SHOWN


def rewritten(path: Path, kind: str, fields: dict[str, Any], key: Any) -> None:
    """Let the worker itself, which has the key, record something else."""
    with path.open("rb") as stream:
        entries = log.read(stream).entries
    path.unlink()
    file = LogFile(path.parent, path.name, key)
    for entry in entries:
        file.append(entry.kind, fields if entry.kind == kind else entry.fields)
    file.sign()
    file.close()


def test_ends_that_disagree_are_named(logs: list[Path]) -> None:
    _, run = samples.sessions()
    points = samples.points(run, 1)
    points[0][-1] = "ff" * 32
    rewritten(logs[4], "passed", {"points": points}, run.session.record_key(1))
    found = evaluated(logs[0].parent)["both ends of every connection agree on what passed"]
    assert found.state == REFUTED
    assert "rank 1 sent and rank 0 received other frames, within the first 1 of channel 0" in found.reasons[0]


def test_points_that_contradict_each_other_are_refused(logs: list[Path]) -> None:
    _, run = samples.sessions()
    points = samples.points(run, 1)
    points.append([*points[0][:-1], "ff" * 32])
    rewritten(logs[4], "passed", {"points": points}, run.session.record_key(1))
    found = evaluated(logs[0].parent)["both ends of every connection agree on what passed"]
    assert found.state == REFUTED and "two digests" in found.reasons[0]


def test_a_head_before_that_no_log_has_is_named_though_the_list_has_another(logs: list[Path]) -> None:
    _, run = samples.sessions()
    with logs[4].open("rb") as stream:
        fields = log.read(stream).begin.fields
    rewritten(logs[4], "begin", {**fields, "before": "ff" * 32}, run.session.record_key(1))
    found = evaluated(logs[0].parent)["complete"]
    assert found.state == REFUTED
    assert any("its head is ffffffffffffffff" in each for each in found.reasons), found.reasons


def test_missing_heads_are_counted_without_a_list_too(logs: list[Path]) -> None:
    _, run = samples.sessions()
    rewritten(logs[4], "heads", {"list": "", "missing": 0}, run.session.record_key(1))
    found = evaluated(logs[0].parent)["every log is genuine"]
    assert found.state == REFUTED and logs[4].name in found.reasons[0]


@pytest.mark.parametrize("later", [[], [[2, 0, 0, 0, 0, 0, 0]]])
def test_bytes_that_were_shared_with_another_machine_are_named(logs: list[Path], later: list[list[int]]) -> None:
    """Also if a later entry counts fewer. Counts of peers are no entries of a log that was read, so they are written anew."""
    _, run = samples.sessions()
    path = logs[4]
    with path.open("rb") as stream:
        entries = log.read(stream).entries
    path.unlink()
    file = LogFile(path.parent, path.name, run.session.record_key(1))
    for entry in entries[:-1]:
        file.append(entry.kind, entry.fields)
    for peers in ([[0, 0, 0, 5, 5, 0, 0], [2, 0, 0, 3, 4, 0, 0]], later):
        file.append("peers", {"peers": peers})
        file.sign()
    file.append(entries[-1].kind, entries[-1].fields)
    file.sign()
    file.close()
    found = evaluated(path.parent, "sealed = true")["nothing left a machine unsealed"]
    assert found.state == REFUTED
    assert "it exchanged 7 bytes unsealed with rank 2, which is on another machine" in found.reasons[0]


def test_attested_workers(tmp_path: Path) -> None:
    runs = {"snp": snp_run(), "tdx": bundle_run(samples.SITE)}
    for kind, run in runs.items():
        samples.write_session(tmp_path / kind, run)
        claim = f'[attested]\nkinds = ["{kind}", "nvidia"]\n'
        assert evaluated(tmp_path / kind, claim)["all workers are attested"].state == SHOWN
        name = "mrtd" if kind == "tdx" else "measurement"
        found = evaluated(tmp_path / kind, f'{claim}[attested.measurements]\n{name} = "00"')
        assert found["all workers are attested"].state == REFUTED
        assert f"{kind}: m" in found["all workers are attested"].reasons[0]


@pytest.mark.parametrize(("kind", "make"), [("snp", snp_run), ("tdx", tdx_run)], ids=["SEV-SNP", "TDX"])
def test_every_claim_of_attested_workers_with_a_kill_and_a_rejoin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, make: Callable[[], Run]
) -> None:
    """By the command itself, in this process, which trusts the root of the test's hardware."""
    first = replace(make(), hosts=samples.HOSTS)
    samples.write(tmp_path / "record", (first, replace(first, name="second")))
    named = "\n".join(line for line in samples.CLAIMS.splitlines() if not line.startswith("workers"))
    (tmp_path / "claims.toml").write_text(f'{named}\n[attested]\nkinds = ["{kind}"]\n')
    words = ["audit", str(tmp_path / "record"), "--claims", str(tmp_path / "claims.toml"), "--json"]
    assert main([*words, "--page", str(tmp_path / "audit.html")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {each["state"] for each in found["verdicts"]} == {"shown"} and len(found["verdicts"]) == 10
    assert [log["ended"] for log in found["logs"]].count("left") == 3
    assert "<h1>All claims are shown</h1>" in (tmp_path / "audit.html").read_text()
    (tmp_path / "claims.toml").write_text(f'{named}\n[attested]\nkinds = ["nvidia"]\n')
    assert main(words) == 1


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("complet = true", "complet"),
        ("[attested]", "kinds"),
        (f'started_from = "{"00" * 32}"', "name those as well"),
        ("sealed = 1", "sealed must be"),
        ("[", "is not TOML"),
    ],
)
def test_a_claim_that_is_misspelt_is_an_error(text: str, why: str) -> None:
    with pytest.raises(PolicyError, match=why):
        claims.read(text.encode(), "claims.toml")
