"""Names, manifests, digests and publishing of checkpoint directories. This module does not need megatron-core.

A checkpoint is a directory `step-000123`. It is written as `step-000123.incomplete`. Once every rank has written its
part, rank 0 adds `manifest.json` (step, model, size and digest of every file) and renames the directory. A run that is
killed while saving therefore leaves the previous checkpoint as the newest complete one. If a byte changes later, the
digest of its file shows it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from rl_megatron import log
from rl_megatron.config.checkpoint_metadata import FORMAT, MANIFEST, check_format, describe_missing_checkpoint
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.hub import explain_download
from rl_megatron.config.metrics import METRICS_FILE, SAMPLES
from rl_megatron.config.model import ModelConfig
from rl_megatron.config.model_shape import with_derived_sizes
from rl_megatron.disk import sync_directory
from rl_megatron.model.families import NOT_OF_THE_WEIGHTS

CONFIG = "config.yaml"  # the effective configuration of the run that wrote the checkpoint
REPLACED = ".replaced"  # the suffix of a checkpoint that another one is about to replace
REPLACING = ".new"  # the suffix of an export that is about to be renamed to its final name
# The suffixes of directories that a run leaves if it is killed while it saves, exports or deletes.
LEFTOVERS = (".incomplete", REPLACED, REPLACING, ".deleted")
_STEP = re.compile(r"step-(\d+)")
_BLOCK = 1 << 20


class Damaged(ConfigError):
    """Raised for a checkpoint whose files differ from what was written."""

    @staticmethod
    def from_cause(checkpoint: Path, cause: str) -> Damaged:
        """Return the error for a damaged checkpoint; `cause` states what is wrong with it."""
        return Damaged(f"checkpoint {checkpoint} is damaged: {cause}; use an older one")


# --- writing ---


def name_checkpoint(step: int) -> str:
    return f"step-{step:06d}"


def name_random_state(rank: int) -> str:
    """Return the name of the file that holds the state of a rank's random number generators."""
    return f"random_{rank:05d}.pt"


def digest_file(path: Path) -> dict[str, object]:
    """Return a file's manifest entry (size in bytes and SHA-256), and sync the file to disk."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
        os.fsync(file.fileno())
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def publish(
    partial: Path, final: Path, manifest: Mapping[str, object], entries: Mapping[str, object] | None = None
) -> None:
    """Turn the finished directory `partial` into the checkpoint `final`: write its manifest, then rename it.

    An existing checkpoint of this name is replaced. `manifest` has all keys but `format`, `files` and `sha256`.
    `entries` are manifest entries that the files' writers have computed already; other files are digested here.
    """
    entries = dict(entries or {})
    for path in sorted(partial.rglob("*")):
        name = str(path.relative_to(partial))
        if path.is_file() and name not in entries:
            entries[name] = digest_file(path)
    content = {**manifest, "format": FORMAT, "files": dict(sorted(entries.items()))}
    content = json.loads(json.dumps(content))  # as it will be read back: JSON turns keys into strings
    with (partial / MANIFEST).open("w") as file:
        file.write(json.dumps({**content, "sha256": _digest_content(content)}, indent=1))
        file.flush()
        os.fsync(file.fileno())
    sync_directory(partial)
    if _STEP.fullmatch(final.name) and final.exists() and not (final / MANIFEST).is_file():
        _set_aside(final)
    replaced = final.with_name(f"{final.name}{REPLACED}") if final.exists() else None
    if replaced is not None:  # a run that returned to an earlier step saves this step again
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    partial.rename(final)
    sync_directory(final.parent)
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)


def _set_aside(path: Path) -> None:
    """Rename a checkpoint without a manifest, which the new checkpoint of the same step would otherwise replace."""
    names = (path.with_name(f"{path.name}.without-manifest-{number}") for number in count(1))
    free = next(name for name in names if not name.exists())
    log.LOGGER.warning("%s has no %s, so it is renamed to %s", path, MANIFEST, free)
    path.rename(free)


def put_back(directory: Path) -> None:
    """Restore the names of checkpoints if a run was killed while it replaced them."""
    for replaced in directory.glob(f"step-*{REPLACED}"):
        final = replaced.with_name(replaced.name.removesuffix(REPLACED))
        if (replaced / MANIFEST).is_file() and not final.exists():
            replaced.rename(final)


def _digest_content(content: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


# --- reading ---


def find_checkpoints(directory: Path) -> list[Path]:
    """Return the complete checkpoints in `directory`, oldest first, and warn of a directory without a manifest."""
    steps = {}
    for path in directory.glob("step-*"):
        match = _STEP.fullmatch(path.name)
        if match is not None and (path / MANIFEST).is_file():
            steps[path] = int(match.group(1))
        elif match is not None and path.is_dir():
            log.once(
                f"{path} has no {MANIFEST}, so it is not a whole checkpoint and is ignored; copy the missing file "
                "from a backup, or remove the directory"
            )
    return sorted(steps, key=lambda path: steps[path])


def check_output_dir(output_dir: Path) -> None:
    """Check that the output directory of a run is not a file, and that the paths of its metrics are not directories."""
    if output_dir.exists() and not output_dir.is_dir():
        raise ConfigError(f"output_dir={output_dir} is a file; choose a directory")
    for path in (output_dir / METRICS_FILE, output_dir / SAMPLES):
        if path.is_dir():
            raise ConfigError(f"{path} is a directory, but the run writes this file; move it, or set output_dir")


def check_checkpoint(checkpoint: Path, model: ModelConfig, tokenizer_digest: str | None) -> dict[str, Any]:
    """Check that a run can read a checkpoint with its model and its tokenizer, and return the manifest.

    A `tokenizer_digest` of None accepts any tokenizer.
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

    If `model` is given, the checkpoint must hold this model.

    Raises:
        Damaged: A file is missing or truncated. The message names it.
        ConfigError: The path is not a checkpoint, has another format, or holds another model.
    """
    if not checkpoint.is_dir():
        existing = ", ".join(path.name for path in find_checkpoints(checkpoint.parent)) or "none"
        remedy = explain_download(checkpoint) or "; name one, as in outputs/run/checkpoints/sft/step-000100"
        raise ConfigError(f"checkpoint {checkpoint} does not exist; existing checkpoints: {existing}{remedy}")
    if not (checkpoint / MANIFEST).is_file():
        raise ConfigError(f"checkpoint {checkpoint} {describe_missing_checkpoint(checkpoint)}")
    manifest = read_manifest_alone(checkpoint)
    for name, entry in manifest["files"].items():
        path, size = checkpoint / name, entry["bytes"]
        actual_size = path.stat().st_size if path.is_file() else None
        if actual_size != size:
            state = "is missing" if actual_size is None else f"has {actual_size} bytes instead of {size}"
            raise Damaged.from_cause(checkpoint, f"{name} {state}")
    if model is not None:
        # Keys that were added after the checkpoint was written have their default values.
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


def read_model_section(checkpoint: Path, manifest: Mapping[str, object]) -> ModelConfig:
    """Return the model section of a manifest. Keys that were added since it was written have their defaults."""
    try:
        return TypeAdapter(ModelConfig).validate_python(manifest["model"])
    except ValidationError as error:
        raise ConfigError(f"checkpoint {checkpoint}: its manifest's model section is not valid: {error}") from error


def list_adapter_sections(manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the section `peft` of each adapter of a checkpoint, most recently trained first; [] for a whole model."""
    return [manifest["peft"], *manifest.get("frozen_adapters", ())] if "peft" in manifest else []


