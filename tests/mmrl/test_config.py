"""`mmrl.config`: reading, merging, overriding, validating and writing one run's YAML."""

from pathlib import Path
from typing import Annotated, Literal

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, ValidationError

from mmrl.algorithms import PRESETS
from mmrl.config import (
    AlgorithmConfig,
    RewardConfig,
    RunConfig,
    Section,
    apply_overrides,
    differences,
    read_config,
    to_yaml,
    validate,
)
from mmrl.errors import ConfigError, MMRLError

MINIMAL = {"modality": "vision", "name": "digits", "rewards": {"accuracy": 1.0}, "trainer": {"num_steps": 10}}


def build(*overrides, **sections):
    """The config of the smallest file, with ``sections`` replaced and command-line ``overrides`` on top."""
    return validate(apply_overrides({**MINIMAL, **sections}, overrides), RunConfig, "run.yaml")


def refuse(*overrides, **sections):
    """The message with which such a config is refused."""
    with pytest.raises(ConfigError) as error:
        build(*overrides, **sections)
    return str(error.value)


def write(folder, **files):
    """Write YAML files; the keyword is the stem."""
    for stem, text in files.items():
        (folder / f"{stem}.yaml").write_text(text, encoding="utf-8")


def refuse_file(path):
    """The message with which a file is refused."""
    with pytest.raises(ConfigError) as error:
        read_config(path)
    return str(error.value)


# ---- what is refused, and how -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sampilng.group_size=4", "run.yaml: sampilng is not a known key; did you mean 'sampling'?"),
        ("sampling.group_siz=4", "run.yaml: sampling.group_siz is not a known key; did you mean 'group_size'?"),
        ("algorithm.clip_hi=0.3", "run.yaml: algorithm.clip_hi is not a known key; did you mean 'clip_high'?"),
        ("rewards.accuracy.wieght=1", "run.yaml: rewards.accuracy.wieght is not a known key; did you mean 'weight'?"),
    ],
)
def test_an_unknown_key_suggests_the_closest_known_one(override, message):
    assert refuse(override) == message


def test_an_unknown_key_that_resembles_none_lists_the_known_ones():
    message = refuse("checkpoint.zzz=1")
    assert message == "run.yaml: checkpoint.zzz is not a known key; expected one of: every, keep_last"


class Digits(Section):
    name: Literal["digits"]
    num_images: int = 1


class Files(Section):
    name: Literal["files"]
    folder: str = "."


class PluggableConfig(RunConfig):
    tasks: Annotated[Digits | Files, Field(discriminator="name")]


def test_an_unknown_key_of_a_pluggable_part_suggests_one_of_its_keys():
    with pytest.raises(ConfigError, match="num_imges is not a known key; did you mean 'num_images'"):
        validate({**MINIMAL, "tasks": {"name": "digits", "num_imges": 2}}, PluggableConfig, "run.yaml")


