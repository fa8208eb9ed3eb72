import copy
import itertools

import pytest
import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.utils.constants import ACTION, OBS_ENV_STATE, OBS_LANGUAGE_ATTENTION_MASK, OBS_LANGUAGE_TOKENS, OBS_STATE

from mmrl.errors import ConfigError, DataError
from robotics.policies.configuration_flow_vla import FlowVlaConfig
from robotics.policies.configuration_token_vla import TokenVlaConfig
from robotics.policies.flow import gaussian_log_density, normal_to_uniform, sde_step, training_time
from robotics.policies.modeling_flow_vla import FlowVlaPolicy
from robotics.policies.modeling_token_vla import TokenVlaPolicy
from robotics.policies.motions import decode_motions, encode_motions, to_bins
from robotics.policies.seam import ChunkPolicy

SCENE = "observation.images.scene"
POLICIES = {"flow": (FlowVlaPolicy, FlowVlaConfig), "token": (TokenVlaPolicy, TokenVlaConfig)}


def build(kind, inputs="objects", *, fresh=False, **fields):
    """A small policy; unless ``fresh``, the gates of its expert are open, so every weight matters."""
    policy_class, config_class = POLICIES[kind]
    features = {OBS_STATE: PolicyFeature(FeatureType.STATE, (6,))}
    if "objects" in inputs:
        features[OBS_ENV_STATE] = PolicyFeature(FeatureType.ENV, (35,))
    if "image" in inputs:
        features[SCENE] = PolicyFeature(FeatureType.VISUAL, (3, 16, 24))
    settings = {"chunk_size": 4, "n_action_steps": 3, "width": 32, "depth": 2, "num_heads": 2, "max_words": 6, **fields}
    if kind == "token":
        settings = {"num_bins": 9, **settings}
    config = config_class(
        device="cpu",
        vocabulary=["reach", "red", "blue"],
        input_features=features,
        output_features={ACTION: PolicyFeature(FeatureType.ACTION, (6,))},
        **settings,
    )
    torch.manual_seed(0)
    policy = policy_class(config).eval()
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "modulation" in name and not fresh:
                parameter.normal_(std=0.3)
    return policy


