"""The reward functions of the package."""

import json
import time

import pytest
from trl.rewards import get_soft_overlong_punishment

from rl_megatron.config.rewards import RewardConfig, RewardFunctionConfig
from rl_megatron.data.tasks import Problem
from rl_megatron.rewards.functions import (
    Code,
    ExactMatch,
    Format,
    JsonSchema,
    LengthPenalty,
    MathVerify,
    Overlong,
    Regex,
    gsm8k,
)
from rl_megatron.rewards.loading import build_specs
from rl_megatron.rewards.samples import Sample
from rl_megatron.rewards.workers import RewardWorkers
from tests.unit.rewards.latex_answers import latex_answers


@pytest.mark.parametrize(
    ("completion", "answer", "options", "score"),
    [
        (" 12\n", "12", {}, 1), ("12", 12, {}, 1), ("Yes", "yes", {}, 0), ("Yes", "yes", {"ignore_case": True}, 1),
        ("1 2", "12", {}, 0),
    ],
)  # fmt: skip
def test_exact_match_ignores_white_space_around_an_answer(completion, answer, options, score):
    assert ExactMatch(**options)(completion, answer) == score


@pytest.mark.parametrize(
    ("pattern", "whole", "completion", "score"),
    [
        (r"\d+", False, "it is 5", 1), (r"\d+", False, "five", 0), (r"\d+", True, "it is 5", 0),
        ("a.b", True, "a\nb", 1),
        (r"is (?P<answer>\d+)", False, "is 3, no, it is 5", 1), (r"is (?P<answer>\d+)", False, "is 5, no, it is 3", 0),
        (r"(?P<answer>x)?y", False, "y", 0),
    ],
)  # fmt: skip
def test_regex_finds_a_pattern_or_compares_its_last_answer(pattern, whole, completion, score):
    assert Regex(pattern, whole)(completion, "5") == score


@pytest.mark.parametrize(
    ("completion", "answer", "score"),
    [
        ("so\n#### 1,234", "1234", 1), ("#### 18.00", "#### 18", 1), ("#### 18", "long\n#### 18 dollars", 1),
        ("18", "18", 0), ("#### 18", "$18", 1), ("#### 17", "18", 0),
    ],
)  # fmt: skip
def test_gsm8k_compares_numbers(completion, answer, score):
    assert gsm8k(completion, answer) == score


def test_gsm8k_refuses_a_reference_answer_without_a_number():
    with pytest.raises(ValueError, match="'twelve' is not a number"):
        gsm8k("#### 12", "twelve")


def test_json_schema_tells_json_from_json_of_the_schema(tmp_path):
    schema = {"type": "object", "required": ["x"], "properties": {"x": {"type": "integer"}}}
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    for reward in (JsonSchema(schema), JsonSchema(str(tmp_path / "schema.json"))):
        assert reward('{"x": 1}') == {"score": 1.0, "is_json": 1.0}
        assert reward('Here:\n```json\n{"y": 1}\n```\nor\n```json\n{"x": 2}\n```') == {"score": 1.0, "is_json": 1.0}
        assert reward('{"x": "1"}') == {"score": 0.0, "is_json": 1.0}
        assert reward("{x: 1}") == {"score": 0.0, "is_json": 0.0} == reward("[" * 100_000)
    for wrong in ({"type": "objekt"}, str(tmp_path / "absent.json")):
        with pytest.raises(ValueError, match="schema: "):
            JsonSchema(wrong)


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("<think>\na\n</think>\n<answer>b</answer>\n", 1), ("<think></think><answer></answer>", 1),
        ("<think>a</think>b<answer>c</answer>", 0), ("<answer>c</answer><think>a</think>", 0),
        ("<think>a<think>b</think></think><answer>c</answer>", 0), ("<think>a</think><answer>c</answer> so", 0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0), ("", 0),
    ],
)  # fmt: skip
def test_format_wants_each_part_once_and_nothing_else(completion, score):
    assert Format()(completion) == score


def test_format_of_a_prompt_that_opens_the_first_part():
    assert Format(opened=True)("a</think><answer>b</answer>") == 1
    assert Format(("x",))("<x>1</x>") == 1
    with pytest.raises(ValueError, match="must be a list of names"):
        Format("think")


def test_overlong_is_trls_soft_punishment():
    ours, theirs = Overlong(max_tokens=10, buffer_tokens=4), get_soft_overlong_punishment(10, 4)
    lengths = range(15)
    assert [ours([0] * length) for length in lengths] == theirs([[0] * length for length in lengths])
    with pytest.raises(ValueError, match="buffer_tokens=11 must be from 1 to max_tokens=10"):
        Overlong(10, 11)


def test_a_length_penalty_grows_with_every_token_that_is_not_free():
    assert [LengthPenalty(10, free_tokens=2)([0] * n) for n in (0, 2, 3, 12)] == [0, 0, -0.1, -1]


ADD = "Sure:\n```python\ndef add(a, b):\n    return a + b\n```\n"
TESTS = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]
ECHO = {"inputs": ["1 2", "3 4"], "outputs": ["3", "7\n"]}


