"""Warnings of a loss spike, a reward collapse, or rewards that are all equal, with the sequences of the step.

They only inform: training continues. Medians include only steps since the process started, also in a resumed run.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from rl_megatron.batching.batch import Batch
from rl_megatron.config.train import TrainConfig
from rl_megatron.data.tokenizer import Tokenizer

_NORMAL = 1.4826  # a normal distribution's standard deviation in median absolute deviations
_FEWEST_STEPS = 20  # earlier steps that a comparison with their median needs; fewer if the window is shorter
_SMALLEST_DEVIATION = 0.05  # of the loss, as a share of max(|median|, 1): smaller changes are usual
_NEWEST_STEPS = 5  # steps whose median reward is compared with that of the steps before
_REWARD_DEVIATIONS = 3.0  # that a collapse must also exceed, so that a noisy reward near 0 does not count
_SHOWN_SEQUENCES, _SHOWN_CHARACTERS = 6, 60


def deviation(values: Sequence[float]) -> float:
    """Return the median absolute deviation of values, scaled to equal a normal distribution's standard deviation."""
    median = statistics.median(values)
    return _NORMAL * statistics.median([abs(value - median) for value in values])


class Anomalies:
    """The anomalies of a stage's steps. It owns the last losses and rewards, and the last step with each warning."""

    def __init__(self, train: TrainConfig):
        """Start without any step; `train` has the thresholds."""
        self._train = train
        self._losses: deque[float] = deque(maxlen=train.anomaly_window or 1)
        self._rewards: deque[float] = deque(maxlen=(train.anomaly_window or 1) + _NEWEST_STEPS)
        self._equal_rewards = 0
        self._warned_at: dict[str, int] = {}

    def check_step(self, step: int, metrics: Mapping[str, float], rewards: Tensor | None = None) -> list[str]:
        """Describe what is unusual about a step. Each kind is reported at most once in a window of steps.

        `rewards` are those of the step's samples, if it has samples.
        """
        if self._train.anomaly_window == 0:
            return []
        anomalies = {
            "loss spike": self._loss_spike(metrics.get("loss")),
            "reward collapse": self._reward_collapse(metrics.get("reward")),
            "equal rewards": self._all_equal(rewards),
        }
        return [what for kind, what in anomalies.items() if what is not None and self._is_due(kind, step)]

    def _is_due(self, kind: str, step: int) -> bool:
        if kind in self._warned_at and step < self._warned_at[kind] + self._train.anomaly_window:
            return False
        self._warned_at[kind] = step
        return True

    def _fewest(self) -> int:
        return min(_FEWEST_STEPS, self._train.anomaly_window)

    def _loss_spike(self, loss: float | None) -> str | None:
        if loss is None:
            return None
        earlier = list(self._losses)
        self._losses.append(loss)
        if len(earlier) < self._fewest():
            return None
        median = statistics.median(earlier)
        spread = max(deviation(earlier), _SMALLEST_DEVIATION * max(abs(median), 1.0))
        if loss <= median + self._train.loss_spike_deviations * spread:
            return None
        return f"the loss {loss:.4g} is a spike: the median of the {len(earlier)} steps before is {median:.4g}"

    def _reward_collapse(self, reward: float | None) -> str | None:
        if reward is None:
            return None
        self._rewards.append(reward)
        earlier, newest = list(self._rewards)[:-_NEWEST_STEPS], list(self._rewards)[-_NEWEST_STEPS:]
        if len(earlier) < self._fewest():
            return None
        median, now = statistics.median(earlier), statistics.median(newest)
        lowest = median - (1.0 - self._train.reward_collapse_fraction) * abs(median)
        if now >= min(lowest, median - _REWARD_DEVIATIONS * deviation(earlier)):
            return None
        return (
            f"the reward has collapsed: the median of the last {len(newest)} steps is {now:.4g}, and that of the "
            f"{len(earlier)} steps before is {median:.4g}"
        )

    def _all_equal(self, rewards: Tensor | None) -> str | None:
        if rewards is None or rewards.numel() < 2 or bool(rewards.min() < rewards.max()):
            self._equal_rewards = 0
            return None
        self._equal_rewards += 1
        if self._equal_rewards < self._train.equal_rewards_steps:
            return None
        return (
            f"all rewards are {rewards[0].item():.4g} in {self._equal_rewards} steps in a row, so the policy learns "
            "nothing from them"
        )


def describe_sequences(batch: Batch, tokenizer: Tokenizer, locations: Callable[[], Sequence[str]]) -> str:
    """Describe the first sequences of a batch: their numbers in it, their locations in the data, and their first words.

    For rollouts, each prompt is shown once, with the number of its first sample. `locations` returns the location of
    each item of the batch in the data, as file:line, or an empty list.
    """
    ends = batch["prompt_lengths"] if "prompt_lengths" in batch else batch["input_lengths"]
    begins: dict[tuple[int, ...], int] = {}
    columns = (values.tolist() for values in (batch.numbers, batch["input_ids"], ends))
    for index, ids, end in zip(*columns, strict=True):
        begins.setdefault(tuple(ids[:end]), index)
    places = [] if "prompt_lengths" in batch else list(locations())
    shown = []
    for ids, index in list(begins.items())[:_SHOWN_SEQUENCES]:
        text = " ".join(tokenizer.decode(list(ids)).split())
        cut = text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 1]}…"
        item = index * len(places) // batch.size  # a preference pair is one item
        where = f" ({places[item]})" if places and places[item] else ""
        shown.append(f"{index}{where}: {cut!r}")
    more = len(begins) - len(shown)
    noun = "samples of prompts" if "prompt_lengths" in batch else "sequences"
    return f"{noun} {', '.join(shown)}" + (f" and {more} more" if more else "")
