import copy
import json
import math

import numpy as np
import pytest
import torch
from lerobot.configs import PreTrainedConfig
from lerobot.policies.factory import get_policy_class, make_pre_post_processors
from lerobot.utils.constants import ACTION, OBS_ENV_STATE, OBS_LANGUAGE_TOKENS, OBS_STATE
from safetensors.torch import load_file, save_file

from mmrl.errors import CheckpointError, ConfigError, DataError
from robotics.acting import sum_executed
from robotics.envs.observation import environment_bounds
from robotics.policies import GaussianChunkConfig
from robotics.policies.modeling_gaussian_chunk import in_turning_frame
from robotics.policies.motions import decode_motions


@pytest.fixture
def policy(adapter):
    """A policy whose head is large enough for inputs to matter."""
    policy = adapter.build_policy()
    with torch.no_grad():
        policy.head.weight.normal_(std=0.3, generator=torch.Generator().manual_seed(0))
    return policy


def observation(rows=5, task="reach the red target", seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        OBS_STATE: 60.0 * torch.rand(rows, 6, generator=generator),
        OBS_ENV_STATE: 0.3 * torch.rand(rows, 35, generator=generator),
        "task": [task] * rows,
    }


def test_the_density_of_a_motion_is_that_of_its_gaussian(adapter, policy):
    with torch.no_grad():
        policy.log_std.copy_(torch.linspace(-1.0, -0.1, 6))
    seen = adapter.preprocessor(observation(rows=3))
    noise = torch.randn(3, *policy.noise_shape(), generator=torch.Generator().manual_seed(0))
    decided = policy.decide(seen, noise)
    normal = torch.distributions.Normal(policy.distribution(seen)[0], policy.log_std.exp())
    torch.testing.assert_close(decided.record["motions"], normal.mean + normal.stddev * noise)
    torch.testing.assert_close(decided.density, normal.log_prob(decided.record["motions"]).sum(dim=2))
    density, entropy = policy.score(seen, decided.record)
    torch.testing.assert_close(density, decided.density)
    torch.testing.assert_close(entropy, normal.entropy().sum(dim=2))


def test_only_executed_motions_count():
    values = torch.tensor([[1.0, 2.0, 4.0], [1.0, 2.0, math.nan], [math.inf, 0.0, 0.0]])
    assert sum_executed(values, torch.tensor([3, 2, 0])).tolist() == [7.0, 3.0, 0.0]


def test_words_reach_the_network_and_unknown_words_are_ignored(adapter, policy):
    def mean(task):
        return policy.distribution(adapter.preprocessor(observation(task=task)))[0]

    assert not torch.allclose(mean("reach the red target"), mean("reach the blue target"), atol=1e-4)
    torch.testing.assert_close(mean("Reach the RED target!"), mean("reach the red target"))
    torch.testing.assert_close(mean("reach the shiny red target"), mean("reach the red target"))
    torch.testing.assert_close(mean(""), mean("xyzzy"))
    assert mean("").isfinite().all()


def test_the_order_of_words_matters(adapter, policy):
    def mean(task):
        return policy.distribution(adapter.preprocessor(observation(task=task)))[0]

    assert not torch.allclose(mean("red on blue"), mean("blue on red"), atol=1e-4)


def test_a_decision_scores_as_it_was_made_and_a_greedy_one_is_the_mean(adapter, policy):
    seen = adapter.preprocessor(observation())
    decided = policy.decide(seen, torch.randn(5, *policy.noise_shape(), generator=torch.Generator().manual_seed(2)))
    density, spread = policy.score(seen, decided.record)
    torch.testing.assert_close(density, decided.density)
    assert density.shape == spread.shape == (5, 4)
    greedy = policy.decide(seen, None)
    torch.testing.assert_close(greedy.record["motions"], policy.distribution(seen)[0])
    torch.testing.assert_close(greedy.chunk, policy.predict_action_chunk(seen))


def test_the_goal_is_learned_from_words_not_given():
    config = GaussianChunkConfig(device="cpu")
    assert set(config.normalization_mapping) == {"STATE", "ENV", "ACTION"}  # no feature that could carry a goal index


def test_an_observation_without_instruction_is_refused(adapter):
    batch = observation()
    del batch["task"]
    with pytest.raises(DataError, match="'task' is None; expected the instruction"):
        adapter.preprocessor(batch)


