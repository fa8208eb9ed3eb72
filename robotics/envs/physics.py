"""Physics of the house arm: answers named questions about many simulations at once, and moves them.

Nothing here knows a task, a reward or an instruction. Lengths are metres in the arm's base frame (x forward, y left, z up).
Joints are in the robot's units, those that LeRobot's SO-101 follower reports and takes: degrees for the five arm joints and
0 (closed) to 100 (open) for the gripper. ``S`` counts simulations, ``n`` the rows of one call, ``A`` = 6 joints.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import mujoco
import numpy as np
from mujoco.batch import Batch, SimulationError
from numpy.typing import NDArray

JOINTS = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper")
"""Names in LeRobot's order; the order of every joint array here."""

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
        self._batch = Batch(self.model, num_sims, num_threads)
        self._qpos, self._ctrl = self._batch.bind("qpos"), self._batch.bind("ctrl")
        self._mocap, self._sites = self._batch.bind("mocap_pos"), self._batch.bind("site_xpos")
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
        self.reset()

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

    def target_position(self, name: str) -> NDArray[np.float64]:
        """``[S, 3]``: where the mocap body ``target_<name>`` is, metres."""
        return self._mocap[:, self._mocap_row(name)].copy()

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

    def place(self, row: int, *, joints: NDArray[np.float64], targets: dict[str, NDArray[np.float64]]) -> None:
        """From the model's defaults, hold ``joints`` (``[A]``, robot units) at rest with targets at ``[3]`` positions."""
        ids = np.array([row])
        self._batch.reset(ids=ids, stage=_NO_STAGE)
        radians = self.to_radians(joints)
        self._qpos[row, self._joint_rows] = radians
        self._ctrl[row, self._actuators] = radians
        for name, position in targets.items():
            self._mocap[row, self._mocap_row(name)] = position
        self._batch.forward(ids=ids, stage=_POSITIONS)

    def push(self, row: int, body: str, force: NDArray[np.float64]) -> None:
        """Apply a force (``[3]``, newtons, world frame) to a body until it is replaced or the simulation is reset."""
        self._batch.bind("xfrc_applied")[row, self.model.body(body).id, :3] = force

    def advance(self, targets: NDArray[np.float64], rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Hold joint ``targets`` (``[n, A]``, robot units, clipped to the limits) for one control period.

        Returns ``[n]`` bool: which simulations are sound. One that diverged, or whose target is not a finite number, is put
        back to its state before the call; the others are not affected.
        """
        sound = np.isfinite(targets).all(axis=1)
        moving = rows[sound]
        before = self.states()
        self._batch.warning[:] = 0  # MuJoCo restarts a diverged simulation's counters, so only counts from zero can be read
        clipped = np.clip(targets[sound], self.joint_limits[:, 0], self.joint_limits[:, 1])
        self._ctrl[moving[:, None], self._actuators] = self.to_radians(clipped)
        raised = np.empty(0, np.int64)
        with _warnings_to_log():
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
        """Write one simulation into ``data``, derived quantities included, for rendering or for any ``mj_`` function."""
        self._batch.get_data(row, data)
        mujoco.mj_forward(self.model, data)

    def _mocap_row(self, name: str) -> int:
        return int(self.model.body(f"target_{name}").mocapid[0])


@contextmanager
def _warnings_to_log() -> Iterator[None]:
    """Send MuJoCo's warnings to the log instead of a MUJOCO_LOG.TXT in the working directory."""
    before = mujoco.get_mju_user_warning()
    mujoco.set_mju_user_warning(lambda message: _log.debug("MuJoCo: %s", message))
    try:
        yield
    finally:
        mujoco.set_mju_user_warning(before)
