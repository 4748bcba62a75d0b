"""`sealed_open`: a sealed file for scripts that use `torch.save` and `torch.load`."""

from __future__ import annotations

import contextlib
import io
import os
import secrets
from typing import Any, Literal, overload

from ringfence.checkpoint import envelope, key_wrap
from ringfence.checkpoint.envelope import EnvelopeKind
from ringfence.checkpoint.folder import LocalInput, LocalOutput
from ringfence.checkpoint.key_wrap import Key
from ringfence.checkpoint.streams import BODY, DEFAULT_THREADS, SealingThreads, StreamReader, StreamWriter, Want
from ringfence.config.private_files import sync_folder
from ringfence.errors import CheckpointError, ProtocolError


@overload
def sealed_open(path: str | os.PathLike[str], mode: Literal["wb"], *, key: Key, threads: int = ...) -> SealedOutput: ...
@overload
def sealed_open(
    path: str | os.PathLike[str], mode: Literal["rb"] = "rb", *, key: Key, threads: int = ...
) -> io.BufferedReader: ...
def sealed_open(path: str | os.PathLike[str], mode: str = "rb", *, key: Key, threads: int = DEFAULT_THREADS) -> Any:
    """Open a sealed file, for `torch.save` and `torch.load(..., weights_only=True)`.

        with sealed_open("model.sealed", "wb", key="key") as file:
            torch.save(model.state_dict(), file)
        with sealed_open("model.sealed", key="key") as file:
            weights = torch.load(file, weights_only=True)

    Use it in a `with` statement. A written file appears, or replaces an existing one, when it is closed without an exception,
    and is complete then. If a write has failed, closing raises CheckpointError and leaves the existing file. Every segment of
    1 MiB is verified before its bytes are returned. An older file in place of a newer one is not detected. `torch.load`
    without `weights_only` runs code from the file: that of anyone who has the key.

    Args:
        mode: "wb" to write, "rb" to read; a file for reading is seekable.
        key: The path of a key file (`ringfence secret new FILE`), or a `KeyWrapper`.
        threads: How many threads seal or open.

    Raises:
        CheckpointError: The file is damaged, was changed, or is sealed with another key, when it is opened or read; or an
            earlier write has failed, when it is written or closed.
        OSError: The file cannot be opened or written.
    """
    if mode == "wb":
        return SealedOutput(os.fspath(path), key, threads)
    if mode == "rb":
        return io.BufferedReader(_SealedInput(os.fspath(path), key, threads), BODY)
    raise ValueError(f"mode must be 'wb' or 'rb', not {mode!r}")


class SealedOutput(io.RawIOBase):
    """The file object of `sealed_open(..., "wb")`."""

    def __init__(self, path: str, key: Key, threads: int) -> None:
        super().__init__()
        self._path, self._temporary = path, f"{path}.partial-{secrets.token_hex(8)}"
        self._done = True
        data_key, header = key_wrap.new_data_key(key_wrap.wrapper_of(key), EnvelopeKind.FILE)
        encoded = header.encode()
        self._threads = SealingThreads(threads)
        self._output = LocalOutput(self._temporary)
        self._output.write_at(memoryview(encoded), 0)
        self._stream = StreamWriter(self._output, data_key, header.associated_data, self._threads, len(encoded))
        self._done = False

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._stream.position

    def write(self, data: Any) -> int:
        """Append bytes. The caller may change its memory afterwards."""
        view = memoryview(data).cast("B")
        self._stream.write(view)
        self._stream.flush()
        return len(view)

    def close(self) -> None:
        """Seal the end, make the file durable and give it its name."""
        if self._done:
            return
        try:
            self._stream.finish()
            os.replace(self._temporary, self._path)
            sync_folder(os.path.dirname(os.path.abspath(self._path)))
        finally:
            self.discard()

    def discard(self) -> None:
        """Close without a file. Does nothing after `close`."""
        if not self._done:
            self._done = True
            self._threads.__exit__()
            self._output.abort()
            with contextlib.suppress(FileNotFoundError):  # it was renamed
                os.unlink(self._temporary)
        super().close()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.discard()
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_done", True):
            self.discard()


class _SealedInput(io.RawIOBase):
    """Opens the segments that are read."""

    def __init__(self, path: str, key: Key, threads: int) -> None:
        super().__init__()
        self._path, self._position = path, 0
        self._file = LocalInput(path)
        try:
            header, length = envelope.parse(self._file.read(envelope.LIMIT))
            if header.kind is not EnvelopeKind.FILE:
                raise CheckpointError("it is the index of a checkpoint: use load()")
            data_key = key_wrap.unwrap(key_wrap.wrapper_of(key), header)
            self._threads = SealingThreads(threads)
            self._stream = StreamReader(self._file, data_key, header.associated_data, self._threads, length)
        except (CheckpointError, ProtocolError) as error:
            self._file.close()
            raise CheckpointError(f"{path} is refused: {error}") from error

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._stream.size}[whence]
        if start + offset < 0:
            raise ValueError(f"a position before the beginning: {start + offset}")
        self._position = start + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")[: max(0, self._stream.size - self._position)]
        try:
            self._stream.read([Want(self._position, target)])
        except CheckpointError as error:
            raise CheckpointError(f"{self._path}: {error}") from error
        self._position += len(target)
        return len(target)

    def close(self) -> None:
        if not self.closed:
            super().close()
            if hasattr(self, "_threads"):
                self._threads.__exit__()
            self._file.close()
