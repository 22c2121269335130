"""Checkpoints as directories: their names, their manifests, whether they are whole. No megatron-core is needed here.

A checkpoint is a directory `step-000123`. It is written as `step-000123.incomplete` and renamed when every rank has
written its part and `manifest.json` is there: step, model, and the size and digest of every file. So a run killed while
saving leaves the previous checkpoint as the newest complete one, and a byte that changed since is found and named.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rl_megatron.config.checkpoint_metadata import MANIFEST
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.schema import ModelConfig
from rl_megatron.model.families import NOT_OF_THE_WEIGHTS

CONFIG = "config.yaml"  # the effective configuration of the run that wrote the checkpoint
FORMAT = 2  # manifests before had no "format", and no digests
REPLACED = ".replaced"  # a checkpoint whose place another is about to take
LEFTOVERS = (".incomplete", REPLACED, ".deleted")  # of a run killed while saving or deleting
_STEP = re.compile(r"step-(\d+)")
_BLOCK = 1 << 20


class Damaged(ConfigError):
    """A checkpoint that is not as it was written."""


# --- writing ---


def name_of(step: int) -> str:
    return f"step-{step:06d}"


def file_entry(path: Path) -> dict[str, Any]:
    """What the manifest says of a file, once the file is on the disk and not only on its way there."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
        os.fsync(file.fileno())
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def publish(partial: Path, final: Path, manifest: dict[str, Any], entries: dict[str, Any] | None = None) -> None:
    """Makes of the finished directory `partial` the checkpoint `final`: its manifest, then its name.

    `entries` are the manifest's entries of files that have been read by those who wrote them; others are read here.
    """
    entries = dict(entries or {})
    for path in sorted(partial.rglob("*")):
        name = str(path.relative_to(partial))
        if path.is_file() and name not in entries:
            entries[name] = file_entry(path)
    content = {"format": FORMAT, **manifest, "files": dict(sorted(entries.items()))}
    content = json.loads(json.dumps(content))  # as it will be read: its keys are strings
    with (partial / MANIFEST).open("w") as file:
        file.write(json.dumps({**content, "sha256": _digest_of(content)}, indent=1))
        file.flush()
        os.fsync(file.fileno())
    _sync_directory(partial)
    replaced = final.with_name(f"{final.name}{REPLACED}") if final.exists() else None
    if replaced is not None:  # of a run that is being redone from earlier
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    partial.rename(final)
    _sync_directory(final.parent)
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)


