"""Off-screen images of simulations, made lazily and cheaply where OpenGL runs in software.

Shadows, reflections and multisampling are off: on a machine without a GPU they cost 25 to 60 times the rest of the frame. In
small images round things have fewer faces, for which the eye of a policy has no pixels: that makes them two and a half times
as fast. Software rendering is told not to start threads of its own (``LP_NUM_THREADS=0``, unless it is set), which cost more
than they bring at such sizes.
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
_SMALL = 128  # pixels of the longer edge
_COARSE = {"numslices": 12, "numstacks": 8, "numquads": 2}


class SceneRenderer:
    """Draws simulations of one `ArmPhysics`. Nothing of OpenGL is touched before the first image."""

    def __init__(self, physics: ArmPhysics, *, width: int = 224, height: int = 224) -> None:
        self.physics, self.width, self.height = physics, width, height
        self._contexts: dict[bool, tuple[Any, tuple[int, int]]] = {}  # by whether coarse: a context and the size of its buffer

    def render(self, camera: str = "scene", row: int = 0) -> NDArray[np.uint8]:
        """Simulation ``row`` seen by ``camera``, RGB ``[height, width, 3]``, with a sky: for people."""
        return self._draw([row], [camera], self.width, self.height, sky=True)[camera][0]

    def render_rows(
        self,
        rows: NDArray[np.int64],
        cameras: Sequence[str],
        *,
        width: int | None = None,
        height: int | None = None,
        sky: bool = False,
    ) -> Mapping[str, NDArray[np.uint8]]:
        """Simulations ``rows`` seen by each camera: RGB ``[n, height, width, 3]`` by camera. Policies see no ``sky``.

        Raises `MissingExtra` where OpenGL is missing, and `AdapterError` in a process or thread that cannot draw.
        """
        return self._draw(rows, cameras, width or self.width, height or self.height, sky=sky)

    def close(self) -> None:
        """Free what this renderer holds in the GL context; the next image makes it anew."""
        if self._contexts and _Shared.owner == _here():
            _Shared.gl.make_current()
            for context, _ in self._contexts.values():
                context.free()
        self._contexts = {}

    def _draw(
        self, rows: Sequence[int] | NDArray[np.int64], cameras: Sequence[str], width: int, height: int, *, sky: bool
    ) -> Mapping[str, NDArray[np.uint8]]:
        context = self._open(width, height, coarse=not sky and max(width, height) <= _SMALL)
        self._scene.flags[_SKY] = sky
        views = {camera: self._view(camera) for camera in cameras}
        images = {camera: np.empty((len(rows), height, width, 3), np.uint8) for camera in cameras}
        rectangle = mujoco.MjrRect(0, 0, width, height)
        model, data, scene = self.physics.model, self._data, self._scene
        for index, row in enumerate(rows):
            self.physics.copy_poses_to(int(row), data)
            for camera, view in views.items():
                mujoco.mjv_updateScene(model, data, self._options, None, view, _EVERYTHING, scene)
                mujoco.mjr_render(rectangle, scene, context)
                mujoco.mjr_readPixels(images[camera][index], None, rectangle, context)
        # OpenGL's first row is the bottom one
        return {camera: np.ascontiguousarray(image[:, ::-1]) for camera, image in images.items()}

    def _view(self, camera: str) -> mujoco.MjvCamera:
        view = mujoco.MjvCamera()
        view.type, view.fixedcamid = mujoco.mjtCamera.mjCAMERA_FIXED, self.physics.model.camera(camera).id
        return view

    def _open(self, width: int, height: int, *, coarse: bool) -> Any:
        """A context that draws images of this size, and is current."""
        model = self.physics.model
        _Shared.make_current(width, height)
        if not self._contexts:
            self._data = mujoco.MjData(model)
            self._scene, self._options = mujoco.MjvScene(model, maxgeom=model.ngeom + model.nsite + 20), mujoco.MjvOption()
            for flag in _OFF:
                self._scene.flags[flag] = 0
        if coarse not in self._contexts:
            self._contexts[coarse] = (_new_context(model, coarse), (0, 0))
        context, size = self._contexts[coarse]
        if width > size[0] or height > size[1]:
            size = (max(width, size[0]), max(height, size[1]))
            mujoco.mjr_resizeOffscreen(*size, context)
            self._contexts[coarse] = (context, size)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN.value, context)
        return context


def _new_context(model: mujoco.MjModel, coarse: bool) -> Any:
    """The model's meshes on the GPU; how round they are is decided here, and the model is left as it was."""
    quality = model.vis.quality
    before = {name: getattr(quality, name) for name in ("offsamples", *_COARSE)}
    quality.offsamples = 0
    if coarse:
        for name, value in _COARSE.items():
            setattr(quality, name, value)
    try:
        return mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_100.value)
    finally:
        for name, value in before.items():
            setattr(quality, name, value)


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
    os.environ.setdefault("LP_NUM_THREADS", "0")
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
