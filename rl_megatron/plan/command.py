"""`rl-megatron plan`: the memory, FLOPs and estimated time of a stage on a cluster, and the search for a layout."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path

from rich.console import Console

from rl_megatron import log
from rl_megatron.algorithms.registry import get_algorithm
from rl_megatron.algorithms.rollout import recomputes_logprobs
from rl_megatron.checkpoint.directory import check_checkpoint
from rl_megatron.config.algorithm_kinds import PolicyGradientConfig, RolloutConfig
from rl_megatron.config.checkpoint_metadata import MANIFEST
from rl_megatron.config.data import DOCUMENTS
from rl_megatron.config.errors import ConfigError, nearest
from rl_megatron.config.loading.hints import get_override_key
from rl_megatron.config.parallel import ParallelConfig
from rl_megatron.config.plan import PlanConfig
from rl_megatron.config.schema import RunConfig, StageConfig
from rl_megatron.losses.registry import configured_loss
from rl_megatron.plan.closed_use import estimate_use
from rl_megatron.plan.devices import Cluster
from rl_megatron.plan.estimate import apply_mean_lengths, choose_stages, estimate_step
from rl_megatron.plan.phases import RankUse
from rl_megatron.plan.report import Report, draw, print_json, print_report, print_search, search_as_json
from rl_megatron.plan.search import Candidate, Search, search, without_layout
from rl_megatron.plan.servers import Servers
from rl_megatron.plan.settings import Settings
from rl_megatron.plan.workload import Critic, Workload, get_group_size
from rl_megatron.topology.degrees import sequence_multiple

_WIDTH_IN_FILES = 150  # wide enough for the tables
_MOST_RANKS = 16_384
_CLOSED_FORMS = (
    "Closed forms: FLOPs are exact; parameters, gradients and optimizer state omit alignment (below 1%); "
    "activations, operators and bytes are estimates (docs/plan.md)."
)


def plan(config: RunConfig, section: PlanConfig, options: argparse.Namespace) -> int:
    """Print the plan of a stage or the result of a search; rl_megatron/cli/parser.py declares the options.

    Returns:
        The exit status: 0 if the stage, or a layout that was found, fits the memory; 1 otherwise.

    Raises:
        ConfigError: The GPU or a link is unknown, `init_from` has another model, the layout does not fit the model, or
            a phase cannot be planned.
    """
    _check(options)
    name, stage = _choose_stage(config, options.stage)
    if config.init_from and (Path(config.init_from) / MANIFEST).is_file():  # a Hugging Face directory has none
        check_checkpoint(Path(config.init_from), stage.model, tokenizer_digest=None)
    cluster = Cluster.from_config(section, options.gpu, options.nodes, options.gpus_per_node)
    if cluster.world_size > _MOST_RANKS:
        raise ConfigError(
            f"--nodes {cluster.nodes} × --gpus-per-node {cluster.gpus_per_node} = {cluster.world_size} ranks: a plan "
            f"has at most {_MOST_RANKS}; lower one of them"
        )
    if stage.model.vocab_size is None and stage.tokenizer.path is None:
        log.LOGGER.warning(
            "model.vocab_size=null: the plan uses tokenizer.vocab_size=%d; set model.vocab_size to the number of rows "
            "of the model's embedding",
            stage.tokenizer.vocab_size,
        )
    console = Console(width=None if sys.stdout.isatty() else _WIDTH_IN_FILES, highlight=False)
    if options.search:
        return _search(config, name, stage, section, cluster, options, console)
    report = _build_report(name, build_workload(stage, cluster.world_size, section), section, cluster, options)
    if options.json:
        print_json(report.as_json())
    else:
        print_report(report, console)
    if options.picture is not None:
        draw(report, Path(options.picture))
    return 0 if report.fits else 1


def _check(options: argparse.Namespace) -> None:
    """Refuse a picture that cannot be written and numbers below 1, before anything is planned."""
    if options.picture is not None:
        _check_picture(Path(options.picture))
    for option, value in (("--top", options.top), ("--verify", options.verify)):
        if value < 1:
            raise ConfigError(
                f"{option} {value}: must be at least 1" + "; --closed-forms runs none" * (option == "--verify")
            )


def _check_picture(file: Path) -> None:
    """Refuse a picture that could not be written."""
    if file.suffix != ".png":
        raise ConfigError(f"--picture {file}: the picture is a PNG; give a name that ends in .png")
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ConfigError(f"--picture {file} cannot be written: its directory is missing or may not be written to")


def build_workload(stage: StageConfig, world_size: int, section: PlanConfig) -> Workload:
    """Return the workload of a stage, with the critic and the passes that its algorithm needs."""
    prompt, response = _choose_lengths(stage, section)
    algorithm, settings = get_algorithm(stage), stage.algorithm
    needs, critic = algorithm.critic, None
    if needs is not None:
        critic = Critic(needs.optimizer(settings), needs.loss(settings))
    recomputes = False
    if isinstance(stage.algorithm, PolicyGradientConfig):
        recomputes = recomputes_logprobs(stage, stage.algorithm, configured_loss(stage.loss))
    return Workload(
        stage, world_size, _find_vocab_size(stage), prompt, response, uses_reference=algorithm.uses_reference(stage),
        recomputes_logprobs=recomputes, critic=critic, head=algorithm.head,
    )  # fmt: skip


def _choose_lengths(stage: StageConfig, section: PlanConfig) -> tuple[int, int]:
    """Return the tokens of a prompt and of a response: the settings, or defaults up to the model's maximum length.

    If a sequence of this length exceeds a microbatch, the defaults are those up to the longest that does not. Sampled
    completions keep their length, so that only their prompt becomes shorter.
    """
    longest, most = stage.model.max_sequence_length, _count_most_tokens(stage)
    prompt, response = _fill_lengths(stage, section, longest)
    if prompt + response <= most:
        return prompt, response
    if isinstance(stage.algorithm, RolloutConfig):
        return (most - response if section.prompt_tokens is None and response < most else prompt), response
    return (
        _fill_lengths(stage, section, min(longest, most)) if most > (section.prompt_tokens or 0) else (prompt, response)
    )


def _count_most_tokens(stage: StageConfig) -> int:
    """Return the tokens of the longest sequence that a microbatch can have."""
    if stage.train.batching == "padded":
        return stage.model.max_sequence_length
    multiple = sequence_multiple(stage.parallel)
    return stage.train.micro_batch_tokens // get_group_size(stage) // multiple * multiple


def _fill_lengths(stage: StageConfig, section: PlanConfig, longest: int) -> tuple[int, int]:
    """Return the tokens of a prompt and of a response, with defaults for sequences of at most `longest` tokens."""
    reads_windows = stage.algorithm.learns_from == DOCUMENTS
    prompt = (0 if reads_windows else longest // 2) if section.prompt_tokens is None else section.prompt_tokens
    response = section.response_tokens
    if response is None:
        response = stage.data.sequence_length if reads_windows else longest - prompt
        if isinstance(stage.algorithm, RolloutConfig):
            response = min(response, stage.generation.max_new_tokens)
    if response < 1:
        raise ConfigError(
            f"plan.prompt_tokens={prompt} leaves no response tokens: model.max_sequence_length={longest}; lower the "
            "one or raise the other"
        )
    return prompt, response


def _find_vocab_size(stage: StageConfig) -> int:
    """Return the vocabulary size of the model, or of the tokenizer that the run would train."""
    if stage.model.vocab_size is not None:
        return stage.model.vocab_size
    if stage.tokenizer.path is not None:
        raise ConfigError(
            f"model.vocab_size=null: a plan does not read the tokenizer (tokenizer.path={stage.tokenizer.path}); set "
            "model.vocab_size to the rows of the model's embedding"
        )
    return stage.tokenizer.vocab_size


def _choose_stage(config: RunConfig, name: str | None) -> tuple[str, StageConfig]:
    """Return the chosen stage, by default the last."""
    name = list(config.stages)[-1] if name is None else name
    if name not in config.stages:
        raise ConfigError(f"--stage {name}: the run has no such stage{nearest(name, config.stages)}")
    return name, config.stages[name]


def _build_report(
    name: str, workload: Workload, section: PlanConfig, cluster: Cluster, options: argparse.Namespace
) -> Report:
    servers = Servers.from_workload(workload, cluster)
    settings = replace(Settings.from_workload(workload, section.mean_response_tokens), servers=servers)
    stages = choose_stages(settings, cluster)
    if options.closed_forms:
        uses = means = tuple(estimate_use(settings, stage) for stage in stages)
        source = _CLOSED_FORMS
    else:
        uses = run_stages(workload, stages, options.exact, servers)
        means = tuple(apply_mean_lengths(use, settings) for use in uses)
        ranks = ", ".join(str(use.rank) for use in uses)
        depth = "with all layers" if options.exact else "stacks of many equal layers at two depths"
        source = f"The phases of a step were run on fake GPUs as rank(s) {ranks}, {depth} (docs/plan.md)."
    source = " ".join([source, *_note_backend(workload.stage)])
    return Report(name, workload, cluster, uses, estimate_step(means, settings, cluster), source, servers)


def _note_backend(stage: StageConfig) -> list[str]:
    """Return a note if the run itself may use Transformer Engine's layers and optimizer, and otherwise no note."""
    backend = stage.model.backend
    is_taken = backend == "transformer_engine" or (
        backend == "auto" and importlib.util.find_spec("transformer_engine") is not None
    )
    return ["The plan is for the portable layers and torch's Adam: Transformer Engine runs only on a GPU."] * is_taken


