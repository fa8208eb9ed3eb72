import math
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from lerobot.configs import FeatureType, PolicyFeature, PreTrainedConfig
from lerobot.policies.act.configuration_act import ACTConfig
from lerobot.policies.factory import get_policy_class, make_pre_post_processors
from lerobot.utils.constants import ACTION, OBS_LANGUAGE_ATTENTION_MASK, OBS_LANGUAGE_TOKENS, OBS_STATE

from mmrl.config import apply_overrides, read_config, validate
from mmrl.errors import AdapterError, CheckpointError, ConfigError
from mmrl.sampling import rollout_seeds
from mmrl.testing import check_adapter
from robotics.adapter import build_adapter, check_without_weights
from robotics.config import RoboticsRunConfig
from robotics.policies.building import as_chunk_policy
from robotics.policies.lerobot_prefix import read
from robotics.policies.seam import ChunkPolicy

CONFIGS = Path(__file__).parents[2] / "configs" / "robotics"
TYPES = ("smolvla", "pi0", "pi05")


def run_config(name, *overrides):
    path = CONFIGS / f"{name}.yaml"
    return validate(apply_overrides(read_config(path), overrides), RoboticsRunConfig, str(path))


def make(kind, *overrides):
    return build_adapter(run_config(f"{kind}_tiny", "rollout.media=false", *overrides))


@pytest.fixture(scope="module", params=TYPES)
def adapter(request):
    return make(request.param)


@pytest.fixture(scope="module")
def policy(adapter):
    return adapter.build_policy()


@pytest.fixture(scope="module")
def smolvla():
    return make("smolvla")


def observe(adapter, *texts):
    generator = torch.Generator().manual_seed(0)
    low, high = -50.0, 50.0
    batch = {
        OBS_STATE: low + (high - low) * torch.rand(len(texts), 6, generator=generator),
        "observation.images.scene": torch.rand(len(texts), 3, 64, 64, generator=generator),
        "task": list(texts),
    }
    seen = adapter.preprocessor(batch)
    return {name: value for name, value in seen.items() if isinstance(value, torch.Tensor)}


@pytest.fixture(scope="module")
def observation(adapter):
    return observe(adapter, "touch the red sphere", "go to the blue target", "touch the red sphere")


def draws(view, rows, seed=0):
    return torch.randn(rows, *view.noise_shape(), generator=torch.Generator().manual_seed(seed))


def rollout(adapter, policy, *, num_tasks=2, group_size=2):
    source = adapter.task_source("train")
    seeds = rollout_seeds(0, 0, 0, num_tasks * group_size)
    return adapter.rollout(policy, [source[i] for i in range(num_tasks)], group_size=group_size, seeds=seeds)


def own_sampler(policy, observation, noise):
    """LeRobot's chunk from a given start of the chain."""
    if policy.config.type == "smolvla":
        return policy.predict_action_chunk(dict(observation), noise=noise)
    images, masks = policy._preprocess_images(observation)
    words = (observation[OBS_LANGUAGE_TOKENS], observation[OBS_LANGUAGE_ATTENTION_MASK])
    state = () if isinstance(policy, get_policy_class("pi05")) else (policy.prepare_state(observation),)
    return policy.model.sample_actions(images, masks, *words, *state, noise=noise)[..., :6]


def test_smolvla_keeps_the_cores_contract(smolvla):
    check_adapter(smolvla, num_tasks=2, group_size=2)


def test_the_deterministic_decision_is_the_end_of_lerobots_own_sampler(policy, observation):
    view = as_chunk_policy(policy)
    assert isinstance(view, ChunkPolicy)
    expected = own_sampler(policy, observation, torch.zeros(3, 8, 8))
    torch.testing.assert_close(view.decide(observation, None).chunk, expected, atol=1e-5, rtol=0)
    assert expected.abs().max() > 0.01


