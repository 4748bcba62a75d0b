"""Train a small GPT-2 with Hugging Face's Trainer, save sealed checkpoints, and go on from the newest one.

    torchrun --nnodes 1 --node-rank 0 --nproc-per-node 2 --master-addr 127.0.0.1 --master-port 29500 \
        examples/frameworks/checkpoint_hf_trainer.py --folder checkpoints --key ck.key --newest newest.json

The callback takes the place of Trainer's own checkpoints, which are in clear and pickled (`save_strategy="no"`). To go on, it
loads model, optimizer and scheduler; Trainer gets its step counter back, and so skips the data that it has seen.
"""

import argparse
import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_model
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainerState, TrainingArguments

import ringfence
from ringfence import checkpoint

WORDS, LENGTH = 64, 16


class SealedCheckpoints(TrainerCallback):
    """Saves every few steps. `newest` is a file that is not on the storage of the checkpoints: it has the anchor."""

    def __init__(self, folder: str, key: str, newest: Path, every: int) -> None:
        self.folder, self.key, self.newest, self.every = folder, key, newest, every

    def on_step_end(self, args: Any, state: TrainerState, control: Any, model: Any, **parts: Any) -> None:
        if state.global_step % self.every:
            return
        path, whole = f"{self.folder}/step-{state.global_step}", self._state(model, **parts)
        whole["trainer"] = json.dumps(dataclasses.asdict(state))
        anchor = checkpoint.save(whole, path, key=self.key, step=state.global_step)
        if state.is_world_process_zero:
            self.newest.write_text(json.dumps({"path": path, "anchor": anchor}))

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, model: Any, **parts: Any) -> None:
        if not state.global_step:
            return
        whole = self._state(model, **parts)
        self._load(whole)
        optimizer = parts["optimizer"].optimizer
        set_state_dict(model, optimizer, model_state_dict=whole["model"], optim_state_dict=whole["optimizer"])
        parts["lr_scheduler"].load_state_dict(whole["scheduler"])
        if state.is_world_process_zero:
            print(f"resumed after step {state.global_step}", flush=True)

    def resume(self, trainer: Trainer) -> str | None:
        """Return a folder for `Trainer.train(resume_from_checkpoint=...)`, or None if there is nothing to go on from.

        It has the step counter, and weights that `on_train_begin` replaces: nothing of the checkpoint is in it in clear.
        """
        if not self.newest.exists():
            return None
        self._load(found := {"trainer": ""})
        self._resumed = tempfile.TemporaryDirectory()
        save_model(trainer.model, str(Path(self._resumed.name, "model.safetensors")))
        Path(self._resumed.name, "trainer_state.json").write_text(found["trainer"])
        return self._resumed.name

    def _load(self, state: dict[str, Any]) -> None:
        newest = json.loads(self.newest.read_text())
        checkpoint.load(state, newest["path"], key=self.key, anchor=newest["anchor"])

    @staticmethod
    def _state(model: Any, **parts: Any) -> dict[str, Any]:
        weights, moments = get_state_dict(model, parts["optimizer"].optimizer)
        return {"model": weights, "optimizer": moments, "scheduler": parts["lr_scheduler"].state_dict()}


class Sequences(Dataset):
    """Sequences that count upwards: the next word is certain after the first."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = (torch.arange(LENGTH) + index) % WORDS
        return {"input_ids": words, "labels": words}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True)
    parser.add_argument("--key", required=True)
    parser.add_argument("--newest", type=Path, required=True)
    parser.add_argument("--stop-at", type=int, default=0, help="as if the run had been interrupted after this step")
    options = parser.parse_args()

    ringfence.init()  # before TrainingArguments()
    callback = SealedCheckpoints(options.folder, options.key, options.newest, every=4)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, use_cpu=True, per_device_train_batch_size=8, learning_rate=3e-3,
            logging_steps=2, logging_nan_inf_filter=False, save_strategy="no", report_to="none", disable_tqdm=True,
            max_steps=8, seed=0,
        )  # fmt: skip
        torch.manual_seed(0)
        sizes = {"vocab_size": WORDS, "n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 2}
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        model = GPT2LMHeadModel(GPT2Config(**sizes, **dropout, bos_token_id=0, eos_token_id=0))
        trainer = Trainer(model=model, args=arguments, train_dataset=Sequences(), callbacks=[callback])
        if options.stop_at:
            trainer.add_callback(StopAt(options.stop_at))
        ringfence.assert_sealed()
        trainer.train(resume_from_checkpoint=callback.resume(trainer))

    if trainer.is_world_process_zero():
        for entry in trainer.state.log_history:
            if "loss" in entry:
                print(f"step {entry['step']}: loss {float(entry['loss']):.9f}", flush=True)
        print(f"weights: {sum(p.double().abs().sum().item() for p in model.parameters()):.9f}", flush=True)
    dist.destroy_process_group()


class StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        control.should_training_stop |= state.global_step >= self.step


if __name__ == "__main__":
    main()
