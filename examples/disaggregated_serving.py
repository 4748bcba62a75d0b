"""Serve a language model with prompts and answers computed on different workers; the KV cache travels sealed, layer by layer.

    ringfence secret new run.secret && export RINGFENCE_SECRET_FILE=$PWD/run.secret
    ringfence run --nproc-per-node 4 examples/disaggregated_serving.py

Each worker of the first half computes the keys and values of prompts (prefill) for one of the second half, which generates
(decode). The weights are random. `--device cuda` uses the machine's GPUs, `--device sim` simulated ones (ringfence_lab).
"""

import argparse
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

WORDS, LAYERS, HEADS, SIZE = 256, 4, 4, 16  # SIZE of a head
WIDTH, LONGEST, NEW = HEADS * SIZE, 64, 16  # LONGEST: tokens of a prompt and its answer; NEW: of the answer
PROMPTS = [[(7 * request + 3 * place) % WORDS for place in range(12 + 5 * request)] for request in range(6)]
Cache = torch.Tensor  # keys and values of one layer: 2 x HEADS x positions x SIZE


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.given, self.output = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        up, down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.feed_forward = nn.Sequential(nn.LayerNorm(WIDTH), up, nn.GELU(), down)

    def forward(self, hidden: torch.Tensor, cache: Cache) -> tuple[torch.Tensor, Cache]:
        """Return the output, and the cache with the keys and values of the input added to it."""
        given = self.given(self.norm(hidden)).view(len(hidden), 3, HEADS, SIZE).permute(1, 2, 0, 3)
        cache = torch.cat([cache, given[1:]], dim=2)
        seen = nn.functional.scaled_dot_product_attention(given[0], cache[0], cache[1], is_causal=len(hidden) > 1)
        hidden = hidden + self.output(seen.transpose(0, 1).flatten(1))
        return hidden + self.feed_forward(hidden), cache


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)  # the same weights on every worker
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.layers, self.head = nn.ModuleList(Layer() for _ in range(LAYERS)), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor, caches: list[Cache], ready: Callable[[Cache], None]) -> torch.Tensor:
        """Return the most likely next token. Extend the cache of each layer, and call `ready` with it at once."""
        start = caches[0].size(2)
        hidden = self.words(tokens) + self.places.weight[start : start + len(tokens)]
        for index, layer in enumerate(self.layers):
            hidden, caches[index] = layer(hidden, caches[index])
            ready(caches[index])
        return self.head(hidden[-1:]).argmax(dim=1)


def prefill(model: Decoder, prompt: list[int], decoder: int, device: torch.device) -> None:
    """Send a header, each layer's cache while the next layer is computed, and the first token."""
    dist.send(torch.tensor([LAYERS, 2, HEADS, len(prompt), SIZE]), decoder)
    tokens, nothing = torch.tensor(prompt, device=device), torch.empty(2, HEADS, 0, SIZE, device=device)
    sent = []
    first = model(tokens, [nothing] * LAYERS, ready=lambda cache: sent.append(dist.isend(cache, decoder)))
    for work in [*sent, dist.isend(first, decoder)]:
        work.wait()


def receive(prefiller: int, device: torch.device) -> tuple[list[Cache], torch.Tensor]:
    """Receive the caches of a prompt, and the first token. The header must be that of this worker's model."""
    header = torch.empty(5, dtype=torch.int64)
    dist.recv(header, prefiller)
    positions = int(header[3])
    if header.tolist() != [LAYERS, 2, HEADS, positions, SIZE] or not 0 < positions <= LONGEST - NEW:
        raise ValueError(f"worker {prefiller} announces a cache of {header.tolist()}, which does not fit this model")
    caches = [torch.empty(2, HEADS, positions, SIZE, device=device) for _ in range(LAYERS)]
    first = torch.empty(1, dtype=torch.int64, device=device)
    for work in [dist.irecv(each, prefiller) for each in [*caches, first]]:
        work.wait()
    return caches, first


def serve(prompts: list[list[int]], device: torch.device) -> torch.Tensor:
    """Return the answers, on worker 0. Pairs of workers take turns with the prompts."""
    model, rank, pairs = Decoder().to(device), dist.get_rank(), dist.get_world_size() // 2
    assert dist.get_world_size() % 2 == 0, "workers work in pairs: start an even number"
    answers = torch.zeros(len(prompts), NEW, dtype=torch.int64)
    for request in range(rank % pairs, len(prompts), pairs):
        if rank < pairs:
            prefill(model, prompts[request], rank + pairs, device)
            continue
        caches, token = receive(rank - pairs, device)
        for place in range(NEW):
            answers[request, place] = token
            token = model(token, caches, ready=lambda cache: None)
    dist.reduce(answers, 0)  # each answer is on one worker, and 0 on the others
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve a language model with prefill and decode on different workers.")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, another accelerator of torch, or sim")
    kind = parser.parse_args().device
    if kind == "sim":
        from ringfence_lab import accelerator

        accelerator.load()
    dist.init_process_group("ringfence")
    device = torch.device(kind)
    if kind != "cpu":
        device = torch.device(kind, dist.get_node_local_rank() % torch.accelerator.device_count())
        torch.accelerator.set_device_index(device.index)
    with torch.inference_mode():
        answers = serve(PROMPTS, device)
    if dist.get_rank() == 0:
        for request, answer in enumerate(answers.tolist()):
            print(f"request {request}:", *answer, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
