"""Packages that a zygote has imported: a program finds them in `sys.modules` only when it imports them."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import sys
import weakref
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

# In this order: what one of them imports belongs to it, and is not found before it is imported.
PRELOADED = (
    "numpy",
    "cryptography.x509",
    "cryptography.hazmat.primitives.ciphers.aead",
    "cryptography.hazmat.primitives.asymmetric.ec",
    "OpenSSL.SSL",
    "scipy.optimize",
    "jinja2",
    "rich.console",
    "torch",
    "torch.distributed.nn.functional",
    "torch.nn.parallel",
    "torch.optim",
    "torch._dynamo",
)
ALSO = {"torch": ("numpy",)}  # imported by it, but already there
CLEARED = "torch.distributed"  # at the end of the interpreter: it has the program's process groups
STANDARD = {*sys.stdlib_module_names, "__main__", "__mp_main__"}


def top(name: str) -> str:
    return name.partition(".")[0]


class Packages(MetaPathFinder, Loader):
    """Imported modules outside `sys.modules`, in the batches in which they were imported."""

    def __init__(self) -> None:
        self._modules: dict[str, ModuleType] = {}
        self._batches: dict[str, list[str]] = {}  # by each name in it
        self._specs: dict[str, Any] = {}

    def preload(self, names: Sequence[str] = PRELOADED) -> None:
        """Import modules and take them out of `sys.modules`. Modules that are there already stay."""
        for name in names:
            before = set(sys.modules)
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
            batch = [each for each in sys.modules if each not in before and top(each) not in STANDARD]
            self._batches.update(dict.fromkeys(batch, batch))
        for name in self._batches:
            self._modules[name] = sys.modules[name]
            self._specs[name] = self._modules[name].__spec__

        for everything in (self._modules.copy(), self._specs):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(everything))  # the end of an interpreter does not free them
        for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
            finalizer.atexit = False  # torch would take back each of its operators
        atexit.register(self._hide_at_the_end)  # before any handler of a program, so that it is called after them

    def _hide_at_the_end(self) -> None:
        """Leave the modules as they are: to clear them one by one would take 0.3 s."""
        for name in self._batches:
            if name in sys.modules and not name.startswith(CLEARED):
                self._modules[name] = sys.modules.pop(name)

    def hide(self) -> None:
        for name in self._modules:
            sys.modules.pop(name, None)
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def module(self, name: str) -> ModuleType:
        return self._modules.get(name) or sys.modules[name]

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the spec of a module that the program would import from the same file."""
        if name not in self._modules:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or self._specs[name] is None or spec.origin != self._specs[name].origin:
            return None
        spec.loader = self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        found = self._modules[spec.name]
        for also in (spec.name, *ALSO.get(spec.name, ())):
            for name in self._batches.get(also, ()):
                if name in self._modules:
                    sys.modules[name] = self._modules.pop(name)
        return found

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._specs[module.__name__]
        if module.__name__ == "torch":
            module.default_generator.seed()
            if module._is_device_backend_autoload_enabled():
                module._import_device_backends()