def run_stages(workload: Workload, stages: Sequence[int], exact: bool, servers: Servers | None) -> tuple[RankUse, ...]:
    """Run the phases of a step on fake GPUs, as the first rank of each of these pipeline stages.

    With `exact`, all layers are run. The memory of `servers` is added if they share the GPUs.
    """
    from rl_megatron.plan.run import count_use  # slow to import

    stage_ranks = workload.world_size // workload.stage.parallel.pipeline
    uses = [count_use(workload, stage * stage_ranks, exact=exact) for stage in stages]
    return tuple(uses if servers is None else (replace(use, phases=servers.add_memory_to(use.phases)) for use in uses))


def _search(
    config: RunConfig,
    name: str,
    stage: StageConfig,
    section: PlanConfig,
    cluster: Cluster,
    options: argparse.Namespace,
    console: Console,
) -> int:
    """Print the ranking of layouts and the command line of the first that fits, and return the exit status."""
    if options.picture is not None:
        raise ConfigError(f"--picture {options.picture} shows one layout; plan that layout without --search")
    workload = build_workload(without_layout(stage), cluster.world_size, section)
    result = search(workload, cluster, section.mean_response_tokens)
    stage_name = name if len(config.stages) > 1 else None
    wanted = 0 if options.closed_forms else options.verify
    verified = _run_best(result, stage, section, cluster, wanted, options.exact)
    fits = [position for position, run in verified.items() if run <= cluster.usable_bytes]
    chosen = fits[:1] if wanted else [1][: len(result.ranked)]
    commands = {
        position: build_command_line(result.ranked[position - 1], options, stage_name, cluster) for position in chosen
    }
    if options.json:
        print_json(search_as_json(result, commands, verified, stage_name, options.top))
    else:
        print_search(result, console, commands, verified, cluster.usable_bytes, options.top)
        for note in _note_backend(stage):
            console.print(note)
        if not commands:
            console.print(_explain_no_command(result, verified))
    return 0 if commands else 1


