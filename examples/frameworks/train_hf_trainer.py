"""Train a small GPT-2 with Hugging Face's Trainer over sealed links.

    export RINGFENCE_SECRET_FILE=$PWD/run.secret RINGFENCE_REQUIRE=1
    torchrun --nnodes 1 --node-rank 0 --nproc-per-node 2 --master-addr 127.0.0.1 --master-port 29500 \
        examples/frameworks/train_hf_trainer.py

On CPUs TrainingArguments creates a Gloo group unless a group exists. The model has random weights and the data are
random words: nothing is downloaded.
"""

import tempfile

import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import ringfence

WORDS, LENGTH = 64, 16


class Sequences(Dataset):
    """Sequences that count upwards: the next word is certain after the first."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = (torch.arange(LENGTH) + index) % WORDS
        return {"input_ids": words, "labels": words}


def main() -> None:
    ringfence.init()  # before TrainingArguments()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            num_train_epochs=2,
            per_device_train_batch_size=16,
            learning_rate=3e-3,
            logging_steps=4,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=0,
        )
        torch.manual_seed(0)
        model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=WORDS, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
            )
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=Sequences())
        ringfence.assert_sealed()
        trainer.train()

    if trainer.is_world_process_zero():
        for entry in trainer.state.log_history:
            if "loss" in entry:
                print(f"step {entry['step']}: loss {float(entry['loss']):.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