@pytest.mark.change
@pytest.mark.parametrize(
    ("completion", "tests", "share"),
    [
        (ADD, TESTS, 1.0),
        (ADD, json.dumps(TESTS), 1.0),
        (ADD.replace("+", "-"), ["assert add(3, 0) == 3", *TESTS], 1 / 3),
        ("def add(a, b): return a + b", TESTS, 1.0),
        ("import sys; sys.exit(0)", TESTS, 0.0),
        ("import os; os._exit(0)", TESTS, 0.0),
        (
            "import os\nfor fd in range(3, 20):\n    try: os.write(fd, b'2')\n    except OSError: pass\nos._exit(0)",
            TESTS,
            0.0,
        ),
        ("def add(:", TESTS, 0.0),
        ("print(sum(map(int, input().split())))", ECHO, 1.0),
        ("print(3)", ECHO, 0.5),
    ],
)
def test_code_counts_the_tests_that_a_program_passes(completion, tests, share):
    assert Code()(completion, tests) == {"score": float(share == 1), "passed": share}
    assert Code(all_or_nothing=False)(completion, tests)["score"] == share


@pytest.mark.change
@pytest.mark.parametrize(
    "program",
    [
        "while True: pass", "import time; time.sleep(100)", "x = bytearray(4 << 30)\ndef add(a, b): return a + b",
        "import os\nos.fork()\ndef add(a, b): return a + b",
        "open('big', 'wb').write(bytes(64 << 20))\ndef add(a, b): return a + b",
    ],
)  # fmt: skip
def test_a_program_is_stopped_at_its_limits(program):
    began = time.monotonic()
    assert Code(seconds=0.5, memory_mb=256)(program, TESTS)["passed"] == 0
    assert time.monotonic() - began < 5


FORGED = """
import os, re, sys
for secret in re.findall("[0-9a-f]{32}", repr(sys._getframe(1).f_globals)) or [""]:
    for descriptor in range(3, 20):
        try: os.write(descriptor, f"{secret}1".encode())
        except OSError: pass
os._exit(0)
"""

READ = """
import os, re
memory = open(f"/proc/{os.getppid()}/mem", "rb")
for line in open(f"/proc/{os.getppid()}/maps"):
    begin, end, rights = re.match("(\\w+)-(\\w+) (\\S+)", line).groups()
    if rights.startswith("rw"):
        memory.seek(int(begin, 16))
        if b"3" in memory.read(int(end, 16) - int(begin, 16)):
            print(3)
            break
"""


@pytest.mark.change
@pytest.mark.parametrize(
    "program",
    ["x = '\0'", "x = '\ud800'", "print(4, end='\ud800')", FORGED, READ],
    ids=["nul", "surrogate", "printed", "forged", "read from the parent"],
)
def test_a_program_that_cannot_run_or_forges_its_result_scores_zero(program):
    assert Code()(program, ["assert False"]) == Code()(program, {"inputs": ["1 2"], "outputs": ["3"]})
    assert Code()(program, ["assert False"])["passed"] == 0


@pytest.mark.change
def test_a_long_program_runs_and_reads_what_no_text_holds():
    long = "print(len(input()))  #" + "x" * 200_000
    assert Code()(long, {"inputs": ["\ud800\n"], "outputs": ["3"]})["passed"] == 1
    assert Code()(long, {"inputs": ["abc\n"], "outputs": ["3"]})["passed"] == 1
    assert Code()("x = [1, 2]", "[1, 2] == x")["passed"] == 1, "a statement that is not JSON"


def test_code_without_tests_is_an_error():
    for tests, words in (([], "no tests"), (5, "must be statements")):
        with pytest.raises(ValueError, match=words):
            Code()(ADD, tests)


def called_directly(answer, completion):
    """Return what math-verify says: 1, 0, or None if it cannot read the reference answer."""
    from math_verify import parse, verify

    gold = parse(answer) or parse(rf"\boxed{{{answer}}}")
    return float(verify(gold, parse(completion))) if gold else None


@pytest.mark.change
def test_math_verify_in_a_worker_equals_the_library_called_directly():
    pairs = latex_answers()
    assert len(pairs) >= 100
    config = RewardConfig(
        functions=(RewardFunctionConfig(name="math_verify"),), timeout_seconds=30.0, on_error="zero", num_workers=2
    )
    workers = RewardWorkers(build_specs(config), config)
    try:
        samples = [Sample(Problem("p", answer), completion, [], False) for answer, completion in pairs]
        workers.submit(samples, range(len(samples)), with_lists=True)
        assert workers.advance(300)
        found = [workers.outcomes[0, index] for index in range(len(pairs))]
    finally:
        workers.close()
    wanted = [called_directly(*pair) for pair in pairs]
    for pair, outcome, value in zip(pairs, found, wanted, strict=True):
        assert outcome.score == value, (pair, outcome, value)
        assert (outcome.failure is None) == (value is not None), (pair, outcome)
    assert wanted.count(1.0) > 30 < wanted.count(0.0)


@pytest.mark.change
def test_math_verify_is_not_silent_about_its_own_time_limit(monkeypatch):
    import math_verify.parser

    monkeypatch.setattr(math_verify.parser, "extract_target_from_pred", lambda *_, **__: time.sleep(10))
    with pytest.raises(TimeoutError, match="read for 1 seconds"):
        MathVerify(parsing_seconds=1)("$1$", "1")
