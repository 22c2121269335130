"""Check an experiment: its files, its layout on these ranks, its tokenizer, and its servers' Python."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.generation import TRIED_SGLANG, TRIED_VLLM
from rl_megatron.config.rules import check_vocabulary
from rl_megatron.config.schema import RunConfig
from rl_megatron.data.run_tokenizer import load_known_tokenizer
from rl_megatron.doctor.findings import Finding, ok, problem, refusal, warning
from rl_megatron.runs.rerun import find_earlier_run
from rl_megatron.topology.degrees import validate, validate_model

_SMALL_SHARE = 0.5  # a tokenizer with fewer tokens than this share of the embedding's rows is probably another model's
_SECONDS = 120
# Prints the versions of a server's distribution and of this package, which has the plugin for vLLM.
_PROGRAM = """
import importlib.metadata as metadata
for name in ({name!r}, "rl_megatron"):
    try:
        print(metadata.version(name))
    except metadata.PackageNotFoundError:
        print("-")
"""
_SERVERS = {
    "vllm": ("vLLM", TRIED_VLLM, "scripts/install_vllm.sh makes such an environment"),
    "sglang": ("SGLang", TRIED_SGLANG, "install SGLang in an environment of its own"),
}


def check_files(config: RunConfig, check_early: Callable[[RunConfig], None]) -> list[Finding]:
    """Check that the experiment's files can be read, as every command does before it imports torch."""
    try:
        check_early(config)
    except ConfigError as error:
        return [refusal("experiment", error)]
    return [ok("experiment", f"{', '.join(config.stages)}: data, losses and rewards can be read")]


def check_layout(config: RunConfig, environment: Mapping[str, str] = os.environ) -> list[Finding]:
    """Check, under a launcher, that the parallel degrees fit the number of ranks."""
    if "WORLD_SIZE" not in environment:
        return []
    world_size = int(environment["WORLD_SIZE"])
    try:
        data = validate(config.first.parallel, world_size)
        validate_model(config.first.model, config.first.parallel)
    except ConfigError as error:
        return [refusal("layout", error)]
    return [ok("layout", f"{world_size} rank(s), data-parallel degree {data}")]


def check_tokenizer(config: RunConfig) -> list[Finding]:
    """Check that the tokenizer loads, and that the model's embedding fits its vocabulary."""
    stage = config.first
    try:
        tokenizer = load_known_tokenizer(stage, find_earlier_run(config))
        tokens = stage.tokenizer.vocab_size if tokenizer is None else tokenizer.vocab_size
        check_vocabulary(stage.model, tokens)
    except ConfigError as error:
        return [refusal("tokenizer", error)]
    except (ValueError, OSError) as error:
        message = f"tokenizer.path={stage.tokenizer.path} cannot be read: {error}"
        return [problem("tokenizer", message, "set tokenizer.path to a Hugging Face tokenizer's directory")]
    embedding = stage.model.vocab_size
    if tokenizer is None and stage.tokenizer.path is None:
        return [ok("tokenizer", f"a BPE of {tokens} tokens is trained at the start of the run")]
    if tokenizer is None:
        return [ok("tokenizer", f"{stage.tokenizer.path} is converted by transformers at the start of the run")]
    if embedding is not None and tokens < _SMALL_SHARE * embedding:
        message = f"the tokenizer has {tokens} tokens, and the embedding {embedding} rows (model.vocab_size)"
        remedy = "compare tokenizer.path with the model's own tokenizer"
        return [warning("tokenizer", message, remedy)]
    return [ok("tokenizer", f"{tokens} tokens" + (f", embedding of {embedding} rows" if embedding else ""))]


def check_servers(config: RunConfig) -> list[Finding]:
    """Check that each server that the run starts has a tested version in its Python environment."""
    findings = []
    checked = set()
    for stage in config.stages.values():
        engine, generation = stage.generation.engine, stage.generation
        section = {"vllm": generation.vllm, "sglang": generation.sglang}.get(engine)
        if not stage.scores_completions or section is None or section.urls:
            continue
        needs_plugin = engine == "vllm" and generation.refit in ("collective", "shared_memory")
        if (engine, section.python, needs_plugin) not in checked:
            checked.add((engine, section.python, needs_plugin))
            findings += _check_python(engine, section.python, f"{section.key}.python", needs_plugin)
    return findings


def _check_python(engine: str, python: str, key: str, needs_plugin: bool) -> list[Finding]:
    name, tried, remedy = _SERVERS[engine]
    program = _PROGRAM.format(name=engine)
    try:
        answer = subprocess.run(
            [python, "-c", program],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=True,
            cwd="/" if os.path.isabs(python) else None,
        )
        version, plugin = answer.stdout.split()[:2]
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        reason = error.strerror if isinstance(error, OSError) else type(error).__name__
        return [problem(name, f"{key}={python} does not run ({reason})", f"{remedy}; set {key}")]
    if version == "-":
        return [problem(name, f"{key}={python} has no {name}", f"{remedy}; set {key}")]
    if version.partition("+")[0] not in tried:
        message = f"{key}={python} has {name} {version}, with which this package was not tried"
        return [problem(name, message, f"install {' or '.join(tried)}; {remedy}")]
    if needs_plugin and plugin == "-":
        message = f"{key}={python} has {name} {version} but not this package, whose plugin receives the weights"
        return [problem(name, message, remedy)]
    return [ok(name, f"{version} ({python})")]
