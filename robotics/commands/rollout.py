"""The command ``mmrl rollout``: evaluation of robot policies in simulation, with everything written down."""

from __future__ import annotations

import argparse
from pathlib import Path

from mmrl.errors import ConfigError

SUMMARY = "measure a robot policy in simulated rollouts"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("policy", metavar="POLICY", help="LeRobot policy directory, checkpoint or run directory, or: expert")
    parser.add_argument("--tasks", default="reach", metavar="A,B", help="task families (default reach)")
    parser.add_argument("--episodes", type=int, default=50, metavar="N", help="episodes of each family (default 50)")
    parser.add_argument(
        "--versus", metavar="OTHER", help="a second policy, or the output of an earlier rollout, on the same episodes"
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder to write (default: rollouts/ in the policy's run)")
    parser.add_argument(
        "--seed", type=int, default=1_000_000, metavar="S", help="layout of the first episode (default 1000000)"
    )
    parser.add_argument("--instructions", default="seen", metavar="A,B",
                        help="some of seen, unseen, empty, wrong; the first one counts (default seen)")  # fmt: skip
    parser.add_argument("--max-env-steps", type=int, metavar="N", help="time limit in control steps (default: the family's)")
    parser.add_argument(
        "--execution-horizon", type=int, metavar="N", help="control steps between decisions (default: the policy's)"
    )
    parser.add_argument("--rename", action="append", default=[], metavar="A=B", help="the environment's A is the policy's B")
    parser.add_argument("--resample", action="store_true", help="interpolate chunks of a policy made for another control rate")
    parser.add_argument("--sweep", nargs="+", default=[], metavar="NAME=LO:HI:COUNT",
                        help="multiply physics (mass, friction, damping, servo): NAME=LO:HI:COUNT or NAME=A,B,C")  # fmt: skip
    parser.add_argument("--videos", action="store_true", help="film the first successes and failures of each family")
    parser.add_argument(
        "--workers", type=int, default=1, metavar="N", help="processes; results do not depend on it (default 1)"
    )
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="simulation threads of each process (default 1)")
    parser.add_argument(
        "--num-envs", type=int, default=64, metavar="N", help="simulations at once in each process (default 64)"
    )
    parser.add_argument("--device", default="auto", help="cpu, cuda, or auto (default)")
    existing = parser.add_mutually_exclusive_group()
    existing.add_argument("--resume", action="store_true", help="go on with the evaluation in the output folder")
    existing.add_argument("--overwrite", action="store_true", help="replace the evaluation in the output folder")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; the exit code."""
    if min(arguments.workers, arguments.threads, arguments.num_envs) < 1:
        raise ConfigError("--workers, --threads and --num-envs: expected numbers of at least 1.")
    if any(value is not None and value < 1 for value in (arguments.max_env_steps, arguments.execution_horizon)):
        raise ConfigError("--max-env-steps and --execution-horizon: expected numbers of at least 1.")
    renames = {}
    for text in arguments.rename:
        ours, sign, theirs = text.partition("=")
        if not (sign and ours and theirs):
            raise ConfigError(f"--rename {text}: expected the environment's name = the policy's, for example scene=image2.")
        renames[ours] = theirs
    sweep = dict(_axis(text) for text in arguments.sweep)

    import torch

    from robotics.evaluation import Plan
    from robotics.evaluation_actors import ActorSpec
    from robotics.evaluation_session import Session

    torch.set_num_threads(1)  # another number of threads rounds differently
    device = arguments.device if arguments.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    plan = Plan(
        families=_names(arguments.tasks),
        num_episodes=arguments.episodes,
        first_seed=arguments.seed,
        variants=_names(arguments.instructions),
        max_env_steps=arguments.max_env_steps,
        sweep=sweep,
    )

    def spec(source: str) -> ActorSpec:
        return ActorSpec(
            source=source,
            device=device,
            execution_horizon=arguments.execution_horizon,
            renames=renames,
            resample=arguments.resample,
        )

    session = Session(
        spec(arguments.policy),
        plan,
        directory=arguments.output,
        resources={"num_envs": arguments.num_envs, "num_workers": arguments.workers, "num_threads": arguments.threads},
    )
    session.run(
        versus=None if arguments.versus is None else spec(arguments.versus),
        videos=arguments.videos,
        resume=arguments.resume,
        overwrite=arguments.overwrite,
    )
    return 0


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _axis(text: str) -> tuple[str, tuple[float, ...]]:
    """``mass=0.5:1.5:5`` or ``mass=0.5,1,1.5``."""
    name, _, values = text.partition("=")
    try:
        if ":" in values:
            low, high, count = values.split(":")
            num = int(count)
            step = (float(high) - float(low)) / max(1, num - 1)
            found = tuple(round(float(low) + step * i, 10) for i in range(num))
        else:
            found = tuple(float(value) for value in values.split(","))
    except ValueError:
        found = ()
    if not name or not found or min(found) <= 0:
        raise ConfigError(f"--sweep {text}: expected NAME=LO:HI:COUNT or NAME=A,B,C with positive multipliers, mass=0.5:1.5:5.")
    return name, found
