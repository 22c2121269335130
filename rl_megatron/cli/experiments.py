"""List the experiments that `rl-megatron train` can run, for a command that chooses nothing."""

from __future__ import annotations

import sys
from pathlib import Path

from rl_megatron import log
from rl_megatron.config.loading.compose import PRIMARY, config_directory
from rl_megatron.config.loading.hints import key_of

# Overrides of one of these choose what is trained; without one, the command would train a default that nobody wants.
_CHOICES = ("experiment", "algorithm", "data", "model", "init_from", "stages", "tokenizer", "loss")


def chooses_nothing(overrides: list[str], config_name: str) -> bool:
    """Return whether a command says neither what to train nor what to train it on."""
    return config_name == PRIMARY and not any(key_of(each).split(".")[0] in _CHOICES for each in overrides)


def print_experiments(config_dir: str | None) -> None:
    """Print to stderr, on rank 0, that nothing was chosen, and all experiments with their descriptions."""
    if not log.is_main_rank():
        return
    lines = ["error: nothing says what to train; add experiment=NAME, or algorithm=… and data=… of your own", ""]
    for title, directory in (("experiments", config_directory()), (f"in {config_dir}", config_dir)):
        found = [] if directory is None else _experiments(Path(directory))
        width = max((len(name) for name, _ in found), default=0)
        lines += [f"{title}:", *(f"  {name:{width}}  {description}".rstrip() for name, description in found)] * bool(
            found
        )
    lines += ["", "rl-megatron train experiment=NAME --print-config shows what an experiment does in full."]
    print("\n".join(lines), file=sys.stderr, flush=True)


def _experiments(directory: Path) -> list[tuple[str, str]]:
    """Return the name and the description of every experiment in a directory of configurations."""
    parent = directory / "experiment"
    return [
        (str(path.relative_to(parent).with_suffix("")), _description(path)) for path in sorted(parent.rglob("*.yaml"))
    ]


def _description(path: Path) -> str:
    """Return the first comment of a YAML file that is not an instruction for Hydra, or ""."""
    for line in path.read_text().splitlines():
        if not line.startswith("#"):
            break
        if not (text := line.lstrip("# ")).startswith("@"):
            return text
    return ""
