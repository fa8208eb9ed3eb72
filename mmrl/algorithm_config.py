"""The ``algorithm:`` section: one choice for each slot of a policy-gradient recipe, and the slots' parameters.

`mmrl.algorithms` names combinations of them, `mmrl.recipe` computes them. Nothing here imports torch.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from mmrl.section import Section

Selection = Literal["none", "dynamic", "reject", "pass_rate", "ada_positive", "ada_balanced"]
Subsample = Literal[
    "none", "correct", "wrong", "pair", "balanced", "proportional", "positive_share", "advantage_floor", "return_threshold"
]
AdvantageName = Literal[
    "group_std", "group_center", "leave_one_out", "batch_std", "per_term_std", "length_baseline", "gpg", "beta_normalized",
    "token_whitened", "center_whitened", "progress_baseline", "raw", "positive_part", "sign", "best_of_n", "ones",
]  # fmt: skip
SurrogateName = Literal["clip", "policy_gradient", "cispo", "sapo", "gmpo", "vespo", "topr", "delight", "oreal"]
Ratio = Literal["token", "sequence", "sequence_token", "sequence_product"]
Mismatch = Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric_mask"]
Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "constant", "sign_token_mean"]

NEEDS_NO_GROUP = frozenset({"token_whitened", "progress_baseline", "raw", "positive_part", "sign", "ones"})
"""Advantages that do not compare the rollouts of a group."""


class OverlongShaping(Section):
    """DAPO's soft punishment of rollouts that come close to the limit."""

    name: Literal["overlong"] = "overlong"
    """Tag of this shaping."""
    limit: int | None = Field(None, gt=0)
    """Longest allowed rollout in decisions; the adapter's limit when absent."""
    cache: float = Field(0.2, gt=0, le=1)
    """Share of the limit over which the punishment grows from 0 to ``factor``."""
    factor: float = Field(1.0, gt=0)
    """Punishment at and beyond the limit."""


class TruncatedShaping(Section):
    """What a rollout that was cut at the limit is worth."""

    name: Literal["truncated"] = "truncated"
    """Tag of this shaping."""
    coef: float = 0.0
    """0 or more multiplies the reward (Dr. GRPO's code: 0); a negative number replaces it."""


class CosineShaping(Section):
    """Short correct rollouts are worth more, long wrong ones are punished less (arXiv 2502.03373)."""

    name: Literal["cosine"] = "cosine"
    """Tag of this shaping."""
    limit: int | None = Field(None, gt=0)
    """Length at which the end values are reached; the adapter's limit when absent."""
    correct: tuple[float, float] = (1.0, 0.5)
    """Reward of correct rollouts at length 0 and at the limit; replaces the total reward."""
    wrong: tuple[float, float] = (-1.0, -0.5)
    """Reward of wrong rollouts at length 0 and at the limit."""


class GroupLengthShaping(Section):
    """Length compared with the group's shortest and longest rollout (Kimi k1.5, arXiv 2501.12599)."""

    name: Literal["group_length"] = "group_length"
    """Tag of this shaping."""
    factor: float = Field(1.0, gt=0)
    """Correct rollouts gain ``factor * lam`` and wrong ones ``factor * min(0, lam)``, with ``lam`` from 0.5 to -0.5."""


class TargetLengthShaping(Section):
    """A length that is asked for (L1, arXiv 2503.04697)."""

    name: Literal["target_length"] = "target_length"
    """Tag of this shaping."""
    target: int = Field(..., gt=0)
    """Decisions that a rollout should have, or at most have."""
    mode: Literal["exact", "max"] = "exact"
    """``exact`` subtracts ``alpha |target - n|``; ``max`` multiplies by ``clip(alpha (target - n) + 0.5, 0, 1)``."""
    alpha: float = Field(3e-4, gt=0)
    """Cost of one decision."""


class OutcomeShaping(Section):
    """The reward is replaced by one number for correct and one for wrong rollouts."""

    name: Literal["outcome"] = "outcome"
    """Tag of this shaping."""
    correct: float = 1.0
    """Reward of a correct rollout."""
    wrong: float = -1.0
    """Reward of a wrong rollout; Weighted GRPO's ``-lambda`` in its mode that maps before it centers."""


class DecisionCostShaping(Section):
    """A price per decision, on correct rollouts only, so that short wrong answers are not rewarded."""

    name: Literal["decision_cost"] = "decision_cost"
    """Tag of this shaping."""
    cost: float = Field(..., gt=0)
    """Subtracted for each decision of a correct rollout."""


