"""List commands that use the last checkpoint of a finished run."""

from __future__ import annotations

from pathlib import Path

from rl_megatron.algorithms.registry import get_algorithm
from rl_megatron.config.checkpoint_metadata import find_imported_tokenizer
from rl_megatron.config.commands import format_command, format_override
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.schema import RunConfig
from rl_megatron.data.run_tokenizer import TOKENIZER
from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.model.families import family_of_model


def list_next_commands(config: RunConfig, tokenizer: Tokenizer, checkpoint: Path) -> list[tuple[str, str]]:
    """Return (description, command) pairs for the last checkpoint of a finished run."""
    *_, (name, stage) = config.stages.items()
    output_dir = Path(config.output_dir)
    after = Path(f"{output_dir}-next")
    commands = [("Inspect the checkpoint:", format_command("inspect", str(checkpoint)))]
    if get_algorithm(stage).head == "lm" and not stage.train.export_hf and _has_family(config, tokenizer):
        exported = str(output_dir / "exported" / name)
        commands.append(("Export it for Hugging Face:", format_command("convert", "export", str(checkpoint), exported)))
    if stage.algorithm.leaves_language_model:
        start = [format_override("init_from", str(checkpoint)), format_override("output_dir", str(after))]
        if find_imported_tokenizer(checkpoint) is None:  # otherwise, init_from has the tokenizer
            start.append(format_override("tokenizer.path", str(output_dir / TOKENIZER)))
        words = "Start a next stage from it, with algorithm=… and data=… of your choice:"
        commands.append((words, format_command("train", "model=init_from", *start)))
    return commands


def _has_family(config: RunConfig, tokenizer: Tokenizer) -> bool:
    model = config.first.model
    try:
        family_of_model(model, model.vocab_size or tokenizer.vocab_size)
    except ConfigError:
        return False
    return True
