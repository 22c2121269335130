"""Write docs/reference/configuration.md:

    python docs/generate_configuration.py

Keys, types and choices come from the dataclasses of the configuration, defaults from what `rl-megatron train` composes,
and meanings from the comments at the declarations. tests/docs/test_references.py compares the page with them.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from docs.declarations import DEFAULTS_OF_KEYS, Key, argument_meanings, as_yaml, default, in_words, keys  # noqa: E402
from rl_megatron.algorithms import ALGORITHMS  # noqa: E402
from rl_megatron.config import schema  # noqa: E402
from rl_megatron.config.engines import ENGINE_DECLARATIONS  # noqa: E402
from rl_megatron.config.environments import AgentConfig, EnvironmentConfig, ToolsConfig  # noqa: E402
from rl_megatron.config.eval_sets import EvalConfig, EvalSetConfig  # noqa: E402
from rl_megatron.config.generation import GenerationConfig  # noqa: E402
from rl_megatron.config.loading.compose import config_directory  # noqa: E402
from rl_megatron.config.loading.load import load_config, to_yaml  # noqa: E402
from rl_megatron.config.loggers import LoggerConfig, ProfileConfig  # noqa: E402
from rl_megatron.config.model import LinearRope, Llama3Rope, ModelConfig, YarnRope  # noqa: E402
from rl_megatron.config.optimizer import OptimizerConfig  # noqa: E402
from rl_megatron.config.parallel import ParallelConfig  # noqa: E402
from rl_megatron.config.peft import LoraConfig  # noqa: E402
from rl_megatron.config.rewards import RewardConfig, RewardFunctionConfig  # noqa: E402
from rl_megatron.config.rollout import TrajectoryConfig, TurnSampling  # noqa: E402
from rl_megatron.config.tokenizer import TokenizerConfig  # noqa: E402
from rl_megatron.config.train import TrainConfig  # noqa: E402
from rl_megatron.data.tasks.registry import TASKS  # noqa: E402
from rl_megatron.observability.sinks import SINKS  # noqa: E402
from rl_megatron.rewards import functions as _reward_functions  # noqa: E402, F401  # it registers them
from rl_megatron.rewards.registry import REWARDS  # noqa: E402
from rl_megatron.rollouts.tools.registry import TOOLS  # noqa: E402

PAGE = REPOSITORY / "docs" / "reference" / "configuration.md"
ROPE_KINDS = (LinearRope, Llama3Rope, YarnRope)
# Sections whose keys are all in one dataclass.
SECTIONS = {
    "model": ModelConfig,
    "parallel": ParallelConfig,
    "optimizer": OptimizerConfig,
    "train": TrainConfig,
    "tokenizer": TokenizerConfig,
    "generation": GenerationConfig,
    "reward": RewardConfig,
    "eval": EvalConfig,
    "rollout": TrajectoryConfig,
    "peft": LoraConfig,
    "profile": ProfileConfig,
}
# Keys whose value is chosen by name: which part of the page lists the names.
TYPES = {
    "model.rope_scaling": "mapping with [`kind`](#modelrope_scaling), or null",
    "generation.engine": "name of a [rollout engine](#rollout-engines)",
    "generation.vllm": "mapping with [these keys](#generationvllm)",
    "generation.sglang": "mapping with [these keys](#generationsglang)",
    "rollout.agent": "mapping with [these keys](#rolloutagent)",
    "reward.functions": "list of [reward functions](#rewardfunctions)",
    "eval.sets": "list of [sets](#evalsets)",
    "rollout.turn_sampling": "list of [turns](#rolloutturn_sampling), or null",
    "rollout.environment": "mapping with [these keys](#rolloutenvironment)",
    "train.stop_at": "mapping of [eval metrics](metrics.md#evaluations) to numbers",
    "train.keep_best": "name of an [eval metric](metrics.md#evaluations), or null",
    "rollout.tools": "mapping with [these keys](#rollouttools)",
    "metric_sinks": "list of [metric sinks](#metric-sinks)",
    "stages": "mapping of [stages](#stages)",
    "algorithm.critic_optimizer": "mapping with the keys of [`optimizer`](#optimizer)",
}

# Keys that a new version may change without a deprecation (docs/versions.md). A key that ends in "." stands for its
# section.
MAY_CHANGE = (
    "generation.cuda_graphs",
    "generation.gate_limit",
    "generation.gate_prompts",
    "generation.refit_bucket_mb",
    "generation.sglang.",
    "generation.vllm.",
    "model.cudnn_attention",
    "rollout.agent.",
)

_HEAD = """\
<!-- Written by `python docs/generate_configuration.py`, from rl_megatron/config and the comments there. -->
# Configuration

