"""What can be made different in one simulation of a batch: masses, friction, damping, servo strength, and pushes.

Strengths are multipliers over the model as it is in its file, since absolute values do not compare between models. ``S`` counts
simulations, ``n`` the rows of one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mujoco
import numpy as np
from mujoco.batch import MODEL_FIELDS, Batch
from numpy.typing import ArrayLike, NDArray

from mmrl.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Push:
    """A force on a body's centre of mass while control step ``start <= step < end``."""

    body: str
    force: tuple[float, float, float]
    """Newtons in the world frame."""
    start: int
    end: int


def scale_parameters(
    batch: Batch,
    rows: NDArray[np.int64],
    *,
    mass_scale: ArrayLike = 1.0,
    bodies: Sequence[str] | None = None,
    friction_scale: ArrayLike = 1.0,
    damping_scale: ArrayLike = 1.0,
    servo_scale: ArrayLike = 1.0,
) -> None:
    """Give ``rows`` their own model: each scale (a number or ``[n]``) multiplies the nominal values.

    ``mass_scale`` takes inertia along, of ``bodies`` (all when absent). ``friction_scale`` takes every geom, because a contact
    has the larger friction of its two. ``damping_scale`` is of the joints, ``servo_scale`` of the gains and the force limits.
    What is not named goes back to nominal. Constants that follow from masses are computed anew. Raises `DataError` for a scale
    that is not a positive number.
    """
    model = batch.model
    which = np.arange(model.nbody) if bodies is None else np.array([model.body(name).id for name in bodies], np.int64)
    scales = {
        "mass_scale": (mass_scale, {"body_mass": which, "body_inertia": which}),
        "friction_scale": (friction_scale, {"geom_friction": slice(None)}),
        "damping_scale": (damping_scale, {"dof_damping": slice(None)}),
        "servo_scale": (
            servo_scale,
            {"actuator_gainprm": slice(None), "actuator_biasprm": slice(None), "actuator_forcerange": slice(None)},
        ),
    }
    changed = False
    for name, (scale, fields) in scales.items():
        factors = np.broadcast_to(np.asarray(scale, np.float64), (len(rows),))
        if not (np.isfinite(factors).all() and (factors > 0.0).all()):
            raise DataError(f"{name} is {scale!r}; expected positive numbers, one or one for each of {len(rows)} rows.")
        for field, selection in fields.items():
            nominal = getattr(model, field)
            if (factors == 1.0).all() and batch.expanded(field) is None:
                continue  # a field of its own per simulation makes every step slower
            values = np.repeat(nominal[None], len(rows), axis=0)
            values[:, selection] *= factors.reshape(-1, *[1] * nominal.ndim)
            batch.expand(field)[rows] = values
            changed = True
    if changed:
        batch.set_const(rows)


def own_fields(batch: Batch) -> dict[str, NDArray[np.float64]]:
    """Model fields that simulations of ``batch`` have values of their own for, ``[S, ...]`` by name."""
    values = {name: batch.expanded(name) for name in sorted(MODEL_FIELDS)}
    return {name: value for name, value in values.items() if value is not None}


def forces_at(model: mujoco.MjModel, pushes: Sequence[Push], step: int) -> NDArray[np.float64]:
    """``[num_bodies, 6]``: the ``xfrc_applied`` of the pushes that act in control step ``step``."""
    forces = np.zeros((model.nbody, 6))
    for push in pushes:
        if push.start <= step < push.end:
            forces[model.body(push.body).id, :3] += push.force
    return forces
