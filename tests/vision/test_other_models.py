"""Other architectures through the same adapter: Qwen3-VL and SmolVLM, built tiny with their own processors."""

import pytest
import torch
from PIL import Image
from transformers import (
    Qwen2Tokenizer,
    Qwen2VLImageProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
    SmolVLMImageProcessor,
    SmolVLMProcessor,
    SmolVLMVideoProcessor,
)
from transformers.models.smolvlm.processing_smolvlm import DEFAULT_CHAT_TEMPLATE

from mmrl.chat import ChatTask
from mmrl.config import validate
from mmrl.sampling import rollout_seeds
from mmrl.testing import check_adapter
from vision.adapter import build_adapter
from vision.config import VisionRunConfig
from vision.digits import tokenizer_corpus
from vision.tiny import CHAT_TEMPLATE, build_qwen25_vl_processor


def build_qwen3_vl(directory):
    tokenizer = build_qwen25_vl_processor(tokenizer_corpus(), vocab_size=512, max_pixels=10_000).tokenizer
    token_id = tokenizer.convert_tokens_to_ids
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": token_id("<|endoftext|>"),
            "rope_parameters": {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True,
                                "rope_theta": 10_000.0},
        },
        vision_config={
            "depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64,
            "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1],
        },
        image_token_id=token_id("<|image_pad|>"), video_token_id=token_id("<|video_pad|>"),
        vision_start_token_id=token_id("<|vision_start|>"), vision_end_token_id=token_id("<|vision_end|>"),
    )  # fmt: skip
    size = {"shortest_edge": 32 * 32, "longest_edge": 128 * 128}
    Qwen3VLForConditionalGeneration(config).save_pretrained(directory)
    Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(patch_size=16, size=size),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(size=size),
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(directory)


def build_smolvlm(directory):
    base = build_qwen25_vl_processor(tokenizer_corpus(), vocab_size=400, max_pixels=10_000).tokenizer
    rows = [f"<row_{i + 1}_col_{j + 1}>" for i in range(4) for j in range(4)]
    special = ["<fake_token_around_image>", "<image>", "<video>", "<global-img>", "<end_of_utterance>", *rows]
    tokenizer = Qwen2Tokenizer(vocab=base.get_vocab(), merges=base._merges, extra_special_tokens=special)
    tokenizer.add_tokens(special, special_tokens=True)
    config = SmolVLMConfig(
        text_config={
            "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32,
            "patch_size": 8,
        },
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"), scale_factor=2, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    SmolVLMForConditionalGeneration(config).save_pretrained(directory)
    SmolVLMProcessor(
        image_processor=SmolVLMImageProcessor(size={"longest_edge": 64}, max_image_size={"longest_edge": 32}),
        tokenizer=tokenizer,
        video_processor=SmolVLMVideoProcessor(),
        image_seq_len=4,
        chat_template=DEFAULT_CHAT_TEMPLATE,
    ).save_pretrained(directory)


BUILDERS = {"qwen3-vl": build_qwen3_vl, "smolvlm": build_smolvlm}


@pytest.fixture(scope="module", params=list(BUILDERS))
def adapter(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        BUILDERS[request.param](directory)
    tree = {
        "modality": "vision", "name": "test", "rewards": {"accuracy": 1.0}, "trainer": {"num_steps": 1},
        "policy": {"path": str(directory)}, "tasks": {"name": "digits"},
        "rollout": {"max_new_tokens": 5, "min_pixels": 1024, "max_pixels": 16_384},
    }  # fmt: skip
    return build_adapter(validate(tree, VisionRunConfig, "test"))


def test_the_contract_holds(adapter):
    check_adapter(adapter)


def test_mixed_rows_align_and_do_not_depend_on_each_other(adapter):
    def task(name, *sizes):
        parts = [{"type": "image", "image": Image.new("RGB", size, "red")} for size in sizes]
        content = [*parts, {"type": "text", "text": "Which digit?"}]
        return ChatTask(id=name, messages=({"role": "user", "content": content},))

    tasks = [task("one", (56, 56)), task("three", (64, 32), (32, 64), (56, 56)), task("two", (96, 96), (32, 32))]
    policy = adapter.build_policy()
    seeds = rollout_seeds(0, 0, 0, 6)
    batch = adapter.rollout(policy, tasks, group_size=2, seeds=seeds)
    torch.testing.assert_close(adapter.forward(policy, batch).log_probs.detach(), batch.old_log_probs, atol=1e-5, rtol=0)
    for row, single in enumerate(tasks):
        alone = adapter.rollout(policy, [single], group_size=2, seeds=seeds[2 * row : 2 * row + 2])
        kept = batch.select(torch.tensor([2 * row, 2 * row + 1]))
        torch.testing.assert_close(alone.old_log_probs, kept.old_log_probs, atol=1e-5, rtol=0)


def test_the_image_changes_what_is_likely(adapter):
    policy = adapter.build_policy()
    likelihoods = []
    for color in ("black", "white"):
        content = [{"type": "image", "image": Image.new("RGB", (56, 56), color)}, {"type": "text", "text": "Which digit?"}]
        task = ChatTask(id=color, messages=({"role": "user", "content": content},), demonstration="a b c")
        batch = adapter.demonstrate(policy, [task], seeds=torch.zeros(1, dtype=torch.long))
        likelihoods.append(adapter.forward(policy, batch).log_probs.detach())
    assert not torch.allclose(likelihoods[0], likelihoods[1])
