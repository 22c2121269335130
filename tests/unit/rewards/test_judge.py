"""The reward function `judge`, in its worker processes and behind a real HTTP server that injects faults."""

import asyncio
import json
import os

import pytest

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.rewards import RewardConfig, RewardFunctionConfig
from rl_megatron.data.tasks import Problem
from rl_megatron.rewards.answer_cache import AnswerCache
from rl_megatron.rewards.functions import Judge
from rl_megatron.rewards.loading import check_functions
from rl_megatron.rewards.scorer import RewardFailed, Scorer
from rl_megatron.topology.ranks import Ranks
from tests.unit.rewards.judge_server import judging

FAST = {"backoff_seconds": 0.01}


@pytest.fixture(scope="module")
def server():
    with judging() as running:
        yield running


def config(server, cache, kwargs=None, **settings):
    kwargs = {"url": server.url, "model": "m", "cache_dir": str(cache)} | FAST | (kwargs or {})
    return RewardConfig(functions=(RewardFunctionConfig(name="judge", kwargs=kwargs),), num_workers=1, **settings)


def scored(settings, completions, **record):
    scorer = Scorer(settings, lambda: None, Ranks())
    try:
        problems = [Problem("p", "a", record)] * len(completions)
        rewards, metrics = scorer.score(problems, completions, [[1]] * len(completions), [False] * len(completions))
        return rewards.tolist(), metrics.values()
    finally:
        scorer.close()


@pytest.mark.change
def test_every_sample_is_scored_or_counted_and_hits_are_equal_to_the_bit(server, tmp_path):
    passing = ["429:3 abc", "500:2 ab", "503:1 abcde", "html:1 a", "binary:1 ab", "shape:2 abc"]
    passing += ["hangup:1 ab", *(f"ok:0 {'x' * (number % 8)}{number:02}" for number in range(40))]
    counted = ["prose:9 abc", "thinking:9 abc", "beyond:9 abc"]
    failing = ["429:99 abc", "400:1 abc"]
    settings = config(server, tmp_path, {"unparsed_score": 0.125}, on_error="zero")
    rewards, metrics = scored(settings, passing + counted + failing)
    expected = [len(text.split()[1]) / 10 for text in passing]
    assert rewards == pytest.approx(expected + [0.125] * 3 + [0.0] * 2)
    assert metrics["reward_judge_errors"] == 2
    num_answered = len(passing) + len(counted)
    assert metrics["reward_judge_unparsed"] == pytest.approx(3 / num_answered) and metrics["reward_judge_cached"] == 0
    sent = [n for text, n in server.seen.items() if not any(f"{each}\n" in text for each in failing)]
    assert metrics["reward_judge_attempts"] == pytest.approx(sum(sent) / num_answered)
    assert sum(sent) >= num_answered + 11
    before = len(server.requests)
    again, metrics = scored(settings, passing)
    assert again == rewards[: len(passing)] and metrics["reward_judge_cached"] == 1.0
    assert len(server.requests) == before
    assert "reward_judge_attempts" not in metrics


@pytest.mark.change
def test_a_late_answer_is_asked_for_again_and_one_that_stays_late_is_counted(server, tmp_path):
    settings = config(server, tmp_path, {"request_seconds": 1.0})
    assert scored(settings, ["late:1 abcd"])[0] == [pytest.approx(0.4)]
    never = config(server, tmp_path, {"request_seconds": 0.3, "retries": 1}, on_timeout="zero")
    rewards, metrics = scored(never, ["late:99 abc"])
    assert rewards == [0.0] and metrics["reward_judge_timeouts"] == 1


@pytest.mark.change
def test_an_answer_without_a_score_ends_the_run_unless_a_setting_scores_it(server, tmp_path):
    with pytest.raises(
        RewardFailed, match=r"the judge's answer has no score: 'I would rather not say.'.*unparsed_score"
    ):
        scored(config(server, tmp_path), ["prose:9 abc"])
    assert not any(tmp_path.iterdir())  # an answer without a score is asked for again