class ConciseCorrectShaping(Section):
    """A bonus for the shortest correct rollout of a group, while that is longer than a floor (Observe-R1, arXiv 2505.12432)."""

    name: Literal["concise_correct"] = "concise_correct"
    """Tag of this shaping."""
    bonus: float = Field(0.2, gt=0)
    """Added to that rollout's reward."""
    floor: int = Field(100, ge=0)
    """Once the shortest correct rollout has so many decisions or fewer, nobody gains by being shorter."""
    truncated: bool = False
    """Whether a rollout that was cut at the limit may win the bonus."""


Shaping = Annotated[
    OverlongShaping
    | TruncatedShaping
    | CosineShaping
    | GroupLengthShaping
    | TargetLengthShaping
    | OutcomeShaping
    | DecisionCostShaping
    | ConciseCorrectShaping,
    Field(discriminator="name"),
]


class AlgorithmConfig(Section):
    """One choice for each slot of a policy-gradient recipe; ``name`` picks a preset whose values the other keys override."""

    name: str = "grpo"
    """A preset of `mmrl.algorithms` (``mmrl list algorithms``), or ``sft`` for supervised warm-up."""
    source: Literal["rollouts", "demonstrations"] = "rollouts"
    """Where completions come from: sampled from the policy, or the tasks' demonstrations (supervised warm-up)."""
    selection: Selection = "none"
    """Which groups: ``dynamic`` (DAPO) replaces groups whose selection metric is constant by newly drawn tasks, ``reject``
    gives them advantage 0, ``pass_rate`` drops groups outside of (0, max_pass_rate], ``ada_*`` draws more rollouts of a
    task until there are correct ones (``positive``), or enough of both kinds (``balanced``)."""
    selection_metric: str | None = None
    """Reward term that decides whether a group is constant and whether a rollout is correct; the total reward when absent."""
    correct_above: float = 0.5
    """A rollout is correct when its selection metric is larger than this."""
    max_refills: int = Field(3, ge=0)
    """``dynamic`` draws at most this many further batches of tasks per step, ``ada_*`` this many further rounds of rollouts."""
    max_pass_rate: float = Field(1.0, gt=0, le=1)
    """``pass_rate`` keeps groups with at least one correct rollout and at most this share of them."""
    keep_per_group: int = Field(4, ge=2)
    """Rollouts that ``ada_*``, ``balanced`` and ``proportional`` want of each group."""
    subsample: Subsample = "none"
    """Which rollouts of the groups are trained on: correct or wrong ones, one of each (``pair``), ``keep_per_group`` in equal
    numbers (``balanced``) or near the observed share (``proportional``), all wrong ones and as many correct ones as make up
    ``positive_share``, those with ``|advantage| >= min_advantage``, or the best ``positive_share`` by reward."""
    positive_share: float = Field(0.15, gt=0, lt=1)
    """Share that ``subsample: positive_share`` and ``return_threshold`` aim at."""
    min_advantage: float = Field(0.01, ge=0)
    """Threshold of ``subsample: advantage_floor``."""
    statistics: Literal["all", "kept"] = "all"
    """Compute advantages from all rollouts that were drawn, or from those that ``subsample`` keeps."""
    shaping: tuple[Shaping, ...] = ()
    """Changes of the total reward before the advantage, in order: overlong, truncated, cosine, group_length, target_length,
    decision_cost, concise_correct, outcome."""
    advantage: AdvantageName = "group_std"
    """Reward to credit, for example centered and scaled (GRPO), centered (Dr. GRPO), leave-one-out (RLOO), or 1 (likelihood);
    ``mmrl list`` has the formulas."""
    advantage_eps: float = Field(1e-6, ge=0)
    """Added to the standard deviation."""
    advantage_ddof: Literal[0, 1] = 1
    """1 divides the variance by its count minus 1 (all public libraries), 0 by the count."""
    advantage_limit: float | None = Field(None, gt=0)
    """Advantages larger than this in absolute value become 0 (StableReinforce: 3); absent is off."""
    advantage_limit_around: Literal["zero", "mean"] = "zero"
    """``advantage_limit`` is the distance from 0 (StableReinforce's paper), or from the mean of the returns before whitening
    (its code, where whitened values beyond 10 become 0 too)."""
    discount: float = Field(1.0, gt=0, le=1)
    """Discount of ``token_whitened`` reward-to-go, per decision."""
    difficulty_weight: Literal["none", "inverse", "inverse_sqrt", "parabola"] = "none"
    """Divide a group's advantages by its success rate p, or its square root (Reinforce-Ada), or multiply them by
    ``4 difficulty_peak p (1 - p)`` (Observe-R1)."""
    difficulty_peak: float = Field(1.8, gt=0)
    """Largest weight of ``difficulty_weight: parabola``, that of a group half of which is correct."""
    advantage_clamp: float | None = Field(None, gt=0)
    """Advantages are bounded by plus and minus this after all weights; absent is off."""
    positive_weight: float = Field(1.0, ge=0)
    """Factor of positive advantages (W-REINFORCE's lambda)."""
    negative_weight: float = Field(1.0, ge=0)
    """Factor of negative advantages (Weighted GRPO's lambda, after normalisation)."""
    positive_only_until: float = Field(0.0, ge=0, le=1)
    """Share of the run during which negative advantages count as 0 (CAPO's first phase)."""
    surrogate: SurrogateName = "clip"
    """Loss of a decision: PPO's clipped ratio, ``-A log pi`` without a ratio, or the loss of the method of that name."""
    ratio: Ratio = "token"
    """Unit of the importance ratio: each decision, the length-normalised rollout (GSPO; ``sequence_token`` is its form for
    advantages per decision), or the product over the rollout."""
    max_log_ratio: float = Field(20.0, gt=0)
    """Log-ratios are clamped to plus and minus this before ``exp``."""
    clip_low: float = Field(0.2, ge=0, lt=1)
    """The ratio is clipped below at ``1 - clip_low``."""
    clip_high: float = Field(0.2, ge=0)
    """The ratio is clipped above at ``1 + clip_high``; larger than ``clip_low`` is DAPO's clip-higher."""
    dual_clip: float | None = Field(None, gt=1)
    """For negative advantages the loss is bounded by ``dual_clip * |A|``; absent is off."""
    ratio_cap: float | None = Field(None, gt=1)
    """Absolute cap of the ratio: of ``clip``'s free branch (INTELLECT-2's delta), of ``cispo``'s weight (then clip_low and
    clip_high are not used); absent is off."""
    delight_temperature: float = Field(1.0, gt=0)
    """Temperature eta of the ``delight`` gate."""
    mismatch: Mismatch = "none"
    """Weight for a sampling engine that disagrees with the trainer: per decision, whole rollout, or geometric mean; truncated
    at ``mismatch_high``, or 0 outside of the bounds. Without the sampler's log-probabilities the weight is 1."""
    mismatch_low: float = Field(0.0, ge=0)
    """Lower bound of the ``*_mask`` weights."""
    mismatch_high: float = Field(2.0, gt=0)
    """Upper bound of the mismatch weights."""
    mismatch_normalize: bool = False
    """Divide mismatch weights by their mean over the step."""
    off_policy_delta: float | None = Field(None, gt=0)
    """Rollouts of negative advantage whose mean log-probability fell by more than this since sampling get no policy loss
    (DeepSeek-V3.2); absent is off."""
    kl: Literal["k1", "k2", "k3", "abs"] = "k3"
    """Estimator of the KL divergence to the reference policy."""
    kl_in: Literal["loss", "reward", "return"] = "loss"
    """Add the KL to the loss per decision, subtract it from the reward, or subtract what is still to come of it from the
    finished advantage of each decision (``return``: it acts where the advantage is 0 and no statistics see it)."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the KL term; at 0 no reference policy is kept in memory."""
    kl_gradient: Literal["own", "k2"] = "own"
    """Differentiate the estimator, or keep its value and use k2's gradient (straight-through)."""
    kl_importance: bool = False
    """Multiply the KL in the loss by the ratio of each decision, so that it is unbiased off-policy."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of the entropy bonus; at 0 entropy is not computed in the update."""
    aggregation: Aggregation = "token_mean"
    """Mean over all decisions of the step, mean of rollout means, mean of rollout sums, sum over rollouts divided by
    ``N * horizon``, or separate means over the decisions of positive and of negative advantages (OREAL)."""
    horizon: int | None = Field(None, gt=0)
    """Constant length of ``aggregation: constant``; the longest possible rollout when absent."""
    mask_truncated: bool = False
    """Give rollouts that hit the length limit no loss (their rewards stay in the group statistics)."""

    @model_validator(mode="after")
    def _slots_fit_together(self) -> AlgorithmConfig:
        if self.subsample == "advantage_floor" and self.statistics == "kept":
            raise ValueError("subsample 'advantage_floor' looks at advantages, so statistics must be 'all'; got 'kept'.")
        if self.advantage_limit_around == "mean" and (self.advantage != "token_whitened" or self.advantage_limit is None):
            raise ValueError(
                "advantage_limit_around 'mean' counts from the mean of returns, so it needs advantage token_whitened and "
                f"an advantage_limit; got advantage {self.advantage!r} with advantage_limit {self.advantage_limit}."
            )
        if self.mismatch.endswith("mask") and self.mismatch_low >= self.mismatch_high:
            raise ValueError(
                f"mismatch_low is {self.mismatch_low}, mismatch_high {self.mismatch_high}; the lower bound must be smaller."
            )
        return self