@pytest.mark.parametrize(
    ("override", "start"),
    [
        # Wrong types.
        ("trainer.num_steps=ten", "run.yaml: trainer.num_steps is 'ten': Input should be a valid integer"),
        ("trainer.num_steps=1.5", "run.yaml: trainer.num_steps is 1.5: Input should be a valid integer"),
        ("trainer=[1]", "run.yaml: trainer is [1]: Input should be a valid dictionary"),
        ("algorithm.mask_truncated=maybe", "run.yaml: algorithm.mask_truncated is 'maybe': Input should be a valid boolean"),
        ("sampling.order=random", "run.yaml: sampling.order is 'random': Input should be 'shuffled' or 'sequential'"),
        ("rewards.accuracy=high", "run.yaml: rewards.accuracy.weight is 'high': Input should be a valid number"),
        ("rewards.accuracy=", "run.yaml: rewards.accuracy.weight is None: Input should be a valid number"),
        ("rewards=3", "run.yaml: rewards is 3: Input should be a valid dictionary"),
        # Out of range.
        ("trainer.num_steps=0", "run.yaml: trainer.num_steps is 0: Input should be greater than 0"),
        ("algorithm.clip_low=1.0", "run.yaml: algorithm.clip_low is 1.0: Input should be less than 1"),
        ("algorithm.kl_coef=-0.1", "run.yaml: algorithm.kl_coef is -0.1: Input should be greater than or equal to 0"),
        ("algorithm.dual_clip=1.0", "run.yaml: algorithm.dual_clip is 1.0: Input should be greater than 1"),
        ("algorithm.advantage_ddof=2", "run.yaml: algorithm.advantage_ddof is 2: Input should be 0 or 1"),
        ("optimizer.learning_rate=.inf", "run.yaml: optimizer.learning_rate is inf: Input should be a finite number"),
        ("optimizer.learning_rate=.nan", "run.yaml: optimizer.learning_rate is nan: Input should be"),
        ("optimizer.betas=[0.9, 1.0]", "run.yaml: optimizer.betas.1 is 1.0: Input should be less than 1"),
        ("optimizer.betas=[-0.1, 0.9]", "run.yaml: optimizer.betas.0 is -0.1: Input should be greater than or equal to 0"),
        ("seed=-1", "run.yaml: seed is -1: Input should be greater than or equal to 0"),
        # Unknown algorithms.
        ("algorithm=grop", "run.yaml: algorithm is 'grop': unknown algorithm 'grop'; did you mean 'grpo'?"),
        ("algorithm.name=dappo", "run.yaml: algorithm is {'name': 'dappo'}: unknown algorithm 'dappo'; did you mean 'dapo'?"),
        (
            "algorithm.name=[dapo]",
            "run.yaml: algorithm is {'name': ['dapo']}: unknown algorithm ['dapo']",
        ),
        ("algorithm=3", "run.yaml: algorithm is 3: expected the name of a preset, or a mapping"),
        ("algorithm=[dapo]", "run.yaml: algorithm is ['dapo']: expected the name of a preset, or a mapping"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_with_its_key_and_value(override, start):
    assert refuse(override).startswith(start)


def test_a_missing_section_or_key_is_named():
    tree = {key: value for key, value in MINIMAL.items() if key != "trainer"}
    with pytest.raises(ConfigError, match=r"^run\.yaml: trainer is missing$"):
        validate(tree, RunConfig, "run.yaml")
    assert refuse(trainer={}) == "run.yaml: trainer.num_steps is missing"


def test_a_run_without_rewards_is_refused():
    assert refuse(rewards={}).startswith("run.yaml: rewards is {}: Dictionary should have at least 1 item")


def test_every_problem_is_reported_at_once():
    message = refuse("seed=-1", "sampling.group_siz=4", "trainer.num_steps=0")
    assert all(key in message for key in ("seed is -1", "sampling.group_siz is not a known key", "trainer.num_steps is 0"))
    assert message.count("; run.yaml: ") == 2


@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo", "dapo", "rloo", "gspo"])
def test_a_group_of_one_is_refused_where_rollouts_are_compared(algorithm):
    message = refuse(f"algorithm={algorithm}", "sampling.group_size=1")
    assert message.startswith("run.yaml: sampling.group_size is 1, but algorithm.advantage")
    assert message.endswith("use 2 or more.")


def test_a_group_of_one_is_fine_for_likelihood():
    assert build("algorithm=sft", "sampling.group_size=1").sampling.group_size == 1


def test_the_selection_metric_must_be_a_reward():
    assert refuse("algorithm.selection_metric=acuracy").endswith("is not among rewards; did you mean 'accuracy'?")
    assert build("algorithm.selection_metric=accuracy").algorithm.selection_metric == "accuracy"


def test_groups_must_divide_evenly_into_minibatches():
    message = refuse("sampling.tasks_per_step=10", "trainer.minibatches=4")
    assert "sampling.tasks_per_step (10) must be divisible by trainer.minibatches (4)" in message
    assert build("sampling.tasks_per_step=12", "trainer.minibatches=4").trainer.minibatches == 4


def test_config_errors_are_ours_and_value_errors():
    for kind in (MMRLError, ValueError):
        with pytest.raises(kind):
            build("seed=-1")


def test_configs_are_frozen():
    config = build()
    for section, key in [(config, "seed"), (config.trainer, "num_steps"), (config.algorithm, "clip_low")]:
        with pytest.raises(ValidationError, match="frozen"):
            setattr(section, key, 1)


# ---- presets ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_sets_its_slots_and_leaves_the_others_at_their_defaults(name):
    algorithm = build(algorithm=name).algorithm
    expected = {**AlgorithmConfig().model_dump(), **PRESETS[name].slots, "name": name}
    assert algorithm.model_dump() == expected


def test_presets_are_the_recipes_of_their_papers():
    # algorithms.md, section 8.
    grpo, dr_grpo, dapo, rloo, gspo = (build(algorithm=name).algorithm for name in ("grpo", "dr_grpo", "dapo", "rloo", "gspo"))
    assert (grpo.advantage, grpo.aggregation, grpo.clip_low, grpo.clip_high) == ("group_std", "sequence_mean", 0.2, 0.2)
    assert (dr_grpo.advantage, dr_grpo.aggregation) == ("group_center", "constant")
    assert (dapo.advantage, dapo.aggregation, dapo.clip_low, dapo.clip_high) == ("group_std", "token_mean", 0.2, 0.28)
    assert dapo.selection == "dynamic" and grpo.selection == "none"
    assert (rloo.advantage, rloo.kl, rloo.kl_in) == ("leave_one_out", "k1", "reward")
    assert (gspo.ratio, gspo.clip_low, gspo.clip_high, gspo.aggregation) == ("sequence", 3e-4, 4e-4, "sequence_mean")
    assert all(recipe.kl_coef == 0 and recipe.surrogate == "clip" for recipe in (grpo, dr_grpo, dapo, rloo, gspo))


def test_a_run_without_an_algorithm_is_grpo_as_if_it_had_been_named():
    assert build().algorithm == build(algorithm="grpo").algorithm == build(algorithm={}).algorithm


def test_an_override_of_a_named_algorithm_keeps_its_other_slots():
    algorithm = build("algorithm.clip_high=0.3", algorithm="dapo").algorithm
    assert algorithm == build(algorithm="dapo").algorithm.model_copy(update={"clip_high": 0.3})
    assert (algorithm.name, algorithm.selection) == ("dapo", "dynamic")


def test_a_slot_of_a_preset_can_be_overridden_in_the_mapping_form():
    algorithm = build(algorithm={"name": "gspo", "aggregation": "token_mean"}).algorithm
    assert (algorithm.aggregation, algorithm.ratio, algorithm.clip_high) == ("token_mean", "sequence", 4e-4)


def test_another_algorithm_replaces_the_preset_of_the_file():
    assert build("algorithm=gspo", algorithm={"name": "dapo", "clip_high": 0.5}) == build(algorithm="gspo")
    assert build("algorithm.name=gspo", algorithm="dapo") == build(algorithm="gspo")


# ---- rewards ------------------------------------------------------------------------------------------------------------


def test_a_number_is_short_for_a_weighted_reward():
    # 1e-3 has no dot, so YAML reads it as a string.
    rewards = yaml.safe_load("{accuracy: 1, format: 0.5, length: 1e-3, mine: {weight: 2, function: 'my_module:my_term'}}")
    assert build(rewards=rewards).rewards == {
        "accuracy": RewardConfig(weight=1.0),
        "format": RewardConfig(weight=0.5),
        "length": RewardConfig(weight=0.001),
        "mine": RewardConfig(weight=2.0, function="my_module:my_term"),
    }


def test_a_short_reward_takes_overrides_of_its_long_form():
    assert build("rewards.accuracy.weight=0.25").rewards["accuracy"].weight == 0.25
    assert build("rewards.format=0.5").rewards.keys() == {"accuracy", "format"}


# ---- overrides ----------------------------------------------------------------------------------------------------------


def test_overrides_are_yaml_values_and_the_last_one_wins():
    config = build(
        "optimizer.learning_rate=1e-5",
        "trainer.num_steps=3",
        "trainer.num_steps=7",
        "algorithm.mask_truncated=true",
        "optimizer.max_grad_norm=null",
        "metrics.trackers=[wandb, trackio]",
        "rewards={format: 2}",
        "name=a=b",
    )
    assert config.optimizer.learning_rate == 1e-5 and config.optimizer.max_grad_norm is None
    assert config.trainer.num_steps == 7
    assert config.algorithm.mask_truncated is True
    assert config.metrics.trackers == ("wandb", "trackio")
    assert {name: term.weight for name, term in config.rewards.items()} == {"accuracy": 1.0, "format": 2.0}  # merged
    assert config.name == "a=b"


def test_overrides_leave_the_tree_that_they_are_given_alone():
    tree = {"trainer": {"num_steps": 1, "minibatches": 2}}
    assert apply_overrides(tree, ["trainer.num_steps=5"]) == {"trainer": {"num_steps": 5, "minibatches": 2}}
    assert tree == {"trainer": {"num_steps": 1, "minibatches": 2}}


@pytest.mark.parametrize("override", ["trainer.num_steps", "=3", ""])
def test_an_override_without_a_key_or_a_value_is_refused(override):
    with pytest.raises(ConfigError, match=r"expected section\.key=value, for example trainer\.num_steps=10"):
        apply_overrides({}, [override])


def test_an_override_that_is_not_yaml_is_refused_on_one_line():
    with pytest.raises(ConfigError, match=r"override 'seed=\[1': not YAML") as error:
        apply_overrides({}, ["seed=[1"])
    assert "\n" not in str(error.value)


# ---- files --------------------------------------------------------------------------------------------------------------


def test_a_file_is_named_by_its_stem_unless_it_says_otherwise(tmp_path):
    write(tmp_path, count="seed: 1", other="name: mine")
    assert read_config(tmp_path / "count.yaml") == {"seed": 1, "name": "count"}
    assert read_config(tmp_path / "other.yaml") == {"name": "mine"}
    assert build(name="mine", output_dir="out").run_dir == Path("out/mine")


def test_bases_are_merged_key_by_key_and_later_ones_win(tmp_path):
    (tmp_path / "shared").mkdir()
    write(tmp_path / "shared", one="{trainer: {num_steps: 1, minibatches: 2}, seed: 1}", two="trainer: {num_steps: 2}")
    write(tmp_path, top="base: [shared/one.yaml, shared/two.yaml]\ntrainer: {epochs_per_batch: 3}")
    tree = read_config(tmp_path / "top.yaml")
    assert tree == {"trainer": {"num_steps": 2, "minibatches": 2, "epochs_per_batch": 3}, "seed": 1, "name": "top"}


def test_a_file_wins_over_its_base_and_bases_may_have_bases(tmp_path):
    write(
        tmp_path,
        bottom="{seed: 1, modality: vision, algorithm: dapo}",
        middle="{base: bottom.yaml, seed: 2}",
        top="{base: middle.yaml, seed: 3, algorithm: {clip_high: 0.3}}",
    )
    tree = read_config(tmp_path / "top.yaml")
    assert tree == {"seed": 3, "modality": "vision", "algorithm": {"name": "dapo", "clip_high": 0.3}, "name": "top"}


def test_two_bases_may_share_a_base(tmp_path):
    write(tmp_path, root="seed: 1", left="base: root.yaml", right="base: root.yaml", top="base: [left.yaml, right.yaml]")
    assert read_config(tmp_path / "top.yaml") == {"seed": 1, "name": "top"}


@pytest.mark.parametrize("files", [{"a": "base: a.yaml"}, {"a": "base: b.yaml", "b": "base: c.yaml", "c": "base: a.yaml"}])
def test_bases_that_include_each_other_in_a_circle_are_refused(tmp_path, files):
    write(tmp_path, **files)
    assert refuse_file(tmp_path / "a.yaml").endswith(
        "a.yaml: base files include each other in a circle; remove one of the base: entries."
    )


@pytest.mark.parametrize("base", ["3", "", "[3]", "{a: b}"])
def test_a_base_that_is_not_a_file_name_is_refused(tmp_path, base):
    write(tmp_path, a=f"base: {base}")
    assert "a.yaml: base is" in refuse_file(tmp_path / "a.yaml")


def test_a_missing_file_is_refused_by_name(tmp_path):
    assert refuse_file(tmp_path / "absent.yaml").startswith(f"{tmp_path}/absent.yaml: no such file; expected a YAML config")
    write(tmp_path, top="base: shared/absent.yaml")
    assert refuse_file(tmp_path / "top.yaml").startswith(f"{tmp_path}/shared/absent.yaml: no such file")


def test_a_folder_is_refused(tmp_path):
    assert refuse_file(tmp_path).startswith(f"{tmp_path}: cannot be read")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("trainer: {num_steps: 1}\nseed: 1\ntrainer: {num_steps: 2}\n", "the key 'trainer' is given twice (first in line 1)"),
        ("trainer:\n  num_steps: 1\n  num_steps: 2\n", "the key 'num_steps' is given twice (first in line 2)"),
        ("name: 2001-13-40\n", "holds a value that YAML cannot read"),
        ("a: " + "[" * 5000, "nested too deeply"),
    ],
)
def test_what_yaml_would_let_pass_or_stumble_over_is_refused(tmp_path, text, found):
    write(tmp_path, a=text)
    message = refuse_file(tmp_path / "a.yaml")
    assert message.startswith(f"{tmp_path}/a.yaml: ") and found in message and "\n" not in message


def test_anchors_and_merge_keys_are_no_repetitions(tmp_path):
    write(tmp_path, a="one: &one {x: 1, y: 2}\ntwo: {<<: *one, x: 3}\nthree: {<<: *one, <<: {z: 4}}\n")
    assert read_config(tmp_path / "a.yaml")["two"] == {"x": 3, "y": 2}


def test_bad_yaml_is_refused_with_the_line_and_on_one_line(tmp_path):
    write(tmp_path, bad="seed: 1\ntrainer: [1, 2")
    message = refuse_file(tmp_path / "bad.yaml")
    assert message.startswith(f"{tmp_path}/bad.yaml: not YAML (") and "line 2" in message and "\n" not in message


def test_a_file_that_is_not_text_is_refused(tmp_path):
    (tmp_path / "a.yaml").write_bytes(b"\xff\xfe\x00")
    assert "a.yaml: not YAML" in refuse_file(tmp_path / "a.yaml")


@pytest.mark.parametrize(("text", "kind"), [("", "NoneType"), ("[1]", "list"), ("word", "str")])
def test_a_file_without_sections_is_refused(tmp_path, text, kind):
    write(tmp_path, a=text)
    assert refuse_file(tmp_path / "a.yaml").endswith(f"holds {kind}; expected sections such as trainer: and rewards:.")


# ---- the resolved config ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_the_resolved_yaml_reads_back_to_an_equal_config(tmp_path, name):
    config = build(
        "algorithm.horizon=7",
        "optimizer.learning_rate=3e-7",
        "metrics.trackers=[wandb]",
        "output_dir=/tmp/runs",
        algorithm=name,
        rewards={"accuracy": 1.0, "mine": {"weight": 1e-5, "function": "module:term"}},
    )
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert validate(read_config(tmp_path / "config.yaml"), RunConfig, "config.yaml") == config


@given(
    name=st.from_regex(r"\A[^./\\\s\x00][^/\\\x00\r\n]*\Z"),
    term=st.text(),
    weight=st.floats(allow_nan=False, allow_infinity=False),
    rate=st.floats(min_value=0, exclude_min=True, allow_nan=False, allow_infinity=False),
)
def test_the_resolved_yaml_keeps_every_name_and_number(name, term, weight, rate):
    config = build(name=name, rewards={term: weight}, optimizer={"learning_rate": rate})
    assert validate(yaml.safe_load(to_yaml(config)), RunConfig, "config.yaml") == config


def test_the_resolved_yaml_states_every_key_in_the_order_of_the_sections():
    tree = yaml.safe_load(to_yaml(build(algorithm="dapo")))
    assert list(tree) == list(RunConfig.model_fields)
    assert list(tree["algorithm"]) == list(AlgorithmConfig.model_fields)
    assert tree["algorithm"]["clip_high"] == 0.28


def test_differences_lists_the_keys_that_differ_with_both_values():
    old = build("rewards.length=-0.1")
    new = build("trainer.num_steps=20", "algorithm.clip_high=0.3", "rewards.format=0.5", "algorithm.kl=k2")
    assert differences(old, old) == {}
    assert differences(old, new) == {
        "trainer.num_steps": (10, 20),
        "algorithm.clip_high": (0.2, 0.3),
        "rewards.format.weight": (None, 0.5),
        "rewards.length.weight": (-0.1, None),
        "algorithm.kl": ("k3", "k2"),
    }


def test_a_key_in_the_wrong_section_is_sent_to_the_right_one():
    with pytest.raises(ConfigError, match=r"trainer\.lerning_rate is not a known key; did you mean 'optimizer\.learning_rate'"):
        validate({**MINIMAL, "trainer": {"num_steps": 1, "lerning_rate": 1e-3}}, RunConfig, "run.yaml")


@pytest.mark.parametrize("name", ["", "..", "../elsewhere", "a/b", " x", "a\\b"])
def test_a_run_name_cannot_leave_the_output_folder(name):
    with pytest.raises(ConfigError, match=r"run\.yaml: name is"):
        validate({**MINIMAL, "name": name}, RunConfig, "run.yaml")
