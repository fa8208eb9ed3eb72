"""What every family promises, and what its success means."""

import itertools

import numpy as np
import pytest

from mmrl.errors import DataError
from robotics.assets import sim_asset
from robotics.envs.families import FAMILIES, build_family
from robotics.envs.instructions import PHRASINGS, split_words, vocabulary
from robotics.envs.observation import SLOTS, environment_bounds, observe
from robotics.envs.physics import BLOCKS, ArmPhysics
from robotics.envs.tabletop_layout import BUTTON_HEIGHT, BUTTON_RANGE, CABINET_X, DRAWER_RANGE, sample_layout

TABLETOP = [name for name in FAMILIES if name != "reach"]
NUM_SEEDS = 24
AWAY = np.array([0.0, -25.0, 20.0, 75.0, 0.0, 35.0])  # the hand above the table, far from what the tests place


@pytest.fixture(scope="module", params=FAMILIES)
def arranged(request):
    """A family, and one simulation per seed arranged for the seed's own goal."""
    family = build_family(request.param)
    physics = ArmPhysics(sim_asset(family.scene), num_sims=NUM_SEEDS)
    goals = [family.draw_goal(seed) for seed in range(NUM_SEEDS)]
    for seed, goal in enumerate(goals):
        family.arrange(physics, seed, seed, goal)
    return family, physics, goals


def test_a_seed_decides_the_layout_and_another_seed_gives_another(arranged):
    family, physics, goals = arranged
    again = ArmPhysics(sim_asset(family.scene), num_sims=NUM_SEEDS)
    for row in reversed(range(NUM_SEEDS)):
        family.arrange(again, row, row, goals[row])
    np.testing.assert_array_equal(again.states(), physics.states())
    assert len(np.unique(physics.states(), axis=0)) == NUM_SEEDS
    assert [family.draw_goal(seed) for seed in range(NUM_SEEDS)] == goals
    assert set(map(family.draw_goal, range(200))) == set(family.goals)


def test_what_is_seen_at_the_start_is_finite_present_and_within_bounds(arranged):
    _, physics, _ = arranged
    entries = observe(physics)["environment_state"]
    assert np.isfinite(entries).all()
    assert (entries >= environment_bounds[:, 0] - 1e-6).all() and (entries <= environment_bounds[:, 1] + 1e-6).all()
    heights = entries[:, 3 : 3 + 3 * len(SLOTS)].reshape(NUM_SEEDS, len(SLOTS), 3)[:, :, 2]
    assert (heights[:, [SLOTS.index(name) for name in physics.slots]] > -0.01).all()


