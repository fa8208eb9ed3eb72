"""`robotics.evaluation`: an episode is the same whatever it is run with, and an interrupted evaluation ends as any other."""

import json
import subprocess
import sys
from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest
import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.policies.act.configuration_act import ACTConfig

import robotics.envs  # noqa: F401  registers the environments
from mmrl.errors import ConfigError, DataError
from robotics.checkpoints import save_policy
from robotics.envs.families import FAMILIES, build_family
from robotics.envs.physics import BLOCKS
from robotics.evaluation import (
    DIVERGED,
    EPISODES,
    EpisodeLog,
    Plan,
    evaluate,
    other_instruction,
    read_records,
    record_of,
    run_attempts,
)
from robotics.evaluation_actors import ActorSpec, ExpertActor, open_actor
from robotics.evaluation_policy import PolicyActor
from robotics.experts import make_expert
from robotics.policies.building import build_processors, new_policy
from robotics.rollouts import Episode

LIMITS = np.array([[-110.0, 110.0]] * 5 + [[0.0, 100.0]])
EXPERT = ActorSpec(source="expert")


class ScriptedActor(ExpertActor):
    """The expert, with its chunks changed by ``change(decision, running, observation, chunks, world, tasks)``."""

    def __init__(self, change, execution_horizon=4):
        super().__init__(ActorSpec(source="expert", execution_horizon=execution_horizon))
        self.change = change

    def driver(self, world, tasks, num_decisions):
        driver = super().driver(world, tasks, num_decisions)

        def decide(decision, running, observation):
            chunks = driver.decide(decision, running, observation)
            return self.change(decision, running, observation, chunks, world, tasks)

        return replace(driver, decide=decide)


class ListeningActor(ExpertActor):
    """Goes to the colour that the instruction names, and stays where it is when it names none."""

    def driver(self, world, tasks, num_decisions):
        named = [next((color for color in BLOCKS if color in task.instruction.split()), None) for task in tasks]
        goals = [color or BLOCKS[0] for color in named]
        expert = make_expert(world.physics, world.families, goals, chunk_size=self.execution_horizon)
        deaf = np.array([color is None for color in named])

        def decide(decision, running, observation):
            chunks = expert(decision, running, observation)
            still = np.repeat(observation["agent_pos"].astype(float)[:, None], chunks.shape[1], axis=1)
            return np.where(deaf[running][:, None, None], still, chunks)

        return replace(super().driver(world, tasks, num_decisions), decide=decide)


@pytest.fixture(scope="module")
def policy_dir(tmp_path_factory, adapter):
    directory = tmp_path_factory.mktemp("restless") / "policy"
    policy = adapter.build_policy()
    with torch.no_grad():  # a network whose last bit is felt, and which reaches some spheres
        policy.head.weight.normal_(std=0.3, generator=torch.Generator().manual_seed(0))
    adapter.save_policy(policy, directory)
    return directory


@pytest.fixture(scope="module")
def actor(policy_dir):
    return open_actor(ActorSpec(source=str(policy_dir)))


def plan(**changes):
    return Plan(**{"families": ("reach",), "num_episodes": 11, "variants": ("seen", "unseen"), **changes})


def test_records_do_not_depend_on_how_many_run_at_once_or_on_threads(actor, tmp_path):
    spec = ActorSpec(source="unused")
    whole = evaluate(spec, plan(), tmp_path / "whole", actor=actor)
    assert len({record["num_steps"] for record in whole}) > 1 or {record["stop_reason"] for record in whole} == {"timeout"}
    for size, threads in ((1, 1), (3, 2), (8, 1)):
        directory = tmp_path / f"{size}"
        assert evaluate(spec, plan(), directory, actor=actor, num_envs=size, num_threads=threads) == whole
        assert (directory / EPISODES).read_bytes() == (tmp_path / "whole" / EPISODES).read_bytes()


@pytest.mark.parametrize("who", ["expert", pytest.param("policy", marks=pytest.mark.slow)])  # LeRobot takes long to import
def test_two_processes_write_what_one_writes(who, policy_dir, tmp_path):
    spec = EXPERT if who == "expert" else ActorSpec(source=str(policy_dir))
    one = evaluate(spec, plan(), tmp_path / "one")
    assert evaluate(spec, plan(), tmp_path / "two", num_workers=2, num_envs=4) == one
    assert (tmp_path / "two" / EPISODES).read_bytes() == (tmp_path / "one" / EPISODES).read_bytes()


@pytest.mark.slow
def test_an_experts_processes_need_not_load_lerobot():
    code = "import sys, robotics.evaluation; print('lerobot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"


