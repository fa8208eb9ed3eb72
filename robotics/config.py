"""Sections of a robot run's config. Imports neither torch nor MuJoCo."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from mmrl.config import RunConfig, Section


class PolicySection(Section):
    """What every kind of policy has."""

    chunk_size: int = Field(4, gt=0)
    """Commands that one look at the observation decides, H."""
    init_from: Path | None = None
    """Where the run's first weights come from: a LeRobot policy directory, a checkpoint, or a run directory (its newest)."""


class GaussianChunkSection(PolicySection):
    """A small instructed policy on the scene's state: Gaussian over chunks of joint motions."""

    name: Literal["gaussian_chunk"] = "gaussian_chunk"
    """Kind of policy."""
    max_delta: float = Field(0.08, gt=0, le=1)
    """Furthest that one command moves a joint, as a share of half its range."""
    width: int = Field(128, gt=0)
    """Width of the network."""
    num_blocks: int = Field(2, gt=0)
    """Residual layers of the network."""
    word_dim: int = Field(16, gt=0)
    """Width of word and object embeddings."""
    num_readers: int = Field(2, gt=0)
    """Things of the scene that the instruction may name at once."""
    sharpness: float = Field(1.0, gt=0)
    """Factor of the readers' attention: 1 to learn from rewards alone, about 10 to clone exactly."""
    turning_frame: bool = False
    """Show the scene also as it looks from the arm's own plane, so that what is learned at one angle serves at all of them."""
    initial_std: float = Field(0.5, gt=0)
    """Exploration noise at the start, in units of ``max_delta``; learned from there, per joint."""
    min_std: float = Field(0.05, gt=0)
    """The learned noise is not allowed below this."""
    max_std: float = Field(1.0, gt=0)
    """Nor above this."""

    @model_validator(mode="after")
    def _noise_is_ordered(self) -> GaussianChunkSection:
        if not self.min_std <= self.initial_std <= self.max_std:
            raise ValueError(
                f"policy.initial_std is {self.initial_std}; expected min_std ({self.min_std}) to max_std ({self.max_std})."
            )
        return self


class SeesSection(PolicySection):
    """What a policy with eyes may be given."""

    cameras: tuple[Literal["scene", "wrist"], ...] = ("scene",)
    """Images that it looks at; none for a policy on state alone."""
    image_size: int = Field(64, gt=0, le=640)
    """Height and width of each image, pixels."""
    environment_state: bool = False
    """Also give it the positions of gripper and objects."""


class TransformerSection(SeesSection):
    """Size of the small vision-language-action transformer."""

    chunk_size: int = Field(8, gt=0)
    """Commands that one look at the observation decides, H."""
    max_delta: float = Field(0.08, gt=0, le=1)
    """Furthest that one command moves a joint, as a share of half its range."""
    width: int = Field(128, gt=0)
    """Width of tokens."""
    depth: int = Field(3, gt=0)
    """Transformer layers."""
    num_heads: int = Field(4, gt=0)
    """Attention heads."""
    patch_size: int = Field(4, gt=1)
    """Pixels of an image patch's edge; a power of two."""
    image_tokens: int = Field(32, gt=0)
    """Tokens per camera: learned attention maps over its patches."""


class FlowVLASection(TransformerSection):
    """A small vision-language-action transformer whose action chunk comes from flow matching (`robotics.policies`)."""

    name: Literal["flow_vla"] = "flow_vla"
    """Kind of policy."""
    num_denoising_steps: int = Field(4, gt=0)
    """Steps from noise to a chunk, K."""
    sde_noise: float = Field(0.5, gt=0)
    """Noise level a of the one stochastic step that makes decisions explorable and scorable."""
    stochastic_step: Literal["any", "last"] = "any"
    """Draw that step for each decision, or always take the last one, whose noise reaches the robot as it is, with a standard
    deviation of ``a / sqrt(K (K - 1))``; the flow works on the noise of earlier steps."""


class TokenVLASection(TransformerSection):
    """The same transformer with a discrete head: each motion is one of 255 bins."""

    name: Literal["token_vla"] = "token_vla"
    """Kind of policy."""
    temperature: float = Field(1.0, gt=0)
    """Of sampling and of log-probabilities alike."""


