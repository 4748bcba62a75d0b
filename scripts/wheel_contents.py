"""Check what a wheel or the source archive of this project contains, and list it."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile

SOURCES = "src/ringfence/dataplane/csrc/"  # compiled, not installed
BINARY = "ringfence/dataplane/_core.abi3.so"
INFORMATION = {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "top_level.txt", "licenses/LICENSE"}


PACKAGE = "src/ringfence"  # of the product
LAB = "lab/src/ringfence_lab"


def check_wheel(wheel: Path, files: list[str], tag: str, here: set[str], package: str = PACKAGE) -> Iterator[str]:
    """What is wrong with a wheel, sentence by sentence. `files` are the project's, `here` are folders that no file may name."""
    sources, _, expected = package.rpartition("/")
    name, version, found = wheel.name.removesuffix(".whl").split("-", 2)
    if name != expected or found != tag:
        yield f"{wheel.name}: the name should end with {tag}"
    with zipfile.ZipFile(wheel) as packed:
        contents = {item.filename: packed.read(item) for item in packed.infolist() if not item.is_dir()}
    wanted = {
        file.removeprefix(f"{sources}/")
        for file in files
        if file.startswith(f"{package}/") and not file.startswith(SOURCES)
    }
    wanted |= {f"{expected}-{version}.dist-info/{file}" for file in INFORMATION}
    if "abi3" in tag:
        wanted.add(BINARY)
        yield from (f"{wheel.name}: {problem}" for problem in check_binary(contents.get(BINARY, b"")))
    yield from compare(wheel.name, set(contents), wanted)
    yield from check_record(wheel.name, contents, f"{expected}-{version}.dist-info/RECORD")
    yield from check_texts(wheel.name, contents, here)


def check_archive(archive: Path, files: list[str], here: set[str]) -> Iterator[str]:
    """What is wrong with the source archive: it holds the project's files, and what setuptools writes beside them."""
    top = archive.name.removesuffix(".tar.gz")
    with tarfile.open(archive) as packed:
        members = [member for member in packed if member.isfile()]
        contents = {member.name.removeprefix(f"{top}/"): packed.extractfile(member).read() for member in members}  # type: ignore[union-attr]
    written = {name for name in contents if name in ("PKG-INFO", "setup.cfg") or "ringfence.egg-info/" in name}
    yield from compare(archive.name, set(contents) - written, set(files))
    yield from check_texts(archive.name, contents, here)


def compare(name: str, found: set[str], wanted: set[str]) -> Iterator[str]:
    yield from (f"{name}: {file} is missing" for file in sorted(wanted - found))
    yield from (f"{name}: {file} should not be there" for file in sorted(found - wanted))


def check_texts(name: str, contents: dict[str, bytes], here: set[str]) -> Iterator[str]:
    for file, data in contents.items():
        yield from (
            f"{name}: {file} names {folder} of this machine" for folder in sorted(here) if folder.encode() in data
        )


def check_record(name: str, contents: dict[str, bytes], record: str) -> Iterator[str]:
    rows = {row[0]: row[1] for row in csv.reader(io.StringIO(contents.get(record, b"").decode()))}
    yield from compare(f"{name}: RECORD", set(rows), set(contents))
    for file, digest in rows.items():
        data = hashlib.sha256(contents.get(file, b"")).digest()
        if file != record and digest != "sha256=" + base64.urlsafe_b64encode(data).decode().rstrip("="):
            yield f"{name}: RECORD has another digest of {file}"


def check_binary(data: bytes) -> Iterator[str]:
    if not data:
        return  # said to be missing already
    binary = ELFFile(io.BytesIO(data))
    if binary.get_section_by_name(".symtab") or binary.get_section_by_name(".debug_info"):
        yield f"{BINARY} is not stripped"
    dynamic = binary.get_section_by_name(".dynamic")
    assert isinstance(dynamic, DynamicSection)
    names = {tag.entry.d_tag for tag in dynamic.iter_tags()}
    yield from (f"{BINARY} has a {name}" for name in ("DT_RPATH", "DT_RUNPATH") if name in names)
    needed = {tag.needed for tag in dynamic.iter_tags("DT_NEEDED")}  # type: ignore[attr-defined]
    if needed != {"libc.so.6"}:
        yield f"{BINARY} needs {', '.join(sorted(needed))}, not libc.so.6 alone"


def print_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        print(f"{wheel.name}:")
        for item in sorted(packed.infolist(), key=lambda item: item.filename):
            print(f"{item.file_size:>9,}  {item.filename}")
