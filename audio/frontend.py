"""From conversations with sounds (and pictures, where the model sees) to the tensors of an audio-language model.

Each medium is prepared by itself, so that nothing about a row depends on its neighbours: a waveform is padded with zeros to a
whole number of hops, its mel frames are those of a waveform followed by silence, and placeholders are counted with the model's
own formula and compared with the token ids before anything is trained.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig, ProcessorMixin

from audio.config import AudioRolloutConfig
from audio.controls import blank, facts
from audio.families import Family, Loader
from audio.media import AudioClip, ClipLimits, open_clip
from audio.pictures import Clip, open_image, open_video
from mmrl.chat import ChatTask, MediaFacts, media_parts
from mmrl.data_files import RowError
from mmrl.generation import EncodedPrompt
from mmrl.literals import LiteralText
from mmrl.types import Media

NUM_SHOWN_FRAMES = 4
"""Frames of a video that a report shows."""
_RESERVED = ("audio_token", "audio_bos_token", "audio_eos_token", "image_token", "video_token", "vision_bos_token",
             "vision_eos_token")  # fmt: skip


@dataclass(kw_only=True)
class AudioFrontend:
    """Implements `mmrl.language.Frontend` for audio-text-to-text models."""

    processor: Any
    config: AudioRolloutConfig
    family: Family
    model_config: PreTrainedConfig
    tower_names = ("audio_tower", "multi_modal_projector", "visual")

    @property
    def model_class(self) -> Loader:
        return Loader(family=self.family)

    @property
    def rate(self) -> int:
        """Samples per second that the feature extractor expects."""
        return self.processor.feature_extractor.sampling_rate

    @property
    def limits(self) -> ClipLimits:
        """Which clips this model takes: the config's, and the length of the one window that some models have."""
        longest = self.config.max_seconds
        if self.family.features == "window" or "Qwen2_5" in self.family.model_class:
            longest = min(longest, self.processor.feature_extractor.n_samples / self.rate)
        return clip_limits(self.config, max_seconds=longest)

    def encode(self, tasks: Sequence[ChatTask]) -> list[EncodedPrompt]:
        def encode(processor: Any, some: Sequence[ChatTask]) -> list[EncodedPrompt]:
            frontend = replace(self, processor=processor)
            return [frontend._encode(task) for task in some]

        return self._literal_text.encode(tasks, encode)

    def media(self, task: ChatTask) -> tuple[Media, ...]:
        shown: list[Media] = []
        for kind, ref in media_parts(task):
            item = self.open(task, kind, ref)
            if isinstance(item, AudioClip):
                shown.append(_wav(item, self._caption(item, ref)))
            elif isinstance(item, Clip):
                times = np.linspace(0, len(item.frames) - 1, NUM_SHOWN_FRAMES).astype(int).tolist()
                shown += [_png(item.frames[t], f"{t / item.fps:.1f} s") for t in dict.fromkeys(times)]
                shown += [_wav(item.sound, "sound of the video")] if item.sound is not None else []
            else:
                shown.append(_png(np.asarray(item)))
        return tuple(shown)

    def blank(self, task: ChatTask, kind: str, ref: Any) -> Any:
        """A reference to a medium like this one, without content."""
        return blank(self.open(task, kind, ref))

    def facts(self, task: ChatTask) -> tuple[MediaFacts, ...]:
        """What is known of the task's media as the model gets them."""
        return tuple(facts(self.open(task, kind, ref)) for kind, ref in media_parts(task))

    def open(self, task: ChatTask, kind: str, ref: Any) -> Any:
        """A medium as the model will get it (`AudioClip`, PIL image, `Clip`); errors name the task."""
        where = task.source or task.id
        if kind not in self.family.modalities:
            takes = " and ".join(self.family.modalities)
            name = type(self.processor).__name__.removesuffix("Processor")
            raise RowError(kind, "modality not supported", f"holds {kind}; {name} takes {takes}.", place=where)
        try:
            return open_media(kind, ref, config=self.config, rate=self.rate, limits=self.limits)
        except RowError as error:
            raise error.at(where) from error

    def advise(self, task: ChatTask, prompt: EncodedPrompt, excess: int) -> str:
        """The longest clips with which the prompt would be ``excess`` tokens shorter."""
        media = [self.open(task, kind, ref) for kind, ref in media_parts(task)]
        if not media:
            return ""
        if not all(isinstance(item, AudioClip) for item in media):
            return "shrink its media (max_seconds, max_pixels, max_frames), "
        lengths = [len(clip.samples) for clip in media]

        def count(longest: int) -> int:
            return sum(self.family.count_tokens(self._num_frames(min(longest, samples))) for samples in lengths)

        tenth, room = self.rate // 10, count(max(lengths)) - excess
        for tenths in range(max(lengths) // tenth, 0, -1):
            if count(tenths * tenth) <= room:
                return f"rollout.max_seconds: {tenths / 10:g} would fit; set it with too_long: cut, "
        return f"its clips would have to fit in {max(room, 0)} tokens: shorten the text, "

    def _num_frames(self, samples: int) -> int:
        """Mel frames of a waveform that count, as `_features` gives them."""
        extractor = self.processor.feature_extractor
        if self.family.features == "windows":
            return -(-samples // extractor.n_samples) * extractor.nb_max_frames
        return -(-samples // extractor.hop_length)

    @cached_property
    def _literal_text(self) -> LiteralText:
        return LiteralText(self.processor, {token for name in _RESERVED if (token := getattr(self.processor, name, None))})

    def _encode(self, task: ChatTask) -> EncodedPrompt:
        media = [self.open(task, kind, ref) for kind, ref in media_parts(task)]
        sounds = [item.sound if isinstance(item, Clip) else item for item in media]
        sounds = [sound for sound in sounds if isinstance(sound, AudioClip)]
        features = [self._features(sound.samples) for sound in sounds]
        counts = [self.family.count_tokens(frames) for _, frames in features]
        for sound, count in zip(sounds, counts):
            if count == 0:
                detail = f"a clip of {sound.seconds:.3f} s gives the model no token; drop the row."
                raise RowError("audio", "clip without tokens", detail, place=task.source or task.id)
        tensors = self._pictures([item for item in media if not isinstance(item, AudioClip)]) if self.family.sees else {}
        ids = self._token_ids(task, counts, tensors)
        prompt: dict[str, Tensor] = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **tensors}
        if features:
            longest = max(piece.shape[-1] for piece, _ in features)
            padded = [torch.nn.functional.pad(piece, (0, longest - piece.shape[-1])) for piece, _ in features]
            prompt["input_features"] = torch.cat(padded)
            if self.family.features != "windows":
                valid = torch.tensor([frames for _, frames in features])
                prompt["feature_attention_mask"] = (torch.arange(longest) < valid[:, None]).long()
        if self.config.use_audio_in_video and "video_grid_thw" in prompt:
            prompt["use_audio_in_video"] = torch.tensor(True)
        return prompt

    def _features(self, samples: np.ndarray) -> tuple[Tensor, int]:
        """Mel frames ``[windows, mels, frames]`` float32 of a waveform, and how many of its frames are not padding."""
        extractor = self.processor.feature_extractor
        hop = extractor.hop_length
        samples = np.pad(samples, (0, -len(samples) % hop))
        frames = len(samples) // hop
        if self.family.features == "exact":
            # Frames at the end look past it by half an analysis window: silence there, as in a padded batch.
            padded = np.pad(samples, (0, -(-extractor.n_fft // hop) * hop))
            mel = self._extract(padded, truncation=False, padding="do_not_pad")[:, :, :frames]
            return mel, frames
        windows = 1 if self.family.features == "window" else -(-len(samples) // extractor.n_samples)
        samples = np.pad(samples, (0, windows * extractor.n_samples - len(samples)))
        mel = self._extract(samples, truncation=False, padding="do_not_pad")
        if self.family.features == "window":
            return mel, frames
        mel = mel[0].reshape(mel.shape[1], windows, extractor.nb_max_frames).transpose(0, 1)
        return mel, windows * extractor.nb_max_frames

    def _extract(self, samples: np.ndarray, **options: Any) -> Tensor:
        found = self.processor.feature_extractor(samples, sampling_rate=self.rate, return_tensors="pt", **options)
        return found["input_features"]

    def _pictures(self, items: Sequence[Any]) -> dict[str, Tensor]:
        """Pixels and grids of a row's images and videos. Models get images and videos apart, each in order."""
        images = [item for item in items if not isinstance(item, Clip)]
        videos = [item for item in items if isinstance(item, Clip)]
        tensors: dict[str, Tensor] = {}
        if images:
            processor = self.processor.image_processor
            found = processor(images=images, size=self._size(processor), return_tensors="pt")
            tensors |= {key: found[key] for key in ("pixel_values", "image_grid_thw")}
        if videos:
            processor = self.processor.video_processor
            frames = [torch.from_numpy(video.frames).permute(0, 3, 1, 2) for video in videos]
            found = processor(videos=frames, size=self._size(processor), do_sample_frames=False, return_tensors="pt")
            tensors |= {key: found[key] for key in ("pixel_values_videos", "video_grid_thw")}
            seconds = [processor.temporal_patch_size / video.fps for video in videos]
            tensors["video_second_per_grid"] = torch.tensor(seconds)
        return tensors

    def _size(self, processor: Any) -> dict[str, int]:
        shortest = processor.size["shortest_edge"]
        return {"shortest_edge": min(shortest, self.config.max_pixels), "longest_edge": self.config.max_pixels}

    def _token_ids(self, task: ChatTask, counts: Sequence[int], tensors: Mapping[str, Tensor]) -> Tensor:
        """Token ids ``[1, S]`` with as many placeholders of each kind as the encoders will give states."""
        processor = self.processor
        text = self._text(task)
        if self.family.sees:
            seconds = tensors.get("video_second_per_grid", torch.zeros(0)).tolist()
            [text] = processor.replace_multimodal_special_tokens(
                [text],
                iter(counts),
                iter(_rows(tensors.get("image_grid_thw"))),
                iter(_rows(tensors.get("video_grid_thw"))),
                video_second_per_grid=iter(seconds),
                use_audio_in_video=self.config.use_audio_in_video,
                position_id_per_seconds=self.model_config.position_id_per_seconds,
                seconds_per_chunk=getattr(self.model_config, "seconds_per_chunk", 2),
            )
        else:
            first, *rest = text.split(processor.audio_token)
            text = first + "".join(processor.audio_token * count + piece for count, piece in zip(counts, rest))
        ids = torch.tensor([processor.tokenizer(text, add_special_tokens=False)["input_ids"]])
        self._check_counts(task, ids, counts, tensors)
        return ids

    def _check_counts(self, task: ChatTask, ids: Tensor, counts: Sequence[int], tensors: Mapping[str, Tensor]) -> None:
        expected = {"audio": sum(counts)}
        for kind in ("image", "video") if self.family.sees else ():
            merge = getattr(self.processor, f"{kind}_processor").merge_size ** 2
            grid = tensors.get(f"{kind}_grid_thw")
            expected[kind] = 0 if grid is None else int(grid.prod(dim=1).sum()) // merge
        for kind, count in expected.items():
            token = getattr(self.processor, f"{kind}_token")
            found = int((ids == self.processor.tokenizer.convert_tokens_to_ids(token)).sum())
            if found != count:
                detail = (
                    f"the prompt has {found} {token} tokens, its media give {count}; does the chat template of the model write "
                    "one placeholder per medium?"
                )
                raise RowError("prompt", "placeholders and media differ", detail, place=task.source or task.id)

    def _text(self, task: ChatTask) -> str:
        options = {"tokenize": False, "add_generation_prompt": True}
        if not self.processor.chat_template:
            return self.processor.tokenizer.apply_chat_template(list(task.messages), **options)
        # The class's own method, since Omni processors warn about every system prompt that does not ask for speech.
        return ProcessorMixin.apply_chat_template(self.processor, list(task.messages), **options)

    def _caption(self, clip: AudioClip, ref: Any) -> str:
        if self.limits.too_long == "refuse" or clip.seconds < self.limits.max_seconds:
            return f"{clip.seconds:.1f} s"
        return f"the first {clip.seconds:.1f} s (longer clips are cut there)"


def clip_limits(config: AudioRolloutConfig, *, max_seconds: float | None = None) -> ClipLimits:
    """The limits of a run, as `audio.media` wants them."""
    return ClipLimits(
        min_seconds=config.min_seconds,
        max_seconds=config.max_seconds if max_seconds is None else max_seconds,
        too_long=config.too_long,
        allow_silence=config.allow_silence,
    )


def open_media(kind: str, ref: Any, *, config: AudioRolloutConfig, rate: int = 16_000, limits: ClipLimits | None = None) -> Any:
    """Open one medium as training does: the opener of ``mmrl data check`` once its limits are bound."""
    limits = limits or clip_limits(config)
    if kind == "audio":
        return open_clip(ref, rate=rate, limits=limits)
    if kind == "image":
        return open_image(ref)
    sound = config.use_audio_in_video
    return open_video(ref, fps=config.fps, max_frames=config.max_frames, rate=rate, limits=limits, with_sound=sound)


def _rows(grid: Tensor | None) -> np.ndarray:
    return np.zeros((0, 3), dtype=int) if grid is None else grid.numpy()


def _wav(clip: AudioClip, caption: str) -> Media:
    return Media(kind="audio", data=clip.to_wav(), suffix=".wav", caption=caption)


def _png(pixels: np.ndarray, caption: str = "") -> Media:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG")
    return Media(kind="image", data=buffer.getvalue(), suffix=".png", caption=caption)
