"""Only the files of an algorithm or a data source use its name, and no page counts what a registry has."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_megatron.algorithms import ALGORITHMS
from rl_megatron.config.schema import ALGORITHM_CONFIGS, SOURCE_CONFIGS
from rl_megatron.data.sources import SOURCES

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "rl_megatron"
CONFIG_CLASSES = {cls.__name__ for cls in (*ALGORITHM_CONFIGS.values(), *SOURCE_CONFIGS.values())}
OWN_FILES = {
    **{name: {algorithm.config.__module__, algorithm.run.__module__} for name, algorithm in ALGORITHMS.items()},
    **{name: {SOURCE_CONFIGS[name].__module__, source.__module__} for name, source in SOURCES.items()},
}
# Modules in which the word is the name of another thing.
OTHER_MEANINGS = {
    ("rl_megatron.config.reward_models", "reward_model"): "the reward function",
    ("rl_megatron.rewards.functions.reward_model", "reward_model"): "the reward function",
    ("rl_megatron.compat.nemo_rl.advantages", "grpo"): "NeMo RL's name of an estimator",
    ("rl_megatron.compat.nemo_rl.modules", "grpo"): "what a message tells to do",
    ("rl_megatron.compat.nemo_rl.modules", "on_policy_distillation"): "what a message tells to do",
    ("rl_megatron.losses.dpo", "dpo"): "the loss",
    ("rl_megatron.config.losses", "dpo"): "the loss",
    ("rl_megatron.config.losses", "kto"): "the loss",
    ("rl_megatron.losses.kto", "kto"): "the loss",
    ("rl_megatron.config.losses", "preference"): "the loss",
    ("rl_megatron.losses.preference", "preference"): "the loss",
    ("rl_megatron.service.losses", "ppo"): "Tinker's name of a loss",
    ("rl_megatron.service.protobuf", "text"): "a field of a message",
    ("rl_megatron.algorithms.reward_model", "preference"): "the loss",
    ("rl_megatron.certify.workload", "dpo"): "the loss",
    ("rl_megatron.certify.workload", "distillation"): "the loss",
    ("rl_megatron.config.losses", "distillation"): "the loss",
    ("rl_megatron.losses.distillation", "distillation"): "the loss",
    ("rl_megatron.losses.contract", "distillation"): "what a loss needs from the model",
    ("rl_megatron.certify.workload", "preference"): "the loss",
    ("rl_megatron.certify.workload", "reward_model"): "the objective that docs/layouts.md names",
    **{
        (f"rl_megatron.data.{module}", "text"): "the field of a record or of a message"
        for module in ("conversations", "files", "plain_text")
    },
    **{
        (f"rl_megatron.rollouts.gateway.{module}", "text"): "a key or a type of OpenAI's API"
        for module in ("answers", "messages", "parameters")
    },
    ("rl_megatron.observability.step_view", "prompts"): "what a page shows",
    ("rl_megatron.cli.generate", "prompts"): "a key of the settings of a file of completions",
    ("rl_megatron.evaluation.generate", "text"): "a field of a completion",
    ("rl_megatron.evaluation.evaluate_weights", "text"): "a field of a completion",
    ("rl_megatron.evaluation.sets", "task"): "a key of a set",
    ("rl_megatron.data.tasks.multiple_choice", "text"): "a key of a record's choices",
    ("rl_megatron.data.readers", "text"): "the field of a record",
    ("rl_megatron.data.sources.prompts", "reward_model"): "the field of a record for verl",
    ("rl_megatron.rewards.reward_function", "reward_model"): "a field of verl's records",
    ("rl_megatron.rewards.reward_function", "prompts"): "a parameter of TRL's functions",
    ("rl_megatron.rollouts.hosted_verifiers", "task"): "a field of examples of verifiers",
    ("rl_megatron.data.tasks.registry", "task"): "what an error message calls a task",
    **{
        (module, name): "the function of this name"
        for module in ("rl_megatron", "rl_megatron.api.train")
        for name in ("dpo", "grpo", "sft")
    },
    **{("rl_megatron.config.recipes", name): "settings of a published method" for name in ("dpo", "grpo", "ppo")},
    **{("rl_megatron.algorithms", name): "the module in __all__" for name in ALGORITHMS},
    **{
        (f"rl_megatron.config.migration.{module}", name): "a key of another library, or its value in an experiment"
        for module, names in {
            "experiment": "sft",
            "nemo_rl": "distillation dpo grpo on_policy_distillation preference reward_model sft",
            "trl": "dpo grpo kto online_dpo preference pretrain reward_model sft text",
            "verl": "grpo ppo prompts",
        }.items()
        for name in names.split()
    },
}
CHOICE = re.compile(rf"\b(?:algorithm|algorithm\.name|data\.source)=({'|'.join(OWN_FILES)})\b")


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def docstrings(tree: ast.AST) -> set[int]:
    """Return the ids of the nodes that are docstrings."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }


