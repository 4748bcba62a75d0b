"""Two workers admit each other over one TLS connection: a state machine without I/O (spec/admission.md).

    child                                   parent
      Hello ───────────────────────────────►
      ◄─────────────────────────────── Hello        same run, generation, world, policy?
      Proof ───────────────────────────────►        the child proves first: an unauthenticated child gets no proof
      ◄──────────────────────── Proof, Admit        the parent verifies, then presents its own
      Admit ───────────────────────────────►        the child verifies; both are admitted

Either side may answer with Refuse, which ends the handshake. A message that the table does not list is a protocol error.

Two workers of one run that do not fit (version, world size, policy, suites) prove themselves first; then the child refuses in
place of Admit, which the parent does not send. So both end at once, and by nobody else's word: anyone can send a hello.

A worker's own proof (a quote, a GPU's report, a token) may take seconds to collect. Without a prover, the handshake stops
in COLLECT; `own_binding` is what the proof must cover, and the caller passes the proof to `present`.

A peer's proof takes CPU time to verify, before the peer is authenticated. Without a policy, the handshake stops in VERIFY with
the proof in `unverified`; the caller verifies it in the background and passes the verdict to `decide`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Final

from ringfence.admission.binding import Binding, Role, TlsValues, bind, proof_digest
from ringfence.admission.messages import Admit, Hello, Message, Proof, Reason, Refuse
from ringfence.admission.policy import Admitted, Evidence, Policy, Prover, Verdict, verdict
from ringfence.errors import AdmissionError, ProtocolError


class State(Enum):
    IDLE = "has not started the handshake"
    HELLO = "waits for a hello"
    COLLECT = "collects its own proof"
    PROOF = "waits for a proof"
    VERIFY = "verifies a proof"
    ADMIT = "waits to be admitted"
    DONE = "has admitted its peer and was admitted"
    REFUSED = "was refused, or refused its peer"


@dataclass(frozen=True)
class Refusal:
    """How a handshake failed.

    `same_run`: the peer claimed this run, this generation and an expected rank. `proven`: its proof was verified, so it is the
    worker that it claims to be, and the two do not fit.
    """

    reason: Reason
    text: str
    by_peer: bool
    same_run: bool
    proven: bool = False


class Handshake:
    """The handshake on one edge. Pass it the peer's messages, send what it returns, and check `state` after each.

    `ranks` are those that the peer may claim. Methods raise ProtocolError for a message or a call out of order.
    """

    def __init__(
        self, role: Role, hello: Hello, ranks: frozenset[int], policy: Policy | None, prover: Prover | None
    ) -> None:
        self.role = role
        self.state = State.IDLE
        self.refusal: Refusal | None = None
        self.admitted: Admitted | None = None
        self.child_proof_digest: bytes | None = None  # represents the child's proof in the roster
        self.child_kind: int | None = None  # the kind of that proof
        self.presented: tuple[Proof, Binding] | None = None  # this worker's own proof
        self.unverified: Evidence | None = None  # the peer's proof, until there is a verdict
        self._hello = hello
        self._ranks = ranks  # that the peer may claim: the dialled one, or this worker's children
        self._policy = policy
        self._prover = prover
        self._channel: TlsValues | None = None
        self.peer: Hello | None = None  # the peer's hello, once it has arrived; a claim
        self._objection: tuple[Reason, str] | None = None  # to a peer that is to prove itself first

    def begin(self, channel: TlsValues) -> list[Message]:
        """Start the handshake once TLS is established; `channel` has its values for the connection."""
        if self.state is not State.IDLE or channel.own_key_digest != self._hello.entry.tls_key_digest:
            raise ProtocolError("a handshake starts once, on a connection with this worker's own TLS key")
        self._channel = channel
        self.state = State.HELLO
        return [self._hello]

    def receive(self, message: Message) -> list[Message]:
        """Handle a message from the peer and return the answers."""
        step = TABLE.get((self.role, self.state, type(message)))
        if step is None:
            name = type(message).__name__
            raise ProtocolError(
                f"the peer sent {name} while this worker, the {self.role.name.lower()}, {self.state.value}"
            )
        answers = step(self, message)
        if self._policy is not None and self.unverified is not None:
            answers += self.decide(verdict(self._policy, self.unverified))
        if self._prover is not None and self.state is State.COLLECT:
            answers += self.present(Proof(self._prover.kind, self._prover.prove(self.own_binding)))
        return answers

    @cached_property
    def own_binding(self) -> Binding:
        """The binding that this worker's own proof must cover."""
        return self._binding(of_peer=False)

    def present(self, proof: Proof) -> list[Message]:
        """Present this worker's own proof, which covers `own_binding`, and return the messages to send."""
        if self.state is not State.COLLECT:
            raise ProtocolError(f"a proof was presented while this worker {self.state.value}")
        binding = self.own_binding
        self.presented = proof, binding
        if self.role is Role.PARENT:
            self.state = State.ADMIT
            return [proof, Admit()] if self._objection is None else [proof]  # then the child verifies, and refuses
        self.state = State.PROOF
        self.child_kind = proof.kind
        self.child_proof_digest = proof_digest(proof.kind, binding, proof.proof)
        return [proof]

    def decide(self, found: Verdict) -> list[Message]:
        """Continue with the verdict on the peer's proof and return the messages to send."""
        evidence, self.unverified = self.unverified, None
        if self.state is not State.VERIFY or evidence is None:
            raise ProtocolError(f"there was a verdict while this worker {self.state.value}")
        if isinstance(found, AdmissionError):
            return self._refuse(Reason.PROOF, str(found), found.to_peer)
        if found.entry != evidence.entry:
            raise ValueError("the verdict is about another entry than the peer's")
        self.admitted = found
        if self.role is Role.CHILD and self._objection is not None:
            return self._refuse(*self._objection, proven=True)
        if self.role is Role.CHILD:
            self.state = State.ADMIT
            return [Admit()]
        self.state = State.COLLECT
        self.child_kind = evidence.kind
        self.child_proof_digest = proof_digest(evidence.kind, evidence.binding, evidence.proof)
        return []

    # -- steps ------------------------------------------------------------------------------------------------------

    def _on_hello(self, message: Message) -> list[Message]:
        assert isinstance(message, Hello)
        assert self._channel is not None
        self.peer = message
        objection = compare(self._hello, message, self._ranks, self._channel)
        if objection is not None and objection[0] not in _AFTER_PROOF:
            return self._refuse(*objection)
        self._objection = objection
        self.state = State.COLLECT if self.role is Role.CHILD else State.PROOF
        return []

    def _on_proof(self, message: Message) -> list[Message]:
        assert isinstance(message, Proof)
        assert self.peer is not None
        binding = self._binding(of_peer=True)
        self.unverified = Evidence(self.peer.entry, message.kind, message.proof, binding)
        self.state = State.VERIFY
        return []

    def _on_admit(self, message: Message) -> list[Message]:
        if self._objection is not None:
            return self._refuse(*self._objection, proven=True)
        self.state = State.DONE
        return []

    def _on_refuse(self, message: Message) -> list[Message]:
        assert isinstance(message, Refuse)
        proven = self.admitted is not None
        reason, text = self._objection if proven and self._objection is not None else (message.reason, message.text)
        self._end(Refusal(reason, text, by_peer=True, same_run=self._same_run(), proven=proven))
        return []

    # -- parts ------------------------------------------------------------------------------------------------------

    def _binding(self, *, of_peer: bool) -> Binding:
        channel, peer = self._channel, self.peer
        assert channel is not None
        assert peer is not None
        own_key, peer_key, exporter = channel.own_key_digest, channel.peer_key_digest, channel.exporter
        if of_peer:
            return bind(Role(1 - self.role), peer, self._hello, peer_key, own_key, exporter)
        return bind(self.role, self._hello, peer, own_key, peer_key, exporter)

    def _refuse(self, reason: Reason, text: str, to_peer: str | None = None, *, proven: bool = False) -> list[Message]:
        """`text` goes to this worker's own log; `to_peer`, if it differs, to the unauthenticated peer."""
        self._end(Refusal(reason, text, by_peer=False, same_run=self._same_run(), proven=proven))
        return [Refuse(reason, text if to_peer is None else to_peer)]

    def _end(self, refusal: Refusal) -> None:
        self.refusal = refusal
        self.admitted = self.unverified = None
        self.state = State.REFUSED

    def _same_run(self) -> bool:
        if self.peer is None:
            return False
        own, peer = self._hello.entry, self.peer.entry
        return (own.run_id, own.generation) == (peer.run_id, peer.generation) and peer.rank in self._ranks


