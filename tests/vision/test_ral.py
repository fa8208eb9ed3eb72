"""Reinforced attention learning on a tiny Qwen2.5-VL: terms, teacher, placed digits, pictures, configs."""

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from PIL import Image
from transformers import Qwen2_5_VLForConditionalGeneration

from mmrl.attention_losses import generalized_jensen_shannon
from mmrl.chat import Completion, media_parts
from mmrl.cli import load_run, main
from mmrl.collection import Collected
from mmrl.config import validate
from mmrl.errors import ConfigError
from mmrl.rewards import accuracy
from mmrl.run_dir import RunDirectory
from mmrl.sampling import rollout_seeds
from mmrl.trainer import Trainer
from mmrl.update import Updater
from vision.adapter import build_adapter
from vision.attention_maps import Look, image_grids, looks, overlay, region_masses, region_shares
from vision.config import PlacedKind, VisionRunConfig
from vision.placed_digits import CANVAS_SIZE, COLORS, DEMONSTRATED, NUM_DIGITS, PlacedDigitTasks, cell_box, colored
from vision.ral import answer_format
from vision.tiny import TinySize, build_tiny_qwen25_vl, qwen25_vl_config

CONFIGS = Path(__file__).parents[2] / "configs" / "vision"


def run_config(**sections):
    tree = {
        "modality": "vision", "name": "test", "rewards": {"accuracy": 0.9, "format": 0.1},
        "policy": {"path": "digit-reader"}, "tasks": {"name": "placed_digits"}, "rollout": {"max_new_tokens": 9},
        "algorithm": {"name": "grpo", "aggregation": "sequence_mean"}, "optimizer": {"learning_rate": 1e-3},
        "sampling": {"tasks_per_step": 2, "group_size": 3}, "trainer": {"num_steps": 1, "epochs_per_batch": 2},
        "evaluation": {"num_tasks": 2},
    }  # fmt: skip
    return validate(tree | sections, VisionRunConfig, "test")


def gradients_of(config, advantages):
    """Gradients of each optimizer step of one batch, and what was logged."""
    adapter = build_adapter(config)
    policy = adapter.build_policy()
    source = adapter.task_source("train")
    batch = adapter.rollout(policy, [source[0], source[1]], group_size=3, seeds=rollout_seeds(0, 0, 0, 6))
    batch = replace(batch, rewards=torch.zeros(6))
    updater, gradients = Updater(config, adapter, policy, Accelerator(cpu=True)), []
    updater.optimizer.register_step_pre_hook(
        lambda *_: gradients.append(torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None]))
    )
    totals = updater.update(Collected(batch=batch, advantages=advantages, reference_log_probs=None, totals={}))
    return gradients, {name: value / count for name, (value, count) in totals.items() if count}


ADVANTAGES = torch.tensor([1.2, -0.8, 0.3, -1.0, 0.5, 0.4])


def test_the_term_has_no_gradient_at_the_first_inner_step_and_some_at_the_second():
    plain, _ = gradients_of(run_config(), ADVANTAGES)
    ral, logged = gradients_of(run_config(auxiliary={"ral": {"weight": 100.0}}), ADVANTAGES)
    torch.testing.assert_close(ral[0], plain[0], atol=2e-6, rtol=1e-4)
    assert (ral[1] - plain[1]).abs().max() > 1e-4
    assert logged["ral/jsd"] > 0
    assert 0 < logged["attention/media"] < 1 and 0 < logged["attention/first"] < 1 and logged["attention/entropy"] > 0


@pytest.mark.parametrize("terms", [{"ral": {"weight": 20.0}}, {"attention_distillation": {}, "token_distillation": {}}])
def test_micro_batches_do_not_change_the_gradient_of_a_real_policy(terms):
    section = dict(terms, teacher={"path": "digit-reader"}) if "ral" not in terms else terms
    results = []
    for tokens in (1, 100_000):
        config = run_config(auxiliary=section, trainer={"num_steps": 1, "epochs_per_batch": 2, "micro_batch_tokens": tokens})
        results.append(gradients_of(config, ADVANTAGES)[0])
    for left, right in zip(*results):
        torch.testing.assert_close(left, right, atol=2e-5, rtol=1e-3)


