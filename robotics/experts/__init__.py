"""Scripted experts: decision makers that know the scenes. They demonstrate tasks and show that they can be done. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from mmrl.errors import DataError
from robotics.envs.families import TaskFamily
from robotics.envs.physics import ArmPhysics
from robotics.experts.reach import ReachExpert
from robotics.experts.tabletop import TabletopExpert
from robotics.rollouts import Decide

__all__ = ["ReachExpert", "TabletopExpert", "make_expert"]


def make_expert(physics: ArmPhysics, families: Sequence[TaskFamily], goals: Sequence[str], *, chunk_size: int) -> Decide:
    """The expert for the simulations of ``physics``, each with a family and a goal of its own (``[S]`` both).

    It decides ``chunk_size`` commands at a time from observations alone, and keeps no memory between decisions.
    """
    scenes = {family.scene for family in families}
    if len(scenes) != 1:
        raise DataError(f"an expert acts in one scene; the families need {', '.join(sorted(scenes)) or 'none'}.")
    if families[0].name == "reach":
        return ReachExpert(physics, goals, chunk_size=chunk_size)
    return TabletopExpert(physics, families, goals, chunk_size=chunk_size)
