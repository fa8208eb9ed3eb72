"""The training loop: collect, update, log, evaluate, checkpoint. It names no modality and no method."""

from __future__ import annotations

import math
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import Tensor, nn

from mmrl import checkpoint, processes, recipe
from mmrl.adapter import Adapter
from mmrl.collection import Collected, collect
from mmrl.config import RunConfig, _flatten, differences, validate
from mmrl.errors import CheckpointError, ConfigError, NumericsError, ParityError, RewardError
from mmrl.evaluation import check_metric, evaluate
from mmrl.illustrations import illustrate
from mmrl.parity import compare
from mmrl.pools import build_sampler
from mmrl.prompting import require_conversations
from mmrl.replay import PassLog, decision_labels, decision_record
from mmrl.reward_watch import RewardWatch, form_terms
from mmrl.rewards import failure_totals, judged_terms, resolve_terms
from mmrl.run_dir import RunDirectory
from mmrl.types import RolloutBatch
from mmrl.update import Updater

MAY_CHANGE = (
    "trainer.num_steps", "trainer.num_threads", "trainer.max_constant_steps", "trainer.parity.", "evaluation.", "checkpoint.",
    "metrics.", "output_dir", "name",
)  # fmt: skip
"""Keys (or prefixes of keys) that may differ between a checkpoint and the run that resumes it."""


@dataclass(frozen=True, kw_only=True)
class Callbacks:
    """What a caller hears of; the command line prints, tests listen."""

    on_step: Callable[[int, Mapping[str, float], Mapping[str, float]], None] = lambda step, metrics, seconds: None
    on_evaluation: Callable[[int, Mapping[str, Any]], None] = lambda step, result: None
    on_progress: Callable[[str, int, int], None] = lambda what, done, total: None
    on_notice: Callable[[str], None] = lambda text: None


