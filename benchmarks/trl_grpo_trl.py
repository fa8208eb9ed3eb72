"""TRL's side of trl_grpo.py, which starts it in TRL's own environment: takes first steps, and trains under the meter."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, Image, List
from safetensors.torch import save_file
from transformers import AutoModelForImageTextToText, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl_grpo_workload import (
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


def build_trainer(folder: Path, size: Size, trainer_class: Any, callback: TrainerCallback, **options: Any) -> GRPOTrainer:
    """TRL's trainer over the workload, the fastest way: one forward and backward pass per step, nothing recomputed."""
    tasks = json.loads((folder / "tasks.json").read_text())
    columns = {
        "prompt": [[{"role": "user", "content": task["question"]}] for task in tasks],
        "images": [[str(folder / name) for name in task["images"]] for task in tasks],
    }
    config = GRPOConfig(
        output_dir=str(folder / f"trl-{os.getpid()}"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=TASKS_PER_STEP * size.group_size,
        num_generations=size.group_size,
        max_completion_length=size.max_new_tokens,
        lr_scheduler_type="constant",
        shuffle_dataset=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **options,
    )
    return trainer_class(
        model=load(folder / "policy"),
        reward_funcs=lambda completion_ids, **_: [checksum_reward(row) for row in completion_ids],
        args=config,
        train_dataset=Dataset.from_dict(columns).cast_column("images", List(Image())),
        callbacks=[callback],
    )


def first_step(folder: Path, size: Size, variant: Variant, output: Path) -> dict[str, Any]:
    """One optimizer step on the completions in ``output``; writes gradients beside them."""
    rows = json.loads((output / "rows.json").read_text())
    policy, reference = (load(folder / name).state_dict() for name in ("policy", "reference"))
    losses: list[float] = []

    class Observed(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            if variant.off_policy:  # recorded log-probabilities are then those of the reference
                self.model.load_state_dict(reference)
            result = super()._generate_and_score_completions(inputs)
            self.model.load_state_dict(policy)
            return result

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            losses.append(float(loss.detach()))
            return loss

    class Keep(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            save_file(gradients, output / "trl.safetensors")

    def generate(input_ids: Any, attention_mask: Any, **_: Any) -> Any:
        prompts = [ids[mask.bool()].tolist() for ids, mask in zip(input_ids, attention_mask)]
        if prompts != [row["prompt"] for row in rows]:
            raise SystemExit("TRL's prompts differ from mmrl's, token by token; nothing can be compared.")
        completions = [torch.tensor(row["completion"]) for row in rows]
        pad_id = trainer.generation_config.pad_token_id
        padded = torch.nn.utils.rnn.pad_sequence(completions, batch_first=True, padding_value=pad_id)
        return torch.cat([input_ids, padded], dim=1)

    trainer = build_trainer(
        folder, size, Observed, Keep(), loss_type=variant.loss_type, beta=variant.beta, max_steps=1, max_grad_norm=0.0,
        num_iterations=2 if variant.off_policy else 1,  # with 1 TRL takes the ratio to be 1
        use_bias_correction_kl=False,  # on by default: the KL term times the ratio, which has another gradient
    )  # fmt: skip
    trainer.model.generate = generate
    if variant.beta:
        trainer.ref_model.load_state_dict(reference)
    trainer.train()
    return {"loss": losses[0]}


def first_steps(folder: Path, size: Size, _: int) -> dict[str, Any]:
    return {name: first_step(folder, size, variant, variant_folder(folder, name)) for name, variant in variants().items()}


def cost(folder: Path, size: Size, num_steps: int) -> dict[str, Any]:
    """TRL's training loop; every completion reaches the limit."""

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            meter.step_done()

    trainer = build_trainer(
        folder, size, GRPOTrainer, Clock(), loss_type="grpo", beta=0.0, max_steps=WARMUP_STEPS + num_steps, learning_rate=1e-5
    )
    generation = trainer.generation_config
    generation.suppress_tokens = sorted({*generation.suppress_tokens, *trainer.eos_token_ids})
    meter = Meter(trainer.processing_class.image_processor, trainer.model.base_model.visual)
    trainer.train()
    return meter.result()


def load(directory: Path) -> Any:
    return AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32)


if __name__ == "__main__":
    run_job({"first-steps": first_steps, "cost": cost})
