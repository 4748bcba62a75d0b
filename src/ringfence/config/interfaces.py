"""Addresses: as settings write them, of a network interface by its name, of the one that reaches another machine; its speed."""

from __future__ import annotations

import ipaddress
import re
import socket
from pathlib import Path

from ringfence.admission.encoding import is_printable
from ringfence.admission.entry import HOST_BYTES
from ringfence.errors import ConfigurationError

LOOPBACK = "127.0.0.1"


def parse_address(value: str, source: str) -> tuple[str, int]:
    """Parse "host:port" or "[v6]:port". Raises ConfigurationError, which names `source`."""
    host, _, port = value.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    well_formed = host and len(host) <= HOST_BYTES and is_printable(host) and not any(each in host for each in " []")
    if not well_formed or not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) <= 0xFFFF:
        raise ConfigurationError(f"{source}={value[:64]!r}: write host:port")
    return host, int(port)


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
