"""A simulation of the kernel's configfs-tsm, after its source; a function makes the reports.

Attributes appear with the folder. The kernel stores a binary attribute when its file is closed, and errors at that point are
lost. Every write increments the generation. The first read after a write makes a report, which is kept until the next write.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, field

from ringfence.evidence.tsm import KernelFiles

INBLOB_BYTES = 64
LEVEL_MOST = 3


def failure(code: int) -> OSError:
    return OSError(code, os.strerror(code))


@dataclass
class Instance:
    inblob: bytes = b""
    level: int = 0
    written: int = 0
    read: int = 0
    report: tuple[bytes, bytes] | None = None


@dataclass
class Kernel(KernelFiles):
    """`make_report(inblob, level)` is the hardware. `faults` holds errors by attribute, raised one by one."""

    provider: str
    make_report: Callable[[bytes, int], bytes]
    auxblob: bytes | None = None  #             None: this provider has no such attribute
    level_floor: int | None = None  #           None: no such attributes (TDX)
    faults: dict[str, list[int]] = field(default_factory=dict)
    before_read: Callable[[Kernel, Instance, str], None] | None = None  # another process, in between
    instances: dict[str, Instance] = field(default_factory=dict)
    made: list[str] = field(default_factory=list)

    # -- called by a collector --------------------------------------------------------------------------------------

    def make(self, folder: str) -> None:
        self._fault("make")
        if folder in self.instances:
            raise failure(errno.EEXIST)
        self.instances[folder] = Instance()
        self.made.append(folder)

    def remove(self, folder: str) -> None:
        if folder not in self.instances:
            raise failure(errno.ENOENT)
        del self.instances[folder]

    def exists(self, path: str) -> bool:
        folder, _, name = path.rpartition("/")
        return folder in self.instances and name in self._attributes()

    def read(self, path: str, limit: int) -> bytes:
        instance, name = self._find(path)
        if self.before_read is not None:
            self.before_read(self, instance, name)
        self._fault(name)
        if name == "generation":
            return b"%d\n" % instance.written
        if name == "provider":
            return self.provider.encode() + b"\n"
        if name == "privlevel_floor":
            return b"%d\n" % (self.level_floor or 0)
        if name not in ("outblob", "auxblob"):
            raise failure(errno.EACCES)  # write-only
        return self._report(instance)[name == "auxblob"][: limit + 1]

    def write(self, path: str, content: bytes) -> None:
        instance, name = self._find(path)
        if name == "privlevel":
            self._fault(name)
            if not (self.level_floor or 0) <= int(content) <= LEVEL_MOST:
                raise failure(errno.EINVAL)
            instance.level = int(content)
            instance.written += 1
        elif name == "inblob":
            if len(content) > INBLOB_BYTES:
                raise failure(errno.EFBIG)
            self._close(instance, content)
        else:
            raise failure(errno.EACCES)

    # -- internal ---------------------------------------------------------------------------------------------------

    def _close(self, instance: Instance, content: bytes) -> None:
        try:
            self._fault("inblob")
        except OSError:
            return  # lost: the kernel drops what the handler of a close returns
        instance.inblob = content
        instance.written += 1

    def _report(self, instance: Instance) -> tuple[bytes, bytes]:
        if not instance.inblob:
            raise failure(errno.EINVAL)
        if instance.report is None or instance.read != instance.written:
            if len(instance.inblob) != INBLOB_BYTES:
                raise failure(errno.EINVAL)
            instance.report = (self.make_report(instance.inblob, instance.level), self.auxblob or b"")
            instance.read = instance.written
        return instance.report

    def _attributes(self) -> set[str]:
        names = {"generation", "provider", "inblob", "outblob"}
        names |= {"auxblob"} if self.auxblob is not None else set()
        return names | ({"privlevel", "privlevel_floor"} if self.level_floor is not None else set())

    def _find(self, path: str) -> tuple[Instance, str]:
        folder, _, name = path.rpartition("/")
        if not self.exists(path):
            raise failure(errno.ENOENT)
        return self.instances[folder], name

    def _fault(self, name: str) -> None:
        if self.faults.get(name):
            raise failure(self.faults[name].pop(0))
