"""Vision-language backbones described on this machine: what LeRobot's policies otherwise fetch from a hub, made locally.

SmolVLA reads the configuration and the processor of its backbone from a folder, pi0 and pi0.5 a tokenizer. `backbone_folder`
writes such a folder, with a byte-level tokenizer trained on the words of the tasks and no weights. The folder's path ends up in
LeRobot's own files, so it has to stay where it is: it lives in the user's cache, under a name made of its contents.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from dataclasses import astuple, dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    PreTrainedTokenizerFast,
    SmolVLMConfig,
    SmolVLMImageProcessor,
    SmolVLMProcessor,
    SmolVLMVideoProcessor,
)

from robotics.envs.instructions import vocabulary

_SPECIAL = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
_IMAGE_TOKENS = {
    "fake_image_token": "<fake_token_around_image>",
    "image_token": "<image>",
    "global_image_token": "<global-img>",
    "end_of_utterance_token": "<end_of_utterance>",
}


@dataclass(frozen=True, kw_only=True)
class BackboneSize:
    """Sizes of a SmolVLM."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    vision_hidden_size: int
    vision_intermediate_size: int
    vision_layers: int
    vision_heads: int
    image_size: int
    patch_size: int
    scale_factor: int
    """Patches along an edge that are merged into one visual token."""


TINY = BackboneSize(
    vocab_size=1024, hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, num_key_value_heads=2, head_dim=16,
    vision_hidden_size=48, vision_intermediate_size=96, vision_layers=2, vision_heads=4, image_size=64, patch_size=16,
    scale_factor=2,
)  # fmt: skip

SMOLVLM2_500M = BackboneSize(
    vocab_size=49280, hidden_size=960, intermediate_size=2560, num_layers=32, num_heads=15, num_key_value_heads=5, head_dim=64,
    vision_hidden_size=768, vision_intermediate_size=3072, vision_layers=12, vision_heads=12, image_size=512, patch_size=16,
    scale_factor=4,
)  # fmt: skip
"""The backbone of the released SmolVLA, HuggingFaceTB/SmolVLM2-500M-Video-Instruct."""


def backbone_folder(size: BackboneSize) -> Path:
    """A folder with the configuration, tokenizer and processor of a SmolVLM of this size; made on first use."""
    corpus = _corpus()
    digest = hashlib.sha256(repr((1, astuple(size), corpus)).encode()).hexdigest()[:12]
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mmrl"
    folder = root / f"smolvlm-{size.hidden_size}-{digest}"
    if not folder.is_dir():
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root, prefix=f".{folder.name}-") as draft:
            whole = Path(draft) / folder.name
            _write(size, corpus, whole)
            try:
                whole.rename(folder)
            except OSError:  # another process was faster; its folder has the same contents
                if not folder.is_dir():
                    raise
    return folder


def _write(size: BackboneSize, corpus: list[str], folder: Path) -> None:
    tokenizer = _tokenizer(corpus, min(size.vocab_size, TINY.vocab_size))
    SmolVLMProcessor(
        image_processor=SmolVLMImageProcessor(),
        tokenizer=tokenizer,
        video_processor=SmolVLMVideoProcessor(),
        image_seq_len=(size.image_size // size.patch_size // size.scale_factor) ** 2,
        chat_template="",
    ).save_pretrained(folder)
    SmolVLMConfig(
        text_config={
            "vocab_size": size.vocab_size,
            "hidden_size": size.hidden_size,
            "intermediate_size": size.intermediate_size,
            "num_hidden_layers": size.num_layers,
            "num_attention_heads": size.num_heads,
            "num_key_value_heads": size.num_key_value_heads,
            "head_dim": size.head_dim,
            "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={
            "hidden_size": size.vision_hidden_size,
            "intermediate_size": size.vision_intermediate_size,
            "num_hidden_layers": size.vision_layers,
            "num_attention_heads": size.vision_heads,
            "image_size": size.image_size,
            "patch_size": size.patch_size,
        },
        scale_factor=size.scale_factor,
        image_token_id=tokenizer.image_token_id,
        pad_token_id=tokenizer.pad_token_id,
    ).save_pretrained(folder)


def _tokenizer(corpus: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level, so that any text can be encoded; the words of ``corpus`` are few tokens each."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(_IMAGE_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(_SPECIAL.values()),
        show_progress=False,
        min_frequency=1,
    )
    trained.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=trained, extra_special_tokens=_IMAGE_TOKENS, **_SPECIAL)


def _corpus() -> list[str]:
    """Words of instructions, and the numbers and labels of pi0.5's prompt."""
    numbers = " ".join(str(number) for number in range(256))
    return [f" {' '.join(vocabulary())}\n", f"Task: , State: {numbers};\nAction: "]