@pytest.mark.change
def test_the_key_comes_from_the_environment_and_is_in_no_message(server, tmp_path, monkeypatch):
    monkeypatch.setenv("MY_JUDGE", "s3cr3t-of-mine")
    settings = config(server, tmp_path, {"api_key_env": "MY_JUDGE"})
    assert scored(settings, ["ok:0 abcde"])[0] == [0.5]
    assert server.requests[-1][1] == "Bearer s3cr3t-of-mine"
    kept = next(tmp_path.rglob("*.json")).read_text()
    with pytest.raises(RewardFailed, match=r"status 401: 'bad key Bearer \*\*\*'.*api_key_env") as refused:
        scored(settings, ["echo:9 abc"])
    assert "s3cr3t" not in str(refused.value) + kept
    monkeypatch.delenv("MY_JUDGE")
    with pytest.raises(ConfigError, match=r"reward.functions\[0\].*api_key_env=MY_JUDGE: .*not set"):
        check_functions(settings, [])


def test_equal_requests_are_sent_once_and_each_part_of_a_request_has_an_answer_of_its_own(server, tmp_path):
    def asked(kwargs, times=1):
        """Return the scores of one completion, and how many requests they took."""

        async def all_of():
            judge = Judge(**{"url": server.url, "model": "m", "cache_dir": str(tmp_path)} | kwargs)
            sample = {"prompt": "p", "completion": "ok:0 abc", "answer": "a"}
            return [result["score"] for result in await asyncio.gather(*(judge(**sample) for _ in range(times)))]

        before = len(server.requests)
        scores = asyncio.run(all_of())
        return scores, len(server.requests) - before

    assert asked({}, times=8) == ([3 / 10] * 8, 1)
    assert asked({})[1] == asked({"retries": 0})[1] == asked({"score_range": [0, 5]})[1] == 0
    for other in ({"model": "n"}, {"system": "Be strict."}, {"options": {"seed": 1}}, {"template": "{{ completion }}"}):
        assert asked(other)[1] == 1, other
        assert asked(other)[1] == 0, other
    assert server.requests[-1][2] == {
        "model": "m", "temperature": 0.0, "max_tokens": 512, "messages": [{"role": "user", "content": "ok:0 abc"}],
    }  # fmt: skip
    assert asked({"cache_dir": "off"})[1] == 1


@pytest.mark.change
def test_a_template_in_a_file_gets_the_fields_of_the_record(server, tmp_path):
    file = tmp_path / "judge.jinja"
    file.write_text("{{ rubric }}: {{ completion }} for {{ prompt }} ({{ answer }})")
    settings = config(server, tmp_path / "kept", {"template": str(file)})
    assert scored(settings, ["ok:0 ab"], rubric="brief")[0] == [pytest.approx(0.2)]
    assert server.requests[-1][2]["messages"][0]["content"] == "brief: ok:0 ab for p (a)"
    check_functions(settings, [Problem("p", "a", {"rubric": "brief"})])
    with pytest.raises(ConfigError, match="needs the parameter 'rubric'"):
        check_functions(settings, [Problem("p", "a", {"level": 1})])


