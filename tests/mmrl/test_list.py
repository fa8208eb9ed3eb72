"""`mmrl.listing`: what is printed about recipes, and the table of the documentation, from the same data."""

from pathlib import Path

import pytest

from mmrl.algorithm_config import AlgorithmConfig
from mmrl.algorithms import PRESETS
from mmrl.listing import algorithm_lines, explain, extra_costs, markdown_table

ROOT = Path(__file__).parents[2]


def test_the_documentation_has_the_table_of_the_code():
    text = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    table = text.split("<!-- recipes -->\n")[1].split("<!-- end of recipes -->")[0]
    assert table == markdown_table(), "replace the table in docs/algorithms.md by mmrl.listing.markdown_table()"


def test_every_recipe_has_one_line_with_its_paper_and_slots():
    lines = list(algorithm_lines())
    assert [line.split()[0] for line in lines] == list(PRESETS)
    for line, preset in zip(lines, PRESETS.values()):
        assert "\n" not in line and preset.summary in line and preset.paper in line
        assert all(f"{key}=" in line for key in preset.slots)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_recipe_is_explained_with_its_loss_and_every_parameter(name):
    text = "\n".join(explain(name))
    assert PRESETS[name].equation in text
    keys = [line.split()[0] for line in text.splitlines() if line.startswith("  ") and not line.startswith("   ")]
    assert keys == [key for key in AlgorithmConfig.model_fields if key != "name"]


def test_what_differs_from_the_default_is_said():
    lines = {line.split()[0]: line for line in explain("dapo") if line.startswith("  ")}
    assert lines["clip_high"].split()[1] == "0.28" and lines["clip_high"].endswith("(default 0.2)")


def test_what_a_recipe_costs_beyond_grpo_is_said():
    assert extra_costs(PRESETS["grpo"]) == []
    assert extra_costs(PRESETS["dapo"]) == ["up to max_refills further batches of rollouts"]
    assert "reference policy" in " ".join(extra_costs(PRESETS["oreal"]))
    assert len(extra_costs(PRESETS["reinforce_ada"])) == 2


def test_presets_only_use_slots_that_exist():
    for name, preset in PRESETS.items():
        AlgorithmConfig(**preset.slots, name=name)
        assert preset.equation.isascii() and preset.summary and "\n" not in preset.equation
