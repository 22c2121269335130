"""Count the tokens that an evaluation draws differently in other layouts, and list how near another token was.

    python benchmarks/eval_layouts.py outputs/quickstart/checkpoints/grpo/step-000300 --problems 500 --samples 8

`rl-megatron eval` runs on one process, with tensor parallelism and with data parallelism. A
random number u chooses the token in whose part of the cumulated probabilities it lies. Logits of two layouts differ by
rounding, so a different token is drawn where u lies next to the end of such a part. The result lists every completion
that differs, with the distance of u from that end where it first differs. Larger distances than 1e-5 are errors.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

NEAR = 1e-5
LAYOUTS = {"one process": (), "tensor 2": ("parallel.tensor=2",), "data 2": ("generation.batch_size=7",)}
_RECORD = "RL_MEGATRON_RECORDED_TOKENS"  # the file that a process of `rl-megatron eval` writes its tokens to


def record_tokens(path: Path) -> None:
    """Let this process record the tokens of an evaluation, and the distance of every random number from a boundary."""
    from rl_megatron.generation import embedded
    from rl_megatron.rollouts.scored import ScoredRollouts

    make, sample = ScoredRollouts.make, embedded.sample
    completions: list[list[int]] = []
    distances: dict[float, float] = {}

    def recorded(rollouts: ScoredRollouts, *arguments: Any) -> Any:
        scored = make(rollouts, *arguments)
        if scored is not None:  # on rank 0
            completions.extend(list(sample.completion_ids) for sample in scored.samples)
            path.write_text(json.dumps({"completions": completions, "distances": list(distances.items())}))
        return scored

    def measured(logits: Any, uniforms: Any, sampling: Any, group: Any, vocab_size: int) -> Any:
        ids, logprobs = sample(logits, uniforms, sampling, group, vocab_size)
        if group is None or group.size() == 1:
            ends = (logits[:, :vocab_size].double() / sampling.temperature).softmax(-1).cumsum(-1)
            nearest = (ends - uniforms.double()[:, None]).abs().amin(-1)
            distances.update(zip(uniforms.tolist(), nearest.tolist(), strict=True))
        return ids, logprobs

    ScoredRollouts.make, embedded.sample = recorded, measured  # type: ignore[assignment]


def evaluate(checkpoint: Path, layout: tuple[str, ...], arguments: argparse.Namespace, place: Path) -> dict[str, Any]:
    """Run the evaluation, and return the tokens of every completion, and distances by random number."""
    sets = (
        f"eval.sets=[{{name: sums, task: arithmetic, num_problems: {arguments.problems}, n: {arguments.samples}, "
        f"temperature: 1.0, max_new_tokens: {arguments.tokens}}}]"
    )
    command = ["eval", str(checkpoint), sets, "--output", str(place / "results"), *layout]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={2 if layout else 1}"]
    environment = os.environ | {_RECORD: str(place / "tokens.json")}
    subprocess.run([*launch, __file__, *command], check=True, env=environment)
    return json.loads((place / "tokens.json").read_text())


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[tuple[int, int, float]]:
    """Return (completion, token, distance) of the first difference of every completion that differs."""
    from rl_megatron.evaluation.sets import SEED
    from rl_megatron.generation.completions_file import COMPLETIONS_PER_BLOCK
    from rl_megatron.generation.interfaces import Sampling
    from rl_megatron.generation.requests import derive_seed, draw_uniforms, make_requests

    distances, found = dict(map(tuple, one["distances"])), []
    for number, (mine, theirs) in enumerate(zip(one["completions"], other["completions"], strict=True)):
        if mine != theirs:
            token = next(at for at in range(len(mine)) if mine[: at + 1] != theirs[: at + 1])
            block, place = divmod(number, COMPLETIONS_PER_BLOCK)
            request = make_requests([()] * (place + 1), Sampling(1), derive_seed(SEED, block))[place]
            uniform = draw_uniforms([request], token + 1)[0, token].item()
            found.append((number, token, distances[uniform]))
    return found


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("checkpoint", type=Path)
    made.add_argument("--problems", type=int, default=500)
    made.add_argument("--samples", type=int, default=8)
    made.add_argument("--tokens", type=int, default=12, help="the most tokens of a completion")
    return made


def main(words: list[str]) -> int:
    """Run all layouts, print the differences, and return 1 if one is an error."""
    arguments = parser().parse_args(words)
    recorded = {}
    for name, layout in LAYOUTS.items():
        with tempfile.TemporaryDirectory() as place:
            recorded[name] = evaluate(arguments.checkpoint.resolve(), layout, arguments, Path(place))
    first, status = recorded["one process"], 0
    tokens = sum(map(len, first["completions"]))
    near = sum(distance <= NEAR for _, distance in first["distances"])
    print(f"{len(first['completions'])} completions of {tokens} tokens, {near} of them within {NEAR:g} of a boundary")
    for name in list(LAYOUTS)[1:]:
        found = differences(first, recorded[name])
        print(f"{name}: {len(found)} completions differ")
        for number, token, distance in found:
            print(f"  completion {number}, token {token}: {distance:.2g}")
            status |= distance > NEAR
    return int(status)


if __name__ == "__main__":
    if _RECORD in os.environ:
        from rl_megatron.cli import main as rl_megatron

        record_tokens(Path(os.environ[_RECORD]))
        sys.exit(rl_megatron(sys.argv[1:]))
    sys.exit(main(sys.argv[1:]))
