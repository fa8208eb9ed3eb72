"""Attention rows out of an SDPA forward pass equal eager attention, on real architectures with images in the prompt."""

import dataclasses
import importlib.util
from pathlib import Path

import pytest
import torch
from PIL import Image

from mmrl.chat import ChatTask
from mmrl.config import validate
from mmrl.errors import AdapterError
from mmrl.language_extras import placeholder_ids
from mmrl.sampling import rollout_seeds
from vision.adapter import build_adapter
from vision.config import VisionRunConfig

_SPEC = importlib.util.spec_from_file_location("other_models", Path(__file__).with_name("test_other_models.py"))
_OTHER = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_OTHER)
NEEDS = frozenset({"attention", "media_columns", "hidden"})


def task(name, text, *sizes):
    parts = [{"type": "image", "image": Image.new("RGB", size, color)} for size, color in zip(sizes, ("red", "blue", "green"))]
    return ChatTask(id=name, messages=({"role": "user", "content": [*parts, {"type": "text", "text": text}]},))


TASKS = [task("one", "Which digit is it?", (56, 56)), task("two", "and which is longer than the other?", (56, 84), (28, 56)),
         task("none", "words")]  # fmt: skip


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """``directories(name)``: a policy directory of that architecture."""
    made = {"qwen2.5-vl": "tiny-qwen2.5-vl"}

    def build(name):
        if name not in made:
            made[name] = str(tmp_path_factory.mktemp(name))
            with torch.random.fork_rng():
                torch.manual_seed(0)
                _OTHER.BUILDERS[name](made[name])
        return made[name]

    return build


def adapter_of(path, **sections):
    tree = {
        "modality": "vision", "name": "test", "rewards": {"accuracy": 1.0}, "trainer": {"num_steps": 1},
        "policy": {"path": path, **sections.pop("policy", {})}, "tasks": {"name": "digits"},
        "rollout": {"max_new_tokens": 6, "min_pixels": 784, "max_pixels": 16_384, **sections.pop("rollout", {})},
    }  # fmt: skip
    return build_adapter(validate(tree | sections, VisionRunConfig, "test"))


def eager_row(policy, prompt, ids):
    """The definition: a plain forward pass of one row with eager attention, its weights averaged over heads."""
    inputs = {key: value for key, value in prompt.items() if key != "attention_mask"}
    inputs["input_ids"] = torch.cat([prompt["input_ids"], torch.tensor([ids])], dim=1)
    if "mm_token_type_ids" in prompt:
        inputs["mm_token_type_ids"] = torch.nn.functional.pad(prompt["mm_token_type_ids"], (0, len(ids)))
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    model = policy.get_base_model() if hasattr(policy, "get_base_model") else policy
    if hasattr(model.base_model, "rope_deltas"):
        model.base_model.rope_deltas = None
    with torch.no_grad():
        weights = model(**inputs, output_attentions=True, use_cache=False).attentions[-1]
    return weights[0].mean(dim=0)[-len(ids) :]


def as_eager(policy):
    model = policy.get_base_model() if hasattr(policy, "get_base_model") else policy
    model.set_attn_implementation("eager")
    return policy


def uneven(adapter, policy):
    """Two rollouts of each task, of different lengths."""
    batch = adapter.rollout(policy, TASKS, group_size=2, seeds=rollout_seeds(0, 0, 0, 6))
    lengths = torch.tensor([6, 2, 1, 5, 4, 6]).clamp(max=batch.loss_mask.shape[1])
    mask = batch.loss_mask & (torch.arange(batch.loss_mask.shape[1]) < lengths[:, None])
    return dataclasses.replace(batch, loss_mask=mask)


