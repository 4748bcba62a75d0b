"""The log of a worker in a session: what is written is read back, in one form, and a tail without a signature is cut."""

from __future__ import annotations

import io
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfence import keys
from ringfence.errors import ConfigurationError, RecordError
from ringfence.record import log
from ringfence.record.log import LogEntry
from ringfence.record.log_file import Blobs, LogFile, log_name, open_folder
from tests.unit.log_samples import ENTRIES, Session, read

SESSION = Session()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "record"


def test_what_is_written_is_read_back(folder: Path) -> None:
    content = SESSION.write(folder).read_bytes()
    found = read(content)
    assert [(each.kind, each.fields) for each in found.entries[1:]] == list(ENTRIES)
    assert found.begin.fields["key"] == SESSION.public(0).hex()
    assert found.is_complete and found.tail == 0
    assert content.count(b'"kind":"signature"') == 4
    assert found.head == log.digest_of(content.splitlines()[-1])


def test_one_signature_covers_several_entries(folder: Path) -> None:
    found = read(SESSION.write(folder, every=3).read_bytes())
    assert len(found.entries) == 4
    assert [each.number for each in found.entries] == [0, 2, 3, 4]


def test_files_are_private(folder: Path) -> None:
    path = SESSION.write(folder)
    assert path.name == f"{SESSION.roster.hex()[:16]}-0.jsonl"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for each in (folder, folder / "blobs"):
        assert stat.S_IMODE(each.stat().st_mode) == 0o700
    for each in (folder / "blobs").iterdir():
        assert stat.S_IMODE(each.stat().st_mode) == 0o600


def test_a_folder_that_others_can_open_is_refused(folder: Path) -> None:
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    with pytest.raises(ConfigurationError, match=r"others can open .*chmod 700"):
        open_folder(folder)


def test_a_log_is_never_overwritten(folder: Path) -> None:
    before = SESSION.write(folder).read_bytes()
    with pytest.raises(FileExistsError):
        SESSION.write(folder)
    assert SESSION.write(folder, rank=1).parent == folder
    assert (folder / log_name(SESSION.roster, 0)).read_bytes() == before


def test_every_cut_leaves_what_was_signed_before(folder: Path) -> None:
    """A process that is killed leaves a prefix of the file."""
    content = SESSION.write(folder).read_bytes()
    ends = [at + 1 for at, byte in enumerate(content) if byte == 0x0A]
    signed = ends[1::2]
    for length in range(0, len(content), 1):
        expected = sum(end <= length for end in signed)
        if not expected:
            with pytest.raises(RecordError, match="nothing in it is signed"):
                read(content[:length])
            continue
        found = read(content[:length])
        assert len(found.entries) == expected
        assert found.tail == length - signed[expected - 1]
        assert found.is_complete == (length == len(content))


def test_zeros_at_the_end_are_cut(folder: Path) -> None:
    """Some file systems leave them after a loss of power."""
    content = SESSION.write(folder).read_bytes()
    assert read(content + bytes(4096)).tail == 4096


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b'{"at":1,"kind":"end","number":0,"previous":"00","how":"","text":""}', "as ringfence writes it"),
        (b'{"at":1,"how":"","kind":"end","number":0,"previous":"00","text":""}', "`previous` is not a digest"),
        (b'{"at":1.0,"how":"","kind":"end","number":0,"previous":"00","text":""}', "at is not an integer"),
        (b'{"at":true,"how":"","kind":"end","number":0,"previous":"00","text":""}', "at is not an integer"),
        (b'{"at":1,"how":"","kind":"end","number":0,"previous":"00"}', "lacks 'text'"),
        (b'{"at":1,"how":"","kind":"end","more":1,"number":0,"previous":"00","text":""}', "unknown field 'more'"),
        (b'{"at":1,"how":"","kind":"end","kind":"end","number":0,"previous":"00","text":""}', "not valid JSON"),
        (b'{"at":1,"how":"\\ud800","kind":"end","number":0,"previous":"00","text":""}', "not valid Unicode"),
        (b'{"at":9223372036854775808,"how":"","kind":"end","number":0,"previous":"00","text":""}', "too large"),
        (b'{"at":-1,"how":"","kind":"end","number":0,"previous":"' + b"00" * 32 + b'","text":""}', "its time"),
        (
            b'{"at":140737488355328,"how":"","kind":"end","number":0,"previous":"' + b"00" * 32 + b'","text":""}',
            "its time",
        ),
        (b'{"at":1,"kind":"passed","number":0,"points":[[[[[1]]]]],"previous":"00"}', "nested too deeply"),
        (b'{"at":1,"kind":"passed","number":0,"points":[1.5],"previous":"00"}', "not an integer"),
        (b'{"at":1,"kind":"passed","number":0,"points":[null],"previous":"00"}', "not an integer"),
        (b'{"at":1,"kind":"peers","number":0,"peers":[[1,2,3,4,5,6,9223372036854775808]],"previous":"00"}', "not 7"),
        (b'{"at":1,"kind":"peers","number":0,"peers":[[1,2,3]],"previous":"' + b"00" * 32 + b'"}', "not 7 numbers"),
        (b'{"at":1,"kind":"peers","number":0,"peers":[[1,2,3,4,5,6,-7]],"previous":"' + b"00" * 32 + b'"}', "not 7"),
        (b'{"at":1,"kind":"other","number":0,"previous":"00"}', "known kind"),
        (b"[]", "known kind"),
        (b'"' + b"a" * keys.RECORD_LINE_BYTES + b'"', "a line of more than 262,144 bytes"),
    ],
)
def test_a_line_has_one_form(line: bytes, why: str) -> None:
    with pytest.raises(RecordError, match=why):
        log.parse(line)


