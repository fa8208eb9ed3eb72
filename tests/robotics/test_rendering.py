import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from mmrl.errors import AdapterError, MissingExtra
from robotics.assets import sim_asset
from robotics.envs import rendering
from robotics.envs.physics import BLOCKS, ArmPhysics
from robotics.envs.rendering import SceneRenderer

SCENE = sim_asset("tabletop/scene.xml")
OVER = np.array([0.0, 31.146, 1.056, 57.798, 0.0, 35.0])  # pointing down at 0.2 m, the fingers around a block on the table
COLORS = {"red": [1, 0, 0], "green": [0, 1, 0], "blue": [0, 0, 1], "yellow": [1, 1, 0]}


def arranged(num_sims=3):
    physics = ArmPhysics(SCENE, num_sims=num_sims)
    for row in range(num_sims):
        positions = {color: np.array([0.10 + 0.06 * k, (0.25, -0.15, -0.24)[row], 0.014]) for k, color in enumerate(BLOCKS)}
        physics.place(row, joints=OVER, positions=positions)
    return physics


@pytest.fixture(scope="module")
def drawn():
    physics = arranged()
    renderer = SceneRenderer(physics, width=96, height=64)
    try:
        renderer.render()
    except MissingExtra as error:
        pytest.skip(str(error))
    yield physics, renderer
    renderer.close()


def test_many_rows_and_cameras_are_what_each_is_alone(drawn):
    physics, renderer = drawn
    before, rows = physics.states(), np.array([2, 0])
    images = renderer.render_rows(rows, ["wrist", "scene"])
    assert list(images) == ["wrist", "scene"]
    for camera, image in images.items():
        assert image.shape == (2, 64, 96, 3) and image.dtype == np.uint8 and image.std() > 10.0
        for k, row in enumerate(rows):
            np.testing.assert_array_equal(image[k], renderer.render_rows(np.array([row]), [camera])[camera][0])
    assert not np.array_equal(images["scene"][0], images["scene"][1])
    other = SceneRenderer(physics, width=96, height=64)
    np.testing.assert_array_equal(other.render("scene", 1), renderer.render("scene", 1))
    other.close()
    np.testing.assert_array_equal(renderer.render_rows(rows, ["scene"])["scene"], images["scene"])
    np.testing.assert_array_equal(physics.states(), before)


def test_a_size_can_be_asked_for_and_does_not_leave_a_trace(drawn):
    _, renderer = drawn
    rows = np.array([0])
    small = renderer.render_rows(rows, ["scene"])["scene"]
    assert renderer.render_rows(rows, ["scene"], width=200, height=160)["scene"].shape == (1, 160, 200, 3)
    np.testing.assert_array_equal(renderer.render_rows(rows, ["scene"])["scene"], small)


def test_small_images_are_coarser_and_leave_the_model_and_large_images_alone(drawn):
    physics, renderer = drawn
    quality = physics.model.vis.quality
    before = (quality.numslices, quality.numstacks, quality.numquads, quality.offsamples)
    rows, draw = np.array([0]), lambda size: renderer.render_rows(np.array([0]), ["scene"], width=size, height=size)["scene"][0]
    large, small = draw(192), draw(128)
    np.testing.assert_array_equal(draw(192), large)  # whichever comes first
    np.testing.assert_array_equal(draw(128), small)
    people = renderer.render_rows(rows, ["scene"], width=128, height=128, sky=True)["scene"][0]
    differ = np.abs(people.astype(int) - small).max(axis=2)
    assert 0.0 < (differ > 24).mean() < 0.02  # outlines of round things
    assert differ.mean() < 8.0  # and a little shading
    assert (quality.numslices, quality.numstacks, quality.numquads, quality.offsamples) == before


