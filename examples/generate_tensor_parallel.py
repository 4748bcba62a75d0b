"""Generate text with a tensor-parallel language model over sealed links: every worker holds a part of each layer.

    ringfence secret new run.secret
    export RINGFENCE_SECRET_FILE=$PWD/run.secret
    torchrun --nnodes 1 --node-rank 0 --nproc-per-node 2 --master-addr 127.0.0.1 --master-port 29500 \
        examples/generate_tensor_parallel.py

The model is a small Llama with random weights, so nothing is downloaded. Needs `pip install transformers`. `--device cuda` runs
it on the GPUs of this machine, `--device sim` on simulated ones (ringfence_lab.accelerator).
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    bos_token_id=0,
    eos_token_id=None,
)
PLAN = {  # of each layer: the outputs of the first linear layers are split over the workers, and those of the last are summed
    "self_attn.q_proj": ColwiseParallel(),
    "self_attn.k_proj": ColwiseParallel(),
    "self_attn.v_proj": ColwiseParallel(),
    "self_attn.o_proj": RowwiseParallel(),
    "mlp.gate_proj": ColwiseParallel(),
    "mlp.up_proj": ColwiseParallel(),
    "mlp.down_proj": RowwiseParallel(),
}


def make_model(device: torch.device) -> LlamaForCausalLM:
    """The same weights on every worker and device."""
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG).to(device).eval()


def split(model: LlamaForCausalLM, mesh: DeviceMesh) -> LlamaForCausalLM:
    """Keep this worker's part of the attention heads and of the feed-forward layers."""
    for layer in model.model.layers:
        assert isinstance(layer, nn.Module)
        parallelize_module(layer, mesh, PLAN)
    return model


def generate(model: LlamaForCausalLM, device: torch.device, tokens: int) -> list[int]:
    """Continue a fixed prompt with the most likely tokens."""
    prompt = torch.arange(1, 17, device=device).unsqueeze(0)
    with torch.inference_mode():
        output = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens, do_sample=False, pad_token_id=0
        )
    return [int(token) for token in output[0, prompt.size(1) :]]


def main() -> None:
    parser = argparse.ArgumentParser(description="Generate text with a tensor-parallel language model.")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, another accelerator of torch, or sim")
    parser.add_argument("--tokens", type=int, default=32)
    arguments = parser.parse_args()
    if arguments.device == "sim":
        from ringfence_lab import accelerator

        accelerator.load()
    dist.init_process_group("ringfence")
    device = torch.device(arguments.device)
    if device.type != "cpu":
        device = torch.device(device.type, dist.get_node_local_rank() % torch.accelerator.device_count())
        torch.accelerator.set_device_index(device.index)

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    tokens = generate(split(make_model(device), mesh), device, arguments.tokens)
    if dist.get_rank() == 0:
        print("tokens", *tokens, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
