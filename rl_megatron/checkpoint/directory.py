"""Names and manifests of checkpoint directories, and how one is synced and published. It does not need megatron-core.

A checkpoint is a directory `step-000123`. It is written as `step-000123.incomplete`. Once every rank has written its
part, rank 0 adds `manifest.json` (step, model, size and digest of every file) and renames the directory. A run that is
killed while saving therefore leaves the previous checkpoint as the newest complete one. A byte that changes later is
detected by its digest.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from rl_megatron import log
from rl_megatron.config.checkpoint_metadata import MANIFEST, no_checkpoint
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.metrics import METRICS_FILE, SAMPLES
from rl_megatron.config.model import ModelConfig
from rl_megatron.config.model_shape import with_derived_sizes
from rl_megatron.model.families import NOT_OF_THE_WEIGHTS

CONFIG = "config.yaml"  # the effective configuration of the run that wrote the checkpoint
FORMAT = 2  # older manifests have no "format" and no digests
REPLACED = ".replaced"  # the suffix of a checkpoint that another one is about to replace
REPLACING = ".new"  # the suffix of an export that takes its name in the next moment
# What a run leaves that is killed while it saves, exports or deletes.
LEFTOVERS = (".incomplete", REPLACED, REPLACING, ".deleted")
_STEP = re.compile(r"step-(\d+)")
_BLOCK = 1 << 20


class Damaged(ConfigError):
    """Raised for a checkpoint whose files differ from what was written."""


# --- writing ---


def name_of(step: int) -> str:
    """Return the directory name of the checkpoint of `step`."""
    return f"step-{step:06d}"


def random_state_file(rank: int) -> str:
    """Return the name of the file that holds the state of a rank's random number generators."""
    return f"random_{rank:05d}.pt"


def file_entry(path: Path) -> dict[str, Any]:
    """Return a file's manifest entry (size in bytes and SHA-256), and sync the file to disk."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
        os.fsync(file.fileno())
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def publish(partial: Path, final: Path, manifest: dict[str, Any], entries: dict[str, Any] | None = None) -> None:
    """Turn the finished directory `partial` into the checkpoint `final`: write its manifest, then rename it.

    Args:
        partial: The directory, with all files but the manifest.
        final: The checkpoint's path. A checkpoint that already has this name is replaced.
        manifest: The manifest's keys, without format, files and digest.
        entries: The manifest entries that the files' writers have already computed. Other files are read here.
    """
    entries = dict(entries or {})
    for path in sorted(partial.rglob("*")):
        name = str(path.relative_to(partial))
        if path.is_file() and name not in entries:
            entries[name] = file_entry(path)
    content = {"format": FORMAT, **manifest, "files": dict(sorted(entries.items()))}
    content = json.loads(json.dumps(content))  # JSON turns keys into strings, and the digest is of what is read back
    with (partial / MANIFEST).open("w") as file:
        file.write(json.dumps({**content, "sha256": _digest_of(content)}, indent=1))
        file.flush()
        os.fsync(file.fileno())
    _sync_directory(partial)
    if _STEP.fullmatch(final.name) and final.exists() and not (final / MANIFEST).is_file():
        _set_aside(final)
    replaced = final.with_name(f"{final.name}{REPLACED}") if final.exists() else None
    if replaced is not None:  # a run that went back to an earlier step saves this step again
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    partial.rename(final)
    _sync_directory(final.parent)
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)


def _set_aside(path: Path) -> None:
    """Give an incomplete checkpoint another name, because the next save of its step would delete it."""
    names = (path.with_name(f"{path.name}.without-manifest-{number}") for number in count(1))
    kept = next(name for name in names if not name.exists())
    log.LOGGER.warning("%s has no %s, and is now %s", path, MANIFEST, kept)
    path.rename(kept)


def put_back(directory: Path) -> None:
    """Restore the names of checkpoints if a run was killed while it replaced them."""
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
    """Return the complete checkpoints in `directory`, oldest first, and warn of a directory without a manifest."""
    steps = {}
    for path in directory.glob("step-*"):
        match = _STEP.fullmatch(path.name)
        if match is not None and (path / MANIFEST).is_file():
            steps[path] = int(match.group(1))
        elif match is not None and path.is_dir():
            log.once(
                f"{path} has no {MANIFEST}, so it is not a whole checkpoint and is passed over; copy the missing file "
                "from a backup, or remove the directory"
            )
    return sorted(steps, key=lambda path: steps[path])


def check_output_dir(output_dir: Path) -> None:
    """Check that the output directory of a run is a directory or does not exist, and that its metrics are files.

    Raises:
        ConfigError: It is a file, or one of them is a directory.
    """
    if output_dir.exists() and not output_dir.is_dir():
        raise ConfigError(f"output_dir={output_dir} is a file; choose a directory")
    for path in (output_dir / METRICS_FILE, output_dir / SAMPLES):
        if path.is_dir():
            raise ConfigError(f"{path} is a directory, and the run writes a file there; move it, or set output_dir")


def check_checkpoint(checkpoint: Path, model: ModelConfig, tokenizer_digest: str | None) -> dict[str, Any]:
    """Check that a run can read a checkpoint, and return its manifest.

    Args:
        checkpoint: The checkpoint's directory.
        model: The run's model.
        tokenizer_digest: The digest of the run's tokenizer, or None to accept any.

    Raises:
        ConfigError: It is not a whole checkpoint of this model that was trained with this tokenizer.
    """
    manifest = read_manifest(checkpoint, model)
    if tokenizer_digest is not None and manifest.get("tokenizer", tokenizer_digest) != tokenizer_digest:
        raise ConfigError(
            f"checkpoint {checkpoint} was trained with another tokenizer than this run's, which gives the same text "
            "other tokens; set tokenizer.path to the tokenizer directory of the run that made the checkpoint"
        )
    return manifest


def read_manifest(checkpoint: Path, model: ModelConfig | None = None) -> dict[str, Any]:
    """Return the manifest of a checkpoint, after checking that every file exists and has its full size.

    Args:
        checkpoint: The checkpoint's directory.
        model: The model that the checkpoint must hold. None accepts any model.

    Raises:
        ConfigError: A file is missing or truncated, or the model differs. The message names the file or the keys.
    """
    if not checkpoint.is_dir():
        raise ConfigError(
            f"checkpoint {checkpoint} does not exist; existing checkpoints: {_names_in(checkpoint.parent)}"
        )
    if not (checkpoint / MANIFEST).is_file():
        raise ConfigError(f"checkpoint {checkpoint} {no_checkpoint(checkpoint)}")
    manifest = manifest_of(checkpoint)
    for name, entry in manifest["files"].items():
        path, size = checkpoint / name, size_of(entry)
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            state = "is missing" if found is None else f"has {found} bytes instead of {size}"
            raise damaged(checkpoint, f"{name} {state}")
    if model is not None:
        # Keys that are newer than the checkpoint have their defaults.
        saved = with_derived_sizes(asdict(ModelConfig()) | manifest["model"])
        wanted = with_derived_sizes(asdict(model))
        differing = [k for k in wanted if k not in NOT_OF_THE_WEIGHTS and saved[k] != wanted[k]]
        if differing:
            listed = ", ".join(f"model.{k}: checkpoint {saved[k]}, run {wanted[k]}" for k in differing)
            raise ConfigError(
                f"checkpoint {checkpoint} holds another model ({listed}); set model=init_from to take the model of "
                "init_from (in Python: MegatronPolicy.from_checkpoint), or give these keys the checkpoint's values"
            )
    return manifest


def saved_model(checkpoint: Path, manifest: Mapping[str, Any]) -> ModelConfig:
    """Return the model section of a manifest. Keys that were added since it was written have their defaults.

    Raises:
        ConfigError: The section has a key or a value that this version does not know.
    """
    try:
        return TypeAdapter(ModelConfig).validate_python(manifest["model"])
    except ValidationError as error:
        raise ConfigError(f"checkpoint {checkpoint}: its manifest's model section is not valid: {error}") from error


def adapter_sections(manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the sections `peft` of a checkpoint's adapters, the one that was trained last first; empty without."""
    return [manifest["peft"], *manifest.get("frozen_adapters", ())] if "peft" in manifest else []