def test_a_sampled_decision_follows_the_chain_written_out_by_hand(policy, observation):
    """Oracle F10's formulas, in plain numbers: noise on the six joints in one step, Euler on the padding and elsewhere."""
    view = as_chunk_policy(policy)
    noise = draws(view, 3)
    noise[:, -1] = torch.tensor([-2.0, 0.1, 2.0])  # uniform draws 0.02, 0.54, 0.98: steps 0, 2, 3
    decision = view.decide(observation, noise)
    assert decision.record["step"].tolist() == [0, 2, 3]
    x, kicks = noise[:, :64].reshape(3, 8, 8), noise[:, 64:112].reshape(3, 8, 6)
    velocity_at = read(policy, observation)
    density = torch.zeros(3, 8)
    times = [1.0, 0.75, 0.5, 0.25, 0.0]
    with torch.no_grad():
        for k, (t, following) in enumerate(pairwise(times)):
            v = velocity_at(x, torch.full((3,), t))
            moved = x - 0.25 * v
            sigma = 0.5 * math.sqrt(t / (1.0 - (0.75 if t == 1.0 else t)))
            std = sigma * math.sqrt(0.25)
            x0, x1 = x - v * t, x + v * (1.0 - t)
            mean = x0 * (1.0 - following) + x1 * (following - sigma**2 * 0.25 / (2.0 * t))
            for row in range(3):
                if decision.record["step"][row] == k:
                    moved[row, :, :6] = mean[row, :, :6] + std * kicks[row]
                    density[row] = torch.distributions.Normal(mean[row, :, :6], std).log_prob(moved[row, :, :6]).sum(dim=1)
            x = moved
    torch.testing.assert_close(decision.chunk, x[..., :6], atol=1e-4, rtol=0)
    torch.testing.assert_close(decision.density, density, atol=1e-4, rtol=0)


def test_scoring_gives_the_density_of_the_decision_and_each_row_stands_alone(policy, observation):
    view = as_chunk_policy(policy)
    decision = view.decide(observation, draws(view, 3))
    density, entropy = view.score(observation, decision.record)
    torch.testing.assert_close(density, decision.density, atol=1e-4, rtol=0)
    assert density.shape == (3, 8) and density.requires_grad and density.dtype == torch.float32
    last = {name: value[2:] for name, value in decision.record.items()}
    alone, _ = view.score({name: value[2:] for name, value in observation.items() if name in view.observation_keys}, last)
    torch.testing.assert_close(alone, density[2:], atol=1e-4, rtol=0)
    # Step k of 4 has standard deviation 1/2, 1/2 sqrt(3) / 2, 1/4, 1/4 / sqrt(3); six joints each.
    std = torch.tensor([0.5, 0.25 * math.sqrt(3.0), 0.25, 0.25 / math.sqrt(3.0)])[decision.record["step"]]
    torch.testing.assert_close(entropy[:, 0], 6 * (std.log() + 0.5 * math.log(2 * math.pi * math.e)))


def test_the_instruction_decides_with(adapter, policy, observation):
    view = as_chunk_policy(policy)
    other = {**observation, **{name: observe(adapter, "push the green block", "lift it", "stack them")[name]
             for name in (OBS_LANGUAGE_TOKENS, OBS_LANGUAGE_ATTENTION_MASK)}}  # fmt: skip
    record = view.decide(observation, draws(view, 3)).record
    assert not torch.allclose(view.score(observation, record)[0], view.score(other, record)[0], atol=1e-4)


def test_the_imitation_objective_is_lerobots_training_loss(policy, observation):
    view, generator = as_chunk_policy(policy), torch.Generator().manual_seed(3)
    chunk = torch.rand(3, 8, 6, generator=generator) * 2 - 1
    noise = draws(view, 3, seed=4)
    record = view.imitate(observation, chunk, noise)
    assert set(record) == {"x", "target", "time", "step"}
    assert {name: value.dtype for name, value in record.items()} == {
        name: value.dtype for name, value in view.decide(observation, noise).record.items()
    }
    actions = torch.cat([chunk, torch.zeros(3, 8, 2)], dim=2)
    words = (observation[OBS_LANGUAGE_TOKENS], observation[OBS_LANGUAGE_ATTENTION_MASK])
    prepare = policy.prepare_images if policy.config.type == "smolvla" else policy._preprocess_images
    state = () if isinstance(policy, get_policy_class("pi05")) else (policy.prepare_state(observation),)
    start = noise[:, :64].reshape(3, 8, 8)
    losses = policy.model.forward(*prepare(observation), *words, *state, actions, start, record["time"])
    density, entropy = view.score(observation, record)
    torch.testing.assert_close(density, -losses[..., :6].mean(dim=2), atol=1e-4, rtol=0)
    assert (entropy == 0).all()


