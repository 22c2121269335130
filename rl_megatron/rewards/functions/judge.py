"""The reward function `judge`: a language model at an OpenAI-compatible endpoint scores the completion."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import StrictUndefined, TemplateError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rl_megatron.rewards.answer_cache import AnswerCache
from rl_megatron.rewards.endpoint import BadReply, Endpoint
from rl_megatron.rewards.registry import register_reward
from rl_megatron.rewards.reward_function import LIST_PARAMETERS, SCORE, VERL_PARAMETERS

if TYPE_CHECKING:
    from jinja2 import Template

_RANGE = r"-?\d+(?:\.\d+)?\s?(?:-|–|to)\s?\d+(?:\.\d+)?"
# Matches the scale of the scores if a judge repeats it: "(0-10)", "0-10:" or "(out of 10):".
_SCALE = rf"\W{{0,8}}?(?:[(\[]{_RANGE}[)\]]|(?:{_RANGE}|[(\[](?!\s?-?\d)[^()\[\]\n]{{1,40}}[)\]])\W{{0,4}}?(?=[:=]))"
# Matches "Score: 7", "score = 7.5", "**Score**: 7" or "Score (0-10): 7", but not a scale without a score.
PATTERN = (
    rf"(?i)\bscore(?:{_SCALE})?\W{{0,8}}?(?P<score>-?\d+(?:\.\d+)?)"
    r"(?!\d|\.\d|\s?(?:-|–|to)\s?\d+(?:\.\d+)?\s?[)\]:=])"
)
TEMPLATE = """\
Judge how well the answer responds to the prompt.

[Prompt]
{{ prompt }}

