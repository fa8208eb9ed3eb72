"""The ``sampling`` section: which tasks next, and how many rollouts of each. Nothing here imports torch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from mmrl.section import Section


class DomainSamplingConfig(Section):
    """Domain-aware sampling (RuleReasoner, arXiv 2506.08672): more tasks of domains that are far from their target reward."""

    target: float = 1.0
    """Reward at which a domain needs no more attention than any other."""
    temperature: float = Field(0.3, gt=0)
    """Softmax temperature of the weights; smaller is more uneven."""
    smoothing: float = Field(0.5, gt=0, le=1)
    """Weight of the newest step's mean reward in each domain's moving average."""
    refresh: int = Field(8, gt=0)
    """Steps between two changes of the weights."""


class ProbeConfig(Section):
    """Rollouts of the starting policy that decide which tasks are drawn; ``algorithm.correct_above`` says which are correct."""

    rollouts: int = Field(8, ge=2)
    """Rollouts of each task."""
    num_tasks: int | None = Field(None, gt=0)
    """Look at the first so many tasks of the source and draw from these alone; absent looks at all of them."""


class FilterConfig(ProbeConfig):
    """Rollout-based instance filtering (RIF-RFT, arXiv 2507.05386): drop tasks by their pass rate before training."""

    above: float = Field(0.0, ge=0, lt=1)
    """Tasks whose pass rate is not above this are dropped."""
    up_to: float = Field(1.0, gt=0, le=1)
    """Tasks whose pass rate is above this are dropped."""

    @model_validator(mode="after")
    def _bounds_are_ordered(self) -> FilterConfig:
        if self.above >= self.up_to:
            raise ValueError(f"above is {self.above:g}, up_to {self.up_to:g}; no pass rate lies between them.")
        return self


class PairsConfig(ProbeConfig):
    """Positive-negative pairing (Weighted GRPO, arXiv 2602.03452): a hard task beside an easy one, both with a rare outcome."""

    rare: int = Field(2, gt=0)
    """A task with one to so many correct rollouts is hard, one with one to so many wrong ones easy."""

    @model_validator(mode="after")
    def _hard_is_not_easy(self) -> PairsConfig:
        if 2 * self.rare >= self.rollouts:
            raise ValueError(f"rare is {self.rare} of {self.rollouts} rollouts; less than half of them are rare.")
        return self


class FailurePrefixConfig(ProbeConfig):
    """Failure-prefix conditioning (arXiv 2601.20829): tasks that are nearly solved are continued from a failed attempt.

    Looking costs ``rollouts`` of every task, and ``rollouts`` more for each of ``cuts`` of those that are nearly solved.
    """

    above: float = Field(0.75, ge=0, lt=1)
    """A task is nearly solved when its pass rate is larger than this, and one of its rollouts is wrong."""
    cuts: tuple[float, ...] = Field((0.1, 0.3, 0.5, 0.7, 0.9), min_length=1)
    """Shares of a failed attempt's reasoning that are tried as a prefix."""
    target: float = Field(0.5, ge=0, le=1)
    """The cut is used from which the policy succeeds closest to this often, the longer one of two that are equally close."""
    until: str = Field("</think>", min_length=1)
    """Text that ends the reasoning; without it the whole attempt counts as reasoning."""
    refresh: int = Field(0, ge=0)
    """Steps after which failures and cuts are looked for again with the policy of that moment; 0 never."""

    @field_validator("cuts")
    @classmethod
    def _cuts_leave_something(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if not all(0 < cut < 1 for cut in value):
            raise ValueError(f"expected shares between 0 and 1, found {', '.join(f'{cut:g}' for cut in value)}.")
        return value


class LadderConfig(Section):
    """NeuraLadder (Observe-R1, arXiv 2505.12432): from easy to hard by measured difficulty, then by complexity (`mmrl.ladder`).

    It takes the place of ``order``. Tasks without a measured difficulty because nothing could grade them are left out.
    """

    profile: Path | None = None
    """Output of ``mmrl data profile``, matched by task id; absent reads the tasks' own difficulty and complexity."""
    mixing: bool = True
    """Draw from a window of five neighbouring levels as published; off follows the ladder strictly."""
    drop_solved_below: float | None = Field(None, gt=0)
    """Tasks that are always solved with a lower complexity than this are left out; absent keeps them."""


class AllocationConfig(Section):
    """Unequal groups (Reinforce-Ada "Est", arXiv 2510.04996): more rollouts of tasks that are expected to succeed rarely."""

    low: int = Field(4, ge=2)
    """Rollouts of the smallest group."""
    high: int = Field(32, ge=2)
    """Rollouts of the largest group; the mean stays ``group_size``."""
    decay: float = Field(0.9, ge=0, le=1)
    """Weight of a task's earlier attempts each time it is attempted again."""
    prior: tuple[float, float] = (1.0, 1.0)
    """Successes and failures that every task is credited with before the first attempt."""

    @field_validator("prior")
    @classmethod
    def _expects_some_success(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not (value[0] > 0 and value[1] >= 0):
            raise ValueError(f"expected a positive number of successes and no negative number of failures, found {value}.")
        return value


class SamplingConfig(Section):
    """Which tasks next, and how many rollouts of each."""

    tasks_per_step: int = Field(16, gt=0)
    """Groups per optimizer step, over all processes."""
    group_size: int = Field(8, gt=0)
    """Rollouts per task."""
    order: Literal["shuffled", "sequential"] = "shuffled"
    """Draw tasks without replacement in a new random order each epoch, or in the order of the source."""
    domains: DomainSamplingConfig | None = None
    """Weigh domains by how far they are from a target reward; absent draws tasks as the source has them."""
    filter: FilterConfig | None = None
    """Draw only tasks that the starting policy solves sometimes; absent draws all."""
    pairs: PairsConfig | None = None
    """Draw a hard and an easy task in turn; absent draws tasks as the source has them."""
    allocation: AllocationConfig | None = None
    """Give tasks groups of unequal size; absent gives each ``group_size`` rollouts."""
    failure_prefix: FailurePrefixConfig | None = None
    """Draw only nearly solved tasks, each to be continued from a failed attempt; absent asks tasks as they are."""

    ladder: LadderConfig | None = None
    """Draw tasks from easy to hard; absent draws them in ``order``."""

    @model_validator(mode="after")
    def _the_ladder_stands_alone(self) -> SamplingConfig:
        others = [name for name in ("domains", "pairs") if self.ladder is not None and getattr(self, name) is not None]
        if others:
            raise ValueError(f"ladder and {others[0]} each say which tasks come next; keep one of them.")
        return self

    @model_validator(mode="after")
    def _groups_can_be_that_large(self) -> SamplingConfig:
        bounds = self.allocation
        if bounds is not None and not bounds.low <= self.group_size <= bounds.high:
            raise ValueError(
                f"group_size is {self.group_size}, the mean of groups between allocation.low {bounds.low} and allocation.high "
                f"{bounds.high}; it must lie between them."
            )
        return self

    @model_validator(mode="after")
    def _one_choice_of_tasks(self) -> SamplingConfig:
        given = [name for name in ("filter", "pairs", "failure_prefix") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} each choose the tasks; keep one of them.")
        if self.failure_prefix is not None and self.domains is not None:
            raise ValueError("failure_prefix and domains each say which tasks come next; keep one of them.")
        if self.pairs is not None and self.domains is not None:
            raise ValueError("pairs and domains each say which tasks come next; keep one of them.")
        if self.pairs is not None and self.tasks_per_step % 2:
            raise ValueError(f"tasks_per_step is {self.tasks_per_step}; pairs need an even number.")
        return self
