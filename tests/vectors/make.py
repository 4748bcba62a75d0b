"""Prints the vectors of spec/link.md, made by the package from fixed inputs: `scripts/vectors > tests/vectors/link.json`."""

from __future__ import annotations

import json
import socket
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from ringfence import keys
from ringfence.collectives import Collective, ScheduleId
from ringfence.dataplane.buffers import Pool
from ringfence.dataplane.endpoint import Endpoint, _return_slot
from ringfence.dataplane.request import DTYPES, POINT_TO_POINT, REDUCTIONS
from ringfence.keys import Secret
from ringfence.link.evidence_frame import NO_GROUP, seal_presentation
from ringfence.link.frames import HEADER_BYTES, HOP_BYTES, HOP_OVERHEAD, NO_ORIGIN, Call, Type, pack_header
from ringfence.link.hello import Lane, LinkHandshake, LinkHello, LinkSecrets, write_hello
from ringfence.link.seal import OriginKeys, Sealer, instance_identifier
from ringfence.link.unsealed import AnySealer, LocalSealer
from ringfence.runtime.communicator import group_digest

NAME, RANKS = "default_pg", (0, 1, 2)
GROUP = group_digest(NAME, RANKS)
FLOAT32, SUM = DTYPES.index("float32"), REDUCTIONS.index("sum")
ALL_REDUCE = Call(Collective.ALL_REDUCE, SUM, FLOAT32, ScheduleId.ALL_REDUCE_RING, 0, 24)
REDUCED_LOCALLY = Call(Collective.ALL_REDUCE, SUM, FLOAT32, ScheduleId.ALL_REDUCE_TWO_LEVELS, 0, 24)
ALL_GATHER = Call(Collective.ALL_GATHER, 0, FLOAT32, ScheduleId.ALL_GATHER_RING, 0, 24)
TRANSFER = Call(POINT_TO_POINT, dtype=FLOAT32, elements=4, tag=-7)
PLAINTEXT = bytes(range(32))
# Encapsulation is random, so one ciphertext for each acceptor is recorded.
CIPHERTEXTS = {
    int(rank): bytes.fromhex(found)
    for rank, found in json.loads((Path(__file__).parent / "kem_ciphertexts.json").read_text()).items()
}
PLACE = b"a kernel, a network namespace and a user"


def fixed(name: str, length: int = 32) -> bytes:
    """Reproducible bytes: SHA-256 of a name."""
    return keys.digest(b"ringfence test vector\0", name.encode())[:length]


SESSION_KEY = keys.session_key(Secret(fixed("session secret")), fixed("roster digest"))
DRAWS = [fixed(f"draw of worker {rank}") for rank in RANKS]
JOINED = bytes(a ^ b ^ c for a, b, c in zip(*DRAWS, strict=True))
INSTANCE = keys.group_secret(SESSION_KEY, JOINED, GROUP)


def private(rank: int) -> X25519PrivateKey:
    return X25519PrivateKey.from_private_bytes(fixed(f"X25519 private key of worker {rank}"))


class Connection(NamedTuple):
    """The messages of a handshake and what they derive."""

    hello: LinkHello
    x25519: bytes
    kem: bytes
    reply: bytes
    confirm: bytes
    secrets: LinkSecrets


def kem_private(rank: int) -> MLKEM768PrivateKey:
    return MLKEM768PrivateKey.from_seed_bytes(fixed(f"ML-KEM d of worker {rank}") + fixed(f"ML-KEM z of worker {rank}"))


