"""Somebody changes a data set or its manifest, and the other one or the root shows it."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ringfence import keys
from ringfence.errors import RecordError
from ringfence.record import manifest, manifest_files
from ringfence.record.manifest import Entry
from tests.unit import manifest_samples as samples
from tests.unit.flips import flips
from tests.unit.manifest_samples import FILES, differences, manifest_of, unseen, write_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "data", FILES)


def swap(folder: Path) -> None:
    """Two files of one size take each other's names."""
    (folder / "a.b").rename(folder / "t")
    (folder / "a/z/1").rename(folder / "a.b")
    (folder / "t").rename(folder / "a/z/1")


def change_a_byte(folder: Path) -> None:
    """With the time set back."""
    before = (folder / "a/x").stat()
    (folder / "a/x").write_bytes(b"hellp")
    os.utime(folder / "a/x", ns=(before.st_atime_ns, before.st_mtime_ns))


def move_the_end(folder: Path) -> None:
    """What follows in one file belongs to the next."""
    (folder / "a/x").write_bytes(b"hell")
    (folder / "b").write_bytes(b"ohello")


CHANGES: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "swapped": (swap, ["a.b has other contents", "a/z/1 has other contents"]),
    "renamed": (lambda folder: (folder / "b").rename(folder / "c"), ["b is missing", "c is not in the manifest"]),
    "moved": (lambda folder: (folder / "b").rename(folder / "a/b"), ["a/b is not in the manifest", "b is missing"]),
    "one byte": (change_a_byte, ["a/x has other contents"]),
    "hidden file": (lambda folder: (folder / "a/.x").touch(), ["a/.x is not in the manifest"]),
    "last file": (lambda folder: (folder / "\udcff\udcff").touch(), ["%FF%FF is not in the manifest"]),
    "removed": (lambda folder: (folder / ".hidden").unlink(), [".hidden is missing"]),
    "all removed": (lambda folder: [file.unlink() for file in folder.rglob("*") if file.is_file()], [
        f"{manifest.name_text(name)} is missing" for name in sorted(FILES)
    ]),
    "longer": (lambda folder: (folder / ".hidden").write_bytes(b"x"), [".hidden has 1 bytes, not 0"]),
    "moved between files": (move_the_end, ["a/x has 4 bytes, not 5", "b has 6 bytes, not 5"]),
}  # fmt: skip


@pytest.mark.promise("Data that differ from their manifest, or a manifest from its root, are refused.")
@pytest.mark.parametrize("name", CHANGES)
def test_changed_data_are_named(folder: Path, name: str) -> None:
    content = manifest_of(folder)
    change, expected = CHANGES[name]
    change(folder)
    assert sorted(differences(content, folder)) == sorted(expected)


@pytest.mark.promise("Data that differ from their manifest, or a manifest from its root, are refused.")
@pytest.mark.slow
def test_a_piece_cannot_move_to_another_file(tmp_path: Path) -> None:
    """Two files of two pieces each, whose first pieces are swapped."""

    def write(name: bytes, first: bytes, second: bytes) -> None:
        file = write_folder(tmp_path / "data", {name: first}) / name.decode()
        os.truncate(file, keys.DATA_PIECE_BYTES)
        with file.open("ab") as stream:
            stream.write(second)

    write(b"one", b"1", b"2")
    write(b"two", b"3", b"4")
    content = manifest_of(tmp_path / "data")
    write(b"one", b"3", b"2")
    write(b"two", b"1", b"4")
    assert differences(content, tmp_path / "data") == ["one has other contents", "two has other contents"]


# -- the manifest -------------------------------------------------------------------------------------------------------


def refused(content: bytes) -> str:
    with pytest.raises(RecordError) as error:
        manifest.check(io.BytesIO(content))
    return str(error.value)


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return manifest_of(write_folder(tmp_path_factory.mktemp("set") / "data", FILES))


@pytest.mark.promise("Data that differ from their manifest, or a manifest from its root, are refused.")
def test_every_changed_bit_is_refused(content: bytes, exhaustive: bool) -> None:
    for changed in flips(content, exhaustive):
        refused(changed)


@pytest.mark.promise("Data that differ from their manifest, or a manifest from its root, are refused.")
def test_every_truncated_manifest_is_refused(content: bytes) -> None:
    for length in range(len(content)):
        refused(content[:length])


