"""Data sets for tests: folders with given files, and their manifests."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path

from ringfence.record import manifest, manifest_files
from ringfence.record.manifest import Entry, Tree

FILES = {b"a/x": b"hello", b"a.b": b"y", b".hidden": b"", b'\xff "%\\n': b"q", b"a/z/1": b"1", b"b": b"hello"}


def unseen(_: int) -> None:
    """The progress that nobody looks at."""


def write_folder(folder: Path, files: Mapping[bytes, bytes]) -> Path:
    """Write files below a folder, in the order of the mapping."""
    for name, content in files.items():
        file = folder / name.decode("utf-8", "surrogateescape")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    return folder


def manifest_of(folder: Path) -> bytes:
    """Return the manifest of a folder, which is written beside it and removed."""
    output = folder.with_name(f"{folder.name}.manifest")
    manifest_files.write_manifest(folder, output, unseen)
    content = output.read_bytes()
    output.unlink()
    return content


def differences(content: bytes, folder: Path) -> list[str]:
    """Return how a folder differs from a manifest."""
    summary = manifest.check(io.BytesIO(content))
    return manifest_files.compare(io.BytesIO(content), summary, folder, unseen)


def entries(content: bytes) -> list[Entry]:
    return list(manifest.read(io.BytesIO(content), Tree()))


def encoded(files: list[Entry]) -> bytes:
    """Return a manifest with these lines and the root of them, as somebody who forges one writes it."""
    tree = Tree()
    for entry in files:
        tree.add(entry)
    return b"".join([manifest.HEADER, *(entry.line() for entry in files), tree.summary().line()])
