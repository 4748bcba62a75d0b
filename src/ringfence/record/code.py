"""The digests of code: of the package, for self-tests, and of all that a run could import (spec/record.md, 3 and 8); and of
models that a run exported (12).
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from ringfence.errors import ConfigurationError, RecordError
from ringfence.record.json_object import Json
from ringfence.record.log import canonical
from ringfence.record.log_file import Blobs
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


def model_subject(folder: Path) -> Subject:
    """Return the subject that a signature of OpenSSF Model Signing has. Raises RecordError, ConfigurationError."""
    try:
        from model_signing import hashing
    except ImportError as error:
        raise ConfigurationError(
            f'to hash a model, model-signing is needed ({error}): python -m pip install "model-signing>=1.1.1"'
        ) from None
    try:
        found = hashing.Config().set_ignored_paths(paths=["model.sig"]).hash(folder)
    except (OSError, ValueError) as error:
        raise RecordError(f"the model {folder} is refused: {error}") from None
    digests = b"".join(each.digest.digest_value for each in found.resource_descriptors())
    if not digests:
        raise RecordError(f"the model {folder} has no file")
    return Subject(found.model_name, SHA256, hashlib.sha256(digests).hexdigest())


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def fields_of_run(blobs: Blobs) -> Json:
    """Return what is recorded of the code of this process, and write the files that it refers to.

    The files of a package are not read: its RECORD has the digest of each, and `pip` and auditors can compare.
    """
    script = Path(getattr(sys.modules["__main__"], "__file__", None) or "")
    digest = ""
    with contextlib.suppress(OSError):  # an interactive session has none
        digest = _sha256(script)
    arguments = [_unicode(each) for each in sys.argv[1:]]
    return {
        "script": _unicode(script.name) if digest else "",
        "digest": digest,
        "arguments": blobs.put(canonical(arguments)),
        "packages": blobs.put(canonical(_packages())),
    }


def _packages() -> dict[str, str]:
    found: dict[str, str] = {}
    for each in metadata.distributions():
        record = None
        with contextlib.suppress(OSError, UnicodeDecodeError):
            record = each.read_text("RECORD")
        digest = "" if record is None else hashlib.sha256(record.encode()).hexdigest()
        found.setdefault(_unicode(f"{each.name} {each.version}"), digest)  # the first one is imported
    return found


def _unicode(text: str) -> str:
    """Return a text without what is no Unicode, such as a byte of a file's name."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
