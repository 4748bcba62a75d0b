"""The vectors of spec/record.md, section 5: made a second time from the text, and compared with the package."""

from __future__ import annotations

import hashlib
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from ringfence.errors import RecordError
from ringfence.record import manifest
from tests.unit.manifest_samples import manifest_of

VECTORS = json.loads((Path(__file__).parent / "manifest.json").read_text())
PIECE = 67_108_864


def digest(purpose: str, *parts: bytes) -> bytes:
    label = b"ringfence/1 " + purpose.encode() + b"\0"
    return hashlib.sha256(label + b"".join(number(len(part)) + part for part in parts)).digest()


def number(value: int) -> bytes:
    return value.to_bytes(8, "big")


def tree(leaves: list[bytes]) -> bytes:
    if len(leaves) == 1:
        return leaves[0]
    split = 1
    while 2 * split < len(leaves):
        split *= 2
    return digest("data node", tree(leaves[:split]), tree(leaves[split:]))


def files_of(vector: dict[str, Any]) -> dict[bytes, bytes]:
    """The names in hexadecimal form, the contents too, before any number of zero bytes."""
    return {
        bytes.fromhex(each["name"]): bytes.fromhex(each["begins"]).ljust(each["size"], b"\0")
        for each in vector["files"]
    }


def by_the_text(files: dict[bytes, bytes]) -> str:
    lines, leaves = ['{"type":"https://ringfence.github.io/ringfence/record/data/v1"}'], []
    for name, content in sorted(files.items()):
        starts = range(0, len(content), PIECE) or [0]
        contents = digest("data contents", *(digest("data piece", content[at : at + PIECE]) for at in starts))
        leaves.append(digest("data file", name, number(len(content)), contents))
        escaped = re.sub(rb'[^!-~]|["%\\]', lambda found: b"%%%02X" % found[0][0], name).decode()
        lines.append(f'{{"digest":"{contents.hex()}","name":"{escaped}","size":{len(content)}}}')
    root = digest("data root", number(len(files)), tree(leaves)).hex()
    lines.append(f'{{"bytes":{sum(map(len, files.values()))},"files":{len(files)},"root":"{root}"}}')
    return "".join(f"{line}\n" for line in lines)


@pytest.mark.parametrize("name", VECTORS["manifests"])
def test_the_text_the_package_and_the_vectors_agree(name: str, tmp_path: Path) -> None:
    vector = VECTORS["manifests"][name]
    expected = "".join(f"{line}\n" for line in vector["manifest"])
    files = files_of(vector)
    assert by_the_text(files) == expected
    for each, content in files.items():
        path = tmp_path / "data" / each.decode("utf-8", "surrogateescape")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    assert manifest_of(tmp_path / "data").decode() == expected
    assert manifest.check(io.BytesIO(expected.encode())).root.hex() == json.loads(vector["manifest"][-1])["root"]


@pytest.mark.parametrize("name", VECTORS["refused"])
def test_refused_vectors_are_refused(name: str) -> None:
    with pytest.raises(RecordError):
        manifest.check(io.BytesIO("".join(f"{line}\n" for line in VECTORS["refused"][name]).encode()))