texts = st.text(st.characters(codec="utf-8"), max_size=20)
integers = st.integers(-(2**63) + 1, 2**63 - 1)


@given(
    integers,
    st.integers(0, 2**47 - 1),
    st.dictionaries(texts, integers | texts | st.lists(integers | texts, max_size=3), max_size=4),
)
def test_an_entry_reads_back_as_it_was_encoded(number: int, at: int, presentation: dict[str, Any]) -> None:
    fields = {name: kind() for name, kind in log.KINDS["begin"].items()} | {"presentation": presentation}
    entry = LogEntry("begin", number, "00" * 32, at, fields)
    line = entry.encode()
    assert log.parse(line) == entry
    assert line.isascii() and b"\n" not in line


def test_an_entry_that_a_reader_would_refuse_is_not_written(folder: Path) -> None:
    open_folder(folder)
    file = LogFile(folder, "log", SESSION.record_key(0))
    for kind, fields in (("end", {"how": 1, "text": ""}), ("end", {}), ("lost", {"worker": 0, "text": "a" * 300_000})):
        with pytest.raises(RecordError):
            file.append(kind, fields)
    file.sign()
    file.close()
    assert (folder / "log").read_bytes() == b""


def test_a_full_log_still_takes_its_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "RECORD_LINES", 8)
    open_folder(folder)
    file = LogFile(folder, "log", SESSION.record_key(0))
    file.append("begin", SESSION.begin(0, Blobs(folder)))
    for _ in range(4):
        file.append(*ENTRIES[0])
    with pytest.raises(RecordError, match="the log is full"):
        file.append(*ENTRIES[0])
    file.append(*ENTRIES[-1])
    file.sign()
    file.close()
    assert read((folder / "log").read_bytes()).is_complete


def test_more_lines_than_allowed_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = SESSION.write(folder).read_bytes()
    monkeypatch.setattr(keys, "RECORD_LINES", 7)
    with pytest.raises(RecordError, match="more than 7 lines"):
        log.read(io.BytesIO(content))


def test_a_closed_log_has_neither_key_nor_file(folder: Path) -> None:
    open_folder(folder)
    file = LogFile(folder, "log", SESSION.record_key(0))
    file.close()
    file.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(file._file, b"")
    assert file._key is None


class TestBlobs:
    def test_equal_content_is_written_once(self, folder: Path) -> None:
        open_folder(folder)
        blobs = Blobs(folder)
        name = blobs.put(b"content")
        before = (folder / "blobs" / name).stat()
        assert blobs.put(b"content") == name
        assert (folder / "blobs" / name).stat() == before
        assert blobs.get(name) == b"content"

    @pytest.mark.parametrize("name", ["../log", "", "AB" * 32, "ab" * 31, 7, None, ["ab"]])
    def test_only_digests_are_names(self, folder: Path, name: object) -> None:
        with pytest.raises(RecordError, match="is not the name of a file"):
            Blobs(folder).get(name)

    def test_changed_and_missing_files_are_refused(self, folder: Path) -> None:
        open_folder(folder)
        name = Blobs(folder).put(b"content")
        (folder / "blobs" / name).write_bytes(b"another")
        with pytest.raises(RecordError, match="was changed"):
            Blobs(folder).get(name)
        (folder / "blobs" / name).unlink()
        with pytest.raises(RecordError, match="No such file"):
            Blobs(folder).get(name)