def test_an_episode_is_decided_by_its_number_and_not_by_what_ran_before(actor):
    attempts = plan().attempts()
    _, together = run_attempts(actor, attempts)
    for index in (7, 0, 15):  # one process, in any order: no queue, cache or counter is left over
        assert run_attempts(actor, attempts[index : index + 1])[1] == [together[index]]
    fresh = open_actor(ActorSpec(source="expert"))
    _, expert = run_attempts(fresh, attempts)
    assert [r["initial_state"] for r in expert] == [r["initial_state"] for r in together]
    assert len({r["initial_state"] for r in expert}) == 11


def test_episodes_are_those_that_the_gymnasium_environment_resets_to():
    env = gym.make("mmrl/Reach-v0").unwrapped
    _, records = run_attempts(open_actor(EXPERT), plan(variants=("seen",), num_episodes=5).attempts())
    for record in records:
        env.reset(seed=record["seed"])
        assert (env.goal, env.task_description) == (record["goal"], record["instruction"])
    env.close()


def test_what_was_finished_before_a_crash_is_kept_and_the_end_is_the_same(actor, tmp_path):
    spec = ActorSpec(source="unused")
    whole = evaluate(spec, plan(), tmp_path / "whole", actor=actor)
    content = (tmp_path / "whole" / EPISODES).read_bytes()
    lines = content.splitlines(keepends=True)
    for kept, torn in ((0, b""), (5, lines[5][:40]), (21, b'{"key": "rea')):
        path = tmp_path / f"cut{kept}" / EPISODES
        path.parent.mkdir()
        path.write_bytes(b"".join(lines[:kept]) + torn)
        notes = []
        again = evaluate(spec, plan(), path.parent, actor=actor, num_envs=4, on_records=lambda *note, to=notes: to.append(note))
        assert again == whole and [note[1:] for note in (notes[0], notes[-1])] == [(kept, 22), (22, 22)]
        assert sum(len(new) for new, _, _ in notes[1:]) == 22 - kept
        assert path.read_bytes() == content
    before = path.stat().st_mtime_ns
    evaluate(spec, plan(), path.parent, actor=None)  # nothing is left to run, so nobody is needed
    assert path.stat().st_mtime_ns >= before and path.read_bytes() == content


def test_every_batch_is_on_disk_before_the_next_one_runs(tmp_path):
    seen = []

    def crash(decision, running, observation, chunks, world, tasks):
        if tasks[0].seed >= 1_000_008:
            raise RuntimeError("power cut")
        return chunks

    (tmp_path / EPISODES).write_text('{"key": "torn by an earlier power c')
    with pytest.raises(RuntimeError, match="power cut"):
        evaluate(EXPERT, plan(), tmp_path, actor=ScriptedActor(crash), num_envs=4, on_records=lambda *note: seen.append(note))
    assert [r["episode"] for r in read_records(tmp_path / EPISODES)] == list(range(8))
    assert seen[-1][1:] == (8, 22)


def test_a_line_that_is_no_record_is_refused(tmp_path):
    (tmp_path / EPISODES).write_text("[1]\n")
    with pytest.raises(DataError, match="line 1 is not a record"):
        EpisodeLog(tmp_path / EPISODES)


def test_a_policy_that_commands_nonsense_costs_its_own_episodes_only(tmp_path):
    def poison(decision, running, observation, chunks, world, tasks):
        bad = np.array([tasks[row].seed == 1_000_003 for row in running])
        if decision == 1:
            chunks[bad, 2] = np.nan
        return chunks

    clean = evaluate(EXPERT, plan(), tmp_path / "clean")
    records = evaluate(EXPERT, plan(), tmp_path / "poisoned", actor=ScriptedActor(poison))
    broken = [record for record in records if record["stop_reason"] == "diverged"]
    assert [record["key"] for record in broken] == ["reach/3/seen", "reach/3/unseen"]
    assert all(not record["success"] and record["num_steps"] == 6 for record in broken)
    assert [r for r in records if r not in broken] == [r for r in clean if r["episode"] != 3]
    saved = np.load(tmp_path / "poisoned" / broken[0]["saved"], allow_pickle=False)
    assert saved["commands"].shape == (6, 6) and np.isfinite(saved["final_state"]).all()
    assert not (tmp_path / "clean" / DIVERGED).exists()


