"""Write docs/losses.md and docs/images/surrogates.svg:

    python docs/generate_losses.py

Names, keys, defaults and meanings come from the registered losses and the docstrings of their settings. The curves are
computed by the losses. Formulas and recipes are in docs/loss_content.py. tests/test_docs.py compares both files with
what this module generates.
"""

from __future__ import annotations

import dataclasses
import inspect
import io
import math
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
import yaml
from matplotlib.figure import Figure

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent))

from docs.loss_content import FORMULAS, PPO_FORMULA, RECIPES, TRL  # noqa: E402
from rl_megatron import losses  # noqa: E402
from rl_megatron.losses import LOSSES, PPOLoss, build_loss  # noqa: E402

REQUIRED, REPORTED = ("token_mask", "sample_mask"), ("loss", "num_valid_samples")  # what all losses have in common
PAGE, PLOT = DOCS / "losses.md", DOCS / "images" / "surrogates.svg"

# ---- the plot

PREVIOUS_PROBABILITY = 0.2  # π_prev of the one token; what is plotted of log π depends on it
RATIOS = np.linspace(0.025, 3.475, 70)  # none at a kink, where a rounding error would choose the slope


@dataclass(frozen=True)
class Surrogate:
    name: str
    settings: str  # in short
    cfg: dict[str, Any]


SURROGATES = (
    Surrogate("PPO, GRPO", "ε = 0.2", {}),
    Surrogate("DAPO", "ε = 0.2, 0.28", {"ratio_clip_max": 0.28}),
    Surrogate("dual clip", "ε = 0.2, c = 3", {"ratio_clip_c": 3.0}),
    Surrogate(
        "GSPO, one token",
        "ε = 3e-4, 4e-4",
        {
            "sequence_level_importance_ratios": True,
            "token_level_loss": False,
            "ratio_clip_min": 3e-4,
            "ratio_clip_max": 4e-4,
        },
    ),
    Surrogate("CISPO", "0 ≤ r ≤ 2", {"use_cispo": True, "ratio_clip_min": 1.0, "ratio_clip_max": 1.0}),
    Surrogate("REINFORCE", "no ratio", {"disable_ppo_ratio": True}),
)


def curves(surrogate: Surrogate, advantage: float) -> dict[str, np.ndarray]:
    """Return −ℓ and −∂ℓ/∂log π at each of RATIOS, as the loss computes them for a batch of one token."""
    loss_fn = build_loss("clipped_pg", {"reference_policy_kl_penalty": 0.0, **surrogate.cfg})
    previous = math.log(PREVIOUS_PROBABILITY)
    data = {
        "input_ids": torch.zeros(1, 2, dtype=torch.long),
        "token_mask": torch.ones(1, 2, dtype=torch.float64),
        "sample_mask": torch.ones(1, dtype=torch.float64),
        "advantages": torch.full((1, 2), advantage, dtype=torch.float64),
        "prev_logprobs": torch.full((1, 2), previous, dtype=torch.float64),
    }
    values, gradients = [], []
    for ratio in RATIOS:
        logprobs = torch.full((1, 1), previous + math.log(ratio), dtype=torch.float64, requires_grad=True)
        loss, _ = loss_fn.evaluate(data, 1, 1, next_token_logprobs=logprobs)
        (gradient,) = torch.autograd.grad(loss, logprobs)
        values.append(-loss.item())
        gradients.append(-gradient.item())
    return {"value": np.array(values), "gradient": np.array(gradients)}


