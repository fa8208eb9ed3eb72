"""Tiny audio models, built once for all tests of the package; sounds and tasks to put into them."""

import numpy as np
import pytest
import torch

from audio.adapter import build_adapter
from audio.config import AudioRunConfig
from audio.media import AudioClip
from audio.tiny import BUILDERS, build_tiny
from mmrl.chat import ChatTask
from mmrl.config import validate

NAMES = tuple(BUILDERS)
CORPUS = ["user\nHow many beeps are there?\nassistant\n", "rising or falling, loud or soft"] * 20


@pytest.fixture(scope="session")
def tiny_dirs(tmp_path_factory):
    """Directories of the tiny models by name, sound weighing enough in them to be noticed."""
    torch.set_num_threads(1)
    found = {}
    for name in NAMES:
        found[name] = tmp_path_factory.mktemp(name)
        build_tiny(name, found[name], CORPUS)
    return found


@pytest.fixture(scope="session")
def make_config(tiny_dirs):
    def make(name="tiny-qwen2.5-omni", **sections):
        tree = {
            "modality": "audio", "name": "test", "rewards": {"accuracy": 1.0}, "trainer": {"num_steps": 1},
            "policy": {"path": str(tiny_dirs.get(name, name))}, "tasks": {"name": "tones"}, "rollout": {"max_new_tokens": 6},
        }  # fmt: skip
        merged = {key: {**tree.get(key, {}), **value} if isinstance(value, dict) else value for key, value in sections.items()}
        return validate({**tree, **merged}, AudioRunConfig, "test")

    return make


@pytest.fixture(scope="session")
def make_adapter(make_config):
    return lambda name="tiny-qwen2.5-omni", **sections: build_adapter(make_config(name, **sections))


@pytest.fixture(scope="session")
def loud_policy():
    """The policy of an adapter, its weights enlarged until what it hears and sees changes what it says."""

    def build(adapter):
        policy = adapter.build_policy()
        with torch.no_grad():
            for weights in policy.parameters():
                if weights.ndim > 1:
                    weights.mul_(4.0)
        return policy

    return build


@pytest.fixture(scope="session")
def tone():
    def make(seconds, hertz=440.0, rate=16_000):
        times = np.arange(round(seconds * rate)) / rate
        noise = np.random.default_rng(round(hertz)).standard_normal(len(times))
        return AudioClip((0.5 * np.sin(2 * np.pi * hertz * times) + 0.02 * noise).astype(np.float32), rate)

    return make


@pytest.fixture(scope="session")
def task():
    """A task from texts and media; a dict part passes as it is."""

    def make(*parts, name="t", source=""):
        def part(value):
            if isinstance(value, str):
                return {"type": "text", "text": value}
            return value if isinstance(value, dict) else {"type": "audio", "audio": value}

        content = [part(value) for value in parts]
        return ChatTask(id=name, messages=({"role": "user", "content": content},), answer="1", source=source)

    return make
