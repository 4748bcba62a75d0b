"""Draw docs/figures/trace.svg: `python -m scripts.trace_figure`. Needs torch and matplotlib.

Two workers train a small model with DDP under torch.profiler and export their traces with ringfence's rows; one step of
both is drawn, from those files alone.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

FIGURE = Path(__file__).parents[1] / "docs" / "figures" / "trace.svg"
WORKERS = 2
STEPS = 10  # profiled; the shortest is drawn: something else ran on the machine in the others
COMPUTE = {  # what the training thread does, as torch names it: the row's label and colour
    "DistributedDataParallel.forward": ("forward", "#CC79A7"),
    "backward": ("backward", "#999999"),
    "Optimizer.step#SGD.step": ("optimizer", "#E69F00"),
}
SHOWN = ("seal", "open", "lock", "reduce", "send", "receive", "wait")
ROWS = ("training thread", "collectives", "stages")


def train(target: str) -> None:
    """One worker: a few steps under the profiler, and the trace of them."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.profiler import profile, record_function

    import ringfence

    dist.init_process_group("ringfence")
    torch.manual_seed(0)
    layers = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(6)])
    model = DistributedDataParallel(layers, bucket_cap_mb=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.randn(32, 1024)

    def step() -> None:
        with record_function("step"):
            optimizer.zero_grad()
            loss = model(data).square().mean()
            with record_function("backward"):
                loss.backward()
            optimizer.step()

    for _ in range(5):
        step()
    dist.barrier()
    with profile() as done:
        for _ in range(STEPS):
            step()
    ringfence.export_chrome_trace(done, target)
    dist.destroy_process_group()


def make_traces(directory: Path) -> list[dict[str, Any]]:
    """The traces of all workers."""
    from ringfence.config.private_files import new_secret_file

    secret = directory / "secret"
    new_secret_file(secret)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(WORKERS),
        "OMP_NUM_THREADS": "1",
        "RINGFENCE_SECRET_FILE": str(secret),
        "RINGFENCE_RUN_ID": "trace",
    }
    command = [sys.executable, "-m", "scripts.trace_figure"]
    paths = [directory / f"worker-{rank}.json" for rank in range(WORKERS)]
    processes = [
        subprocess.Popen([*command, str(path)], env={**os.environ, **shared, "RANK": str(rank)})  # noqa: S603  # this file
        for rank, path in enumerate(paths)
    ]
    codes = [process.wait(timeout=120) for process in processes]
    if any(codes):
        raise SystemExit(f"the workers ended with {codes}")
    return [json.loads(path.read_text()) for path in paths]


def rows_of(trace: dict[str, Any], start: float, end: float) -> dict[str, list[tuple[float, float, str]]]:
    """For each row the ranges of the time from `start` to `end`, in milliseconds since its start."""
    events = trace["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    rows: dict[str, list[tuple[float, float, str]]] = {row: [] for row in ROWS}
    for event in events:
        if event.get("ph") != "X":
            continue
        begin, until = max(event["ts"], start), min(event["ts"] + event["dur"], end)
        if begin >= until:
            continue
        row = names.get(event["tid"], "")
        place = ((begin - start) / 1000, (until - begin) / 1000, event["name"])
        if row.startswith("ringfence collectives"):
            rows["collectives"].append(place)
        elif row == "ringfence stages":
            rows["stages"].append(place)
        elif event["name"] in COMPUTE:
            rows["training thread"].append(place)
    return rows


def draw(traces: list[dict[str, Any]]) -> Any:
    """The shortest step of the first worker, and what the others did meanwhile."""
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    from ringfence_lab.report.style import STAGES, WIDTH

    steps = [event for event in traces[0]["traceEvents"] if event.get("ph") == "X" and event["name"] == "step"]
    shortest = min(steps, key=lambda event: event["dur"])
    start, end = shortest["ts"], shortest["ts"] + shortest["dur"]
    bases = [trace["baseTimeNanoseconds"] / 1000 for trace in traces]
    figure, axes = plt.subplots(len(traces), 1, figsize=(WIDTH, 1.9 * len(traces) + 0.6), sharex=True)
    for rank, (axis, trace) in enumerate(zip(axes, traces, strict=True)):
        moved = bases[0] - bases[rank]
        rows = rows_of(trace, start + moved, end + moved)
        lanes: list[float] = []
        for begin, length, name in sorted(rows["collectives"]):
            lane = next((each for each, free in enumerate(lanes) if free <= begin), len(lanes))
            lanes[lane : lane + 1] = [begin + length]
            axis.broken_barh([(begin, length)], (1.05 + 0.3 * lane, 0.25), facecolor="white", edgecolor="black", lw=0.7)
            axis.text(
                begin + length / 2, 1.175 + 0.3 * lane, name.partition(":")[2], ha="center", va="center", fontsize=7
            )
        for begin, length, name in rows["training thread"]:
            label, colour = COMPUTE[name]
            axis.broken_barh([(begin, length)], (2.1, 0.7), facecolor=colour, alpha=0.5)
            if length > 0.06 * (end - start) / 1000:
                axis.text(begin + length / 2, 2.45, label, ha="center", va="center", fontsize=7)
        for stage in SHOWN:
            places = [(begin, length) for begin, length, name in rows["stages"] if name == stage]
            axis.broken_barh(places, (0.1, 0.7), facecolor=STAGES[stage][0])
        axis.set_yticks([2.45, 1.45, 0.45], ROWS)
        axis.set_ylim(0, 3)
        axis.set_title(f"worker {rank}", loc="left", fontsize=10)
    axes[-1].set_xlabel("milliseconds of one step")
    keys = [Patch(facecolor=STAGES[stage][0], label=stage) for stage in SHOWN]
    figure.legend(handles=keys, loc="outside lower center", ncols=len(keys), frameon=False)
    return figure


if __name__ == "__main__":
    if sys.argv[1:]:  # a worker, and where its trace goes
        train(sys.argv[1])
        sys.exit()
    import matplotlib.pyplot as plt

    from ringfence_lab.report.style import STYLE

    with tempfile.TemporaryDirectory() as temporary, plt.rc_context(STYLE):
        figure = draw(make_traces(Path(temporary)))
        figure.set_layout_engine("constrained")
        figure.savefig(FIGURE, metadata={"Date": None, "Title": "ringfence: one step of DDP in a profiler's trace"})
