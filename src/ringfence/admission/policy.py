"""Policies and proofs: only `verify()` creates an `Admitted`, and a roster consists of `Admitted` workers only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, NoReturn, TypeVar

from ringfence import keys
from ringfence.admission import encoding
from ringfence.admission.binding import Binding
from ringfence.admission.entry import Entry, Listing
from ringfence.errors import AdmissionError

# Kinds whose prover holds a key: presented without delay, and an endorsement with that key proves as much about an entry as
# the proof. The others come from a device or a service: they take time, and cannot endorse an entry.
SIGNING_KINDS: Final = frozenset({1, 2})

# Kinds that are verified with one HMAC, whatever was sent: not worth a background thread.
INSTANT_KINDS: Final = frozenset({1})

Clock = Callable[[], float]  # seconds since 1970; passed to verifiers, because this package reads no clock
T = TypeVar("T")
P = TypeVar("P", "Evidence", Listing)


@dataclass(frozen=True)
class Evidence:
    """A proof presented on a connection. `at`: when it was presented, in seconds since 1970; None: now."""

    entry: Entry
    kind: int
    proof: bytes = field(repr=False)
    binding: Binding
    at: float | None = None

    def moment(self, clock: Clock) -> float:
        """Return the time as of which to verify."""
        return clock() if self.at is None else self.at


class Verifier(ABC):
    """The verifier of one kind of proof.

    Its methods raise AdmissionError if the worker is not admitted. They return the name that the proof proves, if any.
    """

    kind: int  # in messages
    name: str  # for messages to people

    @abstractmethod
    def content(self) -> bytes:
        """Return all that decides the verdict, without secrets. It goes into the policy digest, which workers compare."""

    @abstractmethod
    def verify(self, evidence: Evidence) -> str | None:
        """Verify that the worker on this connection has what the policy asks for."""

    @abstractmethod
    def verify_listing(self, listing: Listing) -> str | None:
        """Verify that a prover admitted by this policy endorsed the entry; for workers that do not see the connection."""

    def without_key(self) -> Verifier:
        """Return the verifier for peer verification, after the roster's endorsements were verified.

        A verifier whose key could also make proofs returns one without it.
        """
        return self

    def for_agents(self) -> Verifier:
        """Return a verifier that gives the same verdicts for any rank. Agents of `ringfence run` have other ranks."""
        return self


class Prover(ABC):
    """The prover of one kind of proof. Without a key of its own it endorses and signs nothing."""

    kind: int

    @abstractmethod
    def prove(self, binding: Binding) -> bytes: ...

    def endorse(self, entry: Entry, proof_digest: bytes) -> bytes:
        return b""

    def sign_roster(self, rank: int, roster_digest: bytes) -> bytes:
        """Return a signature of the roster that the worker holds, so that no other worker can acknowledge it."""
        return b""


@dataclass(frozen=True)
class PrivateSumTerms:
    """What a policy says of private sums (spec/private-sum.md). The members are those that its rules name."""

    colluding: int  #   members that may join what they know without learning another one's contribution
    min_members: int  # of a private sum


@dataclass(frozen=True, kw_only=True)
class PolicyTerms:
    """What a policy says of a run, besides whom it admits."""

    min_workers: int = 1  # a hostile store must not split a job into smaller worlds
    max_session_age: int | None = None  # seconds until all workers must be admitted again
    verify_every: int | None = None  # seconds between verifications during a session
    key_agreement: str = keys.KEY_AGREEMENTS[0]  # how TLS may agree on keys
    inside_machine: tuple[str, ...] = ()  # backends that need no sealing between workers on one machine
    same_host: str = keys.SAME_HOST[0]  # how workers on one machine exchange tensors
    forwarded: str = keys.FORWARDED[0]  # what authenticates forwarded data on each link
    record: str = keys.RECORDS[0]  # whether each worker must write a record of the run
    private_sum: PrivateSumTerms | None = None  # None: there are none

    def terms(self) -> dict[str, Any]:
        """Return these values by name."""
        return {each.name: getattr(self, each.name) for each in fields(PolicyTerms)}

    def digest_with(self, rules: Iterable[tuple[int, bytes, str]]) -> bytes:
        """Return the digest of the policy, over kind, content and member of each rule, regardless of their order."""
        parts = [encoding.number(self.min_workers, 4), encoding.number(self.max_session_age or 0, 8)]
        parts.append(encoding.text(self.key_agreement))
        if self.inside_machine:
            parts.append(b"".join(encoding.text(name) for name in sorted(self.inside_machine)))
        if self.same_host != keys.SAME_HOST[0]:
            parts.append(b"same host" + encoding.text(self.same_host))
        if self.forwarded != keys.FORWARDED[0]:
            parts.append(b"forwarded" + encoding.text(self.forwarded))
        if self.record != keys.RECORDS[0]:
            parts.append(b"record" + encoding.text(self.record))
        if self.verify_every is not None:
            parts.append(b"verify every" + encoding.number(self.verify_every, 8))
        if self.private_sum is not None:
            numbers = (self.private_sum.colluding, self.private_sum.min_members)
            parts.append(b"private sum" + b"".join(encoding.number(each, 4) for each in numbers))
        for kind, content, member in sorted(set(rules)):
            parts += [encoding.number(kind, 1), content]
            if member:  # longer than the kind of the next rule, which would follow otherwise
                parts.append(b"member" + encoding.text(member))
        return keys.digest(keys.POLICY, *parts)


@dataclass(frozen=True)
class Policy(PolicyTerms):
    """The verifiers, any one of which admits a worker. A rule with several proofs is a `bundle.BundleVerifier`."""

    verifiers: tuple[Verifier, ...]
    # Of private sums: whose workers each verifier admits; "" for none. Empty: no rule has one.
    members: tuple[str, ...] = ()

    @property
    def kinds(self) -> tuple[int, ...]:
        return tuple(sorted({verifier.kind for verifier in self.verifiers}))

    @property
    def digest(self) -> bytes:
        """Equal on two workers only if their policies give the same verdicts."""
        return self.digest_with((each.kind, each.content(), member) for each, member in self.rules())

    def rules(self) -> Iterable[tuple[Verifier, str]]:
        """Return each verifier with its member."""
        return zip(self.verifiers, self.members or ("",) * len(self.verifiers), strict=True)

    def without_keys(self) -> Policy:
        """Return the policy without keys, for use during the session: a long run must not hold what admits to the next one."""
        return replace(self, verifiers=tuple(verifier.without_key() for verifier in self.verifiers))

    def for_agents(self) -> Policy:
        """Return the policy as agents use it, with the same digest."""
        return replace(self, verifiers=tuple(verifier.for_agents() for verifier in self.verifiers))


_TOKEN: Final = object()


class Admitted:
    """A worker that was verified and admitted. Only `verify()` can create one."""

    __slots__ = ("entry", "identity", "member", "proof_name")

    entry: Entry
    proof_name: str
    identity: str  # the name in its certificate; "" where none was asked for
    member: str  #   that the rule names, for private sums; "" if it names none

    def __init__(self, entry: Entry, proof_name: str, token: object, identity: str = "", member: str = "") -> None:
        if token is not _TOKEN:
            raise TypeError("only policy.verify() creates an Admitted")
        object.__setattr__(self, "entry", entry)
        object.__setattr__(self, "proof_name", proof_name)
        object.__setattr__(self, "identity", identity)
        object.__setattr__(self, "member", member)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError("an Admitted is immutable")

    def __reduce__(self) -> NoReturn:
        raise TypeError("an Admitted cannot be pickled or copied: that would be admission without verification")

    def __repr__(self) -> str:
        return f"Admitted({self.entry}, {self.proof_name})"


def verify(policy: Policy, presented: Evidence | Listing) -> Admitted:
    """Admit a worker by its evidence or its listing. Raises AdmissionError, which says why it is not admitted.

    A worker that rules of two members admit is refused: workers whose policies list the rules in another order would take it
    for a worker of another member.
    """
    objections: list[AdmissionError] = []
    admitted: Admitted | None = None
    for verifier, member in policy.rules():
        if verifier.kind != presented.kind or (admitted is not None and admitted.member == member):
            continue
        try:
            if isinstance(presented, Evidence):
                name = ask(verifier.verify, presented)
            else:
                name = ask(verifier.verify_listing, presented)
        except AdmissionError as error:
            objections.append(error)
            continue
        if admitted is not None:
            raise AdmissionError(
                f"rank {presented.entry.rank}: rules of two members admit {name or verifier.name} ({admitted.member!a} and "
                f"{member!a}): let each name match the rules of one"
            )
        admitted = Admitted(presented.entry, verifier.name, _TOKEN, name or "", member)
        if not policy.members:
            return admitted
    if admitted is not None:
        return admitted
    if objections:
        raise AdmissionError(
            "; or: ".join(dict.fromkeys(str(each) for each in objections)),
            to_peer="; or: ".join(dict.fromkeys(each.to_peer for each in objections)),
        )
    accepted = ", or ".join(dict.fromkeys(verifier.name for verifier in policy.verifiers))
    to_peer = f"rank {presented.entry.rank} presents a proof of kind {presented.kind}"
    raise AdmissionError(
        f"{to_peer}; this worker's policy accepts: {accepted}",
        to_peer=f"{to_peer}, which this worker's policy does not accept",
    )


def ask(verify: Callable[[P], T], presented: P) -> T:
    """Return what a verifier finds. Raises AdmissionError, also for what is presented and makes a library fail."""
    try:
        return verify(presented)
    except AdmissionError:
        raise
    except BaseException as error:
        # Libraries raise undocumented exceptions for bytes that a peer chose. That peer is refused, and no other is affected.
        # A panic inside a library is not an Exception in Python.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        text = f"rank {presented.entry.rank} presents evidence that cannot be verified ({type(error).__name__})"
        raise AdmissionError(text) from error


Verdict = Admitted | AdmissionError


def verdict(policy: Policy, presented: Evidence) -> Verdict:
    """Like `verify`, but return the AdmissionError of a refusal instead of raising it."""
    try:
        return verify(policy, presented)
    except AdmissionError as error:
        return error
