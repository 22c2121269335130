"""Write docs/reference/metrics.md:

    python docs/generate_metrics.py

Names, units, meanings, reductions and directions come from the declarations (`declare_metrics`), and which loss returns
a metric from the losses. Only what the groups are is written here. tests/docs/test_references.py compares the page.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from rl_megatron.algorithms import metrics  # noqa: E402
from rl_megatron.algorithms.registry import eval_metric_names  # noqa: E402
from rl_megatron.config.loading.load import load_config  # noqa: E402
from rl_megatron.config.metrics import EVAL_METRICS, METRICS, SET_METRICS, Metric  # noqa: E402  # noqa: E402
from rl_megatron.losses import LOSSES, build_loss  # noqa: E402
from rl_megatron.losses import metrics as losses  # noqa: E402
from rl_megatron.rewards import metrics as rewards  # noqa: E402

PAGE = REPOSITORY / "docs" / "reference" / "metrics.md"


@dataclass(frozen=True)
class Group:
    """Metrics that are reported together.

    Attributes:
        title: The heading.
        reported: On which lines they are, in a sentence or two.
        metrics: Their declarations.
    """

    title: str
    reported: str
    metrics: tuple[Metric, ...]


_OF_A_LOSS = (
    "A training line has them if the loss of the stage returns them. The last column names the losses that do with "
    "their default settings."
)
GROUPS = (
    Group("Optimizer", "Training lines of every algorithm.", metrics.OPTIMIZER),
    Group("Every loss", "Training lines of every algorithm.", losses.COMMON),
    Group(
        "Costs of a step",
        "Training lines of every algorithm. An evaluation or a save after a step counts in the next line. Times are "
        "those of rank 0; on a GPU they are the times at which the GPU gets to the work, and nobody waits for it. Peak "
        "memory and bubbles are over all ranks, and on a GPU they are those of the step before. On a CPU, memory is "
        "the resident set of the process. Phases of [your own algorithm](../tutorials/own_algorithm.md) get keys of "
        "the same form.",
        metrics.COSTS,
    ),
    Group("Negative log-likelihood", _OF_A_LOSS, losses.NLL),
    Group("Clipped policy gradient", _OF_A_LOSS, losses.CLIPPED_PG),
    Group(
        "Difference between engine and trainer, in the loss",
        f"{_OF_A_LOSS} Rollouts carry the engine's logprobs.",
        losses.MISMATCH,
    ),
    Group("Preference losses", _OF_A_LOSS, losses.PREFERENCE),
    Group("Value loss", f"{_OF_A_LOSS} PPO reports them of its critic.", losses.VALUE),
    Group("Distillation and draft models", _OF_A_LOSS, losses.DISTILLATION),
    Group(
        "Rollouts",
        "Training lines of `grpo`, `ppo` and `on_policy_distillation`. `reward_kl` is there if `loss.use_kl_in_reward` "
        "is set, and `teacher_kl` if the loss of a distillation reads advantages.",
        metrics.ROLLOUT,
    ),
    Group(
        "Asynchronous rollouts",
        "Training lines of `grpo` and `ppo` with `rollout.async_enabled`.",
        metrics.ASYNCHRONOUS,
    ),
    Group(
        "Reward functions",
        "Lines of training and of evaluations, if `reward.functions` is set. `<function>` is the label of a function.",
        rewards.OF_FUNCTIONS,
    ),
    Group("Critic", "Training lines of `ppo`.", metrics.CRITIC),
    Group(
        "Weight sync",
        "The first line, of training or of an evaluation, after the weights were sent to an engine that runs in "
        "processes of its own.",
        metrics.WEIGHT_SYNC,
    ),
    Group(
        "Logprob check",
        "The first line, of training or of an evaluation, after the check of an engine.",
        metrics.LOGPROB_CHECK,
    ),
)
# What is held out, and a configuration that holds it out.
EVALUATIONS = {
    "Problems with the reward of a task (`data.source=task`)": ["algorithm=grpo"],
    "Problems with `reward.functions`": ["algorithm=grpo", "reward.functions=[{name: exact_match}]"],
    "Prompts with answers (`data.source=prompt_answer`)": ["algorithm=sft", "data=gsm8k", "data.path=x"],
    "Text (`data.source=text`)": ["algorithm=pretrain", "data=text", "data.path=x"],
    "Pairs (`data.source=preference`), under `reward_model`": [
        "algorithm=reward_model", "loss=preference", "data=gsm8k_pairs", "data.path=x",
    ],
    "Pairs (`data.source=preference`), under `dpo`": ["algorithm=dpo", "loss=dpo", "data=gsm8k_pairs", "data.path=x"],
}  # fmt: skip

_HEAD = """\
<!-- Written by `python docs/generate_metrics.py`, from the declarations of the metrics. -->
# Metrics

