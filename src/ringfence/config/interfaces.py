"""Addresses of this machine: of a named network interface, or of the one that reaches another machine; how fast it is."""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path

from ringfence.errors import ConfigurationError

LOOPBACK = "127.0.0.1"


def address_of_interface(wanted: str) -> str:
    """Return the address that `wanted` is, or the first usable one of the interface with that name.

    Raises ConfigurationError, which names RINGFENCE_INTERFACE.
    """
    try:
        return str(ipaddress.ip_address(wanted))
    except ValueError:
        pass
    if wanted not in {name for _, name in socket.if_nameindex()}:
        known = ", ".join(sorted(name for _, name in socket.if_nameindex()))
        raise ConfigurationError(f"RINGFENCE_INTERFACE={wanted}: neither an address nor an interface ({known})")
    address = _ipv4_of(wanted) or _ipv6_of(wanted)
    if address is None:
        raise ConfigurationError(f"RINGFENCE_INTERFACE={wanted}: the interface has no usable address")
    return address


def address_towards(host: str) -> str:
    """Return the address that this machine uses to reach `host`. Sends nothing. Raises OSError or UnicodeError."""
    first_error: OSError | None = None
    for family, kind, protocol, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
        except OSError as error:
            first_error = first_error or error
    assert first_error is not None
    raise first_error


def speed_of(address: str, interfaces: Path = Path("/sys/class/net")) -> int | None:
    """Return the Mbit/s of the interface with this address, or None: virtual ones often do not say."""
    for _, name in socket.if_nameindex():
        if address in (_ipv4_of(name), _ipv6_of(name)):
            try:
                speed = int((interfaces / name / "speed").read_text(encoding="ascii"))
            except (OSError, ValueError):
                return None
            return speed if speed > 0 else None
    return None


def _ipv4_of(interface: str) -> str | None:
    import fcntl  # Linux only, like the ioctl below; everything else here is portable

    request = interface.encode()[:15].ljust(256, b"\0")
    get_interface_address = 0x8915
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            return socket.inet_ntoa(fcntl.ioctl(probe, get_interface_address, request)[20:24])
        except OSError:
            return None


def _ipv6_of(interface: str) -> str | None:
    """The first address that is not link-local; a link-local one needs a scope, which means nothing to peers."""
    try:
        lines = Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        digits, _, _, _, _, name = line.split()
        address = ipaddress.IPv6Address(int(digits, 16))
        if name == interface and not address.is_link_local:
            return str(address)
    return None
