"""Rows of the embedding and the head that belong to no token of the tokenizer, and the probability that they get.

Training leaves these rows out of every softmax. transformers and inference servers include them, and so give every
token a little less probability. The difference is measured, because it cannot be derived from the weights alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import psutil
import torch

from rl_megatron.checkpoint.hf_weights import HuggingFaceWeights, open_hugging_face
from rl_megatron.data.tokenizer import Tokenizer

_TEXT = (
    "The river rises in the hills north of the town, and reaches the sea after 214 kilometres. In spring it carries "
    "the melted snow of three valleys; in late summer a child can wade through it. Why does its level fall so slowly?"
)
_MOST_TOKENS = 64  # how many tokens of the text the model reads
MOST_PARAMETERS = 2_000_000_000  # a larger model is not measured
_SHARE_OF_MEMORY = 0.8  # the share of available memory that the weights may use
_BYTES = torch.float32.itemsize
# The files that hold the memory limit of a container, in versions 2 and 1 of control groups.
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


@dataclass(frozen=True)
class UnusedRows:
    """The rows of a model's embedding that belong to no token.

    Attributes:
        count: Their number. It is at least 1.
        rows: The number of all rows.
        probabilities: Their total probability after each token of a text, or None if it was not measured.
        reason: Why the probability was not measured.
    """

    count: int
    rows: int
    probabilities: tuple[float, ...] | None = None
    reason: str = ""

    def __str__(self) -> str:
        """Return a line for the user."""
        first = f"{self.count} of the {self.rows} rows of the embedding have no token"
        last = "training leaves them out of every softmax, but transformers and inference servers do not"
        if self.probabilities is None:
            return f"{first}; their probability was not measured, because {self.reason}; {last}"
        mean, largest = sum(self.probabilities) / len(self.probabilities), max(self.probabilities)
        spread = f"mean of {len(self.probabilities)} positions of a text, at most {largest:.3g}"
        return f"{first}; together they have probability {mean:.3g} ({spread}); {last}"


def find_unused_rows(directory: Path, runs_model: bool = True) -> UnusedRows | None:
    """Return the rows without a token in a language model's Hugging Face directory, or None if it has no such rows.

    If the directory has no tokenizer, every row counts as a token's. If `runs_model`, the rows' probability is measured
    by a forward pass of transformers on the CPU.
    """
    weights = open_hugging_face(directory)
    count = weights.rows - weights.vocab_size
    if weights.tokenizer is None or count == 0:
        return None
    reason = _find_obstacle(weights) if runs_model else "only rl-megatron convert measures it"
    if reason is not None:
        return UnusedRows(count, weights.rows, reason=reason)
    try:
        limit = min(_MOST_TOKENS, weights.model.max_sequence_length)
        ids = example_tokens(weights.tokenizer, limit)
        return UnusedRows(count, weights.rows, _compute_probabilities(directory, ids, weights.vocab_size))
    except (OSError, ValueError, ImportError, RuntimeError) as error:  # the conversion itself does not need this
        return UnusedRows(count, weights.rows, reason=f"transformers cannot run the model ({error})")


def example_tokens(tokenizer: Tokenizer, limit: int = _MOST_TOKENS) -> list[int]:
    """Return the tokens of the text on which the probability is measured, at most `limit`."""
    ids = [*tokenizer.prefix_ids, *tokenizer.encode(_TEXT)] or [tokenizer.eos_id]
    return ids[:limit]


@torch.no_grad()
def _compute_probabilities(directory: Path, ids: list[int], num_tokens: int) -> tuple[float, ...]:
    """Return the total probability of all ids ≥ `num_tokens` after each of the tokens `ids`."""
    import transformers

    (name,) = json.loads((directory / "config.json").read_text("utf-8"))["architectures"]
    with _silence(transformers):
        model = getattr(transformers, name).from_pretrained(directory, dtype=torch.float32).eval()
        logits = model(torch.tensor([ids])).logits[0]
    return tuple(logits.softmax(-1)[:, num_tokens:].sum(-1).tolist())


def _find_obstacle(weights: HuggingFaceWeights) -> str | None:
    """Return why the probability should not be measured, or None if it can be measured."""
    import transformers

    names = json.loads((weights.directory / "config.json").read_text("utf-8"))["architectures"]
    if len(names) != 1 or not hasattr(transformers, names[0]):
        return f"transformers has no class {', '.join(names)}"
    parameters = sum(math.prod(location.shape) for location in weights.locations.values())
    if parameters > MOST_PARAMETERS:
        return f"the model has {parameters:,} parameters, more than {MOST_PARAMETERS:,}"
    needed, available = parameters * _BYTES, _available_memory()
    if needed > _SHARE_OF_MEMORY * available:
        return f"it needs {needed / 1e9:,.1f} GB of memory, and {available / 1e9:,.1f} GB are available"
    return None


def _available_memory() -> int:
    """Return the bytes of memory that this process may still use on the machine, and within its container's limit."""
    available = psutil.virtual_memory().available
    for file in _LIMITS:
        limit = file.read_text().strip() if file.is_file() else "max"
        if limit != "max":
            available = min(available, int(limit) - psutil.Process().memory_info().rss)
    return available


@contextmanager
def _silence(transformers: ModuleType) -> Iterator[None]:
    """Silence the progress bars and advice of transformers."""
    logging = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
