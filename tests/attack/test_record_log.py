"""Somebody without the worker's keys changes a log of a run, puts logs together, or passes one off as another's."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given
from hypothesis import strategies as st

from ringfence.admission.entry import Listing
from ringfence.admission.roster import roster_digest
from ringfence.errors import RecordError
from ringfence.record import agreement, begin, log
from ringfence.record import folder as record_folder
from ringfence.record.agreement import Disagreement, Point
from ringfence.record.json_object import Json
from ringfence.record.log import LogEntry
from ringfence.record.log_file import Blobs, LogFile, log_name, open_folder
from tests.unit.flips import flips
from tests.unit.log_samples import ENTRIES, POLICY_DIGEST, SUITE, TABLE, Session, read, signed_again, spki

SESSION, OTHER, OTHER_RUN = Session(), Session("second"), Session(run="run-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("logs") / "record"
    for session, rank in itertools.product((SESSION, OTHER), (0, 1)):
        session.write(folder, rank)
    return folder


def lines_of(folder: Path, session: Session = SESSION, rank: int = 0) -> list[bytes]:
    return (folder / f"{session.roster.hex()[:16]}-{rank}.jsonl").read_bytes().splitlines(keepends=True)


def refused(lines: list[bytes]) -> str:
    with pytest.raises(RecordError) as error:
        read(b"".join(lines))
    return str(error.value)


def check(content: bytes, genuine: log.Log) -> None:
    """A changed log is refused, or what is left of it is a beginning of the genuine one."""
    try:
        found = read(content)
    except RecordError:
        return
    assert found.entries == genuine.entries[: len(found.entries)]
    assert found.tail
    assert not found.is_complete


@pytest.mark.promise("A log of a run that was changed is refused, with the entry named, or says less than before.")
def test_every_changed_bit_is_refused_or_cut(folder: Path, exhaustive: bool) -> None:
    content = b"".join(lines_of(folder))
    genuine = read(content)
    for changed in flips(content, exhaustive):
        check(changed, genuine)


@pytest.mark.promise("A log of a run that was changed is refused, with the entry named, or says less than before.")
@given(st.data())
def test_any_changed_bytes_are_refused_or_cut(folder: Path, data: st.DataObject) -> None:
    content = b"".join(lines_of(folder))
    at = data.draw(st.integers(0, len(content) - 1))
    end = data.draw(st.integers(at, min(len(content), at + 200)))
    put = data.draw(st.binary(max_size=200))
    if content[at:end] != put and at < len(content):
        changed = content[:at] + put + content[end:]
        if changed[: len(content)] != content:
            check(changed, read(content))


@pytest.mark.promise("A log of a run that was changed is refused, with the entry named, or says less than before.")
def test_dropped_doubled_and_reordered_entries_are_named(folder: Path) -> None:
    lines = lines_of(folder)
    last = len(lines) - 1
    for at in range(last):
        assert f"entry {at}:" in refused(lines[:at] + lines[at + 1 :])
        assert f"entry {at + 1}:" in refused([*lines[: at + 1], *lines[at:]])
        assert f"entry {at}:" in refused([*lines[:at], lines[at + 1], lines[at], *lines[at + 2 :]])
    assert f"entry {last + 1}:" in refused([*lines, lines[last]])


@pytest.mark.promise("A log of a run that was changed is refused, with the entry named, or says less than before.")
def test_entries_of_another_log_are_named(folder: Path) -> None:
    """Of another worker of the session, and of the same worker in another session."""
    lines = lines_of(folder)
    for other in (lines_of(folder, rank=1), lines_of(folder, OTHER)):
        for at in range(len(lines)):
            text = refused([*lines[:at], other[at], *lines[at + 1 :]])
            assert f"entry {at if at else 1}:" in text  # another first line is right, and what follows is not
            if at:
                assert f"entry {at}:" in refused([*lines[:at], *other[at:]])


def written(folder: Path, session: Session, fields: dict[str, object], key_of: int = 0) -> log.Log:
    """A log that an attacker writes with a key of its own and a first line of its choice."""
    open_folder(folder)
    file = LogFile(folder, "forged", session.record_key(key_of))
    file.append("begin", fields)
    file.append(*ENTRIES[0])
    file.sign()
    file.close()
    path = folder / "forged"
    content = path.read_bytes()
    path.unlink()
    return read(content)


def test_a_log_with_another_key_than_its_first_line_names_is_refused(tmp_path: Path) -> None:
    open_folder(tmp_path / "record")
    fields = SESSION.begin(0, Blobs(tmp_path / "record"))
    with pytest.raises(RecordError, match="entry 2: its signature is wrong"):
        written(tmp_path / "record", SESSION, fields, key_of=1)


def test_only_the_unsigned_tail_is_lost_without_its_signature(folder: Path) -> None:
    """The time of the last signature is covered by itself, since no line follows."""
    lines = lines_of(folder)
    last = json.loads(lines[-1])
    assert "signature is wrong" in refused([*lines[:-1], log.canonical({**last, "at": last["at"] + 1}) + b"\n"])


class TestFirstLine:
    """Whose log it is: changes by somebody who has a record key, and not the TLS key of the worker."""

    @pytest.fixture
    def blobs(self, tmp_path: Path) -> Blobs:
        open_folder(tmp_path / "record")
        return Blobs(tmp_path / "record")

    def refused(self, fields: dict[str, object], blobs: Blobs) -> str:
        entry = LogEntry("begin", 0, log.FIRST.hex(), 1, fields)
        log.parse(entry.encode())
        with pytest.raises(RecordError) as error:
            begin.verify(entry, blobs)
        return str(error.value)

    def test_the_genuine_one_is_accepted(self, folder: Path) -> None:
        for session, rank in itertools.product((SESSION, OTHER), (0, 1)):
            found = log.read(io.BytesIO(b"".join(lines_of(folder, session, rank))))
            assert begin.verify(found.begin, Blobs(folder)) == session.listings

    @pytest.mark.promise("Only the worker that the roster lists can have written a log in its name.")
    def test_another_key_is_refused(self, blobs: Blobs) -> None:
        """Another worker's record key, another worker's TLS key, an outsider's TLS key."""
        fields = SESSION.begin(0, blobs)
        assert "did not sign the key of this log" in self.refused({**fields, "key": SESSION.public(1).hex()}, blobs)
        for key in (SESSION.tls_key(1), OTHER.tls_key(0)):
            message = begin.certified_bytes(SESSION.entry(0).digest, SESSION.roster, SESSION.public(0))
            signature = key.sign(message, ec.ECDSA(hashes.SHA256()))
            forged = {**fields, "certified": signature.hex()}
            assert "did not sign the key of this log" in self.refused(forged, blobs)
            assert "not that of rank 0" in self.refused({**forged, "tls_key": spki(key).hex()}, blobs)

    @pytest.mark.promise("Only the worker that the roster lists can have written a log in its name.")
    def test_a_signature_of_another_session_is_refused(self, blobs: Blobs) -> None:
        """The same worker, the same keys, another roster; or another entry."""
        fields, larger = SESSION.begin(0, blobs), Session(size=3)
        message = begin.certified_bytes(SESSION.entry(0).digest, larger.roster, SESSION.public(0))
        signature = SESSION.tls_key(0).sign(message, ec.ECDSA(hashes.SHA256()))
        assert "did not sign the key" in self.refused({**fields, "certified": signature.hex()}, blobs)
        message = begin.certified_bytes(larger.entry(0).digest, SESSION.roster, SESSION.public(0))
        signature = SESSION.tls_key(0).sign(message, ec.ECDSA(hashes.SHA256()))
        assert "did not sign the key" in self.refused({**fields, "certified": signature.hex()}, blobs)

    def test_another_roster_is_refused(self, blobs: Blobs) -> None:
        fields, others = SESSION.begin(0, blobs), OTHER.begin(0, blobs)
        for name in ("listings", "policy", "table", "roster"):
            other = {**others, "policy": "00" * 32, "table": blobs.put(b"another table")}
            assert "the roster's digest is not" in self.refused({**fields, name: other[name]}, blobs)
        assert "the roster's digest is not" in self.refused({**fields, "suite": 2}, blobs)
        swapped = {name: others[name] for name in ("listings", "roster")}
        assert "not that of rank 0" in self.refused({**fields, **swapped}, blobs)

    @pytest.mark.parametrize("listings", [Session(size=3).listings[:2], (SESSION.listings[0], OTHER_RUN.listings[1])])
    def test_a_roster_that_no_join_has_is_refused(self, blobs: Blobs, listings: tuple[Listing, ...]) -> None:
        """It lacks the third of three workers, who would be left out unseen; or it lists a worker of another run."""
        roster = roster_digest(POLICY_DIGEST, listings, SUITE, TABLE)
        message = begin.certified_bytes(listings[0].entry.digest, roster, SESSION.public(0))
        signature = SESSION.tls_key(0).sign(message, ec.ECDSA(hashes.SHA256()))
        named = {"listings": blobs.put(begin.encode_listings(listings)), "roster": roster.hex()}
        forged = {**SESSION.begin(0, blobs), **named, "certified": signature.hex()}
        assert "another run or generation, or lacks workers" in self.refused(forged, blobs)

    @pytest.mark.parametrize(
        ("name", "value", "why"),
        [
            ("rank", 1, "not that of rank 1"),
            ("rank", 2, "not the one that wrote"),
            ("rank", -1, "not the one that wrote"),
            ("run", "another", "another run"),
            ("generation", "4", "another run or generation"),
            ("format", 2, "format 2"),
            ("suite", 256, "malformed"),
            ("suite", -1, "malformed"),
            ("tls_key", "zz", "malformed"),
            ("certified", "", "did not sign"),
            ("roster", "ab cd", "malformed"),
            ("policy", "ab", "malformed"),
            ("before", "ab", "malformed"),
            ("versions", {}, "versions lacks"),
            ("listings", "../../etc/passwd", "is not the name of a file"),
        ],
    )
    def test_other_values_are_refused(self, blobs: Blobs, name: str, value: object, why: str) -> None:
        assert why in self.refused({**SESSION.begin(0, blobs), name: value}, blobs)

    @pytest.mark.parametrize(
        "wrong",
        [
            {"policy_files": {"policy.toml": 7}},
            {"policy_files": {"policy.toml": ["ab"]}},
            {"policy_files": {"policy.toml": "../secret"}},
            {"presentation": {"parts": 7}},
            {"presentation": {"kind": 1, "at": 1, "preimage": "", "digest": "", "parts": [7]}},
            {"presentation": {"kind": 1, "at": 1, "preimage": "", "digest": "", "parts": [{"proof": ""}]}},
            {
                "presentation": {
                    "kind": 1,
                    "at": 1,
                    "preimage": "",
                    "digest": "",
                    "parts": [{"kind": 1, "digest": "", "claims": [7], "proof": ""}],
                }
            },
        ],
    )
    def test_a_member_that_writes_nonsense_is_refused(self, tmp_path: Path, wrong: dict[str, object]) -> None:
        """A worker can sign anything with its own key: an audit must not end in an error of its own."""
        open_folder(tmp_path / "record")
        fields = {**SESSION.begin(0, Blobs(tmp_path / "record")), **wrong}
        file = LogFile(tmp_path / "record", log_name(SESSION.roster, 0), SESSION.record_key(0))
        file.append("begin", fields)
        file.sign()
        file.close()
        (found,) = record_folder.audit(tmp_path / "record")
        assert found.state == record_folder.REFUSED and "entry 0" in found.reason

    def test_malformed_listings_are_refused(self, blobs: Blobs) -> None:
        good = begin.encode_listings(SESSION.listings)
        for bad in (b"", bytes(4), b"\xff" * 4, good[:-1], good + b"\0"):
            text = self.refused({**SESSION.begin(0, blobs), "listings": blobs.put(bad)}, blobs)
            assert "malformed" in text

    def test_a_key_that_is_not_of_p256_is_refused(self, blobs: Blobs) -> None:
        for tls_key in (b"", b"no key", SESSION.public(0)):
            digest = hashlib.sha256(tls_key).digest()
            entry = SESSION.entry(0)
            object.__setattr__(entry, "tls_key_digest", digest)
            with pytest.raises(RecordError, match="did not sign"):
                begin.check_key(entry, SESSION.roster, SESSION.public(0), tls_key, b"")


