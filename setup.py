"""The compiled data plane, which pyproject.toml cannot describe: it is left out when RINGFENCE_BUILD is "pure"."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

from setuptools import Extension, setup

# One binary for Python 3.11 and newer, except free-threaded builds: those have no stable ABI.
STABLE_ABI = not sysconfig.get_config_var("Py_GIL_DISABLED")

CSRC = Path("src/ringfence/dataplane/csrc")

core = Extension(
    "ringfence.dataplane._core",
    sorted(map(str, CSRC.glob("*.c"))),
    depends=sorted(map(str, CSRC.glob("*.h"))),
    define_macros=[("Py_LIMITED_API", "0x030B0000")] if STABLE_ABI else [],
    py_limited_api=STABLE_ABI,
    extra_compile_args=[
        "-O3",
        "-std=gnu11",
        "-fvisibility=hidden",  # the module exports PyInit__core alone
        "-Wall",
        "-Wextra",
        "-Werror=implicit-function-declaration",  # what the limited API lacks
        "-Wno-missing-field-initializers",
        "-Wno-cast-function-type",
    ],
    optional=True,  # without a compiler the commands that need no workers install all the same
)

asked = os.environ.get("RINGFENCE_BUILD", "")
if asked not in ("", "pure", "compiled"):
    raise SystemExit(f"RINGFENCE_BUILD is {asked!r}; it may be 'pure' or 'compiled', or not set")
core.optional = asked != "compiled"
setup(
    ext_modules=[] if asked == "pure" else [core],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if STABLE_ABI and asked != "pure" else {},
)