def names_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of every algorithm or source whose name is a string or whose choice is part of one.

    Docstrings do not count.
    """
    excluded = docstrings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in excluded:
            found = {node.value} & OWN_FILES.keys() | set(CHOICE.findall(node.value))
            yield from ((node.lineno, name) for name in sorted(found))


def is_choice(node: ast.AST) -> bool:
    """Return whether an expression is `….algorithm.name` or `….data.source`."""
    if not isinstance(node, ast.Attribute):
        return False
    section = getattr(node.value, "attr", None) or getattr(node.value, "id", None)
    return (section, node.attr) in {("algorithm", "name"), ("data", "source")}


def classes_compared_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, class) of every comparison with a config class: by isinstance, issubclass, type() or match."""
    for node in ast.walk(tree):
        compared: list[ast.AST] = []
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) in ("isinstance", "issubclass"):
            compared = node.args[1:]
        elif isinstance(node, ast.Compare):
            compared = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchClass):
            compared = [node.cls]
        for part in (inner for expression in compared for inner in ast.walk(expression)):
            name = getattr(part, "id", None) or getattr(part, "attr", None)
            if name in CONFIG_CLASSES:
                yield node.lineno, name


def violations(source: str, module: str) -> list[str]:
    """Return the uses of an algorithm or a source in a module that is not its own, as "line: use"."""
    tree = ast.parse(source)
    found = [
        f"{line}: the name {name!r}"
        for line, name in names_in(tree)
        if module not in OWN_FILES[name] and (module, name) not in OTHER_MEANINGS
    ]
    found += [f"{line}: {name} compared by type" for line, name in classes_compared_in(tree)]
    if module not in set().union(*OWN_FILES.values()):
        found += [
            f"{node.lineno}: the choice compared"
            for node in ast.walk(tree)
            if isinstance(node, ast.Compare) and any(map(is_choice, (node.left, *node.comparators)))
        ]
    return found


@pytest.mark.change
def test_no_other_file_uses_the_name_of_an_algorithm_or_a_data_source():
    found = {module_name(path): violations(path.read_text(), module_name(path)) for path in PACKAGE.rglob("*.py")}
    assert {module: broken for module, broken in found.items() if broken} == {}


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("if stage.algorithm.name == 'ppo': pass", "rl_megatron.runs.run"),
        ("TABLE = {'grpo': 1}", "rl_megatron.config.loading.load"),
        ("critic = stage.algorithm.name in CRITICS", "rl_megatron.runs.verify"),
        ("text = data.source != other", "rl_megatron.evaluation.heldout"),
        ("raise ValueError(f'{x}: use data.source=text')", "rl_megatron.data.sources.task"),
        ("isinstance(stage.algorithm, PPOConfig)", "rl_megatron.algorithms.ppo"),
        ("isinstance(stage.data, (int, data_sources.TextConfig))", "rl_megatron.runs.run"),
        ("type(stage.algorithm) is GRPOConfig", "rl_megatron.runs.run"),
        ("match settings:\n    case DPOConfig():\n        pass", "rl_megatron.runs.run"),
    ],
)
def test_a_violation_is_found(source, module):
    assert len(violations(source, module)) >= 1


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ('"""For algorithm=ppo, or "grpo"."""', "rl_megatron.runs.run"),
        ("name = 'ppo'", "rl_megatron.algorithms.ppo"),
        ("algorithm = ALGORITHMS[stage.algorithm.name]", "rl_megatron.runs.run"),
        ("raise ValueError('the text of a task')", "rl_megatron.runs.run"),
    ],
)
def test_allowed_code_is_not_a_violation(source, module):
    assert violations(source, module) == []


@pytest.mark.change
def test_every_exception_is_needed():
    """An entry of OTHER_MEANINGS that is no longer needed would hide a violation."""
    trees = {module_name(path): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
    used = {(module, name) for module, tree in trees.items() for _, name in names_in(tree)}
    assert OTHER_MEANINGS.keys() <= used


# A number in a page would be wrong after the next registration; tables are generated, or a test compares them.
COUNT = re.compile(
    r"\b(two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|\w+teen|twenty|\d+)\s+"
    r"(?:(?:other|more|kinds of)\s+)?(losses|algorithms|(?:advantage\s+)?estimators|rollout engines|"
    r"(?:model\s+)?families|data sources|tasks|tool-call formats|metric sinks|commands of rl-megatron)\b",
    re.IGNORECASE,
)


def test_no_page_counts_what_a_registry_has():
    pages = {ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")}
    texts = {page.relative_to(ROOT): re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL) for page in pages}
    assert [(page, match[0]) for page, text in texts.items() for match in COUNT.finditer(text)] == []


@pytest.mark.parametrize(
    ("text", "is_count"),
    [
        ("These are the six losses", True),
        ("all 12 model\nfamilies", True),
        ("three other advantage estimators", True),
        ("two steps, whose losses are equal", False),
        ("the losses of two ranks", False),
    ],
)
def test_a_count_is_a_number_before_what_is_registered(text, is_count):
    assert bool(COUNT.search(text)) == is_count
