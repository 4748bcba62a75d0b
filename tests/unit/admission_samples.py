"""Workers, messages and hypothesis strategies that the tests of admission share."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from ringfence import keys
from ringfence.admission.binding import Role, TlsValues
from ringfence.admission.entry import Entry, Listing
from ringfence.admission.handshake import Handshake
from ringfence.admission.messages import (
    Acknowledge,
    Admit,
    Entries,
    Failure,
    Go,
    Hello,
    Message,
    Proof,
    Reason,
    Refuse,
    Waiting,
    Welcome,
)
from ringfence.admission.policy import Policy
from ringfence.admission.proofs.secret import SharedSecret
from ringfence.admission.tree import children_of, parent_of

SECRET = keys.Secret(bytes(range(100, 132)))
SUITES = (keys.SUITE_AES_256_GCM,)


@dataclass(frozen=True)
class Worker:
    """Everything of a worker but its sockets."""

    entry: Entry
    shared: SharedSecret

    @property
    def policy(self) -> Policy:
        return Policy((self.shared,))

    @property
    def hello(self) -> Hello:
        return Hello(self.entry, self.policy.digest, SUITES, self.policy.kinds, release="0.1.0")

    def handshake(self, role: Role, hello: Hello | None = None) -> Handshake:
        """With the parent it dials, or the children it expects."""
        parent = parent_of(self.entry.rank)
        expected = {parent} if role is Role.CHILD else set(children_of(self.entry.rank, self.entry.world_size))
        ranks = frozenset(rank for rank in expected if rank is not None)
        return Handshake(role, hello or self.hello, ranks, self.policy, self.shared)


def fixed_bytes(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def worker(rank: int, world_size: int = 4, secret: keys.Secret = SECRET, **changes: object) -> Worker:
    entry = Entry(
        run_id="run-7",
        generation="3",
        rank=rank,
        world_size=world_size,
        public_key=fixed_bytes(f"x25519 {rank}"),
        tls_key_digest=fixed_bytes(f"tls {rank}"),
        host="10.0.0.7",
        port=20000 + rank,
    )
    entry = replace(entry, **changes)  # type: ignore[arg-type]
    return Worker(entry, SharedSecret(secret, entry.run_id))


def channels(child: Worker, parent: Worker, exporter: bytes = b"e" * 32) -> tuple[TlsValues, TlsValues]:
    """What TLS would tell the child, and the parent, of one connection."""
    one, two = child.entry.tls_key_digest, parent.entry.tls_key_digest
    return TlsValues(one, two, exporter), TlsValues(two, one, exporter)


Tamper = Callable[[Role, Message], Message]


def converse(
    child: Handshake,
    parent: Handshake,
    ends: tuple[TlsValues, TlsValues],
    tamper: Tamper = lambda role, message: message,
) -> list[tuple[Role, Message]]:
    """Pass messages between two handshakes until neither sends any. `tamper` may change them."""
    transcript: list[tuple[Role, Message]] = []
    queue = [(Role.CHILD, each) for each in child.begin(ends[0])] + [
        (Role.PARENT, each) for each in parent.begin(ends[1])
    ]
    while queue:
        sender, message = queue.pop(0)
        transcript.append((sender, message))
        receiver = parent if sender is Role.CHILD else child
        if receiver.refusal is not None:
            continue  # a real peer has closed the connection
        queue += [(Role(1 - sender), each) for each in receiver.receive(tamper(sender, message))]
    return transcript


# -- strategies -----------------------------------------------------------------------------------------------------


def texts(low: int, high: int) -> st.SearchStrategy[str]:
    return st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), min_size=low, max_size=high)


digests = st.binary(min_size=32, max_size=32)
sets = st.sets(st.integers(1, 255), min_size=1, max_size=9).map(lambda found: tuple(sorted(found)))
ranks = st.integers(0, 2**32 - 1)


@st.composite
def entries(draw: st.DrawFn) -> Entry:
    world_size = draw(st.integers(1, 1 << 20))
    return Entry(
        run_id=draw(texts(1, 128)),
        generation=draw(texts(1, 64)),
        rank=draw(st.integers(0, world_size - 1)),
        world_size=world_size,
        public_key=draw(digests),
        tls_key_digest=draw(digests),
        host=draw(texts(1, 255)),
        port=draw(st.integers(0, 0xFFFF)),
    )


listings = st.builds(Listing, entries(), st.integers(1, 255), digests, st.binary(max_size=100))
listing_lists = st.lists(listings, min_size=1, max_size=3).map(tuple)
waiting = st.lists(ranks, max_size=16).flatmap(
    lambda named: st.builds(Waiting, st.integers(len(named), 1 << 20), st.just(tuple(named)))
)
signature_lists = st.lists(st.binary(max_size=80), max_size=4).map(tuple)
messages: st.SearchStrategy[Message] = st.one_of(
    st.builds(Hello, entries(), digests, sets, sets),
    st.builds(Proof, st.integers(0, 255), st.binary(max_size=300)),
    st.just(Admit()),
    st.builds(Refuse, st.sampled_from(Reason), texts(0, 512)),
    st.builds(Entries, listing_lists),
    waiting,
    st.builds(Welcome, st.integers(0, 255), st.builds(keys.Secret, digests), st.binary(max_size=100), listing_lists),
    st.builds(Acknowledge, digests, signature_lists),
    st.builds(Go, digests, signature_lists),
    st.builds(Failure, ranks, texts(0, 512)),
)
