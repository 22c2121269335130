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
from rl_megatron.config.metrics import shown_name

_TENSORS_SHOWN = 10
_WIDTH = 160
_HEADS = {"lm": "language model", "score": "reward model or critic (score head)"}


def inspect(path: Path, all_tensors: bool, verify: bool, as_json: bool) -> int:
    """Print the content of a checkpoint, or the checkpoints of a directory, and return the exit status.

    Args:
        path: A checkpoint, the checkpoints of a stage, or the output directory of a run.
        all_tensors: Whether to list every tensor.
        verify: Whether to compare the files with their digests.
        as_json: Whether to print JSON instead of tables.

    Raises:
        ConfigError: There is no checkpoint at `path`, or one is damaged.
    """
    is_one = path.name.startswith("step-") or (path / MANIFEST).is_file()
    found = describe(path, verify) if is_one else list_checkpoints(path)
    if as_json:
        print(json.dumps(found, indent=1))
        return 0
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _WIDTH  # a pipe has no width, and names should not be cut
    if is_one:
        _show(console, found, all_tensors)
    else:
        _list(console, found)
    return 0


def _show(console: Console, found: dict[str, Any], all_tensors: bool) -> None:
    described = _facts(found)
    width = max(len(name) for name, _ in described) + 2
    path = Text.assemble(("checkpoint".ljust(width), "bold"), found["path"])
    console.print(path, soft_wrap=True)  # on one line, so that it can be copied
    facts = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    for name, value in described:
        facts.add_row(name, value)
    console.print(facts)
    shown = found["tensors"] if all_tensors else found["tensors"][:_TENSORS_SHOWN]
    tensors = Table("tensor", "shape", "dtype", box=None, padding=(0, 2, 0, 0))
    tensors.columns[0].overflow = "fold"
    for tensor in shown:
        tensors.add_row(tensor["name"], " × ".join(map(str, tensor["shape"])), tensor["dtype"])
    console.print(tensors)
    if len(shown) < len(found["tensors"]):
        console.print(f"… and {len(found['tensors']) - len(shown)} more: --tensors shows all")
    files = Table("file", "bytes", "contents", box=None, padding=(0, 2, 0, 0))
    files.columns[1].justify = "right"
    for name, file in found["files"].items():
        files.add_row(name, f"{file['bytes']:,}", file["state"])
    console.print(files)


def _facts(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (name, value) of what the manifest says. Older manifests, and those of API users, say less."""
    stage = f" of stage {found['stage']}" if "stage" in found else ""
    size = f"{found['num_parameters']:,} parameters, {found['parameter_bytes']:,} bytes"
    states = f"{', '.join(found['optimizer_state'])}; {found['optimizer_bytes']:,} bytes"
    facts = [
        ("step", f"{found['step']}{stage}"),
        ("head", _HEADS[found.get("head", "lm")]),
        ("size", size),
        ("model", _listed({key: value for key, value in found["model"].items() if value is not None})),
        ("optimizer", states if found["optimizer_state"] else "no state, only weights"),
    ]
    eval_metrics = found.get("results", {}).get("measures", {})
    if eval_metrics:
        at = found.get("evaluated_at", found["step"])
        facts.append(("held-out", _listed_metrics(eval_metrics) + ("" if at == found["step"] else f" (at step {at})")))
    if "tokenizer" in found:
        facts.append(("tokenizer", f"digest {found['tokenizer']}, vocabulary of {found.get('vocab_size', 'unknown')}"))
    facts += [
        (name, _listed(found[name]) if isinstance(found[name], dict) else str(found[name]))
        for name in ("precision", "layout", "weights_from", "data", "versions")
        if name in found
    ]
    facts.append(("config", "in the file config.yaml" if found["config"] else "not kept"))
    return facts


def _listed(values: dict[str, Any]) -> str:
    return ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in values.items()
    )


def _listed_metrics(metrics: dict[str, float]) -> str:
    return _listed({shown_name(name, [value]): value for name, value in metrics.items()})


def _list(console: Console, stages: dict[str, list[dict[str, Any]]]) -> None:
    for stage, entries in stages.items():
        table = Table("checkpoint", "bytes", "held-out", "", title=stage, title_justify="left", box=None)
        table.columns[0].no_wrap = True
        table.columns[1].justify = "right"
        for entry in entries:
            if "damaged" in entry:
                table.add_row(Path(entry["path"]).name, "", entry["damaged"], "damaged")
                continue
            best = [shown_name(name, [entry["measures"][name]]) for name in entry["best"]]
            marks = (["newest"] if entry["newest"] else []) + [f"best {name}" for name in best]
            eval_metrics = _listed_metrics(entry["measures"])
            table.add_row(Path(entry["path"]).name, f"{entry['bytes']:,}", eval_metrics, ", ".join(marks))
        console.print(table)
