"""Runs every layout of tests/parallel/grid.py against one process and writes docs/layouts.md.

    python docs/generate_layouts.py            # all layouts on up to eight gloo ranks, then the page
    python docs/generate_layouts.py cp4 moe    # only layouts whose names have one of these words; writes nothing

The exit status is 1, and the page stays as it is, where a layout does not hold.
"""

from __future__ import annotations

import platform
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from importlib.metadata import version  # noqa: E402

from rich.progress import track  # noqa: E402

from rl_megatron.certify.measurement import (  # noqa: E402
    GRADIENT_TOLERANCE,
    LOSS_TOLERANCE,
    METRIC_TOLERANCE,
    STREAM_TOLERANCE,
)
from rl_megatron.certify.workload import NUM_ROWS, STANDARD_OBJECTIVES, WIDTH  # noqa: E402
from tests.parallel.grid import VALUES, Grid, Result, possible_pairs, whole_grid  # noqa: E402
from tests.worker_pool import WorkerPool  # noqa: E402

PAGE = REPOSITORY / "docs" / "layouts.md"
_QUANTITIES = ("loss", "logprobs", "gradient", "weights after a step", "metrics")

_HEAD = """\
# Every layout gives the same gradient

Written by `python docs/generate_layouts.py`, which measures each row below: the layout on that many ranks (CPU, gloo)
against one process with all rows in one padded microbatch, from the same weights, in fp32.

A layout is one value of each of {num_factors} factors: tensor (tp), sequence (sp), pipeline (pp), interleaved (vpp),
context (cp), expert (moe-ep) and data parallelism (dp); how rows form microbatches and how many (packed, padded,
dynamic; the number is rows, or as many tokens as so many of the longest rows have); tied or untied embeddings;
recomputation of activations; uneven pipeline stages; a sliding attention window; the distributed optimizer (distopt).
Every pair of values of two factors that eight ranks allow, {num_pairs} in all, is in a row at least once.

Each layout runs {objectives} on {num_rows} rows of 1 to {width}
tokens: unequal lengths, a sequence of one token and one of two, a wholly masked row, rows without weight, and NaN
wherever nothing may be read. The columns are the largest errors over these losses: of the loss, relative (at most
{loss:.0e}); of a token's logprob or value (at most {stream:.0e}); of a parameter's gradient, and of its value after an
optimizer step, relative to the parameter's largest entry (at most {gradient:.0e}); of a metric (at most {metric:.0e}).

Your own layout, on a small model of your model's family:

```bash
torchrun --nproc-per-node 8 -m rl_megatron certify parallel.tensor=2 parallel.context=2 parallel.pipeline=2
```

| layout | ranks | loss | logprobs | gradient | step | metrics | seconds |
|---|---|---|---|---|---|---|---|
"""


def page(results: list[Result]) -> str:
    names = list(STANDARD_OBJECTIVES)
    head = _HEAD.format(
        num_factors=len(VALUES), num_pairs=len(possible_pairs()), num_rows=NUM_ROWS, width=WIDTH,
        objectives=", ".join(f"`{name}`" for name in names[:-1]) + f" and `{names[-1]}`",
        loss=LOSS_TOLERANCE, stream=STREAM_TOLERANCE, gradient=GRADIENT_TOLERANCE, metric=METRIC_TOLERANCE,
    )  # fmt: skip
    rows = [
        f"| {result.layout.name} | {result.layout.factors.ranks} | "
        + " | ".join(f"{result.worst(quantity):.1e}" for quantity in _QUANTITIES)
        + f" | {result.seconds:.0f} |"
        for result in results
    ]
    versions = f"Python {platform.python_version()}, torch {version('torch')}, megatron-core {version('megatron-core')}"
    total = sum(result.seconds for result in results)
    return head + "\n".join(rows) + f"\n\n{len(results)} layouts in {total:.0f} s on two cores: {versions}.\n"


def main(words: list[str]) -> int:
    layouts = [layout for layout in whole_grid() if not words or any(word in layout.name for word in words)]
    ranks = WorkerPool()
    grid, results = Grid(ranks), []
    try:
        for layout in track(layouts, "layouts"):
            results.append(grid.run(layout))
            print(
                f"{layout.name}: {'; '.join(results[-1].failures) or 'holds'} ({results[-1].seconds:.0f} s)", flush=True
            )
    finally:
        ranks.close()
    if any(result.failures for result in results):
        return 1
    if not words:
        PAGE.write_text(page(results))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