def system_error(error: BaseException) -> OSError | None:
    """The operating system's error behind `error`, if there is one: torch says of a full disk only that a position is
    unexpected."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return cause


def put_back(directory: Path) -> None:
    """Gives a checkpoint its name back that a run, killed while it put another in its place, left without one."""
    for replaced in directory.glob(f"step-*{REPLACED}"):
        final = replaced.with_name(replaced.name.removesuffix(REPLACED))
        if (replaced / MANIFEST).is_file() and not final.exists():
            replaced.rename(final)


def _digest_of(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- reading ---


def complete_checkpoints(directory: Path) -> list[Path]:
    """Complete checkpoints in `directory`, oldest first."""
    found = [p for p in directory.glob("step-*") if _STEP.fullmatch(p.name) and (p / MANIFEST).is_file()]
    return sorted(found, key=lambda p: int(_STEP.fullmatch(p.name).group(1)))


def read_manifest(checkpoint: Path, model: ModelConfig | None = None) -> dict[str, Any]:
    """The manifest of a complete, untruncated checkpoint, of `model` where one is given.

    Raises: ConfigError naming the missing or truncated file, or the model keys that differ.
    """
    if not checkpoint.is_dir():
        raise ConfigError(f"checkpoint {checkpoint} does not exist; existing: {_names_in(checkpoint.parent)}")
    if not (checkpoint / MANIFEST).is_file():
        raise ConfigError(f"checkpoint {checkpoint} has no {MANIFEST}: it is incomplete, or not a checkpoint directory")
    manifest = manifest_of(checkpoint)
    for name, entry in manifest["files"].items():
        path, size = checkpoint / name, size_of(entry)
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            state = "is missing" if found is None else f"has {found} bytes instead of {size}"
            raise _damaged(checkpoint, f"{name} {state}")
    if model is not None:
        saved, wanted = asdict(ModelConfig()) | manifest["model"], asdict(model)  # keys since added had their default
        differing = [k for k in wanted if k not in NOT_OF_THE_WEIGHTS and saved[k] != wanted[k]]
        if differing:
            listed = ", ".join(f"model.{k}: checkpoint {saved[k]}, run {wanted[k]}" for k in differing)
            raise ConfigError(f"checkpoint {checkpoint} is of another model ({listed}); set these keys alike")
    return manifest


def size_of(entry: dict[str, Any] | int) -> int:
    """Bytes of a file, by its entry in the manifest."""
    return entry if isinstance(entry, int) else entry["bytes"]


def damage(checkpoint: Path, names: Iterable[str], manifest: dict[str, Any]) -> str | None:
    """What is wrong with the contents of the files `names`, the first found; None when they are as they were written.

    Files without a digest, of checkpoints older than digests, count as they are.
    """
    for name in names:
        entry = manifest["files"][name]
        if isinstance(entry, int):
            continue
        try:
            found = file_entry(checkpoint / name)
        except OSError as error:
            return f"{name} cannot be read ({error})"
        if found != entry:
            return f"the contents of {name} are not those that were written (SHA-256 differs)"
    return None


def check_digests(checkpoint: Path, manifest: dict[str, Any], rank: int = 0, world_size: int = 1) -> None:
    """Reads every file, or, of `world_size` readers, this one's share, and holds it against its digest.

    Raises: Damaged naming the file.
    """
    largest_first = sorted(manifest["files"], key=lambda name: (-size_of(manifest["files"][name]), name))
    found = damage(checkpoint, largest_first[rank::world_size], manifest)
    if found is not None:
        raise _damaged(checkpoint, found)


def check_head(checkpoint: Path, manifest: dict[str, Any], head: str, weights_only: bool) -> bool:
    """Whether a model with `head` has to start it afresh: a score head on the weights of a language model.

    Raises: ConfigError where the checkpoint's head is another one and cannot be left behind.
    """
    saved = manifest.get("head", "lm")
    if saved == head:
        return False
    if (saved, head) == ("lm", "score") and weights_only:
        return True
    names = {"lm": "a language model", "score": "a reward model or critic (a score head)"}
    raise ConfigError(
        f"checkpoint {checkpoint} is of {names[saved]}, and {names[head]} is needed here; start from the checkpoint of "
        f"{names[head]}"
    )


def manifest_of(checkpoint: Path) -> dict[str, Any]:
    """The manifest as it was written, whatever became of the other files.

    Raises: Damaged.
    """
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text())
        digested = any(not isinstance(entry, int) for entry in manifest["files"].values())
    except ValueError as error:  # of JSON, or of UTF-8
        raise _damaged(checkpoint, f"{MANIFEST} is not valid JSON ({error})") from error
    except (OSError, KeyError, AttributeError, TypeError) as error:
        raise _damaged(checkpoint, f"{MANIFEST} is not a manifest ({error!r})") from error
    if digested or "format" in manifest:
        content = {key: value for key, value in manifest.items() if key != "sha256"}
        if manifest.get("sha256") != _digest_of(content):
            raise _damaged(checkpoint, f"the contents of {MANIFEST} are not those that were written (SHA-256 differs)")
    return manifest


def _damaged(checkpoint: Path, what: str) -> Damaged:
    return Damaged(f"checkpoint {checkpoint} is damaged: {what}; use an older one")


def _names_in(directory: Path) -> str:
    return ", ".join(p.name for p in complete_checkpoints(directory)) or "none"
