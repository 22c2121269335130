"""Logging on many ranks: rank 0 logs progress, and every rank logs errors."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TextIO, TypeVar

LOGGER = logging.getLogger("rl_megatron")

Item = TypeVar("Item")
_FIRST_SECONDS, _THEN_SECONDS = 2.0, 10.0  # until the first line of `track`, and between further lines
_ITEMS_PER_CHECK = 64  # items of `track` between two checks of the clock

# Library warnings that a user cannot act on: message (regular expression), category, module (regular expression).
_NOT_FOR_USERS: tuple[tuple[str, type[Warning], str], ...] = (
    # megatron-core looks for GPU packages when it is imported. model/backend.py chooses layers by what is installed.
    (r"(Transformer Engine and )?Apex (is|are) not installed\. Falling back", UserWarning, r"megatron\."),
    # The warning is about the default of a megatron-core setting that this package does not use.
    (r"full scope is deprecated\. Use empty cuda_graph_scope", UserWarning, r"megatron\."),
    # megatron-core's optimizer reads `grad` of every parameter.
    (r"The \.grad attribute of a Tensor that is not a leaf", UserWarning, r"megatron\."),
    # megatron-core calls functions that torch has renamed. torch attributes some of the warnings to its own logger.
    (r".* is deprecated", FutureWarning, r"megatron\."),
    (r"`torch\.distributed\.\w+` is deprecated", FutureWarning, r"torch\.distributed\.c10d_logger"),
)
# The same for messages that libraries log: the logger's name, and the beginning of the message.
_NOT_FOR_USERS_LOGGED: tuple[tuple[str, str], ...] = (
    # Without a GPU, the "GPU" generator of megatron-core is the CPU's, which changes when it is used.
    ("megatron.core.tensor_parallel.random", "CPU RNG state changed within GPU RNG context"),
)

# The endings of names of environment variables that hold secrets, such as HF_TOKEN and WANDB_API_KEY. Names of public
# keys and token counts do not match.
_SECRET_VARIABLE = re.compile(
    r"(TOKEN|(?<!MAX_)(?<!MIN_)(?<!NUM_)(?<!NEW_)(?<!STOP_)TOKENS|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|WEBHOOK_URL"
    r"|((^|_)(API|ACCESS|PRIVATE|SECRET|SIGNING|ENCRYPTION|STORAGE|ACCOUNT)|OPENAI|WANDB|ANTHROPIC|GITHUB|HF)_?KEY"
    r"|(^|_|SSH)(PAT|PASS|JWT))$",
    re.I,
)
_SHORTEST_SECRET = 8  # characters of a value that is worth hiding; shorter ones are words such as "true"
_IN_ADDRESS = re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^\s/@'\"]+@", re.I)  # the user and the password in a URL
_IN_QUERY = re.compile(r"([?&](?:key|sig|signature|[\w-]*token|api[_-]?key|password|secret)=)[^&\s'\"]+", re.I)
_AFTER_BEARER = re.compile(r"(\b(?:Bearer|Basic) +)[\w.~+/=-]{8,}", re.I)
_AFTER_OPTION = re.compile(
    r"(--(?:[a-z-]+-)?(?:api-key|token|password|secret)(?:[= ]|['\"], ['\"])"
    r"|\b(?:\w+\.)*(?:\w+_)?(?:api_?key|secret_?key|password|passphrase|secret)['\"]?\s*[=:]\s*['\"]?)[^\s'\",;]+",
    re.I,
)
REDACTED = "***"
# C0 and C1 controls except tab and line feed, lone surrogates, line separators, and overrides of writing direction.
_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb"
    "\U000e0000-\U000e007f]"
)

Watcher = Callable[[int, int, str, str], None]
_watcher: Watcher | None = None
_followers: list[Watcher] = []


def is_main_rank() -> bool:
    """Return whether this process is rank 0."""
    return int(os.environ.get("RANK", "0")) == 0


def is_secret_variable(name: str) -> bool:
    """Return whether an environment variable with this name holds a secret."""
    return _SECRET_VARIABLE.search(name) is not None


def redact(text: str) -> str:
    """Replace secrets in a text by `REDACTED`: values of secret variables, and secrets in URLs, headers and options."""
    for name, value in os.environ.items():
        if is_secret_variable(name) and len(value) >= _SHORTEST_SECRET and value in text:
            text = text.replace(value, REDACTED)
    text = _IN_ADDRESS.sub(rf"\1{REDACTED}@", text)
    for pattern in (_IN_QUERY, _AFTER_BEARER, _AFTER_OPTION):
        text = pattern.sub(rf"\1{REDACTED}", text)
    return text


def escape_controls(text: str) -> str:
    """Return a text in which characters that control a terminal or the writing direction are escaped.

    Line feeds, tabs, and the joiners of scripts and emojis stay.
    """
    return _CONTROLS.sub(lambda match: ascii(match[0])[1:-1], text)


def make_printable(text: str) -> str:
    """Return a text for terminals and logs: without secrets, and with control characters escaped."""
    return escape_controls(redact(text))


def setup() -> None:
    """Set log levels: INFO on rank 0, and ERROR on other ranks."""
    if not LOGGER.handlers:
        handler = StderrHandler()
        handler.setFormatter(_Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
        LOGGER.addHandler(handler)
        LOGGER.propagate = False
    sys.excepthook = _print_without_secrets
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads do not survive the checkpoint writer's fork
    LOGGER.setLevel(logging.INFO if is_main_rank() else logging.ERROR)


def _print_without_secrets(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print the traceback of an exception that ends this process."""
    print(make_printable("".join(traceback.format_exception(kind, error, trace))), end="", file=sys.stderr, flush=True)


