"""Off-screen images of simulations, made lazily and cheaply where OpenGL runs in software.

Shadows, reflections and multisampling are off: on a machine without a GPU they cost 25 to 60 times the rest of the frame.
``MUJOCO_GL`` (``egl``, ``osmesa``, ``glfw``) chooses the back-end; without it a Linux machine that has no display uses EGL.

A process has one GL context, made by its first image and shared by all its renderers. It does not survive ``fork``, and belongs
to one thread; using it elsewhere is refused rather than left to hang.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import mujoco
import numpy as np
from numpy.typing import NDArray

from mmrl.errors import AdapterError, MissingExtra
from robotics.envs.physics import ArmPhysics

_OFF = tuple(
    int(flag)
    for flag in (
        mujoco.mjtRndFlag.mjRND_SHADOW,
        mujoco.mjtRndFlag.mjRND_REFLECTION,
        mujoco.mjtRndFlag.mjRND_HAZE,
        mujoco.mjtRndFlag.mjRND_FOG,
    )
)
_SKY = int(mujoco.mjtRndFlag.mjRND_SKYBOX)
_EVERYTHING = int(mujoco.mjtCatBit.mjCAT_ALL)


class SceneRenderer:
    """Draws simulations of one `ArmPhysics`. Nothing of OpenGL is touched before the first image."""

    def __init__(self, physics: ArmPhysics, *, width: int = 224, height: int = 224) -> None:
        self.physics, self.width, self.height = physics, width, height
        self._context: Any = None
        self._size = (0, 0)

    def render(self, camera: str = "scene", row: int = 0) -> NDArray[np.uint8]:
        """Simulation ``row`` seen by ``camera``, RGB ``[height, width, 3]``, with a sky: for people."""
        return self._draw([row], [camera], self.width, self.height, sky=True)[camera][0]

    def render_rows(
        self, rows: NDArray[np.int64], cameras: Sequence[str], *, width: int | None = None, height: int | None = None
    ) -> Mapping[str, NDArray[np.uint8]]:
        """Simulations ``rows`` seen by each camera: RGB ``[n, height, width, 3]`` by camera, without a sky: for policies.

        Raises `MissingExtra` where OpenGL is missing, and `AdapterError` in a process or thread that cannot draw.
        """
        return self._draw(rows, cameras, width or self.width, height or self.height, sky=False)

    def close(self) -> None:
        """Free what this renderer holds in the GL context; the next image makes it anew."""
        if self._context is not None and _Shared.owner == _here():
            _Shared.gl.make_current()
            self._context.free()
        self._context = None

    def _draw(
        self, rows: Sequence[int] | NDArray[np.int64], cameras: Sequence[str], width: int, height: int, *, sky: bool
    ) -> Mapping[str, NDArray[np.uint8]]:
        self._open(width, height)
        self._scene.flags[_SKY] = sky
        views = {camera: self._view(camera) for camera in cameras}
        images = {camera: np.empty((len(rows), height, width, 3), np.uint8) for camera in cameras}
        rectangle = mujoco.MjrRect(0, 0, width, height)
        model, data, scene = self.physics.model, self._data, self._scene
        for index, row in enumerate(rows):
            self.physics.copy_poses_to(int(row), data)
            for camera, view in views.items():
                mujoco.mjv_updateScene(model, data, self._options, None, view, _EVERYTHING, scene)
                mujoco.mjr_render(rectangle, scene, self._context)
                mujoco.mjr_readPixels(images[camera][index], None, rectangle, self._context)
        # OpenGL's first row is the bottom one
        return {camera: np.ascontiguousarray(image[:, ::-1]) for camera, image in images.items()}

    def _view(self, camera: str) -> mujoco.MjvCamera:
        view = mujoco.MjvCamera()
        view.type, view.fixedcamid = mujoco.mjtCamera.mjCAMERA_FIXED, self.physics.model.camera(camera).id
        return view

    def _open(self, width: int, height: int) -> None:
        model = self.physics.model
        _Shared.make_current(width, height)
        if self._context is None:
            model.vis.quality.offsamples = 0
            self._data = mujoco.MjData(model)
            self._scene, self._options = mujoco.MjvScene(model, maxgeom=model.ngeom + model.nsite + 20), mujoco.MjvOption()
            for flag in _OFF:
                self._scene.flags[flag] = 0
            self._context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_100.value)
            self._size = (0, 0)
        if width > self._size[0] or height > self._size[1]:
            self._size = (max(width, self._size[0]), max(height, self._size[1]))
            mujoco.mjr_resizeOffscreen(*self._size, self._context)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN.value, self._context)


def _here() -> tuple[int, int]:
    return os.getpid(), threading.get_ident()


class _Shared:
    """The GL context of this process."""

    gl: ClassVar[Any] = None
    owner: ClassVar[tuple[int, int] | None] = None

    @classmethod
    def make_current(cls, width: int, height: int) -> None:
        if cls.owner is None:
            cls.gl, cls.owner = _gl_context(width, height), _here()
        elif cls.owner[0] != os.getpid():
            raise AdapterError(
                f"process {cls.owner[0]} drew images before it forked this one ({os.getpid()}), and OpenGL does not survive a "
                "fork. Start workers with the method 'spawn' or 'forkserver', or draw nothing before they start."
            )
        elif cls.owner != _here():
            raise AdapterError("images were first drawn by another thread of this process; draw from that thread only.")
        cls.gl.make_current()


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
