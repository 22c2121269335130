"""Compare the tokens per second of rollout engines with `model.generate` of transformers, on equal work:

    python benchmarks/generation.py
    python benchmarks/generation.py --engines embedded transformers --prompts path/to/gsm8k

All sides complete the same prompts with the same weights of a Llama, at temperature 1. They alternate, one round each.
In the mode "equal", every completion has `--tokens` tokens. In the mode "mixed", completion i has its own length, drawn
between a quarter of it and `--tokens`: engines get it as the request's `max_new_tokens`, and `model.generate` as a
stopping criterion for each sequence. Lengths are checked in both modes.

An engine that is not installed is left out.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.loading.load import load_config
from rl_megatron.config.parallel import ParallelConfig
from rl_megatron.data.run_tokenizer import train_bpe
from rl_megatron.generation.completion_batch import generate
from rl_megatron.generation.engines import build_engine
from rl_megatron.generation.interfaces import RolloutEngine, Sampling
from rl_megatron.generation.requests import make_requests
from rl_megatron.generation.transformers.model import checkpoint_tensors
from rl_megatron.topology import topology
from rl_megatron.topology.device import start_device
from rl_megatron.training.megatron_policy import MegatronPolicy

_SEED = 0
_VOCAB_SIZE = 4096
_SHAPE = {"num_layers": 4, "hidden_size": 256, "ffn_hidden_size": 704, "num_attention_heads": 4, "num_query_groups": 2}
_MODES = ("equal", "mixed")
_REFERENCE = "model.generate"

Complete = Callable[[str, int], list[int]]  # (mode, number of the round) → the length of each completion


def prompts_of(directory: Path | None, count: int) -> list[list[int]]:
    """Return the token ids of GSM8K's first questions, or of arithmetic problems if there is no directory."""
    if directory is not None:
        lines = (directory / "train.jsonl").read_text().splitlines()
        texts = [json.loads(line)["question"] for line in lines]
    else:
        draw = random.Random(_SEED)
        names = ["apples", "books", "coins", "days", "eggs", "friends", "games", "houses"]
        texts = [
            " ".join(
                f"There are {draw.randrange(100)} {draw.choice(names)} and {draw.randrange(100)} {draw.choice(names)}."
                for _ in range(draw.randint(2, 8))
            )
            + f" How many {draw.choice(names)} are there?"
            for _ in range(count)
        ]
    tokenizer = train_bpe(texts[:1000], _VOCAB_SIZE)
    return [tokenizer.encode(text) for text in texts[:count]]


def lengths_of(mode: str, count: int, tokens: int) -> list[int]:
    """Return the length of each completion."""
    draw = random.Random(_SEED)
    return [tokens if mode == "equal" else draw.randint(tokens // 4, tokens) for _ in range(count)]


def of_engine(engine: RolloutEngine, prompts: list[list[int]], tokens: int) -> Complete:
    """Return a function that completes the prompts with an engine."""

    def complete(mode: str, number: int) -> list[int]:
        engine.sync()
        if mode == "equal":
            batch = generate(engine, prompts, Sampling(tokens), number)
            return (batch["input_lengths"] - batch["prompt_lengths"]).tolist()
        lengths = lengths_of(mode, len(prompts), tokens)
        requests = [
            replace(request, sampling=Sampling(length))
            for request, length in zip(make_requests(prompts, Sampling(tokens), number), lengths, strict=True)
        ]
        return [len(completion.ids) for completion in engine.complete(requests)]

    return complete


def of_transformers(policy: MegatronPolicy, prompts: list[list[int]], tokens: int) -> Complete:
    """Return a function that completes the prompts with `model.generate` of transformers."""
    from transformers import AutoConfig, AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

    policy.prepare_weights_for_ipc()
    settings: dict[str, Any] = dict(policy.weights.plan.hf_config)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(settings.pop("model_type"), **settings)).eval()
    model = model.to(policy.topology.device)
    tensors = checkpoint_tensors(model)
    with torch.no_grad():
        for name, tensor in policy.weights.stream():
            tensors[name].copy_(tensor)
    width = max(map(len, prompts))
    device = policy.topology.device
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)

    class Stop(StoppingCriteria):
        def __init__(self, lengths: list[int]):
            self.lengths, self.found = torch.tensor(lengths, device=device), [0] * len(lengths)

        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            done = input_ids.size(1) - width
            self.found = self.lengths.clamp(max=done).tolist()
            return done >= self.lengths  # pyright: ignore[reportReturnType]  # one answer for each sequence

    def complete(mode: str, number: int) -> list[int]:
        torch.manual_seed(number)
        stop = Stop(lengths_of(mode, len(prompts), tokens))
        with torch.no_grad():
            model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=tokens,
                do_sample=True,
                top_k=0,
                eos_token_id=None,
                pad_token_id=0,
                stopping_criteria=StoppingCriteriaList([stop]),
            )
        return stop.found

    return complete


