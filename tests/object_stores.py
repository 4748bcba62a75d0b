"""File systems of fsspec for tests of checkpoints: local files, memory, and with `--full` an S3 server (moto, s3fs)."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import fsspec
import pytest

from ringfence.checkpoint.fsspec_storage import FsspecStorage

CHEAP = ("file", "memory")
ALL = (*CHEAP, "s3")  # needs `scripts/install --frameworks`


@dataclass(frozen=True)
class ObjectStore:
    """A folder of its own at a URL, and the arguments to reach it."""

    url: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def storage(self) -> FsspecStorage:
        return FsspecStorage(**self.options)

    @property
    def system(self) -> Any:
        """The file system, as another user of the store has it."""
        return fsspec.core.url_to_fs(self.url, **self.options)[0]

    def names(self, path: str) -> list[str]:
        """Return the URLs of the files at a path."""
        self.system.invalidate_cache()
        if not self.system.exists(path):
            return []
        return sorted(self.system.unstrip_protocol(name) for name in self.system.ls(path, detail=False))


def for_each_store(metafunc: pytest.Metafunc) -> None:
    """Run the tests that ask for `store` with each file system."""
    if "store" in metafunc.fixturenames:
        metafunc.parametrize("store", ALL if metafunc.config.getoption("--full") else CHEAP, indirect=True)


@contextmanager
def opened(scheme: str, folder: Path) -> Iterator[ObjectStore]:
    name = secrets.token_hex(8)
    if scheme == "file":
        yield ObjectStore(f"file://{folder}/{name}")
    elif scheme == "memory":
        yield ObjectStore(f"memory://{name}")
    else:
        with s3_server() as options:
            store = ObjectStore(f"s3://{name}", options)
            store.system.mkdir(name)
            yield store


@contextmanager
def s3_server() -> Iterator[dict[str, Any]]:
    """An S3 server of this process; yields the arguments of s3fs."""
    server = import_module("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield {"endpoint_url": f"http://{host}:{port}", "key": "test", "secret": "test"}
    finally:
        server.stop()