A run writes one JSON object per line to `output_dir/metrics.jsonl`, and one TensorBoard point per metric and step under
`<stage>/<kind>/<metric>`. Every line has these keys:

| key | meaning |
|---|---|
| `stage` | The name of the stage. |
| `step` | The training step, from 1. An evaluation before the first step has step 0. |
| `kind` | `train` for a training step, `eval` for an evaluation. |
| `seconds` | The wall-clock time since the line before, or since the stage began. |

The other keys are the metrics below. A line has a metric only if there is a value for it. The unit 1 marks shares and
ratios. The reduction says how a value is made of its parts:

| reduction | meaning |
|---|---|
| sum | The parts of microbatches and ranks add up. The parts of a mean are divided by the global count first. |
| mean, min, max, quantile | Over all tokens, samples or optimizer steps that the meaning names. |
| last | The newest value. |

The column "healthy" has rules of thumb for runs that learn. A value outside of them is a reason to look, not an error.

A step of several optimizer steps reports the smallest minimum, the largest maximum, and the mean of the rest.
"""


def page() -> str:
    """Return the page.

    Raises:
        ValueError: a declared metric is in no group; the message names it.
    """
    grouped = {metric.name for group in GROUPS for metric in group.metrics}
    if missing := sorted(METRICS.keys() - grouped):
        raise ValueError(f"metrics {missing} are in no group: add theirs to GROUPS in {Path(__file__).name}")
    parts = [_evaluations(), *(_group(group) for group in GROUPS)]
    return _HEAD + "".join("\n" + "\n".join(part) + "\n" for part in parts)


def _evaluations() -> Iterator[str]:
    yield "## Evaluations"
    yield ""
    yield "Lines of kind `eval`, on held-out data. `train.keep_best` can name any of them."
    yield ""
    yield from _table(tuple(EVAL_METRICS.values()))
    yield ""
    yield "Named sets of problems have the metrics `<set>/<statistic>`. Each has its standard error, `…_se`, and later"
    yield "in a run its paired change, `…_change`, with `…_change_se` and `…_change_p`: [Evaluation](../evaluation.md)."
    yield ""
    yield from _table(tuple(SET_METRICS.values()))
    yield ""
    yield "| held-out data | metrics |"
    yield "|---|---|"
    for what, overrides in EVALUATIONS.items():
        names = ", ".join(f"`{name}`" for name in eval_metric_names(load_config(overrides).first))
        yield f"| {what} | {names} |"


def _group(group: Group) -> Iterator[str]:
    yield f"## {group.title}"
    yield ""
    yield group.reported
    yield ""
    yield from _table(group.metrics, _losses_by_metric() if group.reported.startswith(_OF_A_LOSS) else None)


def _table(declared: tuple[Metric, ...], by_loss: dict[str, list[str]] | None = None) -> Iterator[str]:
    """Yield a table of metrics, with the losses that return them if `by_loss` gives these."""
    shows_healthy = any(metric.healthy for metric in declared)
    last = (*(("healthy",) if shows_healthy else ()), *(("losses",) if by_loss is not None else ()))
    yield f"| {' | '.join(('name', 'unit', 'meaning', 'reduction', 'better', *last))} |"
    yield "|" + "---|" * (5 + len(last))
    for metric in declared:
        cells = [f"`{metric.name}`", metric.unit, metric.meaning, metric.reduction, metric.better or ""]
        cells += [metric.healthy] if shows_healthy else []
        if by_loss is not None:
            cells.append(", ".join(f"[`{name}`](../losses.md#{name})" for name in by_loss.get(metric.name, ())))
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _losses_by_metric() -> dict[str, list[str]]:
    """Return the losses that return each metric."""
    found: dict[str, list[str]] = {}
    for name in LOSSES:
        for metric in build_loss(name).metric_reductions:
            found.setdefault(metric, []).append(name)
    return found


def main() -> None:
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
