import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from robotics.rewards import REWARDS
from robotics.rollouts import Episode

TOLERANCE = 0.03


def episode(left, *, stop_reason="timeout", max_env_steps=None, commands=None, step_rewards=None):
    steps = len(left) - 1
    return Episode(
        tolerance=TOLERANCE,
        max_env_steps=max_env_steps or steps,
        left=np.array(left),
        succeeded=np.array(left) <= TOLERANCE,
        step_rewards=np.zeros(steps) if step_rewards is None else np.array(step_rewards),
        commands=np.zeros((steps, 6)) if commands is None else np.array(commands),
        executed=np.array([steps]),
        stop_reason=stop_reason,
        initial_state=np.zeros(1),
        final_state=np.zeros(1),
    )


def score(name, *args, **kwargs):
    return REWARDS[name](None, episode(*args, **kwargs))


def test_success_looks_at_the_end_and_success_once_at_every_step_after_the_start():
    visited_and_left = [0.2, 0.02, 0.2]
    assert score("success", visited_and_left) == 0.0 and score("success_once", visited_and_left) == 1.0
    assert score("success", [0.2, 0.2, 0.03]) == 1.0 and score("success_once", [0.2, 0.2, 0.03]) == 1.0
    assert score("success_once", [0.02, 0.2, 0.2]) == 0.0


def test_progress_is_the_share_of_the_way_and_never_negative():
    assert score("progress", [0.2, 0.1, 0.05]) == pytest.approx(0.75)
    assert score("progress", [0.2, 0.1, 0.3]) == 0.0


def test_best_progress_keeps_what_was_reached_and_lost():
    assert score("best_progress", [0.2, 0.05, 0.2]) == pytest.approx(0.75)
    assert score("best_progress", [0.2, 0.3, 0.4]) == 0.0


def test_speed_pays_for_unused_time_after_success_only():
    assert score("speed", [0.2, 0.1, 0.02], stop_reason="success", max_env_steps=8) == pytest.approx(0.75)
    assert score("speed", [0.2, 0.1, 0.1], max_env_steps=8) == 0.0


def test_the_return_sums_the_worlds_own_rewards():
    assert score("env_return", [0.2] * 4, step_rewards=[-1.0, -2.0, 0.5]) == -2.5


def test_measures_of_work_left_do_not_apply_where_the_world_has_none():
    unknown = [math.nan] * 3
    assert [score(name, unknown) for name in ("progress", "best_progress", "closeness")] == [None] * 3
    assert score("success", unknown) == 0.0


def test_closeness_averages_over_the_whole_time_limit():
    # e^0 after one step, e^-1 after two: (1 + 1/e) / 2.
    assert score("closeness", [0.3, 0.0, TOLERANCE]) == pytest.approx((1 + math.exp(-1)) / 2)
    # The two steps that an early success saved count as spent at the final distance: (1 + 3/e) / 4.
    early = score("closeness", [0.3, 0.0, TOLERANCE], stop_reason="success", max_env_steps=4)
    assert early == pytest.approx((1 + 3 * math.exp(-1)) / 4)


def test_smoothness_is_lost_by_changes_of_arm_motion_and_not_by_the_gripper():
    line = np.outer(np.arange(4.0), np.ones(6))
    assert score("smoothness", [0.2] * 5, commands=line) == 1.0
    gripper = line.copy()
    gripper[::2, 5] += 50.0
    assert score("smoothness", [0.2] * 5, commands=gripper) == 1.0
    # One of five joints jumps by 10 and back: second differences 10, -20 (over 2 x 5 entries) average to 3 degrees.
    jump = line.copy()
    jump[2, 0] += 10.0
    assert score("smoothness", [0.2] * 5, commands=jump) == pytest.approx(math.exp(-1.5))


def test_a_diverged_episode_earns_nothing():
    for name in REWARDS:
        assert score(name, [0.2, 0.0, 0.0, 0.0], stop_reason="diverged") == 0.0


@given(
    left=st.lists(st.floats(1e-6, 2.0), min_size=2, max_size=6),
    stop_reason=st.sampled_from(["success", "timeout", "diverged"]),
    seed=st.integers(0, 99),
)
def test_every_term_is_between_0_and_1(left, stop_reason, seed):
    commands = np.random.default_rng(seed).uniform(-160, 160, (len(left) - 1, 6))
    for name in REWARDS:
        assert 0.0 <= score(name, left, stop_reason=stop_reason, commands=commands) <= 1.0