_GOING_ON: Final = (State.HELLO, State.COLLECT, State.PROOF, State.VERIFY, State.ADMIT)
TABLE: Final[dict[tuple[Role, State, type[Message]], Callable[[Handshake, Message], list[Message]]]] = {
    (Role.CHILD, State.HELLO, Hello): Handshake._on_hello,  #     -> COLLECT; present() -> PROOF, sends Proof
    (Role.CHILD, State.PROOF, Proof): Handshake._on_proof,  #     -> VERIFY; decide() -> ADMIT, sends Admit
    (Role.CHILD, State.ADMIT, Admit): Handshake._on_admit,  #     -> DONE
    (Role.PARENT, State.HELLO, Hello): Handshake._on_hello,  #    -> PROOF
    (Role.PARENT, State.PROOF, Proof): Handshake._on_proof,  #    -> VERIFY; decide() -> COLLECT; present() -> ADMIT
    (Role.PARENT, State.ADMIT, Admit): Handshake._on_admit,  #    -> DONE
    **{(role, state, Refuse): Handshake._on_refuse for role in Role for state in _GOING_ON},  # -> REFUSED
}


_AFTER_PROOF: Final = frozenset({Reason.VERSION, Reason.WORLD_SIZE, Reason.POLICY, Reason.SUITE})


