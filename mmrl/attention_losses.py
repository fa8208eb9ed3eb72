"""Attention as a distribution, and how far two of them are apart: pure functions of tensors (arXiv 2602.04884).

Rows are those of `mmrl.attention`: ``[n, T, S]``, columns a row's own tokens from its first. Logarithms are natural.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

SMALLEST = 1e-8
"""Shares below this count as this in divergences and entropies, so that their logarithms are finite."""


def without_self(rows: Tensor, prompt_lengths: Tensor) -> Tensor:
    """Attention as a distribution over earlier tokens: the token's own column dropped, the rest renormalised; ``[n, T, S]``.

    Completion token ``t`` of row ``i`` stands in column ``prompt_lengths[i] + t``. Rows without any mass stay 0.
    """
    tokens = torch.arange(rows.shape[1], device=rows.device)
    own = prompt_lengths.to(rows.device)[:, None] + tokens
    columns = torch.arange(rows.shape[2], device=rows.device)
    kept = rows.masked_fill(columns == own[:, :, None], 0.0)
    return kept / kept.sum(dim=-1, keepdim=True).clamp(min=SMALLEST)


def jensen_shannon(p: Tensor, q: Tensor) -> Tensor:
    """``JSD = KL(p || m) / 2 + KL(q || m) / 2`` with ``m = (p + q) / 2``, over the last axis; 0 to ``ln 2``.

    Both are clamped at `SMALLEST` from below. Only ``p`` receives a gradient: ``dJSD/dp = log(p / m) / 2``, the other parts of
    the derivative cancel. They are left out, so that the gradient is exactly 0 where ``p`` equals ``q``.
    """
    p, q = p.float().clamp(min=SMALLEST), q.detach().float().clamp(min=SMALLEST)
    middle = (p.detach() + q) / 2
    to_p, to_q = (p.detach() / middle).log(), (q / middle).log()
    return (p * to_p + q * to_q).sum(dim=-1) / 2


def generalized_jensen_shannon(student_logits: Tensor, teacher_logits: Tensor, *, beta: float) -> Tensor:
    """GKD's divergence (arXiv 2306.13649) between token distributions over the last axis; the teacher has no gradient.

    ``beta KL(teacher || m) + (1 - beta) KL(student || m)`` with ``m = beta teacher + (1 - beta) student``; at its ends
    ``KL(teacher || student)`` (0) and ``KL(student || teacher)`` (1). Tokens of logit ``-inf`` in both count 0.
    """
    student, teacher = _log_shares(student_logits), _log_shares(teacher_logits.detach())
    if beta == 0:
        return _divergence(teacher, student)
    if beta == 1:
        return _divergence(student, teacher)
    middle = torch.logaddexp(teacher + math.log(beta), student + math.log(1 - beta))
    return beta * _divergence(teacher, middle) + (1 - beta) * _divergence(student, middle)


def row_entropy(p: Tensor) -> Tensor:
    """Entropy in nats over the last axis."""
    return -(p * p.clamp(min=SMALLEST).log()).sum(dim=-1)


def _log_shares(logits: Tensor) -> Tensor:
    """Log-probabilities; ``-inf`` becomes a number whose exponential is 0, since gradients of infinite differences are NaN."""
    return logits.float().log_softmax(dim=-1).clamp(min=-1e6)


def _divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """``KL(p || q)`` over the last axis."""
    return (log_p.exp() * (log_p - log_q)).sum(dim=-1)
