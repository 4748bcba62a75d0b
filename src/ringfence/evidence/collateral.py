"""Fetches Intel's collateral for the platform of a quote, from a service that the user names: Intel's own, or a cache of it.

The collateral is signed by Intel and verified like any other, so the service need not be trusted; but it learns the platform.
The library uses threads of its own, which may crash an interpreter that ends while they still run. So a separate process asks
(`python -m ringfence.evidence.collateral SERVICE`: quote in, JSON out) and exits without shutting down its interpreter.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from typing import Any, Final

from ringfence import own_process
from ringfence.admission.proofs.tdx import load_library
from ringfence.admission.proofs.tdx_collateral import KEYS, Collateral
from ringfence.errors import ConfigurationError

INTEL: Final = "https://api.trustedservices.intel.com"
SECONDS: Final = 60.0


def fetch(quote: bytes, service: str, seconds: float = SECONDS) -> Collateral:
    """Return the collateral for this quote's platform, as in a policy's file. Raises ConfigurationError."""
    if not service.startswith(("https://", "http://")):
        raise ConfigurationError(f"{service!a} is not the address of a service, such as {INTEL}")
    load_library()  # raises if it is missing
    module, name = "ringfence.evidence.collateral", "the process that asks"
    try:
        found = json.loads(own_process.ask(module, service, given=quote, seconds=seconds, name=name))
        # The library adds the certificate of this one platform; without it the file serves all platforms of the kind.
        return Collateral.parse(json.dumps({key: found[key] for key in KEYS}, sort_keys=True, indent=1).encode())
    except subprocess.TimeoutExpired:
        raise ConfigurationError(f"{service} returned no collateral within {seconds:.0f} s") from None
    except (ValueError, KeyError) as error:
        raise ConfigurationError(f"{service} returned no collateral: {' '.join(str(error).split())[:300]}") from None


def check_refresh(found: Collateral, content: bytes, name: str) -> None:
    """Check that fetched collateral may replace a file's content. Raises ConfigurationError.

    An untrusted service cannot forge collateral, but it can return an older version.
    """
    try:
        held = Collateral.parse(content, name)
    except ValueError:
        raise ConfigurationError(f"{name} exists and is not a collateral file: name another file") from None
    if (held.fmspc, held.ca) != (found.fmspc, found.ca):
        raise ConfigurationError(
            f"{name} is for FMSPC {held.fmspc} of the {held.ca} CA, and what was fetched is for FMSPC {found.fmspc} of "
            f"the {found.ca} CA: name another file"
        )
    older = [new.name for new, old in zip(found.parts, held.parts, strict=True) if new.order < old.order]
    if older:
        raise ConfigurationError(
            f"the service returned an older {' and '.join(older)} than {name} has; the file is unchanged: ask another service"
        )


def main(service: str) -> None:
    """Read a quote from stdin, and write the collateral to stdout."""
    try:
        own_process.answer(asyncio.run(_ask(sys.stdin.buffer.read(), service)).to_json())
    except ValueError as error:
        own_process.answer(error=str(error))


async def _ask(quote: bytes, service: str) -> Any:
    return await load_library().get_collateral(service, quote)


if __name__ == "__main__":
    main(sys.argv[1])