@pytest.mark.parametrize(
    ("kwargs", "answer", "score"),
    [
        ({}, "Score: 3\nNo, my final score = 4.5", 0.45), ({}, "scored 3 points", None), ({}, "Score: -1", None),
        ({"score_range": None}, "**Score**: -1", -1.0),
        ({}, "Score (0-10): 8", 0.8), ({}, "**Score (0 to 10)**: **7.5**", 0.75), ({}, "score [0–10] = 9", 0.9),
        ({}, "Score (0-10) 8", 0.8), ({}, "Score (out of 10): 8", 0.8), ({}, "Score 0-10: 8", 0.8),
        ({}, "Score (0.0-10.0): 8/10", 0.8), ({}, "Score (8)", 0.8), ({}, "Score: (7) 3 errors", 0.7),
        ({}, "Score (8/10): 2 errors", 0.8),
        ({}, "Score: 7-8", 0.7), ({}, "Score (0-10) is high", None), ({}, "Score (0-10):", None),
        ({}, "Score: 3\nThe score (0-10) is above.", 0.3), ({}, "Score: 8 - 2 errors", 0.8), ({}, "Score: 8.", 0.8),
        ({"pattern": r"\[\[(\d+)\]\]", "score_range": [1, 5]}, "[[1]] or [[3]]", 0.5),
        ({"json_key": "rating"}, '{"a": {"rating": 1}} {"rating": "8", "b": {}} {"other": 1}', 0.8),
        ({"json_key": "rating"}, '```json\n{"rating": 2}\n``` {broken {"rating": true', 0.2),
        ({"json_key": "rating"}, '{"result": {"rating": 8}}', 0.8),
        ({"json_key": "rating"}, '{"all": [{"rating": 1}, {"why": {"rating": 6}}], "n": 2}', 0.6),
        ({"json_key": "rating"}, '{"rating": 8, "parts": {"rating": 2}}', 0.8),
        ({"json_key": "rating"}, '{"rating": 8} {"parts": {"rating": 2}}', 0.2),
        ({"json_key": "rating"}, '{"rating": true}', None),
        ({"json_key": "rating", "score_range": None}, '{"rating": NaN}', None),
    ],
)  # fmt: skip
def test_scores_are_read_from_text_or_json(kwargs, answer, score):
    judge = Judge("http://127.0.0.1:1", "m", cache_dir="off", **kwargs)
    assert judge.read_score(answer) == (None if score is None else pytest.approx(score))


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"url": "127.0.0.1:8000"}, "must be an address"), ({"url": "http://me:pass@host"}, "api_key_env"),
        ({"template": "absent.jinja"}, "template=absent.jinja cannot be read"),
        ({"template": "{{ completion"}, "not a Jinja template"), ({"template": "{{ prompt }}"}, "no completion"),
        ({"template": "{{ completions }}{{ completion }}"}, "'completions'"), ({"pattern": "["}, "regular expression"),
        ({"pattern": "x"}, "no group"), ({"pattern": "(x)", "json_key": "y"}, "both set"),
        ({"score_range": [1, 1]}, "score_range"), ({"options": {"n": 2}}, "options"),
        ({"unparsed_score": float("nan")}, "unparsed_score"), ({"retries": -1}, "retries=-1"),
        ({"request_seconds": 0}, "request_seconds=0"),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_named(kwargs, words):
    with pytest.raises(ValueError) as refused:
        Judge(**{"url": "http://127.0.0.1:1", "model": "m"} | kwargs)
    assert words in str(refused.value) and "pass@" not in str(refused.value)


def test_an_endpoint_that_is_not_there_is_named():
    judge = Judge("http://127.0.0.1:9", "m", cache_dir="off", retries=1, backoff_seconds=0.0)
    with pytest.raises(RuntimeError, match="127.0.0.1:9/chat/completions cannot be reached: .*last of 2 attempts"):
        asyncio.run(judge(prompt="p", completion="c", answer="a"))


def test_the_first_answer_stays_and_a_damaged_file_counts_as_none(tmp_path):
    cache, key = AnswerCache(str(tmp_path)), AnswerCache.key({"a": 1})
    assert cache.get(key) is None and cache.put(key, "first 😀") == "first 😀"
    assert AnswerCache(str(tmp_path)).put(key, "second") == "first 😀" == cache.get(key)
    (file,) = tmp_path.rglob("*.json")
    for damaged in ('{"answer": "fir', '{"answer": 1}', "[]"):
        file.write_text(damaged)
        assert cache.get(key) is None
        assert cache.put(key, "third") == "third" == cache.get(key)
    assert [json.loads(path.read_text()) for path in tmp_path.rglob("*") if path.is_file()] == [{"answer": "third"}]


def test_a_directory_that_cannot_be_written_does_not_lose_the_answer(tmp_path, logged):
    (tmp_path / "file").write_text("")
    cache = AnswerCache(os.fspath(tmp_path / "file"))
    assert cache.put(AnswerCache.key({}), "said") == "said" and cache.get(AnswerCache.key({})) is None
    assert any("cannot be kept" in message for message in logged)
