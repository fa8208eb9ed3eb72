"""mmrl's side of trl_grpo.py, which starts it: prepares the workload, takes first steps, and trains under the meter."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from transformers import AutoModelForImageTextToText
from trl_grpo_workload import (
    ADVANTAGE_EPS,
    TASKS_PER_STEP,
    WARMUP_STEPS,
    Meter,
    Size,
    Variant,
    checksum_reward,
    run_job,
    variant_folder,
    variants,
)

from mmrl.chat import ChatTask
from mmrl.config import validate
from mmrl.trainer import Callbacks, Trainer
from vision.adapter import build_adapter
from vision.config import VisionRunConfig
from vision.tiny import TinySize, build_tiny_qwen25_vl


def prepare(folder: Path, size: Size, num_tasks: int) -> None:
    """Write ``policy``, ``reference`` (the same with noise) and ``tasks.json`` with its images to ``folder``."""
    rng = np.random.default_rng(0)
    syllables = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]
    words = ["".join(rng.choice(syllables, size=rng.integers(2, 5))) for _ in range(size.tiny["vocab_size"])]
    build_tiny_qwen25_vl(folder / "policy", [" ".join(words)], size=TinySize(**size.tiny))
    model = load(folder / "policy")
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight  # also the head; as initialised, all tokens are about equally likely
        embedding.mul_(5.0)
        embedding[model.generation_config.eos_token_id].mul_(size.end_token_scale)
        model.save_pretrained(folder / "policy")
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=noise) * 0.2 * parameter.std(correction=0))
        model.save_pretrained(folder / "reference")
    tasks = []
    for number in range(num_tasks):
        names = [f"{number}_{i}.png" for i in range(size.num_images)]
        for name in names:
            pixels = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).resize((size.image_pixels,) * 2).save(folder / name)
        tasks.append({"question": " ".join(rng.choice(words, size=6 + number % 5)), "images": names})
    (folder / "tasks.json").write_text(json.dumps(tasks))
    print(f"{sum(parameter.numel() for parameter in model.parameters()):,} weights")


class Tasks(Sequence[ChatTask]):
    """Opens images when a task is drawn, as TRL's dataset does."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.rows = folder, json.loads((folder / "tasks.json").read_text())

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> ChatTask:
        row = self.rows[index]
        images = [Image.open(self.folder / name).convert("RGB") for name in row["images"]]
        parts = [*({"type": "image", "image": image} for image in images), {"type": "text", "text": row["question"]}]
        return ChatTask(id=str(index), messages=({"role": "user", "content": parts},))


def build_trainer(folder: Path, size: Size, sections: dict[str, Any], on_step: Callable[..., None] | None = None) -> Trainer:
    """The trainer that ``mmrl train`` would build from a config with these sections, over our tasks and reward."""
    tree = {
        "modality": "vision",
        "name": "run",
        "output_dir": str(folder / f"mmrl-{os.getpid()}"),
        "rewards": {"checksum": 1.0},
        "sampling": {"tasks_per_step": TASKS_PER_STEP, "group_size": size.group_size, "order": "sequential"},
        "policy": {"path": str(folder / "policy")},
        "tasks": {"name": "digits"},  # replaced below
        "evaluation": {"num_tasks": 1, "metric": "checksum", "at_start": False},
        "metrics": {"samples_every": 0},
        **sections,
    }
    config = validate(tree, VisionRunConfig, "benchmark")
    adapter = build_adapter(config)
    adapter.sources = {"train": lambda: Tasks(folder), "eval": lambda: Tasks(folder)}
    adapter.reward_terms = {"checksum": lambda task, completion: checksum_reward(completion.token_ids)}
    callbacks = Callbacks(on_step=on_step) if on_step else Callbacks()
    return Trainer(config, adapter, callbacks=callbacks, cpu=True)


def first_step(folder: Path, size: Size, variant: Variant, output: Path) -> dict[str, Any]:
    """One optimizer step; writes gradients, and the completions that TRL is to use, to ``output``."""
    sections = {
        "algorithm": {
            "name": "grpo",
            "aggregation": variant.aggregation,
            "kl_coef": variant.beta,
            "advantage_eps": ADVANTAGE_EPS,
        },
        "trainer": {"num_steps": 1, "num_threads": 1},
        "optimizer": {"max_grad_norm": None},
        "rollout": {"max_new_tokens": size.max_new_tokens, "ban_media_tokens": False},
    }
    trainer = build_trainer(folder, size, sections)
    adapter, batches = trainer.adapter, []
    reference = load(folder / "reference").eval()
    if variant.beta:
        trainer.reference = adapter.freeze_reference(reference)
    rollout, end_ids = adapter.rollout, adapter.end_ids

    def sample(policy: Any, tasks: Any, **options: Any) -> Any:
        """The adapter's own rollout: by the reference if off-policy, without end tokens if lengths are fixed."""
        sampler = reference if variant.off_policy else policy
        if variant.fixed_length:
            adapter.banned_ids, adapter.end_ids = end_ids, ()
        batch = rollout(sampler, tasks, **options)
        adapter.banned_ids, adapter.end_ids = (), end_ids
        if variant.fixed_length:  # TRL's log-probabilities know of no forbidden tokens
            with torch.no_grad():
                batch = replace(batch, old_log_probs=adapter.forward(sampler, batch).log_probs)
        batches.append(batch)
        return batch

    adapter.rollout = sample
    gradients: dict[str, Any] = {}

    def keep(*_: Any) -> None:
        gradients.update({name: p.grad.clone() for name, p in trainer.policy.named_parameters() if p.grad is not None})

    trainer.updater.optimizer.register_step_pre_hook(keep)
    metrics = trainer.check()
    save_file(gradients, output / "mmrl.safetensors")
    (batch,) = batches
    prompts = [prompt["input_ids"][0].tolist() for prompt in batch.inputs.prompts]
    rows = [
        {"prompt": prompts[index], "completion": list(outcome.token_ids)}
        for index, outcome in zip(batch.inputs.prompt_index.tolist(), batch.outcomes)
    ]
    (output / "rows.json").write_text(json.dumps(rows))
    return {
        "loss": metrics["loss/total"],
        "mean_abs_advantage": metrics["advantage/abs"],
        "mean_length": metrics["rollout/decisions"],
        "clipped": metrics["ratio/clip_low"] + metrics["ratio/clip_high"],
    }


def first_steps(folder: Path, size: Size, _: int) -> dict[str, Any]:
    return {name: first_step(folder, size, variant, variant_folder(folder, name)) for name, variant in variants().items()}


def cost(folder: Path, size: Size, num_steps: int) -> dict[str, Any]:
    """``mmrl train``'s loop; every completion reaches the limit."""
    sections = {
        "algorithm": "grpo",
        "trainer": {"num_steps": WARMUP_STEPS + num_steps, "num_threads": 1},
        "optimizer": {"learning_rate": 1e-5},
        "rollout": {"max_new_tokens": size.max_new_tokens},
    }
    trainer = build_trainer(folder, size, sections, on_step=lambda *_: meter.step_done())
    adapter = trainer.adapter
    adapter.banned_ids, adapter.end_ids = (*adapter.banned_ids, *adapter.end_ids), ()
    meter = Meter(adapter.frontend.processor.image_processor, trainer.policy.base_model.visual)
    trainer.run()
    return meter.result()


def load(directory: Path) -> Any:
    return AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32)


if __name__ == "__main__":
    run_job({"prepare": prepare, "first-steps": first_steps, "cost": cost})
