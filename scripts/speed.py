"""Times all-reduce on plaintext Gloo, on ringfence, and on Gloo again, in turns, and prints the ratio (see scripts/speed)."""

import os
import statistics
import time

import torch
import torch.distributed as dist

ROUNDS = 15
BATCH_SECONDS = 0.05  # small sizes are timed in batches at least this long


def timed(group: dist.ProcessGroup | None, tensor: torch.Tensor, repeats: int) -> float:
    """Seconds for one all-reduce: the slowest rank's."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        dist.all_reduce(tensor, group=group)
    seconds = torch.tensor([(time.perf_counter() - start) / repeats], dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    sealed = dist.new_group(backend="ringfence")
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} workers, torch {torch.__version__}, {ROUNDS} rounds, float32, loopback")
        print("      size        Gloo   ringfence   ringfence/Gloo    Gloo/Gloo")
    for kib in (float(size) for size in os.environ["SIZES_KIB"].split(",")):
        tensor = torch.zeros(int(kib * 256))
        repeats = max(2, int(BATCH_SECONDS / timed(None, tensor, 5)))
        agreed = torch.tensor([repeats])
        dist.broadcast(agreed, 0)
        repeats = int(agreed)
        timed(sealed, tensor, 3)
        rounds = [[timed(group, tensor, repeats) for group in (None, sealed, None)] for _ in range(ROUNDS)]
        gloo = statistics.median((first + second) / 2 for first, _, second in rounds)
        ours = statistics.median(each for _, each, _ in rounds)
        ratios = sorted(2 * each / (first + second) for first, each, second in rounds)
        same = sorted(second / first for first, _, second in rounds)
        if dist.get_rank() == 0:
            spread = f"{statistics.median(ratios):.2f} [{ratios[2]:.2f}, {ratios[-3]:.2f}]"
            itself = f"{statistics.median(same):.2f} [{same[2]:.2f}, {same[-3]:.2f}]"
            print(f"{kib:7g} KiB {gloo * 1e3:8.2f} ms {ours * 1e3:8.2f} ms  {spread:>17} {itself:>17}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
