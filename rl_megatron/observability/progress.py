"""Show the progress of a run: one line that changes on a terminal, and a new line from time to time elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from rl_megatron import log
from rl_megatron.config.metrics import choose_shown_name, is_eval_metric

_SHOWN = ("reward", "loss", "grad_norm", "lr")
_LINES_PER_STAGE = 20  # if the console is not a terminal
_SECONDS_PER_LINE = 60.0  # after this time, the next progress report prints a line
_REFRESHES_PER_SECOND = 4
_SECONDS_OF_AN_ACTIVITY = 0.5  # a shorter activity is not shown, because the line would flicker
_BAR = (6, 30)  # the smallest and the largest width of the bar
_ACTIVITY_WIDTH = 22  # kept free beside the bar: "generating 1000/1024"
_STAGE_WIDTH = 14  # a stage's name is not cut shorter than this to show the activity
_USUAL = ("train", "train_critic")  # phases that are shown only when they report a count
# How the display names the phases of the training loop (timing.py).
_ACTIVITIES = {
    "generate": "generating",
    "reward": "scoring",
    "refit": "syncing weights",
    "gate": "checking logprobs",
    "logprobs": "logprobs",
    "reference": "reference logprobs",
    "teacher": "teacher",
    "values": "values",
    "train": "training",
    "train_critic": "training critic",
    "evaluate": "evaluating",
    "save": "saving",
}


class ConsoleProgress:
    """The display of the stage that runs. On a terminal, it owns the line that changes."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic):
        """Initialise the display. `clock` returns seconds that never decrease."""
        self._console, self._clock = console, clock
        self._on_terminal = console.is_terminal and not console.is_dumb_terminal
        self._live: Live | None = None
        self._phase: str | None = None
        self._counts: tuple[str, ...] = ()

    def begin_stage(self, stage: str, start: int, steps: int, metric: str = "loss") -> None:
        """Start the display of a stage after `start` of its `steps` steps; `metric` is its main training metric."""
        self._stage, self._start, self._step, self._steps, self._metric = stage, start, start, steps, metric
        self._began = self._step_ended = self._line_shown = self._clock()
        self._metrics: dict[str, float] = {}
        self.show_phase(None)
        log.watch_progress(self._count)
        if self._on_terminal:
            self._live = Live(
                _Line(self),
                console=self._console,
                refresh_per_second=_REFRESHES_PER_SECOND,
                redirect_stderr=sys.stderr.isatty(),  # not if stderr goes to a file
            )
            self._live.start()

    def show_phase(self, phase: str | None) -> None:
        """Show the phase that the training loop is in."""
        self._phase, self._phase_began, self._counts = phase, self._clock(), ()

    def show(self, step: int, metrics: dict[str, float], kind: str) -> None:
        """Show the main metrics of a training step or an evaluation."""
        if kind == "eval":
            shown = [(name, value) for name, value in metrics.items() if is_eval_metric(name)]
            self._console.print(f"{self._stage} step {step}: held-out {_format_metrics(shown)}", highlight=False)
            return
        self._step, self._metrics, self._step_ended = step, metrics, self._clock()
        if self._live is None and (step % max(1, self._steps // _LINES_PER_STAGE) == 0 or self._is_time()):
            self._print_line(_format_metrics(_select(metrics, self._metric)))

    def end_stage(self) -> None:
        """End the display, and leave its last line on the terminal."""
        log.watch_progress(None)
        self.show_phase(None)
        if self._live is not None:
            self._live.stop()
            self._live = None

    def render_line(self, width: int, bar: str = "━─") -> Text:
        """Return the line for a terminal of `width` columns. The step, the times and the main metric are never cut.

        A long stage name is cut to show the activity, because the stage is known: only one runs at a time. `bar` has
        one character for steps that are done, and one for the others.
        """
        stage, step = self._stage, f"{self._step}/{self._steps}"
        elapsed, left = _format_time(self._clock() - self._began), self._estimate_time_left()
        after = [elapsed] + ([f"ETA {left}"] if self._step < self._steps else [])
        metrics = [_format_metric(*pair) for pair in _select(self._metrics, self._metric)]
        after += metrics[:1]
        beside = width - len(" ".join(["", step, *after]))
        if beside < _STAGE_WIDTH:
            stage = stage[: max(1, beside)]
        else:
            stage = stage[: max(_STAGE_WIDTH, beside - _ACTIVITY_WIDTH)]
        free = max(0, beside - len(stage))
        bar_width = min(free - 1 - _ACTIVITY_WIDTH, _BAR[1])
        if bar_width >= _BAR[0]:
            free -= bar_width + 1
        for metric in metrics[1:]:
            if len(metric) < free - _ACTIVITY_WIDTH:
                after.append(metric)
                free -= len(metric) + 1
        after += [text for text in self._describe_activity() if text and len(text) < free][:1]
        text = Text.assemble((stage, "bold"), f" {step} ", no_wrap=True, overflow="crop")
        if bar_width >= _BAR[0]:
            done = bar_width * self._step // max(1, self._steps)
            text.append(bar[0] * done, "green").append(bar[1] * (bar_width - done), "bright_black").append(" ")
        return text.append(" ".join(after))

    def _count(self, done: int, total: int, noun: str, detail: str) -> None:
        """Keep the progress that a call reports (`log.report_progress`), and print a line if one is due."""
        short = f" {done}/{total}"
        long = f"{short} {noun}"
        self._counts = (f"{long}, {detail}" if detail else long, long, short) if total > 1 else ()
        if self._live is None and self._is_time() and (activity := self._describe_activity()[0]):
            self._print_line(activity)

    def _describe_activity(self) -> tuple[str, ...]:
        """Return texts about the current activity, the longest first; only an empty text if it has just begun."""
        if self._phase is None or self._clock() - self._phase_began < _SECONDS_OF_AN_ACTIVITY:
            return ("",)
        name = _ACTIVITIES.get(self._phase, self._phase)
        return (*(f"{name}{count}" for count in self._counts), "" if self._phase in _USUAL else name)

    def _estimate_time_left(self) -> str:
        num_timed = self._step - self._start
        if num_timed == 0:
            return "-:--:--"
        step_seconds = (self._step_ended - self._began) / num_timed
        since = self._clock() - self._step_ended
        return _format_time(max(0.0, step_seconds * (self._steps - self._step) - since))

    def _is_time(self) -> bool:
        return self._clock() - self._line_shown >= _SECONDS_PER_LINE

    def _print_line(self, shown: str) -> None:
        self._line_shown = self._clock()
        times = f"{_format_time(self._clock() - self._began)}, ETA {self._estimate_time_left()}"
        self._console.print(f"{self._stage} step {self._step}/{self._steps}: {shown}  ({times})", highlight=False)


class _Line:
    """The line that `Live` draws, as wide as the terminal is at that moment."""

    def __init__(self, progress: ConsoleProgress):
        self._progress = progress

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self._progress.render_line(options.max_width, "=-" if options.ascii_only else "━─")


def _select(metrics: dict[str, float], first: str) -> list[tuple[str, float]]:
    """Return the metrics to show, starting with `first`."""
    names = dict.fromkeys((first, *_SHOWN))
    return [(name, metrics[name]) for name in names if name in metrics]


def _format_metrics(metrics: list[tuple[str, float]]) -> str:
    return "  ".join(_format_metric(name, value) for name, value in metrics)


def _format_metric(name: str, value: float) -> str:
    return f"{choose_shown_name(name, [value])} {value:z.4g}"


def _format_time(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"
