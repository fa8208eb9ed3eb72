"""`robotics.checkpoints`: a policy directory is opened whole or refused by name (cases P1 and P2)."""

import json
import shutil

import numpy as np
import pytest
import torch
from lerobot.processor import NormalizerProcessorStep
from safetensors.torch import load_file, save_file

from mmrl.checkpoint import write_checkpoint
from mmrl.errors import CheckpointError
from robotics.checkpoints import METADATA, floor_statistics, open_policy, policy_directory, read_metadata, save_policy
from robotics.policies.building import build_processors, new_policy, policy_config

LIMITS = np.array([[-110.0, 110.0]] * 5 + [[0.0, 100.0]])


@pytest.fixture(scope="module")
def saved(tmp_path_factory, adapter):
    directory = tmp_path_factory.mktemp("policy") / "policy"
    adapter.save_policy(adapter.build_policy(), directory)
    return directory


@pytest.fixture
def directory(saved, tmp_path):
    """A copy to damage."""
    return shutil.copytree(saved, tmp_path / "policy")


def edit_tensors(path, change):
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def statistics_of(pipeline):
    return next(step for step in pipeline.steps if isinstance(step, NormalizerProcessorStep))


def test_an_opened_policy_decides_as_the_saved_one(adapter, saved):
    policy, preprocessor, postprocessor = open_policy(saved)
    batch = {
        "observation.state": torch.tensor([[0.0, -20.0, 20.0, 30.0, 0.0, 20.0]]),
        "observation.environment_state": torch.linspace(-0.1, 0.3, 35)[None],
        "task": ["reach the red target"],
    }
    own = adapter.build_policy()
    expected = adapter.postprocessor(own.predict_action_chunk(adapter.preprocessor(dict(batch))))
    assert torch.equal(postprocessor(policy.predict_action_chunk(preprocessor(dict(batch)))), expected)
    assert not policy.training
    assert read_metadata(saved)["control_hz"] == 20.0 and read_metadata(saved)["action_names"][-1] == "gripper"


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "model.safetensors",
        "policy_preprocessor.json",
        "policy_postprocessor.json",
        "policy_preprocessor_step_4_normalizer_processor.safetensors",
        "policy_postprocessor_step_0_unnormalizer_processor.safetensors",
    ],
)
def test_a_missing_file_is_named(directory, name):
    (directory / name).unlink()
    with pytest.raises(CheckpointError, match=rf"{name}: missing"):
        open_policy(directory)


def test_a_missing_an_extra_and_a_misshapen_tensor_are_named(directory):
    weights = directory / "model.safetensors"
    whole = weights.read_bytes()
    edit_tensors(weights, lambda tensors: tensors.pop("head.bias"))
    with pytest.raises(CheckpointError, match=r"lacks tensor head\.bias"):
        open_policy(directory)
    weights.write_bytes(whole)
    edit_tensors(weights, lambda tensors: tensors.update(stray=torch.ones(1)))
    with pytest.raises(CheckpointError, match="unexpected tensor stray"):
        open_policy(directory)
    weights.write_bytes(whole)
    edit_tensors(weights, lambda tensors: tensors.update({"head.bias": torch.ones(2)}))
    with pytest.raises(CheckpointError, match=r"another shape of tensor head\.bias"):
        open_policy(directory)
    weights.write_bytes(whole[:1000])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read"):
        open_policy(directory)


def test_a_feature_without_statistics_is_refused_instead_of_passed_through_raw(directory):
    edit_tensors(
        directory / "policy_preprocessor_step_4_normalizer_processor.safetensors",
        lambda tensors: tensors.pop("observation.state.max"),
    )
    with pytest.raises(CheckpointError, match=r"statistics lack observation\.state\.max"):
        open_policy(directory)


def test_a_normaliser_whose_state_file_is_not_even_mentioned_is_refused(directory):
    path = directory / "policy_postprocessor.json"
    tree = json.loads(path.read_text())
    for step in tree["steps"]:
        step.pop("state_file", None)
    path.write_text(json.dumps(tree))
    with pytest.raises(CheckpointError, match=r"policy_postprocessor\.json: the statistics lack action\.min"):
        open_policy(directory)


def test_an_unknown_policy_type_and_a_broken_pipeline_are_refused(directory):
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "type": "no_such_policy"}))
    with pytest.raises(CheckpointError, match="no_such_policy"):
        open_policy(directory)
    (directory / "config.json").write_text(json.dumps({**config, "number_of_legs": 4}))
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read .*number_of_legs"):
        open_policy(directory)
    (directory / "policy_preprocessor.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"policy_preprocessor\.json: not a list of processor steps"):
        open_policy(directory)


@pytest.mark.parametrize("entry", [0, 5])
def test_a_joint_that_never_moved_in_the_data_does_not_become_a_million(directory, entry):
    def freeze(tensors):
        tensors["observation.state.min"][entry] = tensors["observation.state.max"][entry] = 20.0

    edit_tensors(directory / "policy_preprocessor_step_4_normalizer_processor.safetensors", freeze)
    notices = []
    _, preprocessor, _ = open_policy(directory, on_notice=notices.append)
    assert len(notices) == 1 and f"observation.state: entries {entry} do not vary" in notices[0]
    state = torch.full((1, 6), 20.0)
    state[0, entry] += 0.5
    seen = preprocessor({"observation.state": state, "observation.environment_state": torch.zeros(1, 35), "task": ["go"]})
    assert abs(seen["observation.state"][0, entry]) < 2.0
    state[0, entry] = 20.0  # the constant itself is still what the policy was trained on
    seen = preprocessor({"observation.state": state, "observation.environment_state": torch.zeros(1, 35), "task": ["go"]})
    assert seen["observation.state"][0, entry].item() == -1.0
    assert floor_statistics(preprocessor) == []


def test_standard_deviations_get_a_floor_too(make_adapter, tmp_path):
    adapter = make_adapter()
    config = policy_config(adapter.config.policy, num_joints=6, execution_horizon=4)
    config.normalization_mapping = dict.fromkeys(config.normalization_mapping, "MEAN_STD")
    preprocessor, postprocessor = build_processors(config, LIMITS)
    statistics_of(preprocessor)._tensor_stats["observation.state"]["std"][2] = 0.0
    save_policy(new_policy(config, seed=0), preprocessor, postprocessor, tmp_path)
    notices = []
    _, opened, _ = open_policy(tmp_path, on_notice=notices.append)
    assert "entries 2" in notices[0]
    assert statistics_of(opened)._tensor_stats["observation.state"]["std"][2].item() == pytest.approx(1.1)


def test_a_run_a_checkpoint_and_the_pointer_lead_to_the_policy(saved, tmp_path):
    def save(target):
        shutil.copytree(saved, target, dirs_exist_ok=True)

    run = tmp_path / "run"
    step = write_checkpoint(run / "checkpoints", 5, save_policy=save, state={}, optimizer={})
    for path in (run, run / "checkpoints", run / "checkpoints" / "latest", step, step / "policy"):
        assert policy_directory(path) == step / "policy"
    assert policy_directory(saved) == saved
    with pytest.raises(CheckpointError, match="no policy found"):
        policy_directory(tmp_path / "nowhere")
    (step / "policy" / METADATA).write_text("{}")
    with pytest.raises(CheckpointError, match="has changed since it was written"):
        policy_directory(run)