@pytest.mark.promise("Data that differ from their manifest, or a manifest from its root, are refused.")
def test_lines_that_are_dropped_doubled_or_moved_are_refused(content: bytes) -> None:
    lines = content.splitlines(keepends=True)
    for at in range(len(lines)):
        refused(b"".join(lines[:at] + lines[at + 1 :]))
        refused(b"".join([*lines[:at], lines[at], *lines[at:]]))
        for to in range(at):
            refused(b"".join([*lines[:to], lines[at], *lines[to:at], *lines[at + 1 :]]))


@pytest.mark.promise("Data that differ from their manifest, or a manifest from its root, are refused.")
def test_another_manifest_has_another_root(content: bytes) -> None:
    """Somebody who changes lines and writes the root that follows from them is found out by the root."""
    root, files = manifest.check(io.BytesIO(content)).root, samples.entries(content)
    swapped = [files[0]._replace(digest=files[1].digest), files[1]._replace(digest=files[0].digest), *files[2:]]
    for other in (files[1:], files[:-1], swapped, [*files, Entry(b"\xff\xff", 0, bytes(32))]):
        assert manifest.check(io.BytesIO(samples.encoded(other))).root != root


def test_a_node_is_not_a_file(content: bytes) -> None:
    """The tree over two leaves is not that of one file whose contents are made of them."""
    files = samples.entries(content)[:2]
    leaves = [keys.digest(keys.DATA_FILE, each.name, each.size.to_bytes(8, "big"), each.digest) for each in files]
    inner = keys.digest(keys.DATA_NODE, *leaves)
    root = manifest.check(io.BytesIO(samples.encoded(files))).root
    assert root == keys.digest(keys.DATA_ROOT, (2).to_bytes(8, "big"), inner)
    for digest in (inner, keys.digest(keys.DATA_CONTENTS, *leaves)):
        assert manifest.check(io.BytesIO(samples.encoded([files[0]._replace(digest=digest)]))).root != root


def line(name: bytes, size: bytes = b"0") -> bytes:
    return b'{"digest":"%b","name":"%b","size":%b}\n' % (b"ab" * 32, name, size)


ODD: dict[str, tuple[bytes, str]] = {
    "absolute": (line(b"/etc/passwd"), "not the name of a file below a folder"),
    "parent": (line(b"a/../b"), "not the name of a file below a folder"),
    "empty part": (line(b"a//b"), "not the name of a file below a folder"),
    "folder": (line(b"a/"), "not the name of a file below a folder"),
    "zero byte": (line(b"a%00"), "not the name of a file, or is too long"),
    "long": (line(b"a" * 4097), "not the name of a file, or is too long"),
    "longer than a line": (line(b"a" * 20_000), "line 2 of the manifest is neither"),
    "escaped letter": (line(b"%41"), "line 2 of the manifest is not written as ringfence writes it"),
    "lowercase escape": (line(b"%ff"), "line 2 of the manifest is not written as ringfence writes it"),
    "half an escape": (line(b"a%F"), "line 2 of the manifest is not written as ringfence writes it"),
    "quote": (line(b'a"b'), "line 2 of the manifest is not written as ringfence writes it"),
    "space": (line(b"a b"), "line 2 of the manifest is neither"),
    "leading zero": (line(b"a", b"00"), "line 2 of the manifest is not written as ringfence writes it"),
    "negative": (line(b"a", b"-1"), "line 2 of the manifest is neither"),
    "too large": (line(b"a", b"9" * 19), "line 2 of the manifest is neither"),
    "white space": (line(b"a").replace(b":", b": "), "line 2 of the manifest is neither"),
    "carriage return": (line(b"a").replace(b"\n", b"\r\n"), "line 2 of the manifest is neither"),
    "empty line": (b"\n", "line 2 of the manifest is neither"),
}


@pytest.mark.promise("Data that differ from their manifest, or a manifest from its root, are refused.")
@pytest.mark.parametrize("name", ODD)
def test_other_lines_are_refused(content: bytes, name: str) -> None:
    odd, said = ODD[name]
    lines = content.splitlines(keepends=True)
    assert said in refused(b"".join([lines[0], odd, *lines[1:]]))


def test_what_follows_the_root_is_refused(content: bytes) -> None:
    assert "goes on after its root" in refused(content + b"\n")
    assert "first line" in refused(b"")
    assert "first line" in refused(content.replace(b"/v1", b"/v2"))


def test_a_manifest_that_changes_between_two_readings_is_refused(folder: Path) -> None:
    """The folder is compared with the manifest that was verified, and not with what has taken its place."""
    summary = manifest.check(io.BytesIO(manifest_of(folder)))
    change_a_byte(folder)
    with pytest.raises(RecordError, match="changed while it was read"):
        manifest_files.compare(io.BytesIO(manifest_of(folder)), summary, folder, unseen)