def test_prompts_have_one_length_and_keep_their_words(adapter, observation):
    short = observe(adapter, "go")
    assert short[OBS_LANGUAGE_TOKENS].shape[1] == observation[OBS_LANGUAGE_TOKENS].shape[1]
    longest = observe(adapter, "pick up the yellow block, put it in the bowl and then close the drawer of the cabinet")
    assert 0 < int(short[OBS_LANGUAGE_ATTENTION_MASK].sum()) < int(longest[OBS_LANGUAGE_ATTENTION_MASK].sum())
    tokenizer = next(step.input_tokenizer for step in adapter.preprocessor.steps if hasattr(step, "input_tokenizer"))
    words = tokenizer.decode(longest[OBS_LANGUAGE_TOKENS][0], skip_special_tokens=True)
    assert "yellow block" in words and "of the cabinet" in words


def test_records_of_both_kinds_can_be_scored_together(policy, observation):
    view = as_chunk_policy(policy)
    decided = view.decide(observation, draws(view, 3)).record
    shown = view.imitate(observation, torch.zeros(3, 8, 6), draws(view, 3))
    mixed = {name: torch.stack([decided[name][0], shown[name][1], decided[name][2]]) for name in decided}
    densities = [view.score(observation, record)[0] for record in (decided, shown, mixed)]
    torch.testing.assert_close(
        densities[2], torch.stack([densities[0][0], densities[1][1], densities[0][2]]), atol=1e-4, rtol=0
    )


def test_only_the_action_expert_is_trained_unless_the_config_says_otherwise(adapter, policy, observation):
    view = as_chunk_policy(policy)
    policy.zero_grad(set_to_none=True)
    view.score(observation, view.decide(observation, draws(view, 3)).record)[0].sum().backward()
    touched = {name for name, parameter in policy.named_parameters() if parameter.grad is not None}
    policy.zero_grad(set_to_none=True)
    assert touched and not any(".vlm." in name or ".paligemma." in name for name in touched)
    assert touched == {name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    whole = make(adapter.config.policy.type, "policy.settings.train_expert_only=false").build_policy()
    view = as_chunk_policy(whole)
    view.score(observation, view.decide(observation, draws(view, 3)).record)[0].sum().backward()
    reached = [
        name for name, parameter in whole.named_parameters() if parameter.grad is not None and parameter.grad.abs().max() > 0
    ]
    assert any("layers.0.self_attn.k_proj" in name and (".vlm." in name or ".paligemma." in name) for name in reached)


def test_a_rollout_is_scored_as_recorded_and_a_step_changes_the_weights(adapter):
    policy = adapter.build_policy()
    batch = rollout(adapter, policy)
    log_probs = adapter.forward(policy, batch).log_probs
    torch.testing.assert_close(log_probs, batch.old_log_probs, atol=1e-4, rtol=0)
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    (-log_probs[batch.loss_mask].sum()).backward()
    torch.optim.SGD(trained, lr=1e-4).step()
    assert adapter.forward(policy, batch).log_probs.sum() > log_probs.sum()


def test_a_saved_directory_is_lerobots_and_gives_the_same_action(adapter, policy, observation, tmp_path):
    adapter.save_policy(policy, tmp_path)
    restored = adapter.build_policy()
    with torch.no_grad():
        for parameter in restored.parameters():
            parameter.add_(0.1)
    adapter.load_policy(restored, tmp_path)
    config = PreTrainedConfig.from_pretrained(tmp_path)
    theirs = get_policy_class(config.type).from_pretrained(tmp_path, config=config)
    preprocess, postprocess = make_pre_post_processors(config, pretrained_path=str(tmp_path))
    batch = {
        OBS_STATE: torch.zeros(1, 6),
        "observation.images.scene": torch.zeros(1, 3, 64, 64),
        "task": ["touch the red sphere"],
    }
    own = as_chunk_policy(policy).decide(adapter.preprocessor(dict(batch)), None).chunk
    for other in (restored, theirs):
        torch.testing.assert_close(as_chunk_policy(other).decide(preprocess(dict(batch)), None).chunk, own, atol=0, rtol=0)
    torch.testing.assert_close(postprocess(own), adapter.postprocessor(own), atol=0, rtol=0)


def test_supervised_steps_bring_the_demonstrated_commands_nearer(smolvla):
    policy = smolvla.build_policy()
    view = as_chunk_policy(policy)
    observation = observe(smolvla, *["touch the red sphere"] * 4)
    chunk = torch.linspace(-0.5, 0.5, 6).expand(4, 8, 6)
    error = lambda: (view.decide(observation, None).chunk - chunk).abs().mean().item()  # noqa: E731
    before = error()
    optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=3e-3)
    for step in range(60):
        optimizer.zero_grad()
        (-view.score(observation, view.imitate(observation, chunk, draws(view, 4, seed=step)))[0].mean()).backward()
        optimizer.step()
    assert error() < 0.6 * before