class Trainer:
    """Trains one policy as one config says."""

    def __init__(self, config: RunConfig, adapter: Adapter, *, callbacks: Callbacks = Callbacks(), cpu: bool = False) -> None:
        if config.trainer.num_threads:
            torch.set_num_threads(config.trainer.num_threads)
        self.config, self.adapter, self.callbacks = config, adapter, callbacks
        self.accelerator = Accelerator(
            mixed_precision="bf16" if config.trainer.precision == "bfloat16" else "no",
            log_with=list(config.metrics.trackers) or None,
            project_dir=str(config.run_dir / "trackers"),
            kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
            cpu=cpu,
        )
        parts = self.accelerator.num_processes * config.trainer.minibatches
        if config.sampling.tasks_per_step % parts:
            raise ConfigError(
                f"sampling.tasks_per_step is {config.sampling.tasks_per_step}; expected a multiple of {parts} (processes times "
                "trainer.minibatches), since groups are never split."
            )
        self.terms = resolve_terms(config.rewards, adapter.reward_terms, lambda: adapter.task_source("train"))
        weights = {name: term.weight for name, term in self.terms.items()}
        self.watch = RewardWatch(weights, forms=form_terms(self.terms), window=config.metrics.reward_window)
        check_metric(config.evaluation.metric, self.terms)
        self.policy = adapter.build_policy().to(self.accelerator.device)
        self.reference = adapter.freeze_reference(self.policy) if recipe.needs_reference(config.algorithm) else None
        self.updater = Updater(config, adapter, self.policy, self.accelerator)
        self.sampler = build_sampler(config.sampling, adapter.task_source("train"), config.seed)
        require_conversations(config, self.sampler.source)
        self.run_dir = RunDirectory(config.run_dir)
        self.train_step = 0
        self.constant_steps = 0
        self.evaluated: dict[str, Any] | None = None
        """Step and mean of the last evaluation."""
        self.best: dict[str, Any] | None = None
        """Name and mean of the checkpoint with the best evaluation."""
        self._saved_step: int | None = None
        self._stop: str | None = None

    def run(
        self, *, resume: bool = False, resume_from: Path | None = None, overwrite: bool = False
    ) -> dict[int, dict[str, Any]]:
        """Train to the end, or until a signal; the evaluations by train step."""
        try:
            if self._is_main:
                self.run_dir.prepare(resume=resume, overwrite=overwrite)
            self.accelerator.wait_for_everyone()
            if resume:
                self._restore(resume_from or checkpoint.latest_checkpoint(self.run_dir.checkpoints))
            if self._is_main:
                self.run_dir.write_config(self.config)
            if self.config.metrics.trackers:
                values = _flatten(self.config.model_dump(mode="json"))
                texts = {key: str(value) for key, value in values.items()}  # tensorboard takes neither lists nor sections
                self.accelerator.init_trackers(self.config.name, config=texts)
            num_tasks, tasks_per_step = len(self.sampler.source), self.config.sampling.tasks_per_step
            if num_tasks < tasks_per_step:
                self.callbacks.on_notice(f"{num_tasks} tasks for {tasks_per_step} a step: some are attempted twice in a step.")
            with self._signals():
                self._loop()
        finally:
            if self.config.metrics.trackers:
                self.accelerator.end_training()
            self.run_dir.release()
        return self.run_dir.read_evaluations()

    def check(self) -> dict[str, float]:
        """One rollout and one update, nothing written: the metrics of that step."""
        collected = self._collect()
        return processes.means(self.accelerator, {**collected.totals, **self.updater.update(collected)})

    def _loop(self) -> None:
        """Evaluate, save and step in turn. A request to stop is heard before and after each of them, by all processes alike."""
        while True:
            if (self._exhausted or self._heard_stop() is None) and self._evaluation_is_due():
                with self._saved_if_a_reward_fails():
                    self._evaluate()
            stop = self._heard_stop()
            ended = stop is not None or self.train_step >= self.config.trainer.num_steps
            if ended or self._is_due(self.config.checkpoint.every):
                self._save()
            if ended:
                break
            self._step()
        if stop is not None:
            self.callbacks.on_notice(f"{stop}: stopped after step {self.train_step}; checkpoint written.")

    def _step(self) -> None:
        start = time.perf_counter()
        with self._saved_if_a_reward_fails():
            collected = self._collect()
        parity = self._check_parity(collected)
        middle = time.perf_counter()
        sampled = self.config.algorithm.source == "rollouts"  # demonstrations have no earlier probability to compare with
        passes = PassLog(limit=self.config.algorithm.max_log_ratio if sampled else math.inf)
        records = self.config.metrics.replay and self._samples_are_due(self.train_step + 1)
        try:
            with passes.listening(self.updater.model):
                totals = {**collected.totals, **parity, **self.updater.update(collected)}
        except NumericsError as error:
            if self._is_main:
                self._write_samples(self.train_step + 1, collected, len(collected.batch), passes)
            raise NumericsError(f"{error}{self._dump('numerics', error)}") from error
        if passes.num_extreme:
            self.callbacks.on_notice(f"step {self.train_step + 1}: {passes.extreme_note(self.adapter, collected.batch)}")
        totals["ratio/extreme"] = (passes.num_extreme, passes.num_decisions)
        metrics = processes.means(self.accelerator, totals)
        seconds = {"rollout_s": middle - start, "update_s": time.perf_counter() - middle, "step_s": time.perf_counter() - start}
        self.train_step += 1
        if self._is_main:
            self.run_dir.log_metrics(self.train_step, metrics)
            self.run_dir.log_timing(self.train_step, seconds)
            if self._samples_are_due(self.train_step):
                limit = self.config.metrics.samples_per_step
                self._write_samples(self.train_step, collected, limit, passes if records else None)
        if self.config.metrics.trackers:
            self.accelerator.log({**metrics, **seconds}, step=self.train_step)
        self.callbacks.on_step(self.train_step, metrics, seconds)
        for warning in self.watch.observe(metrics):
            self.callbacks.on_notice(f"step {self.train_step}: {warning}")
        self.constant_steps = 0 if metrics["groups/informative"] > 0 else self.constant_steps + 1
        if self._exhausted:
            self._stop = f"no group carried signal in {self.constant_steps} steps (trainer.max_constant_steps)"

    def _collect(self) -> Collected:
        judged = judged_terms(self.terms)
        for term in judged:
            term.begin_step(self.train_step + 1)
        failure_totals(self.terms)  # those of an evaluation are not this step's
        with self.accelerator.autocast():  # in the precision of the update, or the ratio would not start at 1
            collected = collect(
                self.config,
                self.adapter,
                self.policy,
                self.sampler,
                self.terms,
                self.accelerator,
                train_step=self.train_step + 1,
                reference_log_probs=self._reference_log_probs if self.reference is not None else None,
            )
        totals = processes.add(collected.totals, failure_totals(self.terms), *(term.totals() for term in judged))
        return replace(collected, totals=totals)

    @torch.no_grad()
    def _log_probs(self, policy: nn.Module, batch: RolloutBatch) -> Tensor:
        """``[N, T]`` under ``policy``, in the micro-batches of the update."""
        result = torch.zeros(batch.old_log_probs.shape)
        everything = torch.arange(len(batch))
        for rows in self.updater.micro_batches(batch, everything, batch.loss_mask.any(dim=1)):
            part = batch.select(rows)
            result[rows, : part.loss_mask.shape[1]] = self.adapter.forward(policy, part).log_probs.float().cpu()
        return result

    def _reference_log_probs(self, batch: RolloutBatch) -> Tensor:
        with self.reference() as policy:
            return self._log_probs(policy, batch)

    def _check_parity(self, collected: Collected) -> processes.Totals:
        """Where it is due: compare recorded log-probabilities with the trainer's; on a breach keep the step and stop."""
        section, batch, step = self.config.trainer.parity, collected.batch, self.train_step + 1
        due = section.every > 0 and (step == 1 or step % section.every == 0)
        if not due or self.config.algorithm.source == "demonstrations":
            return {}
        with self.accelerator.autocast():
            log_probs = self._log_probs(self.policy, batch)
        found = compare(batch, log_probs, tolerance=section.tolerance)
        failure = None
        if found.breach is not None:
            what = decision_labels(self.adapter, batch, found.breach.row)[found.breach.decision]
            failure = ParityError(found.breach.message(section.tolerance, what))
        if any(processes.gather(self.accelerator, failure is not None)) and self._is_main:
            seen = PassLog()
            seen.note(batch, log_probs)
            self._write_samples(step, collected, len(batch), seen)
        try:
            processes.raise_together(self.accelerator, failure)
        except ParityError as error:
            seen_at = f"mmrl replay {self.run_dir.path} --step {step}"
            raise ParityError(f"{error}{self._dump('parity', error)} See: {seen_at}") from error
        return found.totals

    def _evaluate(self) -> None:
        with self.accelerator.autocast():
            result = evaluate(
                self.adapter,
                self.policy,
                self.adapter.task_source(self.config.evaluation.split),
                self.terms,
                self.config.evaluation,
                accelerator=self.accelerator,
                on_batch=lambda done, total: self.callbacks.on_progress("evaluate", done, total),
            )
        if self._is_main:
            self.run_dir.write_evaluation(self.train_step, result)
            if count := self.config.evaluation.num_illustrated:
                source = self.adapter.task_source(self.config.evaluation.split)
                tasks = [source[index] for index in range(min(count, len(source)))]
                with self.accelerator.autocast():
                    illustrate(self.run_dir.path, self.train_step, self.adapter, self.policy, tasks)
        self.evaluated = {"train_step": self.train_step, "mean": result["overall"]["mean"]}
        if self._saved_step == self.train_step:  # a signal put this evaluation off until the run was resumed
            self._note_best()
        self.callbacks.on_evaluation(self.train_step, result)

    def _note_best(self) -> None:
        """Call before the checkpoint of this step is written, or once it is there and has been evaluated."""
        if self.evaluated is not None and self.evaluated["train_step"] == self.train_step:
            mean = self.evaluated["mean"]
            if mean is not None and (self.best is None or mean > self.best["mean"]):
                self.best = {"mean": mean, "checkpoint": checkpoint.step_name(self.train_step)}

    def _save(self) -> None:
        """Write a checkpoint of this step, unless there is one."""
        if self._saved_step == self.train_step:
            return
        self._note_best()
        if self._is_main:
            checkpoint.write_checkpoint(
                self.run_dir.checkpoints,
                self.train_step,
                save_policy=lambda directory: self.adapter.save_policy(self.policy, directory),
                state={
                    "train_step": self.train_step,
                    "optimizer_step": self.updater.optimizer_step,
                    "tasks_drawn": self.sampler.position,
                    "sampler": self.sampler.state(),
                    "constant_steps": self.constant_steps,
                    "evaluated": self.evaluated,
                    "best": self.best,
                    "policy_checksum": checkpoint.policy_checksum(self.policy),
                    "config": self.config.model_dump(mode="json"),
                },
                optimizer=checkpoint.optimizer_tensors(self.updater.optimizer, self._parameter_names),
            )
            self._prune()
        self._saved_step = self.train_step
        self.accelerator.wait_for_everyone()

    def _prune(self) -> None:
        best = frozenset({self.best["checkpoint"]} if self.best else ())
        checkpoint.prune_checkpoints(self.run_dir.checkpoints, keep_last=self.config.checkpoint.keep_last, keep=best)

    def _restore(self, directory: Path | None) -> None:
        if directory is None:
            self.callbacks.on_notice("no checkpoint yet; starting from step 0.")
            self.run_dir.forget_after(0)
            return
        snapshot = checkpoint.read_checkpoint(directory)
        state = snapshot.state
        saved = validate(state["config"], type(self.config), str(directory / checkpoint.STATE))
        changed = {key: pair for key, pair in differences(saved, self.config).items() if not key.startswith(MAY_CHANGE)}
        if changed:
            listed = "; ".join(f"{key}: {old!r} -> {new!r}" for key, (old, new) in changed.items())
            raise CheckpointError(f"{directory} is from another config ({listed}); restore it, or choose a new name=...")
        try:
            self.adapter.load_policy(self.policy, snapshot.policy_dir)
        except (RuntimeError, ValueError) as error:  # how torch reports tensors of another shape
            raise CheckpointError(f"{snapshot.policy_dir}: not this run's policy ({error}).") from error
        if checkpoint.policy_checksum(self.policy) != state["policy_checksum"]:
            raise CheckpointError(f"{snapshot.policy_dir}: the loaded policy differs from the one that was saved.")
        checkpoint.load_optimizer_tensors(self.updater.optimizer, self._parameter_names, snapshot.optimizer, directory)
        self.updater.optimizer_step = state["optimizer_step"]
        self.sampler.load_state(state.get("sampler", {"position": state["tasks_drawn"]}))
        self.train_step, self.constant_steps = state["train_step"], state["constant_steps"]
        self.evaluated, self.best = state.get("evaluated"), state["best"]
        if directory.resolve().parent == self.run_dir.checkpoints.resolve():
            self._saved_step = self.train_step
        if self._is_main:
            self.run_dir.forget_after(self.train_step)
            self._prune()
        self.callbacks.on_notice(f"resumed from {directory} at step {self.train_step}.")

    def _write_samples(self, train_step: int, collected: Collected, limit: int, passes: PassLog | None) -> None:
        """The first ``limit`` rollouts; with what ``mmrl replay`` shows of their decisions where ``passes`` are given."""
        advantages = recipe.row_means(collected.advantages, collected.batch.loss_mask)
        weights = {name: term.weight for name, term in self.terms.items()}

        def details(row: int) -> dict[str, Any]:
            decisions = decision_record(self.config.algorithm, self.adapter, collected, row, passes)
            return {"rollout": row, "weights": weights, "decisions": decisions}

        options = {"details": details} if passes is not None else {}
        self.run_dir.write_samples(train_step, self.adapter, collected.batch, advantages, limit, **options)

    def _samples_are_due(self, train_step: int) -> bool:
        every = self.config.metrics.samples_every
        return every > 0 and train_step % every == 0

    def _dump(self, kind: str, error: Exception) -> str:
        """Keep what is known of an error that ends the run; where that is, as a sentence."""
        if not self._is_main:
            return ""
        record = {
            "train_step": self.train_step,
            "tasks_drawn": self.sampler.position,
            "error": str(error),
            "traceback": "".join(traceback.format_exception(error)).splitlines(),  # with the rollout that a reward stumbled on
        }
        return f" Details: {self.run_dir.write_failure(kind, record)}"

    def _heard_stop(self) -> str | None:
        """The reason to stop that any process has, if one has."""
        return next((stop for stop in processes.gather(self.accelerator, self._stop) if stop), None)

    def _evaluation_is_due(self) -> bool:
        if self.evaluated is not None and self.evaluated["train_step"] == self.train_step:
            return False
        if self.train_step == 0:
            return self.config.evaluation.at_start
        last = self._exhausted or self.train_step == self.config.trainer.num_steps
        return last or self._is_due(self.config.evaluation.every)

    @property
    def _exhausted(self) -> bool:
        """Too many steps without signal: the run ends here by itself."""
        return self.constant_steps >= self.config.trainer.max_constant_steps

    def _is_due(self, every: int) -> bool:
        return every > 0 and self.train_step > 0 and self.train_step % every == 0

    @property
    def _is_main(self) -> bool:
        return self.accelerator.is_main_process

    @property
    def _parameter_names(self) -> dict[Tensor, str]:
        return {parameter: name for name, parameter in self.policy.named_parameters()}

    @contextmanager
    def _saved_if_a_reward_fails(self) -> Iterator[None]:
        """Write a checkpoint before a `RewardError` ends the run; a resumed run attempts the same tasks again."""
        drawn = self.sampler.state()
        try:
            yield
        except RewardError as error:
            record = self._dump("reward", error)
            self.sampler.load_state(drawn)
            self._save()
            raise RewardError(f"{str(error).rstrip('.')}. Checkpoint of step {self.train_step} written.{record}") from error

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT finish the step, write a checkpoint and end the run; a second SIGINT ends it at once.

        Launchers answer Ctrl-C by sending SIGTERM to processes that have seen the SIGINT already, so that pair is one request.
        """

        def request(number: int, frame: Any) -> None:
            if number == signal.SIGINT and self._stop == signal.Signals(number).name:
                raise KeyboardInterrupt
            self._stop = self._stop or signal.Signals(number).name

        try:
            previous = {number: signal.signal(number, request) for number in (signal.SIGTERM, signal.SIGINT)}
        except ValueError:  # not in the main thread: the caller owns the signals
            previous = {}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
