"""The exceptions of ringfence. Invalid arguments raise ValueError.

RingfenceError
 ├─ ConfigurationError       to be fixed on this machine: environment, arguments, files
 │   ├─ PolicyError          the policy file, or a file that it refers to
 │   └─ EvidenceError        this machine cannot produce evidence, and a retry will not help
 ├─ UnsupportedError         this backend does not support the call
 ├─ CheckpointError          a checkpoint cannot be saved, or was not accepted
 ├─ RecordError              a signed record was not accepted
 ├─ TensorChangedError       the program resized or moved a tensor while a call was using it
 ├─ PrivateSumError          a private sum was refused on every rank, before anything of a tensor was sent
 ├─ AdmissionError           this worker, or a peer, was not admitted to the run, or no longer passes
 ├─ ProtocolError            a peer violated the protocol
 │   ├─ AuthenticationError  data did not authenticate: changed, forged, replayed or from another link
 │   └─ MismatchError        authenticated data shows that the ranks run different collectives
 ├─ PeerLostError            a worker left, died, or cannot be reached
 ├─ CollectiveTimeoutError   a deadline passed
 └─ AbortedError             another worker reported a failure, this one was interrupted, or the session is too old

All derive from RuntimeError, which torch.distributed raises, so existing handlers keep working.
"""

from __future__ import annotations


class RingfenceError(RuntimeError):
    """Base class of all exceptions of ringfence."""


class ConfigurationError(RingfenceError):
    """The environment, an argument or a file on this machine is wrong; the message says what to change."""


class PolicyError(ConfigurationError):
    """The policy file, or a file that it names, is invalid; the message names the place."""


class EvidenceError(ConfigurationError):
    """This machine cannot provide the evidence that the policy asks for, and another attempt cannot help."""


class UnsupportedError(RingfenceError):
    """The operation exists in torch.distributed, but this backend does not implement it."""


class CheckpointError(RingfenceError):
    """A checkpoint cannot be saved, or the one on storage is damaged, changed, incomplete or not the expected one.

    It is raised on every rank. After a failed load the state that was to be loaded is undefined: do not continue with it.
    """


class RecordError(RingfenceError):
    """A record is malformed, was changed, or was not signed by the key that was given. Nothing that it says was used.

    Also: a data manifest is malformed or was changed, or data cannot be recorded, because they hold links or change meanwhile.
    """


class TensorChangedError(RingfenceError):
    """The program resized or moved the storage of a tensor while a call was using it."""


class PrivateSumError(RingfenceError):
    """A private sum was refused on every rank, before anything of a tensor was sent: by the policy, by the members of the
    group, or because a value exceeds its bound. The session goes on.
    """


class AdmissionError(RingfenceError):
    """A worker was not admitted to the run, or does not pass when it is verified again during a session (`verify_every`).

    `to_peer` is the reason that is sent to the refused worker; it contains no values of the policy.
    """

    def __init__(self, text: str, *, to_peer: str | None = None) -> None:
        super().__init__(text)
        self.to_peer = text if to_peer is None else to_peer

    def with_prefix(self, prefix: str) -> AdmissionError:
        """The same error with a prefix that names the worker."""
        return AdmissionError(f"{prefix}{self}", to_peer=f"{prefix}{self.to_peer}")


class ProtocolError(RingfenceError):
    """A peer sent bytes that violate the protocol."""


class AuthenticationError(ProtocolError):
    """A peer's bytes did not authenticate: they were changed, forged or replayed. None of them were used."""


class MismatchError(ProtocolError):
    """Two workers called different collectives, or the same one with different arguments."""


class PeerLostError(RingfenceError):
    """A worker left the run, died, or has not answered for the outage timeout."""


class CollectiveTimeoutError(RingfenceError):
    """A collective, send or receive did not finish within its timeout."""


class AbortedError(RingfenceError):
    """The session was aborted: another worker reported a failure, this one was interrupted, or `max_session_age` passed."""
