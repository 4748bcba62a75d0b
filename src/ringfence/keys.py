"""The key schedule: all labels, keys and limits of the protocol.

    shared secret ──► admission key (per run)                                  proofs at admission
    session secret ──► session key ──┬► hello key                                  first message on a link
                                 ├► handshake secret (with X25519 and both nonces)
                                 │     └► confirmation keys
                                 └► connection secret (with X25519, ML-KEM-768 and both nonces)
                                       ├► sender → receiver: key, IV, ratchet
                                       └► receiver → sender: key, IV, ratchet
    session key, random contributions of all members, group digest ──► group instance secret
                                 └► origin key per sender and key phase       sealed once, forwarded
    random contributions of two workers, session key ──► seed of a pair ──► mask key per private sum     spec/private-sum.md
    key-encryption key ──► data key (drawn for each save) ──► key per file         checkpoints (spec/checkpoint.md)

HKDF-SHA-256 and HMAC-SHA-256 come from `cryptography`; this module implements no primitives.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Final, NoReturn

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.hmac import HMAC
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand

VERSION: Final = 1
RELEASE_BYTES: Final = 64  # of the text that names a release
SUITE_AES_256_GCM: Final = 1
SUITE_NAMES: Final = {SUITE_AES_256_GCM: "AES-256-GCM"}
SUITES: Final = tuple(SUITE_NAMES)

# -- limits ---------------------------------------------------------------------------------------------------------

SECRET_BYTES: Final = 32
KEY_BYTES: Final = 32
IV_BYTES: Final = 12
TAG_BYTES: Final = 16
NONCE_BYTES: Final = 32  # for freshness in hellos; not an AEAD nonce
DIGEST_BYTES: Final = 32
KEM_PUBLIC_BYTES: Final = 1184  # ML-KEM-768 (FIPS 203)
KEM_CIPHERTEXT_BYTES: Final = 1088

SEGMENT_BYTES: Final = 256 * 1024  # the largest unit that is sealed
KEY_PHASE_SHIFT: Final = 20  # a key seals at most 2**20 segments
COUNTER_LIMIT: Final = 1 << 52  # so that a key phase fits its 32 bits in a header

TREE_FANOUT: Final = 4  # children of a worker in the admission tree
ADMISSION_SECONDS: Final = 10.0  # for an unauthenticated peer to finish its handshake, or to send a valid hello
EVIDENCE_SECONDS: Final = 30.0  # to present hardware evidence or a token, after the hellos match
TOKEN_SECONDS: Final = 20.0  # for a token command; ends before its peer's limit
ADMISSION_BYTES: Final = 128 * 1024  # that an unauthenticated peer may send: TLS, a hello, a proof
TLS_HANDSHAKE_BYTES: Final = 8 * 1024  # of these, until TLS is established; a key share and a certificate have 2,400
ADMISSION_RECORDS: Final = 64  # TLS records in which it may send them: each costs CPU time, whatever its size
ADMISSION_CPU_SECONDS: Final = 0.25  # of the loop for one unauthenticated peer; an honest one takes 0.003
ADMISSION_SLICE_SECONDS: Final = 0.01  # of CPU time for all unauthenticated peers before admitted neighbours are served
ADMISSION_PENDING: Final = 64  # concurrent peers without an accepted hello, and as many with one
ADMISSION_PENDING_PER_ADDRESS: Final = 16  # of those without
LINK_HELLO_SECONDS: Final = 10.0  # for a dialler to identify itself
LINK_PENDING: Final = 256  # concurrent diallers that have not
LINK_PENDING_PER_ADDRESS: Final = 128  # workers of one host share an address and dial for every group
LINK_DIALS: Final = 5  # attempts while the acceptor is full, with exponential backoff
LINK_REDIAL_SECONDS: Final = 0.05
CHANNEL_LIMIT: Final = 8  # connections between two workers of a group, in one direction; each has a thread
SHARED_SLOTS: Final = 64  # segments in the memory that a worker shares with others of its machine, for each group
SHARED_LINK_SLOTS: Final = 8  # of these, in the memory that it shares on a point-to-point link
SHARED_LIMIT_BYTES: Final = 64 << 20  # of a worker over all groups; further groups send through sockets
SHARED_FROM_BYTES: Final = 32 * 1024  # payload from which shared memory is used
JOIN_SECONDS: Final = 300.0  # until a run must have formed; default of RINGFENCE_JOIN_TIMEOUT
JOIN_RANGE: Final = (1.0, 86400.0)
OUTAGE_SECONDS: Final = 300.0  # without an answer until a worker is lost; default of RINGFENCE_OUTAGE_TIMEOUT
OUTAGE_RANGE: Final = (2.0, 86400.0)
OUTAGE_REDIAL_SECONDS: Final = 1.0  # between attempts to dial a worker that does not answer
SUSPICION_SECONDS: Final = 1.0  # between the end of a data connection and reporting its worker as lost
ABORT_TEXT_BYTES: Final = 256
REFUSAL_TEXT_BYTES: Final = 512
PROOF_LIMIT_BYTES: Final = 112 * 1024  # an HMAC is 32, a quote 5,000; 16 GPUs with their certificates are 98,000
SIGNATURE_BYTES: Final = 1024  # by a certificate's key: RSA of 8192 bits
PRESENTATION_BYTES: Final = PROOF_LIMIT_BYTES + 1024  # a proof with its preimage, as presented at peer verification
TABLE_LIMIT_BYTES: Final = 1 << 20  # of the schedule table sent with the roster
LAST_CALL_SECONDS: Final = 30.0  # for more nodes, once enough of them wait for a round
AGENT_LOST_SECONDS: Final = 30.0  # without a connection until an agent is lost
ROUND_SECONDS: Final = 600.0  # until a round must have formed
CALL_BYTES: Final = 16 << 20  # of a call to the store, and of each of its parts
CALL_PARTS: Final = 1 << 16
CALL_LIMIT_MILLISECONDS: Final = 30 * 86400 * 1000  # that a call may wait
PRIVATE_SUM_BLOCK_BYTES: Final = 256 << 10  # of a contribution that is masked at a time, to stay in the L2 cache
PRIVATE_SUM_CALLS: Final = 1 << 48  # of a group, each with mask keys of its own
PRIVATE_SUM_BYTES: Final = 1 << 40  # of a contribution: 2**36 blocks of AES under a key
STREAM_SEGMENT_BYTES: Final = 1 << 20  # of a sealed file, with its tag; the first one includes the header
STREAM_SALT_BYTES: Final = 32
STREAM_PREFIX_BYTES: Final = 7  # of a nonce; a counter of four bytes and the mark of the last segment follow
STREAM_SEGMENTS: Final = 1 << 32
CHECKPOINT_ID_BYTES: Final = 16  # of a save, a shard or a sealed file: random
CHECKPOINT_INDEX_BYTES: Final = 1 << 30  # the largest index
CHECKPOINT_NAME_BYTES: Final = 256  # the longest name of a key-encryption key
CHECKPOINT_WRAPPED_BYTES: Final = 1 << 16  # the longest wrapped data key
CHECKPOINT_DIMENSIONS: Final = 64  # of a tensor
CHECKPOINT_PATH_PARTS: Final = 256  # of an item's name
VALUE_DEPTH: Final = 32  # of lists and dicts in a value
RECORD_BYTES: Final = 1 << 20  # of a signed record; one of a self-test is 20,000
DATA_PIECE_BYTES: Final = 64 << 20  # of a file in a data manifest: hashed by one thread, and once if a run is resumed
DATA_NAME_BYTES: Final = 4096  # of a file in a data manifest, with its folders
RECORD_TIMES: Final = 1 << 47  # above each time in a log, in milliseconds: the year 6429, which every calendar has
RECORD_LINE_BYTES: Final = 1 << 18  # of a line in a run's log, with its newline
RECORD_LINES: Final = 1 << 20  # of a log: eight months of one worker's counters
RECORD_LOG_BYTES: Final = 1 << 30
RECORD_BLOB_BYTES: Final = 1 << 28  # of a file that a log refers to; the roster of 2**16 workers has 2**27
RECORD_DEPTH: Final = 5  # of lists and objects in a line
RECORD_SIGN_SECONDS: Final = 1.0  # from an entry to the signature that covers it
RECORD_QUEUE: Final = 1024  # entries that wait for the disk; further ones are lost, which is an error
RECORD_PEERS_SECONDS: Final = 60.0  # between two entries of counters
RECORD_POINT_FRAMES: Final = 1 << 16  # of a connection, between two points at which its endpoints can be compared
RECORD_POINTS: Final = 64  # that wait to be recorded, for each direction: of 70,000 frames a second
RECORD_HEADS_SECONDS: Final = 60.0  # for all workers to publish the heads of their previous logs

# Key agreement groups of TLS in the order of preference. Hybrid: an attacker who records connections now and has a quantum
# computer later must still break ML-KEM; an attacker who breaks ML-KEM must still break X25519.
HYBRID_GROUPS: Final = ("X25519MLKEM768",)
CLASSICAL_GROUPS: Final = ("X25519", "P-256")
KEY_AGREEMENTS: Final = ("hybrid", "any")  # values in a policy; the first is the default

# How workers of one machine exchange tensors; values in a policy, the first is the default. "shared": through memory that they
# share. "sealed": as between machines.
SAME_HOST: Final = ("shared", "sealed")

# What authenticates forwarded data on each link; values in a policy, the first is the default. "origin": the tag of the
# worker that sealed it. "every_hop": also the tag of the link, which then covers the ciphertext.
FORWARDED: Final = ("origin", "every_hop")
LINK_VERSIONS: Final = (VERSION, 2)  # in the hello of a link, with each of these values

# Whether workers must write a record of the run; values in a policy, the first is the default.
RECORDS: Final = ("optional", "required")

# -- labels ---------------------------------------------------------------------------------------------------------

_PREFIX: Final = b"ringfence/1 "


def _label(purpose: str) -> bytes:
    return _PREFIX + purpose.encode() + b"\0"


ADMISSION_KEY: Final = _label("admission key")
BINDING: Final = _label("binding")
RENEWAL_BINDING: Final = _label("renewal binding")  # so that no renewal is a proof of admission, and the reverse
ENTRY: Final = _label("entry")
MEMBERS: Final = _label("members")
ENTRY_PROOF: Final = _label("entry proof")
ROSTER: Final = _label("roster")
HELLO_DIGEST: Final = _label("hello digest")
SECRET_PROOF: Final = _label("secret proof")
SECRET_FINGERPRINT: Final = _label("secret fingerprint")
CERTIFICATE_PROOF: Final = _label("certificate proof")
CERTIFICATE_ENDORSEMENT: Final = _label("certificate endorsement")
CERTIFICATE_ACKNOWLEDGEMENT: Final = _label("certificate acknowledgement")
PROOF_DIGEST: Final = _label("proof digest")
POLICY: Final = _label("policy")
STORE_KEY: Final = _label("store key")
TLS_EXPORTER: Final = b"EXPORTER-ringfence-1-admission"
TLS_LAUNCH_EXPORTER: Final = b"EXPORTER-ringfence-1-launch"  # so that no proof of a worker is one of an agent
SESSION_KEY: Final = _label("aes-256-gcm session key")
LINK_HELLO: Final = _label("aes-256-gcm link hello")
LINK_HANDSHAKE: Final = _label("aes-256-gcm link handshake secret")
LINK_KEM: Final = _label("aes-256-gcm link kem")
LINK_SECRET: Final = _label("aes-256-gcm link secret")
LINK_FORTH: Final = _label("aes-256-gcm link sender to receiver")
LINK_BACK: Final = _label("aes-256-gcm link receiver to sender")
LINK_CONFIRM_ACCEPTOR: Final = _label("aes-256-gcm link confirm acceptor")
LINK_CONFIRM_DIALLER: Final = _label("aes-256-gcm link confirm dialler")
RATCHET: Final = _label("aes-256-gcm ratchet")
SEGMENT_KEY: Final = _label("aes-256-gcm key and iv")
GROUP: Final = _label("group")
GROUP_SECRET: Final = _label("aes-256-gcm group instance secret")
GROUP_INSTANCE: Final = _label("aes-256-gcm group instance id")
ORIGIN: Final = _label("aes-256-gcm origin")
MACHINE_SOCKET: Final = _label("aes-256-gcm machine socket")
MACHINE_HINT: Final = _label("aes-256-gcm machine hint")
PRIVATE_SUM_LAYOUT: Final = _label("private sum layout")
PRIVATE_SUM_SEED: Final = _label("private sum seed")
PRIVATE_SUM_MASK: Final = _label("aes-256-ctr private sum mask")
PRIVATE_SUM_TERMS: Final = _label("private sum terms")
CHECKPOINT_INDEX: Final = _label("checkpoint index")
CHECKPOINT_SHARD: Final = _label("checkpoint shard")
CHECKPOINT_FILE: Final = _label("checkpoint file")
CHECKPOINT_WRAP: Final = _label("checkpoint key wrap")
CHECKPOINT_CONTEXT: Final = _label("checkpoint key context")
CHECKPOINT_KEY_NAME: Final = _label("checkpoint key name")
CHECKPOINT_ANCHOR: Final = _label("checkpoint anchor")
LOCAL_SOCKET: Final = _label("aes-256-gcm local socket")
DATA_PIECE: Final = _label("data piece")
DATA_CONTENTS: Final = _label("data contents")
DATA_FILE: Final = _label("data file")
DATA_NODE: Final = _label("data node")
DATA_ROOT: Final = _label("data root")
DATA_RESUME: Final = _label("data resume")
RECORD_LINE: Final = _label("record line")
RECORD_SIGNATURE: Final = _label("record signature")
RECORD_KEY: Final = _label("record key")
RECORD_HEAD: Final = _label("record previous head")
RECORD_STORE: Final = _label("record store key")
RECORD_CONNECTION: Final = _label("record connection")
RECORD_FRAMES: Final = _label("record frames")

# Types in signed records (spec/record.md). The first two are those of in-toto, the others are ours.
RECORD_PAYLOAD: Final = "application/vnd.in-toto+json"
RECORD_STATEMENT: Final = "https://in-toto.io/Statement/v1"
RECORD_SELFTEST: Final = "https://ringfence.github.io/ringfence/record/selftest/v1"
RECORD_DATA: Final = "https://ringfence.github.io/ringfence/record/data/v1"
RECORD_PROVENANCE: Final = "https://slsa.dev/provenance/v1"
RECORD_RUN: Final = "https://ringfence.github.io/ringfence/record/run/v1"
RECORD_BUILDER: Final = "https://ringfence.github.io/ringfence/record/builder/v1"


class Secret:
    """Key material that is not printed or pickled, and is compared in constant time."""

    __slots__ = ("_bytes", "_keyed")

    def __init__(self, material: bytes) -> None:
        self._bytes = bytes(material)
        self._keyed: HMAC | None = None

    def reveal(self) -> bytes:
        """Return the bytes, for a cryptographic primitive."""
        return self._bytes

    def keyed(self) -> HMAC:
        """Return a fresh HMAC-SHA-256 with this key. Cached: its setup costs three times its use."""
        if self._keyed is None:
            self._keyed = HMAC(self._bytes, hashes.SHA256())
        return self._keyed.copy()

    def forget(self) -> None:
        """Drop the key, even if references to this object remain."""
        self._bytes, self._keyed = b"", None

    def __repr__(self) -> str:
        return "Secret(<redacted>)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and hmac.compare_digest(self._bytes, other._bytes)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Secret is never pickled")

    def __copy__(self) -> Secret:
        return self

    def __deepcopy__(self, memo: object) -> Secret:
        return self


def digest(label: bytes, *parts: bytes) -> bytes:
    """Return SHA-256 over a label and parts, each preceded by its length, so that the input is unambiguous."""
    state = hashlib.sha256(label)
    for part in parts:
        state.update(len(part).to_bytes(8, "big"))
        state.update(part)
    return state.digest()


def mac(key: Secret, label: bytes, *parts: bytes) -> bytes:
    """Return HMAC-SHA-256 over the digest of labelled parts."""
    state = key.keyed()
    state.update(digest(label, *parts))
    return state.finalize()


def same(left: bytes, right: bytes) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(left, right)


def derive(secret: Secret, salt: bytes, info: bytes, length: int = KEY_BYTES) -> Secret:
    """Derive a key with HKDF-SHA-256, extract and expand."""
    return Secret(HKDF(hashes.SHA256(), length, salt, info).derive(secret.reveal()))


def expand(secret: Secret, info: bytes, length: int = KEY_BYTES) -> Secret:
    """Derive a key with HKDF-SHA-256, expand only: `secret` must be uniform."""
    return Secret(HKDFExpand(hashes.SHA256(), length, info).derive(secret.reveal()))


def admission_key(shared: Secret, run_id: str) -> Secret:
    """Return the key of shared-secret proofs for one run."""
    return derive(shared, salt=run_id.encode(), info=ADMISSION_KEY)


def secret_fingerprint(shared: Secret) -> str:
    """Return a fingerprint to compare secret files by. It reveals nothing about 32 random bytes."""
    return digest(SECRET_FINGERPRINT, shared.reveal())[:8].hex()


def session_key(session_secret: Secret, roster_digest: bytes) -> Secret:
    """Return the root of a session's link keys, which depends on the roster."""
    return derive(session_secret, salt=roster_digest, info=SESSION_KEY)