def test_reaching_and_leaving_again_is_success_once_and_not_at_the_end():
    def leave(decision, running, observation, chunks, world, tasks):
        arrived = world.assess(running).success | left[running]
        left[running] = arrived
        home = np.broadcast_to(start[running][:, None], chunks.shape)
        start[running] = np.where(decision == 0, observation["agent_pos"], start[running])
        return np.where(arrived[:, None, None], home, chunks)

    left, start = np.zeros(11, bool), np.zeros((11, 6))
    _, records = run_attempts(ScriptedActor(leave, execution_horizon=1), plan(variants=("seen",)).attempts())
    assert all(record["success_once"] and not record["success"] for record in records)
    assert all(record["stop_reason"] == "timeout" for record in records)


@pytest.mark.parametrize("horizon", [1, 3, 5, 50])
def test_success_and_the_time_limit_in_the_middle_of_a_chunk_count_as_they_would_at_its_end(horizon):
    attempts = plan(variants=("seen",), num_episodes=4).attempts()
    shown, _ = run_attempts(open_actor(EXPERT), attempts)
    commands = np.stack([np.pad(e.commands, ((0, 60 - e.num_steps), (0, 0)), mode="edge") for e in shown])

    def repeat(decision, running, observation, chunks, world, tasks):
        return commands[running, decision * horizon : decision * horizon + horizon]

    episodes, records = run_attempts(ScriptedActor(repeat, horizon), attempts)
    for record, episode, original in zip(records, episodes, shown):
        assert record["stop_reason"] == "success" and record["num_steps"] == original.num_steps
        assert record["sum_reward"] == original.step_rewards.sum() and episode.executed.sum() == original.num_steps
        done = np.flatnonzero(np.cumsum(episode.executed) == original.num_steps)[0]
        assert not episode.executed[done + 1 :].any()  # decisions after the end are masked
    _, cut = run_attempts(ScriptedActor(repeat, horizon), attempts, max_env_steps=7)
    for record, original in zip(cut, shown):
        assert record["stop_reason"] == "timeout" and record["num_steps"] == 7
        assert (
            record["sum_reward"] == original.step_rewards[:7].sum() and record["max_reward"] == original.step_rewards[:7].max()
        )


def test_rewards_count_to_the_last_step_and_the_largest_of_negative_ones_is_negative():
    attempt = plan().attempts()[0]
    commands = np.zeros((3, 6))
    commands[1, 2], commands[2, 5] = 200.0, -1.0
    episode = Episode(
        tolerance=0.03, max_env_steps=5, left=np.array([1.0, 0.9, 0.8, 0.7]), succeeded=np.zeros(4, bool),
        step_rewards=np.array([-1.0, -0.5, -2.0]), commands=commands, executed=np.array([2, 1]), stop_reason="terminated",
        initial_state=np.zeros(2), final_state=np.zeros(2),
    )  # fmt: skip
    record = record_of(attempt, episode, out_of_range=1, joint_limits=LIMITS)
    assert (record["sum_reward"], record["max_reward"], record["clipped"]) == (-3.5, -0.5, 2)
    assert record["progress"] == pytest.approx(0.3)
    nothing = replace(
        episode, step_rewards=np.zeros(0), commands=np.zeros((0, 6)), stop_reason="diverged", left=np.ones(1),
        succeeded=np.zeros(1, bool),
    )  # fmt: skip
    record = record_of(attempt, nothing, out_of_range=0, joint_limits=LIMITS)
    assert (record["sum_reward"], record["max_reward"], record["num_steps"]) == (0.0, None, 0)
    json.dumps(record, allow_nan=False)


def test_no_instruction_and_a_wrong_one_show_who_listens(tmp_path):
    words = plan(variants=("seen", "unseen", "empty", "wrong"))
    shares = {}
    for name, someone in (("listening", ListeningActor(EXPERT)), ("deaf", open_actor(EXPERT))):
        records = evaluate(EXPERT, words, tmp_path / name, actor=someone)
        for variant in words.variants:
            part = [record for record in records if record["variant"] == variant]
            shares[name, variant] = sum(record["success"] for record in part) / len(part)
    assert [shares["listening", variant] for variant in words.variants] == [1.0, 1.0, 0.0, 0.0]
    assert [shares["deaf", variant] for variant in words.variants] == [1.0] * 4


@pytest.mark.parametrize("name", FAMILIES)
def test_a_wrong_instruction_asks_for_something_else(name):
    family = build_family(name)
    for seed in range(20):
        goal = family.draw_goal(seed)
        wrong = other_instruction(family, goal, seed)
        own = {family.instruction(goal, s, held_out=held_out) for s in range(60) for held_out in (False, True)}
        assert wrong not in own and wrong == other_instruction(family, goal, seed)


