"""Runs of the scripted experts, and the LeRobotDataset that is made of them.

Episodes are run many at a time without images. Each is then replayed alone from its initial state and its commands, bit for
bit, to draw what the cameras saw, so no more than one episode's frames are ever in memory. Axes: ``N`` episodes of a world,
``L`` control steps of an episode, ``A`` joints.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import mujoco
import numpy as np
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from lerobot.utils.constants import ACTION, OBS_ENV_STATE, OBS_IMAGES, OBS_STATE, REWARD, SUCCESS
from numpy.typing import NDArray

from mmrl.errors import DataError
from robotics.demonstration_format import (
    COMMAND,
    JOINT_NAMES,
    MISTAKE,
    UNITS,
    EpisodeInfo,
    Provenance,
    features,
    write_provenance,
)
from robotics.demonstrators import Demonstrator, errs
from robotics.envs.families import build_family
from robotics.rollouts import Episode, limits_of, run_episodes
from robotics.tasks import FamilyTasks, RobotTask
from robotics.world import CONTROL_HZ, ArmWorld

_ATTEMPTS = 3  # per episode that is wanted


@dataclass(frozen=True, kw_only=True)
class Demonstration:
    """One episode as it was demonstrated, without images."""

    task: RobotTask
    episode: Episode
    """Its commands are what the robot was sent."""
    actions: NDArray[np.float32]
    """``[L, A]`` what the expert wanted."""
    agent_pos: NDArray[np.float32]
    """``[L, A]`` before each command."""
    environment_state: NDArray[np.float32]
    """``[L, E]`` before each command."""
    mistaken: NDArray[np.bool_]
    """``[L]``."""

    @property
    def success(self) -> bool:
        return self.episode.stop_reason == "success"

    @property
    def shows_how(self) -> bool:
        """It succeeded, and not in the middle of a mistake, which would show no recovery."""
        return self.success and not self.mistaken[-1]


def demonstration_task(tasks: FamilyTasks, number: int) -> RobotTask:
    """Task ``number`` to demonstrate: each has a layout of its own until all have been used, and goals take turns."""
    if number >= len(tasks):
        raise DataError(
            f"{tasks.family.name}: {tasks.num_layouts} layouts of {len(tasks.goals)} goals give {len(tasks)} tasks, fewer than "
            "demonstrations need; raise tasks.train.count."
        )
    turn, layout = divmod(number, tasks.num_layouts)
    return tasks[layout * len(tasks.goals) + (layout + turn) % len(tasks.goals)]


def demonstrate(
    tasks: Sequence[RobotTask], *, noise: float = 0.0, mistakes: float = 0.0, num_threads: int = 1
) -> list[Demonstration]:
    """The experts' attempts at ``tasks``, all of one scene, side by side; what comes out does not depend on who else runs."""
    erring = [task for task in tasks if errs(task, mistakes)]
    before = demonstrate(erring, noise=noise, num_threads=num_threads) if erring else []
    lengths = {demonstration.task.id: demonstration.episode.num_steps for demonstration in before}
    world = ArmWorld(tasks, num_threads=num_threads)
    limits = limits_of(tasks, execution_horizon=1)
    demonstrator = Demonstrator(world, tasks, limits, noise=noise, lengths=lengths)
    episodes = run_episodes(world, demonstrator, demonstrator.limits)
    world.close()
    return [
        Demonstration(
            task=task,
            episode=episode,
            actions=demonstrator.actions[row, : episode.num_steps].copy(),
            agent_pos=demonstrator.agent_pos[row, : episode.num_steps].copy(),
            environment_state=demonstrator.environment_state[row, : episode.num_steps].copy(),
            mistaken=demonstrator.mistaken[row, : episode.num_steps].copy(),
        )
        for row, (task, episode) in enumerate(zip(tasks, episodes))
    ]


def collect(
    tasks: FamilyTasks, count: int, *, keep_failures: bool, at_once: int,
    noise: float = 0.0, mistakes: float = 0.0, num_threads: int = 1,
) -> tuple[list[Demonstration], int]:  # fmt: skip
    """``count`` demonstrations of a family and how many attempts they took; what does not show how is dropped unless kept.

    Raises `DataError` when the expert fails so often that ``3 * count`` attempts do not suffice.
    """
    kept: list[Demonstration] = []
    tried = 0
    while len(kept) < count:
        if tried >= _ATTEMPTS * count:
            raise DataError(
                f"{tasks.family.name}: the expert succeeded in {len(kept)} of {tried} attempts; {count} were asked for. "
                "Ask for less noise, fewer mistakes or fewer episodes, or keep failures."
            )
        number = min(count - len(kept), at_once)
        attempts = demonstrate(
            [demonstration_task(tasks, i) for i in range(tried, tried + number)],
            noise=noise, mistakes=mistakes, num_threads=num_threads,
        )  # fmt: skip
        tried += number
        kept += [attempt for attempt in attempts if attempt.episode.sound and (keep_failures or attempt.shows_how)]
    return kept, tried


