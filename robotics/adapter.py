"""The robot adapter: LeRobot policies in MuJoCo, behind `mmrl.adapter.Adapter`.

A decision (the ``T`` axis) is one look at the observation and the chunk of commands that follows from it, or each command of
that chunk (``rollout.decisions``). The policy is asked through the same LeRobot preprocessor and postprocessor that are saved
with it, so what is trained is what is deployed.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import torch
from lerobot.utils.constants import ACTION
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from mmrl.errors import AdapterError, ConfigError, DataError
from mmrl.types import Forward, Media, RolloutBatch, Sample
from robotics import checkpoints
from robotics.acting import ExpertDriver, Recorder, attempt, executed_counts, mask_executed, normal_draws
from robotics.assets import sim_asset
from robotics.config import LeRobotPolicySection, RoboticsRunConfig
from robotics.envs.families import FAMILIES, build_family
from robotics.envs.physics import JOINTS, ArmPhysics
from robotics.experts import make_expert
from robotics.inputs import EpisodeInputs
from robotics.media import SUFFIX, episode_caption, episode_video, find_encoder
from robotics.policies.building import as_chunk_policy, build_processors, cameras_of, new_policy, policy_config
from robotics.rewards import REWARDS
from robotics.rollouts import Episode, Limits, limits_of, run_episodes
from robotics.tasks import RobotTask, RobotTasks
from robotics.world import ArmWorld


class RoboticsAdapter:
    """See `mmrl.adapter.Adapter`."""

    reward_terms = REWARDS

    def __init__(self, config: RoboticsRunConfig) -> None:
        self.config = config
        others = [name for name in config.tasks.families if ":" in name]
        if others:
            raise ConfigError(
                f"tasks.families names {', '.join(others)}: policies for other people's worlds are not trained yet; run "
                "episodes in them with robotics.envs.wrapped.GymWorld and robotics.rollouts.run_episodes."
            )
        self.families = [build_family(name) for name in config.tasks.families]
        unknown = sorted(set(config.tasks.goals) - set(config.tasks.families))
        if unknown:
            raise ConfigError(
                f"tasks.goals names {', '.join(unknown)}, not among tasks.families: {', '.join(config.tasks.families)}."
            )
        noise = config.demonstrations.noise
        unknown = sorted(set(noise) - set(FAMILIES)) if isinstance(noise, dict) else []
        if unknown:
            raise ConfigError(f"demonstrations.noise names {', '.join(unknown)}; the families are: {', '.join(FAMILIES)}.")
        horizon, limit = config.rollout.execution_horizon, config.rollout.max_env_steps
        longest = max(limit or family.max_env_steps for family in self.families)
        self.max_decisions = -(-longest // horizon) * (horizon if config.rollout.decisions == "action" else 1)
        self._policy_config = policy_config(config.policy, num_joints=len(JOINTS), execution_horizon=horizon)
        limits = ArmPhysics(sim_asset(self.families[0].scene)).joint_limits
        self.preprocessor, self.postprocessor = build_processors(self._policy_config, limits, config.policy)
        self._cameras = cameras_of(self._policy_config)
        self._demonstrations = self._open_demonstrations()

    def build_policy(self) -> nn.Module:
        """A new policy, or that of ``policy.init_from``; new weights depend on the run's seed only."""
        policy = new_policy(copy.deepcopy(self._policy_config), seed=self.config.seed)
        if isinstance(self.config.policy, LeRobotPolicySection):
            from robotics.policies.lerobot_flow import prepare_policy

            prepare_policy(policy, self.config.policy)
        elif self.config.policy.init_from is not None:
            self.load_policy(policy, checkpoints.policy_directory(self.config.policy.init_from))
        return policy

    def freeze_reference(self, policy: nn.Module) -> Callable[[], AbstractContextManager[nn.Module]]:
        """Keep a copy of ``policy``."""
        frozen = copy.deepcopy(policy).eval().requires_grad_(False)
        return lambda: nullcontext(frozen)

    def task_source(self, split: str) -> Sequence[RobotTask]:
        """``train``, ``eval`` (other layouts) or ``eval_new_words`` (other layouts and other phrasings).

        With demonstrations from a dataset, ``train`` is its episodes.
        """
        section = self.config.tasks
        ranges = {"train": section.train, "eval": section.eval, "eval_new_words": section.eval}
        if split not in ranges:
            raise DataError(f"split {split!r} is not known; expected one of: {', '.join(ranges)}.")
        if split == "train" and self._demonstrations is not None:
            return self._demonstrations.tasks
        families = section.families if split == "train" else tuple(dict.fromkeys(section.families))  # drawn twice, asked once
        return RobotTasks(
            families,
            first_seed=ranges[split].first,
            num_layouts=ranges[split].count,
            goals=section.goals,
            held_out_words=split == "eval_new_words",
            spread=split != "train",
        )

    def rollout(
        self, policy: nn.Module, tasks: Sequence[RobotTask], *, group_size: int, seeds: Tensor, greedy: bool = False
    ) -> RolloutBatch:
        """One episode per rollout; the rollouts of a group start from one saved physics state.

        Tasks of one scene are simulated side by side, ``rollout.num_envs`` at a time.
        """
        if seeds.shape != (len(tasks) * group_size,):
            raise AdapterError(
                f"rollout: seeds has shape {tuple(seeds.shape)}; expected [P * group_size] = [{len(tasks) * group_size}]."
            )
        act = partial(
            attempt, as_chunk_policy(policy), self.preprocessor, self.postprocessor,
            group_size=group_size, greedy=greedy, make_world=self._world,
        )  # fmt: skip
        by_group = seeds.view(len(tasks), group_size)
        batches, order = [], []
        for chosen in self._in_scenes(tasks, max(1, self.config.rollout.num_envs // group_size)):
            part = [tasks[index] for index in chosen]
            its_seeds = by_group[chosen].flatten()
            rows = tuple(task for task in part for _ in range(group_size))
            episodes, density, inputs = act(part, seeds=its_seeds, limits=self._limits(rows))
            groups = torch.tensor(chosen).repeat_interleave(group_size)
            batches.append(self._batch(rows, groups, its_seeds, episodes, self._per_decision(density, inputs), inputs))
            order += groups.tolist()
        batch = RolloutBatch.concat(batches)
        return batch if order == sorted(order) else batch.select(torch.tensor(order).argsort(stable=True))

    def demonstrate(self, policy: nn.Module, tasks: Sequence[RobotTask], *, seeds: Tensor) -> RolloutBatch:
        """One episode per task: of the dataset, or of the family's scripted expert in simulation."""
        acting = as_chunk_policy(policy)
        if self._demonstrations is not None:
            return self._replay(acting, tasks, seeds)
        batches, order = [], []
        for chosen in self._in_scenes(tasks, self.config.rollout.num_envs):
            part = tuple(tasks[index] for index in chosen)
            world, limits = self._world(part), self._limits(part)
            expert = make_expert(world.physics, world.families, world.goals, chunk_size=acting.config.chunk_size)
            recorder = Recorder(acting, self.preprocessor, [task.instruction for task in part], limits.num_decisions)
            driver = ExpertDriver(
                acting, recorder, self.postprocessor,
                expert=expert, seeds=seeds[chosen], noise=torch.tensor([self._noise_of(task.family) for task in part]),
            )  # fmt: skip
            episodes = run_episodes(world, driver, limits)
            world.close()
            inputs = recorder.inputs(executed_counts(episodes))
            batches.append(self._batch(part, torch.tensor(chosen), seeds[chosen], episodes, None, inputs))
            order += chosen
        batch = RolloutBatch.concat(batches)
        return batch.select(torch.tensor(order).argsort()) if order != sorted(order) else batch

    def forward(self, policy: nn.Module, batch: RolloutBatch, needs: frozenset[str] = frozenset()) -> Forward:
        """Log-densities of the executed commands; ``needs`` may name ``"entropy"``."""
        unknown = needs - {"entropy"}
        if unknown:
            raise AdapterError(f"forward: {', '.join(sorted(unknown))} asked for; the robot adapter offers only: entropy.")
        inputs: EpisodeInputs = batch.inputs
        device = next(policy.parameters()).device
        observations, records, executed = inputs.decisions(device)  # only decisions that happened go through the network
        density, entropy = as_chunk_policy(policy).score(observations, records)
        taken = (inputs.executed > 0).to(device)

        def arranged(per_command: Tensor) -> Tensor:
            whole = per_command.new_zeros(*taken.shape, per_command.shape[1], dtype=torch.float32)
            whole[taken] = mask_executed(per_command, executed).float()
            return self._per_decision(whole, inputs)[:, : batch.loss_mask.shape[1]]

        return Forward(log_probs=arranged(density), entropy=arranged(entropy) if "entropy" in needs else None)

    def describe(self, batch: RolloutBatch, row: int) -> Sample:
        """The instruction, a line per decision, and with ``rollout.media`` a video: scene and wrist side by side, captioned.

        Without a video encoder, the first and last frame of the scene instead.
        """
        task, episode = batch.tasks[row], batch.outcomes[row]
        lines, step = [], 0
        for decision, count in enumerate(episode.executed[episode.executed > 0]):
            step += int(count)
            joints = " ".join(f"{value:.0f}" for value in episode.commands[step - 1])
            left = "" if np.isnan(episode.left[step]) else f", {100 * episode.left[step]:.1f} cm left"
            lines.append(f"{decision}: joints to [{joints}]{left}")
        lines.append(f"end: {episode.stop_reason} after {step} control steps")
        asked, outcome = episode_caption(task, episode)
        shown: tuple[Media, ...] = ()
        if self.config.rollout.media and len(episode.initial_state):
            if find_encoder() is None:
                shown = (self._frame(task, episode.initial_state, asked), self._frame(task, episode.final_state, outcome))
            else:
                data = episode_video(task, episode, size=self.config.rollout.image_size)
                shown = (Media(kind="video", data=data, suffix=SUFFIX, caption=outcome),)
        return Sample(prompt=task.instruction, completion="\n".join(lines), reference=f"{task.family} {task.goal}", media=shown)

    def save_policy(self, policy: nn.Module, directory: Path) -> None:
        """Write a LeRobot policy directory with its processors."""
        checkpoints.save_policy(policy, self.preprocessor, self.postprocessor, directory)

    def load_policy(self, policy: nn.Module, directory: Path) -> None:
        """Load weights strictly; see `robotics.checkpoints.load_policy`."""
        checkpoints.load_policy(policy, self.preprocessor, self.postprocessor, directory)

    def _in_scenes(self, tasks: Sequence[RobotTask], at_once: int) -> list[list[int]]:
        """Indices of tasks that are simulated together: those of one scene, at most ``at_once``."""
        scenes = {family.name: family.scene for family in self.families}
        by_scene: dict[str, list[int]] = {}
        for index, task in enumerate(tasks):
            by_scene.setdefault(scenes[task.family], []).append(index)
        return [rows[start : start + at_once] for rows in by_scene.values() for start in range(0, len(rows), at_once)]

    def _world(self, tasks: Sequence[RobotTask], *, group_size: int = 1) -> ArmWorld:
        return ArmWorld(tasks, group_size=group_size, num_threads=self.config.rollout.num_threads, cameras=self._cameras)

    def _limits(self, rows: Sequence[RobotTask]) -> Limits:
        section = self.config.rollout
        return limits_of(rows, execution_horizon=section.execution_horizon, max_env_steps=section.max_env_steps)

    def _batch(
        self, rows: tuple[RobotTask, ...], group_ids: Tensor, seeds: Tensor, episodes: Sequence[Episode],
        log_probs: Tensor | None, inputs: EpisodeInputs,
    ) -> RolloutBatch:  # fmt: skip
        mask = self._decision_mask(inputs.executed)
        width = int(mask.sum(dim=1).max())  # decisions of the longest episode
        old = torch.zeros(mask.shape) if log_probs is None else log_probs
        return RolloutBatch(
            tasks=rows,
            group_ids=group_ids,
            seeds=seeds,
            outcomes=tuple(episodes),
            old_log_probs=old[:, :width],
            loss_mask=mask[:, :width],
            stop_reasons=tuple(episode.stop_reason for episode in episodes),
            inputs=inputs,
            progress=self._progress(episodes, width),
        )

    def _progress(self, episodes: Sequence[Episode], width: int) -> Tensor:
        """``[N, width]`` share of the work done before each decision; NaN after the end, and where there is no measure."""
        stride = self.config.rollout.execution_horizon if self.config.rollout.decisions == "chunk" else 1
        done = torch.full((len(episodes), width), torch.nan)
        for row, episode in enumerate(episodes):
            before = episode.left[: episode.num_steps : stride]
            if episode.left[0] > 0:
                share = np.clip(1.0 - before / episode.left[0], -1.0, 1.0)
                done[row, : len(share)] = torch.from_numpy(share[:width]).float()
        return done

    def _decision_mask(self, executed: Tensor) -> Tensor:
        """``[N, T]`` decisions that were taken, or ``[N, T * H]`` commands that were executed."""
        if self.config.rollout.decisions == "chunk":
            return executed > 0
        return (torch.arange(self.config.rollout.execution_horizon) < executed[..., None]).flatten(1)

    def _per_decision(self, density: Tensor, inputs: EpisodeInputs) -> Tensor:
        """``[N, T]`` per chunk, or ``[N, T * H]`` per command, of densities ``[N, T, H]``; 0 where nothing was executed."""
        executed = inputs.executed.to(density.device)
        horizon = self.config.rollout.execution_horizon
        density = mask_executed(density, executed)
        return density.sum(dim=-1) if self.config.rollout.decisions == "chunk" else density[..., :horizon].flatten(1)

    def _noise_of(self, family: str) -> float:
        noise = self.config.demonstrations.noise
        return noise.get(family, 0.0) if isinstance(noise, dict) else noise

    def _open_demonstrations(self):
        section = self.config.demonstrations
        if section.path is None or self.config.algorithm.source != "demonstrations":
            return None
        from robotics.demonstrations import open_demonstrations

        return open_demonstrations(
            section.path,
            successes_only=section.successes_only,
            at_most=section.episodes,
            cameras=self._cameras,
            environment_state=self._policy_config.env_state_feature is not None,
            allow_other_world=section.allow_other_world,
        )

    def _replay(self, policy, tasks: Sequence[RobotTask], seeds: Tensor) -> RolloutBatch:
        """Frames drawn from recorded episodes, each with the commands that followed it."""
        num_frames, chunk_size = self.config.demonstrations.frames_per_episode, policy.config.chunk_size
        observations, chunks, counts = self._demonstrations.draw(
            tasks, num_frames=num_frames, chunk_size=chunk_size, seeds=seeds
        )
        recorder = Recorder(policy, self.preprocessor, [task.instruction for task in tasks], num_frames)
        noise = normal_draws(seeds, (num_frames, *policy.noise_shape()))
        rows = torch.arange(len(tasks))
        for frame in range(num_frames):
            seen = recorder.see(
                frame, rows, {name: value[:, frame] for name, value in observations.items()},
                **{ACTION: torch.from_numpy(chunks[:, frame]).float()},
            )  # fmt: skip
            recorder.note(frame, rows, policy.imitate(seen, seen.pop(ACTION), noise[:, frame]))
        executed = torch.from_numpy(counts).clamp(max=self.config.rollout.execution_horizon)
        episodes = [self._demonstrations.episode(task) for task in tasks]
        return self._batch(tuple(tasks), rows, seeds, episodes, None, recorder.inputs(executed))

    def _frame(self, task: RobotTask, state: NDArray[np.float64], caption: str) -> Media:
        size = self.config.rollout.image_size
        world = ArmWorld([task])
        world.restore(state[None])
        image = world.draw(np.array([0]), {"scene": (size, size)}, sky=True)["scene"][0]
        world.close()
        png = io.BytesIO()
        Image.fromarray(image).save(png, "PNG")
        return Media(kind="image", data=png.getvalue(), suffix=".png", caption=caption)


def build_adapter(config: RoboticsRunConfig) -> RoboticsAdapter:
    """The adapter of a run."""
    return RoboticsAdapter(config)


def check_without_weights(config: RoboticsRunConfig) -> list[tuple[str, str]]:
    """Shapes and a memory forecast, as ``(name, value)`` rows."""
    from robotics.policies.lerobot_planning import plan

    return plan(config, num_joints=len(JOINTS))
