"""Files with secrets and policies: checks their owner and mode, and writes them whole or not at all."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from ringfence import keys
from ringfence.errors import ConfigurationError, PolicyError

StrPath = str | os.PathLike[str]

PEM_BYTES: Final = 1 << 20  # the most that is read of a key or certificate file
HOW_TO_MAKE_SECRET: Final = "make one with `ringfence secret new FILE` and give every worker the same file"  # noqa: S105

_SECRET_FORM: Final = re.compile(rb"[0-9a-f]{64}\n")
_FEWEST_DISTINCT: Final = 16  # 32 random bytes have fewer distinct values once in 10**14


# -- writing --------------------------------------------------------------------------------------------------------


def write_new(path: StrPath, content: bytes, mode: int, what: str) -> None:
    """Write a new file with exactly this mode, whole or not at all. Links are not followed.

    `what` names the content in the message. Raises ConfigurationError if the path exists or cannot be written.
    """
    try:
        with temporary_file(path, content, mode) as temporary:
            _reserve_name(path)
            os.replace(temporary, path)
    except FileExistsError:
        raise ConfigurationError(f"{os.fspath(path)} exists; {what} is never overwritten: name a new file") from None
    except OSError as error:
        raise ConfigurationError(f"cannot write {os.fspath(path)}: {error.strerror}") from error


def _reserve_name(path: StrPath) -> None:
    """Create an empty file, so that the rename replaces nothing else. Not every file system has hard links for this."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))


