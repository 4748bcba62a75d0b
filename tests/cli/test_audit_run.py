"""`ringfence audit FOLDER`: the logs of a run, printed, as JSON and as a page."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from ringfence.record.json_object import Json
from ringfence.record.log_file import Blobs, open_folder
from tests.cli.command import installation_without, ringfence, ringfence_here
from tests.unit import run_samples as samples
from tests.unit.log_samples import Session, read, signed_again

SHOWN = """\
What no record can show:
  - A log shows that the process that was admitted as its worker wrote these
    entries in this order, and that nobody has changed them since. What they say
    is that worker's word: it is worth what its evidence says of the code that
    ran.
  - A holder of all workers' keys, or an owner of all machines who presents no
    evidence of them, can write any record.
  - A worker is verified by its parent in the tree of the join. A parent that
    lies may have shown its own hardware.
  - That both ends of a connection agree says how much passed, in which order
    and between whom, not what it was.
  - The last session of all could be left out unseen, unless a checkpoint that
    it wrote is among the claims. Times are those of the workers' clocks.

SHOWN: every log is genuine
  6 logs of 2 sessions

SHOWN: what workers presented admits them
  6 proofs were verified again, as of the time of the run

SHOWN: both ends of every connection agree on what passed
  8 directions of connections were recorded by both ends, of which 0 go on at
  one end only, as after a loss; 4 were recorded by one end

REFUTED: complete: no worker's log and no session is missing
  session SESSION, rank 0: its log has no end, and no other worker recorded its
  loss
  session SESSION, rank 0: the last session did not end well, so another may
  have followed

NAME-0.jsonl: cut: its worker did not record the end of the session; 0 bytes
without a signature were cut
  run           run-7
  generation    3
  rank          0
  roster        ROSTER
  policy        POLICY
  began         TIME
  last          TIME
  presented     certificate, verified: identity spiffe://example.org/worker/0
  entries       8
  head          HEAD