def test_the_scene_camera_sees_every_block_where_it_is(drawn):
    physics, renderer = drawn
    model, size = physics.model, 128
    images = renderer.render_rows(np.arange(3), ["scene"], width=size, height=size)["scene"]
    camera = model.camera("scene")
    axes = np.empty(9)
    rendering.mujoco.mju_quat2Mat(axes, camera.quat)
    for color, row in ((color, row) for color in BLOCKS for row in range(3)):
        seen = axes.reshape(3, 3).T @ (physics.slot_position(color)[row] + [0.0, 0.0, 0.01] - camera.pos)
        scale = 0.5 * size / np.tan(np.deg2rad(camera.fovy[0]) / 2.0) / -seen[2]
        column, line = int(size / 2 + scale * seen[0]), int(size / 2 - scale * seen[1])
        patch = images[row, line - 2 : line + 3, column - 2 : column + 3].reshape(-1, 3).astype(float)
        wanted = np.array(COLORS[color], bool)
        assert (patch[:, wanted].min(axis=1) > 2.5 * patch[:, ~wanted].max(axis=1)).any(), (color, row)


def test_the_wrist_camera_sees_both_fingers_and_the_block_between_them():
    physics = ArmPhysics(SCENE)
    physics.place(0, joints=OVER, positions={"red": np.array([0.2, 0.0, 0.014])})
    np.testing.assert_allclose(physics.gripper_position()[0], [0.2, 0.0, 0.014], atol=0.01)
    renderer = SceneRenderer(physics)
    try:
        image = renderer.render_rows(np.array([0]), ["wrist"], width=64, height=64)["wrist"][0].astype(int)
    except MissingExtra as error:
        pytest.skip(str(error))
    finally:
        renderer.close()
    red = (image[..., 0] > 90) & (image[..., 1:].max(axis=-1) < 60)
    grey = (np.ptp(image, axis=-1) < 40) & (image.mean(axis=-1) > 80)
    assert red.sum() > 100 and abs(np.nonzero(red)[1].mean() - 32) < 6
    line = int(np.nonzero(red)[0].max())
    assert grey[line:, :28].sum() > 20 and grey[line:, 36:].sum() > 20


def test_memory_does_not_grow_with_resets_and_new_contexts(drawn):
    physics, _ = drawn

    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    def once():
        renderer = SceneRenderer(physics, width=64, height=64)
        physics.place(0, joints=OVER, positions={"red": np.array([0.2, 0.0, 0.014])})
        renderer.render_rows(np.array([0]), ["scene", "wrist"])
        renderer.close()

    for _ in range(10):
        once()
    before = resident()
    for _ in range(50):
        once()
    assert resident() - before < 10.0  # MiB


def test_another_thread_is_refused(drawn):
    _, renderer = drawn
    caught = []

    def draw():
        try:
            renderer.render()
        except AdapterError as error:
            caught.append(str(error))

    thread = threading.Thread(target=draw)
    thread.start()
    thread.join()
    assert len(caught) == 1 and "another thread" in caught[0]
    renderer.render()


FORKING = """
import os, sys
import numpy as np
from robotics.assets import sim_asset
from robotics.envs.physics import ArmPhysics
from robotics.envs.rendering import SceneRenderer

def in_child(renderer):
    pid = os.fork()
    if pid == 0:
        try:
            print("drew", renderer.render().std() > 5, flush=True)
        except Exception as error:
            print(type(error).__name__, error, flush=True)
        renderer.close()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0

renderer = SceneRenderer(ArmPhysics(sim_asset("tabletop/scene.xml")), width=64, height=64)
in_child(renderer)
renderer.render()
in_child(renderer)
renderer.render()
print("parent draws on")
"""


def test_a_renderer_survives_a_fork_before_its_first_image_and_is_refused_after_it(drawn):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKING], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    first, second, third = done.stdout.strip().splitlines()
    assert first == "drew True"
    assert second.startswith("AdapterError process") and "'spawn' or 'forkserver'" in second
    assert third == "parent draws on"


@pytest.mark.parametrize("backend", ["egl", "osmesa"])
def test_missing_opengl_names_what_to_install_and_the_way_out(backend, monkeypatch):
    monkeypatch.setenv("MUJOCO_GL", backend)
    monkeypatch.setitem(sys.modules, f"mujoco.{backend}", None)
    monkeypatch.setattr(rendering._Shared, "owner", None)
    monkeypatch.setattr(rendering._Shared, "gl", None)
    with pytest.raises(MissingExtra, match=r"libegl1.*libosmesa6.*rollout\.media=false"):
        SceneRenderer(ArmPhysics(SCENE)).render()