def check_head(checkpoint: Path, manifest: dict[str, Any], head: str, weights_only: bool) -> bool:
    """Return True if a model with a score head starts from a language model, so that its head must be initialized.

    Any other difference between the heads is refused.
    """
    saved = manifest.get("head", "lm")
    if saved == head:
        return False
    if (saved, head) == ("lm", "score") and weights_only:
        return True
    names = {"lm": "a language model", "score": "a reward model or critic (a score head)"}
    raise ConfigError(
        f"checkpoint {checkpoint} holds {names[saved]}, but {names[head]} is needed here; start from a checkpoint of "
        f"{names[head]}"
    )


def read_manifest_alone(checkpoint: Path) -> dict[str, Any]:
    """Return the manifest without checking the other files.

    Raises:
        Damaged: The manifest differs from what was written.
        ConfigError: The checkpoint has another format.
    """
    try:
        manifest = dict(json.loads((checkpoint / MANIFEST).read_text()))
    except ValueError as error:  # invalid JSON or invalid UTF-8
        raise Damaged.from_cause(checkpoint, f"{MANIFEST} is not valid JSON ({error})") from error
    except (OSError, TypeError) as error:
        raise Damaged.from_cause(checkpoint, f"{MANIFEST} is not a manifest ({error!r})") from error
    check_format(checkpoint / MANIFEST, manifest)
    content = {key: value for key, value in manifest.items() if key != "sha256"}
    if manifest.get("sha256") != _digest_content(content):
        raise Damaged.from_cause(checkpoint, f"{MANIFEST} has changed since it was written (its SHA-256 differs)")
    return manifest


def check_digests(path: Path, manifest: dict[str, Any], rank: int = 0, world_size: int = 1) -> None:
    """Compare the files with their digests: all of them or, if `world_size` readers share them, those of reader `rank`.

    Raises:
        Damaged: A file has changed since it was written. The message names it.
    """
    largest_first = sorted(manifest["files"], key=lambda name: (-manifest["files"][name]["bytes"], name))
    damage = _find_damage(path, largest_first[rank::world_size], manifest)
    if damage is not None:
        raise Damaged.from_cause(path, damage)


def _find_damage(path: Path, names: Iterable[str], manifest: dict[str, Any]) -> str | None:
    """Return what is wrong with the first damaged file of `names`, or None if no file is damaged."""
    for name in names:
        try:
            actual = digest_file(path / name)
        except OSError as error:
            return f"{name} cannot be read ({error})"
        if actual != manifest["files"][name]:
            return f"{name} has changed since it was written (its SHA-256 differs)"
    return None
