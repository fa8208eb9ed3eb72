import pytest
import torch
from lerobot.configs import FeatureType, PolicyFeature, PreTrainedConfig
from lerobot.policies.factory import get_policy_class, make_pre_post_processors
from lerobot.utils.constants import ACTION, OBS_ENV_STATE, OBS_LANGUAGE_ATTENTION_MASK, OBS_LANGUAGE_TOKENS, OBS_STATE

from robotics.policies.configuration_flow_vla import FlowVlaConfig
from robotics.policies.configuration_token_vla import TokenVlaConfig

SCENE = "observation.images.scene"


@pytest.fixture(params=[FlowVlaConfig, TokenVlaConfig], ids=["flow", "token"])
def policy(request):
    config = request.param(
        device="cpu",
        vocabulary=["reach", "red", "blue"],
        input_features={
            OBS_STATE: PolicyFeature(FeatureType.STATE, (6,)),
            OBS_ENV_STATE: PolicyFeature(FeatureType.ENV, (35,)),
            SCENE: PolicyFeature(FeatureType.VISUAL, (3, 16, 16)),
        },
        output_features={ACTION: PolicyFeature(FeatureType.ACTION, (6,))},
        width=32,
        depth=2,
        num_heads=2,
    )
    torch.manual_seed(0)
    policy = get_policy_class(config.type)(config, dataset_stats=None).eval()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return policy


def processors(config):
    joints = {"min": torch.full((6,), -90.0), "max": torch.full((6,), 90.0)}
    environment = {"min": torch.full((35,), -0.5), "max": torch.full((35,), 0.5)}
    return make_pre_post_processors(config, dataset_stats={OBS_STATE: joints, ACTION: joints, OBS_ENV_STATE: environment})


def observation(num=3):
    generator = torch.Generator().manual_seed(0)
    return {
        OBS_STATE: 60.0 * torch.rand(num, 6, generator=generator),
        OBS_ENV_STATE: 0.3 * torch.rand(num, 35, generator=generator),
        SCENE: torch.rand(num, 3, 16, 16, generator=generator),
        "task": ["Reach the RED one!", "reach blue", ""][:num],
    }


def test_the_processors_give_what_the_policy_reads(policy):
    pre, post = processors(policy.config)
    raw = observation()
    batch = pre(dict(raw))
    assert set(policy.observation_keys) <= set(batch)
    torch.testing.assert_close(batch[OBS_STATE], raw[OBS_STATE] / 90)
    torch.testing.assert_close(batch[OBS_ENV_STATE], raw[OBS_ENV_STATE] / 0.5)
    assert torch.equal(batch[SCENE], raw[SCENE])  # images pass as they are
    assert batch[OBS_LANGUAGE_TOKENS][:, :3].tolist() == [[1, 2, 0], [1, 3, 0], [0, 0, 0]]
    assert batch[OBS_LANGUAGE_ATTENTION_MASK].sum(dim=1).tolist() == [2, 2, 0]
    torch.testing.assert_close(post(batch[OBS_STATE]), raw[OBS_STATE])


def test_a_saved_directory_acts_identically_through_lerobots_own_functions(policy, tmp_path):
    pre, post = processors(policy.config)
    for part in (policy, pre, post):
        part.save_pretrained(tmp_path)
    config = PreTrainedConfig.from_pretrained(tmp_path)
    assert (config.type, vars(config)) == (policy.name, vars(policy.config))
    loaded = get_policy_class(config.type).from_pretrained(tmp_path, strict=True)
    device = {"device_processor": {"device": "cpu"}}
    overrides = {**device, "rename_observations_processor": {"rename_map": {"observation.images.front": SCENE}}}
    their_pre, their_post = make_pre_post_processors(
        config, pretrained_path=str(tmp_path), preprocessor_overrides=overrides, postprocessor_overrides=device
    )
    renamed = observation()
    renamed["observation.images.front"] = renamed.pop(SCENE)
    batch, theirs = pre(observation()), their_pre(renamed)
    noise = torch.randn(3, *policy.noise_shape(), generator=torch.Generator().manual_seed(1))
    for given in (None, noise):
        assert torch.equal(loaded.decide(theirs, given).chunk, policy.decide(batch, given).chunk)
    assert torch.equal(their_post(loaded.select_action(theirs)), post(policy.select_action(batch)))
    one = {name: value[0] for name, value in observation().items()}  # as a robot sends it: no batch axis
    expected = policy.predict_action_chunk(batch)[:1]
    torch.testing.assert_close(loaded.predict_action_chunk(pre(one)), expected, atol=1e-5, rtol=0)


def test_lerobots_training_loop_can_step_it(policy):
    pre, _ = processors(policy.config)
    raw = observation()
    batch = pre({**raw, ACTION: raw[OBS_STATE][:, None].expand(-1, 8, -1) + 3.0})
    optimizer = policy.config.get_optimizer_preset().build(policy.get_optim_params())
    assert policy.config.action_delta_indices == list(range(8))
    losses = []
    for _ in range(30):
        torch.manual_seed(0)
        loss, _ = policy.forward(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
