"""Data manifests: which files they list, what the root stands for, runs that are resumed, files that change."""

from __future__ import annotations

import io
import itertools
import os
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfence import keys
from ringfence.errors import ConfigurationError, PolicyError, RecordError
from ringfence.record import manifest, manifest_files
from ringfence.record.manifest import Entry, Tree
from tests.unit import manifest_samples as samples
from tests.unit.manifest_samples import FILES, manifest_of, unseen, write_folder


def is_possible(names: set[bytes]) -> bool:
    """Whether no name is both a file and a folder."""
    return not any(other.startswith(name + b"/") for name in names for other in names)


parts = st.lists(
    st.sampled_from([b"a", b"b", b"a.", b"a!", b"\xc3\xa9", b"\x01", b"%41", b".b"]), min_size=1, max_size=3
)
folders = st.dictionaries(parts.map(b"/".join), st.binary(max_size=3), min_size=1, max_size=6).filter(
    lambda files: is_possible(set(files))
)


def made(files: dict[bytes, bytes]) -> bytes:
    with tempfile.TemporaryDirectory() as name:
        return manifest_of(write_folder(Path(name, "data"), files))


@settings(max_examples=25, deadline=None)
@given(folders, st.randoms())
def test_the_order_of_writing_does_not_matter(files: dict[bytes, bytes], random: Random) -> None:
    shuffled = list(files.items())
    random.shuffle(shuffled)
    content = made(dict(shuffled))
    assert content == made(files)
    assert [entry.name for entry in samples.entries(content)] == sorted(files)


@settings(max_examples=25, deadline=None)
@given(folders, folders)
def test_roots_of_different_folders_differ(one: dict[bytes, bytes], other: dict[bytes, bytes]) -> None:
    assert (made(one).splitlines()[-1] == made(other).splitlines()[-1]) == (one == other)


names = st.binary(min_size=1, max_size=12).filter(
    lambda name: b"\0" not in name and not {b"", b".", b".."} & set(name.split(b"/"))
)
lists = st.lists(
    st.builds(Entry, names, st.integers(0, 10**18 - 1), st.binary(min_size=32, max_size=32)),
    min_size=1,
    max_size=20,
    unique_by=lambda entry: entry.name,
)


@given(lists)
def test_a_manifest_is_read_again(files: list[Entry]) -> None:
    files.sort()
    content = samples.encoded(files)
    assert samples.entries(content) == files
    assert content.isascii() and b" " not in content
    summary = manifest.check(io.BytesIO(content))
    assert (summary.files, summary.size) == (len(files), sum(entry.size for entry in files))


@given(lists, st.data())
def test_the_root_stands_for_every_field(files: list[Entry], data: st.DataObject) -> None:
    files.sort()
    at = data.draw(st.integers(0, len(files) - 1))
    changed = data.draw(
        st.sampled_from(
            [
                files[at]._replace(size=files[at].size ^ 1),
                files[at]._replace(digest=files[at].digest[::-1][:31] + b"\x99"),
                files[at]._replace(name=files[at].name + b"x"),
            ]
        )
    )
    other = sorted([*files[:at], changed, *files[at + 1 :]])
    if other == files or len({entry.name for entry in other}) < len(other):
        return
    roots = {manifest.check(io.BytesIO(samples.encoded(each))).root for each in (files, other)}
    assert len(roots) == 2


def test_reading_takes_bounded_memory() -> None:
    """A manifest of half a million bytes, which is made line by line. Other threads allocate too: so the least of three."""
    tree, digest = Tree(), bytes(32)
    listed = [Entry(b"%08d" % number, 1, digest) for number in range(4000)]
    for entry in listed:
        tree.add(entry)

    def peak() -> int:
        lines = itertools.chain([manifest.HEADER], (entry.line() for entry in listed), [tree.summary().line()])

        class Source(io.BytesIO):
            def readline(self, size: int | None = -1, /) -> bytes:
                return next(lines, b"")

        tracemalloc.start()
        try:
            assert manifest.check(Source()).files == 4000
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert min(peak() for _ in range(3)) < 100_000


# -- which files --------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "data", FILES)


def test_every_file_is_listed(folder: Path) -> None:
    (folder / "empty").mkdir()
    found = samples.entries(manifest_of(folder))
    assert {entry.name: entry.size for entry in found} == {name: len(content) for name, content in FILES.items()}
    assert not samples.differences(manifest_of(folder), folder)