def connect(dialler: int, acceptor: int, lane: Lane, channel: int = 0) -> Connection:
    place = f"{dialler} to {acceptor}, lane {int(lane)}" + (f", channel {channel}" if channel else "")
    group = NO_GROUP if lane is Lane.PEER_VERIFICATION else GROUP
    hello = LinkHello(dialler, acceptor, lane, group, fixed(f"dialler's nonce, {place}"), channel)
    shared = private(dialler).exchange(private(acceptor).public_key())
    nonce = fixed(f"acceptor's nonce, {place}")
    handshake = LinkHandshake(SESSION_KEY, shared, hello, nonce)
    key, ciphertext = kem_private(acceptor).public_key().public_bytes_raw(), CIPHERTEXTS[acceptor]
    kem = kem_private(acceptor).decapsulate(ciphertext)
    return Connection(
        hello=hello,
        x25519=shared,
        kem=kem,
        reply=nonce + key + handshake.acceptor_confirms(key),
        confirm=ciphertext + handshake.dialler_confirms(key, ciphertext),
        secrets=handshake.secrets(kem, key, ciphertext),
    )


def frame(sealer: AnySealer, kind: Type, call: Call, plaintext: bytes = b"", **fields: Any) -> bytes:
    """A frame sealed for its hop."""
    header = header_bytes(sealer, kind, call, len(plaintext), **fields)
    sealed = bytearray(len(plaintext) + keys.TAG_BYTES)
    sealer.seal_into(header, plaintext, memoryview(sealed))
    return header + sealed


def header_bytes(
    sealer: AnySealer,
    kind: Type,
    call: Call,
    length: int,
    step: int = 0,
    label: int = 0,
    segment: int = 0,
    origin: int = NO_ORIGIN,
    sequence: int = 0,
    counter: int = 0,
    instance: bytes = GROUP[:16],
) -> bytes:
    key_phase = sealer.upcoming_key_phase()
    return pack_header(
        kind, key_phase, step, 0, length, label, segment, origin, sequence, counter, instance, call.pack()
    )


def key_and_iv(secret: Secret) -> dict[str, str]:
    material = keys.expand(secret, keys.SEGMENT_KEY, keys.KEY_BYTES + keys.IV_BYTES).reveal()
    return {"key": material[: keys.KEY_BYTES].hex(), "iv": material[keys.KEY_BYTES :].hex()}


def connection(dialler: int, acceptor: int, lane: Lane, channel: int = 0) -> dict[str, Any]:
    made = connect(dialler, acceptor, lane, channel)
    hello, secrets = made.hello, made.secrets
    return {
        "dialler": dialler,
        "acceptor": acceptor,
        "lane": int(lane),
        "channel": channel,
        "dialler_private_key": private(dialler).private_bytes_raw().hex(),
        "acceptor_public_key": private(acceptor).public_key().public_bytes_raw().hex(),
        "dialler_nonce": hello.nonce.hex(),
        "acceptor_nonce": made.reply[: keys.NONCE_BYTES].hex(),
        "acceptor_kem_seed": kem_private(acceptor).private_bytes_raw().hex(),
        "hello": write_hello(SESSION_KEY, hello).hex(),
        "x25519": made.x25519.hex(),
        "ml_kem_768": made.kem.hex(),
        "forth": secrets.forth.reveal().hex(),
        "back": secrets.back.reveal().hex(),
        "reply": made.reply.hex(),
        "confirm": made.confirm.hex(),
        "forth_key_phase_0": key_and_iv(secrets.forth),
        "forth_key_phase_1": key_and_iv(keys.expand(secrets.forth, keys.RATCHET)),
    }


def hop_frames() -> list[dict[str, Any]]:
    """Frames of worker 0 to worker 1: the first two of a connection, the last of a key phase, the first of the next, BYE."""
    sealer = Sealer(connect(0, 1, Lane.COLLECTIVE).secrets.forth)
    instance = instance_identifier(INSTANCE, GROUP)
    opening = Call(Collective.GROUP_OPENING, schedule=ScheduleId.GROUP_OPENING)
    found = [{"counter": 0, "frame": frame(sealer, Type.HOP, opening, JOINED, label=1).hex()}]

    def reduced(step: int, segment: int) -> None:
        counter = sealer.counter
        sealed = frame(
            sealer, Type.HOP, ALL_REDUCE, PLAINTEXT, step=step, label=2, segment=segment, sequence=1, instance=instance
        )
        found.append({"counter": counter, "frame": sealed.hex()})

    reduced(0, 0)
    sealer.counter = (1 << keys.KEY_PHASE_SHIFT) - 1  # as if the frames between had been sent
    reduced(1, 6)
    reduced(1, 7)
    found.append({"counter": sealer.counter, "frame": frame(sealer, Type.BYE, Call(0)).hex()})
    return found


