"""The vectors of spec/checkpoint.md: computed a second time from the text, and compared with the package byte by byte."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from ringfence import keys
from ringfence.checkpoint import envelope, index, key_wrap, streams, values
from ringfence.checkpoint.envelope import Envelope, EnvelopeKind
from ringfence.checkpoint.index import Chunk, Index, Shard, StoredBytes, TensorItem, ValueItem
from ringfence.keys import Secret

ROOT = Path(__file__).parents[2]
VECTORS: dict[str, Any] = json.loads((ROOT / "tests/vectors/checkpoint.json").read_text())
SPEC = (ROOT / "spec/checkpoint.md").read_text()

SAVE, SHARD, OTHER = bytes(range(16)), bytes(range(16, 32)), bytes(range(32, 48))
DATA_KEY, FILE_KEY, SALT = bytes(range(64, 96)), bytes(range(100, 132)), bytes(range(150, 182))
HEADER = bytes([40]) + bytes(range(200, 239))
VALUE: Any = {
    "lr": 0.5,
    "betas": (0.25, -1),
    "names": ["é", None, True, False],
    7: b"\0\xff",
    "large": 1 << 64,
    "edge": -128,
}
INDEX = Index(
    SAVE,
    (Shard(SHARD, 36), Shard(OTHER, 2_000_000)),
    (
        ValueItem(("optimizer", "lr"), StoredBytes(1, 5, 9)),
        TensorItem(
            ("weights", 0),
            "float32",
            (3, 4),
            (Chunk((0, 0), (2, 4), StoredBytes(0, 4, 32)), Chunk((2, 0), (1, 4), StoredBytes(1, 100, 16))),
        ),
    ),
    12,
    {"run": "vectors"},
)


def blob(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


def text(value: str) -> bytes:
    return struct.pack(">H", len(value)) + value.encode()


def label(name: str) -> bytes:
    return b"ringfence/1 " + name.encode() + b"\0"


def digest(name: str, *parts: bytes) -> bytes:
    return hashlib.sha256(label(name) + b"".join(struct.pack(">Q", len(part)) + part for part in parts)).digest()


def derived(key: bytes, salt: bytes, info: bytes) -> AESGCM:
    return AESGCM(HKDF(hashes.SHA256(), 32, salt, info).derive(key))


def by_the_text_value(value: Any) -> bytes:
    if value is None or isinstance(value, bool):
        return bytes([{None: 0, False: 1, True: 2}[value]])
    if isinstance(value, int):
        size = 1
        while not -(1 << 8 * size - 1) <= value < 1 << 8 * size - 1:
            size += 1
        return b"\3" + blob((value % (1 << 8 * size)).to_bytes(size, "big"))
    if isinstance(value, float):
        return b"\4" + struct.pack(">d", value)
    if isinstance(value, str):
        return b"\5" + blob(value.encode())
    if isinstance(value, bytes):
        return b"\6" + blob(value)
    if isinstance(value, dict):
        pairs = b"".join(by_the_text_value(key) + by_the_text_value(each) for key, each in value.items())
        return b"\x09" + struct.pack(">I", len(value)) + pairs
    parts = b"".join(map(by_the_text_value, value))
    return (b"\7" if isinstance(value, list) else b"\x08") + struct.pack(">I", len(value)) + parts


def by_the_text_index() -> bytes:
    head = b"\1" + SAVE + b"\1" + struct.pack(">Q", 12) + blob(by_the_text_value({"run": "vectors"}))
    shards = struct.pack(">I", 2) + SHARD + struct.pack(">Q", 36) + OTHER + struct.pack(">Q", 2_000_000)
    value = (
        struct.pack(">H", 2) + b"\0" + blob(b"optimizer") + b"\0" + blob(b"lr") + b"\0" + struct.pack(">IQQ", 1, 5, 9)
    )
    tensor = struct.pack(">H", 2) + b"\0" + blob(b"weights") + b"\1" + struct.pack(">I", 0)
    tensor += b"\1" + text("float32") + b"\2" + struct.pack(">QQI", 3, 4, 2)
    tensor += struct.pack(">QQQQIQ", 0, 0, 2, 4, 0, 4) + struct.pack(">QQQQIQ", 2, 0, 1, 4, 1, 100)
    return head + shards + struct.pack(">I", 2) + value + tensor


def by_the_text_stream(bound: bytes, data: bytes) -> bytes:
    cipher, parts = derived(DATA_KEY, HEADER[1:33], bound), [HEADER]
    first = 1_048_576 - 40 - 16
    pieces = [data[:first]] + [data[start : start + 1_048_560] for start in range(first, len(data), 1_048_560)]
    for number, piece in enumerate(pieces):
        nonce = HEADER[33:] + struct.pack(">IB", number, number == len(pieces) - 1)
        parts.append(cipher.encrypt(nonce, piece, None))
    return b"".join(parts)


class Fixed(key_wrap.KeyFile):
    """A key file without a file."""

    def __init__(self) -> None:
        self._secret, self._path = Secret(FILE_KEY), "vectors"


def by_the_text() -> dict[str, str]:
    """All vectors, from the text."""
    context = label("checkpoint key context") + b"\1" + SAVE
    wrapped = SALT + derived(FILE_KEY, SALT, label("checkpoint key wrap")).encrypt(bytes(12), DATA_KEY, context)
    name = "file:" + digest("checkpoint key name", FILE_KEY)[:8].hex()
    large = bytes(range(256)) * 8200  # three segments
    shard = label("checkpoint shard") + SAVE + SHARD
    return {
        "value": by_the_text_value(VALUE).hex(),
        "index": by_the_text_index().hex(),
        "anchor": digest("checkpoint anchor", by_the_text_index()).hex(),
        "context": context.hex(),
        "key name": name,
        "wrapped": wrapped.hex(),
        "header": (b"ringfence sealed\1\1" + SAVE + text(name) + blob(wrapped)).hex(),
        "index stream": by_the_text_stream(label("checkpoint index") + SAVE, by_the_text_index()).hex(),
        "file stream": by_the_text_stream(label("checkpoint file") + SAVE, b"").hex(),
        "shard stream, SHA-256": hashlib.sha256(by_the_text_stream(shard, large)).hexdigest(),
    }


def by_the_package() -> dict[str, str]:
    """All vectors, from the code."""
    wrapped = bytes.fromhex(VECTORS["wrapped"]) if VECTORS else b""
    found = Envelope(EnvelopeKind.INDEX, SAVE, Fixed().name, wrapped)
    file = Envelope(EnvelopeKind.FILE, SAVE, "", b"")
    body, large = INDEX.encode(), bytes(range(256)) * 8200
    shard = streams.seal(Secret(DATA_KEY), envelope.shard_data(SAVE, SHARD), large, HEADER)
    return {
        "value": values.encode(VALUE, "value").hex(),
        "index": body.hex(),
        "anchor": INDEX.anchor,
        "context": found.context.hex(),
        "key name": found.key_name,
        "wrapped": wrapped.hex(),
        "header": found.encode().hex(),
        "index stream": streams.seal(Secret(DATA_KEY), found.associated_data, body, HEADER).hex(),
        "file stream": streams.seal(Secret(DATA_KEY), file.associated_data, b"", HEADER).hex(),
        "shard stream, SHA-256": hashlib.sha256(shard).hexdigest(),
    }


@pytest.mark.parametrize("name", VECTORS)
def test_bytes_are_those_of_the_text(name: str) -> None:
    assert by_the_package()[name] == by_the_text()[name] == VECTORS[name]


def test_there_is_a_vector_for_everything() -> None:
    assert set(VECTORS) == set(by_the_text()) == set(by_the_package())


def test_the_vectors_are_read() -> None:
    assert values.decode(bytes.fromhex(VECTORS["value"])) == VALUE
    assert index.parse(bytes.fromhex(VECTORS["index"])) == INDEX
    found, _ = envelope.parse(bytes.fromhex(VECTORS["header"]))
    assert key_wrap.unwrap(Fixed(), found) == Secret(DATA_KEY)
    body = streams.unseal(Secret(DATA_KEY), found.associated_data, bytes.fromhex(VECTORS["index stream"]))
    assert index.parse(body) == INDEX


def table(title: str) -> dict[str, int]:
    """The codes of the table whose header begins with this word."""
    rows = SPEC.split(f"| {title} | code |")[1].split("\n\n")[0]
    return {name.lower(): int(code) for name, code in re.findall(r"^\| (\w+) \| (\d+) \|", rows, re.M)}


def test_the_codes_and_limits_of_the_text_are_those_of_the_code() -> None:
    assert table("kind") == {each.name.lower(): each.value for each in EnvelopeKind}
    assert table("type") == {name: getattr(values, name.upper()) for name in table("type")} and len(table("type")) == 10
    assert (keys.STREAM_SEGMENT_BYTES, keys.STREAM_SEGMENTS) == (1_048_576, 4_294_967_296)
    assert keys.CHECKPOINT_NAME_BYTES == keys.CHECKPOINT_PATH_PARTS == 256
    assert (keys.CHECKPOINT_WRAPPED_BYTES, keys.CHECKPOINT_DIMENSIONS, keys.VALUE_DEPTH) == (65_536, 64, 32)
    for name in ("CONTEXT", "KEY_NAME", "WRAP", "INDEX", "SHARD", "FILE", "ANCHOR"):
        quoted = getattr(keys, f"CHECKPOINT_{name}").removeprefix(b"ringfence/1 ").removesuffix(b"\0").decode()
        assert f'label("{quoted}")' in SPEC


if __name__ == "__main__":
    print(json.dumps(by_the_text(), indent=1))