def compare(own: Hello, peer: Hello, ranks: frozenset[int], channel: TlsValues) -> tuple[Reason, str] | None:
    """Return why two hellos do not match, naming both values, or None if they match."""
    here, there = own.entry, peer.entry
    own_name = f"rank {here.rank}"
    if there.run_id != here.run_id:
        return Reason.RUN, f"{own_name} is of run '{here.run_id}', its peer of run '{there.run_id}'"
    if there.generation != here.generation:
        return (
            Reason.GENERATION,
            f"{own_name} is of generation {here.generation}, its peer of generation {there.generation}",
        )
    if there.rank not in ranks:
        expected = " or ".join(str(rank) for rank in sorted(ranks)) or "none"
        return Reason.RANK, f"{own_name} expects rank {expected} on this connection, its peer is rank {there.rank}"
    if there.tls_key_digest != channel.peer_key_digest:
        one, two = there.tls_key_digest[:8].hex(), channel.peer_key_digest[:8].hex()
        return (
            Reason.KEY,
            f"rank {there.rank} names TLS key {one} in its entry and uses {two}: the connection may be intercepted",
        )
    both = f"rank {here.rank} and rank {there.rank}"
    if peer.version != own.version:
        newer = max((own, peer), key=lambda each: each.version)
        return (
            Reason.VERSION,
            f"{own_name} runs ringfence {own.release}, which speaks version {own.version} of the protocol, and rank "
            f"{there.rank} runs {peer.release}, version {peer.version}: install one release on all machines, such as "
            f"{newer.release}",
        )
    if there.world_size != here.world_size:
        return Reason.WORLD_SIZE, f"{both} have different world sizes: {here.world_size} and {there.world_size}"
    if peer.policy_digest != own.policy_digest:
        one, two = own.policy_digest[:8].hex(), peer.policy_digest[:8].hex()
        return Reason.POLICY, f"{both} have different policies: {one} and {two}"
    if not set(own.suites) & set(peer.suites):
        return Reason.SUITE, f"{both} share no cipher suite: {own.suites} and {peer.suites}"
    return None