def race(sides: dict[str, Complete], mode: str, expected: list[int], rounds: int) -> dict[str, float]:
    """Return the median tokens per second of each side, over alternating rounds after one that is not timed.

    Raises:
        RuntimeError: A side generated completions of other lengths.
    """
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, complete in sides.items():
            began = time.perf_counter()
            found = complete(mode, number)
            seconds[name].append(time.perf_counter() - began)
            if found != expected:
                raise RuntimeError(f"{name} generated completions of {sum(found)} tokens, not {sum(expected)}")
    return {name: sum(expected) / statistics.median(each[1:]) for name, each in seconds.items()}


def measure(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return the tokens per second of each side in each mode."""
    prompts = prompts_of(options.prompts, options.count)
    shape = [f"model.{key}={value}" for key, value in _SHAPE.items()]
    longest = max(map(len, prompts)) + options.tokens
    common = ["model=micro", *shape, f"model.max_sequence_length={longest}"]
    stages = {name: load_config([*common, f"generation.engine={name}"]).first for name in options.engines}
    first = next(iter(stages.values()))
    parallel: ParallelConfig = first.parallel
    policy = MegatronPolicy(
        first.model, topology.build(parallel, start_device(options.device), _SEED), vocab_size=_VOCAB_SIZE,
        precision="fp32", seed=_SEED, optimizer=None,
    )  # fmt: skip
    sides, engines = {_REFERENCE: of_transformers(policy, prompts, options.tokens)}, {}
    try:
        for name, stage in stages.items():
            engines[name] = build_engine(policy, stage, Path(tempfile.gettempdir()) / "rl_megatron_benchmark")
            sides[name] = of_engine(engines[name], prompts, options.tokens)
        figures = {}
        for mode in options.modes:
            figures[mode] = race(sides, mode, lengths_of(mode, len(prompts), options.tokens), options.rounds)
    finally:
        for engine in engines.values():
            engine.close()
        policy.shutdown()
    return figures


def report(figures: dict[str, dict[str, float]], options: argparse.Namespace) -> None:
    title = (
        f"{options.count} prompts, {options.tokens} tokens, {torch.get_num_threads()} threads, {options.rounds} rounds"
    )
    for mode, of_sides in figures.items():
        made = Table(title=f"{mode} lengths: {title}", title_justify="left")
        for name in ("", "tokens/s", f"/ {_REFERENCE}"):
            made.add_column(name, justify="right" if name else "left")
        for name, speed in of_sides.items():
            made.add_row(name, f"{speed:,.0f}", f"{speed / of_sides[_REFERENCE]:.2f}")
        Console().print(made)
    if options.output:
        settings = {key: str(value) for key, value in vars(options).items() if key != "output"}
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps({"settings": settings, "tokens_per_s": figures}, indent=2) + "\n")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--engines", nargs="+", default=["embedded"], help="values of generation.engine")
    made.add_argument("--modes", nargs="+", choices=_MODES, default=list(_MODES), help="lengths of completions")
    made.add_argument("--prompts", type=Path, metavar="DIR", help="GSM8K's directory; default: arithmetic problems")
    made.add_argument("--count", type=int, default=64, help="prompts")
    made.add_argument("--tokens", type=int, default=64, help="of a completion, at most")
    made.add_argument("--rounds", type=int, default=5, help="timed rounds of each side")
    made.add_argument("--threads", type=int, default=2, help="of torch on a CPU, in this process")
    made.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    made.add_argument("--output", type=Path, metavar="FILE", help="write the figures there, as JSON")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    # These warnings address the libraries' developers.
    warnings.filterwarnings("ignore", module="megatron.*|torch.distributed.*|transformers.*")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    torch.set_num_threads(options.threads)
    try:
        figures = measure(options)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 1
    report(figures, options)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