"""


@pytest.fixture
def logs(tmp_path: Path) -> list[Path]:
    (tmp_path / "claims.toml").write_text(samples.CLAIMS)
    return samples.write(tmp_path / "record")


def test_what_is_printed(logs: list[Path], tmp_path: Path) -> None:
    """First what no record shows, then a verdict with its reason for each claim, then each log."""
    logs[3].write_bytes(b"".join(logs[3].read_bytes().splitlines(keepends=True)[:-2]))  # without the end
    (tmp_path / "claims.toml").write_text("complete = true\n")
    done = ringfence_here("audit", "record", "--claims", "claims.toml", folder=tmp_path, COLUMNS="80")
    assert (done.returncode, done.stderr) == (1, "")
    found = read(logs[3].read_bytes())
    name = logs[3].name.removesuffix("-0.jsonl")
    shown = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\+00:00", "TIME", done.stdout)
    for value, word in (("roster", "ROSTER"), ("policy", "POLICY")):
        shown = shown.replace(found.begin.fields[value], word)
    shown = shown.replace(found.head.hex(), "HEAD").replace(f"session {name}", "session SESSION").replace(name, "NAME")
    head, _, after = SHOWN.partition("NAME-0.jsonl")
    assert re.sub(r"\s+", " ", shown).startswith(re.sub(r"\s+", " ", head))
    assert re.sub(r"\s+", " ", f"NAME-0.jsonl{after}") in re.sub(r"\s+", " ", shown)


@pytest.mark.real_start
def test_claims_are_evaluated_without_torch(logs: list[Path], tmp_path: Path) -> None:
    python = installation_without(tmp_path / "environment", "torch")
    words = ("audit", "record", "--claims", "claims.toml", "--page", "audit.html", "--json")
    done = ringfence(*words, folder=tmp_path, python=python)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["passed"] is True
    assert {each["state"] for each in found["verdicts"]} == {"shown"}
    assert [each["state"] for each in found["logs"]].count("complete") == 5  # one worker was killed
    page = (tmp_path / "audit.html").read_text()
    assert "<h1>All claims are shown</h1>" in page
    assert page.index("What no record can show") < page.index("Verdicts") < page.index("Logs")
    assert page.count('class="verdict shown"') == 10


def test_a_shared_secret_is_said_to_convince_nobody(tmp_path: Path) -> None:
    samples.write(tmp_path / "record", samples.sessions_by_secret())
    done = ringfence_here("audit", "record", "--page", "audit.html", folder=tmp_path)
    assert done.returncode == 0
    assert "any member could have signed as any other" in " ".join(done.stdout.split())
    page = (tmp_path / "audit.html").read_text()
    assert "<h1>Nothing in the record is refuted</h1>" in page
    assert "any member could have signed as any other" in page
    assert 'class="verdict not shown"' in page


@pytest.mark.promise("Nothing in a record controls the terminal or the page on which it is shown.")
def test_texts_of_a_record_control_neither_terminal_nor_page(tmp_path: Path) -> None:
    open_folder(tmp_path / "record")
    name = Blobs(tmp_path / "record").put(b"[]")
    code = {"script": "<script>\x1b[31m", "digest": "", "arguments": name, "packages": name}
    for rank in range(2):
        Session(kind=1).write(tmp_path / "record", rank, (("code", code), ("end", {"how": "left", "text": ""})))
    (tmp_path / "claims.toml").write_text(f'scripts = "{"00" * 32}"\n')
    done = ringfence_here("audit", "record", "--claims", "claims.toml", "--page", "audit.html", folder=tmp_path)
    assert "\x1b" not in done.stdout and "<script>?[31m" in done.stdout
    page = (tmp_path / "audit.html").read_text()
    assert "<script>" not in page and "&lt;script&gt;?[31m" in page


def test_a_log_that_is_cut_is_no_reason_to_refuse_it(logs: list[Path], tmp_path: Path) -> None:
    logs[0].write_bytes(logs[0].read_bytes()[:-1])
    done = ringfence_here("audit", "record", "--json", folder=tmp_path)
    assert done.returncode == 0
    found = {each["name"]: each for each in json.loads(done.stdout)["logs"]}[logs[0].name]
    assert found["state"] == "cut"
    assert "did not record the end of the session" in found["reason"]
    assert ringfence_here("audit", "record", "--claims", "claims.toml", folder=tmp_path).returncode == 1


def test_claims_that_are_misspelt_are_exit_code_2(logs: list[Path], tmp_path: Path) -> None:
    (tmp_path / "claims.toml").write_text("complet = true\n")
    done = ringfence_here("audit", "record", "--claims", "claims.toml", folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "complet" in done.stderr


def change_entry(folder: Path, path: Path) -> str:
    path.write_bytes(path.read_bytes().replace(b"was lost", b"is lost!"))
    return "it does not follow the line before it"


def rename(folder: Path, path: Path) -> str:
    path.rename(folder / ("0" * 16 + "-0.jsonl"))
    return "entry 0: its file has the name of another log"


def change_code(folder: Path, path: Path) -> str:
    (entry,) = [each for each in read(path.read_bytes()).entries if each.kind == "code"]
    (folder / "blobs" / entry.fields["arguments"]).write_bytes(b"[]")
    return "was changed: it has another digest"


def lose_roster(folder: Path, path: Path) -> str:
    (folder / "blobs" / read(path.read_bytes()).begin.fields["listings"]).unlink()
    return "entry 0: the file blobs/"


def late(documents: list[Json]) -> None:
    """An entry is of a year that no calendar has."""
    documents[1]["at"] = 1 << 62


def claim_of_no_file(documents: list[Json]) -> None:
    documents[0]["presentation"]["parts"][0]["claims"] = [""]


@pytest.mark.parametrize(
    ("edit", "reason"), [(late, "its time"), (claim_of_no_file, "'' is not the name of a file")], ids=["time", "claims"]
)
def test_a_worker_that_lies_does_not_stop_the_audit(
    logs: list[Path], tmp_path: Path, edit: Callable[[list[Json]], None], reason: str
) -> None:
    key = samples.sessions()[1].session.record_key(1)
    logs[4].write_bytes(signed_again(logs[4].read_bytes(), key, edit))
    words = ("audit", "record", "--claims", "claims.toml", "--page", "audit.html", "--json")
    done = ringfence_here(*words, folder=tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    found = {each["name"]: each for each in json.loads(done.stdout)["logs"]}
    assert found[logs[4].name]["state"] == "refused" and reason in found[logs[4].name]["reason"]
    assert len([each for each in found.values() if each["state"] != "refused"]) == 5


@pytest.mark.promise("A log of a run that was changed is refused, with the entry named, or says less than before.")
@pytest.mark.parametrize(("change", "count"), [(change_entry, 1), (rename, 1), (change_code, 6), (lose_roster, 3)])
def test_a_changed_log_is_refused_and_the_others_are_shown(
    logs: list[Path], tmp_path: Path, change: Callable[[Path, Path], str], count: int
) -> None:
    reason = change(tmp_path / "record", logs[0])
    done = ringfence_here("audit", "record", "--json", folder=tmp_path)
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert found["passed"] is False and found["verdicts"][0]["state"] == "refuted"
    refused = [each["reason"] for each in found["logs"] if each["state"] == "refused"]
    assert len(refused) == count
    assert all(reason in each for each in refused), refused
    assert "refused" in ringfence_here("audit", "record", folder=tmp_path).stdout
