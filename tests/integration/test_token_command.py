"""The user's command that fetches a token: its output is used as a proof, and its failures are reported."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from functools import partial

import pytest

from ringfence import keys
from ringfence.admission.binding import Binding
from ringfence.admission.policy import Evidence, Policy, verify
from ringfence.admission.proofs import token
from ringfence.admission.proofs.token import nonce_of
from ringfence.errors import ConfigurationError, EvidenceError
from ringfence.evidence.token_command import fetch
from ringfence.keys import PROOF_LIMIT_BYTES
from tests import provers
from tests.unit.admission_samples import worker
from tests.unit.token_mint import ES384, NOW, claims, rules


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def test_the_command_gets_the_nonce_and_its_answer_admits() -> None:
    binding = Binding(b"one connection")
    signed = ES384.sign(claims(eat_nonce=nonce_of(binding.digest)))
    program = f"import sys; print({signed!r} if sys.argv[-1] == {nonce_of(binding.digest)!r} else 'no')"
    prover = provers.of_token(partial(fetch, python(program)))
    policy = Policy((token.verifier(rules(), lambda: NOW),))
    assert verify(policy, Evidence(worker(1).entry, prover.kind, prover.prove(binding), binding))


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (["/no/such/command"], "does not start: No such file"),
        (python("import sys; sys.exit('password')"), "ended with 1; its error output is in this worker's log$"),
        (python(""), "printed 0 bytes"),
        (python(f"print('x' * {PROOF_LIMIT_BYTES})"), f"printed {PROOF_LIMIT_BYTES + 1} bytes"),
    ],
)
def test_what_goes_wrong_is_named(command: list[str], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        fetch(command, "00")


def test_a_command_that_never_ends_is_ended() -> None:
    with pytest.raises(ConfigurationError, match="printed no token within"):
        fetch(python("import threading; threading.Event().wait()"), "00", seconds=0.3)


def test_the_commands_error_output_stays_in_the_local_log(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigurationError) as caught:
        fetch(python("import sys; sys.exit('the service\\nrefuses key-1234')"), "00")
    assert "key-1234" not in str(caught.value)
    assert r"ended with 1: 'the service\nrefuses key-1234'" in caplog.text


def test_a_command_has_ended_before_its_peer_gives_up() -> None:
    assert keys.TOKEN_SECONDS + keys.ADMISSION_SECONDS <= keys.EVIDENCE_SECONDS


@pytest.mark.parametrize("status", [64, 78, 126, 127])
def test_a_permanent_exit_code_is_not_retried(status: int) -> None:
    with pytest.raises(EvidenceError, match=rf"ended with {status}.*RINGFENCE_TOKEN_COMMAND"):
        fetch(python(f"raise SystemExit({status})"), "00")


def test_a_command_that_does_not_start_says_what_to_do() -> None:
    with pytest.raises(EvidenceError, match=r"does not start: No such file.*set RINGFENCE_TOKEN_COMMAND"):
        fetch(["/no/such/command"], "00")


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ETXTBSY])
def test_a_shortage_of_resources_is_retried(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shortage of processes or descriptors is transient and must not end a run."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(ConfigurationError, match="does not start") as caught:
        fetch(python(""), "00")
    assert not isinstance(caught.value, EvidenceError)


@pytest.mark.parametrize("code", [errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ENOEXEC])
def test_a_command_that_cannot_be_executed_is_a_permanent_error(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(EvidenceError, match="does not start"):
        fetch(python(""), "00")