def test_the_folder_itself_may_be_a_link(folder: Path) -> None:
    (folder.parent / "link").symlink_to(folder)
    assert manifest_of(folder.parent / "link") == manifest_of(folder)


KINDS: dict[str, tuple[Callable[[Path], None], str]] = {
    "link to a file": (lambda path: path.symlink_to("b"), "a/odd is a symbolic link"),
    "link to a folder": (lambda path: path.symlink_to(".."), "a/odd is a symbolic link"),
    "link to nothing": (lambda path: path.symlink_to("nothing"), "a/odd is a symbolic link"),
    "pipe": (os.mkfifo, "a/odd is neither a file nor a folder"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_a_file_is_refused(folder: Path, kind: str) -> None:
    content = manifest_of(folder)
    make, said = KINDS[kind]
    make(folder / "a/odd")
    with pytest.raises(RecordError, match=said):
        manifest_of(folder)
    with pytest.raises(RecordError, match=said):
        samples.differences(content, folder)


def test_a_folder_without_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data/inner").mkdir(parents=True)
    with pytest.raises(RecordError, match="there is no file"):
        manifest_of(tmp_path / "data")


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"cannot read .*nowhere/: No such file"):
        manifest_of(tmp_path / "nowhere")


def test_folders_may_be_deep(tmp_path: Path) -> None:
    """Deeper than Python's stack; removed here, as not everything that removes folders can."""
    depth, inner = 1200, tmp_path / "data"
    inner.mkdir()
    path = str(inner)
    for _ in range(depth):
        path += "/d"
        os.mkdir(path)
    Path(path, "x").touch()
    try:
        (entry,) = samples.entries(manifest_of(inner))
        assert entry.name == b"d/" * depth + b"x"
    finally:
        os.unlink(f"{path}/x")
        for _ in range(depth):
            os.rmdir(path)
            path = path[:-2]


# -- pieces -------------------------------------------------------------------------------------------------------------


def test_files_are_divided_into_pieces(tmp_path: Path) -> None:
    """A sparse file of two pieces: a byte at the end of the first is another file than one in the second."""
    file = write_folder(tmp_path / "data", {b"large": b""}) / "large"
    found = []
    for at in (keys.DATA_PIECE_BYTES - 1, keys.DATA_PIECE_BYTES):
        with file.open("wb") as stream:
            stream.truncate(keys.DATA_PIECE_BYTES + 2)
            stream.seek(at)
            stream.write(b"x")
        (entry,) = samples.entries(manifest_of(file.parent))
        assert entry.size == keys.DATA_PIECE_BYTES + 2
        found.append(entry.digest)
    assert found[0] != found[1]


# -- files that change --------------------------------------------------------------------------------------------------


def write_in_place(file: Path, before: os.stat_result) -> None:
    """Change a byte, and set the time back."""
    with file.open("r+b") as stream:
        stream.write(b"j")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def await_tick(clock: Path, before: os.stat_result) -> None:
    """Write a file until the file system's clock, which may stand still for milliseconds, gives it a later time."""
    clock.touch()
    while clock.stat().st_ctime_ns <= before.st_ctime_ns:
        clock.write_bytes(b"")


def replace(file: Path, before: os.stat_result) -> None:
    other = file.with_name("other")
    other.write_bytes(b"jello")
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(file)


CHANGES: dict[str, Callable[[Path, os.stat_result], object]] = {
    "longer": lambda file, _: file.write_bytes(b"hello, world"),
    "shorter": lambda file, _: file.write_bytes(b""),
    "replaced": replace,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changes_while_it_is_hashed_is_an_error(folder: Path, change: str) -> None:
    (found,) = (file for file in manifest_files.files_in(folder) if file.name == b"a/x")
    CHANGES[change](folder / "a/x", (folder / "a/x").stat())
    with pytest.raises(RecordError, match=r"a/x changed while it was hashed: stop what writes to it"):
        manifest_files._hash_piece(found, 0, unseen)


def test_a_change_during_the_run_is_an_error(tmp_path: Path) -> None:
    """The first bytes were read; then a byte changes, and the time is set back."""
    file = write_folder(tmp_path / "data", {b"large": bytes(1 << 20)}) / "large"
    before = file.stat()
    await_tick(tmp_path / "clock", before)
    calls = iter([lambda: write_in_place(file, before)])

    def progress(_: int) -> None:
        next(calls, lambda: None)()

    with pytest.raises(RecordError, match="large changed while it was hashed"):
        manifest_files.write_manifest(file.parent, tmp_path / "out", progress)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("swap", [Path.unlink, lambda file: (file.unlink(), file.symlink_to("b"))])
def test_a_file_that_is_gone_or_a_link_now_is_named(folder: Path, swap: Callable[[Path], object]) -> None:
    (found,) = (file for file in manifest_files.files_in(folder) if file.name == b"a/x")
    swap(folder / "a/x")
    with pytest.raises(ConfigurationError, match=r"cannot read .*/a/x: (No such file|Too many levels)"):
        manifest_files._hash_piece(found, 0, unseen)


# -- output, and runs that are resumed ----------------------------------------------------------------------------------


def interrupted(folder: Path, output: Path, after: int) -> Path:
    """Begin a manifest and stop when so many bytes were hashed. Returns what is kept for the next run."""
    left = itertools.count(after, -1)

    def progress(count: int) -> None:
        if any(next(left) <= 0 for _ in range(count)):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        manifest_files.write_manifest(folder, output, progress)
    assert not output.exists()
    return output.with_name(f"{output.name}.part")


@pytest.fixture
def resumed(folder: Path, tmp_path: Path) -> Iterator[tuple[Path, Path, bytes]]:
    """A folder, an output whose first file was hashed before a run was interrupted, and the manifest that is right."""
    expected = manifest_of(folder)
    part = interrupted(folder, tmp_path / "out", 3)
    assert part.stat().st_size % 64 == 0 and part.stat().st_size >= 64
    assert {file.name for file in tmp_path.iterdir()} == {"data", "out.part"}
    yield folder, tmp_path / "out", expected
    assert not part.exists()


def test_an_interrupted_run_is_resumed(resumed: tuple[Path, Path, bytes]) -> None:
    folder, output, expected = resumed
    part = output.with_name("out.part")
    part.write_bytes(part.read_bytes() + b"torn")
    done: list[int] = []
    manifest_files.write_manifest(folder, output, done.append)
    assert output.read_bytes() == expected
    assert sum(done) == sum(map(len, FILES.values()))  # progress counts what was hashed before


def poison(part: Path) -> None:
    """Change every digest that is kept, so that a manifest shows whether it was taken from there."""
    content = part.read_bytes()
    part.write_bytes(b"".join(content[at : at + 32] + bytes(32) for at in range(0, len(content), 64)))


def test_what_was_hashed_is_not_hashed_again(resumed: tuple[Path, Path, bytes]) -> None:
    folder, output, expected = resumed
    poison(output.with_name("out.part"))
    manifest_files.write_manifest(folder, output, unseen)
    assert output.read_bytes() != expected


def touch_again(file: Path) -> None:
    """Rewrite a file with the same contents: to a reader of its status it is another."""
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(content)
    os.utime(file, ns=(1, 1))


def test_what_changed_since_is_hashed_again(resumed: tuple[Path, Path, bytes]) -> None:
    folder, output, expected = resumed
    poison(output.with_name("out.part"))
    for name in FILES:
        touch_again(folder / os.fsdecode(name))
    manifest_files.write_manifest(folder, output, unseen)
    assert output.read_bytes() == expected


def test_what_others_can_change_is_not_resumed_from(folder: Path, tmp_path: Path) -> None:
    interrupted(folder, tmp_path / "out", 3).chmod(0o666)
    with pytest.raises(PolicyError, match=r"others on this machine can change .*out\.part"):
        manifest_files.write_manifest(folder, tmp_path / "out", unseen)


def test_where_a_manifest_is_not_written(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "there").touch()
    (tmp_path / "link").symlink_to(folder)
    for name, said in (
        ("there", "never overwritten"),
        ("data/a/out", "part of the data"),
        ("link/out", "part of the data"),
        ("there/out", "cannot write .*: Not a directory"),
        ("no/out", "cannot write .*: No such file"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            manifest_files.write_manifest(folder, tmp_path / name, unseen)
    assert {file.name for file in tmp_path.iterdir()} == {"data", "there", "link"}