def grade(demonstrations: Sequence[Demonstration]) -> list[int]:
    """Quality 1 to 5 of each: its fifth among the successes of its family, by the mean rank of length and roughness.

    Roughness is the mean size of the second difference of the commands. A failure is 1.
    """
    qualities = [1] * len(demonstrations)
    for family in {demonstration.task.family for demonstration in demonstrations}:
        places = [i for i, each in enumerate(demonstrations) if each.task.family == family and each.success]
        if not places:
            continue
        episodes = [demonstrations[i].episode for i in places]
        lengths = np.array([episode.num_steps for episode in episodes])
        roughness = np.array([_roughness(episode.commands) for episode in episodes])
        worse = _shares_below(_shares_below(lengths) + _shares_below(roughness))
        for place, share in zip(places, worse):
            qualities[place] = 5 - int(min(4, share * 5))
    return qualities


def write_dataset(
    root: Path, demonstrations: Sequence[Demonstration], *, cameras: Mapping[str, tuple[int, int]], video: bool = False,
    noise: float = 0.0, mistakes: float = 0.0, report: Callable[[int], None] = lambda index: None,
) -> list[EpisodeInfo]:  # fmt: skip
    """Write ``demonstrations`` to a new folder ``root``; ``report`` is called with the number of episodes written.

    The folder appears when everything is in it; an interrupted run leaves ``<root>.partial``, which the next one replaces.
    """
    partial = root.with_name(f"{root.name}.partial")
    if partial.exists():
        shutil.rmtree(partial)
    root.parent.mkdir(parents=True, exist_ok=True)
    dataset = LeRobotDataset.create(
        f"mmrl/{root.name}",
        round(CONTROL_HZ),
        features(cameras, video=video),
        root=partial,
        robot_type="so101",
        use_videos=video,
        video_backend="pyav",
    )
    players: dict[str, Player] = {}
    infos = []
    for index, (demonstration, quality) in enumerate(zip(demonstrations, grade(demonstrations))):
        images: Mapping[str, NDArray[np.uint8]] = {}
        if cameras:
            scene = build_family(demonstration.task.family).scene
            player = players.setdefault(scene, Player(demonstration.task))
            images = player.draw(demonstration, cameras)
        _write_episode(dataset, demonstration, images)
        infos.append(_info(index, demonstration, quality))
        report(index + 1)
    for player in players.values():
        player.close()
    dataset.finalize()
    provenance = Provenance(
        mujoco=mujoco.__version__,
        control_hz=CONTROL_HZ,
        joints=JOINT_NAMES,
        units=UNITS,
        noise=noise,
        mistakes=mistakes,
        episodes=tuple(infos),
    )
    write_provenance(partial, provenance)
    shutil.rmtree(partial / "images", ignore_errors=True)  # LeRobot's workshop, empty by now
    if root.exists():
        shutil.rmtree(root)
    partial.rename(root)
    return infos


class Player:
    """Replays episodes of one scene, one at a time."""

    def __init__(self, task: RobotTask) -> None:
        self.world = ArmWorld([task])

    def draw(self, demonstration: Demonstration, cameras: Mapping[str, tuple[int, int]]) -> dict[str, NDArray[np.uint8]]:
        """``[L, H, W, 3]`` of each camera, before each command. Checks that the replay is the episode."""
        row = np.array([0])
        episode = demonstration.episode
        images = {name: np.empty((episode.num_steps, *size, 3), np.uint8) for name, size in cameras.items()}
        self.world.physics.restore(episode.initial_state[None])
        for step, command in enumerate(episode.commands):
            for name, image in self.world.draw(row, cameras).items():
                images[name][step] = image[0]
            self.world.advance(command[None], row)
        if not np.array_equal(self.world.physics.states()[0], episode.final_state):
            raise DataError(f"{demonstration.task.id}: the replay does not end in the state that the episode ended in.")
        return images

    def close(self) -> None:
        """Free what was opened to draw."""
        self.world.close()


def _write_episode(dataset: LeRobotDataset, demonstration: Demonstration, images: Mapping[str, NDArray[np.uint8]]) -> None:
    episode = demonstration.episode
    for step in range(episode.num_steps):
        dataset.add_frame(
            {
                OBS_STATE: demonstration.agent_pos[step],
                OBS_ENV_STATE: demonstration.environment_state[step],
                **{f"{OBS_IMAGES}.{name}": frames[step] for name, frames in images.items()},
                ACTION: demonstration.actions[step],
                COMMAND: episode.commands[step].astype(np.float32),
                REWARD: episode.step_rewards[step : step + 1].astype(np.float32),
                SUCCESS: episode.succeeded[step + 1 : step + 2],
                MISTAKE: demonstration.mistaken[step : step + 1],
                "task": demonstration.task.instruction,
            }
        )
    dataset.save_episode()


def _info(index: int, demonstration: Demonstration, quality: int) -> EpisodeInfo:
    task = demonstration.task
    return EpisodeInfo(
        index=index,
        family=task.family,
        goal=task.goal,
        seed=task.seed,
        instruction=task.instruction,
        length=demonstration.episode.num_steps,
        success=demonstration.success,
        quality=quality,
        mistake=bool(demonstration.mistaken.any()),
    )


def _roughness(commands: NDArray[np.float64]) -> float:
    return float(np.abs(np.diff(commands, n=2, axis=0)).mean()) if len(commands) > 2 else 0.0


def _shares_below(values: NDArray) -> NDArray[np.float64]:
    """For each value, the share of all values that are smaller; ties count half."""
    smaller = (values[:, None] > values).mean(axis=1)
    return smaller + 0.5 * ((values[:, None] == values).mean(axis=1) - 1.0 / len(values))