def test_a_teacher_of_another_size_is_followed_in_attention_and_tokens(tmp_path):
    adapter = build_adapter(run_config())
    # Other embeddings, since those of equal tokenizers are padded to different sizes in released models too.
    larger = TinySize(hidden_size=160, num_layers=4, num_heads=5, num_key_value_heads=5, vocab_size=520)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = Qwen2_5_VLForConditionalGeneration(qwen25_vl_config(adapter.frontend.processor.tokenizer, larger))
    model.save_pretrained(tmp_path)
    adapter.frontend.processor.save_pretrained(tmp_path)
    section = {"attention_distillation": {"weight": 0.5, "aggregation": "sequence_sum"}, "token_distillation": {},
               "teacher": {"path": str(tmp_path)}}  # fmt: skip
    config = run_config(auxiliary=section)
    gradients, logged = gradients_of(config, torch.zeros(6))
    assert gradients[0].abs().max() > 0
    # The definition, from both models' logits in one piece.
    teacher, policy = adapter.build_teacher(config.auxiliary.teacher), adapter.build_policy()
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    source = adapter.task_source("train")
    batch = adapter.rollout(policy, [source[0], source[1]], group_size=3, seeds=rollout_seeds(0, 0, 0, 6))
    hidden = [adapter.forward(module, batch, frozenset({"hidden"})).extras["hidden"] for module in (policy, teacher)]
    logits = [adapter.token_logits(module, part[batch.loss_mask]) for module, part in zip((policy, teacher), hidden)]
    assert [part.shape[1] for part in logits] == [512, 520]
    expected = generalized_jensen_shannon(logits[0], logits[1][:, :512], beta=0.5).mean().item()
    first = run_config(auxiliary=section, optimizer={"learning_rate": 1e-30})
    _, logged = gradients_of(first, torch.zeros(6))
    assert logged["token_distillation/divergence"] == pytest.approx(expected, rel=1e-4)
    assert logged["attention_distillation/jsd"] > 0


def test_a_teacher_with_another_tokenizer_or_other_pixels_is_refused(tmp_path):
    config = run_config(auxiliary={"token_distillation": {}, "teacher": {"path": "x"}})
    adapter = build_adapter(config)
    build_tiny_qwen25_vl(tmp_path / "words", ["other words make other tokens"] * 5)
    with pytest.raises(ConfigError, match=r"has another tokenizer than the policy: .* tokens differ"):
        adapter.build_teacher(config.auxiliary.teacher.model_copy(update={"path": str(tmp_path / "words")}))
    adapter.frontend.processor.save_pretrained(tmp_path / "pixels")
    settings = json.loads((tmp_path / "pixels" / "processor_config.json").read_text())
    settings["image_processor"]["image_mean"] = [0.5, 0.5, 0.5]
    (tmp_path / "pixels" / "processor_config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match="its image_processor has image_mean"):
        adapter.build_teacher(config.auxiliary.teacher.model_copy(update={"path": str(tmp_path / "pixels")}))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<answer>7</answer>", 1.0), (" <answer> 7 </answer>\n", 1.0), ("<answer></answer>", 0.0), ("<answer> </answer>", 0.0),
        ("<think>7</think><answer>7</answer>", 0.0), ("7", 0.0), ("<answer>7</answer><answer>7</answer>", 0.0),
    ],
)  # fmt: skip
def test_the_format_without_thinking_is_one_answer_that_is_not_empty(text, expected):
    assert answer_format(None, Completion(text=text, token_ids=(), stop_reason="stop")) == expected


# Placed digits


def test_kinds_of_the_config_are_those_that_exist():
    assert set(PlacedKind.__args__) == set(NUM_DIGITS)