def plot() -> str:
    """Return the plot of the surrogates as SVG.

    A curve's id is `name/quantity/sign of A`, so that its numbers can be read back.
    """
    style = {"svg.hashsalt": "losses", "svg.fonttype": "none", "path.simplify": False, "font.size": 8}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(12, 4.4))
        panels = figure.subplots(2, len(SURROGATES), sharex=True)
        figure.subplots_adjust(left=0.05, right=0.995, top=0.88, bottom=0.14, wspace=0.25, hspace=0.12)
        for column, surrogate in enumerate(SURROGATES):
            panels[0, column].set_title(f"{surrogate.name}\n{surrogate.settings}")
            panels[1, column].set_xlabel("r = π / π_prev")
            for sign, colour in (("+", "tab:blue"), ("−", "tab:red")):
                both = curves(surrogate, 1.0 if sign == "+" else -1.0)
                for panel, (quantity, curve) in zip(panels[:, column], both.items(), strict=True):
                    gid = f"{surrogate.name}/{quantity}/{sign}".replace(" ", "-")
                    panel.plot(RATIOS, curve, colour, label=f"A = {sign}1", gid=gid)
        for panel in panels.flat:
            panel.axvline(1.0, color="0.8", linewidth=0.8, zorder=0)
            panel.axhline(0.0, color="0.8", linewidth=0.8, zorder=0)
            panel.set(xlim=(0, 3.5), ylim=(-3.8, 3.8))
        panels[0, 0].set_ylabel("surrogate −ℓ")
        panels[1, 0].set_ylabel("−∂ℓ / ∂ log π")
        figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="lower center", ncols=2, frameon=False)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


# ---- the page


def key_meanings(settings: type, keys: Iterable[str] | None = None) -> dict[str, str]:
    """Return the meaning of each key, as the docstring of the settings states it.

    A meaning is the text after `key: ` or `key, other: `, up to the next key, a blank line or an unindented line.

    Args:
        settings: The class whose docstring is read.
        keys: The keys; by default the fields of the class.

    Raises:
        ValueError: the docstring does not state the meaning of a key; the message names it.
    """
    keys = [field.name for field in dataclasses.fields(settings)] if keys is None else list(keys)
    name = "|".join(sorted(keys, key=len, reverse=True))
    text = inspect.cleandoc(settings.__doc__ or "")
    heads = list(re.finditer(rf"(?<![\w.`])((?:{name})(?:, (?:{name}))*): ", text)) if keys else []
    meanings = {}
    for head, end in pairwise([*(heads), None]):
        meaning = text[head.end() : end.start() if end else len(text)]
        meaning = re.split(r"\n\s*\n|\n(?=\S)", meaning)[0]
        meanings |= dict.fromkeys(head[1].split(", "), " ".join(meaning.split()))
    if missing := [key for key in keys if not meanings.get(key)]:
        raise ValueError(f"the docstring of {settings.__name__} does not say what {missing} mean")
    return {key: meanings[key] for key in keys}


def page() -> str:
    """Return docs/losses.md.

    Raises:
        ValueError: a loss has no formula, a key has no meaning, or a loss lacks what all have in common; the message
            names them.
    """
    if missing := sorted(LOSSES.keys() - FORMULAS.keys()):
        raise ValueError(f"{missing} have no formula: add them to FORMULAS in docs/loss_content.py")
    sections = [_overview(), *(_loss(name) for name in FORMULAS), _ppo(), _surrogates(), _recipes(), _trl()]
    return "\n\n".join("\n".join(section) for section in sections) + "\n"


def _overview() -> Iterator[str]:
    yield "<!-- Written by `python docs/generate_losses.py`, from the losses and the docstrings of their settings. -->"
    yield "# Losses"
    yield ""
    yield "`loss.name` selects a loss, and `loss.KEY` sets one of its keys. In Python, `build_loss(name, {key: value})`"
    yield "builds it. For a microbatch, a loss returns its share of a mean over the *global* batch, so these shares are"
    yield "summed over microbatches and ranks. You can [add a loss](tutorials/own_loss.md)."
    yield ""
    yield f"Every loss needs {_names(REQUIRED)} in the batch, and reports {_names(REPORTED)}."
    yield "Each section lists further keys, which its loss needs with the default settings or can read, and further"
    yield "metrics. A metric is reported if its inputs exist."
    yield ""
    rolled = [name for name in FORMULAS if build_loss(name).next_token_keys & {"reference_policy_logprobs"}]
    yield f"The key `reference_policy_logprobs` (of the losses {_names(rolled)}) is rolled by −1: entry t corresponds"
    yield "to token t+1. The algorithms do this by `torch.roll(x, -1, dims=-1)` of log-probabilities x that are aligned"
    yield "with `input_ids`."
    yield ""
    yield "| name | class | reads | mean over |"
    yield "|---|---|---|---|"
    for name in FORMULAS:
        loss = build_loss(name)
        over = {"token_level": "tokens", "sequence_level": "pairs" if loss.group_size == 2 else "sequences"}
        reads = _names(dict.fromkeys((loss.output_name, *loss.input_names)))
        yield f"| [`{name}`](#{name}) | `{type(loss).__name__}` | {reads} | {over[loss.loss_type.value]} |"


