"""Sealed files of `sealed_open`, written and read like any other."""

from __future__ import annotations

import io
import os
import random
import resource
from pathlib import Path

import pytest
import torch

from ringfence import checkpoint
from ringfence.errors import CheckpointError
from tests.unit.checkpoint_samples import is_same, key_file


@pytest.fixture
def key(tmp_path: Path) -> str:
    return key_file(tmp_path)


def test_torch_saves_to_and_loads_from_a_sealed_file(tmp_path: Path, key: str) -> None:
    state = {"weight": torch.randn(900, 500), "step": 3}
    for _ in range(2):  # the second one replaces the first
        with checkpoint.sealed_open(tmp_path / "model", "wb", key=key) as file:
            torch.save(state, file)
    with checkpoint.sealed_open(tmp_path / "model", key=key) as file:
        found = torch.load(file, weights_only=True)
    assert is_same(found, state)
    assert sorted(os.listdir(tmp_path)) == ["key", "model"]


def test_a_sealed_file_is_seekable_like_any_other(tmp_path: Path, key: str) -> None:
    data, chance = random.Random(1).randbytes(3_000_000), random.Random(2)
    with checkpoint.sealed_open(tmp_path / "file", "wb", key=key) as file:
        buffer = bytearray(data)
        file.write(memoryview(buffer)[:2_500_000])
        buffer[:2_500_000] = bytes(2_500_000)  # the caller may change it
        file.write(memoryview(buffer)[2_500_000:])
    plain = io.BytesIO(data)
    with checkpoint.sealed_open(tmp_path / "file", "rb", key=key) as sealed:
        for _ in range(40):
            offset, size = chance.randrange(3_100_000), chance.choice([1, 100, 2_000_000])
            assert sealed.seek(offset) == plain.seek(offset)
            assert sealed.read(size) == plain.read(size) and sealed.tell() == plain.tell()
        assert sealed.seek(-5, io.SEEK_END) == len(data) - 5 and sealed.read() == data[-5:]


def test_an_exception_leaves_the_old_file(tmp_path: Path, key: str) -> None:
    def write(content: bytes, error: Exception | None) -> None:
        with checkpoint.sealed_open(tmp_path / "file", "wb", key=key) as file:
            file.write(content)
            if error is not None:
                raise error

    write(b"first", None)
    with pytest.raises(KeyError):
        write(b"second", KeyError("stop"))
    abandoned = checkpoint.sealed_open(tmp_path / "file", "wb", key=key)
    abandoned.write(b"third")
    del abandoned
    with checkpoint.sealed_open(tmp_path / "file", key=key) as file:
        assert file.read() == b"first"
    assert sorted(os.listdir(tmp_path)) == ["file", "key"]


def test_a_failed_write_leaves_the_old_file_although_it_is_caught(tmp_path: Path, key: str) -> None:
    with checkpoint.sealed_open(tmp_path / "file", "wb", key=key) as file:
        file.write(b"first")
    file = checkpoint.sealed_open(tmp_path / "file", "wb", key=key)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))  # stands for a disk that is full for a while
    try:
        with pytest.raises(OSError, match="File too large"):
            file.write(bytes(4 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with pytest.raises(CheckpointError, match="an earlier write failed"):
        file.write(b"more")
    with pytest.raises(CheckpointError, match="an earlier write failed"):
        file.close()
    file.close()
    with checkpoint.sealed_open(tmp_path / "file", key=key) as sealed:
        assert sealed.read() == b"first"
    assert sorted(os.listdir(tmp_path)) == ["file", "key"]


def test_a_changed_sealed_file_is_refused(tmp_path: Path, key: str) -> None:
    path = tmp_path / "file"
    with checkpoint.sealed_open(path, "wb", key=key) as file:
        file.write(bytes(2_000_000))
    good, chance = path.read_bytes(), random.Random(3)

    def read() -> bytes:
        with checkpoint.sealed_open(path, key=key) as file:
            return file.read()

    for number in range(60):
        data = bytearray(good)
        data[chance.randrange(200) if number % 2 else chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        path.write_bytes(data if number % 3 else good[: chance.randrange(len(good))])
        with pytest.raises(CheckpointError):
            read()
    checkpoint.save({"a": 1}, tmp_path / "saved", key=key)
    path.write_bytes((tmp_path / "saved" / "index").read_bytes())
    with pytest.raises(CheckpointError, match="use load"):
        read()