def machine_socket(session_key: Secret, group_digest: bytes, rank: int) -> bytes:
    """Return the name of the abstract Unix socket on which a worker proves that it is on this machine (spec/link.md, 12)."""
    info = MACHINE_SOCKET + group_digest + rank.to_bytes(4, "big")
    return b"\0ringfence/1 " + expand(session_key, info).reveal()[:16].hex().encode()


def local_socket(session_key: Secret, rank: int) -> bytes:
    """Return the name of the abstract Unix socket at which workers of its machine dial a worker (spec/link.md, 13)."""
    info = LOCAL_SOCKET + rank.to_bytes(4, "big")
    return b"\0ringfence/1 " + expand(session_key, info).reveal()[:16].hex().encode()


def machine_hint(session_key: Secret, group_digest: bytes, place: bytes) -> bytes:
    """Return what members of a group compare before they try to prove that they are on one machine (spec/link.md, 12)."""
    return mac(session_key, MACHINE_HINT, group_digest, place)


def group_secret(session_key: Secret, draws: bytes, group_digest: bytes, channel: int = 0) -> Secret:
    """Return the instance secret of a channel of a group, from the XOR of its members' contributions (spec/link.md, 6).

    The session key covers every worker's own public key, and a group digest and a channel occur once in a session, so keys do
    not repeat, whatever the other members contribute. Workers outside the group do not know the secret if at least one member's
    contribution is random.
    """
    return derive(Secret(draws), salt=session_key.reveal(), info=GROUP_SECRET + group_digest + bytes([channel]))


def private_sum_seed(session_key: Secret, draws: bytes, layout: bytes, pair: tuple[int, int]) -> Secret:
    """Return the seed of a pair of workers, from what both drew, the lower rank first (spec/private-sum.md, 4).

    Only the two know what they drew. The session key covers the roster, and the layout covers the group.
    """
    ranks = b"".join(rank.to_bytes(4, "big") for rank in pair)
    return derive(Secret(draws), salt=session_key.reveal(), info=PRIVATE_SUM_SEED + layout + ranks)


def private_sum_mask(seed: Secret, call: int) -> tuple[bytes, bytes]:
    """Return the key and the first counter block of AES-256-CTR for a pair's mask in one private sum of its group.

    The key is used for this one keystream, so the counter begins at zero. Raises ValueError if the seed was wiped.
    """
    if len(seed.reveal()) != SECRET_BYTES:
        raise ValueError("the seed of this pair was wiped")
    return expand(seed, PRIVATE_SUM_MASK + call.to_bytes(8, "big")).reveal(), bytes(16)
