"""Run every layout of tests/parallel/grid.py against one process and write docs/layouts.md.

    python docs/generate_layouts.py            # all layouts on up to eight gloo ranks, then the page
    python docs/generate_layouts.py cp4 moe    # only layouts whose names have one of these words; writes nothing

If a layout does not hold, the exit status is 1 and the page stays as it is.
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
from rl_megatron.certify.workload import NUM_SEQUENCES, STANDARD_OBJECTIVES, WIDTH  # noqa: E402
from tests.parallel.grid import VALUES, Grid, Result, possible_pairs, whole_grid  # noqa: E402
from tests.worker_pool import WorkerPool  # noqa: E402

PAGE = REPOSITORY / "docs" / "layouts.md"
_QUANTITIES = ("loss", "logprobs", "gradient", "weights after a step", "metrics")

_HEAD = """\
# Every layout gives the same gradient

`python docs/generate_layouts.py` writes this page. On CPU ranks with gloo, it compares each layout in fp32 with one
process that has all sequences in one padded microbatch. Each line of the table is one layout with further settings. It
combines values of {num_factors} factors:

- the layout: tensor (tp), sequence (sp), pipeline (pp), interleaved pipeline (vpp), context (cp), expert (moe-ep),
  expert tensor (etp) and data parallelism (dp);
- how sequences form microbatches (packed, padded, dynamic), and a microbatch's size n: n sequences, or as many tokens
  as n sequences of maximum length have;
- tied or untied embeddings, recomputation of activations, uneven pipeline stages, and a sliding attention window;
- the distributed optimizer (distopt), communication that overlaps with computation (overlap), the fused head (fused),
  and whether sequences share the computation of their common beginnings (shared).

Each of the {num_pairs} pairs of two factors' values that eight ranks allow occurs in at least one line. Each line runs
{objectives} on {num_rows} sequences of 1 to {width} tokens, as [`certify`](certify.md) does for your own layout. The
columns show the largest errors over these losses: of the loss (relative,
at most {loss:.0e}), of a token's logprob or value
(absolute, at most {stream:.0e}), of a parameter's gradient and of a parameter after an optimizer step (relative to its
largest entry, at most {gradient:.0e}), and of a metric (at most {metric:.0e}).

| layout | ranks | loss | logprobs | gradient | step | metrics | seconds |
|---|---|---|---|---|---|---|---|
"""


def page(results: list[Result]) -> str:
    """Return docs/layouts.md."""
    names = list(STANDARD_OBJECTIVES)
    head = _HEAD.format(
        num_factors=len(VALUES), num_pairs=len(possible_pairs()), num_rows=NUM_SEQUENCES, width=WIDTH,
        objectives=", ".join(f"`{name}`" for name in names[:-1]) + f" and `{names[-1]}`",
        loss=LOSS_TOLERANCE, stream=STREAM_TOLERANCE, gradient=GRADIENT_TOLERANCE, metric=METRIC_TOLERANCE,
    )  # fmt: skip
    lines = [
        f"| {result.layout.name} | {result.layout.factors.ranks} | "
        + " | ".join(f"{result.worst(quantity):.1e}" for quantity in _QUANTITIES)
        + f" | {result.seconds:.0f} |"
        for result in results
    ]
    versions = f"Python {platform.python_version()}, torch {version('torch')}, megatron-core {version('megatron-core')}"
    total = sum(result.seconds for result in results)
    return head + "\n".join(lines) + f"\n\n{len(results)} layouts in {total:.0f} s on two cores: {versions}.\n"


def main(words: list[str]) -> int:
    """Run the layouts whose names contain one of the words, or all, and return the exit status."""
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
