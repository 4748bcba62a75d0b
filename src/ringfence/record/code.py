"""The digests of the installed code, so that a reader can tell which release a record is about (spec/record.md, 3)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from ringfence.record.statement import DIR_HASH, SHA256, Subject


def package_subjects(package: Path) -> tuple[Subject, ...]:
    """Return the Python files of a package, as one subject, and each of its compiled modules."""
    compiled = sorted(package.rglob("*.so"))
    return (
        Subject(package.name, DIR_HASH, dir_hash(package.parent, package.rglob("*.py"))),
        *(Subject(file.relative_to(package.parent).as_posix(), SHA256, _sha256(file)) for file in compiled),
    )


def dir_hash(folder: Path, files: Iterable[Path]) -> str:
    """Return in-toto's `dirHash` of files: SHA-256 of what `sha256sum` prints of them in this folder, in order of names."""
    names = {file.relative_to(folder).as_posix().encode(): file for file in files}
    lines = (b"%s  %s\n" % (_sha256(names[name]).encode(), name) for name in sorted(names))
    return hashlib.sha256(b"".join(lines)).hexdigest()


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
