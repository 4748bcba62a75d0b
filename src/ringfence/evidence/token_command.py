"""Runs the user's command that fetches a token from a verifier service.

The command gets the nonce as its last argument and prints the service's answer: a JWT, or NVIDIA's list of a JWT and its
detached submodules. Services differ in their interfaces and authentication; tokens are verified in the same way.
"""

from __future__ import annotations

import errno
import logging
import shutil
import subprocess
from collections.abc import Sequence
from typing import Final

from ringfence.errors import ConfigurationError, EvidenceError
from ringfence.keys import PROOF_LIMIT_BYTES, TOKEN_SECONDS

_log = logging.getLogger(__name__)

# Exit codes of sysexits.h and of shells: wrong usage, wrong configuration, not executable, not found. A retry does not help.
_PERMANENT: Final = (64, 78, 126, 127)
_WHAT_TO_SET: Final = "set RINGFENCE_TOKEN_COMMAND to a command that this worker's user may run, with its whole path"
_CANNOT_START: Final = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ENOEXEC)


def check(command: Sequence[str]) -> None:
    """Raise EvidenceError if the command does not exist or this user may not run it. Starts nothing."""
    if shutil.which(command[0]) is None:
        raise EvidenceError(
            f"the token command {command[0]} does not start: no file of that name can be executed; {_WHAT_TO_SET}"
        )


def fetch(command: Sequence[str], nonce: str, seconds: float = TOKEN_SECONDS) -> bytes:
    """Run the command for a nonce and return its output.

    Raises ConfigurationError, or EvidenceError if a retry does not help.
    """
    try:
        done = subprocess.run(  # noqa: S603 - the user's own command, and no shell reads it
            [*command, nonce],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigurationError(f"the token command {command[0]} printed no token within {seconds:.0f} s") from None
    except OSError as error:
        text = f"the token command {command[0]} does not start: {error.strerror}"
        if error.errno not in _CANNOT_START:  # the machine is short of memory, processes or descriptors
            raise ConfigurationError(text) from error
        raise EvidenceError(f"{text}; {_WHAT_TO_SET}") from error
    if done.returncode != 0:
        # Its output may contain credentials, and errors are sent to other workers: it goes to the local log only.
        output = done.stderr.decode("utf-8", "replace").strip()[-300:]
        _log.warning("the token command %s ended with %d: %a", command[0], done.returncode, output)
        text = f"the token command {command[0]} ended with {done.returncode}; its error output is in this worker's log"
        if done.returncode in _PERMANENT:
            raise EvidenceError(f"{text}. A retry does not help with that exit code: check RINGFENCE_TOKEN_COMMAND")
        raise ConfigurationError(text)
    if not 0 < len(done.stdout) <= PROOF_LIMIT_BYTES:
        raise ConfigurationError(
            f"the token command {command[0]} printed {len(done.stdout)} bytes; a token has 1 to {PROOF_LIMIT_BYTES}"
        )
    return done.stdout