def observe(policy, num=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    length = torch.randint(1, 7, (num, 1), generator=generator)
    words = torch.randint(1, 4, (num, 6), generator=generator) * (torch.arange(6) < length)
    batch = {
        OBS_STATE: torch.rand(num, 6, generator=generator) - 0.5,
        OBS_ENV_STATE: 2 * torch.rand(num, 35, generator=generator) - 1,
        SCENE: torch.rand(num, 3, 16, 24, generator=generator),
        OBS_LANGUAGE_TOKENS: words,
        OBS_LANGUAGE_ATTENTION_MASK: words > 0,
    }
    return {name: batch[name] for name in policy.observation_keys}


def draw(policy, num=5, seed=1):
    return torch.randn(num, *policy.noise_shape(), generator=torch.Generator().manual_seed(seed))


def demonstration(policy, observation, seed=2):
    state = observation[OBS_STATE]
    motions = torch.rand(len(state), 4, 6, generator=torch.Generator().manual_seed(seed)) * 1.6 - 0.8
    return decode_motions(state, motions, policy.config.max_delta)


def rows(tensors, index):
    return {name: value[index] for name, value in tensors.items()}


@pytest.fixture(params=list(itertools.product(POLICIES, ["objects", "image", "objects and image"])), ids=" ".join)
def policy(request):
    return build(*request.param)


@pytest.fixture(params=list(POLICIES))
def small(request):
    return build(request.param)


def test_it_is_a_chunk_policy(policy):
    assert isinstance(policy, ChunkPolicy)
    observation = observe(policy)
    decision = policy.decide(observation, draw(policy))
    assert decision.chunk.shape == (5, 4, 6)
    assert decision.density.shape == (5, 4)
    assert decision.density.dtype == torch.float32
    path = torch.cat([observation[OBS_STATE][:, None], decision.chunk], dim=1)
    assert path.diff(dim=1).abs().max() <= policy.config.max_delta + 1e-6
    assert decision.chunk.abs().max() <= 1.0
    assert not any(value.requires_grad for value in (decision.chunk, decision.density, *decision.record.values()))


def test_scoring_a_decision_gives_its_density(policy):
    observation = observe(policy)
    for noise in (draw(policy), None):
        decision = policy.decide(observation, noise)
        density, entropy = policy.score(observation, decision.record)
        torch.testing.assert_close(density.detach(), decision.density, atol=1e-5, rtol=0)
        assert density.requires_grad
        assert entropy.shape == (5, 4)
        assert decision.density.isfinite().all()


def test_a_row_does_not_depend_on_the_batch(policy):
    observation, noise = observe(policy), draw(policy)
    together = policy.decide(observation, noise)
    density, _ = policy.score(observation, together.record)
    for index in (torch.tensor([3]), torch.tensor([4, 1, 3])):
        alone = policy.decide(rows(observation, index), noise[index])
        torch.testing.assert_close(alone.chunk, together.chunk[index], atol=1e-5, rtol=0)
        torch.testing.assert_close(alone.density, together.density[index], atol=1e-4, rtol=0)
        again, _ = policy.score(rows(observation, index), rows(together.record, index))
        torch.testing.assert_close(again, density[index], atol=1e-5, rtol=0)


def test_decisions_depend_on_their_noise_only(small):
    observation = observe(small)
    first, second = small.decide(observation, draw(small)), small.decide(observation, draw(small))
    assert torch.equal(first.chunk, second.chunk)
    assert not torch.allclose(first.chunk, small.decide(observation, draw(small, seed=9)).chunk)
    assert torch.equal(small.decide(observation, None).chunk, small.decide(observation, None).chunk)


def test_every_input_matters(policy):
    observation = observe(policy)
    record = policy.decide(observation, draw(policy)).record
    density, _ = policy.score(observation, record)
    for name in policy.observation_keys:
        other = dict(observation)
        if name == OBS_LANGUAGE_TOKENS:
            other[name] = torch.where(observation[name] == 2, 3, observation[name])
        elif name == OBS_LANGUAGE_ATTENTION_MASK:
            other[name] = torch.zeros_like(observation[name])
        else:
            other[name] = observation[name].flip(0)
        assert (policy.score(other, record)[0] - density).abs().max() > 1e-3, name


def test_absent_words_do_not_matter(small):
    observation = observe(small)
    other = dict(observation)
    other[OBS_LANGUAGE_TOKENS] = torch.where(observation[OBS_LANGUAGE_ATTENTION_MASK], observation[OBS_LANGUAGE_TOKENS], 1)
    torch.testing.assert_close(small.decide(other, None).chunk, small.decide(observation, None).chunk, atol=1e-6, rtol=0)
    other[OBS_LANGUAGE_ATTENTION_MASK] = torch.zeros_like(observation[OBS_LANGUAGE_ATTENTION_MASK])
    density, _ = small.score(other, small.decide(other, draw(small)).record)
    density.sum().backward()
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in small.parameters())


