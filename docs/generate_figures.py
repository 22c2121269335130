"""Measure the README's figures on this machine, and write a page with pictures.

    python docs/generate_figures.py                         # what needs no data, about ten minutes on two quiet cores
    python docs/generate_figures.py --gsm8k path/to/gsm8k   # also what is measured on GSM8K, about 15 minutes in all
    python docs/generate_figures.py --publish …             # as docs/figures.md, instead of outputs/figures/figures.md
    python docs/generate_figures.py --render                # docs/figures.md again, from the stored results

Each benchmark writes its results to `outputs/figures/COMMIT`. A repeated command measures only those that are missing
there. `--publish` stores all of them in benchmarks/results/figures.json, which tests/test_figures.py compares with the
page.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

PAGE = REPOSITORY / "docs" / "figures.md"
PICTURES = REPOSITORY / "docs" / "images" / "figures"
RESULTS = REPOSITORY / "benchmarks" / "results" / "figures.json"
OUTPUT = REPOSITORY / "outputs" / "figures"
_GSM8K = "path/to/gsm8k"  # an argument of a command, which --gsm8k replaces
_TORCHRUN = ("torchrun", "--nproc-per-node", "2")


@dataclass(frozen=True)
class Bar:
    """One bar of a picture and one line of its table."""

    name: str
    value: float
    is_ours: bool = True


@dataclass(frozen=True)
class Figure:
    """Measurements that are shown as one picture and one table.

    Attributes:
        name: The name of the picture's file.
        title: The heading.
        text: What is compared, and which values are better.
        column: The heading of the values.
        form: The format of a value.
        commands: The benchmarks. The last word of each has the path of its output, relative to the commit's directory.
        read: A function that returns the bars from the files that the commands wrote.
    """

    name: str
    title: str
    text: str
    column: str
    form: str
    commands: tuple[tuple[str, ...], ...]
    read: Callable[[Path], list[Bar]]


_STEPS = {
    "V 4,096, fp32, padded, 8,192 tokens": ("--tokens", "8192", "--micro-batch-tokens", "8192"),
    "V 32,768, fp32, padded": ("--vocab-size", "32768"),
    "V 32,768, fp32, padded, fused head": ("--vocab-size", "32768", "--fused-head"),
    "V 4,096, bf16, packed": ("--packed", "--precision", "bf16"),
    "V 4,096, fp32, padded, tensor=2, sequence=true": ("--layout", "tensor=2", "sequence=true"),
}


def _step_commands() -> tuple[tuple[str, ...], ...]:
    commands = []
    for number, options in enumerate(_STEPS.values()):
        start = _TORCHRUN if "--layout" in options else ("python",)
        commands.append((*start, "benchmarks/train_step.py", *options, "--output", f"train_step_{number}.json"))
    return tuple(commands)


def _read_steps(raw: Path) -> list[Bar]:
    files = [json.loads((raw / f"train_step_{number}.json").read_text()) for number in range(len(_STEPS))]
    return [Bar(name, file["figures"]["ratio"]) for name, file in zip(_STEPS, files, strict=True)]


def _read_logprobs(raw: Path) -> list[Bar]:
    (case,) = json.loads((raw / "logprobs" / "logprobs.json").read_text())["cases"]
    timed = [result for result in case["results"] if result["seconds"] is not None]
    return [Bar(result["variant"], 1000 * result["seconds"], result["is_ours"]) for result in timed]


def _read_quickstart(raw: Path) -> list[Bar]:
    stages = json.loads((raw / "quickstart" / "summary.json").read_text())["stages"]
    return [Bar(name, stage["accuracy"]) for name, stage in stages.items()]


def _read_generation(raw: Path) -> list[Bar]:
    modes = json.loads((raw / "generation.json").read_text())["tokens_per_s"]
    return [
        Bar(f"{name}, {mode} lengths", speed, "embedded" in name)
        for mode, sides in modes.items()
        for name, speed in sides.items()
    ]


def _read_grpo_step(raw: Path) -> list[Bar]:
    rows = json.loads((raw / "grpo_step.json").read_text())["rows"]
    return [Bar(name, 1000 * row["step"], "TRL" not in name) for name, row in rows.items()]


def _read_packing(raw: Path) -> list[Bar]:
    planners = max(json.loads((raw / "packing.json").read_text())["figures"].items(), key=lambda item: int(item[0]))[1]
    return [Bar(name, 100 * figures["waste_of_full_packs"], name == "balanced") for name, figures in planners.items()]


FIGURES = (
    Figure(
        "quickstart", "The quickstart",
        "This is the accuracy after each stage, on problems that no stage was trained on. Higher is better.",
        "accuracy", ".4f",
        ((*_TORCHRUN, "-m", "rl_megatron", "train", "experiment=quickstart", "parallel.tensor=2", "resume=false",
          "output_dir=quickstart"),),
        _read_quickstart,
    ),
    Figure(
        "train_step", "A GRPO update beside a bare step",
        "This is the time of `MegatronPolicy.train` with the GRPO loss over that of a language-model step of "
        "megatron-core alone, with the same model, tokens and optimizer. Lower is better.",
        "GRPO / megatron-core alone", ".2f", _step_commands(), _read_steps,
    ),
    Figure(
        "logprobs", "Logprobs",
        "This is the time of next-token logprobs of 1,024 × 151,936 bf16 logits, forward and backward. Lower is "
        "better.",
        "ms", ",.0f",
        (("python", "-m", "benchmarks.logprobs", "--modes", "logprob", "--dtypes", "bf16", "--tokens", "1024",
          "--vocab", "151936", "--tensor", "1", "--output", "logprobs"),),
        _read_logprobs,
    ),
    Figure(
        "generation", "Decoding on a CPU",
        "This is the speed of the embedded rollout engine and of transformers' `model.generate`, with the same "
        "weights, prompts and lengths. Higher is better.",
        "tokens/s", ",.0f", (("python", "benchmarks/generation.py", "--output", "generation.json"),), _read_generation,
    ),
    Figure(
        "grpo_step", "A whole step of GRPO beside TRL",
        "This is the time of a step (sampling, rewards, the optimizer step and metrics), with the same model, prompts "
        "and numbers of tokens. Lower is better.",
        "ms", ",.0f", (("python", "benchmarks/grpo_step.py", _GSM8K, "--output", "grpo_step.json"),), _read_grpo_step,
    ),
    Figure(
        "packing", "Packing",
        "This is the share of tokens that are padding if all training sequences of GSM8K are planned as one batch, for "
        "8 ranks and packs of 4,096 tokens. Lower is better.",
        "%", ".1f", (("python", "benchmarks/packing.py", _GSM8K, "--output", "packing.json"),), _read_packing,
    ),
)  # fmt: skip


def measure(figures: Sequence[Figure], raw: Path, gsm8k: Path | None) -> None:
    """Run the benchmarks whose results are missing in `raw`; a benchmark that fails ends the program."""
    commands = [(figure, command) for figure in figures for command in figure.commands]
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    for number, (figure, command) in enumerate(commands, 1):
        key, _, name = command[-1].rpartition("=")
        target = raw / name
        if target.exists():
            continue
        print(f"{number} of {len(commands)}: {figure.title}: {' '.join(command)}", flush=True)
        # A benchmark that is interrupted must leave nothing that looks like a result.
        partial = raw / f"unfinished-{name}"
        shutil.rmtree(partial, ignore_errors=True)
        words = [str(gsm8k) if word == _GSM8K else word for word in command[:-1]]
        words.append(f"{key}={partial}" if key else str(partial))
        began = time.monotonic()
        done = subprocess.run(words, cwd=REPOSITORY, env=environment)
        if done.returncode:
            sys.exit(f"error: the command ended with status {done.returncode}; repeat this one to continue")
        partial.rename(target)
        print(f"{time.monotonic() - began:.0f} s", flush=True)


def collect(figures: Sequence[Figure], raw: Path) -> dict[str, Any]:
    """Return the figures with the machine, the versions, the commit and the day."""
    machine = json.loads((raw / "logprobs" / "logprobs.json").read_text())["environment"]
    return {
        "date": date.today().isoformat(),
        "processor": machine["processor"], "cores": machine["cores"], "commit": raw.name,
        "python": ".".join(map(str, sys.version_info[:3])), "versions": machine["versions"],
        "figures": {figure.name: [asdict(bar) for bar in figure.read(raw)] for figure in figures},
    }  # fmt: skip


def read_bars(results: dict[str, Any], name: str) -> list[Bar]:
    return [Bar(**bar) for bar in results["figures"][name]]


def write_page(results: dict[str, Any], page: Path, pictures: Path) -> None:
    """Write the page and, beside it in `images/figures`, its pictures."""
    for figure in FIGURES:
        if figure.name in results["figures"]:
            draw(figure, read_bars(results, figure.name), pictures / f"{figure.name}.png")
    page.write_text(render_page(results))
    print(f"{page.relative_to(REPOSITORY)} is written")


def render_page(results: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    lines = [
        "# Figures", "",
        f"`scripts/figures.sh --publish` made this page on {results['date']}, at commit `{results['commit']}`, on a "
        f"machine with {results['cores']} cores ({results['processor']}), with Python {results['python']}, {versions}.",
        "", "Repeat it on your machine. The page is then in `outputs/figures`:", "",
        "```bash", "scripts/figures.sh", f"scripts/figures.sh --gsm8k {_GSM8K}", "```", "",
        "All sides of a comparison run on the same machine and take turns, and times are medians. Another machine has "
        "other times; the ratios are what to compare. [Performance](performance.md) has more measurements and explains "
        "them.",
    ]  # fmt: skip
    for figure in FIGURES:
        if figure.name not in results["figures"]:
            continue
        commands = [" ".join(command) for command in figure.commands]
        lines += ["", f"## {figure.title}", "", figure.text, "", "```bash", *commands, "```", ""]
        lines += [f"![{figure.title}](images/figures/{figure.name}.png)", ""]
        lines += [f"| | {figure.column} |", "|---|---:|"]
        lines += [f"| {bar.name} | {format(bar.value, figure.form)} |" for bar in read_bars(results, figure.name)]
    return "\n".join(lines) + "\n"


def draw(figure: Figure, bars: Sequence[Bar], picture: Path) -> None:
    """Draw horizontal bars, ours in colour."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawing, axis = pyplot.subplots(figsize=(8, 0.9 + 0.34 * len(bars)), layout="constrained")
    shown = list(reversed(bars))
    colors = ["#3949ab" if bar.is_ours else "#9e9e9e" for bar in shown]
    drawn = axis.barh([bar.name for bar in shown], [bar.value for bar in shown], color=colors, height=0.7)
    axis.bar_label(drawn, [format(bar.value, figure.form) for bar in shown], fontsize=8, padding=3)
    axis.set_xlabel(figure.column, fontsize=9)
    axis.tick_params(labelsize=9)
    axis.margins(x=0.12)
    axis.spines[["top", "right"]].set_visible(False)
    picture.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(picture, dpi=110, metadata={"Software": None})
    pyplot.close(drawing)


