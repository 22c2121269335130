"""Race a whole step of GRPO against TRL's GRPOTrainer:

    python benchmarks/grpo_step.py path/to/gsm8k

Both start from the same weights of a random Llama in fp32, sample as many completions of the same prompts of GSM8K, all
of the same length, score them with the same function, and take one optimizer step. The sides run in processes of their
own and take turns, one step each, with the same number of torch's threads. TRL has its defaults, except that it
computes in fp32 and does not recompute activations. We have a row for every combination of `train.batching` (packed,
padded) and `algorithm.recompute_logprobs` (auto, always), and one with `train.share_prefixes=auto`. `--prompt-tokens`
makes prompts longer, of several questions each.

The phases add up to the step: "other" is the time that no other phase has. On a machine with other work,
--processor-time says more than wall-clock time. Our phase "generate" includes the logprob check
(`generation.gate_prompts`), which TRL does not have.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks import grpo_sides  # noqa: E402
from benchmarks.grpo_sides import PHASES, REWARD, Step, Work  # noqa: E402
from rl_megatron.data.tokenizer import Tokenizer  # noqa: E402

TRL = "TRL GRPOTrainer"
_TEMPLATE_TOKENS = 64  # more than the prompt template adds
_BATCHING = {"packed": ["train.micro_batch_tokens=4096"], "padded": ["train.micro_batch_size=16"]}


def cases() -> dict[str, list[str]]:
    """Return our settings by the name of their row."""
    found = {
        f"{batching}, recompute_logprobs={recompute}": [
            f"train.batching={batching}", *_BATCHING[batching], f"algorithm.recompute_logprobs={recompute}"
        ]
        for batching, recompute in product(_BATCHING, ("auto", "always"))
    }  # fmt: skip
    shared = {
        "packed, share_prefixes=auto": ["train.batching=packed", *_BATCHING["packed"], "train.share_prefixes=auto"]
    }
    return found | shared


def prepare(options: argparse.Namespace, directory: Path) -> Work:
    """Write the model, its checkpoint and the reward to `directory`, and return what both sides do."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from rl_megatron.checkpoint.hf_convert import import_weights
    from rl_megatron.config.loading.load import load_config
    from rl_megatron.data.run_tokenizer import build_tokenizer
    from rl_megatron.data.training_data import RolloutPrompts

    problems = f"data.path={options.gsm8k}"
    steps = options.warmup + options.steps
    sft = load_config(["algorithm=sft", "data=gsm8k", problems, f"tokenizer.vocab_size={options.vocab_size}"])
    tokenizer = build_tokenizer(sft.first)
    tokenizer.save(directory / "model")
    if options.prompt_tokens:
        write_longer_problems(Path(options.gsm8k), directory / "problems", tokenizer, options.prompt_tokens)
        problems = f"data.path={directory / 'problems'}"
    longest = max(512, options.prompt_tokens + options.new_tokens + _TEMPLATE_TOKENS)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=tokenizer.vocab_size, hidden_size=options.hidden, intermediate_size=4 * options.hidden,
            num_hidden_layers=options.layers, num_attention_heads=4, num_key_value_heads=4,
            max_position_embeddings=longest, tie_word_embeddings=False, eos_token_id=tokenizer.eos_id,
            pad_token_id=tokenizer.pad_id, bos_token_id=None,
        )
    ).save_pretrained(directory / "model")  # fmt: skip
    import_weights(directory / "model", directory / "checkpoint")
    (directory / "reward.py").write_text(REWARD)
    overrides = (
        "algorithm=grpo", "data.source=task", "data.task.name=gsm8k", problems, "model=init_from", "device=cpu",
        f"init_from={directory / 'checkpoint'}", f"reward.functions=[{{name: {directory}/reward.py:digits}}]",
        "reward.num_workers=1", f"algorithm.prompts_per_step={options.prompts}",
        f"algorithm.samples_per_prompt={options.samples}",
        f"train.global_batch_size={options.prompts * options.samples}",
        f"train.steps={steps}", f"generation.max_new_tokens={options.new_tokens}", "optimizer.lr=1e-6",
        "optimizer.decay_style=constant", "loss.reference_policy_kl_penalty=0", "data.num_eval_examples=8",
    )  # fmt: skip
    stage = load_config([*overrides]).first
    drawn = RolloutPrompts(stage, stage.algorithm, tokenizer)  # pyright: ignore[reportArgumentType] grpo's settings
    prompts = tuple(prompt.problem.prompt for step in range(1, steps + 1) for prompt in drawn.at(step))
    return Work(
        directory, overrides, prompts, options.prompts, options.samples, options.new_tokens, steps, options.threads,
        options.processor_time,
    )  # fmt: skip


def write_longer_problems(source: Path, target: Path, tokenizer: Tokenizer, tokens: int) -> None:
    """Write the problems of GSM8K to `target`, each with the words of several questions, up to so many tokens."""
    target.mkdir()
    for name in ("train.jsonl", "test.jsonl"):
        records = [json.loads(line) for line in (source / name).read_text().splitlines()]
        with (target / name).open("w") as file:
            for first, record in enumerate(records):
                following = (records[(first + later) % len(records)]["question"] for later in range(tokens))
                words = chain.from_iterable(question.split() for question in following)
                question, count = [], 0
                for word in words:
                    count += len(tokenizer.encode(f" {word}"))
                    if count > tokens:
                        break
                    question.append(word)
                file.write(json.dumps(record | {"question": " ".join(question)}) + "\n")