@pytest.mark.parametrize("split", ["train", "eval"])
@pytest.mark.parametrize("kind", NUM_DIGITS)
def test_the_region_holds_the_digit_of_the_asked_color_and_nothing_of_another(split, kind):
    source = PlacedDigitTasks([kind], split=split, num_tasks=12)
    for index in range(12):
        task = source[index]
        ((_, image),) = media_parts(task)
        question = task.messages[0]["content"][-1]["text"]
        name = question.removeprefix("Which digit is ").removesuffix("?")
        left, top, right, bottom = task.columns["region"]
        assert image.size == (CANVAS_SIZE, CANVAS_SIZE) and (right - left, bottom - top) == (56, 56)
        pixels = np.asarray(image, dtype=float)
        ink = (255 - pixels[top:bottom, left:right]).sum(axis=(0, 1))
        wanted = 255.0 - np.array(COLORS[name])
        assert ink @ wanted / np.linalg.norm(ink) / np.linalg.norm(wanted) > 0.99  # the color of all ink in the region
        cells = [pixels[box[1] : box[3], box[0] : box[2]] for box in map(cell_box, range(9))]
        assert sum(cell.min() < 200 for cell in cells) == NUM_DIGITS[kind] == len(task.columns["digits"])
        assert task.answer == str(task.columns["digits"][0])
        assert bool(task.demonstration) == (kind in DEMONSTRATED)
        if task.demonstration:
            assert accuracy(task, Completion(text=task.demonstration, token_ids=(), stop_reason="stop")) == 1.0


def test_equal_index_gives_the_equal_task_and_another_seed_another_one():
    one, same, other = (PlacedDigitTasks(["crowd"], split="train", num_tasks=3, seed=seed)[1] for seed in (0, 0, 1))
    pixels = [np.asarray(next(media_parts(task))[1]) for task in (one, same, other)]
    assert np.array_equal(pixels[0], pixels[1]) and not np.array_equal(pixels[0], pixels[2])
    with pytest.raises(IndexError, match="has 3 tasks"):
        PlacedDigitTasks(["crowd"], split="train", num_tasks=3)[3]


def test_black_ink_stays_and_white_ground_too():
    digit = Image.fromarray(np.array([[0, 255], [255, 128]], dtype=np.uint8))
    assert np.asarray(colored(digit, (0, 0, 0))).tolist() == [[[0] * 3, [255] * 3], [[255] * 3, [128] * 3]]
    assert np.asarray(colored(digit, (255, 0, 55))).tolist()[0] == [[255, 0, 55], [255] * 3]


# Where it looks


def test_the_region_of_a_grid_is_the_tokens_whose_centers_it_holds():
    shares = torch.arange(24.0).view(2, 12)  # two completion tokens over a grid of 3 x 4
    look = Look(shares=shares, grids=((3, 4),))
    # 40 x 30 pixels, tokens of 10 x 10: the box holds the centers of row 1 (15), columns 1 to 3 (15, 25, 35)
    assert region_shares(look, (14, 14, 36, 22), (40, 30)).tolist() == [5 + 6 + 7, 17 + 18 + 19]
    assert region_shares(look, (0, 0, 40, 30), (40, 30)).tolist() == [66, 210]
    assert look.maps(0)[0].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_looks_are_the_attention_on_the_images_own_tokens():
    adapter = build_adapter(run_config())
    policy = adapter.build_policy()
    source = adapter.task_source("eval")
    batch = adapter.rollout(policy, [source[0], source[1]], group_size=1, seeds=rollout_seeds(0, 0, 0, 2))
    forward = adapter.forward(policy, batch, frozenset({"attention", "media_columns"}))
    for row, look in enumerate(looks(adapter, policy, batch)):
        length, count = int(batch.inputs.prompt_lengths[row]), int(batch.num_decisions[row])
        assert look.grids == ((6, 6),) and look.shares.shape == (count, 36)
        places = (batch.inputs.prompts[row]["input_ids"][0] == adapter.frontend.processor.image_token_id).nonzero()[:, 0]
        raw = forward.extras["attention"][row, :count].detach()
        kept = 1 - raw[torch.arange(count), length + torch.arange(count)]
        torch.testing.assert_close(look.shares, raw[:, places] / kept[:, None], atol=1e-6, rtol=1e-5)
    masses = region_masses(adapter, policy, [source[0], source[1]], batch_size=1)
    assert [mass.task_id for mass in masses] == [source[0].id, source[1].id]
    assert all(0 < mass.region < mass.image < 1 for mass in masses)
    assert image_grids(batch.inputs.prompts[0], None) == ()


