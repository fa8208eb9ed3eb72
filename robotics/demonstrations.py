"""Demonstrations of a LeRobotDataset, as tasks to learn from and as frames with the commands that followed.

Axes: ``n`` rows of a call, ``F`` frames drawn of an episode, ``H`` commands of a chunk, ``A`` joints, ``L`` control steps.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np
from lerobot.utils.constants import ACTION, OBS_ENV_STATE, OBS_IMAGES, OBS_STATE, REWARD, SUCCESS
from numpy.typing import ArrayLike, NDArray

from mmrl.errors import DataError
from robotics import demonstration_checks as checks
from robotics.demonstration_files import CachedImages, RecordedFiles, read_files
from robotics.demonstration_format import CONTROL_MODE, MISTAKE, EpisodeInfo, read_provenance
from robotics.envs.families import FAMILIES, build_family
from robotics.rollouts import Episode
from robotics.tasks import RobotTask

_CACHE = 512 * 2**20  # bytes of decoded images, all cameras together
_UNKNOWN = "recorded"  # family of an episode of which only LeRobot's files tell
_log = logging.getLogger(__name__)


def open_demonstrations(
    path: Path,
    *,
    successes_only: bool = True,
    at_most: Mapping[str, int] | None = None,
    cameras: Mapping[str, tuple[int, int]] | None = None,
    environment_state: bool = False,
    allow_other_world: bool = False,
) -> DemonstrationSet:
    """Read the dataset at ``path`` for a policy that looks at ``cameras`` (height and width of each).

    ``environment_state`` says that the policy also reads the scene's state. A dataset of `mmrl demos` is replayed a little to
    see that it comes from the world that is here; ``allow_other_world`` skips that. Raises `DataError`, in one line, when the
    dataset cannot teach this policy.
    """
    cameras = dict(cameras or {})
    files = read_files(Path(path))
    checks.check_rate(files)
    checks.check_joints(files)
    if environment_state:
        checks.check_surroundings(files)
    checks.check_cameras(files, cameras)
    provenance = read_provenance(files.root)
    if provenance is None:
        infos = _what_lerobot_knows(files, successes_only)
        _log.info("%s does not say what world it was made in; it is taken as it is.", files.root)
    else:
        infos = provenance.episodes
        if [info.length for info in infos] != files.lengths.tolist():
            raise DataError(f"{files.root}: meta/mmrl.json is of another recording than meta/episodes; record again.")
        if not allow_other_world:
            checks.check_world(files, provenance, cameras)
    return DemonstrationSet(files, infos, successes_only=successes_only, at_most=at_most or {}, cameras=cameras)


class DemonstrationSet:
    """The usable episodes of a dataset: those that succeeded (when only they are wanted) and are not all mistake."""

    def __init__(
        self,
        files: RecordedFiles,
        infos: Sequence[EpisodeInfo],
        *,
        successes_only: bool,
        cameras: Mapping[str, tuple[int, int]],
        at_most: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self.files, self.columns = files, files.columns
        self.mistaken = files.columns.get(MISTAKE, np.zeros(len(files.columns["index"]), bool))
        usable = [info for info in infos if info.success or not successes_only]
        usable = [info for info in usable if not self.mistaken[self._frames(info.index)].all()]
        unknown = sorted(set(at_most) - {info.family for info in usable})
        if unknown:
            raise DataError(
                f"demonstrations.episodes names {', '.join(unknown)}; {files.root} has usable episodes of: "
                f"{', '.join(sorted({info.family for info in usable}))}."
            )
        seen: Counter[str] = Counter()
        for info in list(usable):
            seen[info.family] += 1
            if seen[info.family] > at_most.get(info.family, len(infos)):
                usable.remove(info)
        if not usable:
            raise DataError(
                f"{files.root}: none of {len(infos)} episodes succeeded; demonstrations.successes_only=false would use them."
                if successes_only
                else f"{files.root} has no usable episode among {len(infos)}."
            )
        self.tasks: tuple[RobotTask, ...] = tuple(
            RobotTask(
                id=f"{files.root.name}/episode-{info.index}",
                domain=info.family,
                family=info.family,
                goal=info.goal,
                instruction=info.instruction,
                seed=info.seed,
            )
            for info in usable
        )
        """One per usable episode; the domain is its family."""
        self._infos = {task.id: info for task, info in zip(self.tasks, usable)}
        self._cameras = {
            name: CachedImages(files.images(f"{OBS_IMAGES}.{name}"), size=tuple(size), capacity=_CACHE // len(cameras))
            for name, size in cameras.items()
        }
        taken = np.zeros(len(self.mistaken), bool)
        for info in usable:
            taken[self._frames(info.index)] = True
        self.constant = checks.constant_entries(files, taken)
        """Joints that never move in the usable episodes."""
        if self.constant:
            _log.warning(
                "%s: %s never moves. Normalisation here is by declared limits; statistics of the dataset would divide by zero.",
                files.root, ", ".join(self.constant),
            )  # fmt: skip

    def info(self, task: RobotTask) -> EpisodeInfo:
        """What is known of a task's episode."""
        if task.id not in self._infos:
            raise DataError(f"{task.id} is not an episode of {self.files.root}.")
        return self._infos[task.id]

    def draw(
        self, tasks: Sequence[RobotTask], *, num_frames: int, chunk_size: int, seeds: ArrayLike
    ) -> tuple[dict[str, NDArray], NDArray[np.float32], NDArray[np.int64]]:
        """``num_frames`` frames of each task's episode, without replacement, in order; row ``i`` depends on ``seeds[i]`` only.

        Returns observations ``[n, F, ...]`` under the world's names, the commands that followed ``[n, F, H, A]`` in robot
        units (after the end, the last one again), and ``[n, F]`` counts: H, or 0 where an episode has fewer frames. Frames
        whose chunk holds a marked mistake are not drawn, unless an episode has no others.
        """
        frames = np.zeros((len(tasks), num_frames), np.int64)
        ends, drawn = np.zeros(len(tasks), np.int64), np.zeros((len(tasks), num_frames), bool)
        for row, (task, seed) in enumerate(zip(tasks, np.asarray(seeds).tolist(), strict=True)):
            its = self._frames(self.info(task).index)
            choice = self._choose(its, num_frames, chunk_size, np.random.default_rng(seed))
            frames[row], drawn[row, : len(choice)], ends[row] = its.start, True, its.stop
            frames[row, : len(choice)] = choice
        observations = {"agent_pos": self.columns[OBS_STATE][frames]}
        if OBS_ENV_STATE in self.columns:
            observations["environment_state"] = self.columns[OBS_ENV_STATE][frames]
        for name, camera in self._cameras.items():
            images = np.zeros((*frames.shape, *camera.size, 3), np.uint8)
            images[drawn] = camera.read(frames[drawn])
            observations[f"pixels.{name}"] = images
        following = np.minimum(frames[..., None] + np.arange(chunk_size), ends[:, None, None] - 1)
        return observations, self.columns[ACTION][following], np.where(drawn, chunk_size, 0).astype(np.int64)

    def episode(self, task: RobotTask) -> Episode:
        """A task's recorded episode; its commands are the demonstrator's, and of the simulation's states nothing is known."""
        info = self.info(task)
        its = self._frames(info.index)
        known = build_family(info.family) if info.family in FAMILIES else None
        succeeded = self.columns[SUCCESS][its] if SUCCESS in self.columns else np.full(info.length, info.success)
        return Episode(
            tolerance=known.tolerance if known else float("nan"),
            max_env_steps=max(info.length, known.max_env_steps if known else 0),
            left=np.full(1 + info.length, np.nan),
            succeeded=np.append(False, succeeded),
            step_rewards=self.columns[REWARD][its].astype(np.float64) if REWARD in self.columns else np.zeros(info.length),
            commands=self.columns[ACTION][its].astype(np.float64),
            executed=np.zeros(0, np.int64),
            stop_reason="success" if info.success else "timeout",
            initial_state=np.empty(0),
            final_state=np.empty(0),
        )

    def _frames(self, episode: int) -> slice:
        start = int(self.files.starts[episode])
        return slice(start, start + int(self.files.lengths[episode]))

    def _choose(self, its: slice, num_frames: int, chunk_size: int, rng: np.random.Generator) -> NDArray[np.int64]:
        wrong = self.mistaken[its]
        ahead = np.concatenate([[0], np.cumsum(wrong)])
        until = np.minimum(np.arange(len(wrong)) + chunk_size, len(wrong))
        clean = np.flatnonzero(ahead[until] == ahead[:-1])
        choices = clean if len(clean) else np.flatnonzero(~wrong)
        return its.start + np.sort(rng.choice(choices, min(num_frames, len(choices)), replace=False))


def _what_lerobot_knows(files: RecordedFiles, successes_only: bool) -> tuple[EpisodeInfo, ...]:
    """Episodes of a dataset that `mmrl demos` did not write."""
    if successes_only and SUCCESS not in files.columns:
        raise DataError(
            f"{files.root} has no {SUCCESS}, so it is not known which episodes succeeded; set "
            "demonstrations.successes_only=false to use all."
        )
    last = files.starts + files.lengths - 1
    succeeded = files.columns[SUCCESS][last] if SUCCESS in files.columns else np.zeros(len(last), bool)
    return tuple(
        EpisodeInfo(
            index=index,
            family=_UNKNOWN,
            goal="",
            seed=0,
            instruction=files.instructions[index],
            length=int(files.lengths[index]),
            success=bool(succeeded[index]),
            control_mode=CONTROL_MODE,
        )
        for index in range(len(last))
    )