def forwarded() -> dict[str, Any]:
    """A segment that worker 0 seals as origin, forwarded by worker 1 to worker 2; with each kind of link tag."""
    origin = OriginKeys(INSTANCE, 0)
    origin.counter = 3
    counter = origin.take()
    first, second = connect(0, 1, Lane.COLLECTIVE), connect(1, 2, Lane.COLLECTIVE)
    fields: dict[str, Any] = {
        "sequence": 2,
        "counter": counter,
        "instance": instance_identifier(INSTANCE, GROUP),
        "origin": 0,
    }
    header = header_bytes(Sealer(first.secrets.forth), Type.FORWARD, ALL_GATHER, len(PLAINTEXT), step=0, **fields)
    sealed = bytearray(len(PLAINTEXT) + keys.TAG_BYTES)
    origin.seal_into(counter, header[HOP_BYTES:], PLAINTEXT, memoryview(sealed))
    onward = header_bytes(Sealer(second.secrets.forth), Type.FORWARD, ALL_GATHER, len(PLAINTEXT), step=1, **fields)
    secret = keys.expand(INSTANCE, keys.ORIGIN + bytes(4) + bytes(8))

    def hop(link: Connection, counter: int, header: bytes, covers: bool) -> dict[str, Any]:
        sealer = Sealer(link.secrets.forth, covers=covers)
        sealer.counter = counter
        frame = header + bytes(sealed)
        return {"counter": counter, "frame": (frame + sealer.tag(frame)).hex()}

    return {
        "origin_key_phase_0": key_and_iv(secret),
        "plaintext": PLAINTEXT.hex(),
        "origin_counter": counter,
        "first_hop": hop(first, 5, header, False),
        "second_hop": hop(second, 9, onward, False),
        "every_hop": {
            "hello": write_hello(SESSION_KEY, first.hello, keys.LINK_VERSIONS[True]).hex(),
            "first_hop": hop(first, 5, header, True),
            "second_hop": hop(second, 9, onward, True),
        },
    }


def channel() -> dict[str, Any]:
    """Channel 1 of the group, if its members contribute the same as to channel 0: another instance, and its first frames."""
    secret = keys.group_secret(SESSION_KEY, JOINED, GROUP, 1)
    instance = instance_identifier(secret, GROUP)
    sealer = Sealer(connect(0, 1, Lane.COLLECTIVE, 1).secrets.forth)
    opening = frame(sealer, Type.HOP, Call(Collective.GROUP_OPENING, schedule=21), JOINED, label=1)
    hop = frame(sealer, Type.HOP, ALL_REDUCE, PLAINTEXT, label=2, segment=16, sequence=1, instance=instance)
    return {
        "instance_secret": secret.reveal().hex(),
        "instance": instance.hex(),
        "opening": opening.hex(),
        "hop": hop.hex(),
    }


def point_to_point() -> dict[str, Any]:
    secrets = connect(0, 1, Lane.POINT_TO_POINT).secrets
    dialler, acceptor = Sealer(secrets.forth), Sealer(secrets.back)
    return {
        "plaintext": PLAINTEXT[:16].hex(),
        "offer": frame(dialler, Type.OFFER, TRANSFER, sequence=2).hex(),
        "want": frame(acceptor, Type.WANT, TRANSFER, sequence=2).hex(),
        "payload": frame(dialler, Type.PAYLOAD, TRANSFER, PLAINTEXT[:16], sequence=2).hex(),
        "acceptor_bye": frame(acceptor, Type.BYE, Call(0)).hex(),
    }


