"""Worker processes: they load functions, call them in parallel, and survive whatever a function does."""

import sys
import time
from pathlib import Path

import pytest

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.rewards import RewardConfig, RewardFunctionConfig
from rl_megatron.data.tasks import Problem
from rl_megatron.rewards.loading import build_specs, check_functions
from rl_megatron.rewards.registry import REWARDS
from rl_megatron.rewards.samples import Sample
from rl_megatron.rewards.workers import WORKER_MODULE, RewardWorkers
from tests.child_processes import children_with

FILE = str(Path(__file__).parent / "user_file.py")


def settings(*names, **keys):
    functions = [
        name if isinstance(name, RewardFunctionConfig) else RewardFunctionConfig(path=FILE, name=name) for name in names
    ]
    return RewardConfig(functions=tuple(functions), **keys)


@pytest.fixture
def workers_of():
    """`workers_of(settings)`: workers that are closed after the test."""
    made = []

    def make(config):
        made.append(RewardWorkers(build_specs(config), config))
        return made[-1]

    yield make
    for workers in made:
        workers.close()


def samples(*completions, **record):
    return [Sample(Problem("p", "a", record), completion, [7] * len(completion), False) for completion in completions]


def scored(workers, given, seconds=60.0):
    workers.submit(given, range(len(given)), with_lists=True)
    assert workers.advance(seconds)
    return [
        [workers.outcomes[f, s] for s in range(len(given))] for f in range(len(workers.descriptions))
        if workers.failed is None
    ]  # fmt: skip


def test_functions_of_all_forms_score_together(workers_of):
    workers = workers_of(settings("length", "trl", "compute_score", "trl_async", "judge", timeout_seconds=30.0))
    for texts in (("a", "bb"), ("ccc",)):  # the same processes score again
        found = scored(workers, samples(*texts, solution="a"))
        assert [[outcome.score for outcome in outcomes] for outcomes in found] == [
            [len(text) for text in texts],
            [float(text == "a") for text in texts],
            [float(text == "a") for text in texts],
            [len(text) for text in texts],
            [len(text) for text in texts],
        ]
        assert found[2][0].metrics == {"acc": 1.0}
        assert found[1][0].metrics == {"seen": len(texts)}


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's")
def test_programs_that_a_worker_runs_cannot_read_its_memory(workers_of):
    ((outcome,),) = scored(workers_of(settings("hidden_memory")), samples("a"))
    assert outcome.score == 1.0


def test_calls_of_an_async_function_wait_at_the_same_time(workers_of):
    workers = workers_of(settings("judge", num_workers=1))
    workers.load()
    began = time.monotonic()
    scored(workers, samples(*"abcdefghij"))
    assert time.monotonic() - began < 5 * 0.2


MISBEHAVIOUR = {
    "sleep": ("timeout", "took longer than 1 seconds"),
    "raise": ("error", "raised ValueError: raised on purpose (/"),
    "exit": ("error", "ended its worker process, which exited with status 3"),
    "leave": ("error", "raised SystemExit: 0"),
    "eat": ("error", "raised MemoryError"),
    "orphan": ("error", "ended its worker process, which exited with status 0"),
    "close": ("error", "ended its worker process"),
    "none": ("error", "returned None"),
    "nan": ("error", "returned nan"),
    "text": ("error", "returned str '1.0'"),
    "nothing": ("error", "returned a mapping without 'score'"),
}
HARMLESS = ("fork", "print", "well")


@pytest.mark.change
@pytest.mark.parametrize("name", ["misbehave", "misbehave_async"])
def test_a_function_that_misbehaves_spoils_only_its_own_sample(workers_of, name):
    workers = workers_of(settings(name, timeout_seconds=1.0, on_error="zero", on_timeout="zero", num_workers=2))
    texts = [*MISBEHAVIOUR, *HARMLESS, *HARMLESS]
    (found,) = scored(workers, samples(*texts))
    for text, outcome in zip(texts, found, strict=True):
        if text in HARMLESS:
            assert outcome == (1.0, {}, None), (text, outcome)
        else:
            kind, message = MISBEHAVIOUR[text]
            assert outcome.score is None and outcome.failure.kind == kind, (text, outcome)
            assert outcome.failure.message.startswith(message), (text, outcome)