def silence_libraries() -> None:
    """Ignore library warnings that a user cannot act on.

    `import rl_megatron` calls this, because importing megatron-core emits warnings. The user's own filters take
    precedence.
    """
    for message, category, module in _NOT_FOR_USERS:
        warnings.filterwarnings("ignore", message, category, module, append=True)
    for name, beginning in _NOT_FOR_USERS_LOGGED:
        logging.getLogger(name).addFilter(_PrefixFilter(beginning))


def silence_gpu_advice() -> None:
    """Ignore advice that only concerns GPUs, in a process that computes on the CPU."""
    advice = "When using async grad allreduce it is recommended to set the environment variable CUDA_DEVICE"
    warnings.filterwarnings("ignore", advice, UserWarning, append=True)


def track(items: Iterable[Item], what: str, total: int | None = None) -> Iterator[Item]:
    """Yield the items, and log how many of `total` were yielded: after two seconds, and then about every ten.

    `what` is the beginning of the log line, such as "tokenized records".
    """
    began, due, done = time.monotonic(), _FIRST_SECONDS, 0
    for done, item in enumerate(items, 1):
        yield item
        if done % _ITEMS_PER_CHECK == 0 and (elapsed := time.monotonic() - began) >= due:
            LOGGER.info("%s: %s%s", what, f"{done:,}", "" if total is None else f" of {total:,}")
            due = elapsed + _THEN_SECONDS
    if due > _FIRST_SECONDS:
        LOGGER.info("%s: %s in %.0f s", what, f"{done:,}", time.monotonic() - began)


class Once:
    """A function that logs a warning, such as one about a fallback, only once."""

    def __init__(self) -> None:
        self.messages: set[str] = set()

    def __call__(self, message: str) -> None:
        """Log a warning, unless it was logged before."""
        if message not in self.messages:
            self.messages.add(message)
            LOGGER.warning(message)


once = Once()


def error(message: object, on_every_node: bool = False) -> None:
    """Print the final line of a failed run to stderr, on rank 0 or, with `on_every_node`, on each node's first rank."""
    text = make_printable(" ".join(str(message).splitlines()))
    _tell_launcher(text)
    if is_main_rank() or (on_every_node and os.environ.get("LOCAL_RANK") == "0"):
        print("error:", text, file=sys.stderr, flush=True)


def _tell_launcher(text: str) -> None:
    """Write the message to the file in which torchrun looks for the reason why a rank ended."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        extra = {"py_callstack": "", "timestamp": str(int(time.time()))}
        try:
            Path(path).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}))
        except OSError:  # the message is printed anyway; torchrun would fail on a truncated file
            Path(path).unlink(missing_ok=True)


def watch_progress(watcher: Watcher | None) -> None:
    """Call `watcher` for every progress report of this process from now on; None stops this."""
    global _watcher
    _watcher = watcher


def has_watcher() -> bool:
    """Return whether there is a watcher that shows progress reports."""
    return _watcher is not None


def follow_progress(follower: Watcher) -> None:
    """Call `follower`, too, for every progress report. Without a watcher, reports may count only finished items."""
    _followers.append(follower)


def unfollow_progress(follower: Watcher) -> None:
    """Stop calling `follower`."""
    _followers.remove(follower)


def report_progress(done: int, total: int, noun: str, detail: str = "") -> None:
    """Report the progress of a long call to the watcher and the followers.

    Args:
        done: The number of items that are done.
        total: The number of all items.
        noun: What the items are, such as "sequences".
        detail: More text, which is shown if there is space.
    """
    if _watcher is not None:
        _watcher(done, total, noun, detail)
    for follower in _followers:
        follower(done, total, noun, detail)


class StderrHandler(logging.StreamHandler):
    """A handler that writes to the current `sys.stderr`, which a progress bar replaces to print lines above itself."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        """Return the current stderr."""
        return sys.stderr


class _Formatter(logging.Formatter):
    """A formatter that makes messages and tracebacks printable."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        return make_printable(super().format(record))


class _PrefixFilter(logging.Filter):
    """A filter that drops the messages with a given beginning."""

    def __init__(self, beginning: str):
        super().__init__()
        self._beginning = beginning

    def __eq__(self, other: object) -> bool:  # a logger adds equal filters only once
        return isinstance(other, _PrefixFilter) and other._beginning == self._beginning

    def __hash__(self) -> int:
        return hash(self._beginning)

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log the record."""
        return not record.getMessage().startswith(self._beginning)