def test_no_goal_holds_at_the_start_and_there_is_work_left(arranged):
    family, physics, _ = arranged
    rows = np.arange(NUM_SEEDS)
    for goal in family.goals[:: max(1, len(family.goals) // 4)]:
        for seed in rows:
            family.arrange(physics, seed, seed, goal)
        left, success = family.assess(physics, rows, [goal] * NUM_SEEDS)
        assert not success.any()
        assert np.isfinite(left).all() and (left > 0.04).all()


def test_a_state_tells_how_it_stands_whatever_happened_before(arranged):
    family, physics, goals = arranged
    rows = np.arange(NUM_SEEDS)
    saved, (left, success) = physics.states(), family.assess(physics, rows, goals)
    physics.advance(np.tile(AWAY + 5.0, (NUM_SEEDS, 1)), rows)
    assert not np.array_equal(family.assess(physics, rows, goals)[0], left)
    physics.restore(saved)
    for part in (rows, rows[3:9], rows[::-1]):
        some = family.assess(physics, part, [goals[row] for row in part])
        np.testing.assert_array_equal(some[0], left[part])
        np.testing.assert_array_equal(some[1], success[part])


def test_things_start_at_rest_and_apart(arranged):
    _, physics, _ = arranged
    before, saved = np.concatenate([physics.slot_position(name) for name in physics.slots], axis=1), physics.states()
    physics.settle(np.arange(NUM_SEEDS), 10)
    moved = np.concatenate([physics.slot_position(name) for name in physics.slots], axis=1) - before
    physics.restore(saved)
    assert np.abs(moved).max() < 5e-4


@pytest.mark.parametrize("name", FAMILIES)
def test_instructions_name_their_objects_in_words_that_training_knows(name):
    family = build_family(name)
    known = set(vocabulary())
    seen, held_out = set(), set()
    for goal, seed in itertools.product(family.goals, range(60)):
        words = split_words(sentence := family.instruction(goal, seed))
        assert set(words) <= known and len(words) <= 16
        other = family.instruction(goal, seed, held_out=True)
        for color in BLOCKS:
            assert (color in words) == (color in split_words(other)) == (color in goal)
        seen.add(sentence)
        held_out.add(other)
    assert len(seen) >= 6 and len(held_out) >= 3 and not seen & held_out
    if "-on-" in family.goals[0]:  # which of the two is meant to move
        sentence = split_words(family.instruction("red-on-blue", 0))
        assert sentence.index("red") < sentence.index("blue")


def test_phrasings_are_many_and_those_held_out_say_it_in_other_words():
    for kind, phrasings in PHRASINGS.items():
        assert len(set(phrasings.seen)) >= 6 and len(set(phrasings.held_out)) >= 3, kind
        assert not set(phrasings.seen) & set(phrasings.held_out), kind
        assert any(set(split_words(text.format("", ""))) - set(vocabulary()) for text in phrasings.held_out), kind
    assert {"red", "drawer", "button", "bowl"} <= set(vocabulary()) and not {"marble", "shove", ""} & set(vocabulary())


@pytest.mark.parametrize("name", FAMILIES)
def test_a_goal_that_the_family_lacks_is_refused_with_those_it_has(name):
    family = build_family(name)
    for ask in (lambda: family.instruction("purple", 0), lambda: family.instruction("purple", 0, held_out=True)):
        with pytest.raises(DataError, match=f"{name}: goal 'purple' is not .*") as caught:
            ask()
        assert str(caught.value).endswith(f"expected one of: {', '.join(family.goals)}.")


def test_one_seed_gives_one_tabletop_to_every_family_and_goal_but_for_the_drawer():
    families = [build_family(name) for name in TABLETOP]
    pairs = [(family, goal) for family in families for goal in family.goals]
    physics = ArmPhysics(sim_asset("tabletop/scene.xml"), num_sims=len(pairs))
    for row, (family, goal) in enumerate(pairs):
        family.arrange(physics, row, 5, goal)
    closed = observe(physics)["environment_state"] * (np.arange(35) != 3 + 3 * SLOTS.index("drawer"))
    np.testing.assert_array_equal(closed, np.tile(closed[0], (len(pairs), 1)))
    slides = {goal: float(physics.slide("drawer")[row]) for row, (_, goal) in enumerate(pairs)}
    assert slides["open_drawer"] == slides["open_drawer+press"] == 0.0
    assert slides["close_drawer"] == slides["push:red+close_drawer"] > 0.8 * DRAWER_RANGE
    assert len({sample_layout(seed).slides["drawer"] == 0.0 for seed in range(20)}) == 2


def test_the_experts_constants_are_those_of_the_scene():
    physics = ArmPhysics(sim_asset("tabletop/scene.xml"))
    layout = sample_layout(0, drawer_open=True)
    physics.place(0, joints=layout.joints, positions=layout.positions, slides=layout.slides)
    np.testing.assert_allclose(physics.model.joint("drawer").range[1], DRAWER_RANGE)
    np.testing.assert_allclose(physics.model.joint("button").range[1], BUTTON_RANGE)
    np.testing.assert_allclose(physics.slot_position("button")[0, 2], BUTTON_HEIGHT, atol=1e-9)
    np.testing.assert_allclose(CABINET_X - physics.slot_position("drawer")[0, 0], layout.slides["drawer"], atol=1e-9)


# What success means: states that are placed by hand.

BOWL, ZONE, BUTTON, DRAWER = ([0.05, 0.17, 0], [0.15, -0.15, 0], [0.0, -0.18, 0], [CABINET_X, 0.07, 0])
CORNER = {"red": [0.05, -0.2, 0.014], "blue": [0.1, 0.14, 0.014], "green": [-0.05, 0.2, 0.014], "yellow": [0.3, -0.2, 0.014]}


def stands(name, goal, *, held=None, opening=26.0, slides=None, **blocks):
    """Place blocks at positions (``held`` one in the hand, opened to ``opening``) and assess: left, success."""
    family, physics = build_family(name), ArmPhysics(sim_asset("tabletop/scene.xml"))
    positions = {"bowl": BOWL, "zone": ZONE, "button": BUTTON, "drawer": DRAWER, **CORNER, **blocks}
    joints = AWAY.copy()
    if held is not None:
        from robotics.experts.kinematics import inverse

        joints = np.append(inverse(np.array([positions[held]]), np.zeros(1))[0], opening)
    positions = {name: np.array(position, float) for name, position in positions.items()}
    physics.place(0, joints=joints, positions=positions, slides=slides or {})
    left, success = family.assess(physics, np.array([0]), [goal])
    return float(left[0]), bool(success[0])


IN_ZONE, IN_BOWL, ON_BLUE = [0.17, -0.13, 0.014], [0.06, 0.18, 0.018], [0.104, 0.148, 0.042]


@pytest.mark.parametrize(
    ("name", "goal", "state", "success"),
    [
        ("push", "red", {"red": IN_ZONE}, True),
        ("push", "red", {"red": [0.15, -0.105, 0.014]}, False),  # 4.5 cm from the middle
        ("push", "red", {"red": [0.17, -0.13, 0.03]}, False),  # not on the table
        ("push", "red", {"red": IN_ZONE, "held": "red"}, False),
        ("push", "red", {"red": IN_ZONE, "held": "red", "opening": 36.0}, True),  # let go
        ("push", "blue", {"red": IN_ZONE}, False),
        ("place", "red", {"red": IN_BOWL}, True),
        ("place", "red", {"red": [0.06, 0.18, 0.04]}, False),  # above the floor
        ("place", "red", {"red": IN_BOWL, "held": "red"}, False),
        ("place", "green", {"red": IN_BOWL}, False),
        ("stack", "red-on-blue", {"red": ON_BLUE}, True),
        ("stack", "blue-on-red", {"red": ON_BLUE}, False),
        ("stack", "red-on-green", {"red": ON_BLUE}, False),
        ("stack", "red-on-blue", {"red": [0.11, 0.15, 0.042]}, False),  # 1.4 cm beside
        ("stack", "red-on-blue", {"red": [0.104, 0.148, 0.05]}, False),  # not down yet
        ("stack", "red-on-blue", {"red": ON_BLUE, "held": "red"}, False),
        ("lift", "red", {"red": [0.16, 0.0, 0.09], "held": "red"}, True),
        ("lift", "red", {"red": [0.16, 0.0, 0.07], "held": "red"}, False),
        ("lift", "red", {"red": [0.16, 0.0, 0.09]}, False),  # thrown, not held
        ("lift", "blue", {"red": [0.16, 0.0, 0.09], "held": "red"}, False),
        ("open_drawer", "open_drawer", {"slides": {"drawer": 0.066}}, True),
        ("open_drawer", "open_drawer", {"slides": {"drawer": 0.062}}, False),
        ("close_drawer", "close_drawer", {"slides": {"drawer": 0.006}}, True),
        ("close_drawer", "close_drawer", {"slides": {"drawer": 0.010}}, False),
        ("press", "press", {"slides": {"button": 0.009}}, True),
        ("press", "press", {"slides": {"button": 0.008}}, False),
        ("two_step", "place:red+press", {"red": IN_BOWL, "slides": {"button": 0.009}}, True),
        ("two_step", "place:red+press", {"red": IN_BOWL}, False),
        ("two_step", "place:red+press", {"slides": {"button": 0.009}}, False),
        ("two_step", "push:red+close_drawer", {"red": IN_ZONE, "slides": {"drawer": 0.07}}, False),
        ("two_step", "push:red+close_drawer", {"red": IN_ZONE}, True),
        ("two_step", "open_drawer+press", {"slides": {"drawer": 0.07, "button": 0.01}}, True),
    ],
)
def test_success_is_what_the_goal_says(name, goal, state, success):
    left, holds = stands(name, goal, **state)
    assert holds == success
    assert (left == 0.0) == success


@pytest.mark.parametrize(
    ("name", "goal", "further", "nearer"),
    [
        ("push", "red", {}, {"held": "red"}),  # the hand has come
        ("push", "red", {"held": "red"}, {"red": [0.12, -0.18, 0.014], "held": "red"}),  # the block has come
        ("push", "red", {"red": IN_ZONE, "held": "red"}, {"red": IN_ZONE}),  # it is let go
        ("lift", "red", {"held": "red"}, {"red": [0.05, -0.2, 0.05], "held": "red"}),
        ("stack", "red-on-blue", {"red": [0.1, 0.05, 0.1], "held": "red"}, {"red": [0.1, 0.13, 0.06], "held": "red"}),
        ("open_drawer", "open_drawer", {}, {"slides": {"drawer": 0.03}}),
        ("two_step", "place:red+press", {}, {"red": IN_BOWL}),
        ("two_step", "place:red+press", {"red": IN_BOWL}, {"red": IN_BOWL, "slides": {"button": 0.009}}),
    ],
)
def test_work_falls_as_the_task_advances(name, goal, further, nearer):
    assert stands(name, goal, **nearer)[0] < stands(name, goal, **further)[0] - 0.01


def test_the_way_from_the_first_thing_to_the_second_counts_once():
    # From the bowl's middle, where the block is let go, to the button's top; 2 cm are near enough, 0.7 x 1.2 cm are pressed.
    way = np.linalg.norm(np.array([0.05, 0.17, 0.018]) - [0.0, -0.18, BUTTON_HEIGHT]) - 0.02 + 0.7 * BUTTON_RANGE
    both, first = stands("two_step", "place:red+press")[0], stands("place", "red")[0]
    np.testing.assert_allclose(both, first + way, atol=1e-6)
    done = stands("two_step", "place:red+press", red=IN_BOWL)[0]
    np.testing.assert_allclose(done, stands("press", "press", red=IN_BOWL)[0], atol=1e-9)
