"""Measure an all-reduce of plaintext Gloo between two namespaces: bare, through wireguard-go, and through OpenVPN.

    python -m scripts.tunnels > docs/results/tunnels.json    # needs root; Debian: wireguard-go wireguard-tools openvpn openssl

Both tunnels run in user space, as processes that share the cores with the workers. It says nothing about WireGuard or IPsec in
the kernel.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

from ringfence_lab.bench.machine import facts, now
from ringfence_lab.bench.netns import Hosts
from ringfence_lab.bench.worker_pool import Placement

ROUNDS: Final = 3
CALLS: Final = {1 << 20: 15, 25 << 20: 5}  # of each round, by size
WARM_UP: Final = 2
PORT: Final = 29777
OPENVPN: Final = ("--dev-type", "tun", "--dh", "none", "--data-ciphers", "AES-256-GCM", "--proto", "udp", "--verb", "1")
BUFFERS: Final = ("--sndbuf", "4194304", "--rcvbuf", "4194304")


def worker() -> None:
    """One of two workers; rank 0 prints the seconds of each call, by size, as its own clock has them."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    taken: dict[int, list[float]] = {}
    for size, calls in CALLS.items():
        tensor = torch.ones(size // 4)
        for call in range(WARM_UP + calls):
            dist.barrier()
            began = time.perf_counter()
            dist.all_reduce(tensor)
            if call >= WARM_UP:
                taken.setdefault(size, []).append(time.perf_counter() - began)
            tensor.fill_(1.0)
    if dist.get_rank() == 0:
        print(json.dumps(taken))
    dist.destroy_process_group()


def run(*command: str, text: str | None = None) -> str:
    return subprocess.run(command, input=text, check=True, capture_output=True, text=True).stdout.strip()  # noqa: S603


@contextmanager
def process(*command: str) -> Iterator[None]:
    """A tunnel that runs until the context ends."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as started:  # noqa: S603
        try:
            yield
        finally:
            started.terminate()


def wireguard(places: list[Placement], stack: ExitStack, folder: Path) -> None:
    """Connect the hosts by wireguard-go: 10.84.0.1 and 10.84.0.2 on the interface wg."""
    private = [run("wg", "genkey") for _ in places]
    public = [run("wg", "pubkey", text=key) for key in private]
    for rank, place in enumerate(places):
        stack.enter_context(process(*place.prefix, "wireguard-go", "-f", f"wg{rank}"))
        (folder / f"wg{rank}").write_text(private[rank])
    until(lambda: all(Path(f"/var/run/wireguard/wg{rank}.sock").exists() for rank in (0, 1)))
    for rank, place in enumerate(places):
        peer = (
            "peer",
            public[1 - rank],
            "allowed-ips",
            f"10.84.0.{2 - rank}/32",
            "endpoint",
            f"{places[1 - rank].host}:51820",
        )
        run(
            *place.prefix,
            "wg",
            "set",
            f"wg{rank}",
            "private-key",
            str(folder / f"wg{rank}"),
            "listen-port",
            "51820",
            *peer,
        )
        run(*place.prefix, "ip", "address", "add", f"10.84.0.{rank + 1}/24", "dev", f"wg{rank}")
        run(*place.prefix, "ip", "link", "set", f"wg{rank}", "up", "mtu", "1420")


def openvpn(places: list[Placement], stack: ExitStack, folder: Path) -> None:
    """Connect the hosts by OpenVPN with a throw-away authority: 10.85.0.1 and 10.85.0.2 on the interface ov."""
    authority = [str(folder / name) for name in ("ca.key", "ca.pem")]
    new = ("openssl", "req", "-newkey", "ed25519", "-nodes", "-keyout")
    run(*new, authority[0], "-x509", "-out", authority[1], "-subj", "/CN=ca", "-days", "2")
    for rank, place in enumerate(places):
        key, request, own = (str(folder / f"ov{rank}.{end}") for end in ("key", "csr", "pem"))
        run(*new, key, "-out", request, "-subj", f"/CN={rank}")
        signed = ("-CA", authority[1], "-CAkey", authority[0], "-CAcreateserial", "-days", "2", "-out", own)
        run("openssl", "x509", "-req", "-in", request, *signed)
        end = ("--tls-client", "--remote", places[0].host) if rank else ("--tls-server", "--local", places[0].host)
        ours = ("--dev", f"ov{rank}", "--ca", authority[1], "--cert", own, "--key", key)
        addresses = ("--ifconfig", f"10.85.0.{rank + 1}", f"10.85.0.{2 - rank}")
        stack.enter_context(process(*place.prefix, "openvpn", *OPENVPN, *BUFFERS, *ours, *end, *addresses))
    refused = "t.connect_ex(('10.85.0.1', 9)) == errno.ECONNREFUSED"
    answers = f"import errno, socket; t = socket.socket(); t.settimeout(1); raise SystemExit(not {refused})"
    reach = (*places[1].prefix, sys.executable, "-c", answers)
    until(lambda: subprocess.run(reach, capture_output=True).returncode == 0)  # noqa: S603


def until(ready: Callable[[], bool], seconds: float = 30.0) -> None:
    """Wait until a tunnel is up."""
    end = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > end:
            raise RuntimeError("a tunnel did not come up")
        time.sleep(0.2)


def measure(places: list[Placement], master: str, interfaces: tuple[str, str]) -> dict[str, list[float]]:
    """Run both workers over these interfaces; return the seconds of rank 0's calls by size."""
    started = []
    for rank, place in enumerate(places):
        own = {"RANK": str(rank), "GLOO_SOCKET_IFNAME": interfaces[rank], "MASTER_ADDR": master}
        around = {**os.environ, "WORLD_SIZE": "2", "MASTER_PORT": str(PORT), "OMP_NUM_THREADS": "1", **own}
        command = [*place.prefix, sys.executable, "-m", "scripts.tunnels", "worker"]
        started.append(subprocess.Popen(command, env=around, stdout=subprocess.PIPE, text=True))  # noqa: S603
    printed = [each.communicate(timeout=300)[0] for each in started]
    found: dict[str, list[float]] = json.loads(printed[0])
    return found


def main() -> None:
    taken: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as name, Hosts(2, None) as hosts, ExitStack() as stack:
        places = hosts.placements(2)
        wireguard(places, stack, Path(name))
        openvpn(places, stack, Path(name))
        ways = {
            "none": (places[0].host, ("rf", "rf")),
            "wireguard-go": ("10.84.0.1", ("wg0", "wg1")),
            "OpenVPN, AES-256-GCM": ("10.85.0.1", ("ov0", "ov1")),
        }
        for _ in range(ROUNDS):
            for way, (master, interfaces) in ways.items():
                for size, seconds in measure(places, master, interfaces).items():
                    taken.setdefault(way, {}).setdefault(size, []).extend(seconds)
    medians = {way: {size: statistics.median(seconds) for size, seconds in each.items()} for way, each in taken.items()}
    command = "python -m scripts.tunnels"
    json.dump(
        {"command": command, "date": now(), "machine": facts(), "rounds": ROUNDS, "median_seconds": medians},
        sys.stdout,
        indent=1,
    )
    print()


if __name__ == "__main__":
    worker() if sys.argv[1:] == ["worker"] else main()