class TestAWorkerThatLies:
    """It has the key of its own log, so its log is in order: the log of its peer is what contradicts it."""

    TRUE = (Point(1, "c0" * 32, 0, 0, 1, "01" * 32), Point(1, "c0" * 32, 0, 0, 2, "02" * 32))

    def compared(self, folder: Path, *lies: Point) -> agreement.Agreement:
        """Worker 0 sent two frames and says so. Worker 1 says what it likes."""
        for rank, points in enumerate((self.TRUE, lies)):
            said = ("passed", {"points": [list(each) for each in points]})
            SESSION.write(folder, rank, (said, ("end", {"how": "left", "text": ""})))
        found: dict[int, list[Point]] = {}
        for each in record_folder.audit(folder):
            assert each.state == record_folder.COMPLETE and each.log is not None
            lines = [entry.fields["points"] for entry in each.log.entries if entry.kind == "passed"]
            found[each.log.begin.fields["rank"]] = [point for points in lines for point in points]
        return agreement.compare(found)

    def received(self, **change: object) -> list[Point]:
        first, last = (each._replace(worker=0, direction=1) for each in self.TRUE)
        return [first, last._replace(**change)]  # type: ignore[arg-type]

    def test_the_truth_agrees(self, tmp_path: Path) -> None:
        assert self.compared(tmp_path / "record", *self.received()) == agreement.Agreement([], 1, 0, 0)

    def test_another_digest_is_named(self, tmp_path: Path) -> None:
        assert self.compared(tmp_path / "record", *self.received(digest="ff" * 32)).disagreements == [
            Disagreement(0, 1, "c0" * 32, 0, 2, sent="02" * 32, received="ff" * 32)
        ]

    def test_another_number_of_frames_is_counted(self, tmp_path: Path) -> None:
        assert self.compared(tmp_path / "record", *self.received(frames=3)).partial == 1

    def test_another_connection_is_counted(self, tmp_path: Path) -> None:
        assert self.compared(tmp_path / "record", *self.received(connection="c1" * 32)).uncompared == 1
        assert self.compared(tmp_path / "second") == agreement.Agreement([], 0, 0, 1)

    @pytest.mark.parametrize("change", [{"worker": 1}, {"worker": 2}, {"frames": 1}])
    def test_nonsense_is_refused(self, tmp_path: Path, change: dict[str, object]) -> None:
        with pytest.raises(RecordError, match="worker 1 recorded"):
            self.compared(tmp_path / "record", *self.received(**change))

    @pytest.mark.parametrize(
        ("kind", "change"),
        [
            *(("passed", {"points": [[0, "c0" * 32, *wrong]]}) for wrong in ([0, 7, 1, "01" * 32], [0, 1, 1, ""])),
            *(
                ("passed", {"points": [[0, "c0" * 32, *wrong]]})
                for wrong in ([8, 1, 1, "01" * 32], [0, 1, 0, "01" * 32])
            ),
            ("passed", {"points": [[0, "c0" * 32, 0, 1, 1, "01" * 32]] * 257}),
            ("passed", {"kind": {}}),
            ("passed", {"kind": []}),
            ("end", {"how": "well"}),
            ("checkpoint", {"anchor": "AB" * 32}),
            ("checkpoint", {"action": "made"}),
            ("lost", {"worker": -2}),
        ],
    )
    def test_a_malformed_entry_is_refused(self, tmp_path: Path, kind: str, change: dict[str, object]) -> None:
        path = SESSION.write(tmp_path / "record", 0, (("passed", {"points": []}), *ENTRIES))

        def edit(lines: list[Json]) -> None:
            next(line for line in lines if line["kind"] == kind).update(change)

        path.write_bytes(signed_again(path.read_bytes(), SESSION.record_key(0), edit))
        (found,) = record_folder.audit(path.parent)
        assert found.state == record_folder.REFUSED and "entry" in found.reason