@pytest.mark.change
def test_a_waiting_coroutine_is_late_without_disturbing_the_others(workers_of):
    workers = workers_of(settings("misbehave_async", timeout_seconds=1.0, on_timeout="zero", num_workers=1))
    (found,) = scored(workers, samples("wait", "well", "well"))
    assert [outcome.failure and outcome.failure.kind for outcome in found] == ["timeout", None, None]


@pytest.mark.change
def test_the_time_of_a_call_begins_when_the_call_does(workers_of):
    """Two functions of 0.3 s score four samples in one worker: the last call begins after 2.1 s."""
    workers = workers_of(settings("takes_a_while", "takes_as_long", timeout_seconds=1.5, num_workers=1))
    found = scored(workers, samples(*"abcd"))
    assert [outcome.score for outcomes in found for outcome in outcomes] == [1.0] * 8


@pytest.mark.change
def test_coroutines_are_not_late_because_of_others_that_hold_the_event_loop(workers_of):
    """Ten calls that hold the loop for 0.3 s twice: each waits for 2.7 s or more of the others' time."""
    workers = workers_of(settings("computes", timeout_seconds=2.0, on_timeout="zero", num_workers=1))
    (found,) = scored(workers, samples(*"abcdefghi", "block"))
    assert [outcome.score for outcome in found] == [1.0] * 9 + [None]
    assert found[-1].failure.kind == "timeout"


@pytest.mark.change
@pytest.mark.parametrize("text", ["sleep", "exit", "raise", "nan"])
def test_a_list_function_fails_for_all_samples_or_for_one(workers_of, text):
    workers = workers_of(settings("misbehave_list", timeout_seconds=1.0, on_error="zero", on_timeout="zero"))
    (found,) = scored(workers, samples(text, "well"))
    assert all(outcome.failure for outcome in found)
    (again,) = scored(workers, samples("well", "well"))
    assert [outcome.score for outcome in again] == [1.0, 1.0]


def test_the_first_failure_ends_the_scoring(workers_of):
    workers = workers_of(settings("misbehave", num_workers=1))
    scored(workers, samples("well", "raise", "sleep", "sleep"))
    function, sample, failure = workers.failed
    assert (function, sample, failure.kind) == (0, 1, "error")
    assert [outcome.score for outcome in scored(workers, samples("well"))[0]] == [1.0], "later calls work"


@pytest.mark.change
def test_no_process_is_left_behind(workers_of):
    workers = workers_of(settings("misbehave", timeout_seconds=1.0, on_timeout="zero", on_error="zero"))
    workers.submit(samples("fork", "orphan", "sleep"), range(3), with_lists=True)
    groups = set()
    while not workers.advance(0.1):
        groups |= {worker.pid for worker in children_with(WORKER_MODULE)}
    workers.close()
    assert groups
    for process in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = process.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        assert int(fields[2]) not in groups or fields[0] == "Z", "a process of a worker's group lives"


def double(completion):
    return 2.0 * len(completion)


def test_a_registered_function_of_a_notebook_is_sent_with_its_code(workers_of):
    secret = 3.0

    def of_a_cell(completion):
        return secret * double(completion)

    REWARDS.register("of_a_cell")(of_a_cell)
    try:
        workers = workers_of(settings(RewardFunctionConfig(name="of_a_cell")))
        assert [outcome.score for outcome in scored(workers, samples("ab"))[0]] == [12.0]
    finally:
        del REWARDS["of_a_cell"]