class LeRobotPolicySection(SeesSection):
    """One of LeRobot's own flow-matching policies, in whatever size its config describes."""

    name: Literal["lerobot"] = "lerobot"
    """Kind of policy."""
    type: Literal["smolvla", "pi0", "pi05"]
    """LeRobot's name of the policy."""
    chunk_size: int = Field(8, gt=0)
    """Commands that one look at the observation decides, H."""
    num_denoising_steps: int = Field(4, gt=0)
    """Steps from noise to a chunk, K."""
    sde_noise: float = Field(0.5, gt=0)
    """Noise level a of the one stochastic step that makes decisions explorable and scorable."""
    tokenizer: Path | None = None
    """Folder of the tokenizer; LeRobot's default is fetched from a hub when absent."""
    settings: dict[str, Any] = Field({})
    """Further fields of LeRobot's config of this policy, for example ``num_vlm_layers: 2``."""


AnyPolicySection = Annotated[
    GaussianChunkSection | FlowVLASection | TokenVLASection | LeRobotPolicySection, Field(discriminator="name")
]

BUILTIN_POLICIES = {
    "gaussian_chunk": "Gaussian over chunks of joint motions, from the scene's state and the instruction",
    "flow_vla": "vision-language-action transformer with a flow-matching chunk head",
    "token_vla": "vision-language-action transformer with discrete action tokens",
    "lerobot": "LeRobot's SmolVLA, pi0 or pi0.5",
}


class SeedRange(Section):
    """Consecutive layout seeds."""

    first: int = Field(..., ge=0, lt=2**31)
    """Seed of the first layout."""
    count: int = Field(..., gt=0)
    """Number of layouts; each is asked for every goal."""


class TasksSection(Section):
    """Which tasks are trained and which are held out."""

    families: tuple[str, ...] = Field(("reach",), min_length=1)
    """Kinds of task (`robotics.envs.families`), asked for in turn."""
    goals: dict[str, tuple[str, ...]] = Field({})
    """Goals that are asked for, by family; all of a family's when absent. What is not asked for stays in the scene."""
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


Share = Annotated[float, Field(ge=0, le=1)]


class DemonstrationsSection(Section):
    """Where the demonstrations of supervised warm-up (``algorithm: sft``) come from."""

    path: Path | None = None
    """LeRobotDataset directory (``mmrl demos`` writes one); absent runs the scripted experts in simulation."""
    frames_per_episode: int = Field(16, gt=0)
    """Frames drawn from each episode of a dataset, each time it comes up."""
    episodes: dict[str, int] = Field({})
    """At most so many episodes of a dataset, by family, the first ones; all of the families that are not named."""
    successes_only: bool = True
    """Leave out episodes of a dataset that did not succeed."""
    noise: Share | dict[str, Share] = 0.0
    """Without ``path``: noise between the expert's commands, which are imitated, and what the robot is sent, as a share of half
    of a joint's range; one number, or numbers by family (0 for those that are not named). It shows the way back from small
    errors; much more than 0.006 makes grasps fail."""
    allow_other_world: bool = False
    """Take a dataset of ``mmrl demos`` although it was made in another world (other MuJoCo, changed scene)."""

    @model_validator(mode="after")
    def _is_recorded_or_disturbed(self) -> DemonstrationsSection:
        if self.path is not None and self.noise:
            raise ValueError(
                "noise is for experts that act in simulation, and path names recorded demonstrations; leave one of them out "
                "(mmrl demos --noise records with noise)"
            )
        return self


class RolloutSection(Section):
    """How episodes are run."""

    max_env_steps: int | None = Field(None, gt=0)
    """Control steps (1/20 s each) after which an episode is cut; the family's own limit when absent."""
    execution_horizon: int = Field(4, gt=0)
    """Commands of a chunk that are executed before the policy looks again; at most ``policy.chunk_size``."""
    decisions: Literal["chunk", "action"] = "chunk"
    """What a probability ratio is taken of: a whole chunk, or each of its commands."""
    num_threads: int = Field(2, gt=0)
    """Simulation threads; results do not depend on it."""
    num_envs: int = Field(256, gt=0)
    """Simulations held in memory at once; results do not depend on it."""
    media: bool = True
    """Film episodes that are shown (first and last frame without a video encoder); needs OpenGL."""
    image_size: int = Field(192, gt=0, le=640)
    """Width and height of that film, pixels."""


class RoboticsRunConfig(RunConfig):
    """A run of a robot policy in simulation."""

    modality: Literal["robotics"]
    """Always ``robotics`` here."""
    policy: AnyPolicySection = GaussianChunkSection()
    """The network."""
    tasks: TasksSection = TasksSection()
    """Training and held-out tasks."""
    demonstrations: DemonstrationsSection = DemonstrationsSection()
    """Of supervised warm-up."""
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
