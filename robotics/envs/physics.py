"""Physics of the house arm: answers named questions about many simulations at once, and moves them.

Nothing here knows a task, a reward or an instruction. Lengths are metres in the arm's base frame (x forward, y left, z up).
Joints are in the robot's units, those that LeRobot's SO-101 follower reports and takes: degrees for the five arm joints and
0 (closed) to 100 (open) for the gripper. ``S`` counts simulations, ``n`` the rows of one call, ``A`` = 6 joints.

Objects fill named *slots*, the same in every scene. What a layout does not use is parked below the table, where it takes no
part in anything and is reported as `ABSENT`; the same happens to a block that falls off.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import mujoco
import numpy as np
from mujoco.batch import Batch, SimulationError
from numpy.typing import ArrayLike, NDArray

from mmrl.errors import DataError
from robotics.envs.perturbations import Push, forces_at, own_fields, scale_parameters

JOINTS = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper")
"""Names in LeRobot's order; the order of every joint array here."""
BLOCKS = ("red", "green", "blue", "yellow")
SLOTS = (*BLOCKS, "bowl", "zone", "drawer", "button")
"""Objects in the order of every observation."""
SLIDES = ("drawer", "button")
ABSENT = (0.2, 0.0, -0.15)
"""Where a slot is said to be that the scene lacks or the layout does not use, metres."""

_BODIES = {"bowl": "bowl", "zone": "zone", "drawer": "cabinet", "button": "button_base"}  # that are placed
_SITES = {"bowl": "bowl_floor", "drawer": "drawer_handle", "button": "button_top"}  # that say where they are
_BELOW = -0.1  # metres: deeper than this is parked
_PARKED = {name: np.array([0.2, 0.15 * i - 0.5, -0.5]) for i, name in enumerate(SLOTS)}
_NOTHING: Mapping[str, float] = {}
_log = logging.getLogger(__name__)
_POSITIONS = int(mujoco.mjtStage.mjSTAGE_POS)
_NO_STAGE = int(mujoco.mjtStage.mjSTAGE_NONE)
_DIVERGED = [
    int(kind)
    for kind in (
        mujoco.mjtWarning.mjWARN_BADQPOS,
        mujoco.mjtWarning.mjWARN_BADQVEL,
        mujoco.mjtWarning.mjWARN_BADQACC,
        mujoco.mjtWarning.mjWARN_BADCTRL,
    )
]


