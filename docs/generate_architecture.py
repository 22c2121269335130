"""Write the parts of docs/architecture.md that follow from the code, and its two pictures:

    python docs/generate_architecture.py

The arrows between packages are imports. tests/test_architecture_page.py takes a training step, and compares the files
that it enters with those of the picture.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from tests.test_architecture import MODULES, PACKAGE, PACKAGES, module_graph, module_name, package_of  # noqa: E402

DOCS = REPOSITORY / "docs"
PAGE, PACKAGES_PICTURE, STEP_PICTURE = (DOCS / name for name in (
    "architecture.md", "images/packages.svg", "images/training_step.svg",
))  # fmt: skip

# Each package: the column of its box, what lives in it, and when to touch it.
DESCRIPTIONS = {
    "config": (0, "sections of the YAML, rules, loading", "you add a key"),
    "topology": (0, "device, process groups, ranks", "you add a kind of parallelism"),
    "workers": (1, "child processes, confinement", "a process must be safe"),
    "data": (0, "readers, templates, tasks, loaders", "you add a format"),
    "batching": (0, "Batch, packing, plan of a step", "you change who computes what"),
    "logprobs": (1, "kernels and their distributed forms", "you make a kernel faster"),
    "losses": (1, "formulas", "you add a loss"),
    "model": (0, "layers, heads, families, adapters", "you add a family"),
    "checkpoint": (0, "saving, loading, conversion", "you change files"),
    "weight_sync": (0, "weights on their way to engines", "an engine takes weights in a new way"),
    "policy": (1, "the interface of a policy", "users of a policy need a new method"),
    "training": (0, "MegatronPolicy, Trainer, schedules", "you change a step"),
    "generation": (0, "rollout engines", "you add an engine"),
    "rewards": (1, "reward functions, models, judges", "you add a reward"),
    "rollouts": (0, "trajectories, environments, tools", "you change how experience is made"),
    "observability": (1, "metrics, sinks, reports, liveness", "you want to see more"),
    "evaluation": (0, "eval sets, statistics, eval, generate", "you add an eval metric"),
    "algorithms": (0, "one loop per algorithm, advantages", "you add an algorithm"),
    "runs": (0, "stages, resuming, stopping, failures", "the life of a run changes"),
    "service": (2, "the training service for clients", "clients need a new verb"),
    "certify": (0, "compares a layout with one process", "you certify more"),
    "plan": (1, "predicts memory and time", "you predict more"),
    "doctor": (1, "examines an installation", "an installation can be wrong in a new way"),
    "compat": (2, "interfaces of other libraries", "they change theirs"),
    "cli": (0, "the command line", "you add a command"),
    "api": (0, "training functions for Python", "scripts need one"),
}


@dataclass(frozen=True)
class Box:
    """A file that a training step goes through.

    Attributes:
        file: The file, below the package.
        name: The function or class of the file that the step enters.
        does: What it does there.
    """

    file: str
    name: str
    does: str


# One training step, from a loop to a kernel, in the order of the calls.
STEP = (
    Box("algorithms/grpo.py", "grpo", "gets rollouts, adds logprobs and advantages"),
    Box("runs/stage.py", "Stage.train", "checks that ranks agree, and measures what the step costs"),
    Box("training/megatron_policy.py", "MegatronPolicy.train", "takes a Batch, or makes one of a dictionary"),
    Box("training/steps.py", "StepPlanner.plan_steps", "plans each step when it is taken, and counts denominators"),
    Box("training/trainer.py", "Trainer.step", "takes one optimizer step; its end is below"),
    Box("training/runner.py", "Runner.train_step", "runs megatron-core's pipeline schedule"),
    Box("training/model_input.py", "ModelInput.build", "makes this rank's tokens of every microbatch"),
    Box("losses/base.py", "LogprobLoss.read_output", "asks for logprobs of the model's output"),
    Box("logprobs/next_token.py", "next_token_stats", "shifts the labels, and gives each rank its own"),
    Box("logprobs/api.py", "vocab_parallel_logprobs", "checks shapes, and chooses the kernels"),
    Box(
        "logprobs/vocab_parallel.py",
        "VocabParallelStats.forward",
        "merges the shards: one collective over TP",
    ),
    Box("logprobs/kernels/torch.py", "row_stats", "reads the logits once (triton.py on GPUs)"),
    Box("topology/token_layout.py", "TokenLayout.gather", "puts logprobs of CP ranks together to whole sequences"),
    Box("losses/clipped_pg.py", "ClippedPGLossFn.evaluate", "computes the loss of whole sequences"),
    Box("training/metrics.py", "reduce_metrics", "adds up over ranks, and raises a loss that is not finite"),
    Box("training/trainer.py", "Trainer.update", "measures norms, clips, updates, advances the schedule"),
)
# What is done in the schedule, for each microbatch, and what is said of it.
OF_A_MICROBATCH = ("losses/base.py", "losses/clipped_pg.py")
OF_A_MICROBATCH_NOTE = (
    "For each microbatch, after",
    "the model's forward pass,",
    "on the last pipeline stage.",
    "With train.fused_head,",
    "linear.py instead of api.py.",
    "Then the backward pass.",
    "After the last microbatch,",
    "gradients are added up",
    "over ranks (optimizer.py).",
)


def package_graph() -> dict[str, set[str]]:
    """Return the packages that each package imports."""
    graph: dict[str, set[str]] = {package: set() for package in PACKAGES}
    for module, targets in file_graph().items():
        package = package_of(module)
        if package in graph:
            graph[package] |= {package_of(target) for target in targets} & graph.keys() - {package}
    return graph


def file_graph() -> dict[str, set[str]]:
    """Return the modules that each module imports."""
    return module_graph({module_name(path): (path.read_text(), path.name == "__init__.py") for path in MODULES})


def reached(graph: dict[str, set[str]], start: str) -> set[str]:
    """Return everything that `start` imports, directly or not."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        new = graph[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def needed_arrows(graph: dict[str, set[str]]) -> set[tuple[str, str]]:
    """Return (importing, imported) without arrows that follow from others."""
    return {
        (package, target)
        for package, targets in graph.items()
        for target in targets
        if not any(target in reached(graph, other) for other in targets - {target})
    }


