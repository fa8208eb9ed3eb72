"""Sections of a robot run's config. Imports neither torch nor MuJoCo."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from mmrl.config import RunConfig, Section


class GaussianChunkPolicySection(Section):
    """A small instructed policy: Gaussian over chunks of joint motions (`robotics.policies`)."""

    name: Literal["gaussian_chunk"] = "gaussian_chunk"
    """Kind of policy."""
    chunk_size: int = Field(4, gt=0)
    """Commands that one look at the observation decides."""
    max_delta: float = Field(0.08, gt=0, le=1)
    """Furthest that one command moves a joint, as a share of half its range."""
    hidden_sizes: tuple[int, ...] = Field((128, 128), min_length=1)
    """Widths of the network."""
    word_dim: int = Field(16, gt=0)
    """Width of word and object embeddings."""
    initial_std: float = Field(0.5, gt=0)
    """Exploration noise at the start, in units of ``max_delta``; learned from there, per joint."""
    min_std: float = Field(0.05, gt=0)
    """The learned noise is not allowed below this."""
    max_std: float = Field(1.0, gt=0)
    """Nor above this."""

    @model_validator(mode="after")
    def _noise_is_ordered(self) -> GaussianChunkPolicySection:
        if not self.min_std <= self.initial_std <= self.max_std:
            raise ValueError(
                f"policy.initial_std is {self.initial_std}; expected min_std ({self.min_std}) to max_std ({self.max_std})."
            )
        return self


class SeedRange(Section):
    """Consecutive layout seeds."""

    first: int = Field(..., ge=0, lt=2**31)
    """Seed of the first layout."""
    count: int = Field(..., gt=0)
    """Number of layouts; each is asked for every goal."""


class TasksSection(Section):
    """Which tasks are trained and which are held out."""

    family: Literal["reach"] = "reach"
    """Kind of task: scene, goals, success (`robotics.envs.families`)."""
    goals: tuple[str, ...] | None = Field(None, min_length=1)
    """Goals that are asked for; all of the family's when absent. The others stay in the scene as distractors."""
    train: SeedRange = SeedRange(first=0, count=4096)
    """Layouts of the ``train`` split."""
    eval: SeedRange = SeedRange(first=1_000_000, count=500)
    """Layouts of the ``eval`` split, and of ``eval_new_words``, which asks for the same in phrasings new to the policy."""

    @model_validator(mode="after")
    def _held_out_layouts_are_held_out(self) -> TasksSection:
        train, held_out = self.train, self.eval
        if train.first < held_out.first + held_out.count and held_out.first < train.first + train.count:
            raise ValueError(
                f"tasks.train covers seeds {train.first} to {train.first + train.count - 1} and tasks.eval "
                f"{held_out.first} to {held_out.first + held_out.count - 1}; they must not overlap."
            )
        return self


class RolloutSection(Section):
    """How episodes are run."""

    max_env_steps: int = Field(40, gt=0)
    """Control steps (1/20 s each) after which an episode is cut."""
    execution_horizon: int = Field(4, gt=0)
    """Commands of a chunk that are executed before the policy looks again; at most ``policy.chunk_size``."""
    num_threads: int = Field(2, gt=0)
    """Simulation threads; results do not depend on it."""
    media: bool = True
    """Draw the first and last frame of episodes that are shown; needs OpenGL."""
    image_size: int = Field(256, gt=0, le=640)
    """Width and height of drawn frames, pixels."""


class RoboticsRunConfig(RunConfig):
    """A run of a robot policy in simulation."""

    modality: Literal["robotics"]
    """Always ``robotics`` here."""
    policy: GaussianChunkPolicySection = GaussianChunkPolicySection()
    """The network."""
    tasks: TasksSection = TasksSection()
    """Training and held-out tasks."""
    rollout: RolloutSection = RolloutSection()
    """How episodes are run."""

    @model_validator(mode="after")
    def _chunk_covers_the_execution_horizon(self) -> RoboticsRunConfig:
        if self.rollout.execution_horizon > self.policy.chunk_size:
            raise ValueError(
                f"rollout.execution_horizon is {self.rollout.execution_horizon}, more than policy.chunk_size "
                f"({self.policy.chunk_size}); the policy decides no more commands than that."
            )
        return self