def peer_verification() -> dict[str, Any]:
    """The presentations of a peer verification; the proofs are arbitrary bytes here."""
    secrets = connect(1, 2, Lane.PEER_VERIFICATION).secrets
    dialler, acceptor = Sealer(secrets.forth), Sealer(secrets.back)
    return {
        "dialler_shows": PLAINTEXT.hex(),
        "acceptor_shows": PLAINTEXT[:7].hex(),
        "dialler_frame": seal_presentation(dialler, PLAINTEXT).hex(),
        "acceptor_frame": seal_presentation(acceptor, PLAINTEXT[:7]).hex(),
    }


def local() -> dict[str, Any]:
    """Links inside a machine: the names of their sockets, and frames that are not sealed. Of a shared segment: its header."""
    sealer, instance = LocalSealer(), instance_identifier(INSTANCE, GROUP)
    shared = header_bytes(
        sealer, Type.SHARED, REDUCED_LOCALLY, 262_144, 1, 2, 3, sequence=4, counter=5, instance=instance
    )
    return {
        "sockets": [keys.local_socket(SESSION_KEY, rank).hex() for rank in RANKS],
        "opening": frame(sealer, Type.HOP, Call(Collective.GROUP_OPENING, schedule=21), JOINED, label=1).hex(),
        "hop": frame(sealer, Type.HOP, REDUCED_LOCALLY, PLAINTEXT, label=2, sequence=1, instance=instance).hex(),
        "shared": shared.hex(),
        "return_of_6": returned(6).hex(),
        "payload": frame(sealer, Type.PAYLOAD, TRANSFER, PLAINTEXT[:16], sequence=2).hex(),
        "bye": frame(sealer, Type.BYE, Call(0)).hex(),
    }


def returned(count: int) -> bytes:
    """What a receiving endpoint writes after so many shared segments, in units that it returns one by one."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        end = Endpoint(deque(), set(), Pool())
        end.stream = ours
        for _ in range(count):
            _return_slot(end)
        return theirs.recv(1 << 16)[-HOP_OVERHEAD:]


def vectors() -> dict[str, Any]:
    assert len(GROUP) == keys.DIGEST_BYTES and HEADER_BYTES == 88
    return {
        "specification": "spec/link.md",
        "session": {
            "session_secret": fixed("session secret").hex(),
            "roster_digest": fixed("roster digest").hex(),
            "session_key": SESSION_KEY.reveal().hex(),
        },
        "group": {
            "name": NAME,
            "ranks": list(RANKS),
            "digest": GROUP.hex(),
            "draws": [draw.hex() for draw in DRAWS],
            "instance_secret": INSTANCE.reveal().hex(),
            "instance": instance_identifier(INSTANCE, GROUP).hex(),
        },
        "connections": [
            connection(0, 1, Lane.COLLECTIVE),
            connection(1, 2, Lane.COLLECTIVE),
            connection(0, 1, Lane.POINT_TO_POINT),
            connection(1, 2, Lane.PEER_VERIFICATION),
            connection(2, 1, Lane.SAME_MACHINE),
            connection(0, 1, Lane.COLLECTIVE_LOCAL),
            connection(0, 1, Lane.POINT_TO_POINT_LOCAL),
            connection(0, 1, Lane.COLLECTIVE, 1),
        ],
        "channel": channel(),
        "same_machine": {
            "place": PLACE.hex(),
            "hint": keys.machine_hint(SESSION_KEY, GROUP, PLACE).hex(),
            "sockets": [keys.machine_socket(SESSION_KEY, GROUP, rank).hex() for rank in RANKS],
        },
        "local": local(),
        "hop_plaintext": PLAINTEXT.hex(),
        "hop_frames": hop_frames(),
        "acceptor_nop": frame(Sealer(connect(0, 1, Lane.COLLECTIVE).secrets.back), Type.NOP, Call(0)).hex(),
        "forwarded": forwarded(),
        "point_to_point": point_to_point(),
        "peer_verification": peer_verification(),
    }


def text() -> str:
    return json.dumps(vectors(), indent=1) + "\n"


if __name__ == "__main__":
    print(text(), end="")
