"""Reward terms of reinforced attention learning without thinking (RAL-zero, arXiv 2602.04884)."""

from __future__ import annotations

import re
from collections.abc import Mapping

from mmrl.adapter import RewardTerm
from mmrl.chat import ChatTask, Completion


def answer_format(task: ChatTask, completion: Completion) -> float:
    """1.0 if the completion is exactly one non-empty ``<answer>...</answer>``, else 0.0."""
    text = completion.text.strip()
    once = all(text.count(tag) == 1 for tag in ("<answer>", "</answer>"))
    return float(once and re.fullmatch(r"<answer>\s*\S.*</answer>", text, flags=re.DOTALL) is not None)


RAL_TERMS: Mapping[str, RewardTerm] = {"answer_format": answer_format}
"""What vision runs may weight beside the terms of every text modality."""