def test_swept_physics_is_felt_and_starts_from_the_nominal_states(tmp_path):
    swept = Plan(families=("reach",), num_episodes=3, sweep={"servo": (0.05, 1.0), "mass": (1.0,)})
    records = evaluate(EXPERT, swept, tmp_path, num_envs=2)
    assert [r["perturbation"] for r in records[::3]] == [{}, {"servo": 0.05, "mass": 1.0}, {"servo": 1.0, "mass": 1.0}]
    nominal, weak, same = records[:3], records[3:6], records[6:]
    assert [r["initial_state"] for r in weak] == [r["initial_state"] for r in nominal]
    assert all(one["sum_reward"] != other["sum_reward"] for one, other in zip(nominal, weak))
    assert [r["sum_reward"] for r in same] == [r["sum_reward"] for r in nominal]
    assert evaluate(EXPERT, swept, tmp_path / "one", num_envs=64) == records


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"families": ("reach", "flift")}, "tasks: flift not known; expected some of: reach, push, lift"),
        ({"families": ()}, "tasks is empty"),
        ({"families": ("reach", "reach")}, "each once"),
        ({"variants": ("seen", "spoken")}, "instructions: spoken not known; expected some of: seen, unseen, empty, wrong"),
        ({"sweep": {"colour": (1.0,)}}, "sweep: colour not known; expected some of: mass, friction, damping, servo"),
        ({"num_episodes": 0}, "at least 1 episode"),
    ],
)
def test_plans_that_cannot_be_are_refused_by_name(changes, message):
    with pytest.raises(ConfigError, match=message):
        plan(**changes)


def test_scenes_are_measured_together_in_one_evaluation(tmp_path):
    records = evaluate(EXPERT, plan(families=("lift", "reach", "press"), num_episodes=2, variants=("seen",)), tmp_path)
    assert [r["task"] for r in records] == ["lift", "lift", "reach", "reach", "press", "press"]
    assert all(record["success"] for record in records)


def test_the_policys_actor_is_built_from_a_directory(actor):
    assert isinstance(actor, PolicyActor) and actor.label.endswith("0") and actor.execution_horizon == 4
    assert actor.describe()["type"] == "mmrl_gaussian_chunk" and len(actor.describe()["checksum"]) == 64


@pytest.fixture(scope="module")
def act_dir(tmp_path_factory):
    """A LeRobot policy that is none of ours."""
    config = ACTConfig(
        device="cpu", chunk_size=6, n_action_steps=3, dim_model=16, n_heads=2, dim_feedforward=16, n_encoder_layers=1,
        n_vae_encoder_layers=1, latent_dim=4, normalization_mapping=dict.fromkeys(("STATE", "ENV", "ACTION"), "MIN_MAX"),
        input_features={
            "observation.state": PolicyFeature(type=FeatureType.STATE, shape=(6,)),
            "observation.environment_state": PolicyFeature(type=FeatureType.ENV, shape=(35,)),
        },
        output_features={"action": PolicyFeature(type=FeatureType.ACTION, shape=(6,))},
    )  # fmt: skip
    directory = tmp_path_factory.mktemp("act") / "policy"
    save_policy(new_policy(config, seed=0), *build_processors(config, LIMITS), directory)
    return directory


def test_any_policy_of_lerobot_is_measured_alike_in_any_batch(act_dir):
    actor = open_actor(ActorSpec(source=str(act_dir), execution_horizon=5))
    assert actor.execution_horizon == 5 and actor.describe()["n_action_steps"] == 3
    attempts = plan(num_episodes=3, variants=("seen",)).attempts()
    episodes, together = run_attempts(actor, attempts, max_env_steps=12)
    alone = [run_attempts(actor, [attempt], max_env_steps=12)[1][0] for attempt in attempts]
    assert alone == together and all(episode.executed.tolist() == [5, 5, 2] for episode in episodes)


def test_a_policy_that_draws_numbers_draws_them_from_its_episode_and_decision(act_dir, monkeypatch):
    monkeypatch.setattr("robotics.evaluation_policy._DETERMINISTIC", ())
    actor = open_actor(ActorSpec(source=str(act_dir), execution_horizon=1))
    draws = []

    def select_action(batch):
        draws.append(torch.rand(1).item())
        return torch.full((len(batch["observation.state"]), 6), draws[-1])

    monkeypatch.setattr(actor.policy.policy, "select_action", select_action)
    attempts = plan(num_episodes=3, variants=("seen",)).attempts()
    torch.manual_seed(5)
    _, together = run_attempts(actor, attempts, max_env_steps=4)
    assert len(draws) == len(set(draws)) == 12
    torch.manual_seed(6)
    alone = [run_attempts(actor, [attempt], max_env_steps=4)[1][0] for attempt in reversed(attempts)]
    assert alone[::-1] == together and set(draws[:12]) == set(draws[12:])
