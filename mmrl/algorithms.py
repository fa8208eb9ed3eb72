"""Named presets: one choice for each slot of `mmrl.algorithm_config.AlgorithmConfig`. Data only; `mmrl.recipe` computes them.

A preset states every slot in which it differs from the section's defaults, so reading one line tells the algorithm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A recipe with a name."""

    summary: str
    paper: str
    slots: Mapping[str, Any]
    equation: str
    """Loss that is minimised, in ASCII; `SYMBOLS` says what its letters mean."""


SYMBOLS = (
    "A advantage, lp log-probability of a decision, rho its ratio to the policy that sampled, n length of a rollout, r reward; "
    "mean_g, sd_g over the group, mean_i over rollouts, mean_t over the decisions of one, mean_it over all of the step; "
    "sg[.] no gradient."
)
"""The letters of the equations."""

_CLIP = "min(rho A, clip(rho, 0.8, 1.2) A)"
_CLIP_HIGHER = "min(rho A, clip(rho, 0.8, 1.28) A)"
_Z = "A = (r - mean_g r) / (sd_g r + eps)"
_OVERLONG = {"name": "overlong", "limit": None, "cache": 0.2, "factor": 1.0}

PRESETS: Mapping[str, Preset] = {
    "grpo": Preset(
        summary="Group z-score, clipped ratio, mean of rollout means, k3 penalty when kl_coef > 0",
        paper="arXiv 2402.03300",
        equation=f"-mean_i mean_t [{_CLIP} - kl_coef k3],  {_Z}",
        slots={"advantage": "group_std", "aggregation": "sequence_mean", "clip_low": 0.2, "clip_high": 0.2, "kl": "k3"},
    ),
    "dr_grpo": Preset(
        summary="GRPO without its two biases: no division by the standard deviation or by the rollout's length",
        paper="arXiv 2503.20783",
        equation=f"-mean_i (1/horizon) sum_t {_CLIP},  A = r - mean_g r",
        slots={"advantage": "group_center", "aggregation": "constant"},
    ),
    "dapo": Preset(
        summary="Clip-higher, token-level mean, groups without signal replaced",
        paper="arXiv 2503.14476",
        equation=f"-mean_it {_CLIP_HIGHER},  {_Z}, only groups whose metric varies",
        slots={"advantage": "group_std", "aggregation": "token_mean", "clip_high": 0.28, "selection": "dynamic"},
    ),
    "dapo_overlong": Preset(
        summary="DAPO with the soft punishment of rollouts that come within a fifth of the length limit",
        paper="arXiv 2503.14476",
        equation=f"-mean_it {_CLIP_HIGHER},  {_Z} of r + clip((limit - c - n) / c, -1, 0), c = cache * limit",
        slots={
            "advantage": "group_std", "aggregation": "token_mean", "clip_high": 0.28, "selection": "dynamic",
            "shaping": (_OVERLONG,),
        },
    ),
    "rloo": Preset(
        summary="Leave-one-out baseline with token-level clipping; KL in the reward when kl_coef > 0",
        paper="arXiv 2402.14740",
        equation=f"-mean_it {_CLIP},  A_i = r_i - mean of the others' r,  r minus kl_coef sum_t k1",
        slots={"advantage": "leave_one_out", "aggregation": "token_mean", "kl": "k1", "kl_in": "reward"},
    ),
    "rloo_sequence": Preset(
        summary="RLOO with the whole rollout as one action: the ratio is not normalised by length",
        paper="arXiv 2402.14740",
        equation="-mean_i min(S A, clip(S, 0.8, 1.2) A),  S = prod_t rho,  A_i = r_i - mean of the others' r, KL in r",
        slots={
            "advantage": "leave_one_out", "ratio": "sequence_product", "aggregation": "sequence_mean", "kl": "k1",
            "kl_in": "reward", "kl_coef": 0.05,
        },
    ),
    "reinforce_pp": Preset(
        summary="REINFORCE++: reward-to-go with KL in the reward, whitened over all decisions; groups of one are fine",
        paper="arXiv 2501.03262",
        equation=f"-mean_it {_CLIP},  A = whiten(sum_(u>=t) [r at the end - kl_coef k1_u])",
        slots={"advantage": "token_whitened", "aggregation": "token_mean", "kl": "k1", "kl_in": "reward", "kl_coef": 0.01},
    ),
    "reinforce_pp_baseline": Preset(
        summary="REINFORCE++ with the group's mean as baseline, whitened over all decisions; k2 in the loss",
        paper="arXiv 2501.03262",
        equation=f"-mean_it [{_CLIP} - kl_coef k2],  A = whiten(r - mean_g r)",
        slots={"advantage": "center_whitened", "aggregation": "token_mean", "kl": "k2", "kl_coef": 1e-3},
    ),
    "reinforce": Preset(
        summary="Plain REINFORCE: the raw reward times the log-probability, no baseline, no ratio",
        paper="Williams 1992",
        equation="-mean_i mean_t r lp",
        slots={"advantage": "raw", "surrogate": "policy_gradient", "aggregation": "sequence_mean"},
    ),
    "rgra": Preset(
        summary="GRPO without ratio and clip; meant for one optimizer step per batch",
        paper="arXiv 2603.18756",
        equation=f"-mean_i mean_t [A lp - kl_coef k3],  {_Z}",
        slots={
            "advantage": "group_std", "surrogate": "policy_gradient", "aggregation": "sequence_mean", "kl": "k3",
            "kl_coef": 0.04,
        },
    ),
    "bnpo": Preset(
        summary="Group-centered reward divided by a Beta density fitted to the groups' success rates",
        paper="arXiv 2506.02864",
        equation=f"-mean_i sum_t {_CLIP_HIGHER},  A = (r - p) / Beta(p; 1 + a/3, 1 + b/3), p = mean_g r",
        slots={"advantage": "beta_normalized", "aggregation": "sequence_sum", "clip_high": 0.28, "dual_clip": 10.0},
    ),
    "raft": Preset(
        summary="Likelihood of the correct rollouts",
        paper="arXiv 2504.11343",
        equation="-mean_it [max(r, 0) lp - kl_coef k3]",
        slots={"advantage": "positive_part", "surrogate": "policy_gradient", "kl": "k3", "kl_coef": 1e-3},
    ),
    "raft_pp": Preset(
        summary="RAFT++: the correct rollouts with ratio and clip",
        paper="arXiv 2504.11343",
        equation=f"-mean_it [{_CLIP} - kl_coef k3],  A = max(r, 0)",
        slots={"advantage": "positive_part", "dual_clip": 3.0, "kl": "k3", "kl_coef": 1e-3},
    ),
    "reinforce_rej": Preset(
        summary="Raw rewards, groups that are all right or all wrong have advantage 0 but stay in the count",
        paper="arXiv 2504.11343",
        equation=f"-mean_it [{_CLIP} - kl_coef k3],  A = r in groups that vary, else 0",
        slots={"selection": "reject", "advantage": "raw", "kl": "k3", "kl_coef": 1e-3},
    ),
    "reinforce_ada": Preset(
        summary="Up to four rounds per task until there are enough right and wrong rollouts, four kept in equal numbers",
        paper="arXiv 2510.04996",
        equation=f"-mean_it {_CLIP_HIGHER},  A = r - mean r of everything drawn for the task",
        slots={
            "selection": "ada_balanced", "subsample": "balanced", "correct_above": 0.7, "advantage": "group_center",
            "clip_high": 0.28, "dual_clip": 10.0, "entropy_coef": 1e-4,
        },
    ),
    "reinforce_ada_positive": Preset(
        summary="Up to four rounds per task until one rollout is right, four kept near the observed share",
        paper="arXiv 2510.04996",
        equation=f"-mean_it {_CLIP_HIGHER},  A = r - mean r of everything drawn for the task",
        slots={
            "selection": "ada_positive", "subsample": "proportional", "correct_above": 0.7, "advantage": "group_center",
            "clip_high": 0.28, "dual_clip": 10.0, "entropy_coef": 1e-4,
        },
    ),
    "topr": Preset(
        summary="Tapered off-policy REINFORCE: wrong rollouts count less once they have become unlikely; for old rollouts",
        paper="arXiv 2503.14286",
        equation="-mean_i mean_t w A lp,  A = +-1,  w = 1 if right, else sg[min(S, 1)], S = prod_t rho",
        slots={
            "advantage": "sign", "surrogate": "topr", "ratio": "sequence_product", "aggregation": "sequence_mean",
            "subsample": "positive_share", "positive_share": 0.15,
        },
    ),
    "psr": Preset(
        summary="Positive sample reinforcement: correct rollouts only",
        paper="arXiv 2506.01347",
        equation=f"-mean_it {_CLIP} over correct rollouts,  A = 1",
        slots={"subsample": "correct", "advantage": "sign"},
    ),
    "nsr": Preset(
        summary="Negative sample reinforcement: wrong rollouts only are made less likely",
        paper="arXiv 2506.01347",
        equation=f"-mean_it {_CLIP} over wrong rollouts,  A = -1",
        slots={"subsample": "wrong", "advantage": "sign"},
    ),
    "w_reinforce": Preset(
        summary="Both kinds, correct rollouts with a tenth of the weight",
        paper="arXiv 2506.01347",
        equation=f"-mean_it {_CLIP},  A = 0.1 if correct, else -1",
        slots={"advantage": "sign", "positive_weight": 0.1},
    ),
    "capo": Preset(
        summary="GRPO that learns from positive advantages alone in the first quarter of the run, then from both",
        paper="arXiv 2512.02580",
        equation=f"-mean_i mean_t [1[A >= 0 or past 25%] {_CLIP} - kl_coef k3],  {_Z}",
        slots={"advantage": "group_std", "aggregation": "sequence_mean", "positive_only_until": 0.25},
    ),
    "delight": Preset(
        summary="Delightful policy gradient: a gate of advantage times surprisal favours rare successes over rare failures",
        paper="arXiv 2603.14608",
        equation=f"-mean_it sg[sigmoid(-A lp / eta) A] lp,  {_Z}",
        slots={"advantage": "group_std", "surrogate": "delight"},
    ),
    "weighted_grpo": Preset(
        summary="GRPO whose negative advantages weigh twice after normalisation, for pairs of hard and easy tasks",
        paper="arXiv 2602.03452",
        equation=f"-mean_i mean_t [{_CLIP} - kl_coef k3],  {_Z}, times negative_weight where A < 0",
        slots={"advantage": "group_std", "aggregation": "sequence_mean", "negative_weight": 2.0},
    ),
    "gspo": Preset(
        summary="Length-normalised sequence ratio with a narrow clip",
        paper="arXiv 2507.18071",
        equation=f"-mean_i min(s A, clip(s, 1 - 3e-4, 1 + 4e-4) A),  s = exp(mean_t log rho),  {_Z}",
        slots={
            "advantage": "group_std", "ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "sequence_mean",
        },
    ),
    "luspo": Preset(
        summary="GSPO whose rollouts weigh as much as they are long",
        paper="arXiv 2602.05261",
        equation=f"-mean_i n min(s A, clip(s, 1 - 2e-3, 1 + 2.5e-3) A),  s = exp(mean_t log rho),  {_Z}",
        slots={
            "advantage": "group_std", "ratio": "sequence", "clip_low": 2e-3, "clip_high": 2.5e-3, "aggregation": "sequence_sum",
        },
    ),
    "cispo": Preset(
        summary="The capped ratio is a weight without gradient, so that every decision keeps its gradient",
        paper="arXiv 2506.13585",
        equation=f"-mean_it sg[min(rho, 5)] A lp,  {_Z}",
        slots={"advantage": "group_std", "surrogate": "cispo", "ratio_cap": 5.0},
    ),
    "scale_rl": Preset(
        summary="CISPO with the standard deviation of the whole batch",
        paper="arXiv 2510.13786",
        equation="-mean_it sg[min(rho, 5)] A lp,  A = (r - mean_g r) / (sd of all r + eps)",
        slots={"advantage": "batch_std", "surrogate": "cispo", "ratio_cap": 5.0},
    ),
    "stable_reinforce": Preset(
        summary="Ratio clamped before exp, whitened rewards without outliers beyond three deviations; groups of one are fine",
        paper="arXiv 2505.02835",
        equation=f"-mean_i mean_t [{_CLIP} - kl_coef k3],  log rho in +-ln 1000,  A = whiten(r), 0 where |A| > 3",
        slots={
            "advantage": "token_whitened", "advantage_ddof": 0, "advantage_limit": 3.0, "max_log_ratio": 6.907755278982137,
            "aggregation": "sequence_mean", "kl": "k3", "kl_coef": 1e-3,
        },
    ),
    "oreal": Preset(
        summary="One right and one wrong rollout of each solvable task: likelihood of the right, half the ratio of the wrong",
        paper="arXiv 2502.06781",
        equation="-mean over right of A lp - 0.5 mean over wrong of A rho + kl_coef mean_it k3,  A leave-one-out",
        slots={
            "selection": "pass_rate", "max_pass_rate": 0.8, "subsample": "pair", "advantage": "leave_one_out",
            "surrogate": "oreal", "negative_weight": 0.5, "aggregation": "sign_token_mean", "kl": "k3", "kl_coef": 0.01,
        },
    ),
    "loop": Preset(
        summary="Leave-one-out PPO without a critic; rollouts of almost no advantage are dropped",
        paper="arXiv 2502.01600",
        equation="-mean_i mean_t min(rho A, clip(rho, 1/1.1, 1.1) A),  A_i = r_i - mean of the others' r, |A| >= 0.01",
        slots={
            "advantage": "leave_one_out", "clip_low": 1 - 1 / 1.1, "clip_high": 0.1, "aggregation": "sequence_mean",
            "subsample": "advantage_floor",
        },
    ),
    "opo": Preset(
        summary="Length-weighted baseline, on-policy",
        paper="OPO",
        equation="-mean_it A lp,  A = r - sum_g(n r) / sum_g n",
        slots={"advantage": "length_baseline", "surrogate": "policy_gradient"},
    ),
    "gpg": Preset(
        summary="Group-centered policy gradient, scaled by the share of nonzero rewards",
        paper="arXiv 2504.02546",
        equation="-mean_it A lp,  A = (N / number of nonzero r) (r - mean_g r)",
        slots={"advantage": "gpg", "surrogate": "policy_gradient"},
    ),
    "gdpo": Preset(
        summary="Every reward term is z-scored in its group before the weighted sum, then the sum over the batch",
        paper="arXiv 2601.05242",
        equation=f"-mean_it {_CLIP},  A = z-score over the batch of sum_k w_k z-score_g r_k",
        slots={"advantage": "per_term_std", "advantage_eps": 1e-4},
    ),
    "lite_ppo": Preset(
        summary="Group mean, batch standard deviation, token-level mean",
        paper="arXiv 2508.08221",
        equation=f"-mean_it {_CLIP},  A = (r - mean_g r) / (sd of all r + eps)",
        slots={"advantage": "batch_std"},
    ),
    "sapo": Preset(
        summary="A soft sigmoid gate in place of the clip",
        paper="arXiv 2511.20347",
        equation=f"-mean_i mean_t (4/tau) sigmoid(tau (rho - 1)) A,  tau = 1 if A > 0 else 1.05,  {_Z}",
        slots={"advantage": "group_std", "surrogate": "sapo", "aggregation": "sequence_mean"},
    ),
    "gmpo": Preset(
        summary="Geometric mean of clipped token ratios",
        paper="arXiv 2507.20673",
        equation=f"-mean_i A exp(mean_t clipped log rho),  clipped at +-0.4 against the sign of A,  {_Z}",
        slots={
            "advantage": "group_std", "surrogate": "gmpo", "clip_low": 0.4, "clip_high": 0.4, "aggregation": "sequence_mean",
        },
    ),
    "vespo": Preset(
        summary="A smooth weight of the rollout's ratio that fades on both sides of 1",
        paper="arXiv 2602.10693",
        equation=f"-mean_it sg[S^k exp(lam (1 - S))] A lp,  S = prod_t rho, (k, lam) = (2, 3) if A >= 0 else (3, 2),  {_Z}",
        slots={"advantage": "group_std", "surrogate": "vespo", "ratio": "sequence_product"},
    ),
    "return_threshold": Preset(
        summary="Likelihood of the best tenth of the step's rollouts: success conditioning by a threshold on the return",
        paper="filtered behaviour cloning",
        equation="-mean_it lp over rollouts whose r is in the upper tenth",
        slots={
            "subsample": "return_threshold", "positive_share": 0.1, "advantage": "ones", "surrogate": "policy_gradient",
        },
    ),
    "sft": Preset(
        summary="Likelihood of demonstrations: supervised warm-up and behaviour cloning",
        paper="",
        equation="-mean_it lp over demonstrations",
        slots={
            "source": "demonstrations", "advantage": "ones", "surrogate": "policy_gradient", "aggregation": "token_mean",
        },
    ),
}  # fmt: skip
