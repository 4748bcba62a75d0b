"""Tink opens the streams of checkpoints, and the reverse: the layout is that of its AES256_GCM_HKDF_1MB."""

from __future__ import annotations

import base64
import io
import json
import os
from pathlib import Path

import pytest
import tink
import torch
from tink import secret_key_access, streaming_aead

from ringfence import checkpoint
from ringfence.checkpoint import envelope, streams
from ringfence.checkpoint.streams import BODY, FIRST, SEGMENT
from ringfence.keys import Secret
from tests.unit.checkpoint_samples import key_file

SIZES = (0, 1, FIRST - 1, FIRST, FIRST + 1, FIRST + BODY, FIRST + BODY + 1, 3 * SEGMENT + 17)


def _varint(number: int) -> bytes:
    found = b""
    while number > 127:
        found += bytes([number & 127 | 128])
        number >>= 7
    return found + bytes([number])


def primitive(data_key: bytes) -> streaming_aead.StreamingAead:
    """Tink's primitive for a data key: SHA-256, derived keys of 32 bytes, segments of 1 MiB."""
    streaming_aead.register()
    parameters = b"\x08" + _varint(SEGMENT) + b"\x10" + _varint(32) + b"\x18" + _varint(3)
    value = b"\x12" + _varint(len(parameters)) + parameters + b"\x1a" + _varint(32) + data_key
    key_data = {
        "typeUrl": "type.googleapis.com/google.crypto.tink.AesGcmHkdfStreamingKey",
        "value": base64.b64encode(value).decode(),
        "keyMaterialType": "SYMMETRIC",
    }
    key = {"keyData": key_data, "status": "ENABLED", "keyId": 1, "outputPrefixType": "RAW"}
    keyset = json.dumps({"primaryKeyId": 1, "key": [key]})
    handle = tink.json_proto_keyset_format.parse(keyset, secret_key_access.TOKEN)
    return handle.primitive(streaming_aead.StreamingAead)


class Kept(io.BytesIO):
    """Not closed with the stream that writes to it."""

    def close(self) -> None:
        pass


@pytest.mark.parametrize("size", SIZES)
def test_tink_and_ringfence_open_each_other(size: int) -> None:
    data_key, data = os.urandom(32), os.urandom(size)
    theirs = primitive(data_key)
    ours = streams.seal(Secret(data_key), b"bound", data)
    assert theirs.new_decrypting_stream(io.BytesIO(ours), b"bound").read() == data
    written = Kept()
    with theirs.new_encrypting_stream(written, b"bound") as stream:
        stream.write(data)
    assert streams.unseal(Secret(data_key), b"bound", written.getvalue()) == data


def test_tink_refuses_what_ringfence_refuses() -> None:
    data_key = os.urandom(32)
    ours = streams.seal(Secret(data_key), b"bound", b"data")
    with pytest.raises(tink.TinkError):
        primitive(data_key).new_decrypting_stream(io.BytesIO(ours), b"another").read()


def test_tink_opens_a_checkpoint(tmp_path: Path) -> None:
    """Every file of it: the index after its header, and the shard with the bytes of the tensor."""
    key, tensor = key_file(tmp_path), torch.randn(600, 700)
    checkpoint.save({"weight": tensor}, tmp_path / "saved", key=key)
    opened = checkpoint.inspect(tmp_path / "saved", key=key)
    theirs = primitive(opened.data_key.reveal())
    content = (tmp_path / "saved" / "index").read_bytes()
    header, length = envelope.parse(content)
    assert theirs.new_decrypting_stream(io.BytesIO(content[length:]), header.associated_data).read() == opened.body
    shard = opened.index.shards[0]
    bound = envelope.shard_data(opened.index.save_id, shard.id)
    with (tmp_path / "saved" / shard.name).open("rb") as file:
        assert theirs.new_decrypting_stream(file, bound).read() == tensor.numpy().tobytes()