class ArmPhysics:
    """``num_sims`` simulations of one scene with the arm, stepped by ``mujoco.batch.Batch``.

    The result of a simulation depends on its own state and commands only: not on ``num_sims``, ``num_threads`` or its row.
    """

    def __init__(self, scene: Path, *, num_sims: int = 1, num_threads: int = 1, control_hz: float = 20.0) -> None:
        self.model = mujoco.MjModel.from_xml_path(str(scene))
        self.control_hz = control_hz
        self.num_substeps = round(1.0 / (control_hz * self.model.opt.timestep))
        self._num_threads = num_threads
        self._open(num_sims)
        self._gripper_site = self.model.site("gripper_site").id
        joints = [self.model.joint(name) for name in JOINTS]
        self._joint_rows = np.array([int(joint.qposadr[0]) for joint in joints])
        self._joint_dofs = np.array([int(joint.dofadr[0]) for joint in joints])
        self._actuators = np.array([self.model.actuator(name).id for name in JOINTS])
        ranges = np.array([joint.range for joint in joints])  # [A, 2] radians
        self._scale = np.full(len(JOINTS), 180.0 / np.pi)
        self._offset = np.zeros(len(JOINTS))
        low, high = ranges[-1]
        self._scale[-1], self._offset[-1] = 100.0 / (high - low), -100.0 * low / (high - low)
        self.joint_limits: NDArray[np.float64] = self.to_robot_units(ranges.T).T
        """``[A, 2]`` lowest and highest position of each joint, robot units."""
        bodies = {self.model.body(i).name for i in range(self.model.nbody)}
        self._blocks = {color: self.model.joint(f"block_{color}") for color in BLOCKS if f"block_{color}" in bodies}
        self._movable = {color: f"target_{color}" for color in BLOCKS if f"target_{color}" in bodies}
        self._movable |= {name: body for name, body in _BODIES.items() if body in bodies}
        self.slots: tuple[str, ...] = tuple(name for name in SLOTS if name in self._blocks or name in self._movable)
        """Slots that the scene has, in the order of `SLOTS`."""
        self._heights = np.array([int(joint.qposadr[0]) + 2 for joint in self._blocks.values()], np.int64)
        self._block_dofs = np.array([int(joint.dofadr[0]) for joint in self._blocks.values()], np.int64)
        self._block_bodies = np.array([int(joint.bodyid[0]) for joint in self._blocks.values()], np.int64)
        self.reset()

    def _open(self, num_sims: int) -> None:
        self._batch = Batch(self.model, num_sims, self._num_threads)
        self._qpos, self._ctrl = self._batch.bind("qpos"), self._batch.bind("ctrl")
        self._qvel, self._applied = self._batch.bind("qvel"), self._batch.bind("qfrc_applied")
        self._pushes = self._batch.bind("xfrc_applied")
        self._mocap, self._sites = self._batch.bind("mocap_pos"), self._batch.bind("site_xpos")

    @property
    def num_sims(self) -> int:
        return self._batch.nsim

    # Questions

    def joint_positions(self) -> NDArray[np.float64]:
        """``[S, A]``, robot units."""
        return self.to_robot_units(self._qpos[:, self._joint_rows])

    def gripper_position(self) -> NDArray[np.float64]:
        """``[S, 3]``: the point between the finger tips, metres."""
        return self._sites[:, self._gripper_site].copy()

    def slot_position(self, name: str) -> NDArray[np.float64]:
        """``[S, 3]`` metres: centre of a block, sphere, zone or the bowl's floor; the drawer's handle; the button's top."""
        self._check_slot(name)
        if name in self._blocks:
            start = int(self._blocks[name].qposadr[0])
            position = self._qpos[:, start : start + 3]
        elif name in _SITES:
            position = self._sites[:, self.model.site(_SITES[name]).id]
        else:
            position = self._mocap[:, self._mocap_row(name)]
        return np.where(position[:, 2:] < _BELOW, ABSENT, position)

    def block_yaw(self, color: str) -> NDArray[np.float64]:
        """``[S]`` radians in (-pi, pi]: how far a block is turned about the vertical; 0 for a sphere."""
        self._check_slot(color)
        if color not in self._blocks:
            return np.zeros(self.num_sims)
        start = int(self._blocks[color].qposadr[0]) + 3
        w, x, y, z = self._qpos[:, start : start + 4].T
        return np.arctan2(2.0 * (w * z + x * y), 1.0 - 2.0 * (y * y + z * z))

    def slide(self, name: str) -> NDArray[np.float64]:
        """``[S]`` metres: how far the ``drawer`` is open or the ``button`` is pressed."""
        self._check_slot(name)
        return self._qpos[:, int(self.model.joint(name).qposadr[0])].copy()

    def gripper_jacobian(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """``[n, 3, A]``: metres that the gripper moves per radian of each joint."""
        body = int(self.model.site_bodyid[self._gripper_site])
        linear, _ = self._batch.jac(body, self._sites[rows, self._gripper_site], ids=rows)
        return linear[:, :, self._joint_dofs]

    def to_robot_units(self, radians: NDArray[np.float64], *, difference: bool = False) -> NDArray[np.float64]:
        """Joint angles ``[..., A]``, or differences between angles, in robot units."""
        return radians * self._scale if difference else radians * self._scale + self._offset

    def to_radians(self, positions: NDArray[np.float64]) -> NDArray[np.float64]:
        """The inverse of `to_robot_units` for positions ``[..., A]``."""
        return (positions - self._offset) / self._scale

    def states(self, rows: NDArray[np.int64] | None = None) -> NDArray[np.float64]:
        """Copy of the ``mjSTATE_INTEGRATION`` rows, ``[n, num_state]``: all that the future of a simulation depends on."""
        return self._batch.state.copy() if rows is None else self._batch.state[rows]

    # Changes

    def reset(self) -> None:
        """Every simulation to the model's defaults, time, pushes (``xfrc_applied``), commands and warm start included."""
        self._batch.reset(stage=_POSITIONS)

    def restore(self, states: NDArray[np.float64], rows: NDArray[np.int64] | None = None) -> None:
        """Put saved states ``[n, num_state]`` into ``rows`` (all when absent) and bring the answers up to date."""
        self._batch.state[slice(None) if rows is None else rows] = states
        self._batch.forward(ids=rows, stage=_POSITIONS)

    def place(
        self,
        row: int,
        *,
        joints: NDArray[np.float64],
        positions: Mapping[str, NDArray[np.float64]],
        yaws: Mapping[str, float] = _NOTHING,
        slides: Mapping[str, float] = _NOTHING,
    ) -> None:
        """From the model's defaults, hold ``joints`` (``[A]``, robot units) at rest among the objects of ``positions``.

        ``positions`` are ``[3]`` metres by slot: centres of blocks, spheres and the zone, the point of the table under the
        bowl, under the handle of the closed drawer, or under the button. Slots that are not named are parked. ``yaws`` are
        radians by colour, ``slides`` metres by name.
        """
        ids = np.array([row])
        for name in (*positions, *yaws, *slides):
            self._check_slot(name)
        self._batch.reset(ids=ids, stage=_NO_STAGE)
        radians = self.to_radians(joints)
        self._qpos[row, self._joint_rows] = radians
        self._ctrl[row, self._actuators] = radians
        for name in self.slots:
            position = positions.get(name, _PARKED[name])
            if name in self._blocks:
                start, half = int(self._blocks[name].qposadr[0]), 0.5 * yaws.get(name, 0.0)
                self._qpos[row, start : start + 7] = [*position, np.cos(half), 0.0, 0.0, np.sin(half)]
            else:
                self._mocap[row, self._mocap_row(name)] = position
        for name, distance in slides.items():
            self._qpos[row, int(self.model.joint(name).qposadr[0])] = distance
        self._carry_parked(ids)
        self._batch.forward(ids=ids, stage=_POSITIONS)

    def settle(self, rows: NDArray[np.int64], num_steps: int) -> None:
        """Let things come to rest: ``num_steps`` control periods with the arm commanded to stay where it is commanded."""
        for _ in range(num_steps):
            self.advance(self.to_robot_units(self._ctrl[rows[:, None], self._actuators]), rows)

    def push(self, row: int, body: str, force: NDArray[np.float64]) -> None:
        """Apply a force (``[3]``, newtons, world frame) to a body until it is replaced or the simulation is reset."""
        self._pushes[row, self.model.body(body).id, :3] = force

    def apply_pushes(self, row: int, pushes: Sequence[Push], step: int) -> None:
        """Replace all forces on simulation ``row`` by those of ``pushes`` that act in control step ``step``."""
        self._pushes[row] = forces_at(self.model, pushes, step)

    def clear_pushes(self, rows: NDArray[np.int64]) -> None:
        """No forces on ``rows`` any more: MuJoCo itself keeps a force until it is replaced."""
        self._pushes[rows] = 0.0

    def set_parameters(self, rows: NDArray[np.int64], **scales: ArrayLike) -> None:
        """Give ``rows`` their own masses, friction, damping or servo strength; see `scale_parameters` for the names.

        Parameters are no part of a state: they stay with the row through `reset`, `place` and `restore`.
        """
        scale_parameters(self._batch, rows, **scales)
        self._batch.forward(ids=rows, stage=_POSITIONS)

    def parameters_reset(self) -> None:
        """Every simulation goes on with the model as it is in its file, bit for bit."""
        if own_fields(self._batch):
            states = self.states()
            self._open(self.num_sims)
            self.restore(states)

    def parameters(self, row: int) -> mujoco.MjModel:
        """The model that simulation ``row`` runs on. Not to be changed."""
        return self._batch.get_model(row) if own_fields(self._batch) else self.model

    def advance(self, targets: NDArray[np.float64], rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Hold joint ``targets`` (``[n, A]``, robot units, clipped to the limits) for one control period.

        Returns ``[n]`` bool: which simulations are sound. One that diverged, or whose target is not a finite number, is put
        back to its state before the call; the others are not affected.
        """
        sound = np.isfinite(targets).all(axis=1)
        moving = rows[sound]
        self._carry_parked(rows)
        before = self.states()
        self._batch.warning[:] = 0  # MuJoCo restarts a diverged simulation's counters, so only counts from zero can be read
        clipped = np.clip(targets[sound], self.joint_limits[:, 0], self.joint_limits[:, 1])
        self._ctrl[moving[:, None], self._actuators] = self.to_radians(clipped)
        raised = np.empty(0, np.int64)
        with warnings_to_log():
            try:
                self._batch.step(ids=moving, nstep=self.num_substeps, stage=_POSITIONS)
            except SimulationError as error:  # the simulations that it does not list ran to completion
                raised = error.ids
        warned = self._batch.warning[:, _DIVERGED, 1].any(axis=1)
        sound &= ~warned[rows] & ~np.isin(rows, raised)
        if not sound.all():
            self.restore(before[rows[~sound]], rows[~sound])
        return sound

    def copy_to(self, row: int, data: mujoco.MjData) -> None:
        """Write one simulation into ``data``, derived quantities included, for any ``mj_`` function."""
        self._batch.get_data(row, data)
        mujoco.mj_forward(self.parameters(row), data)

    def copy_poses_to(self, row: int, data: mujoco.MjData) -> None:
        """Write one simulation's state and where everything is into ``data``: all that an image needs, without dynamics."""
        self._batch.get_data(row, data)
        mujoco.mj_kinematics(self.model, data)
        mujoco.mj_camlight(self.model, data)

    def _carry_parked(self, rows: NDArray[np.int64]) -> None:
        """Hold the weight of parked blocks, so that they rest without a contact."""
        below = self._qpos[rows[:, None], self._heights] < _BELOW  # [n, blocks]
        masses = self._batch.expanded("body_mass")
        masses = self.model.body_mass[self._block_bodies] if masses is None else masses[rows[:, None], self._block_bodies]
        weights = -self.model.opt.gravity[2] * masses
        self._applied[rows[:, None], self._block_dofs + 2] = np.where(below, weights, 0.0)
        index, block = np.nonzero(below)
        self._qvel[rows[index, None], self._block_dofs[block][:, None] + np.arange(6)] = 0.0

    def _mocap_row(self, name: str) -> int:
        return int(self.model.body(self._movable[name]).mocapid[0])

    def _check_slot(self, name: str) -> None:
        if name not in self.slots:
            raise DataError(f"{name!r} is not in this scene; it has: {', '.join(self.slots)}.")


@contextmanager
def warnings_to_log() -> Iterator[None]:
    """Send MuJoCo's warnings to the log instead of a MUJOCO_LOG.TXT in the working directory."""
    before = mujoco.get_mju_user_warning()
    mujoco.set_mju_user_warning(lambda message: _log.debug("MuJoCo: %s", message))
    try:
        yield
    finally:
        mujoco.set_mju_user_warning(before)
