"""The robot adapter: LeRobot policies in MuJoCo, behind `mmrl.adapter.Adapter`.

A decision (the ``T`` axis) is one look at the observation and the chunk of joint motions that follows from it. The policy is
asked through the same LeRobot preprocessor and postprocessor that are saved with it, so what is trained is what is deployed.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
import torch
from lerobot.utils.constants import OBS_ENV_STATE, OBS_LANGUAGE_ATTENTION_MASK, OBS_LANGUAGE_TOKENS, OBS_STATE
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from mmrl.errors import AdapterError, DataError
from mmrl.types import Forward, Media, RolloutBatch, Sample
from robotics import checkpoints
from robotics.acting import ExpertDriver, PolicyDriver, Recorder
from robotics.assets import sim_asset
from robotics.config import RoboticsRunConfig
from robotics.envs.families import build_family
from robotics.envs.physics import JOINTS, ArmPhysics
from robotics.envs.rendering import SceneRenderer
from robotics.experts import EXPERTS
from robotics.inputs import EpisodeInputs
from robotics.policies import GaussianChunkPolicy, build_processors, entropy, log_density, policy_config, sum_executed
from robotics.rewards import REWARDS
from robotics.rollouts import Decide, Episode, arrange_groups, run_episodes
from robotics.tasks import RobotTask, RobotTasks


class RoboticsAdapter:
    """See `mmrl.adapter.Adapter`."""

    reward_terms = REWARDS

    def __init__(self, config: RoboticsRunConfig) -> None:
        self.config = config
        self.max_decisions = -(-config.rollout.max_env_steps // config.rollout.execution_horizon)
        self.family = build_family(config.tasks.family)
        self.goals = config.tasks.goals or self.family.goals
        unknown = [goal for goal in self.goals if goal not in self.family.goals]
        if unknown:
            raise DataError(
                f"tasks.goals names {', '.join(unknown)}, which {self.family.name} does not have; expected some of: "
                f"{', '.join(self.family.goals)}."
            )
        self._shown = self._physics(1)
        self._renderer = SceneRenderer(self._shown, width=config.rollout.image_size, height=config.rollout.image_size)
        self._policy_config = policy_config(
            config.policy, self.family, num_joints=len(JOINTS), execution_horizon=config.rollout.execution_horizon
        )
        self.preprocessor, self.postprocessor = build_processors(self._policy_config, self.family, self._shown.joint_limits)

    def build_policy(self) -> GaussianChunkPolicy:
        """A new policy; its weights depend on the run's seed only."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.config.seed)
            return GaussianChunkPolicy(copy.deepcopy(self._policy_config)).eval()

    def freeze_reference(self, policy: nn.Module) -> Callable[[], AbstractContextManager[nn.Module]]:
        """Keep a copy of ``policy``."""
        frozen = copy.deepcopy(policy).eval().requires_grad_(False)
        return lambda: nullcontext(frozen)

    def task_source(self, split: str) -> RobotTasks:
        """``train``, ``eval`` (other layouts) or ``eval_new_words`` (other layouts and other phrasings)."""
        section = self.config.tasks
        ranges = {"train": section.train, "eval": section.eval, "eval_new_words": section.eval}
        if split not in ranges:
            raise DataError(f"split {split!r} is not known; expected one of: {', '.join(ranges)}.")
        seeds, held_out_words = ranges[split], split == "eval_new_words"
        return RobotTasks(
            self.family, goals=self.goals, first_seed=seeds.first, num_layouts=seeds.count, held_out_words=held_out_words
        )

    def rollout(
        self, policy: nn.Module, tasks: Sequence[RobotTask], *, group_size: int, seeds: Tensor, greedy: bool = False
    ) -> RolloutBatch:
        """One episode per rollout; the rollouts of a group start from one saved physics state."""
        if seeds.shape != (len(tasks) * group_size,):
            raise AdapterError(
                f"rollout: seeds has shape {tuple(seeds.shape)}; expected [P * group_size] = [{len(tasks) * group_size}]."
            )
        rows = tuple(task for task in tasks for _ in range(group_size))
        physics = self._arranged(tasks, group_size)
        driver = PolicyDriver(policy, self._recorder(policy, rows), self.postprocessor, seeds=seeds, greedy=greedy)
        episodes = self._run(physics, rows, driver)
        executed = _executed(episodes)
        log_probs = driver.log_probs(executed)
        return self._batch(rows, group_size, seeds, episodes, log_probs, driver.recorder.inputs(executed))

    def demonstrate(self, policy: nn.Module, tasks: Sequence[RobotTask]) -> RolloutBatch:
        """One episode per task that follows the family's scripted expert, within what the policy's motions can do."""
        physics = self._arranged(tasks, 1)
        expert = EXPERTS[self.family.name](
            physics, self.family, [task.goal for task in tasks], chunk_size=policy.config.chunk_size
        )
        driver = ExpertDriver(policy, self._recorder(policy, tasks), self.postprocessor, expert=expert)
        episodes = self._run(physics, tasks, driver)
        executed = _executed(episodes)
        seeds, zeros = torch.zeros(len(tasks), dtype=torch.int64), torch.zeros(executed.shape)
        return self._batch(tuple(tasks), 1, seeds, episodes, zeros, driver.recorder.inputs(executed))

    def forward(self, policy: nn.Module, batch: RolloutBatch, needs: frozenset[str] = frozenset()) -> Forward:
        """Log-densities of the executed motions; ``needs`` may name ``"entropy"``."""
        unknown = needs - {"entropy"}
        if unknown:
            raise AdapterError(f"forward: {', '.join(sorted(unknown))} asked for; the robot adapter offers only: entropy.")
        mask, inputs = batch.loss_mask, batch.inputs
        device = next(policy.parameters()).device
        rows, steps = mask.nonzero(as_tuple=True)  # only decisions that happened go through the network
        words = inputs.words[rows].to(device)
        observation = {
            OBS_STATE: inputs.state[rows, steps].to(device),
            OBS_ENV_STATE: inputs.environment_state[rows, steps].to(device),
            OBS_LANGUAGE_TOKENS: words,
            OBS_LANGUAGE_ATTENTION_MASK: words > 0,
        }
        mean, log_std = policy.distribution(observation)
        executed = inputs.executed[rows, steps].to(device)
        density = sum_executed(log_density(inputs.motions[rows, steps].to(device), mean, log_std), executed)
        here = mask.to(device)
        log_probs = density.new_zeros(here.shape).masked_scatter(here, density.float())
        if "entropy" not in needs:
            return Forward(log_probs=log_probs)
        spread = (entropy(log_std) * executed).float()
        return Forward(log_probs=log_probs, entropy=spread.new_zeros(here.shape).masked_scatter(here, spread))

    def describe(self, batch: RolloutBatch, row: int) -> Sample:
        """The instruction, a line per decision, and the first and last frame (``rollout.media``)."""
        task, episode = batch.tasks[row], batch.outcomes[row]
        lines, step = [], 0
        for decision, count in enumerate(episode.executed[episode.executed > 0]):
            step += int(count)
            joints = " ".join(f"{value:.0f}" for value in episode.commands[step - 1])
            lines.append(f"{decision}: joints to [{joints}], {100 * episode.distances[step]:.1f} cm left")
        lines.append(f"end: {episode.stop_reason} after {step} control steps")
        frames = ()
        if self.config.rollout.media:
            frames = (
                self._frame(episode.initial_state, f"start: {task.instruction}"),
                self._frame(episode.final_state, f"{episode.stop_reason}, {100 * episode.distances[-1]:.1f} cm left"),
            )
        reference = f"{task.goal} (success within {100 * episode.tolerance:.0f} cm)"
        return Sample(prompt=task.instruction, completion="\n".join(lines), reference=reference, media=frames)

    def save_policy(self, policy: nn.Module, directory: Path) -> None:
        """Write a LeRobot policy directory with its processors."""
        checkpoints.save_policy(policy, self.preprocessor, self.postprocessor, directory)

    def load_policy(self, policy: nn.Module, directory: Path) -> None:
        """Load weights strictly; see `robotics.checkpoints.load_policy`."""
        checkpoints.load_policy(policy, self.preprocessor, self.postprocessor, directory)

    def _arranged(self, tasks: Sequence[RobotTask], group_size: int) -> ArmPhysics:
        physics = self._physics(len(tasks) * group_size)
        arrange_groups(physics, self.family, tasks, group_size)
        return physics

    def _recorder(self, policy: GaussianChunkPolicy, rows: Sequence[RobotTask]) -> Recorder:
        return Recorder(policy, self.preprocessor, [task.instruction for task in rows], self.max_decisions)

    def _run(self, physics: ArmPhysics, rows: Sequence[RobotTask], decide: Decide) -> list[Episode]:
        section = self.config.rollout
        return run_episodes(
            physics, self.family, [task.goal for task in rows], decide,
            max_env_steps=section.max_env_steps, execution_horizon=section.execution_horizon,
        )  # fmt: skip

    def _batch(
        self, rows: tuple[RobotTask, ...], group_size: int, seeds: Tensor, episodes: list[Episode], log_probs: Tensor,
        inputs: EpisodeInputs,
    ) -> RolloutBatch:  # fmt: skip
        mask = inputs.executed > 0
        width = int(mask.sum(dim=1).max())  # decisions of the longest episode
        return RolloutBatch(
            tasks=rows,
            group_ids=torch.arange(len(rows)) // group_size,
            seeds=seeds,
            outcomes=tuple(episodes),
            old_log_probs=log_probs[:, :width],
            loss_mask=mask[:, :width],
            stop_reasons=tuple(episode.stop_reason for episode in episodes),
            inputs=inputs,
        )

    def _physics(self, num_sims: int) -> ArmPhysics:
        threads = min(self.config.rollout.num_threads, num_sims)
        return ArmPhysics(sim_asset(self.family.scene), num_sims=num_sims, num_threads=threads)

    def _frame(self, state: NDArray[np.float64], caption: str) -> Media:
        self._shown.restore(state[None])
        png = io.BytesIO()
        Image.fromarray(self._renderer.render()).save(png, "PNG")
        return Media(kind="image", data=png.getvalue(), suffix=".png", caption=caption)


def _executed(episodes: Sequence[Episode]) -> Tensor:
    return torch.stack([torch.from_numpy(episode.executed) for episode in episodes])


def build_adapter(config: RoboticsRunConfig) -> RoboticsAdapter:
    """The adapter of a run."""
    return RoboticsAdapter(config)