[Answer]
{{ completion }}
{% if answer %}
[Reference answer]
{{ answer }}
{% endif %}
Explain your judgement in at most three sentences. Then end with one line of this form, where N is a number from 0
(useless) to 10 (perfect):
Score: N
"""
_SAMPLE_VARIABLES = {"completion", "messages", "turns"}  # a template must use at least one of them
_UNPARSED, _CACHED, _ATTEMPTS = "unparsed", "cached", "attempts"
_SHOWN = 200  # characters of an answer in a message


class NoScore(ValueError):
    """The error if an answer of the judge has no score."""


@register_reward("judge")
class Judge:
    """The score that a judge gives a completion, by default from 0 to 1.

    Each sample is one request, `POST {url}/chat/completions`. Answers with a score are kept on disk, and equal requests
    at the same time are sent once. The metrics are `unparsed` (the share of answers without a score), `cached` (the
    share of answers from the disk) and `attempts` (the number of attempts if the answer was not on disk).

    Args:
        url: The endpoint's address, such as http://127.0.0.1:8000/v1.
        model: The judge's name at the endpoint.
        template: The Jinja template of the user message: a text with {{ or {%, or the path of a file. Its variables
            are the parameters that a reward function may have (docs/rewards.md). None: `TEMPLATE`.
        system: The system message; None sends none.
        options: Further keys of the request. The default is {temperature: 0.0, max_tokens: 512}.
        pattern: A regular expression. The score is a group of its last match: the group `score` or, if the pattern has
            no such group, the first one. None: `PATTERN`.
        json_key: The key of the score in the answer's last JSON object with this key; replaces a pattern.
        score_range: The lowest and the highest score that the judge may give, which become 0 and 1. A score outside
            this range counts as unparsed. None: scores are used unchanged.
        unparsed_score: The score for an answer without a score; `score_range` does not scale it. None: such an answer
            is an error (see `reward.on_error`).
        cache_dir: The directory of kept answers. None: rl_megatron/judge in $XDG_CACHE_HOME or ~/.cache; "off": answers
            are not kept.
        **endpoint: `api_key_env`, `request_seconds`, `retries`, `backoff_seconds` and `longest_wait_seconds` of
            `Endpoint`.

    Raises:
        ValueError: An argument is wrong; the message names it.
    """

    def __init__(  # noqa: PLR0913  # the arguments are keys of a configuration
        self,
        url: str,
        model: str,
        *,
        template: str | None = None,
        system: str | None = None,
        options: Mapping[str, Any] | None = None,
        pattern: str | None = None,
        json_key: str | None = None,
        score_range: Sequence[float] | None = (0.0, 10.0),
        unparsed_score: float | None = None,
        cache_dir: str | None = None,
        **endpoint: Any,
    ):
        self._endpoint = Endpoint(f"{url.rstrip('/')}/chat/completions", **endpoint)
        self._body = {"model": model} | dict(options or {"temperature": 0.0, "max_tokens": 512})
        self._system = [] if system is None else [{"role": "system", "content": system}]
        if {"messages", "stream", "n"} & self._body.keys():
            raise ValueError("options must not have messages, stream or n, which the judge sets itself")
        self._template, variables = _read_template(TEMPLATE if template is None else template)
        # The template's variables become parameters, so a record that lacks one is found before the first step.
        self.__signature__ = inspect.Signature(
            [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in sorted(variables)]
        )
        self._find_score = _make_finder(pattern, json_key)
        self._range = _check_range(score_range)
        if unparsed_score is not None and not math.isfinite(unparsed_score):
            raise ValueError(f"unparsed_score={unparsed_score} must be a finite number")
        self._unparsed_score = unparsed_score
        self._cache = AnswerCache(cache_dir)
        self._requests: dict[str, asyncio.Task[tuple[str, int]]] = {}

    async def __call__(self, **fields: object) -> dict[str, float]:
        """Return the score of a sample and the metrics.

        Raises:
            NoScore: The answer has no score, and `unparsed_score` is None.
            EndpointFailed: The endpoint gave no answer.
            TimeoutError: It took too long.
        """
        message = {"role": "user", "content": self._template.render(fields)}
        body = self._body | {"messages": [*self._system, message]}
        key = self._cache.key({"url": self._endpoint.url, "body": body})
        answer = self._cache.get(key)
        metrics = {_CACHED: float(answer is not None)}
        if answer is None:
            answer, attempts = await self._ask_once(key, body)
            metrics[_ATTEMPTS] = float(attempts)
        score = self.read_score(answer)
        if score is None and self._unparsed_score is None:
            raise NoScore(
                f"the judge's answer has no score: {answer[:_SHOWN]!r}; correct the template, pattern, json_key or "
                "score_range, or set unparsed_score"
            )
        metrics[_UNPARSED] = float(score is None)
        return {SCORE: self._unparsed_score if score is None else score} | metrics  # pyright: ignore[reportReturnType] checked above

    async def _ask_once(self, key: str, body: Mapping[str, object]) -> tuple[str, int]:
        """Return the answer to a request and the number of attempts. Equal requests at the same time are sent once."""
        task = self._requests.get(key)
        if task is None:
            task = self._requests[key] = asyncio.get_running_loop().create_task(self._ask(key, body))
            task.add_done_callback(partial(self._forget, key))
        return await asyncio.shield(task)  # a sample that times out does not cancel the request for the others

    def _forget(self, key: str, task: asyncio.Task[tuple[str, int]]) -> None:
        del self._requests[key]
        if not task.cancelled():
            task.exception()  # otherwise asyncio logs the error if all waiting samples have timed out

    async def _ask(self, key: str, body: Mapping[str, object]) -> tuple[str, int]:
        answer, attempts = await self._endpoint.post(body, _read_content)
        return answer if self.read_score(answer) is None else self._cache.put(key, answer), attempts

    def read_score(self, answer: str) -> float | None:
        """Return the score in an answer, scaled to [0, 1] if there is a range; None if it has no valid score."""
        score = self._find_score(answer)
        if score is None or not math.isfinite(score):
            return None
        low, high = self._range or (0.0, 1.0)
        is_allowed = self._range is None or low <= score <= high
        return (score - low) / (high - low) if is_allowed else None


def _read_content(answer: Any) -> str:
    """Return the text of a chat completion; "" if it has none, as when it ended while the model was thinking."""
    try:
        text = answer["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        raise BadReply("has no choices[0].message.content") from None
    if text is not None and not isinstance(text, str):
        raise BadReply("has a choices[0].message.content that is not a text")
    return text or ""


def _read_template(template: str) -> tuple[Template, set[str]]:
    """Return a template and the names of its variables."""
    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=False)
    if "{{" in template or "{%" in template:
        text, where = template, "template"
    else:
        where = f"template={template}"
        try:
            text = Path(template).expanduser().read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ValueError(f"{where} cannot be read: {error}; name a file, or give the text of a template") from error
    try:
        variables = meta.find_undeclared_variables(environment.parse(text))
        compiled = environment.from_string(text)
    except TemplateError as error:
        raise ValueError(f"{where} is not a Jinja template: {error}") from error
    if not variables & _SAMPLE_VARIABLES:
        raise ValueError(f"{where} shows the judge no completion: use {{{{ completion }}}}, or messages or turns")
    of_lists = variables & (LIST_PARAMETERS | VERL_PARAMETERS)
    if of_lists:
        raise ValueError(
            f"{where} uses {sorted(of_lists)}, which a single sample does not have; use prompt and completion"
        )
    return compiled, variables


def _make_finder(pattern: str | None, json_key: str | None) -> Callable[[str], float | None]:
    """Return a function that returns the score in an answer, or None if the answer has no score."""
    if json_key is not None:
        if pattern is not None:
            raise ValueError("pattern and json_key are both set; leave one out")
        return partial(_find_in_json, json_key)
    try:
        compiled = re.compile(PATTERN if pattern is None else pattern)
    except re.error as error:
        raise ValueError(f"pattern={pattern!r} is not a regular expression: {error}") from error
    if not compiled.groups:
        raise ValueError(f"pattern={pattern!r} has no group; put the score in parentheses, as in 'Rating: (\\d+)'")
    return partial(_find_in_text, compiled, SCORE if SCORE in compiled.groupindex else 1)


def _find_in_text(pattern: re.Pattern[str], group: str | int, answer: str) -> float | None:
    match = None
    for match in pattern.finditer(answer):  # noqa: B007  # the last one counts
        pass
    return None if match is None else _to_float(match[group])


def _find_in_json(key: str, answer: str) -> float | None:
    """Return the number under a key of the last JSON object that has the key; None without such an object or number.

    Nested objects are searched, too, except those within an object that has the key.
    """
    decoder, start, score = json.JSONDecoder(), answer.find("{"), None
    while start >= 0:
        try:
            value, end = decoder.raw_decode(answer, start)
        except (json.JSONDecodeError, RecursionError):
            end = start + 1
        else:
            found_object = _find_last_object(key, value)
            score = score if found_object is None else _to_float(found_object[key])
        start = answer.find("{", end)
    return score


def _find_last_object(key: str, value: object) -> dict[str, object] | None:
    """Return the last object in a JSON value that has a key, or None. The objects within it are not searched."""
    waiting = [value]
    while waiting:
        last = waiting.pop()
        if isinstance(last, dict):
            if key in last:
                return last
            waiting += last.values()
        elif isinstance(last, list):
            waiting += last
    return None


def _to_float(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def _check_range(score_range: Sequence[float] | None) -> tuple[float, float] | None:
    if score_range is None:
        return None
    values = [_to_float(limit) for limit in score_range]
    low, high = values if len(values) == 2 else (None, None)
    if low is None or high is None or not low < high or not math.isfinite(high - low):
        raise ValueError(
            f"score_range={list(score_range)} must be the lowest and the highest score of the judge, as in [0, 10]"
        )
    return low, high