def _loss(name: str) -> Iterator[str]:
    loss = build_loss(name)
    yield f"## {name}"
    for formula in FORMULAS[name].strip().split("\n\n"):
        yield f"\n```math\n{formula}\n```"
    yield ""
    if meanings := key_meanings(type(loss.cfg)):
        yield "| key | default | meaning |"
        yield "|---|---|---|"
        previous = None
        for key, meaning in meanings.items():
            default = yaml.safe_dump(getattr(loss.cfg, key)).splitlines()[0]
            yield f"| `{key}` | `{default}` | {'as above' if meaning == previous else _cell(meaning)} |"
            previous = meaning
        yield ""
    if {*REQUIRED} - {*loss.required_keys} or {*REPORTED} - {*loss.metric_reductions}:
        raise ValueError(f"{name} does not need {REQUIRED}, or does not report {REPORTED}")
    lists = {
        "needs the batch's": [key for key in loss.required_keys if key not in REQUIRED],
        "can read": [key for key in _batch_keys(loss) if key not in loss.required_keys],
        "reports the metrics": [metric for metric in loss.metric_reductions if metric not in REPORTED],
    }
    if sentences := [f"The loss {verb} {_names(names)}." for verb, names in lists.items() if names]:
        yield " ".join(sentences)


def _batch_keys(loss: Any) -> dict[str, None]:
    """Return the keys that the loss reads: those that its DataDict (or its base's) declares, and those it requires."""
    names = (f"{cls.__name__.removesuffix('Fn')}DataDict" for cls in type(loss).__mro__)
    declared = next((getattr(losses, name) for name in names if hasattr(losses, name)), None)
    keys = declared.__annotations__ if declared else ("input_ids", "temperature")
    return dict.fromkeys((*keys, *loss.required_keys))


def _ppo() -> Iterator[str]:
    yield "## PPOLoss"
    yield ""
    yield "`rl_megatron.losses.PPOLoss` is a torch module that computes the losses of policy and critic from tensors,"
    yield "with torchtune's arguments and results. Its means are over the tokens of one call. The algorithm `ppo`"
    yield "uses `clipped_pg` and `mse_value` instead."
    yield f"\n```math{PPO_FORMULA}```\n"
    yield "| argument | default | meaning |"
    yield "|---|---|---|"
    defaults = {name: parameter.default for name, parameter in inspect.signature(PPOLoss).parameters.items()}
    for key, meaning in key_meanings(PPOLoss, defaults).items():
        yield f"| `{key}` | `{defaults[key]}` | {_cell(meaning)} |"


def _surrogates() -> Iterator[str]:
    yield "## The surrogates, side by side"
    yield ""
    yield "The upper plots show a token's contribution to the objective (the loss times −1), the lower plots its"
    yield "derivative with respect to the log-probability. The horizontal axis is the ratio, at π_prev ="
    yield f"{PREVIOUS_PROBABILITY}."
    yield ""
    names = "; ".join(surrogate.name for surrogate in SURROGATES)
    yield f"![value and gradient of the surrogate against the ratio: {names}]({PLOT.relative_to(DOCS).as_posix()})"


def _recipes() -> Iterator[str]:
    yield "## Recipes"
    yield ""
    yield "These overrides of `rl-megatron train` give published methods."
    for recipe in RECIPES:
        yield f"\n**{recipe.name}.** {recipe.notes}\n"
        yield f"```bash\nrl-megatron train {recipe.overrides}\n```"


def _trl() -> Iterator[str]:
    yield "## Coming from TRL"
    yield ""
    yield 'Tests call TRL\'s own code on the same log-probabilities. "Equal" means to 1e-12, in value and in every'
    yield "gradient."
    yield ""
    yield "| TRL | here | comparison |"
    yield "|---|---|---|"
    for theirs, ours, comparison in TRL:
        yield f"| {theirs} | {ours} | {comparison} |"


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> None:
    PAGE.write_text(page())
    PLOT.write_text(plot())


if __name__ == "__main__":
    main()