This page lists every key of the configuration. You set a key on the command line with `KEY=VALUE`, or in the YAML file
of an experiment. `rl-megatron train … --print-config` prints the values that a run would use.

The default is the value that `rl-megatron train` uses if nothing else is chosen. A preset or an experiment can set
another value. "required" marks a key without a default. Unknown keys, wrong types and values out of range are refused
before the run starts.

A new version may change a key that is marked "May change" ([versions](../versions.md#what-may-change)). Other keys
change only after a deprecation.
"""

_STAGES = """\
## Stages

A run is a list of stages. Each stage starts from the final weights of the stage before it. A run without `stages` has
one stage, which is named after its algorithm.

A stage has these sections, and the keys of the table below:
{sections}.
At the top level of the configuration, they apply to all stages. Under `stages.NAME`, they apply to one stage, and only
the keys that differ are needed:

```yaml
optimizer: {{lr: 1.0e-3}}
stages:
  pretrain:
    algorithm: {{name: pretrain}}
  sft:
    algorithm: {{name: sft}}
    optimizer: {{lr: 1.0e-4}}
```

Two sections of a stage replace those of the top level as a whole: `algorithm`, and `loss` if it has a `name`. If a
stage sets a key itself, a command-line override of the key without `stages.NAME` would have no effect there, and is
refused: write `stages.sft.optimizer.lr=1e-4` instead.
"""


def page() -> str:
    """Return the page.

    Raises:
        ValueError: a key has no meaning at its declaration; the message names it.
    """
    parts = [_run(), _stages(), _presets(), _algorithms()]
    parts += [_section(name) for name in ("model", "parallel", "optimizer", "train", "tokenizer")]
    parts += [_data(), _tasks(), _section("generation"), _engines(), _rewards(), _sets(), _loss()]
    parts += [_rollout(), _section("peft"), _section("profile"), _loggers(), _sinks()]
    return _HEAD + "".join("\n" + "\n".join(part).rstrip("\n") + "\n" for part in parts)


def _run() -> Iterator[str]:
    yield "## Run"
    yield ""
    yield "These keys belong to the whole run, and stand at the top level only."
    yield ""
    yield from _table("", keys(schema.RunConfig), yaml.safe_load(to_yaml(load_config([]))) | {"stages": {}})


def _stages() -> Iterator[str]:
    sections = [field.name for field in dataclasses.fields(schema.StageConfig)]
    named = [name for name in sections if name not in ("precision", "device")]
    yield _STAGES.format(sections=_code(named))
    yield from _table("", keys(schema.StageConfig, without=named), _composed())


def _presets() -> Iterator[str]:
    yield "## Presets"
    yield ""
    yield "A preset is a YAML file that sets a whole section. `model=nano` chooses `model/nano.yaml` of the"
    yield "[shipped configurations](../../configs/config.yaml), or of the directory that `--config-dir` names."
    yield ""
    yield "| choice | presets |"
    yield "|---|---|"
    for group in sorted(path for path in config_directory().iterdir() if path.is_dir()):
        names = sorted(path.stem for path in group.glob("*.yaml"))
        yield f"| `{group.name}=` | {_code(names)} |"


def _algorithms() -> Iterator[str]:
    yield "## algorithm"
    yield ""
    yield "`algorithm=NAME` chooses the algorithm, with the keys below. A plugin's algorithm has the keys that its own"
    yield "class declares."
    for name, config in schema.ALGORITHM_CONFIGS.items():
        yield ""
        yield f"### algorithm={name}"
        yield ""
        yield f"{summary(config)} It learns from {config.learns_from}."
        if fixed := ALGORITHMS[name].fixed_loss:
            yield f"Its loss is always [`{fixed}`](../losses.md#{fixed}); the section `loss` has no effect."
        declared = keys(config, without=("name",))
        if declared:
            yield ""
            yield from _table("algorithm", declared, {})
        else:
            yield "It has no keys of its own."


def _section(name: str, **values: Any) -> Iterator[str]:
    """Yield the part of a section; `values` are those of keys that have a table of their own."""
    section = SECTIONS[name]
    yield f"## {name}"
    yield ""
    if section.__doc__ and not section.__doc__.startswith(f"{section.__name__}("):  # what dataclass writes
        yield " ".join(inspect.cleandoc(section.__doc__).split())
        yield ""
    yield from _table(name, keys(section), (_composed()[name] or {}) | values)  # adapters are off by default
    if name == "model":
        yield from _rope_kinds()


def _rope_kinds() -> Iterator[str]:
    yield ""
    yield "### model.rope_scaling"
    for kind in ROPE_KINDS:
        yield ""
        yield f"`kind: {kind.kind}`. {summary(kind)}"
        yield ""
        yield from _table("model.rope_scaling", keys(kind, without=("kind",)), {}, anchors=False)


def _data() -> Iterator[str]:
    yield "## data"
    yield ""
    yield "`data.source` chooses the data source. All of these sources have the same keys; those that a source does not"
    yield "use have no effect on it. A plugin's source can declare keys of its own."
    yield ""
    yield "| `data.source` | what it reads | kinds of training data | needs `data.path` |"
    yield "|---|---|---|---|"
    for name, config in schema.SOURCE_CONFIGS.items():
        needs = "yes" if config.reads_path else "no"
        yield f"| `{name}` | {summary(config)} | {', '.join(config.provides)} | {needs} |"
    yield ""
    declared = keys(schema.DataConfig)
    for config in schema.SOURCE_CONFIGS.values():
        own = {field.name for field in dataclasses.fields(config)} - {key.name for key in declared}
        if own:
            raise ValueError(f"{config.__name__} has keys that DataConfig has not, {sorted(own)}: give it a table here")
    yield from _table("data", declared, _composed()["data"])


def _tasks() -> Iterator[str]:
    yield "## data.task"
    yield ""
    yield "`data.task.name` chooses the task. Its other keys are the options of the task."
    for name, task in TASKS.items():
        yield ""
        yield f"### data.task.name={name}"
        yield ""
        yield summary(task)
        yield ""
        yield from _table("data.task", _options(task), {}, anchors=False)


def _options(task: type) -> list[Key]:
    fields, meanings = dataclasses.fields(task), argument_meanings(task)
    hints = typing.get_type_hints(task)
    return [Key(field.name, in_words(hints[field.name]), default(field), meanings[field.name]) for field in fields]


def _engines() -> Iterator[str]:
    yield "### Rollout engines"
    yield ""
    yield f"`generation.engine` is one of {_code(ENGINE_DECLARATIONS)}, or the name of a plugin's engine."
    yield "[Rollout engines](../rollout_engines.md) describes them."
    for engine, declaration in ENGINE_DECLARATIONS.items():
        if declaration.section is not None:
            section = type(getattr(GenerationConfig(), declaration.section))
            text = f"{summary(section)} Only `generation.engine={engine}` has these keys."
            yield from _subsection(f"generation.{declaration.section}", text, section)


def _rewards() -> Iterator[str]:
    yield from _section("reward")
    text = "Each element of the list has these keys. [Rewards](../rewards.md) describes the functions of this package:"
    yield from _subsection("reward.functions[]", f"{text}\n{_code(sorted(REWARDS))}.", RewardFunctionConfig)


def _sets() -> Iterator[str]:
    yield from _section("eval")
    text = "Each element of the list has these keys. [Evaluation](../evaluation.md) describes them."
    yield from _subsection("eval.sets[]", text, EvalSetConfig)


def _rollout() -> Iterator[str]:
    yield from _section("rollout", environment=EnvironmentConfig())
    text = f"{summary(EnvironmentConfig)} [Environments](../environments.md) describes them."
    yield from _subsection("rollout.environment", text, EnvironmentConfig)
    text = f"Each element of the list has these keys. {summary(TurnSampling)}"
    yield from _subsection("rollout.turn_sampling[]", text, TurnSampling)
    text = f"{summary(ToolsConfig)} [Tools](../tools.md) describes them. Tools of this package: {_code(sorted(TOOLS))}."
    yield from _subsection("rollout.tools", text, ToolsConfig)
    text = f"{summary(AgentConfig)} [Agents](../agents.md) describes them."
    yield from _subsection("rollout.agent", text, AgentConfig)


def _loss() -> Iterator[str]:
    yield "## loss"
    yield ""
    yield "`loss=NAME` chooses a registered loss with the keys of its preset, and `loss.KEY` sets one of its keys."
    yield "[Losses](../losses.md) lists every loss with its keys."


def _loggers() -> Iterator[str]:
    yield "## logger"
    yield ""
    yield f"{summary(LoggerConfig)} [Look at a run](../observability.md#loggers) describes them."
    for service in dataclasses.fields(LoggerConfig):
        section = next(kind for kind in typing.get_args(typing.get_type_hints(LoggerConfig)[service.name]))
        text = f"{summary(section)} It needs the extra `{service.name}`."
        yield from _subsection(f"logger.{service.name}", text, section)


def _sinks() -> Iterator[str]:
    yield "## Metric sinks"
    yield ""
    yield "| name | what it writes |"
    yield "|---|---|"
    for name, sink in SINKS.items():
        yield f"| `{name}` | {summary(sink)} |"


def _subsection(path: str, text: str, section: type) -> Iterator[str]:
    """Yield a heading, a text and the keys of a section. Those of a list's elements, `path[]`, have no anchors."""
    yield ""
    yield f"### {path.removesuffix('[]')}"
    yield ""
    yield text
    yield ""
    yield from _table(path, keys(section), {}, anchors=not path.endswith("[]"))


def _table(section: str, declared: Iterable[Key], values: dict[str, Any], anchors: bool = True) -> Iterator[str]:
    """Yield a table of keys. Defaults are those of `values`, or of the declaration if a key is not there."""
    yield "| key | type | default | meaning |"
    yield "|---|---|---|---|"
    before: dict[str, str] = {}
    for key in declared:
        path = f"{section}.{key.name}" if section else key.name
        value = as_yaml(values[key.name]) if key.name in values else key.default
        shown = "required" if value is None else value if value == DEFAULTS_OF_KEYS else f"`{value}`"
        anchor = f'<a id="{path}"></a>' if anchors and not path.startswith("algorithm.") else ""
        meaning = f"See `{before[key.meaning]}`." if key.meaning in before else sentence(key.meaning, key.type)
        before.setdefault(key.meaning, path)
        if may_change(path):
            meaning += " *May change.*"
        yield f"| {anchor}`{path}` | {TYPES.get(path, key.type)} | {_cell(shown)} | {_cell(meaning)} |"


def may_change(path: str) -> bool:
    """Return whether a new version may change the key `path` without a deprecation."""
    return any(path == key or (key.endswith(".") and path.startswith(key)) for key in MAY_CHANGE)


def summary(declared: Any) -> str:
    """Return the first paragraph of an object's docstring as one line."""
    return _marked(" ".join(inspect.cleandoc(declared.__doc__).partition("\n\n")[0].split()))


def sentence(meaning: str, values: str = "") -> str:
    """Return a meaning with a capital letter at its start, a full stop at its end, and key names as code.

    Args:
        meaning: The text.
        values: The key's type in words. A choice that begins the text, as in "auto: …", stays as it is.
    """
    first = meaning.split()[0].rstrip(":,")
    if first.islower() and "_" not in first and first != "null" and f"`{first}`" not in values:
        meaning = meaning[0].upper() + meaning[1:]
    return _marked(meaning if meaning.endswith((".", "!", "?", "…")) else f"{meaning}.")


def _marked(text: str) -> str:
    """Return the text with identifiers, file names and values before a colon as code."""
    parts = re.split(r"(`[^`]*`)", text)
    name = r"(?<![\w`./{])(?:[A-Za-z]\w*\.)*[a-z]+(?:_[a-z0-9]+)+(?:\.\w+)*(?![\w`])|\b[\w/]+\.(?:py|jsonl|json|yaml)\b"
    parts[::2] = [re.sub(name, r"`\g<0>`", part) for part in parts[::2]]
    return "".join(parts)


def _composed() -> dict[str, Any]:
    """Return the one stage that `rl-megatron train` runs, as plain values."""
    (stage,) = yaml.safe_load(to_yaml(load_config([])))["stages"].values()
    return stage


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _cell(text: str) -> str:
    return re.sub(r"(?<!\\)\|", r"\\|", text)


def main() -> None:
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