def _answer(name: str, connection: Connection) -> Any:
    try:
        return connection.recv()
    except EOFError:
        raise SystemExit(f"{name} failed; its error is above") from None


def race(work: Work, ours: dict[str, list[str]]) -> dict[str, list[Step]]:
    """Return the steps of every side. In each round every side takes one, beginning with another side each time."""
    context = multiprocessing.get_context("spawn")
    sides = {name: (grpo_sides.ours, (settings,)) for name, settings in ours.items()} | {TRL: (grpo_sides.trl, ())}
    connections, processes = {}, []
    taken: dict[str, list[Step]] = {name: [] for name in sides}
    names = list(sides)
    try:
        for name, (function, arguments) in sides.items():
            here, there = context.Pipe()
            process = context.Process(target=function, args=(there, work, *arguments), daemon=False)
            process.start()
            there.close()
            connections[name], processes = here, [*processes, process]
            _answer(name, here)
        for round_ in range(work.steps):
            for name in names[round_ % len(names) :] + names[: round_ % len(names)]:
                connections[name].send("go")
                taken[name].append(_answer(name, connections[name]))
    finally:
        for connection in connections.values():
            connection.close()
        for process in processes:
            process.join(30)
            if process.is_alive():
                process.terminate()
    return taken


@dataclass(frozen=True)
class Row:
    """The median step of one side and its phases, in seconds."""

    name: str
    step: float
    phases: dict[str, float]
    ratio: float


def medians(taken: dict[str, list[Step]], warmup: int) -> list[Row]:
    """Return a row for each side."""
    by_time = {name: sorted(steps[warmup:], key=lambda step: step.seconds) for name, steps in taken.items()}
    median = {name: steps[(len(steps) - 1) // 2] for name, steps in by_time.items()}
    return [Row(name, step.seconds, step.phases, step.seconds / median[TRL].seconds) for name, step in median.items()]


def different_work(taken: dict[str, list[Step]]) -> str | None:
    """Return where two sides did not have as many tokens in a step, or None."""
    tokens = {name: [(step.prompt_tokens, step.completion_tokens) for step in steps] for name, steps in taken.items()}
    different = [name for name, counts in tokens.items() if counts != tokens[TRL]]
    return f"{different[0]} had {tokens[different[0]]}, {TRL} {tokens[TRL]}" if different else None


def report(rows: Sequence[Row], options: argparse.Namespace) -> None:
    """Print the table and, if a file is named, write the figures there."""
    from rich.console import Console
    from rich.table import Table

    work = f"{options.prompts} prompts x {options.samples} completions x {options.new_tokens} tokens"
    unit = "ms of processor time" if options.processor_time else "ms"
    table = Table(title=f"a step of GRPO in {unit}: {work}, {options.threads} threads", title_justify="left")
    for name in ("", "step", "/ TRL", *PHASES):
        table.add_column(name, justify="right" if name else "left")
    for row in rows:
        phases = (f"{1000 * seconds:.0f}" for seconds in row.phases.values())
        table.add_row(row.name, f"{1000 * row.step:.0f}", f"{row.ratio:.2f}", *phases)
    Console(width=120).print(table)
    if options.output:
        content: dict[str, Any] = {"settings": {k: v for k, v in vars(options).items() if k != "output"}}
        content["rows"] = {row.name: {"step": row.step, "ratio": row.ratio, "phases": row.phases} for row in rows}
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(content, indent=2) + "\n")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("gsm8k", help="a directory with train.jsonl and test.jsonl of GSM8K")
    made.add_argument("--layers", type=int, default=4)
    made.add_argument("--hidden", type=int, default=256)
    made.add_argument("--vocab-size", type=int, default=4096)
    made.add_argument("--prompts", type=int, default=8, help="of a step")
    made.add_argument("--samples", type=int, default=8, help="completions of a prompt")
    made.add_argument("--prompt-tokens", type=int, default=0, help="about; 0: single questions of GSM8K")
    made.add_argument("--new-tokens", type=int, default=64, help="of a completion")
    made.add_argument("--threads", type=int, default=2, help="of torch, on each side")
    made.add_argument("--warmup", type=int, default=2, help="steps before those that are timed")
    made.add_argument("--steps", type=int, default=7, help="timed steps")
    made.add_argument("--processor-time", action="store_true", help="of each side, instead of wall-clock time")
    made.add_argument("--case", help="only our rows whose name contains this text")
    made.add_argument("--output", type=Path, metavar="FILE", help="write the figures there, as JSON")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    options.gsm8k = str(Path(options.gsm8k).resolve())
    os.environ |= {"OMP_NUM_THREADS": str(options.threads), "TOKENIZERS_PARALLELISM": "false"}
    chosen = {name: settings for name, settings in cases().items() if (options.case or "") in name}
    with tempfile.TemporaryDirectory() as directory:
        taken = race(prepare(options, Path(directory)), chosen)
    report(medians(taken, options.warmup), options)
    if difference := different_work(taken):
        print(f"the sides do not do the same work: {difference}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
