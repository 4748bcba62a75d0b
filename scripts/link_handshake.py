"""Measure what the handshake of a link costs, with ML-KEM-768 and without it.

    python -m scripts.link_handshake [--rounds N]

Both endpoints run in this process with the keys of a session, without a network: CPU time of each side and bytes of all three
messages. "without" is the same handshake as it would be with X25519 alone: the confirmations and the key derivation.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from ringfence.keys import DIGEST_BYTES, NONCE_BYTES, Secret
from ringfence.link.hello import CONFIRM_BYTES, HELLO_BYTES, REPLY_BYTES, Hello, Lane, LinkHandshake
from ringfence.runtime.link_keys import LinkKeys
from ringfence_lab.bench.machine import facts

_HELLO = Hello(0, 1, Lane.COLLECTIVE, bytes(32), bytes(NONCE_BYTES))
_NONCE = bytes(NONCE_BYTES)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.link_handshake", description="Measure the handshake of a link."
    )
    parser.add_argument("--rounds", type=int, default=2000)
    rounds = parser.parse_args().rounds
    private = [X25519PrivateKey.generate() for _ in range(2)]
    public = [each.public_key().public_bytes_raw() for each in private]
    dialler, acceptor = (LinkKeys(Secret(bytes(range(32))), each, public) for each in private)
    reply = acceptor.reply(_HELLO, _NONCE)
    confirm, _ = dialler.confirm(_HELLO, reply)
    shared = private[0].exchange(private[1].public_key())
    secret = Secret(bytes(range(32)))

    def classical() -> None:
        """What either side computes without ML-KEM."""
        handshake = LinkHandshake(secret, shared, _HELLO, _NONCE)
        handshake.acceptor_confirms(b"")
        handshake.dialler_confirms(b"", b"")
        handshake.secrets(b"", b"", b"")

    with_kem = {
        "dialler": _microseconds(lambda: dialler.confirm(_HELLO, reply), rounds),
        "acceptor": _microseconds(lambda: _accept(acceptor, confirm), rounds),
        "replayed hello": _microseconds(lambda: acceptor.reply(_HELLO, _NONCE), rounds),
    }
    found = {
        "machine": facts(),
        "rounds": rounds,
        "microseconds of CPU, median": {
            "without ML-KEM, each side": _microseconds(classical, rounds),
            **{f"with ML-KEM, {name}": value for name, value in with_kem.items()},
            "ML-KEM key of a session, once for a worker": _microseconds(_make_key, rounds),
        },
        "bytes": {
            "without ML-KEM": HELLO_BYTES + NONCE_BYTES + 2 * DIGEST_BYTES,
            "with ML-KEM": HELLO_BYTES + REPLY_BYTES + CONFIRM_BYTES,
        },
        "round trips": 1,
    }
    print(json.dumps(found, indent=1))


def _accept(acceptor: LinkKeys, confirm: bytes) -> None:
    acceptor.reply(_HELLO, _NONCE)
    acceptor.accept(_HELLO, _NONCE, confirm)


def _make_key() -> None:
    MLKEM768PrivateKey.generate().public_key().public_bytes_raw()


def _microseconds(work: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        start = time.thread_time_ns()
        work()
        times.append(time.thread_time_ns() - start)
    return round(statistics.median(times) / 1e3, 1)


if __name__ == "__main__":
    main()
