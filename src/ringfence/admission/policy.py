"""Who may join: `verify()` is the only maker of an `Admitted`, and nothing but an `Admitted` gets into a roster."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Final, NoReturn, Protocol, runtime_checkable

from ringfence import keys
from ringfence.admission import encoding
from ringfence.admission.binding import Binding
from ringfence.admission.entry import Entry, Listing
from ringfence.errors import AdmissionError

# Kinds whose prover holds a key: they are shown at once, and an endorsement by that key says of an entry all that the proof
# says of it. The others come from a device or a service: they take time, and can sign nothing but what they were made for.
SIGNING_KINDS: Final = frozenset({1, 2})

# Kinds that take one HMAC to verify, whatever was sent: not worth another thread.
INSTANT_KINDS: Final = frozenset({1})

Clock = Callable[[], float]  # seconds since 1970; a verifier is handed one, for nothing here reads a clock


@dataclass(frozen=True)
class Evidence:
    """A proof as it was shown on a connection; `at`: not now but then, in seconds since 1970."""

    entry: Entry
    kind: int
    proof: bytes = field(repr=False)
    binding: Binding
    at: float | None = None

    def moment(self, clock: Clock) -> float:
        """The time to verify by."""
        return clock() if self.at is None else self.at


class Verifier(Protocol):
    """One kind of proof, as its verifier sees it. Raises AdmissionError; a return means yes.

    What is returned is the name that the proof proves, where it proves one.
    """

    @property
    def kind(self) -> int: ...  #     on the wire

    @property
    def name(self) -> str: ...  #     for people

    def content(self) -> bytes:
        """All that decides the verdict and may be shown: goes into the policy digest, which all workers compare."""

    def verify(self, evidence: Evidence) -> str | None:
        """The worker holds what this policy asks for, on this connection."""

    def verify_listing(self, listing: Listing) -> str | None:
        """Whoever cannot see the connection checks this: the entry was endorsed by someone this policy admits."""


@runtime_checkable
class HoldsKey(Protocol):
    """A verifier whose key could also make proofs. It is needed until the roster is verified, not longer."""

    def without_key(self) -> Verifier:
        """Verifies at peer verification, where the roster's endorsements have been verified."""


class Prover(Protocol):
    """One kind of proof, as its maker sees it."""

    @property
    def kind(self) -> int: ...

    def prove(self, binding: Binding) -> bytes: ...

    def endorse(self, entry: Entry, proof_digest: bytes) -> bytes: ...


@dataclass(frozen=True)
class Policy:
    """What admits a worker: any one of the verifiers does (one that asks for several proofs is a `bundle.All`)."""

    verifiers: tuple[Verifier, ...]
    min_workers: int = 1  # a store that lies must not split a job into smaller worlds
    max_session_age: int | None = None  # seconds until everyone must be admitted anew
    key_agreement: str = keys.KEY_AGREEMENTS[0]  # how TLS may agree on keys

    @property
    def kinds(self) -> tuple[int, ...]:
        return tuple(sorted({verifier.kind for verifier in self.verifiers}))

    @property
    def digest(self) -> bytes:
        """Equal on two workers only if they would verify alike."""
        rules = [(verifier.kind, verifier.content()) for verifier in self.verifiers]
        return policy_digest(rules, self.min_workers, self.max_session_age, self.key_agreement)

    def without_keys(self) -> Policy:
        """What is left to verify by when the session has begun: a run of days must not hold what admits to the next one."""
        return replace(self, verifiers=tuple(without_key(verifier) for verifier in self.verifiers))


def without_key(verifier: Verifier) -> Verifier:
    return verifier.without_key() if isinstance(verifier, HoldsKey) else verifier


def policy_digest(
    rules: Iterable[tuple[int, bytes]], min_workers: int, max_session_age: int | None, key_agreement: str
) -> bytes:
    """Over the kind and the content of each rule. Their order does not matter to anybody, so it is not in it."""
    parts = [encoding.number(min_workers, 4), encoding.number(max_session_age or 0, 8), encoding.text(key_agreement)]
    for kind, content in sorted(set(rules)):
        parts += [encoding.number(kind, 1), content]
    return keys.digest(keys.POLICY, *parts)


_TOKEN: Final = object()


class Admitted:
    """A worker that was verified and admitted. Holding one is the proof of it: only `verify()` can make one."""

    __slots__ = ("entry", "how", "identity")

    entry: Entry
    how: str
    identity: str  # the name in its certificate; "" where none was asked for

    def __init__(self, entry: Entry, how: str, token: object, identity: str = "") -> None:
        if token is not _TOKEN:
            raise TypeError("only policy.verify() admits")
        object.__setattr__(self, "entry", entry)
        object.__setattr__(self, "how", how)
        object.__setattr__(self, "identity", identity)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError("an Admitted does not change")

    def __reduce__(self) -> NoReturn:
        raise TypeError("an Admitted is never pickled or copied: it would be admission without a verifier")

    def __repr__(self) -> str:
        return f"Admitted({self.entry}, {self.how})"


def verify(policy: Policy, shown: Evidence | Listing) -> Admitted:
    """Admit a worker, or raise an AdmissionError that says why not."""
    objections: list[AdmissionError] = []
    for verifier in policy.verifiers:
        if verifier.kind != shown.kind:
            continue
        try:
            name = verifier.verify(shown) if isinstance(shown, Evidence) else verifier.verify_listing(shown)
        except AdmissionError as error:
            objections.append(error)
            continue
        except BaseException as error:
            # Libraries raise what they do not announce, over bytes that a peer chose. Whoever shows such bytes is
            # refused, and nobody else pays. A panic inside a library is no Exception in Python.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            text = f"rank {shown.entry.rank} shows evidence that cannot be verified ({type(error).__name__})"
            objections.append(AdmissionError(text))
            continue
        return Admitted(shown.entry, verifier.name, _TOKEN, name or "")
    if objections:
        raise AdmissionError(
            "; or: ".join(dict.fromkeys(str(each) for each in objections)),
            told="; or: ".join(dict.fromkeys(each.told for each in objections)),
        )
    accepted = ", or ".join(dict.fromkeys(verifier.name for verifier in policy.verifiers))
    told = f"rank {shown.entry.rank} shows a proof of kind {shown.kind}"
    raise AdmissionError(
        f"{told}; this worker's policy accepts: {accepted}", told=f"{told}, which this worker's policy does not accept"
    )


Verdict = Admitted | AdmissionError


def verdict(policy: Policy, shown: Evidence) -> Verdict:
    """The same, where a refusal is an answer and not an exception: for those who ask in another thread."""
    try:
        return verify(policy, shown)
    except AdmissionError as error:
        return error