def test_states_and_actions_are_normalised_by_declared_limits(adapter):
    batch = observation(rows=1)
    batch[OBS_STATE] = torch.tensor([[110.0, -100.0, 0.0, 0.0, 80.0, 100.0]])
    batch[OBS_ENV_STATE] = torch.tensor([[-0.1, 0.3, 0.15] + [0.5, -0.3, 0.45] * 8 + [0.5] * 8])
    out = adapter.preprocessor(batch)
    torch.testing.assert_close(out[OBS_STATE], torch.tensor([[1.0, -1.0, 0.0, 0.0, 0.5, 1.0]]), atol=1e-6, rtol=0)
    torch.testing.assert_close(
        out[OBS_ENV_STATE], torch.tensor([[-1.0, 1.0, 0.0] + [1.0, -1.0, 1.0] * 8 + [0.5] * 8]), atol=1e-6, rtol=0
    )
    torch.testing.assert_close(adapter.postprocessor(out[OBS_STATE]), batch[OBS_STATE], atol=1e-4, rtol=0)


def test_select_action_walks_through_the_chunk_and_then_looks_again(adapter, policy):
    first, second = adapter.preprocessor(observation(seed=1)), adapter.preprocessor(observation(seed=2))
    chunk = policy.predict_action_chunk(first)
    for step in range(4):
        torch.testing.assert_close(policy.select_action(second if step else first), chunk[:, step])
    third = adapter.preprocessor(observation(seed=3))
    torch.testing.assert_close(policy.select_action(third), policy.predict_action_chunk(third)[:, 0])
    policy.reset()
    torch.testing.assert_close(policy.select_action(first), chunk[:, 0])


def test_behaviour_cloning_lowers_its_loss(adapter):
    policy = adapter.build_policy()
    batch = adapter.preprocessor(observation(rows=16))
    batch[ACTION] = decode_motions(batch[OBS_STATE], torch.full((16, 4, 6), 0.5), policy.config.max_delta)
    optimizer = torch.optim.Adam(policy.get_optim_params(), lr=0.01)
    losses = []
    for _ in range(60):
        loss, numbers = policy(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(numbers["imitation_loss"])
    assert losses[-1] < losses[0] - 0.5
    torch.testing.assert_close(policy.predict_action_chunk(batch), batch[ACTION], atol=0.02, rtol=0)


def test_lerobots_own_functions_load_a_saved_directory_and_act_identically(adapter, policy, tmp_path):
    adapter.save_policy(policy, tmp_path)
    config = PreTrainedConfig.from_pretrained(tmp_path)
    assert config.type == "mmrl_gaussian_chunk"
    loaded = get_policy_class(config.type).from_pretrained(tmp_path, strict=True)
    overrides = {"device_processor": {"device": "cpu"}, "rename_observations_processor": {"rename_map": {}}}
    pre, post = make_pre_post_processors(
        config, pretrained_path=str(tmp_path), preprocessor_overrides=overrides,
        postprocessor_overrides={"device_processor": {"device": "cpu"}},
    )  # fmt: skip
    ours = adapter.postprocessor(policy.select_action(adapter.preprocessor(observation())))
    theirs = post(loaded.select_action(pre(observation())))
    torch.testing.assert_close(theirs, ours, atol=1e-6, rtol=0)
    one = {name: value[0] for name, value in observation().items()}  # as a robot sends it: no batch axis
    torch.testing.assert_close(post(loaded.predict_action_chunk(pre(one)))[0, 0], ours[0], atol=1e-4, rtol=0)


def _saved(adapter, policy, tmp_path):
    adapter.save_policy(policy, tmp_path)
    return copy.deepcopy(policy)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "policy_preprocessor.json", "policy_postprocessor.json"])
def test_a_missing_file_is_refused_by_name(adapter, policy, tmp_path, name):
    other = _saved(adapter, policy, tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name}: missing"):
        adapter.load_policy(other, tmp_path)


def test_missing_statistics_are_refused(adapter, policy, tmp_path):
    other = _saved(adapter, policy, tmp_path)
    for path in tmp_path.glob("policy_preprocessor_step_*.safetensors"):
        path.unlink()
    with pytest.raises(CheckpointError, match=r"missing; policy_preprocessor.json keeps its statistics there"):
        adapter.load_policy(other, tmp_path)


