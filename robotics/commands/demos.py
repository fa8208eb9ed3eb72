"""The command ``mmrl demos``."""

from __future__ import annotations

import argparse
from pathlib import Path

SUMMARY = "write demonstrations of the scripted experts as a LeRobotDataset"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help="a robot run's YAML file; its tasks are demonstrated")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="values to change, for example tasks.families=[lift]")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder to write")
    number = parser.add_mutually_exclusive_group()
    number.add_argument("--episodes-per-family", type=int, default=100, metavar="N",
                        help="demonstrations of each family (default 100)")  # fmt: skip
    number.add_argument("--episodes-per-goal", type=int, metavar="N",
                        help="demonstrations of each goal instead: a family that may be asked for more gets more")  # fmt: skip
    parser.add_argument("--seed-first", type=int, metavar="SEED", help="first layout (default: tasks.train.first)")
    parser.add_argument("--noise", type=float, default=0.0, metavar="SHARE",
                        help="noise between the recorded action and what the robot is sent, as a share of half of a joint's "
                             "range, so that states off the path are shown with the action that leads back; 0.005 suits every "
                             "family, much more makes grasps fail (default 0)")  # fmt: skip
    parser.add_argument("--mistakes", type=float, default=0.0, metavar="SHARE",
                        help="share of episodes in which the demonstrator errs for a moment and recovers, marked as such "
                             "(default 0)")  # fmt: skip
    parser.add_argument("--keep-failures", action="store_true", help="also write episodes that did not succeed")
    parser.add_argument("--cameras", default="scene,wrist", metavar="NAMES", help="scene,wrist (default), one of them, or none")
    parser.add_argument("--image-size", type=int, default=64, metavar="PIXELS", help="height and width (default 64)")
    parser.add_argument("--video", action="store_true", help="encode images as mp4, smaller and lossy, instead of PNG")
    parser.add_argument("--overwrite", action="store_true", help="replace a dataset that is there")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; the exit code."""
    import statistics
    import sys
    import time

    import datasets
    from rich.progress import Progress

    from mmrl.config import apply_overrides, read_config, validate
    from mmrl.errors import DataError
    from robotics.config import RoboticsRunConfig
    from robotics.envs.families import build_family
    from robotics.recording import collect, write_dataset
    from robotics.tasks import FamilyTasks

    tree = apply_overrides(read_config(arguments.config), arguments.overrides)
    config = validate(tree, RoboticsRunConfig, str(arguments.config))
    output = arguments.output
    cameras = _cameras(arguments)
    _check_shares(arguments)
    if output.exists() and not (arguments.overwrite and (output / "meta" / "info.json").is_file()):
        raise DataError(
            f"{output} exists; choose another --output"
            + (", since it is not a LeRobotDataset." if arguments.overwrite else ", or replace the dataset with --overwrite.")
        )
    train, held_out = config.tasks.train, config.tasks.eval
    first = train.first if arguments.seed_first is None else arguments.seed_first
    if first < held_out.first + held_out.count and held_out.first < first + train.count:
        raise DataError(
            f"layouts {first} to {first + train.count - 1} would be demonstrated, but tasks.eval holds out {held_out.first} to "
            f"{held_out.first + held_out.count - 1}; choose another --seed-first."
        )
    demonstrations = []
    for name in config.tasks.families:
        start = time.perf_counter()
        tasks = FamilyTasks(
            build_family(name), first_seed=first, num_layouts=train.count, goals=config.tasks.goals.get(name)
        )  # fmt: skip
        per_goal = arguments.episodes_per_goal
        count = arguments.episodes_per_family if per_goal is None else per_goal * len(tasks.goals)
        its, tried = collect(
            tasks, count, keep_failures=arguments.keep_failures, at_once=config.rollout.num_envs, noise=arguments.noise,
            mistakes=arguments.mistakes, num_threads=config.rollout.num_threads,
        )  # fmt: skip
        demonstrations += its
        print(
            f"{name}: {len(its)} episodes of {tried} attempts, {statistics.median(d.episode.num_steps for d in its):.0f} "
            f"control steps at the median, {sum(bool(d.mistaken.any()) for d in its)} with a mistake, "
            f"{time.perf_counter() - start:.1f} s",
            flush=True,
        )
    datasets.disable_progress_bars()
    print(f"writing {len(demonstrations)} episodes; a few milliseconds for every frame", flush=True)
    start = time.perf_counter()
    with Progress(disable=not sys.stdout.isatty()) as progress:
        bar = progress.add_task("writing episodes", total=len(demonstrations))
        infos = write_dataset(
            output, demonstrations, cameras=cameras, video=arguments.video, noise=arguments.noise, mistakes=arguments.mistakes,
            report=lambda count: progress.update(bar, completed=count),
        )  # fmt: skip
    frames = sum(info.length for info in infos)
    size = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
    print(
        f"wrote {len(infos)} episodes, {frames} frames, {size / 1e6:.1f} MB in {time.perf_counter() - start:.1f} s to {output}"
    )
    print(f"learn from them: mmrl train CONFIG algorithm=sft demonstrations.path={output}")
    return 0


def _cameras(arguments: argparse.Namespace) -> dict[str, tuple[int, int]]:
    from mmrl.errors import DataError

    names = [] if arguments.cameras == "none" else [name.strip() for name in arguments.cameras.split(",")]
    unknown = [name for name in names if name not in ("scene", "wrist")]
    if unknown or arguments.image_size < 1:
        what = f"--cameras names {', '.join(unknown)}" if unknown else f"--image-size is {arguments.image_size}"
        raise DataError(f"{what}; expected scene, wrist, both or none, of at least one pixel.")
    return {name: (arguments.image_size, arguments.image_size) for name in names}


def _check_shares(arguments: argparse.Namespace) -> None:
    from mmrl.errors import DataError

    if arguments.episodes_per_family < 1:
        raise DataError(f"--episodes-per-family is {arguments.episodes_per_family}; expected at least 1.")
    for name in ("noise", "mistakes"):
        value = getattr(arguments, name)
        if not 0.0 <= value <= 1.0:
            raise DataError(f"--{name} is {value}; expected 0 to 1.")