@pytest.mark.parametrize(
    ("name", "sections"),
    [
        ("qwen2.5-vl", {}),
        ("qwen2.5-vl", {"rollout": {"share_prefix": False}}),
        ("qwen2.5-vl", {"policy": {"attention": "eager"}}),
        ("qwen2.5-vl", {"policy": {"lora": {"rank": 4}}}),
        ("qwen3-vl", {}),
        ("smolvlm", {}),
    ],
    ids=["qwen2.5-vl", "without prefix sharing", "eager", "lora", "qwen3-vl", "smolvlm"],
)
def test_rows_equal_eager_attention(directories, name, sections):
    adapter = adapter_of(directories(name), **sections)
    policy = adapter.build_policy()
    with torch.no_grad():  # low-rank updates start at 0
        for parameter_name, parameter in policy.named_parameters():
            if "lora_B" in parameter_name:
                parameter.normal_(0, 0.1, generator=torch.Generator().manual_seed(0))
    batch = uneven(adapter, policy)
    forward = adapter.forward(policy, batch, NEEDS)
    plain = adapter.forward(policy, batch)
    torch.testing.assert_close(forward.log_probs, plain.log_probs, atol=1e-5, rtol=0)
    rows, lengths = forward.extras["attention"], batch.inputs.prompt_lengths
    assert rows.dtype == torch.float32 and rows.requires_grad and rows.shape[:2] == batch.loss_mask.shape
    as_eager(policy)
    for row in range(len(batch)):
        ids = batch.inputs.tokens[row][batch.loss_mask[row]].tolist()
        prompt = batch.inputs.prompts[int(batch.inputs.prompt_index[row])]
        expected = eager_row(policy, prompt, ids)
        width = int(lengths[row]) + len(ids)
        torch.testing.assert_close(rows[row, : len(ids), :width].detach(), expected, atol=1e-5, rtol=0)
        assert not rows[row, len(ids) :].any() and not rows[row, :, width:].any()
    torch.testing.assert_close(rows.detach().sum(dim=-1), batch.loss_mask.float(), atol=1e-5, rtol=0)


def test_rows_do_not_depend_on_what_they_are_batched_with(directories):
    adapter = adapter_of(directories("qwen2.5-vl"))
    policy = adapter.build_policy()
    batch = uneven(adapter, policy)
    together = adapter.forward(policy, batch, NEEDS).extras
    for row in range(len(batch)):
        part = batch.select(torch.tensor([row]))
        alone = adapter.forward(policy, part, NEEDS).extras
        tokens, columns = alone["attention"].shape[1:]
        torch.testing.assert_close(alone["attention"][0], together["attention"][row, :tokens, :columns], atol=1e-6, rtol=0)
        assert torch.equal(alone["media_columns"][0], together["media_columns"][row, :columns])


def test_media_columns_are_the_placeholders_of_the_prompt(directories):
    adapter = adapter_of(directories("qwen2.5-vl"))
    policy = adapter.build_policy()
    extras = adapter.forward(policy, uneven(adapter, policy), NEEDS).extras
    # 56 x 56 is four visual tokens of 28 x 28, 56 x 84 six, 28 x 56 two; the third task has no image.
    assert extras["media_columns"].sum(dim=1).tolist() == [4, 4, 8, 8, 0, 0]
    assert placeholder_ids(adapter.frontend.processor) == (
        adapter.frontend.processor.image_token_id, adapter.frontend.processor.video_token_id
    )  # fmt: skip


def test_only_queries_and_keys_of_the_last_layer_and_what_feeds_them_get_a_gradient(directories):
    adapter = adapter_of(directories("qwen2.5-vl"))
    policy = adapter.build_policy()
    batch = uneven(adapter, policy)
    rows = adapter.forward(policy, batch, NEEDS).extras["attention"]
    (rows * torch.linspace(-1, 1, rows.numel()).view_as(rows)).sum().backward()
    last = policy.model.language_model.layers[-1]
    moved = {name: parameter.grad is not None and bool(parameter.grad.any()) for name, parameter in last.named_parameters()}
    assert {name for name, is_moved in moved.items() if is_moved} == {
        "self_attn.q_proj.weight", "self_attn.q_proj.bias", "self_attn.k_proj.weight", "input_layernorm.weight",
        # moves all scores of a row alike, but for rotation
        *({"self_attn.k_proj.bias"} if moved["self_attn.k_proj.bias"] else ()),
    }  # fmt: skip
    assert policy.model.visual.patch_embed.proj.weight.grad.any()


def test_an_unknown_extra_is_refused(directories):
    adapter = adapter_of(directories("qwen2.5-vl"))
    policy = adapter.build_policy()
    batch = uneven(adapter, policy)
    with pytest.raises(AdapterError, match="cannot give \\['saliency'\\]"):
        adapter.forward(policy, batch, frozenset({"saliency"}))
