"""Notice that a user's files and functions changed since a stage read them: data, chat templates and code."""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic import TypeAdapter

from rl_megatron.config.loading.import_strings import function_digest, is_import_string
from rl_megatron.config.schema import StageConfig

_READ_BYTES = 2**20  # of each file; data may be large, and its size is compared too
_PATHS = ("path", "eval_path", "chat_template")  # keys of the data section, and of the parts of data.mix


def digest_files(stage: StageConfig) -> dict[str, str]:
    """Return a digest of every file, directory and Python function of the user that affects what a stage learns.

    A digest covers the size and the first MiB of a file, the names and sizes of the files of a directory, or the source
    of a reward function that was passed from Python. The keys are paths and "the function NAME".
    """
    sections = TypeAdapter(StageConfig).dump_python(stage, mode="json")
    patterns = [text for key, text in _texts(sections["data"]) if key in _PATHS]
    patterns += [
        text.partition(".py:")[0] + ".py"
        for section in ("algorithm", "data", "loss", "reward", "rollout")
        for _, text in _texts(sections[section])
        if is_import_string(text) and ".py:" in text
    ]
    patterns += [text for key, text in _texts(sections["reward"]) if key == "template"]  # a judge's template
    paths = sorted({path for pattern in patterns for path in glob.glob(os.path.expanduser(pattern))})
    functions = {
        f"the function {function.name}": digest
        for function in stage.reward.functions
        if (digest := function_digest(function.name)) is not None
    }
    return {path: _digest(Path(path)) for path in paths} | functions


def find_changed_files(recorded: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the files and functions that are in both mappings with different digests."""
    return [path for path, digest in recorded.items() if now.get(path, digest) != digest]


def _texts(value: object, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield (key, text) of every string in nested mappings and lists; items of a list have the list's key."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for inner, item in value.items():
            yield from _texts(item, str(inner))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item, key)


def _digest(path: Path) -> str:
    hashed = hashlib.sha256()
    if path.is_dir():
        for file in sorted(file for file in path.rglob("*") if file.is_file()):
            hashed.update(f"{file.relative_to(path)} {file.stat().st_size}\n".encode())
    else:
        hashed.update(f"{path.stat().st_size}\n".encode())
        with path.open("rb") as content:
            hashed.update(content.read(_READ_BYTES))
    return hashed.hexdigest()[:32]
