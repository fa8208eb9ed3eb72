"""The command line, and the only place that names a modality. Heavy imports happen inside the command that needs them."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmrl import __project__, __version__, profile_command, replay_command, reward_command
from mmrl.data_commands import Tools, add_data_commands, vet_run
from mmrl.errors import ConfigError, MMRLError

if TYPE_CHECKING:
    from mmrl.config import RunConfig

MODALITIES: dict[str, tuple[str, ...]] = {
    # modality: config class, adapter builder, opener of media for dataset checks (where there are datasets)
    "vision": ("vision.config:VisionRunConfig", "vision.adapter:build_adapter", "vision.media:opener"),
    "audio": ("audio.config:AudioRunConfig", "audio.adapter:build_adapter", "audio.adapter:media_opener"),
    "robotics": ("robotics.config:RoboticsRunConfig", "robotics.adapter:build_adapter"),
}

MODALITY_COMMANDS = {
    "demos": "robotics.commands.demos",
    "rollout": "robotics.commands.rollout",
    "attempts": "vision.r1_reward_attempts",
}
"""Commands that one modality alone has; each module has ``SUMMARY``, ``add_arguments`` and ``run``, and is light to import."""

BENCHMARKS = {"audio": "audio.benchmark_command:run", "vision": "vision.benchmark_command:run"}
"""What answers ``mmrl eval --benchmark`` for a modality."""

BENCHMARK_CONTROLS = ("silence", "shuffled-options")
"""Controls of benchmarks; those of held-out tasks are choices of ``evaluation.control``."""

OVERRIDES_HELP = "values to change, for example trainer.num_steps=20 seed=3"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; 0 is success, 1 means that a check found problems, 2 means that the input was wrong."""
    parser = build_parser()
    arguments, rest = parser.parse_known_args(argv)
    # argparse gives up on positional values that follow an option: mmrl eval CONFIG --checkpoint DIR seed=3
    unknown = [text for text in rest if text.startswith("-") or "=" not in text or not hasattr(arguments, "overrides")]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]
    try:
        return arguments.command(arguments) or 0
    except MMRLError as error:
        if arguments.debug:
            raise
        print(f"mmrl: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # for example, mmrl show ... | head
        sys.stderr.close()
        return 0


def build_parser() -> argparse.ArgumentParser:
    """All commands with their help."""
    parser = argparse.ArgumentParser(
        prog="mmrl",
        description="Reinforcement learning for multimodal and embodied policies. One YAML file is one run.",
        epilog="Start with: mmrl train configs/vision/read_digits.yaml",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.add_argument("--debug", action="store_true", help="show the full traceback of an error")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, function: Any, summary: str, *, parent: Any = commands, config: bool = True) -> argparse.ArgumentParser:
        command = parent.add_parser(name, help=summary, description=summary)
        command.set_defaults(command=function)
        if config:
            command.add_argument("config", type=Path, metavar="CONFIG", help="the run's YAML file")
            command.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=OVERRIDES_HELP)
        return command

    train = add("train", train_command, "train a policy as a config says; writes a run directory")
    train.add_argument("--resume", action="store_true", help="continue from the run's newest checkpoint")
    train.add_argument("--checkpoint", type=Path, help="with --resume: this checkpoint instead of the newest")
    train.add_argument("--overwrite", action="store_true", help="replace an existing run of this name")
    train.add_argument("--cpu", action="store_true", help="do not use an accelerator")

    evaluate = add("eval", eval_command, "measure a policy on held-out tasks")
    evaluate.add_argument("--checkpoint", type=Path, help="a checkpoint of the run; absent measures the config's own policy")
    evaluate.add_argument("--output", type=Path, help="also write the result as JSON")
    evaluate.add_argument("--policy", metavar="POLICY", help="instead of the config's policy.path")
    evaluate.add_argument("--benchmark", metavar="NAME",
                          help="a published benchmark instead: avqa, mmau, mmar or mmsu (audio), vl_rewardbench, "
                               "multimodal_rewardbench or mm_rlhf_rewardbench (vision)")  # fmt: skip
    evaluate.add_argument("--file", type=Path, help="with --benchmark: its json, jsonl or parquet file")
    evaluate.add_argument("--benchmark-version", metavar="VERSION", help="with --benchmark mmau: original or v05.15.25")
    evaluate.add_argument("--votes", type=int, nargs="+", default=[], metavar="K",
                          help="with --benchmark (vision): also the majority of K sampled verdicts, e.g. 1 5 15")  # fmt: skip
    evaluate.add_argument("--control", choices=["blank", "shuffle", *BENCHMARK_CONTROLS],
                          help="measure again with blank media, or those of other tasks, and report the gap; with --benchmark: "
                          "silence instead of every clip, or options in another order")  # fmt: skip

    check = add("check", check_command, "validate a config, build the run, do one rollout and one update")
    check.add_argument("--no-weights", action="store_true", help="shapes and memory only, on torch's meta device")

    export = add("export", export_command, "write a policy as a directory that its own library loads")
    export.add_argument("--checkpoint", type=Path, help="a checkpoint of the run (default: the newest)")
    export.add_argument("--to", type=Path, required=True, metavar="DIR", help="folder to write")
    export.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="precision of the weights")

    for name, module_name in MODALITY_COMMANDS.items():
        module = importlib.import_module(module_name)
        module.add_arguments(add(name, module.run, module.SUMMARY, config=False))

    add("show", show_command, "print the resolved config")
    schema = add("schema", schema_command, "print the JSON Schema of a modality's configs, for editors", config=False)
    schema.add_argument("modality", choices=sorted(MODALITIES))
    report = add("report", report_command, "write report.html of a run directory", config=False)
    report.add_argument("run_dir", type=Path, metavar="RUN")
    listing = add("list", list_command, "list algorithms, reward terms and built-in policies", config=False)
    listing.add_argument("what", nargs="?", default="algorithms", metavar="WHAT",
                         help="algorithms (default), policies, or the name of an algorithm")  # fmt: skip

    replay_command.add_arguments(add("replay", replay_command.run, replay_command.SUMMARY, config=False))
    summary = "look for ways to game rewards"
    reward = commands.add_parser("reward", help=summary, description=f"Check rewards before training: {summary}.")
    checks = reward.add_subparsers(metavar="COMMAND", required=True)
    reward_command.add_arguments(add("lint", lint_command, reward_command.SUMMARY, parent=checks, config=False))

    data = commands.add_parser("data", help="look at datasets", description="Look at datasets before training on them.")
    nested = data.add_subparsers(metavar="COMMAND", required=True)
    builders, openers = ({name: row[at] for name, row in MODALITIES.items() if len(row) > 2} for at in (1, 2))
    tools = Tools(load_run=load_run, load=_load, config_class=config_class, builders=builders, openers=openers)
    add_data_commands(partial(add, parent=nested, config=False), tools)
    profile_command.add_arguments(add("profile", profile_tasks, profile_command.SUMMARY, parent=nested))
    return parser


