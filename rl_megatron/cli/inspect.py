"""Show the content of a checkpoint, or list the checkpoints of a run, for `rl-megatron inspect`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rl_megatron.checkpoint.summary import describe, list_checkpoints
from rl_megatron.config.checkpoint_metadata import MANIFEST
from rl_megatron.config.metrics import choose_shown_name

_TENSORS_SHOWN = 10
_WIDTH = 160
_HEADS = {"lm": "language model", "score": "reward model or critic (score head)"}


def inspect(path: Path, all_tensors: bool, verify: bool, as_json: bool) -> int:
    """Print the content of a checkpoint, or the checkpoints of a stage or a run, and return the exit status.

    If `verify` is set, the files of a checkpoint are compared with their digests.
    """
    is_checkpoint = path.name.startswith("step-") or (path / MANIFEST).is_file()
    content = describe(path, verify) if is_checkpoint else list_checkpoints(path)
    if as_json:
        print(json.dumps(content, indent=1))
        return 0
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _WIDTH  # a pipe has no width, and names should not be cut
    if is_checkpoint:
        _show_checkpoint(console, content, all_tensors)
    else:
        _show_list(console, content)
    return 0


def _show_checkpoint(console: Console, checkpoint: dict[str, Any], all_tensors: bool) -> None:
    facts = _list_facts(checkpoint)
    width = max(len(name) for name, _ in facts) + 2
    path = Text.assemble(("checkpoint".ljust(width), "bold"), checkpoint["path"])
    console.print(path, soft_wrap=True)  # not wrapped, so that it can be copied
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts:
        table.add_row(name, value)
    console.print(table)
    shown = checkpoint["tensors"] if all_tensors else checkpoint["tensors"][:_TENSORS_SHOWN]
    tensors = Table("tensor", "shape", "dtype", box=None, padding=(0, 2, 0, 0))
    tensors.columns[0].overflow = "fold"
    for tensor in shown:
        tensors.add_row(tensor["name"], " × ".join(map(str, tensor["shape"])), tensor["dtype"])
    console.print(tensors)
    if len(shown) < len(checkpoint["tensors"]):
        console.print(f"… and {len(checkpoint['tensors']) - len(shown)} more: --tensors shows all")
    files = Table("file", "bytes", "contents", box=None, padding=(0, 2, 0, 0))
    files.columns[1].justify = "right"
    for name, file in checkpoint["files"].items():
        files.add_row(name, f"{file['bytes']:,}", file["state"])
    console.print(files)


def _list_facts(checkpoint: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (name, value) of the manifest's entries. Manifests of checkpoints that API users saved have fewer."""
    stage = f" of stage {checkpoint['stage']}" if "stage" in checkpoint else ""
    size = f"{checkpoint['num_parameters']:,} parameters, {checkpoint['parameter_bytes']:,} bytes"
    states = f"{', '.join(checkpoint['optimizer_state'])}; {checkpoint['optimizer_bytes']:,} bytes"
    facts = [
        ("step", f"{checkpoint['step']}{stage}"),
        ("head", _HEADS[checkpoint.get("head", "lm")]),
        ("size", size),
        ("model", _format_values({key: value for key, value in checkpoint["model"].items() if value is not None})),
        ("optimizer", states if checkpoint["optimizer_state"] else "no state, only weights"),
    ]
    eval_metrics = checkpoint.get("results", {}).get("measures", {})
    if eval_metrics:
        step = checkpoint.get("evaluated_at", checkpoint["step"])
        note = "" if step == checkpoint["step"] else f" (at step {step})"
        facts.append(("held-out", _format_metrics(eval_metrics) + note))
    if "tokenizer" in checkpoint:
        vocabulary = checkpoint.get("vocab_size", "unknown")
        facts.append(("tokenizer", f"digest {checkpoint['tokenizer']}, vocabulary of {vocabulary}"))
    facts += [
        (name, _format_values(checkpoint[name]) if isinstance(checkpoint[name], dict) else str(checkpoint[name]))
        for name in ("precision", "layout", "weights_from", "data", "versions")
        if name in checkpoint
    ]
    facts.append(("config", "in the file config.yaml" if checkpoint["config"] else "not kept"))
    return facts


def _format_values(values: dict[str, Any]) -> str:
    return ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in values.items()
    )


def _format_metrics(metrics: dict[str, float]) -> str:
    return _format_values({choose_shown_name(name, [value]): value for name, value in metrics.items()})


def _show_list(console: Console, stages: dict[str, list[dict[str, Any]]]) -> None:
    for stage, entries in stages.items():
        table = Table("checkpoint", "bytes", "held-out", "", title=stage, title_justify="left", box=None)
        table.columns[0].no_wrap = True
        table.columns[1].justify = "right"
        for entry in entries:
            if "damaged" in entry:
                table.add_row(Path(entry["path"]).name, "", entry["damaged"], "damaged")
                continue
            best = [choose_shown_name(name, [entry["measures"][name]]) for name in entry["best"]]
            marks = (["newest"] if entry["newest"] else []) + [f"best {name}" for name in best]
            eval_metrics = _format_metrics(entry["measures"])
            table.add_row(Path(entry["path"]).name, f"{entry['bytes']:,}", eval_metrics, ", ".join(marks))
        console.print(table)
