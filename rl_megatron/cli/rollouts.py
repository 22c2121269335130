"""Show the rollouts that a run has written, for `rl-megatron rollouts`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.extras import require_extra
from rl_megatron.log import escape_controls

_WIDTH = 160
_COLUMNS = (
    "step", "round", "number", "group", "reward", "stopped", "is_learned_from", "age", "prompt", "completion",
    "turn_texts",
)  # fmt: skip


def rollouts(options: argparse.Namespace) -> int:
    """Print the trajectories that the options choose, and return the exit status."""
    files = _find_files(options.path, options.stage, options.step)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _WIDTH
    chosen = shown = 0
    for row in _choose_rows(files, options):
        chosen += 1
        if shown >= options.limit:
            continue
        shown += 1
        if options.json:
            print(json.dumps(row))
        else:
            console.print(_build_panel(row))
    if not options.json:
        steps = ", ".join(sorted({path.stem for path in files}))
        console.print(f"{shown} of {chosen} trajectories shown, from {len(files)} file(s): {steps}", soft_wrap=True)
    return 0


def _find_files(path: Path, stage: str | None, step: int | None) -> list[Path]:
    """Return the files of rollouts of a run or of a stage's directory, or `path` itself if it is a file."""
    if path.is_file():
        return [path]
    pattern = "step-*.parquet" if step is None else f"step-{step:06}.parquet"
    files = sorted(path.glob(pattern)) or sorted((path / "rollouts").glob(f"{stage or '*'}/{pattern}"))
    if not files:
        raise ConfigError(
            f"{path} has no files of rollouts{'' if step is None else f' of step {step}'}; "
            "a run writes them with rollout.save_every above 0"
        )
    return files


def _choose_rows(files: list[Path], options: argparse.Namespace) -> Iterator[dict[str, object]]:
    from rl_megatron.rollouts.rows import read_rows

    require_extra("rl-megatron rollouts", "data", "pyarrow")
    for file in files:
        for row in read_rows(file, None if options.json else _COLUMNS):
            is_low = options.min_reward is not None and row["reward"] < options.min_reward
            is_high = options.max_reward is not None and row["reward"] > options.max_reward
            is_other = options.prompt is not None and options.prompt not in row["prompt"]
            if not (is_low or is_high or is_other):
                yield row


def _list_parts(row: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the label and the text of the completion or, with several turns, of each turn and each answer to one."""
    parts = row.get("turn_texts") or []
    if len(parts) < 2:
        return [("completion", row["completion"])]
    return [("answer" if part["turn"] is None else f"turn {part['turn'] + 1}", part["content"]) for part in parts]


def _build_panel(row: dict[str, Any]) -> Panel:
    facts = Table(show_header=False, box=None, padding=(0, 1, 0, 0))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    facts.add_row("prompt", Text(escape_controls(row["prompt"].strip("\n"))))
    for label, text in _list_parts(row):
        facts.add_row(label, Text(escape_controls(text.strip("\n"))))
    title = f"step {row['step']}, prompt {row['group']}, sample {row['number']}: reward {row['reward']:g}"
    notes = [
        *([] if row["stopped"] else ["truncated"]),
        *([] if row["is_learned_from"] else ["not learned from"]),
        *([f"{row['age']} versions old"] if row["age"] else []),
    ]
    return Panel(facts, title=title, title_align="left", subtitle=", ".join(notes) or None, subtitle_align="left")