def size_of(entry: dict[str, Any] | int) -> int:
    """Return the size of a file in bytes, as its manifest entry states it."""
    return entry if isinstance(entry, int) else entry["bytes"]


SCORE_POSITION = "end of turn"  # the value of `score_position` in manifests of models with a score head


def check_head(checkpoint: Path, manifest: dict[str, Any], head: str, weights_only: bool) -> bool:
    """Return whether the model must initialize a new head, because a score head starts from a language model.

    It warns if the checkpoint is from a time when a reward model's score could be trained at another token.

    Raises:
        ConfigError: The checkpoint has another head, which cannot be left out.
    """
    saved = manifest.get("head", "lm")
    if saved == head:
        if head == "score" and manifest.get("score_position") != SCORE_POSITION:
            log.once(
                f"checkpoint {checkpoint} does not say at which token its score was trained; if it is a reward model "
                "for a chat template that writes text behind the token which ends a turn, as ChatML's line break, it "
                "was trained at this text, and is now read at the token which ends the turn: train it again"
            )
        return False
    if (saved, head) == ("lm", "score") and weights_only:
        return True
    names = {"lm": "a language model", "score": "a reward model or critic (a score head)"}
    raise ConfigError(
        f"checkpoint {checkpoint} holds {names[saved]}, but {names[head]} is needed here; start from a checkpoint of "
        f"{names[head]}"
    )


def manifest_of(checkpoint: Path) -> dict[str, Any]:
    """Return the manifest without checking the other files.

    Raises:
        Damaged: The manifest differs from what was written.
    """
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text())
        digested = any(not isinstance(entry, int) for entry in manifest["files"].values())
    except ValueError as error:  # invalid JSON or invalid UTF-8
        raise damaged(checkpoint, f"{MANIFEST} is not valid JSON ({error})") from error
    except (OSError, KeyError, AttributeError, TypeError) as error:
        raise damaged(checkpoint, f"{MANIFEST} is not a manifest ({error!r})") from error
    if digested or "format" in manifest:
        content = {key: value for key, value in manifest.items() if key != "sha256"}
        if manifest.get("sha256") != _digest_of(content):
            raise damaged(checkpoint, f"{MANIFEST} has changed since it was written (its SHA-256 differs)")
    return manifest


def damaged(checkpoint: Path, what: str) -> Damaged:
    """Return an error whose message says `what` is wrong with the checkpoint."""
    return Damaged(f"checkpoint {checkpoint} is damaged: {what}; use an older one")


def _names_in(directory: Path) -> str:
    return ", ".join(p.name for p in complete_checkpoints(directory)) or "none"
