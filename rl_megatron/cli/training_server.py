"""Serve a model to clients that write the training loop themselves, for `rl-megatron training-server`.

Mistakes in options, paths and files are reported before torch is imported.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
from pathlib import Path

from rl_megatron import log
from rl_megatron.cli.generate import build_weights_tokenizer, check_weights
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.extras import require_extra
from rl_megatron.config.generation import MAX_PORT
from rl_megatron.config.schema import RunConfig

_KEY = re.compile(r"tml-[A-Za-z0-9_-]{16,}")
_OWNER = re.compile(r"[A-Za-z0-9._-]+")
_OWN_KEY = "key"  # the file of the key that a server without --keys makes


def training_server(config: RunConfig, options: argparse.Namespace) -> int:
    """Serve the model of a run from `prepare_run` until a signal ends it, and return the exit status."""
    require_extra("training-server", "service", "starlette", "uvicorn", "google.protobuf")
    if not 0 <= options.port <= MAX_PORT:
        raise ConfigError(f"--port {options.port}: must be from 0 (a free port) to {MAX_PORT}")
    if options.runs_in_memory < 1:
        raise ConfigError(f"--runs-in-memory {options.runs_in_memory}: must be at least 1")
    stage, weights, directory = config.first, Path(str(config.init_from)), Path(options.directory).resolve()
    if stage.peft is not None:
        raise ConfigError("peft is set, but clients of a training server choose their adapters; leave it out")
    tokenizer = build_weights_tokenizer(stage)
    check_weights(weights, stage, tokenizer)
    keys = read_keys(Path(options.keys)) if options.keys else {}
    if log.is_main_rank() and not options.keys:
        keys = make_key(directory)
    from rl_megatron.service.command import ServiceJob, serve_training

    name = options.name or weights.resolve().name
    return serve_training(
        ServiceJob(
            stage, weights, tokenizer, name, directory, options.host, options.port, keys, options.runs_in_memory
        )
    )  # fmt: skip


def read_keys(path: Path) -> dict[str, str]:
    """Return the owner of each key in a file of lines `KEY OWNER`.

    Raises:
        ConfigError: The file cannot be read, others than its owner can read it, or a line has another form.
    """
    try:
        lines, mode = path.read_text().splitlines(), path.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--keys {path} cannot be read: {error}") from error
    if mode & 0o077:
        raise ConfigError(f"--keys {path} can be read by other users; run chmod 600 {path}")
    keys: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or not _KEY.fullmatch(words[0]) or not _OWNER.fullmatch(words[1]):
            raise ConfigError(
                f"--keys {path}, line {number}: write a key and its owner, as in 'tml-… anna'; a key is tml- and at "
                "least 16 letters, digits, _ or -"
            )
        if words[0] in keys:
            raise ConfigError(f"--keys {path}, line {number}: the key is there twice")
        keys[words[0]] = words[1]
    if not keys:
        raise ConfigError(f"--keys {path} has no key; write lines such as 'tml-{secrets.token_hex(16)} anna'")
    return keys


def make_key(directory: Path) -> dict[str, str]:
    """Return the server's own key, which is kept in a file that only its user can read."""
    path = directory / _OWN_KEY
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            partial = path.with_suffix(".incomplete")
            partial.unlink(missing_ok=True)
            with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(f"tml-{secrets.token_hex(24)}\n")
            partial.rename(path)
        key = path.read_text().strip()
    except OSError as error:
        raise ConfigError(f"--directory {directory} cannot be written: {error.strerror}; choose another one") from error
    log.LOGGER.info("the key of this server is in %s", path)
    return {key: "user"}