def load_run(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read, override and validate a config with the class of its modality."""
    from mmrl.config import apply_overrides, read_config, validate

    tree = apply_overrides(read_config(path), overrides)
    modality = tree.get("modality")
    if modality not in MODALITIES:
        raise ConfigError(f"{path}: modality is {modality!r}; expected one of: {', '.join(MODALITIES)}.")
    return validate(tree, config_class(modality), str(path))


def config_class(modality: str) -> type[RunConfig]:
    """The config model of a modality."""
    return _load(MODALITIES[modality][0])


def build_adapter(config: RunConfig) -> Any:
    """The adapter of a run."""
    return _load(MODALITIES[config.modality][1])(config)


def train_command(arguments: argparse.Namespace) -> int:
    config = load_run(arguments.config, arguments.overrides)
    console = _console()
    if len(MODALITIES[config.modality]) > 2:
        vet_run(config, MODALITIES[config.modality][1])
    with console.status("loading libraries and policy") if console.is_terminal else _nothing():
        from mmrl.console import RunConsole
        from mmrl.trainer import Callbacks, Trainer

        shown = RunConsole(console, num_steps=config.trainer.num_steps, metric=config.evaluation.metric)
        callbacks = Callbacks(
            on_step=shown.on_step, on_evaluation=shown.on_evaluation, on_progress=shown.on_progress, on_notice=shown.on_notice
        )
        trainer = Trainer(config, build_adapter(config), callbacks=callbacks, cpu=arguments.cpu)
    main_process = trainer.accelerator.is_main_process
    if not main_process:
        trainer.callbacks = Callbacks()
        trainer.run(resume=arguments.resume, resume_from=arguments.checkpoint, overwrite=arguments.overwrite)
        return 0
    weights = sum(parameter.numel() for parameter in trainer.policy.parameters() if parameter.requires_grad)
    shown.print(f"run {config.run_dir}  algorithm {config.algorithm.name}  trainable weights {weights:,}  seed {config.seed}")
    with shown:
        shown.header()
        evaluations = trainer.run(resume=arguments.resume, resume_from=arguments.checkpoint, overwrite=arguments.overwrite)
    from mmrl.evaluation import comparison_table
    from mmrl.report import write_report

    if evaluations:
        first, last = min(evaluations), max(evaluations)
        before = evaluations[first] if first == 0 and last > 0 else None
        console.print(comparison_table(before, evaluations[last]))
    shown.print(f"policy  {_latest_policy(trainer)}")
    shown.print(f"report  {write_report(config.run_dir)}")
    return 0


def eval_command(arguments: argparse.Namespace) -> int:
    chosen = [f"policy.path={arguments.policy}"] if arguments.policy else []
    if arguments.control is not None and (arguments.benchmark is not None) != (arguments.control in BENCHMARK_CONTROLS):
        raise ConfigError(
            f"--control {arguments.control}: {' and '.join(BENCHMARK_CONTROLS)} go with --benchmark, blank and shuffle without."
        )
    if arguments.control is not None and arguments.benchmark is None:
        chosen.append(f"evaluation.control={arguments.control}")
    config = load_run(arguments.config, [*arguments.overrides, *chosen])
    if arguments.benchmark is not None:
        if config.modality not in BENCHMARKS:
            raise ConfigError(
                f"--benchmark is for {', '.join(BENCHMARKS)} runs; {arguments.config} is a {config.modality} run."
            )
        return _load(BENCHMARKS[config.modality])(config, arguments, build_adapter, _console())
    import torch

    from mmrl.checkpoint import checkpoint_directory, verify_checkpoint
    from mmrl.evaluation import comparison_table, control_table, evaluate
    from mmrl.rewards import resolve_terms

    if config.trainer.num_threads:
        torch.set_num_threads(config.trainer.num_threads)
    adapter = build_adapter(config)
    source = adapter.task_source(config.evaluation.split)
    for text in getattr(source, "notices", ()):
        print(f"mmrl: {text}", file=sys.stderr)
    terms = resolve_terms(config.rewards, adapter.reward_terms, lambda: source)
    policy = adapter.build_policy()
    if arguments.checkpoint is not None:
        checkpoint = checkpoint_directory(arguments.checkpoint)
        verify_checkpoint(checkpoint)
        adapter.load_policy(policy, checkpoint / "policy")
    console = _console()
    with console.status("evaluating") if console.is_terminal else _nothing():
        result = evaluate(adapter, policy, source, terms, config.evaluation)
    console.print(comparison_table(None, result))
    if "control" in result:
        console.print(control_table(result))
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(result, indent=1), encoding="utf-8")
        console.print(f"result  {arguments.output}", highlight=False, soft_wrap=True)
    return 0


def lint_command(arguments: argparse.Namespace) -> int:
    names, overrides = reward_command.split_names(arguments.overrides)
    return reward_command.run(load_run(arguments.config, overrides), names, arguments, build_adapter)


def profile_tasks(arguments: argparse.Namespace) -> int:
    chosen = [f"policy.path={arguments.policy}"] if arguments.policy else []
    return profile_command.run(load_run(arguments.config, [*arguments.overrides, *chosen]), arguments, build_adapter)


def check_command(arguments: argparse.Namespace) -> int:
    config = load_run(arguments.config, arguments.overrides)
    if arguments.no_weights:
        module = importlib.import_module(MODALITIES[config.modality][1].partition(":")[0])
        if not hasattr(module, "check_without_weights"):
            raise ConfigError(f"check --no-weights is not available for modality {config.modality!r}; run check without it.")
        for name, value in module.check_without_weights(config):
            print(f"{name:<28} {value}")
        return 0
    from mmrl.trainer import Trainer

    metrics = Trainer(config, build_adapter(config)).check()
    for name, value in metrics.items():
        print(f"{name:<28} {value:.6g}")
    if len(MODALITIES[config.modality]) > 2:  # whose policies have a forecast
        _print_forecast(config)
    print(f"{arguments.config}: one rollout and one update went through.")
    return 0


def _print_forecast(config: RunConfig) -> None:
    module = importlib.import_module(MODALITIES[config.modality][1].partition(":")[0])
    try:
        rows = module.check_without_weights(config)
    except ConfigError as error:  # a model whose shapes are not known here; this run has just been through it all the same
        rows = [("memory forecast", f"none: {error}")]
    for name, value in rows:
        print(f"{name:<28} {value}")


def export_command(arguments: argparse.Namespace) -> int:
    config = load_run(arguments.config, arguments.overrides)
    import torch

    from mmrl.checkpoint import checkpoint_directory, latest_checkpoint, verify_checkpoint

    source = arguments.checkpoint or latest_checkpoint(config.run_dir / "checkpoints")
    if source is None:
        raise ConfigError(f"{config.run_dir} has no checkpoint; train first, or name one with --checkpoint.")
    source = checkpoint_directory(source)
    verify_checkpoint(source)
    adapter = build_adapter(config)
    policy = adapter.build_policy()
    adapter.load_policy(policy, source / "policy")
    arguments.to.mkdir(parents=True, exist_ok=True)
    adapter.save_policy(policy.to(getattr(torch, arguments.dtype)), arguments.to)
    print(f"policy  {arguments.to}  (from {source}, {arguments.dtype})")
    return 0


def show_command(arguments: argparse.Namespace) -> None:
    from mmrl.config import to_yaml

    print(to_yaml(load_run(arguments.config, arguments.overrides)), end="")


def schema_command(arguments: argparse.Namespace) -> None:
    print(json.dumps(config_class(arguments.modality).model_json_schema(), indent=1))


def report_command(arguments: argparse.Namespace) -> None:
    from mmrl.report import write_report

    print(write_report(arguments.run_dir))


def list_command(arguments: argparse.Namespace) -> None:
    from mmrl.algorithms import PRESETS
    from mmrl.config import _suggest
    from mmrl.listing import algorithm_lines, explain

    if arguments.what == "algorithms":
        print("\n".join(algorithm_lines()))
    elif arguments.what == "policies":
        for modality, entries in MODALITIES.items():
            policies = getattr(importlib.import_module(entries[0].partition(":")[0]), "BUILTIN_POLICIES", {})
            for name, summary in policies.items():
                print(f"{name:<18} {modality:<9} {summary}")
    elif arguments.what in PRESETS:
        print("\n".join(explain(arguments.what)))
    else:
        raise ConfigError(f"list {arguments.what!r}: {_suggest(arguments.what, [*PRESETS, 'algorithms', 'policies'])}")


def _load(path: str) -> Any:
    """Import ``package.module:name`` after making sure that the package is ours."""
    module_name, _, attribute = path.partition(":")
    package = importlib.import_module(module_name.partition(".")[0])
    if getattr(package, "__project__", None) != __project__:
        raise ConfigError(
            f"the package {package.__name__!r} was imported from {package.__file__}, which is not part of this project; "
            "uninstall that distribution or run from a clean environment."
        )
    return getattr(importlib.import_module(module_name), attribute)


def _console(*, stderr: bool = False) -> Any:
    """A terminal's own width, and enough for the tables in a log file."""
    from rich.console import Console

    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(width=128, stderr=stderr)


def _latest_policy(trainer: Any) -> Path:
    from mmrl.checkpoint import latest_checkpoint

    return latest_checkpoint(trainer.run_dir.checkpoints) / "policy"


def _nothing() -> Any:
    from contextlib import nullcontext

    return nullcontext()


if __name__ == "__main__":
    sys.exit(main())
