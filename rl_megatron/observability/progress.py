"""Show the progress of a run on the console."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from rl_megatron.observability.report import HELDOUT

_SHOWN = ("loss", "reward", *HELDOUT, "grad_norm", "lr")
_LINES_PER_STAGE = 20  # of plain progress, if the console is not a terminal


class ConsoleProgress:
    """The display of the stage that runs: a progress bar on a terminal, a few lines elsewhere. It owns the bar."""

    def __init__(self, console: Console):
        self._console = console
        self._progress: Progress | None = None

    def begin_stage(self, stage: str, start: int, steps: int) -> None:
        """Start the display of a stage of `steps` steps, of which `start` are done."""
        self._stage, self._steps = stage, steps
        if self._console.is_terminal:
            self._progress = Progress(
                TextColumn("[bold]{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[shown]}"),
                console=self._console,
            )
            self._bar = self._progress.add_task(stage, total=steps, completed=start, shown="")
            self._progress.start()

    def show(self, step: int, metrics: dict[str, float], kind: str) -> None:
        """Show the main metrics of a training step or an evaluation."""
        shown = "  ".join(f"{name} {metrics[name]:.4g}" for name in _SHOWN if name in metrics)
        if kind == "eval":
            self._console.print(f"{self._stage} step {step}: held-out {shown}", highlight=False)
        elif self._progress is not None:
            self._progress.update(self._bar, completed=step, shown=shown)
        elif step % max(1, self._steps // _LINES_PER_STAGE) == 0:
            self._console.print(f"{self._stage} step {step}/{self._steps}: {shown}", highlight=False)

    def end_stage(self) -> None:
        """Remove the bar, if there is one."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
