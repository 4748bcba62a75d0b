"""A worker of the benchmark: joins the groups of all variants, then executes and times commands, round by round."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

from ringfence.guard import plaintext_allowed
from ringfence.runtime import staging_times
from ringfence_lab.bench import names, operations, replay, variants
from ringfence_lab.bench.device import facts as device_facts
from ringfence_lab.bench.device import late_seconds, open_device, simulate, simulate_tee
from ringfence_lab.bench.json_pipe import Message, run_worker
from ringfence_lab.bench.kernel_counters import bytes_sent, connections, peak_bytes, reset_peak, resident_bytes
from ringfence_lab.bench.operations import Tensors
from ringfence_lab.bench.profile import recorded_staging
from ringfence_lab.bench.variants import HostVariant, Place, WorkerVariant

_TIMEOUT: Final = timedelta(minutes=5)
_WARM_BYTES: Final = 4096
_TIMES: Final = 3


class Worker:
    """One rank."""

    def __init__(self, config: Message) -> None:
        torch.set_num_threads(1)
        self.rank, self.size = config["rank"], config["size"]
        store = dist.FileStore(config["store"], self.size)  # a file is reachable from every network namespace
        with plaintext_allowed():  # what the sealed ones are compared with
            dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.size, timeout=_TIMEOUT)
        mine = dist.PrefixStore("bench", store)
        self._device = open_device(config["device"], self.rank) if config["device"] else None
        place = Place(self.rank, self.size, config["host"], Path(config["folder"]), mine, _TIMEOUT, self._device)
        self._at_start = resident_bytes()
        self.variants: dict[str, WorkerVariant] = {name: variants.make(name, place) for name in config["variants"]}
        self._operation = ""
        self._tensors: Tensors
        self._host_tensors: Tensors  # of variants that copy beside a collective
        self._steps: dict[str, Callable[[], None]] = {}
        self._simulates_tee = False

    def hello(self) -> Message:
        return {"gloo": variants.gloo_facts(), **(device_facts(self._device) if self._device else {})}

    # -- collectives -------------------------------------------------------------------------------------------------

    def prepare(self, operation: str, size: int, wire: str = "float32", only: list[str] | None = None) -> Message:
        """Make the tensors and check that every variant computes the right result; return the variants that take part."""
        self._operation, self._tensors = operation, Tensors.of(operation, size, self.size, wire)
        taking_part = [name for name, variant in self._chosen(only).items() if variant.offers(operation)]
        self._check(operation, self._tensors, taking_part)
        return {"variants": taking_part}

    def prepare_device(
        self, operation: str, size: int, wire: str, only: list[str], copy_rate: float, confidential: bool
    ) -> Message:
        """The same on tensors of the device; `copy_rate` and `confidential` are for the simulated one."""
        assert self._device is not None
        if self._device.type == names.SIMULATED:
            simulate(copy_rate, confidential)
        self._host_tensors = Tensors.of(operation, size, self.size, wire)
        self._operation, self._tensors = operation, Tensors.of(operation, size, self.size, wire, self._device)
        for variant in self.variants.values():
            if isinstance(variant, HostVariant):
                variant.prepare(self._tensors, confidential)
        for name in only:
            self._check(operation, self._tensors_of(self.variants[name]), [name])
        return {"variants": only}

    def _tensors_of(self, variant: WorkerVariant) -> Tensors:
        return self._host_tensors if isinstance(variant, HostVariant) else self._tensors

    def _chosen(self, only: list[str] | None) -> dict[str, WorkerVariant]:
        """Return the variants of this case in its order; all, if it names none."""
        return self.variants if only is None else {name: self.variants[name] for name in only}

    def _check(self, operation: str, tensors: Tensors, taking_part: Iterable[str]) -> None:
        for name in taking_part:
            operations.fill(operation, tensors, self.rank, self.size)
            self.variants[name].run(operation, tensors)
            operations.check(operation, tensors, self.rank, self.size, name, self.variants[name].tolerance)
        for tensor in tensors:
            tensor.zero_()  # sums of sums grow without end otherwise

    def round(self, turns: list[tuple[str, int]], busy: bool) -> Message:
        """Time every variant in turn, each with its number of repeats."""
        run = self._run_busy if busy else self._run
        return {name: self._timed(name, repeats, run) for name, repeats in turns}

    def _run(self, name: str, repeats: int) -> None:
        variant = self.variants[name]
        tensors = self._tensors_of(variant)
        for _ in range(repeats):
            variant.run(self._operation, tensors)

    def _run_busy(self, name: str, repeats: int) -> None:
        """Compute in pure Python until the collective is done."""
        variant, counted = self.variants[name], 0
        for _ in range(repeats):
            begun = variant.begin(self._operation, self._tensors)
            while not begun.is_completed():
                for number in range(1000):  # bytecode, not one call into C: the interpreter may switch at every turn
                    counted += number
            begun.wait()

    def _timed(self, name: str, repeats: int, run: Callable[[str, int], None]) -> Message:
        variant = self.variants[name]
        if variant.stages is not None:
            variant.stages.start()
            staging_times.start()
        sent, counted = bytes_sent(), variant.counted()
        dist.barrier()
        late = late_seconds(self._device)
        cpu, start = time.process_time_ns(), time.perf_counter_ns()
        run(name, repeats)
        seconds, cpu = (time.perf_counter_ns() - start) / 1e9, time.process_time_ns() - cpu
        stages = variant.stages.stop() if variant.stages is not None else None
        dist.barrier()  # what others still had to receive is on the wire now
        measured: Message = {"seconds": seconds, "cpu": cpu / 1e9, "sent": bytes_sent() - sent, "repeats": repeats}
        if counted is not None and (now := variant.counted()) is not None:
            measured["counted"] = [after - before for before, after in zip(counted, now, strict=True)]
        if self._simulates_tee:
            measured |= {"late": late_seconds(self._device) - late, "wall": seconds}
        if stages and self._device is not None:
            measured["staging"] = recorded_staging()
        return {**measured, "stages": stages} if stages else measured

    def calls(self, name: str, count: int) -> list[float]:
        """Return the seconds of single calls, each of which all workers begin together."""
        taken = []
        for _ in range(count):
            dist.barrier()
            start = time.perf_counter()
            self.variants[name].run(self._operation, self._tensors)
            taken.append(time.perf_counter() - start)
        return taken

    # -- memory ------------------------------------------------------------------------------------------------------

    def warm(self, name: str) -> Message:
        """Sum a small tensor, so that everything that a collective needs is loaded."""
        self._sum(name, _WARM_BYTES)
        return {"start": self._at_start, "warm": resident_bytes()}

    def swell(self, name: str, size: int) -> Message:
        """Sum a large tensor; return the peak of memory and the number of connections that carried it."""
        reset_peak()
        before = connections()
        tensor = self._sum(name, size)
        peak, after = peak_bytes(), connections()
        moved = {
            stream: now.sent + now.received - (sum(before[stream][:2]) if stream in before else 0)
            for stream, now in after.items()
        }
        links = [stream for stream, count in moved.items() if count * 8 * self.size >= size]
        if [each.item() for each in tensor.aminmax()] != [self.size * (self.size + 1) / 2] * 2:  # takes no memory
            raise operations.WrongResult(f"{name} computed a wrong all_reduce on rank {self.rank}")
        buffers = sum(after[stream].buffers for stream in links)
        return {"peak": peak, "tensor": size, "links": len(links), "socket_buffers": buffers}

    def _sum(self, name: str, size: int) -> torch.Tensor:
        tensor = torch.empty(size // 4)
        for _ in range(_TIMES):
            tensor.fill_(self.rank + 1)
            self.variants[name].run("all_reduce", Tensors(tensor, tensor, tensor))
        dist.barrier()
        return tensor

    # -- training, real or replayed ----------------------------------------------------------------------------------

    def prepare_training(
        self, model: str, strategy: str, bucket_mb: float | None, wire: str = "float32", only: list[str] | None = None
    ) -> Message:
        """Build the model once for each variant; return facts about it."""
        from ringfence_lab.bench import training

        self._steps.clear()
        self._steps, facts = training.prepare(model, strategy, bucket_mb, self._chosen(only), wire)
        return facts

    def prepare_trace(
        self, steps: list[tuple[int, float]], busy: bool, wire: str, only: list[str] | None = None
    ) -> Message:
        """Allocate the buckets and check that every variant sums the largest of them correctly."""
        self._steps.clear()
        memory = replay.Memory([size for size, _ in steps], wire)
        chosen = self._chosen(only)
        self._check(
            "all_reduce",
            memory.tensors(memory.largest),
            [name for name, variant in chosen.items() if variant.offers("all_reduce")],
        )
        compute = replay.Busy if busy else replay.Idle
        seconds = [each for _, each in steps]
        self._steps = {name: replay.step(variant, memory, seconds, compute) for name, variant in chosen.items()}
        return {"variants": list(chosen)}

    def prepare_tee(self, steps: list[tuple[int, float]], tees: dict[str, Message]) -> Message:
        """The same on tensors of a simulated device; `tees` are the settings of the device for each variant."""
        assert self._device is not None
        self._steps.clear()
        self._simulates_tee = True
        memory = replay.Memory([size for size, _ in steps], "float32", self._device)
        for name, settings in tees.items():
            simulate_tee({**settings, "dilation": 1.0})
            self._check("all_reduce", memory.tensors(memory.largest), [name])
            tee = simulate_tee(settings)
            seconds = [each * tee.dilation for _, each in steps]
            self._steps[name] = replay.step(self.variants[name], memory, seconds, replay.OnDevice)
        return {"variants": list(tees)}

    def train(self, turns: list[tuple[str, int]]) -> Message:
        """Time the given number of steps of every variant in turn."""

        def run(name: str, repeats: int) -> None:
            for _ in range(repeats):
                self._steps[name]()

        return {name: self._timed(name, repeats, run) for name, repeats in turns}


if __name__ == "__main__":
    run_worker(Worker)
