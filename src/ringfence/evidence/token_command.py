"""Get a token from a verifier's service, by a command of the user's own that knows how to speak to it.

The command gets the nonce as its last argument and prints the service's answer: a JWT, or NVIDIA's list of a JWT and its
detached submodules. Services differ in what they want and how they are paid; what must hold of a token is the same.
"""

from __future__ import annotations

import errno
import logging
import shutil
import subprocess
from collections.abc import Callable, Sequence
from typing import Final

from ringfence.errors import ConfigurationError, EvidenceError
from ringfence.keys import PROOF_LIMIT_BYTES, TOKEN_SECONDS

_log = logging.getLogger(__name__)

# Of sysexits.h and of shells: wrong usage, wrong configuration, not executable, not found. Asking again does not help.
_HOPELESS: Final = (64, 78, 126, 127)
_WHAT_TO_SET: Final = "set RINGFENCE_TOKEN_COMMAND to a command that this worker's user may run, with its whole path"
_CANNOT_START: Final = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ENOEXEC)


def fetch_with(command: Sequence[str], seconds: float = TOKEN_SECONDS) -> Callable[[str], bytes]:
    """What a `TokenProver` calls with its nonce."""

    def fetch(nonce: str) -> bytes:
        return run([*command, nonce], seconds)

    return fetch


def check(command: Sequence[str]) -> None:
    """Raise EvidenceError if the command is not there, or is not one that this user may run. Nothing is started."""
    if shutil.which(command[0]) is None:
        raise EvidenceError(
            f"the token command {command[0]} does not start: no file of that name can be executed; {_WHAT_TO_SET}"
        )


def run(command: Sequence[str], seconds: float) -> bytes:
    """What the command prints."""
    try:
        done = subprocess.run(  # noqa: S603 - the user's own command, and no shell reads it
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigurationError(f"the token command {command[0]} gave no token within {seconds:.0f} s") from None
    except OSError as error:
        text = f"the token command {command[0]} does not start: {error.strerror}"
        if error.errno not in _CANNOT_START:  # this machine is short of memory, processes or descriptors just now
            raise ConfigurationError(text) from error
        raise EvidenceError(f"{text}; {_WHAT_TO_SET}") from error
    if done.returncode != 0:
        # What it said may hold credentials, and errors are passed on to other workers: it stays here.
        said = done.stderr.decode("utf-8", "replace").strip()[-300:]
        _log.warning("the token command %s ended with %d: %a", command[0], done.returncode, said)
        text = f"the token command {command[0]} ended with {done.returncode}; what it said is in this worker's log"
        if done.returncode in _HOPELESS:
            raise EvidenceError(
                f"{text}. That status says that asking again does not help: see RINGFENCE_TOKEN_COMMAND"
            )
        raise ConfigurationError(text)
    if not 0 < len(done.stdout) <= PROOF_LIMIT_BYTES:
        raise ConfigurationError(
            f"the token command {command[0]} printed {len(done.stdout)} bytes; a token has 1 to {PROOF_LIMIT_BYTES}"
        )
    return done.stdout
