"""What DiLoCo costs and learns over a long link: time and bytes beside the same without a limit, loss beside DDP's.

    python -m tests.integration.diloco_cost --rounds 12 --every 120 --rate 100mbit --delay 100ms

Two sites of one worker train the model of examples/across_regions/train.py in turns: a round over the long link, a round
between hosts without a limit, and as many steps with DDP. So load from elsewhere meets all three alike. All three begin with
a model that DDP has trained for `--before` steps. Needs root.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import runpy
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ringfence
from ringfence_lab.bench.netns import Hosts
from ringfence_lab.bench.relay import LongLink, seconds_of
from tests.integration import netns
from tests.pool import Pool, values

EXAMPLE = Path(__file__).parents[2] / "examples" / "across_regions" / "train.py"
VARIANTS = ("long link", "no limit", "DDP")
HELD_OUT = 0.1  # of the text, for the loss
RATE, WARM_UP = 2e-3, 50  # of the inner optimizer, which falls with a cosine to a tenth
SECONDS = 3600.0

_training: dict[str, Any] = {}  # of a worker, from one call of the pool to the next


def begin(variant: str, options: dict[str, Any], file: str) -> int:
    """Make model and optimizers as they are in a file, which DDP writes; return the number of parameters."""
    torch.set_num_threads(1)
    example = runpy.run_path(str(EXAMPLE))
    torch.manual_seed(0)
    model: nn.Module = example["Model"]()
    inner = torch.optim.AdamW(model.parameters(), lr=RATE)
    outer = torch.optim.SGD(model.parameters(), lr=options["outer"], momentum=options["momentum"], nesterov=True)
    _training.update(options, model=model, inner=inner, step=0, text=example["TEXT"], length=example["LENGTH"])
    if variant == "DDP":
        _training["called"] = DistributedDataParallel(model)
        take(options["before"])
        if dist.get_rank() == 0:
            torch.save([model.state_dict(), inner.state_dict()], file)
    else:
        _training["called"] = model
        _training["step"] = options["before"]
        weights, moments = torch.load(file)
        model.load_state_dict(weights)
        inner.load_state_dict(moments)
        _training["averaged"] = ringfence.DiLoCo(model, inner, outer, options["every"], int8=options["int8"])
    _training["crossed"] = crossed()
    return sum(each.numel() for each in model.parameters())


def crossed() -> int:
    """Bytes of frames that this worker has sent and received."""
    return sum(peer.wire_sent + peer.wire_received for peer in ringfence.counters().peers)


def texts(starts: Tensor) -> tuple[Tensor, Tensor]:
    text, length = _training["text"], _training["length"]
    found = torch.stack([text[start : start + length + 1] for start in starts]).long()
    return found[:, :-1], found[:, 1:]


def loss_of(model: nn.Module, given: Tensor, wanted: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(given).flatten(0, 1), wanted.flatten())


def learning_rate(step: int) -> float:
    share = step / (_training["before"] + _training["every"] * _training["rounds"])
    falling = 0.1 + 0.45 * (1 + float(torch.cos(torch.tensor(torch.pi * share))))
    return RATE * falling * min(1.0, (step + 1) / WARM_UP)


def train_a_round() -> tuple[float, float]:
    """Return the seconds of a round, and of the last call of its optimizer."""
    dist.barrier()
    began = time.monotonic()
    last = take(_training["every"])
    return time.monotonic() - began, last


def take(steps: int) -> float:
    """Train; return the seconds of the last call of the optimizer."""
    inner, began = _training["inner"], time.monotonic()
    end = int(len(_training["text"]) * (1 - HELD_OUT)) - _training["length"] - 1
    for _ in range(steps):
        step = _training["step"]
        draw = torch.Generator().manual_seed(1_000_000 + step * 1000 + dist.get_rank())
        for entry in inner.param_groups:
            entry["lr"] = learning_rate(step)
        inner.zero_grad()
        loss_of(_training["called"], *texts(torch.randint(end, (_training["samples"],), generator=draw))).backward()
        began = time.monotonic()
        inner.step()
        _training["step"] += 1
    return time.monotonic() - began


def result() -> tuple[float, int, str]:
    """Return the loss on the text that was held out, the bytes that crossed, and a digest of the weights."""
    text, length = _training["text"], _training["length"]
    starts = torch.arange(int(len(text) * (1 - HELD_OUT)), len(text) - length - 1, length)
    with torch.no_grad():
        loss = loss_of(_training["model"], *texts(starts)).item()
    weights = torch.cat([each.detach().flatten() for each in _training["model"].parameters()])
    return loss, crossed() - _training["crossed"], hashlib.sha256(weights.numpy().tobytes()).hexdigest()


def options_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--every", type=int, default=120)
    parser.add_argument("--before", type=int, default=360)
    parser.add_argument("--samples", type=int, default=16, help="of a worker and step")
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--delay", type=seconds_of, default=0.1, help="one way")
    parser.add_argument("--int8", action="store_true")
    parser.add_argument("--outer", type=float, default=1.0, help="learning rate of the outer optimizer")
    parser.add_argument("--momentum", type=float, default=0.5)
    return parser.parse_args()


def main() -> None:
    options = options_of()
    with contextlib.ExitStack() as stack:
        distant = stack.enter_context(Hosts(2, options.rate, LongLink(options.delay)))
        close = stack.enter_context(netns.Hosts())
        for name, _ in distant.ends:  # as docs/guides/across-regions.md says
            idle = "net.ipv4.tcp_slow_start_after_idle=0"
            subprocess.run(["ip", "netns", "exec", name, "sysctl", "-qw", idle], check=True)
        near = [(close.prefix(side), address) for side, address in netns.ADDRESSES.items()]
        far = [
            (list(each.prefix), address) for each, (_, address) in zip(distant.placements(2), distant.ends, strict=True)
        ]
        pools: dict[str, Pool] = {}
        start = f"{stack.enter_context(tempfile.TemporaryDirectory())}/start"
        for variant in reversed(VARIANTS):
            places = far if variant == "long link" else near
            pools[variant] = stack.enter_context(Pool([prefix for prefix, _ in places]))
            env = [{"RINGFENCE_INTERFACE": address} for _, address in places]
            asked = (variant, vars(options), start)
            elements, _ = pools[variant].check(begin, 2, args=asked, timeout=SECONDS, env=env, seconds=SECONDS)
        taken: dict[str, list[tuple[float, float]]] = {variant: [] for variant in VARIANTS}
        for number in range(options.rounds):
            for variant in VARIANTS if number % 2 else VARIANTS[::-1]:
                seconds = values(pools[variant].start(train_a_round, 2).wait(SECONDS))
                taken[variant].append((max(each[0] for each in seconds), min(each[1] for each in seconds)))
            print(number + 1, {variant: f"{found[-1][0]:.2f} s" for variant, found in taken.items()}, flush=True)
        results = {variant: values(pools[variant].start(result, 2).wait(SECONDS)) for variant in VARIANTS}
    report(options, elements, taken, results)


def report(options: argparse.Namespace, elements: int, taken: dict[str, Any], results: dict[str, Any]) -> None:
    print(
        f"{elements:,} parameters, trained for {options.before} steps before, {options.rounds} rounds of {options.every} "
        f"steps, {options.samples} samples a worker and step, "
        f"{'int8' if options.int8 else 'float32'}; {options.rate}, {options.delay * 1e3:g} ms one way"
    )
    for variant in VARIANTS:
        whole, last = ([each[place] for each in taken[variant]] for place in (0, 1))
        loss, crossed_, _ = results[variant][0]
        print(
            f"{variant}: {sum(whole):.1f} s, a round {statistics.median(whole):.2f} s, its last step "
            f"{statistics.median(last):.2f} s; {crossed_ / 1e6:.2f} MB; loss {loss:.4f}"
        )
    (far, far_bytes, weights), (_, _, same), (ddp, ddp_bytes, _) = (results[variant][0] for variant in VARIANTS)
    seconds = {variant: sum(each[0] for each in taken[variant]) for variant in VARIANTS}
    ratios = [one[0] / two[0] for one, two in zip(taken["long link"], taken["no limit"], strict=True)]
    long, short = (statistics.median(each[1] for each in taken[variant]) for variant in VARIANTS[:2])
    share = (long - short) / statistics.median(each[0] for each in taken["no limit"])
    print(f"the link adds {share:.1%} to a round, by the medians of what the last step takes")
    print(
        f"time {seconds['long link'] / seconds['no limit']:.3f} of that without a limit "
        f"(by round: median {statistics.median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f})"
    )
    print(f"traffic 1/{ddp_bytes / far_bytes:.0f} of DDP's; loss {far / ddp:.4f} of DDP's")
    print(
        f"weights: equal bits over both links {weights == same}, on both sites {results['long link'][1][2] == weights}"
    )


if __name__ == "__main__":
    from tests.integration import diloco_cost

    diloco_cost.main()  # workers find functions by the name of their module