def test_other_statistics_are_refused(adapter, policy, tmp_path):
    other = _saved(adapter, policy, tmp_path)
    (path,) = tmp_path.glob("policy_postprocessor_step_*.safetensors")
    tensors = load_file(path)
    tensors["action.max"] = tensors["action.max"] / 57.3  # radians
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match="statistics of UnnormalizerProcessorStep differ"):
        adapter.load_policy(other, tmp_path)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda tensors: tensors.pop("head.bias"), "lacks tensor head.bias"),
        (lambda tensors: tensors.update(extra=torch.zeros(1)), "has an unexpected tensor extra"),
        (lambda tensors: tensors.update(keys=torch.zeros(3, 16)), "has another shape of tensor keys"),
    ],
)
def test_a_missing_extra_or_misshapen_tensor_is_refused_by_name(adapter, policy, tmp_path, change, problem):
    other = _saved(adapter, policy, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(CheckpointError, match=problem):
        adapter.load_policy(other, tmp_path)
    assert all(torch.equal(before[name], value) for name, value in other.state_dict().items())


def test_weights_of_a_policy_that_moves_differently_are_refused(adapter, policy, tmp_path):
    other = _saved(adapter, policy, tmp_path)
    tree = json.loads((tmp_path / "config.json").read_text())
    tree["max_delta"] = 0.5
    (tmp_path / "config.json").write_text(json.dumps(tree))
    with pytest.raises(CheckpointError, match=r"max_delta is 0.5, but this run's policy has 0.08"):
        adapter.load_policy(other, tmp_path)


def test_impossible_configs_are_refused():
    with pytest.raises(ConfigError, match="n_action_steps is 9; expected 1 to chunk_size"):
        GaussianChunkConfig(device="cpu", n_action_steps=9)
    with pytest.raises(ConfigError, match=r"initial_log_std 3\.0 is outside"):
        GaussianChunkConfig(device="cpu", initial_log_std=3.0)
    with pytest.raises(ConfigError, match=r"expected observation.state"):
        GaussianChunkConfig(device="cpu").validate_features()


def test_tokens_count_from_one_and_zero_is_padding(adapter):
    out = adapter.preprocessor(observation(rows=2, task="red nonsense blue"))
    vocabulary = adapter.build_policy().config.vocabulary
    ids = out[OBS_LANGUAGE_TOKENS][0].tolist()
    assert ids == [vocabulary.index("red") + 1, vocabulary.index("blue") + 1] + [0] * 14


def turned_scene(points, yaws, angle):
    """Points ``[n, 3]`` in metres and yaws after the scene turned by ``angle`` about the base, as the policy gets them."""
    cos, sin = np.cos(angle), np.sin(angle)
    points = points @ np.array([[cos, sin, 0.0], [-sin, cos, 0.0], [0.0, 0.0, 1.0]])
    low, high = environment_bounds[:3].T
    normalised = torch.from_numpy(2.0 * (points - low) / (high - low) - 1.0)[None]
    turns = torch.from_numpy(np.stack([np.cos(4.0 * (yaws + angle)), np.sin(4.0 * (yaws + angle))], axis=1))[None]
    return normalised[:, 0], normalised[:, 1:], normalised[:, 1:] - normalised[:, :1], turns


def test_the_turning_frame_shows_a_scene_the_same_wherever_the_arm_points():
    points, yaws = np.array([[0.2, 0.05, 0.1], [0.25, -0.1, 0.02], [0.1, 0.2, 0.05]]), np.array([0.3, -0.7])
    straight = in_turning_frame(*turned_scene(points, yaws, 0.0))
    for angle in (0.4, -1.3, 2.5):
        torch.testing.assert_close(in_turning_frame(*turned_scene(points, yaws, angle)), straight)
    # The arm pointing along x: ahead, to the left, up; in units of half of the 0.6 m that coordinates span.
    seen = in_turning_frame(*turned_scene(np.array([[0.2, 0.0, 0.1], [0.26, 0.03, 0.02]]), np.array([0.1]), 0.0))[0]
    expected = [0.2, 0.1, -0.08 / 0.3, np.hypot(0.26, 0.03) / 0.3, (0.02 - 0.15) / 0.3, np.cos(0.4), np.sin(0.4), 0.2 / 0.3]
    torch.testing.assert_close(seen, torch.tensor([*expected, (0.1 - 0.15) / 0.3], dtype=torch.float64))


def test_a_policy_with_a_turning_frame_looks_at_it(make_adapter):
    adapter = make_adapter("policy.turning_frame=true")
    policy = adapter.build_policy()
    plain = make_adapter().build_policy().trunk[0].weight
    added = policy.trunk[0].weight.shape[1] - plain.shape[1]
    assert added == 2 + 7 * policy.config.num_readers
    seen = adapter.preprocessor(observation())
    with torch.no_grad():
        policy.head.weight.normal_(std=0.3, generator=torch.Generator().manual_seed(0))
        before = policy.distribution(seen)[0]
        policy.trunk[0].weight[:, -added:] = 0.0
        assert not torch.allclose(policy.distribution(seen)[0], before)