def read_commit() -> str:
    """Return the short name of the commit, with "-changed" if files differ from it."""
    git = ["git", "-C", str(REPOSITORY)]
    commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    changed = subprocess.run([*git, "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True)
    return commit.stdout.strip() + ("-changed" if changed.stdout.strip() else "")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gsm8k", type=Path, help="a directory with train.jsonl and test.jsonl of GSM8K")
    parser.add_argument("--publish", action="store_true", help="write docs/figures.md; needs --gsm8k")
    parser.add_argument("--render", action="store_true", help="measure nothing, and write docs/figures.md again")
    options = parser.parse_args(arguments)
    if options.render:
        write_page(json.loads(RESULTS.read_text()), PAGE, PICTURES)
        return 0
    if options.gsm8k is None and options.publish:
        parser.error("--publish needs --gsm8k: the page has figures that are measured on it")
    if options.gsm8k is not None and not (options.gsm8k / "train.jsonl").is_file():
        parser.error(f"--gsm8k {options.gsm8k}: train.jsonl is not there; the repository openai/gsm8k has it")
    figures = [figure for figure in FIGURES if options.gsm8k or not any(_GSM8K in c for c in figure.commands)]
    raw = OUTPUT / read_commit()
    raw.mkdir(parents=True, exist_ok=True)
    measure(figures, raw, options.gsm8k and options.gsm8k.resolve())
    results = collect(figures, raw)
    if options.publish:
        RESULTS.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n")
        write_page(results, PAGE, PICTURES)
    else:
        write_page(results, OUTPUT / PAGE.name, OUTPUT / "images" / "figures")
    return 0


if __name__ == "__main__":
    sys.exit(main())