@pytest.mark.parametrize("imitation", [False, True])
def test_gradients_reach_every_weight(policy, imitation):
    observation = observe(policy, num=8)
    if imitation:
        record = policy.imitate(observation, demonstration(policy, observation), draw(policy, 8))
    else:
        record = policy.decide(observation, draw(policy, 8)).record
    policy.score(observation, record)[0].square().sum().backward()
    still = [name for name, p in policy.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert not still


def test_demonstrations_and_decisions_share_a_batch(small):
    observation, noise = observe(small), draw(small)
    decided = small.decide(observation, noise).record
    imitated = small.imitate(observation, demonstration(small, observation), noise)
    assert {n: (v.shape, v.dtype) for n, v in decided.items()} == {n: (v.shape, v.dtype) for n, v in imitated.items()}
    first, last = torch.tensor([0, 1]), torch.tensor([2, 3, 4])
    mixed = {name: torch.cat([decided[name][first], imitated[name][last]]) for name in decided}
    for i in (0, 1):
        expected = torch.cat([small.score(observation, decided)[i][first], small.score(observation, imitated)[i][last]])
        torch.testing.assert_close(small.score(observation, mixed)[i], expected, atol=1e-5, rtol=0)


def test_flow_decisions_have_the_density_of_their_stochastic_step():
    policy = build("flow")
    observation, noise = observe(policy, 64), draw(policy, 64)
    decision = policy.decide(observation, noise)
    record = decision.record
    steps = (normal_to_uniform(noise[:, -1]) * 4).long()
    assert torch.equal(record["step"], steps)
    assert set(steps.tolist()) == {0, 1, 2, 3}
    torch.testing.assert_close(record["time"], 1.0 - steps / 4)
    velocity = policy._velocity(policy.backbone.read(observation), record["x"], record["time"])
    mean, std = sde_step(record["x"], velocity, record["time"], record["time"] - 0.25, noise_level=0.5, second_time=0.75)
    torch.testing.assert_close(record["target"], mean + std * noise[:, 24:48].reshape(64, 4, 6), atol=1e-5, rtol=0)
    expected = gaussian_log_density(record["target"], mean, std).sum(dim=2)
    torch.testing.assert_close(decision.density, expected.detach(), atol=1e-4, rtol=0)
    first, last = steps == 0, steps == 3
    torch.testing.assert_close(record["x"][first], noise[first, :24].reshape(-1, 4, 6))
    ends = decode_motions(observation[OBS_STATE], record["target"], 0.08)
    torch.testing.assert_close(ends[last], decision.chunk[last])  # the last step ends at the chunk
    x, prefix = record["target"][first], policy.backbone.read(rows(observation, first))
    for time in (0.75, 0.5, 0.25):  # after a stochastic first step, the others are not
        x = x - 0.25 * policy._velocity(prefix, x, torch.full((len(x),), time))
    chunk = decode_motions(observation[OBS_STATE][first], x, 0.08)
    torch.testing.assert_close(chunk.detach(), decision.chunk[first], atol=1e-5, rtol=0)
    _, entropy = policy.score(observation, record)
    torch.testing.assert_close(entropy, torch.distributions.Normal(0.0, std).entropy().sum(dim=2).mul(6).expand(-1, 4))


def test_the_last_step_can_be_the_stochastic_one_and_its_noise_is_that_of_the_motions():
    policy = build("flow", stochastic_step="last", sde_noise=0.3, num_denoising_steps=4)
    observation = observe(policy, 64)
    noise = draw(policy, 64)
    record = policy.decide(observation, noise).record
    assert (record["step"] == 3).all() and (record["time"] == 0.25).all()
    quiet = noise.clone()
    quiet[:, 24:48] = 0.0  # the same start, no noise in the step
    difference = record["target"] - policy.decide(observation, quiet).record["target"]
    torch.testing.assert_close(difference, 0.3 / 12**0.5 * noise[:, 24:48].unflatten(1, (4, 6)), atol=1e-5, rtol=0)
    others = build("flow", num_denoising_steps=4).decide(observation, noise).record["step"]
    assert others.unique().tolist() == [0, 1, 2, 3]


def test_flow_decisions_without_noise_take_euler_steps_from_zero():
    policy = build("flow", num_denoising_steps=3)
    observation = observe(policy)
    x, prefix = torch.zeros(5, 4, 6), policy.backbone.read(observation)
    for time in (1.0, 2 / 3, 1 / 3):
        x = x - policy._velocity(prefix, x, torch.full((5,), time)) / 3
    chunk = decode_motions(observation[OBS_STATE], x, 0.08)
    torch.testing.assert_close(policy.decide(observation, None).chunk, chunk.detach(), atol=1e-5, rtol=0)


def test_flow_imitation_is_flow_matching():
    policy = build("flow")
    observation, noise = observe(policy), draw(policy)
    chunk = demonstration(policy, observation)
    density, entropy = policy.score(observation, policy.imitate(observation, chunk, noise))
    action, start = encode_motions(observation[OBS_STATE], chunk, 0.08), noise[:, :24].reshape(5, 4, 6)
    time = training_time(noise[:, -1])
    between = time[:, None, None] * start + (1 - time[:, None, None]) * action
    error = policy._velocity(policy.backbone.read(observation), between, time) - (start - action)
    torch.testing.assert_close(density, -error.square().mean(dim=2), atol=1e-5, rtol=1e-5)
    assert entropy.abs().max() == 0


def test_token_entropy_and_density_are_exact():
    policy = build("token", temperature=1.6)
    observation = observe(policy)
    decision = policy.decide(observation, draw(policy))
    density, entropy = policy.score(observation, decision.record)
    categorical = torch.distributions.Categorical(logits=policy._logits(observation) / 1.6)
    torch.testing.assert_close(density, categorical.log_prob(decision.record["tokens"]).sum(dim=2))
    torch.testing.assert_close(entropy, categorical.entropy().sum(dim=2))
    assert torch.equal(policy.decide(observation, None).record["tokens"], categorical.logits.argmax(dim=3))


def test_token_imitation_is_cross_entropy_at_temperature_one():
    policy = build("token", temperature=1.6)
    observation = observe(policy)
    chunk = demonstration(policy, observation)
    density, _ = policy.score(observation, policy.imitate(observation, chunk, draw(policy)))
    bins = to_bins(encode_motions(observation[OBS_STATE], chunk, 0.08), 9)
    loss = torch.nn.functional.cross_entropy(policy._logits(observation).permute(0, 3, 1, 2), bins, reduction="none")
    torch.testing.assert_close(density, -loss.sum(dim=2))


def test_tokens_are_drawn_as_often_as_their_probability_says():
    policy = build("token")
    observation = rows(observe(policy), torch.zeros(4000, dtype=torch.int64))
    tokens = policy.decide(observation, draw(policy, 4000)).record["tokens"]
    probs = policy._logits(rows(observation, slice(1))).softmax(dim=3)[0]
    frequency = torch.nn.functional.one_hot(tokens, 9).float().mean(dim=0)
    assert (frequency - probs).abs().max() < 0.035  # four standard errors


def test_the_queue_holds_n_action_steps_and_reset_empties_it(small):
    first, second = observe(small, 2, seed=1), observe(small, 2, seed=2)
    chunk = small.predict_action_chunk(first)
    for step in range(3):
        torch.testing.assert_close(small.select_action(second if step else first), chunk[:, step])
    torch.testing.assert_close(small.select_action(second), small.predict_action_chunk(second)[:, 0])
    small.reset()
    torch.testing.assert_close(small.select_action(first), chunk[:, 0])


def test_padded_actions_do_not_count_in_lerobots_loss(small):
    observation = observe(small)
    batch = {**observation, ACTION: demonstration(small, observation)}
    padding = torch.zeros(5, 4, dtype=torch.bool)
    padding[:, 2:] = True
    other = {**batch, ACTION: batch[ACTION].clone(), "action_is_pad": padding}
    other[ACTION][:, 2:] = 0.5
    losses = []
    for each in ({**batch, "action_is_pad": padding}, other, batch):
        torch.manual_seed(0)
        loss, numbers = small(each)
        losses.append(loss.item())
        assert numbers == {"imitation_loss": loss.item()}
    assert losses[0] != pytest.approx(losses[2], rel=1e-4)
    if isinstance(small, TokenVlaPolicy):  # a flow's actions see each other's noisy values
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("kind", POLICIES)
def test_it_learns_64_demonstrations_by_heart(kind):
    num_steps = 160
    policy = build(kind, fresh=True, width=64, num_heads=4, **({"num_bins": 33} if kind == "token" else {}))
    observation = observe(policy, 64)
    motions = torch.rand(64, 1, 6, generator=torch.Generator().manual_seed(2)) * 1.6 - 0.8
    chunk = decode_motions(observation[OBS_STATE], motions.expand(-1, 4, -1), 0.08)
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(policy.get_optim_params(), lr=4e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)

    def error():
        return (policy.decide(observation, None).chunk - chunk).square().mean().sqrt().item()

    before = error()
    for _ in range(num_steps):
        noise = torch.randn(64, *policy.noise_shape(), generator=generator)
        loss = -policy.score(observation, policy.imitate(observation, chunk, noise))[0].mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    assert error() < before / 10


def test_images_of_another_size_or_type_are_refused():
    policy = build("token", "image")
    observation = observe(policy)
    with pytest.raises(
        DataError, match=r"observation.images.scene: images are torch.float32 \[3, 24, 16\]; expected .*\[3, 16, 24\]"
    ):
        policy.decide({**observation, SCENE: observation[SCENE].transpose(2, 3)}, None)
    with pytest.raises(DataError, match=r"images are torch.uint8"):
        policy.decide({**observation, SCENE: (255 * observation[SCENE]).byte()}, None)


def test_incomplete_observations_are_refused(small):
    observation = observe(small)
    del observation[OBS_ENV_STATE]
    with pytest.raises(DataError, match=r"observation lacks observation.environment_state; it has observation.language"):
        small.decide(observation, None)
    with pytest.raises(DataError, match=r"observation.environment_state: has 15 entries; the policy was built for 35"):
        small.decide({**observation, OBS_ENV_STATE: torch.zeros(5, 15)}, None)


@pytest.mark.parametrize(
    ("inputs", "problem"),
    [
        ({}, r"observation.state \[A\] and action \[A\] are needed; inputs \| outputs are: none \| action \[6\]"),
        ({OBS_STATE: ("STATE", (7,))}, r"are needed; inputs \| outputs are: observation.state \[7\] \| action \[6\]"),
        ({OBS_STATE: ("STATE", (6,))}, "observation.environment_state or an image is needed"),
        ({OBS_STATE: ("STATE", (6,)), OBS_ENV_STATE: ("ENV", (15,))}, r"must be \[3 \+ 3 num_slots \+ 2 num_yaws\] = \[35\]"),
        ({OBS_STATE: ("STATE", (6,)), SCENE: ("VISUAL", (3, 64, 62))}, "edges of two or more whole patches of 4"),
        ({OBS_STATE: ("STATE", (6,)), SCENE: ("VISUAL", (64, 64, 3))}, r"must be \[3, height, width\]"),
    ],
)
def test_features_that_do_not_fit_are_refused_with_both_lists(inputs, problem):
    features = {name: PolicyFeature(FeatureType[kind], shape) for name, (kind, shape) in inputs.items()}
    outputs = {ACTION: PolicyFeature(FeatureType.ACTION, (6,))}
    for config_class in (FlowVlaConfig, TokenVlaConfig):
        with pytest.raises(ConfigError, match=problem):
            config_class(device="cpu", input_features=features, output_features=outputs).validate_features()


@pytest.mark.parametrize(
    ("kind", "field", "value", "problem"),
    [
        ("flow", "n_action_steps", 9, r"n_action_steps is 9; expected 1 to chunk_size \(4\)"),
        ("flow", "num_heads", 3, "width 32 is not a multiple of num_heads"),
        ("flow", "patch_size", 6, "patch_size is 6; expected a power of two"),
        ("flow", "stochastic_step", "first", "stochastic_step is 'first'; expected any or last"),
        ("flow", "image_tokens", 0, "image_tokens is 0; expected 1 or more"),
        ("flow", "depth", 0, "depth is 0; expected 1 or more layers"),
        ("flow", "num_denoising_steps", 0, "num_denoising_steps is 0"),
        ("flow", "sde_noise", 0.0, "sde_noise is 0.0; expected more than 0"),
        ("token", "num_bins", 1, "num_bins is 1; expected 2 or more"),
        ("token", "temperature", 0.0, "temperature is 0.0; expected more than 0"),
    ],
)
def test_impossible_settings_are_refused(kind, field, value, problem):
    with pytest.raises(ConfigError, match=problem):
        build(kind, **{field: value})


def test_a_copy_decides_the_same(small):
    observation = observe(small)
    assert torch.equal(copy.deepcopy(small).decide(observation, None).chunk, small.decide(observation, None).chunk)