@contextlib.contextmanager
def temporary_file(path: StrPath, content: bytes, mode: int) -> Iterator[str]:
    """Write and sync a file beside `path`, and yield its name for a rename. Removes it if it was not renamed.

    Written under its final name, a full disk or a kill would leave a partial file that a second attempt must not overwrite.
    """
    temporary = os.path.join(os.path.dirname(path), f".ringfence-{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)  # regardless of the umask
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        yield temporary
    finally:
        with contextlib.suppress(FileNotFoundError):  # it was renamed
            os.unlink(temporary)


def replace_file(path: StrPath, content: bytes, mode: int) -> None:
    """Write a file, new or in the place of another, whole or not at all. Raises ConfigurationError."""
    try:
        with temporary_file(path, content, mode) as temporary:
            os.replace(temporary, path)
    except OSError as error:
        raise ConfigurationError(f"cannot write {os.fspath(path)}: {error.strerror}") from error


# -- reading --------------------------------------------------------------------------------------------------------


def sync_folder(path: StrPath) -> None:
    """Make renames within a folder durable. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_content(path: StrPath, limit: int = -1) -> bytes:
    """Read a file, or its first `limit` bytes. Raises ConfigurationError."""
    try:
        with open(path, "rb") as file:
            return file.read(limit)
    except OSError as error:
        raise ConfigurationError(f"cannot read {os.fspath(path)}: {error.strerror}") from error


def read_private(path: StrPath, what: str) -> bytes:
    """Read a file that no other user may open. `what` names it in messages. Raises ConfigurationError or OSError."""
    with open(path, "rb", opener=_without_waiting) as file:
        _check_private(what, os.fspath(path), os.fstat(file.fileno()))
        return file.read(PEM_BYTES)


def _without_waiting(path: str, flags: int) -> int:
    """Open a file. A pipe in its place is refused later, and must not make this process wait for somebody who writes."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def _check_private(what: str, name: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ConfigurationError(f"the {what} file {name} is not a regular file")
    if status.st_mode & 0o077:
        raise ConfigurationError(f"others can open the {what} file {name}: run `chmod 600 {name}`")
    if status.st_uid not in (os.geteuid(), 0):
        raise ConfigurationError(
            f"the {what} file {name} belongs to another user (uid {status.st_uid}): it must be yours, or root's. "
            f"Run `chown {os.geteuid()} {name}`, or copy it with `install -m 600`"
        )


def read_unshared(path: Path, limit: int) -> bytes:
    """Read at most `limit` bytes of a file that no other user may change. Raises PolicyError or OSError."""
    with open(path, "rb", opener=_without_waiting) as file:
        check_unshared(path, os.fstat(file.fileno()))
        return file.read(limit)


def check_unshared(path: Path, status: os.stat_result) -> None:
    """Raise PolicyError if another user can change a file with this status."""
    if not stat.S_ISREG(status.st_mode):
        raise PolicyError(f"{path} is not a regular file")
    _check_owner(str(path), path, status)


def _check_owner(name: str, path: Path, status: os.stat_result) -> None:
    if status.st_mode & 0o022:
        raise PolicyError(f"others on this machine can change {name}: run `chmod go-w {path}`")
    if status.st_uid not in (os.geteuid(), 0):
        raise PolicyError(
            f"{name} belongs to another user (uid {status.st_uid}), who can change it: it must be yours, or root's"
        )


def list_unshared(path: Path) -> list[str] | None:
    """Return the names in a folder that no other user may change, or None if it is no folder.

    Raises PolicyError or OSError.
    """
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        if not os.fstatvfs(folder).f_flag & os.ST_RDONLY:  # as a volume of Kubernetes, whose mode says otherwise
            _check_owner(f"the folder {path}", path, os.fstat(folder))
        return os.listdir(folder)
    finally:
        os.close(folder)


# -- the shared secret ----------------------------------------------------------------------------------------------


def new_secret_file(path: StrPath) -> None:
    """Write 32 random bytes as 64 hexadecimal digits to a new file that only its owner can read."""
    write_new(path, _secret_line(), 0o600, "a secret")


def replace_secret_file(path: StrPath) -> None:
    """Replace the secret in a file atomically. Raises ConfigurationError, and then the file is unchanged."""
    try:
        with temporary_file(path, _secret_line(), 0o600) as temporary:
            os.replace(temporary, path)
    except OSError as error:
        raise ConfigurationError(f"cannot replace {os.fspath(path)}: {error.strerror}; it is unchanged") from error
    sync_folder(os.path.dirname(path) or ".")  # without it, a crash could bring the old secret back


def _secret_line() -> bytes:
    return f"{secrets.token_hex(keys.SECRET_BYTES)}\n".encode("ascii")


def load_secret(path: StrPath) -> keys.Secret:
    """Read a file that `new_secret_file` wrote.

    Raises ConfigurationError for any other content: a secret that can be guessed falls to an offline attack.
    """
    name = os.fspath(path)
    try:
        content = read_private(path, "secret")
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"cannot read the secret file {name}: {error.strerror}; {HOW_TO_MAKE_SECRET}"
        ) from error
    except PermissionError as error:  # no advice to make a new one, which the other workers would refuse
        raise ConfigurationError(
            f"cannot read the secret file {name}: {error.strerror}. The user who runs this must own it: "
            f"run `chown {os.geteuid()} {name} && chmod 600 {name}`"
        ) from error
    except OSError as error:
        raise ConfigurationError(
            f"cannot read the secret file {name}: {error.strerror}; name the file itself"
        ) from error
    if not _SECRET_FORM.fullmatch(content):
        raise ConfigurationError(
            f"{name} is not a secret file (64 hexadecimal digits and a newline); {HOW_TO_MAKE_SECRET}"
        )
    material = bytes.fromhex(content.decode("ascii"))
    if not _looks_random(material):
        raise ConfigurationError(f"the secret in {name} was not drawn at random; {HOW_TO_MAKE_SECRET}")
    return keys.Secret(material)


def _looks_random(material: bytes) -> bool:
    """Detects what people type: one byte repeated, a counting sequence, a passphrase in hexadecimal."""
    steps = {(b - a) % 256 for a, b in itertools.pairwise(material)}
    is_text = all(0x20 <= byte < 0x7F for byte in material)
    return len(set(material)) >= _FEWEST_DISTINCT and len(steps) >= _FEWEST_DISTINCT and not is_text
