"""The exceptions of ringfence. Wrong arguments raise ValueError.

RingfenceError
 ├─ ConfigurationError       ours to fix: environment, arguments, files on this machine
 │   ├─ PolicyError          the policy file, or a file that it names
 │   └─ EvidenceError        this machine will not give its evidence, however often it is asked
 ├─ UnsupportedError         this backend does not do what was asked
 ├─ TensorChangedError       the program resized or moved a tensor while a call was using it
 ├─ AdmissionError           this worker, or a peer, was not admitted to the run
 ├─ ProtocolError            a peer's bytes are not what the protocol allows
 │   ├─ AuthenticationError  they do not verify: changed, forged, replayed or from another place
 │   └─ MismatchError        they verify, and say that the ranks run different collectives
 ├─ PeerLostError            a worker is gone
 ├─ CollectiveTimeoutError   a deadline passed
 └─ AbortedError             another worker reported a failure, this one was interrupted, or the session is too old

All derive from RuntimeError, which is what torch.distributed raises, so existing handlers keep working.
"""

from __future__ import annotations


class RingfenceError(RuntimeError):
    """Base of all of these."""


class ConfigurationError(RingfenceError):
    """Something on this machine must be changed; the message says what."""


class PolicyError(ConfigurationError):
    """The policy file says something that cannot be meant; the message names the place."""


class EvidenceError(ConfigurationError):
    """This worker cannot show what it was set up to show, and asking again will not help; the message says what to do."""


class UnsupportedError(RingfenceError):
    """The operation exists in torch.distributed, and this backend does not offer it."""


class TensorChangedError(RingfenceError):
    """The program resized or moved the storage of a tensor that a call was still using."""


class AdmissionError(RingfenceError):
    """A worker was not admitted. `told` is what it may hear of it itself: nothing of the values in the policy."""

    def __init__(self, text: str, *, told: str | None = None) -> None:
        super().__init__(text)
        self.told = text if told is None else told

    def within(self, prefix: str) -> AdmissionError:
        """The same, about somebody."""
        return AdmissionError(f"{prefix}{self}", told=f"{prefix}{self.told}")


class ProtocolError(RingfenceError):
    """A peer sent what the protocol does not allow."""


class AuthenticationError(ProtocolError):
    """Bytes did not authenticate. Nothing of them was used."""


class MismatchError(ProtocolError):
    """Two ranks run different collectives."""


class PeerLostError(RingfenceError):
    """A worker left, died, or cannot be reached."""


class CollectiveTimeoutError(RingfenceError):
    """A deadline passed."""


class AbortedError(RingfenceError):
    """The session was aborted: by another worker's report, by an interruption, or at max_session_age."""