def test_an_overlay_is_strongest_where_the_attention_is():
    shares = np.zeros((6, 6))
    shares[1, 4] = 0.3
    picture = np.asarray(overlay(Image.new("RGB", (168, 168), "white"), shares))
    assert picture.shape == (224, 224, 3)
    changed = np.argwhere((picture != 255).any(axis=2))
    scale = 224 / 6
    assert changed.min(axis=0) == pytest.approx([scale, 4 * scale], abs=1)
    assert changed.max(axis=0) == pytest.approx([2 * scale, 5 * scale], abs=1)


def test_a_run_keeps_pictures_before_and_after_and_the_report_shows_them(tmp_path):
    config = run_config(
        output_dir=str(tmp_path), auxiliary={"ral": {}}, evaluation={"num_tasks": 2, "num_illustrated": 2},
        metrics={"samples_every": 1, "samples_per_step": 2},
    )  # fmt: skip
    Trainer(config, build_adapter(config), cpu=True).run()
    before, after = (
        [json.loads(line) for line in (config.run_dir / "samples" / f"step_{step:06d}.jsonl").read_text().splitlines()]
        for step in (0, 1)
    )
    assert [row["domain"] for row in before] == ["held out, greedy"] * 2
    assert [row["domain"] for row in after] == ["crowd"] * 2 + ["held out, greedy"] * 2
    assert [row["task_id"] for row in before] == [row["task_id"] for row in after[2:]]
    assert len({row["group"] for row in after}) == 3
    for row in before:
        shown = [item for item in row["media"] if "on images" in item["caption"]]
        assert 1 <= len(shown) <= 3 and len(row["media"]) == len(shown) + 1
        for item in shown:
            assert Image.open(io.BytesIO((config.run_dir / item["path"]).read_bytes())).size == (224, 224)
    main(["report", str(config.run_dir)])
    page = (config.run_dir / "report.html").read_text(encoding="utf-8")
    assert page.count("on images") >= 4 and "held_out_1_1.png" in page
    RunDirectory(config.run_dir).forget_after(0)
    assert not (config.run_dir / "samples" / "step_000001.jsonl").exists()


# Configs


def test_the_published_settings_are_in_the_config_of_the_real_checkpoint():
    config = load_run(CONFIGS / "ral_qwen25vl_7b.yaml")
    assert (config.algorithm.kl_coef, config.optimizer.learning_rate, config.sampling.group_size) == (0.04, 1e-5, 8)
    assert {name: term.weight for name, term in config.rewards.items()} == {"accuracy": 0.9, "format": 0.1}
    assert config.policy.freeze_tower and config.rollout.temperature == 0.9 and config.auxiliary.ral.weight == 1.0
    assert config.algorithm.advantage == "group_std" and config.algorithm.advantage_ddof == 0
    zero = load_run(CONFIGS / "ral_zero_qwen25vl_7b.yaml")
    assert zero.rewards["format"].weight == 0 and zero.rewards["answer_format"].weight == 0.1
    assert "think" not in zero.tasks.train.prompt_template
    distill = load_run(CONFIGS / "ral_distill_qwen25vl_7b.yaml").auxiliary
    assert set(distill.terms) == {"attention_distillation", "token_distillation"}
    assert distill.attention_distillation.aggregation == "sequence_sum"


@pytest.mark.parametrize("name", ["ral_qwen25vl_7b", "ral_zero_qwen25vl_7b", "ral_distill_qwen25vl_7b"])
def test_real_checkpoint_configs_pass_the_check_without_weights(name, capsys):
    assert main(["check", "--no-weights", str(CONFIGS / f"{name}.yaml")]) == 0
    assert "Qwen2_5_VLForConditionalGeneration, 28 layers" in capsys.readouterr().out


def test_the_miniature_and_its_warm_up_are_valid():
    ral = load_run(CONFIGS / "ral_digits.yaml")
    assert ral.auxiliary.ral is not None and load_run(CONFIGS / "ral_digits.yaml", ["auxiliary.ral=null"]).auxiliary.terms == {}
    with pytest.raises(ConfigError, match="exactly zero gradient"):
        load_run(CONFIGS / "ral_digits.yaml", ["trainer.minibatches=1", "trainer.epochs_per_batch=1"])
    warm_up = load_run(CONFIGS / "ral_digits_warmup.yaml")
    assert set(warm_up.tasks.kinds) == DEMONSTRATED and warm_up.algorithm.source == "demonstrations"
