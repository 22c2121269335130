"""The task `ifeval`: prompts with instructions that a program can check, in the form of IFEval's files."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from rl_megatron.data.records import Record
from rl_megatron.data.tasks.file_task import FileTask
from rl_megatron.data.tasks.instructions import INSTRUCTIONS, NEED_LANGDETECT, follows
from rl_megatron.data.tasks.registry import register_task
from rl_megatron.data.tasks.task import Problem


@register_task("ifeval")
@dataclass(frozen=True)
class IFEval(FileTask):
    """Prompts from local files with the fields `prompt`, `instruction_id_list` and `kwargs`.

    Args:
        path: A directory with `train.jsonl` and `test.jsonl`, or one file of which `heldout_fraction` is held out.
        heldout_fraction: The share of problems that is held out, if `path` is a file.
        partial: Whether the reward is the share of instructions that are followed. Otherwise it is 1 if all are.

    Raises:
        FileNotFoundError: There is nothing at `path`.
        ValueError: A line is malformed, an instruction is unknown, or it needs langdetect, which is not installed; the
            message names file:line.
    """

    partial: bool = False

    def checked(self, record: Record) -> Record:
        """Return the record, whose instructions are known."""
        fields = ("prompt", "instruction_id_list", "kwargs")
        if missing := [name for name in fields if name not in record.values]:
            raise ValueError(f"{record.location}: the record has no field {missing[0]!r}, which IFEval's files have.")
        names, options = record.values["instruction_id_list"], record.values["kwargs"]
        if len(names) != len(options):
            raise ValueError(f"{record.location}: there are {len(names)} instructions, and options for {len(options)}.")
        for name in names:
            if name not in INSTRUCTIONS:
                raise ValueError(f"{record.location}: the instruction {name!r} is none of IFEval's.")
            if name in NEED_LANGDETECT and importlib.util.find_spec("langdetect") is None:
                raise ValueError(
                    f"{record.location}: the instruction {name!r} needs langdetect: pip install 'rl_megatron[rewards]'."
                )
        return record

    def problem(self, record: Record) -> Problem:
        """Return the prompt, which has no reference answer."""
        return Problem(record.values["prompt"], "", record.values, record.location)

    def reward(self, problem: Problem, completion: str) -> float:
        """Return 1.0 if the completion follows all instructions, otherwise 0.0; with `partial`, the share of them."""
        names, options = problem.record["instruction_id_list"], problem.record["kwargs"]
        followed = [
            follows(name, completion, {key: value for key, value in each.items() if value is not None})
            for name, each in zip(names, options, strict=True)
        ]
        return sum(followed) / len(followed) if self.partial and followed else float(all(followed))