def _run_best(
    result: Search, stage: StageConfig, section: PlanConfig, cluster: Cluster, wanted: int, exact: bool
) -> dict[int, int]:
    """Run the best layouts until `wanted` of them fit, and return their peak bytes by position.

    At most 3 · `wanted` layouts are run. If none of them fits, the layout with the lowest peak by closed forms is run,
    too.
    """
    peaks: dict[int, int] = {}
    if not wanted or not result.ranked:
        return peaks
    ranked = dict(enumerate(result.ranked, 1))
    lowest = min(ranked, key=lambda position: ranked[position].peak_bytes)
    for position in dict.fromkeys([*list(ranked)[: 3 * wanted], lowest]):
        candidate = ranked[position]
        if (
            position == lowest
            and position > 3 * wanted
            and any(peak <= cluster.usable_bytes for peak in peaks.values())
        ):
            break
        workload = build_workload(candidate.stage(stage), cluster.world_size, section)
        stages = choose_stages(candidate.settings, cluster)
        peaks[position] = max(use.peak_phase.peak_bytes for use in run_stages(workload, stages, exact, result.servers))
        if sum(peak <= cluster.usable_bytes for peak in peaks.values()) == wanted:
            break
    return peaks


def _explain_no_command(result: Search, verified: Mapping[int, int]) -> str:
    """Return why a search has no result, and what to do."""
    if not result.ranked:
        return "No layout fits: use more or larger GPUs, shorter sequences, or a smaller model."
    return (
        f"{len(verified)} of {len(result.ranked):,} layouts that fit by closed forms were run, and none of them fits: "
        "--verify N runs more"
    )


def build_command_line(candidate: Candidate, options: argparse.Namespace, stage: str | None, cluster: Cluster) -> str:
    """Return the command line that trains with a candidate, to be run on each node with that node's NODE_RANK."""
    chosen = candidate.overrides(stage)
    replaced = {*chosen, *_REPLACED}
    kept = [override for override in options.overrides if get_override_key(override) not in replaced]
    sources = [] if options.config_dir is None else ["--config-dir", options.config_dir]
    words = ["train", *kept, *(f"{key}={value}" for key, value in chosen.items()), *sources]
    return _launcher(cluster) + shlex.join(words)


# Keys that the search chooses. The user's overrides of these keys are dropped.
_REPLACED = frozenset({"train.micro_batch_size", *(f"parallel.{field.name}" for field in fields(ParallelConfig))})


def _launcher(cluster: Cluster) -> str:
    if cluster.world_size == 1:
        return "rl-megatron "
    if cluster.nodes == 1:
        return f"torchrun --nproc-per-node {cluster.gpus_per_node} -m rl_megatron "
    each_node = f"NNODES={cluster.nodes} NODE_RANK=0 NPROC_PER_NODE={cluster.gpus_per_node}"
    return f"{each_node} MASTER_ADDR=first-node scripts/train.sh "
