"""docs/losses.md and docs/rollout_engines.md.

The first page and its plot are up to date and complete. The commands of both pages are valid.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import shlex
from dataclasses import dataclass
from xml.etree import ElementTree

import numpy as np
import pytest

from docs import generate_losses
from rl_megatron.config.generation import GenerationConfig
from rl_megatron.config.loading.load import load_config
from rl_megatron.config.recipes import RECIPES as METHODS
from rl_megatron.generation.logprob_check import LIMITS
from rl_megatron.losses import LOSSES, NLLLoss, build_loss
from rl_megatron.losses.registry import configured_loss
from rl_megatron.model.families import family_of_model
from rl_megatron.runs import preflight

PAGE = generate_losses.PAGE.read_text()
REWRITE = "run `python docs/generate_losses.py`"
RECIPES = {recipe.name: recipe for recipe in generate_losses.RECIPES}
PAIRS = ("DPO", "IPO", "Online DPO", "SimPO", "CPO", "ORPO")


def section(title):
    (text,) = re.findall(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    return text


def test_the_page_is_up_to_date():
    assert generate_losses.page() == PAGE, REWRITE


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_and_every_key_is_on_the_page(name):
    text, cfg = section(name), build_loss(name).cfg
    assert f"| [`{name}`](#{name}) |" in PAGE and "```math\n" in text
    meanings = dict(re.findall(r"^\| `(\w+)` \| `.*?` \| (.*) \|$", text, re.MULTILINE))
    assert list(meanings) == [field.name for field in dataclasses.fields(cfg)]
    assert all(meanings.values())


def test_the_arguments_of_ppo_loss_are_on_the_page():
    defaults = dict(re.findall(r"^\| `(\w+)` \| `(.*?)` \|", section("PPOLoss"), re.MULTILINE))
    assert defaults == {"epsilon": "0.1", "value_clip_range": "0.2", "value_coeff": "0.1"}


def test_a_loss_without_a_formula_is_refused(monkeypatch):
    monkeypatch.setitem(LOSSES, "novel", NLLLoss)
    with pytest.raises(ValueError, match=r"\['novel'\] have no formula"):
        generate_losses.page()


def test_a_key_without_a_meaning_is_refused():
    @dataclass
    class Config:
        """first, second: what the two of them mean, one: among other things.

        Group:
            fourth: goes on
                over two lines. fifth: in the same line.
        third is mentioned, and not explained.
        """

        first: int = 0
        second: int = 0
        third: int = 0
        fourth: int = 0
        fifth: int = 0

    with pytest.raises(ValueError, match=r"Config does not say what \['third'\] mean"):
        generate_losses.key_meanings(Config)
    Config.__doc__ = inspect.cleandoc(Config.__doc__) + "\n\nthird: found."
    both = "what the two of them mean, one: among other things."
    assert generate_losses.key_meanings(Config) == {
        "first": both, "second": both, "third": "found.", "fourth": "goes on over two lines.",
        "fifth": "in the same line.",
    }  # fmt: skip


def curves_of(svg):
    """Return curve id → its points in the picture, [N, 2]."""
    groups = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}g")
    paths = {group.get("id"): group.find("{http://www.w3.org/2000/svg}path") for group in groups}
    return {
        name: np.array(re.findall(r"-?\d+\.?\d*", path.get("d")), dtype=float).reshape(-1, 2)
        for name, path in paths.items()
        if name and "/" in name and path is not None
    }


@pytest.mark.change
def test_the_plot_is_up_to_date():
    """Only the numbers are compared; the rest of the file depends on matplotlib's version."""
    committed, written = curves_of(generate_losses.PLOT.read_text()), curves_of(generate_losses.plot())
    names = [surrogate.name.replace(" ", "-") for surrogate in generate_losses.SURROGATES]
    assert committed.keys() == {
        f"{name}/{what}/{sign}" for name in names for what in ("value", "gradient") for sign in "+−"
    }
    for name, points in written.items():
        assert len(points) == len(generate_losses.RATIOS)
        np.testing.assert_allclose(committed[name], points, atol=0.01, err_msg=f"{name}: {REWRITE}")


@pytest.mark.parametrize(
    ("name", "upwards", "downwards"),
    [
        ("PPO, GRPO", (0, 1.2), (0.8, 4)),
        ("DAPO", (0, 1.28), (0.8, 4)),
        ("dual clip", (0, 1.2), (0.8, 3)),
        ("GSPO, one token", (0, 1), (1, 4)),
        ("CISPO", (0, 4), (0, 4)),
        ("REINFORCE", (0, 4), (0, 4)),
    ],
)
def test_a_surrogate_has_a_gradient_at_the_ratios_of_its_paper(name, upwards, downwards):
    """Parameters: the ranges of ratios in which A > 0 makes a token likelier, and A < 0 makes it less likely."""
    (surrogate,) = (surrogate for surrogate in generate_losses.SURROGATES if surrogate.name == name)
    for advantage, (low, high) in ((1.0, upwards), (-1.0, downwards)):
        pull = advantage * generate_losses.curves(surrogate, advantage)["gradient"]
        inside = (low < generate_losses.RATIOS) & (high > generate_losses.RATIOS)
        assert ((pull > 0) == inside).all() and (pull >= 0).all()


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_loads_and_its_loss_suits_its_algorithm(name):
    stage = load_config(shlex.split(RECIPES[name].overrides)).first
    preflight.check_loss(stage)
    loss = configured_loss(stage.loss)
    assert loss.group_size == (2 if name in PAIRS else 1)
    defaults = build_loss(stage.loss["name"]).cfg
    for key in re.findall(r"loss\.(\w+)=", RECIPES[name].overrides):
        assert getattr(loss.cfg, key) == stage.loss[key] != getattr(defaults, key), key


def test_the_settings_of_a_method_in_messages_are_those_of_its_recipe():
    for name, overrides in METHODS.items():
        ours, documented = (shlex.split(text) for text in (overrides, RECIPES[name].overrides))
        added = ("data", "reward.functions", "train.")
        assert [override for override in ours if override != "loss=clipped_pg"] == [
            override for override in documented if not override.startswith(added)
        ], name


def test_the_recipes_differ():
    assert len({recipe.overrides for recipe in RECIPES.values()}) == len(RECIPES)
    assert all(f"rl-megatron train {recipe.overrides}\n" in section("Recipes") for recipe in RECIPES.values())


ENGINES = generate_losses.PAGE.with_name("rollout_engines.md")
COMMANDS = [
    line for block in re.findall(r"```bash\n(.*?)```", ENGINES.read_text(), re.DOTALL) for line in block.splitlines()
    if " train " in line
]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_on_engines_loads_and_its_model_has_a_family(command):
    words = shlex.split(command)
    stage = load_config(words[words.index("train") + 1 :]).first
    if stage.generation.engine == "embedded":
        assert stage.generation.router_replay
    else:
        family_of_model(stage.model, vocab_size=260)


def test_the_page_on_engines_has_every_key_and_its_links_are_valid():
    page = ENGINES.read_text()
    for key in ("engine", "num_engines", "engine_device", "engine_timeout_minutes", "max_engine_restarts", "refit",
                "refit_bucket_mb", "gate_prompts", "gate_limit"):  # fmt: skip
        assert f"generation.{key}" in page and hasattr(GenerationConfig(), key)
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", page):
        assert (ENGINES.parent / target).exists(), target
    assert "1e-4 in fp32 and 0.1 in bf16" in page and LIMITS == {"fp32": 1e-4, "bf16": 0.1}
