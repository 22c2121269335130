"""Make the files that commands of the pages read: small ones, of the form that the pages describe."""

from __future__ import annotations

import json
import runpy
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rl_megatron.checkpoint.directory import publish
from rl_megatron.config.checkpoint_metadata import MANIFEST
from rl_megatron.config.model import ModelConfig
from rl_megatron.data.run_tokenizer import train_bpe
from tests.forkserver import REPOSITORY

NUM_RECORDS = 40


def word_problems(directory: Path) -> None:
    """Make a directory like GSM8K's: problems with solutions, and graded solutions of other problems."""
    directory.mkdir(parents=True)
    problems = [{"question": f"What is {n} + 1?", "answer": f"{n} and one.\n#### {n + 1}"} for n in range(NUM_RECORDS)]
    write_jsonl(directory / "train.jsonl", problems[8:])
    write_jsonl(directory / "test.jsonl", problems[:8])
    graded = [
        {
            "question": f"What is {n} + 2?",
            "small": {"is_correct": False, "solution": f"{n}\n#### {n}"},
            "large": {"is_correct": True, "solution": f"{n} and two.\n#### {n + 2}"},
        }
        for n in range(NUM_RECORDS)
    ]
    write_jsonl(directory / "model_solutions.jsonl", graded)


def reward_model_example(directory: Path) -> None:
    """Copy the example, and write its pairs where the command is run."""
    shutil.copytree(REPOSITORY / "examples" / directory.name, directory)
    runpy.run_path(str(directory / "make_pairs.py"))["main"](directory.parents[1])


def preferences(directory: Path) -> None:
    """Make a directory with pairs of a chosen and a rejected answer."""
    directory.mkdir(parents=True)
    pairs = [
        {"question": f"What is {n} + 1?", "chosen": str(n + 1), "rejected": f"{n} and one"} for n in range(NUM_RECORDS)
    ]
    write_jsonl(directory / "preferences.jsonl", pairs)


def labelled(file: Path) -> None:
    """Make a file of answers that are labelled desirable or undesirable."""
    file.parent.mkdir(parents=True, exist_ok=True)
    answers = [
        {"prompt": f"What is {n // 2} + 1?", "completion": f" {n // 2 + 1 + n % 2}", "label": n % 2 == 0}
        for n in range(2 * NUM_RECORDS)
    ]
    write_jsonl(file, answers)


def text(file: Path) -> None:
    """Make a text file of a few thousand characters."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{n} and {n} make {2 * n}.\n" for n in range(400)))


def prompts(file: Path) -> None:
    """Make a file of prompts."""
    write_jsonl(file, ({"prompt": f"{n}+1="} for n in range(4)))


def tokenizer(directory: Path) -> None:
    """Make a directory with a small tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    train_bpe(["1+2=3\n" * 9], 260).save(directory)


def hugging_face_model(directory: Path) -> None:
    """Make a directory as `save_pretrained` writes it: a small Qwen2 with random weights, and a tokenizer."""
    from tests.parallel.family_cases import hf_model, save

    tokenizer(directory)
    save(hf_model("qwen2", vocab_size=270, max_position_embeddings=48), directory)


def checkpoint_without_weights(directory: Path, model: ModelConfig | None = None) -> None:
    """Make what the checks before the first step read of a checkpoint: its manifest, of a run with this model."""
    directory.mkdir(parents=True, exist_ok=True)  # it may have a tokenizer already, which stays
    with tempfile.TemporaryDirectory() as scratch:
        partial, whole = Path(scratch) / "partial", Path(scratch) / "whole"
        partial.mkdir()
        publish(partial, whole, {"step": 1, "model": asdict(model or ModelConfig())})
        shutil.copy(whole / MANIFEST, directory)


def write_jsonl(file: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Write one JSON object per line."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(record) + "\n" for record in records))


def python_of_vllm(path: Path) -> None:
    """Put a Python where that of vLLM's environment is expected."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        path.symlink_to(sys.executable)
