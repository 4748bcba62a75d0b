"""Tunnels in user space between two hosts, for plaintext Gloo through a VPN: wireguard-go and OpenVPN with AES-256-GCM.

Each tunnel is two processes, one in each host's network namespace, that share the machine's cores with the workers.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from ringfence.cli.dev_ca import Authority
from ringfence.errors import ConfigurationError
from ringfence_lab.bench.names import TUNNELS
from ringfence_lab.bench.netns import run

_PROGRAMS: Final = {"gloo-wireguard": ("wireguard-go", "wg"), "gloo-openvpn": ("openvpn",)}
_READY_SECONDS: Final = 30.0
_OPENVPN: Final = "--dev-type tun --dh none --data-ciphers AES-256-GCM --proto udp --sndbuf 4194304 --rcvbuf 4194304"

Ends = Sequence[tuple[str, str]]  # the network namespace and the address of each of the two hosts


def check(hosts: int, variants: Sequence[str]) -> None:
    """Raise ConfigurationError if these variants need what is not here."""
    for name in TUNNELS.keys() & set(variants):
        if hosts != 2:
            raise ConfigurationError(f"{name} is a tunnel between two hosts: add --hosts 2")
        if missing := [program for program in _PROGRAMS[name] if shutil.which(program) is None]:
            raise ConfigurationError(f"{name} needs {missing[0]}: install wireguard-go, wireguard-tools and openvpn")


@contextlib.contextmanager
def tunnels(ends: Ends, variants: Sequence[str]) -> Iterator[None]:
    """Have the tunnels of these variants between two hosts, each as an interface with the same name at both ends."""
    begin = {"gloo-wireguard": _wireguard, "gloo-openvpn": _openvpn}
    with contextlib.ExitStack() as stack:
        for name in begin.keys() & set(variants):
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ringfence-tunnel-"))
            begin[name](ends, interface(name), Path(folder), stack)
        yield


def interface(variant: str) -> str:
    """Return the name of the interface of a tunnel."""
    return variant.replace("gloo", "rf")


def _wireguard(ends: Ends, name: str, folder: Path, stack: contextlib.ExitStack) -> None:
    keys = [run("wg genkey") for _ in ends]
    public = [run("wg pubkey", given=key) for key in keys]
    for number, (namespace, _) in enumerate(ends):
        device = f"{name}{number}"  # its control socket is in a folder that all namespaces share
        inside = ("ip", "netns", "exec", namespace)
        _start(stack, folder, device, *inside, "wireguard-go", "-f", device)
        _until(partial(_answers, *inside, "wg", "show", device), device)
        secret, peer = folder / f"{device}.key", 1 - number
        secret.touch(0o600)
        secret.write_text(keys[number])
        address = f"peer {public[peer]} allowed-ips 10.84.0.0/24 endpoint {ends[peer][1]}:51820"
        own = ("private-key", str(secret), "listen-port", "51820")
        run([*inside, "wg", "set", device, *own, *address.split()])
        run(f"ip -n {namespace} link set {device} name {name} mtu 1420")
        run(f"ip -n {namespace} address add 10.84.0.{number + 1}/24 dev {name}")
        run(f"ip -n {namespace} link set {name} up")


def _openvpn(ends: Ends, name: str, folder: Path, stack: contextlib.ExitStack) -> None:
    issued = Authority.open_or_make(folder, None, "bench.example").issue(["host0", "host1"], days=1)
    for number, (namespace, address) in enumerate(ends):
        peer = 1 - number
        here = ("--ifconfig", f"10.85.0.{number + 1}", f"10.85.0.{peer + 1}", "--dev", name, "--local", address)
        there = ("--tls-client", "--remote", ends[peer][1]) if number else ("--tls-server",)
        files = (
            "--ca",
            str(folder / "ca.pem"),
            "--cert",
            issued[number]["certificate"],
            "--key",
            issued[number]["key"],
        )
        inside = ("ip", "netns", "exec", namespace)
        _start(stack, folder, f"host{number}", *inside, "openvpn", *_OPENVPN.split(), *here, *there, *files)
    for number in range(len(ends)):
        _until(partial(_is_up, folder / f"host{number}.log"), name)


def _start(stack: contextlib.ExitStack, folder: Path, name: str, *command: str) -> None:
    """Start a process of a tunnel; it ends with the stack."""
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)  # noqa: S603
    stack.callback(process.wait)
    stack.callback(process.terminate)


def _until(ready: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    while not ready():
        if time.monotonic() > deadline:
            raise ConfigurationError(f"the tunnel {what} was not ready after {_READY_SECONDS:.0f} s")
        time.sleep(0.05)


def _is_up(log: Path) -> bool:
    return "Initialization Sequence Completed" in log.read_text()


def _answers(*command: str) -> bool:
    return subprocess.run(command, check=False, capture_output=True).returncode == 0  # noqa: S603
