"""Fetch Intel's collateral for the platform of a quote, from a service that the user names: Intel's own, or a cache of it.

What comes is signed by Intel and checked like any other, so the service need not be trusted; but it learns of the platform.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, Final

from ringfence.admission.proofs.tdx import load_library
from ringfence.admission.proofs.tdx_collateral import KEYS, Collateral
from ringfence.errors import ConfigurationError

INTEL: Final = "https://api.trustedservices.intel.com"
SECONDS: Final = 60.0


def fetch(quote: bytes, service: str, seconds: float = SECONDS) -> Collateral:
    """The collateral for this quote's platform, as a policy's file holds it."""
    if not service.startswith(("https://", "http://")):
        raise ConfigurationError(f"{service!a} is not the address of a service, such as {INTEL}")
    try:
        found = json.loads(asyncio.run(_ask(quote, service, seconds)).to_json())
        # The library adds the certificate of this one platform; without it the file serves all platforms of the kind.
        return Collateral.parse(json.dumps({key: found[key] for key in KEYS}, sort_keys=True, indent=1).encode())
    except TimeoutError:
        raise ConfigurationError(f"{service} gave no collateral within {seconds:.0f} s") from None
    except (ValueError, KeyError) as error:
        raise ConfigurationError(f"{service} gave no collateral: {' '.join(str(error).split())[:300]}") from None


async def _ask(quote: bytes, service: str, seconds: float) -> Any:
    return await asyncio.wait_for(load_library().get_collateral(service, quote), seconds)