def test_a_warm_start_keeps_the_processors_of_a_policy_for_this_robot(smolvla, tmp_path):
    trained = smolvla.build_policy()
    with torch.no_grad():
        trained.model.action_out_proj.bias.fill_(0.25)
    adapter = make("smolvla")
    for step in adapter.preprocessor.steps:  # as if the statistics had been measured on a dataset
        if hasattr(step, "stats"):
            step.stats[OBS_STATE]["mean"] = step.stats[OBS_STATE]["mean"] + 7.0
            step.to(device="cpu")
            step._tensor_stats[OBS_STATE]["mean"] += 7.0
    adapter.save_policy(trained, tmp_path)
    warm = make("smolvla", f"policy.init_from={tmp_path}", "policy.num_denoising_steps=2")
    policy = warm.build_policy()
    assert (policy.model.action_out_proj.bias == 0.25).all() and policy.config.num_steps == 2
    batch = {OBS_STATE: torch.zeros(1, 6), "observation.images.scene": torch.zeros(1, 3, 64, 64), "task": ["go"]}
    kept, fresh = warm.preprocessor(dict(batch))[OBS_STATE], smolvla.preprocessor(dict(batch))[OBS_STATE]
    torch.testing.assert_close(kept, adapter.preprocessor(dict(batch))[OBS_STATE])
    assert not torch.allclose(kept, fresh)


def test_of_a_base_model_with_other_inputs_only_the_weights_are_taken(smolvla, tmp_path, caplog):
    other = make("smolvla", "policy.cameras=[scene,wrist]")
    base = other.build_policy()
    other.save_policy(base, tmp_path)
    with caplog.at_level("WARNING"):
        adapter = make("smolvla", f"policy.init_from={tmp_path}", "seed=5")
    assert "taking its weights only" in caplog.text
    policy = adapter.build_policy()
    assert as_chunk_policy(policy).observation_keys == as_chunk_policy(smolvla.build_policy()).observation_keys
    assert all(torch.equal(value, base.state_dict()[name]) for name, value in policy.state_dict().items())
    assert len(rollout(adapter, policy, num_tasks=1, group_size=1)) == 1


