"""TRL's side of trl_grpo.py: one run of GRPOTrainer on the work that a JSON file describes. Needs only TRL.

    FOLDER/bin/python benchmarks/trl_side.py WORK.json

WORK.json: `network`, a folder in Hugging Face's layout with weights and tokenizer; `prompts`, one text for each prompt of
each step, in order; what of a step is named in `settings`. Prints one JSON line: seconds at which steps ended, and
the mean reward of each.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Clock(TrainerCallback):
    """When each optimizer step has ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.monotonic())


def main() -> None:
    work = json.loads(Path(sys.argv[1]).read_text())
    settings, threads = work["settings"], int(os.environ["OMP_NUM_THREADS"])
    torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    rewards: list[float] = []

    def judge(completion_ids: list[list[int]], prompts: list[str], **_: Any) -> list[float]:
        """Share of the response's tokens that are the prompt's last character, as the built-in task has it."""
        named = [tokenizer.convert_tokens_to_ids(prompt[-1]) for prompt in prompts]
        found = [ids.count(token) / len(ids) for ids, token in zip(completion_ids, named, strict=True)]
        rewards.append(sum(found) / len(found))
        lengths.update(map(len, completion_ids))
        return found

    tokenizer, lengths, clock = AutoTokenizer.from_pretrained(work["network"]), set[int](), Clock()
    model = AutoModelForCausalLM.from_pretrained(work["network"], dtype=torch.float32)
    trainer = GRPOTrainer(
        model=model, reward_funcs=judge, args=_arguments(work["folder"], settings), processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": work["prompts"]}), callbacks=[clock],
    )  # fmt: skip
    trainer.train()
    counts = {"parameters": sum(p.numel() for p in model.parameters()), "response_tokens": sorted(lengths)}
    print(json.dumps({"ends": clock.ends, "rewards": rewards, "threads": torch.get_num_threads()} | counts))


def _arguments(folder: str, settings: dict[str, Any]) -> GRPOConfig:
    """TRL's own defaults but for what the work says, and what would cost TRL time that the other side does not spend."""
    number, length = settings["prompts_per_step"] * settings["samples_per_prompt"], settings["response_tokens"]
    return GRPOConfig(
        output_dir=folder, use_cpu=True, bf16=False, seed=settings["seed"], max_steps=settings["num_steps"],
        per_device_train_batch_size=number, num_generations=settings["samples_per_prompt"],
        max_completion_length=length, generation_kwargs={"min_new_tokens": length}, temperature=1.0,
        beta=settings["kl_coef"], epsilon=settings["clip"], loss_type="bnpo", learning_rate=settings["lr"],
        lr_scheduler_type="constant", max_grad_norm=settings["grad_clip"], weight_decay=0.0, shuffle_dataset=False,
        gradient_checkpointing=False, report_to="none", save_strategy="no", logging_steps=settings["num_steps"],
        disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip


if __name__ == "__main__":
    main()
