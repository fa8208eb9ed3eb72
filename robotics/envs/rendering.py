"""Off-screen images of a simulation, made lazily and cheaply where OpenGL runs in software.

Shadows, reflections and multisampling are off: on a machine without a GPU they cost 25 to 60 times the rest of the frame.
``MUJOCO_GL`` (``egl``, ``osmesa``, ``glfw``) chooses the back-end; without it a Linux machine that has no display uses EGL.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray

from mmrl.errors import MissingExtra
from robotics.envs.physics import ArmPhysics

_OFF = (mujoco.mjtRndFlag.mjRND_SHADOW, mujoco.mjtRndFlag.mjRND_REFLECTION)


class SceneRenderer:
    """Draws simulations of one `ArmPhysics`. The GL context is made by the first `render`, in the process that calls it."""

    def __init__(self, physics: ArmPhysics, *, width: int = 224, height: int = 224) -> None:
        self.physics, self.width, self.height = physics, width, height
        self._context: Any = None
        self._data: mujoco.MjData | None = None

    def render(self, camera: str = "scene", row: int = 0) -> NDArray[np.uint8]:
        """Simulation ``row`` seen by ``camera``, RGB ``[height, width, 3]``."""
        model = self.physics.model
        if self._context is None:
            self._open(model)
        self.physics.copy_to(row, self._data)
        view = mujoco.MjvCamera()
        view.type, view.fixedcamid = mujoco.mjtCamera.mjCAMERA_FIXED, model.camera(camera).id
        everything = mujoco.mjtCatBit.mjCAT_ALL.value
        mujoco.mjv_updateScene(model, self._data, mujoco.MjvOption(), None, view, everything, self._scene)
        self._gl.make_current()
        pixels = np.empty((self.height, self.width, 3), np.uint8)
        rectangle = mujoco.MjrRect(0, 0, self.width, self.height)
        mujoco.mjr_render(rectangle, self._scene, self._context)
        mujoco.mjr_readPixels(pixels, None, rectangle, self._context)
        return np.flipud(pixels).copy()  # OpenGL's first row is the bottom one

    def close(self) -> None:
        """Free the GL context; the next `render` makes a new one."""
        if self._context is not None:
            self._gl.make_current()
            self._context.free()
            self._gl.free()
            self._context = None

    def _open(self, model: mujoco.MjModel) -> None:
        model.vis.quality.offsamples = 0
        self._gl = _gl_context(self.width, self.height)
        self._gl.make_current()
        self._data = mujoco.MjData(model)
        self._scene = mujoco.MjvScene(model, maxgeom=1000)
        for flag in _OFF:
            self._scene.flags[int(flag)] = 0
        self._context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_100.value)
        mujoco.mjr_resizeOffscreen(self.width, self.height, self._context)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN.value, self._context)


def _gl_context(width: int, height: int) -> Any:
    wanted = os.environ.get("MUJOCO_GL", "").lower()
    headless = sys.platform == "linux" and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
    try:
        if wanted == "egl" or (not wanted and headless):
            from mujoco.egl import GLContext
        elif wanted == "osmesa":
            from mujoco.osmesa import GLContext
        else:
            GLContext = mujoco.GLContext  # the platform's own
        return GLContext(width, height)
    except (ImportError, RuntimeError, AttributeError) as error:
        raise MissingExtra(
            f"no OpenGL context for rendering (MUJOCO_GL is {wanted or 'not set'}): {error}. Install EGL (libegl1) or OSMesa "
            "(libosmesa6, with MUJOCO_GL=osmesa), or switch rendering off (rollout.media=false)."
        ) from error