def test_weights_of_another_size_or_type_are_refused(smolvla, tmp_path):
    smolvla.save_policy(smolvla.build_policy(), tmp_path)
    with pytest.raises(CheckpointError, match=r"has an unexpected tensor .* of another size"):
        make("smolvla", f"policy.init_from={tmp_path}", "policy.settings.num_vlm_layers=1").build_policy()
    with pytest.raises(CheckpointError, match="holds a policy of type 'smolvla'; expected 'mmrl_small_pi0'"):
        make("pi0", f"policy.init_from={tmp_path}")
    with pytest.raises(CheckpointError, match="cannot be read"):
        make("smolvla", f"policy.init_from={tmp_path / 'nothing'}")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("policy.settings.num_vlm_layer=1", "not a field of LeRobot's SmolVLAConfig; did you mean num_vlm_layers?"),
        ("policy.settings.chunk_size=4", "policy.settings.chunk_size is not set here; it follows from policy.chunk_size"),
        ("policy.settings.num_vlm_layers=many", "policy.settings.num_vlm_layers is 'many'; expected"),
        ("policy.settings.size=huge", "policy.settings.size is 'huge'; expected tiny"),
        ("policy.cameras=[]", "policy.cameras is empty; smolvla needs at least one image"),
        ("policy.environment_state=true", "policy.environment_state is true"),
        ("policy.settings.use_delta_joint_actions_aloha=true", "LeRobot refuses this smolvla"),
    ],
)
def test_what_lerobots_config_does_not_know_is_refused(override, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        make("smolvla", override)


def test_settings_reach_lerobots_config_with_its_types():
    adapter = make("smolvla", "policy.settings.resize_imgs_with_padding=[32,32]", "policy.settings.expert_width_multiplier=0.5")
    policy = adapter.build_policy()
    assert policy.config.resize_imgs_with_padding == (32, 32)
    assert policy.model.vlm_with_expert.expert_hidden_size == 32


@pytest.mark.parametrize(
    ("name", "overrides", "weights", "trained"),
    [
        # SmolVLA's 450 M; pi0 and pi0.5 with PaliGemma (2.9 B), the expert and LeRobot's unused word heads.
        ("smolvla_reach", [], (450e6, 451e6), (99e6, 100e6)),
        pytest.param("pi05_reach", ["policy.type=pi0"], (3.9e9, 4.2e9), (300e6, 330e6), marks=pytest.mark.slow),
        ("pi05_reach", [], (3.9e9, 4.2e9), (420e6, 440e6)),
    ],
    ids=TYPES,
)
def test_configs_of_released_models_fit_together_without_any_weights(name, overrides, weights, trained):
    rows = dict(check_without_weights(run_config(name, *overrides)))
    assert weights[0] < int(rows["weights"].replace(",", "")) < weights[1]
    assert trained[0] < int(rows["trained weights"].replace(",", "")) < trained[1]
    assert rows["chunk"].startswith("(10, 6), padded to 32")
    assert rows["denoising"] == "4 steps, noise level 0.5"


def test_another_policy_of_lerobot_acts_and_says_that_it_cannot_be_trained():
    torch.manual_seed(0)
    config = ACTConfig(
        device="cpu", chunk_size=8, n_action_steps=4, dim_model=32, n_heads=2, dim_feedforward=64, n_encoder_layers=1,
        use_vae=False, pretrained_backbone_weights=None,
        input_features={
            OBS_STATE: PolicyFeature(type=FeatureType.STATE, shape=(6,)),
            "observation.environment_state": PolicyFeature(type=FeatureType.ENV, shape=(35,)),
        },
        output_features={ACTION: PolicyFeature(type=FeatureType.ACTION, shape=(6,))},
    )  # fmt: skip
    policy = get_policy_class("act")(config).eval()
    view = as_chunk_policy(policy)
    seen = {OBS_STATE: torch.rand(2, 6), "observation.environment_state": torch.rand(2, 35)}
    decision = view.decide(seen, torch.zeros(2, *view.noise_shape()))
    torch.testing.assert_close(decision.chunk, policy.predict_action_chunk(dict(seen))[:, :4])
    torch.testing.assert_close(decision.chunk, view.decide(seen, None).chunk)
    assert decision.record == {} and decision.density.shape == (2, 4)
    with pytest.raises(AdapterError, match="policy of type 'act' can act but not be trained here"):
        view.score(seen, {})
    with pytest.raises(AdapterError, match="smolvla, pi0, pi05"):
        view.imitate(seen, decision.chunk, torch.zeros(2, 1))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pi0", "pi05"])
def test_pi_keeps_the_cores_contract(kind):
    check_adapter(make(kind), num_tasks=2, group_size=2)


@pytest.mark.slow
def test_the_expert_demonstrates_and_the_policy_can_be_trained_on_it(adapter):
    policy, source = adapter.build_policy(), adapter.task_source("train")
    batch = adapter.demonstrate(policy, [source[i] for i in range(4)], seeds=torch.arange(4))
    log_probs = adapter.forward(policy, batch).log_probs
    assert log_probs[batch.loss_mask].isfinite().all() and np.isfinite(batch.outcomes[0].commands).all()