def rows(graph: dict[str, set[str]]) -> dict[str, int]:
    """Return the row of each package: one below the lowest that it imports."""
    found: dict[str, int] = {}
    for package in PACKAGES:
        found[package] = 1 + max((found[target] for target in graph[package]), default=-1)
    return found


_STYLE = """\
  <style>
    text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; fill: #1f2328; }
    .name { font-size: 14px; font-weight: 600; }
    .note { font-size: 12px; fill: #424a53; }
    .box { fill: #ddf4ff; stroke: #54aeff; stroke-width: 1.5; }
    .arrow { fill: none; stroke: #57606a; stroke-width: 1.4; marker-end: url(#head); }
  </style>
  <defs>
    <marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto">
      <path d="M0 0 L10 5 L0 10 z" fill="#57606a"/>
    </marker>
  </defs>
"""


def _picture(title: str, width: int, height: int, parts: Iterator[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-labelledby="title">\n  <title id="title">{title}</title>\n{_STYLE}'
        f'  <rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="10" fill="#ffffff" stroke="#d0d7de"/>\n'
        + "".join(f"  {part}\n" for part in parts)
        + "</svg>\n"
    )


def _box(x: int, y: int, width: int, height: int, name: str, note: str) -> str:
    return (
        f'<rect class="box" x="{x}" y="{y}" width="{width}" height="{height}" rx="6"/>'
        f'<text class="name" x="{x + 10}" y="{y + 19}">{name}</text>'
        f'<text class="note" x="{x + 10}" y="{y + 36}">{note}</text>'
    )


_WIDTH, _HEIGHT, _COLUMN, _ROW = 244, 46, 262, 72  # of a box, and between boxes
_STEP = 62  # between the boxes of a training step


def packages_picture() -> str:
    """Return the picture of the packages as SVG. A package imports those above it that arrows lead to."""
    graph = package_graph()
    row = rows(graph)
    place = {package: (20 + _COLUMN * DESCRIPTIONS[package][0], 16 + _ROW * row[package]) for package in PACKAGES}

    def parts() -> Iterator[str]:
        for package, target in sorted(needed_arrows(graph)):
            (x, y), (to_x, to_y) = place[package], place[target]
            start, end, above = x + _WIDTH // 2, to_x + _WIDTH // 2, to_y + _HEIGHT
            if row[package] - row[target] > 1:  # between the columns, past the boxes of the rows between
                gap, above, end = max(x, to_x) - (_COLUMN - _WIDTH) // 2, above + 2, to_x + 30
                line = f"M{start} {y} L{gap} {y - 13} L{gap} {above + 13} L{end} {above}"
            else:
                line = f"M{start} {y} L{end} {above + 2}"
            yield f'<path class="arrow" d="{line}"/>'
        for package, (x, y) in place.items():
            yield _box(x, y, _WIDTH, _HEIGHT, package, DESCRIPTIONS[package][1])

    return _picture("The packages and their imports", 800, 24 + _ROW * (max(row.values()) + 1), parts())


def step_picture() -> str:
    """Return the picture of a training step as SVG, with the files in the order of their calls."""

    def parts() -> Iterator[str]:
        files = [box.file for box in STEP]
        first, last = (16 + _STEP * files.index(file) for file in OF_A_MICROBATCH)
        yield f'<path d="M550 {first} h10 V{last + _HEIGHT} h-10" fill="none" stroke="#57606a" stroke-width="1.4"/>'
        middle = (first + last + _HEIGHT - 18 * len(OF_A_MICROBATCH_NOTE)) // 2 + 14
        for number, line in enumerate(OF_A_MICROBATCH_NOTE):
            yield f'<text class="note" x="572" y="{middle + 18 * number}">{line}</text>'
        for number, box in enumerate(STEP):
            y = 16 + _STEP * number
            if number:
                yield f'<path class="arrow" d="M60 {y - 16} L60 {y - 2}"/>'
            yield _box(20, y, 520, _HEIGHT, f"{box.file}: {box.name}", box.does)

    return _picture("One training step, by file", 750, 16 + _STEP * len(STEP), parts())


def packages_table() -> str:
    """Return the table of packages, in the order of their imports."""
    lines = ["| package | what lives here | you touch it when |", "|---|---|---|"]
    lines += [f"| `{package}` | {DESCRIPTIONS[package][1]} | {DESCRIPTIONS[package][2]} |" for package in PACKAGES]
    return "\n".join(lines)


def _has_functions(path: Path) -> bool:
    return any(isinstance(node, ast.FunctionDef | ast.ClassDef) for node in ast.parse(path.read_text()).body)


def files_list() -> str:
    """Return every file with the first sentence of its docstring, by package."""
    lines = []
    for package in PACKAGES:
        lines += [f"### {package}", ""]
        for path in sorted((PACKAGE / package).rglob("*.py")):
            said = ast.get_docstring(ast.parse(path.read_text())) or ""
            paragraph = said.split("\n\n")[0].replace("\n", " ")
            sentence = re.split(r"(?<=\.)\s", paragraph, maxsplit=1)[0].rstrip(":")
            is_empty = path.name == "__init__.py" and not _has_functions(path)
            if sentence and not is_empty:
                name = path.relative_to(PACKAGE / package).as_posix()
                lines.append(f"- [{name}](../rl_megatron/{package}/{name}): {sentence}")
        lines.append("")
    return "\n".join(lines).rstrip()


def page(text: str) -> str:
    """Return the page with its generated parts renewed."""
    for name, content in (("packages", packages_table()), ("files", files_list())):
        begin, end = f"<!-- {name}: written by docs/generate_architecture.py -->", f"<!-- end of {name} -->"
        before, _, rest = text.partition(begin)
        _, found, after = rest.partition(end)
        if not found:
            raise ValueError(f"{PAGE} has no part from {begin} to {end}")
        text = f"{before}{begin}\n\n{content}\n\n{end}{after}"
    return text


def main() -> None:
    """Write the page and its pictures."""
    PAGE.write_text(page(PAGE.read_text()))
    PACKAGES_PICTURE.write_text(packages_picture())
    STEP_PICTURE.write_text(step_picture())


if __name__ == "__main__":
    main()