@pytest.mark.change
@pytest.mark.parametrize(
    ("function", "words"),
    [
        (
            RewardFunctionConfig(name="exact_mach"),
            r"reward.functions\[0\].name=exact_mach: there is no reward",
        ),
        (RewardFunctionConfig(path="absent.py", name="f"), r"reward.functions\[0\].name.*there is no file"),
        (RewardFunctionConfig(path=FILE, name="lenght"), "user_file.py has no 'lenght'; did you mean 'length'"),
        (RewardFunctionConfig(path=FILE, name="nothing"), r"functions\[0\].*nothing takes no part of a sample"),
        (RewardFunctionConfig(name="regex", kwargs={"pattern": "("}), "pattern='\\(' is not a regular expression"),
        (RewardFunctionConfig(name="overlong"), "overlong.*raised TypeError.*max_tokens"),
        (RewardFunctionConfig(path=FILE, name="fields"), "needs the parameter 'level', but a record has no such field"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_function_that_cannot_be_called_is_refused_before_the_first_step(function, words):
    with pytest.raises(ConfigError, match=words):
        check_functions(settings(function), [Problem("p", "a", {"difficulty": 1})])


def test_a_record_without_a_field_of_a_function_is_named_by_its_place():
    problems = [Problem("p", "a", {"level": 1}, "x.jsonl:1"), Problem("p", "a", {"difficulty": 1}, "x.jsonl:2")]
    with pytest.raises(ConfigError, match=r"no such field \(x.jsonl:2; its fields: difficulty\)"):
        check_functions(settings(RewardFunctionConfig(path=FILE, name="fields")), problems)


@pytest.mark.parametrize(
    "function",
    [
        {"name": "exact_match"},
        {"name": "regex", "kwargs": {"pattern": "= (?P<answer>.*)"}},
        {"path": FILE, "name": "trl"},
    ],
    ids=lambda function: function["name"],
)
def test_a_record_without_a_reference_answer_is_refused_if_a_function_compares_with_it(function):
    answered = [
        Problem("p", "4"), Problem("p", "", {"answer": ""}), Problem("p", "", {"answer": 0}),
        Problem("p", "4", {"reward_model": {"ground_truth": "4"}}),
    ]  # fmt: skip
    check_functions(settings(RewardFunctionConfig(**function)), answered)
    with pytest.raises(ConfigError, match=r"a record has none \(x.jsonl:2; its fields: answr\); name the field"):
        check_functions(
            settings(RewardFunctionConfig(**function)), [*answered, Problem("p", "", {"answr": "4"}, "x.jsonl:2")]
        )


def test_a_function_that_reads_no_answer_takes_records_without_one():
    without = [Problem("p", "", {"prompt": "p"}, "x.jsonl:1")]
    check_functions(settings(RewardFunctionConfig(name="regex", kwargs={"pattern": "="})), without)
    check_functions(settings(RewardFunctionConfig(path=FILE, name="length")), without)


@pytest.mark.change
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import no_such_module", "no module named 'no_such_module'|No module named 'no_such_module'"),
        ("1 / 0", "ZeroDivisionError: division by zero .*bad.py:1"),
        ("def f(:", "SyntaxError"),
        ("import os; os._exit(4)", "a worker process exited with status 4 while it loaded them"),
    ],
)
def test_a_file_that_cannot_be_imported_is_refused_before_the_first_step(tmp_path, text, words):
    (tmp_path / "bad.py").write_text(text)
    with pytest.raises(ConfigError, match=words):
        check_functions(settings(RewardFunctionConfig(path=str(tmp_path / "bad.py"), name="f")), [])


@pytest.mark.parametrize(("name", "number"), [("length", 1), ("takes_a_while", 3)])
def test_more_workers_are_started_only_for_work_that_is_worth_it(workers_of, name, number):
    workers = workers_of(settings(name, num_workers=3))
    assert not children_with(WORKER_MODULE), "there is no work"
    scored(workers, samples(*"abcd"))
    assert len(children_with(WORKER_MODULE)) == number
