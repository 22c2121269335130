"""Named sets: which completions they ask an engine for, their metrics, files and changes since the run's start."""

import json
from unittest import mock

import pytest
import torch

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.loading.load import load_config
from rl_megatron.data.eval_problems import check_set_files, read_set_problems
from rl_megatron.evaluation import sets as eval_sets
from rl_megatron.evaluation.results import results_file
from rl_megatron.evaluation.sets import EvalSet, EvalSets, list_set_metric_names
from rl_megatron.rewards.metrics import RewardMetrics
from rl_megatron.runs.preflight import check_keep_best
from rl_megatron.topology.ranks import Ranks
from tests.unit.algorithms.fakes import Characters, completed, runner_of_completions

SUMS = "{name: sums, task: arithmetic, num_problems: 3, n: 4, temperature: 0.7, max_new_tokens: 4, every: 2}"
RUNNER = runner_of_completions()
BASE = ["algorithm=grpo", "data=arithmetic", "train.eval_every=3", "train.save_every=4"]


class Guessing:
    """An engine whose completions depend on the seed and the prompt's place; it records what it was asked for."""

    def __init__(self, answer):
        self.answer, self.calls = answer, []

    def complete(self, requests):
        if not requests:
            return []  # as on every rank but the first
        prompts = [list(request.prompt) for request in requests]
        self.calls.append((prompts, requests[0].sampling, requests[0].seed))
        texts = [self.answer(prompt, index) for index, prompt in enumerate(prompts)]
        return [
            completed(request, [ord(c) for c in text] + [0], "length" if text == "7777" else "stop")
            for request, text in zip(requests, texts, strict=True)
        ]


class Here:
    """A scorer that calls the task's reward in this process."""

    reads_sequences = False

    def __init__(self, settings, task, ranks, models=None):
        self.task, self.settings, self.closed = task, settings, False

    def score_samples(self, samples):
        return torch.tensor([self.task().reward(each.problem, each.completion) for each in samples]), RewardMetrics()

    def close(self):
        self.closed = True


@pytest.fixture(autouse=True)
def scored_here(monkeypatch):
    monkeypatch.setattr(eval_sets, "Scorer", Here)


def stage_with(*sets, more=()):
    return load_config([*BASE, f"eval.sets=[{','.join(sets)}]", *more]).first


def correct(prompt):
    text = "".join(map(chr, prompt))
    problems = {problem.prompt: problem.answer for problem in PROBLEMS}
    return problems[text]


PROBLEMS = read_set_problems(stage_with(SUMS), stage_with(SUMS).eval.sets[0]).problems


@pytest.fixture
def sums():
    return EvalSet(stage_with(SUMS), stage_with(SUMS).eval.sets[0], Characters(), Ranks())


def test_a_set_asks_for_n_samples_of_each_problem_with_its_own_sampling(sums):
    engine = Guessing(lambda prompt, index: correct(prompt))
    sums.evaluate(engine, RUNNER)
    ((prompts, sampling, _),) = engine.calls
    assert [("".join(map(chr, prompt))) for prompt in prompts] == [problem.prompt for problem in PROBLEMS] * 4
    assert (sampling.temperature, sampling.max_new_tokens) == (0.7, 4)


def test_the_metrics_of_a_set(sums):
    # Problem 0 is answered rightly twice, problem 1 always, problem 2 never.
    right = {0: 2, 1: 4, 2: 0}
    engine = Guessing(lambda prompt, i: correct(prompt) if i // 3 < right[i % 3] else "7777")
    metrics = sums.compute_metrics(sums.build_results(sums.evaluate(engine, RUNNER)))
    assert metrics["sums/avg@4"] == pytest.approx(0.5)
    assert metrics["sums/pass@2"] == pytest.approx((5 / 6 + 1 + 0) / 3)
    assert metrics["sums/maj@4"] == pytest.approx((0.5 + 1 + 0) / 3), "the right answer and 7777 tie on problem 0"
    assert metrics["sums/truncated"] == 0.5
    assert metrics["sums/avg@4_se"] == pytest.approx((0.25 / 3) ** 0.5)
    assert set(sums.metric_names) == {name for name in metrics if not name.endswith("_se")}


def test_more_samples_do_not_change_the_first_ones(monkeypatch):
    """A completion's random numbers follow from its block's seed and its place there."""
    monkeypatch.setattr(eval_sets, "COMPLETIONS_PER_BLOCK", 5)

    def asked(n):
        stage = stage_with(SUMS.replace("n: 4", f"n: {n}"))
        engine = Guessing(lambda prompt, index: correct(prompt))
        EvalSet(stage, stage.eval.sets[0], Characters(), Ranks()).evaluate(engine, RUNNER)
        return [(seed, i, prompt) for prompts, _, seed in engine.calls for i, prompt in enumerate(prompts)]

    few, many = asked(2), asked(4)
    assert (len(few), len(many)) == (6, 12) and many[:6] == few
    assert len({(seed, i) for seed, i, _ in many}) == 12


def test_sets_are_evaluated_when_they_are_due(tmp_path):
    other = "{name: other, task: arithmetic, num_problems: 2}"
    ends = "{name: ends, task: arithmetic, num_problems: 2, every: 0}"
    stage = stage_with(SUMS, other, ends)
    sets = EvalSets(stage, "grpo", Characters(), RUNNER, tmp_path)
    due = {step: [each.config.name for each in sets.select_due(step, step == 7)] for step in range(8)}
    everything = ["sums", "other", "ends"]
    assert due == {
        0: everything,
        1: [],
        2: ["sums"],
        3: ["other"],
        4: ["sums"],
        5: [],
        6: everything[:2],
        7: everything,
    }


def test_later_evaluations_are_compared_with_the_start_of_the_run(tmp_path):
    stage = stage_with(SUMS)
    sets = EvalSets(stage, "grpo", Characters(), RUNNER, tmp_path)
    first = sets.evaluate(0, sets.sets, Guessing(lambda prompt, i: correct(prompt) if i % 3 == 0 else "7777"))
    assert first["sums/avg@4"] == pytest.approx(1 / 3) and not any("_change" in name for name in first)
    later = EvalSets(stage, "grpo", Characters(), RUNNER, tmp_path)  # as after a restart
    second = later.evaluate(2, later.sets, Guessing(lambda prompt, i: correct(prompt)))
    assert second["sums/avg@4_change"] == pytest.approx(2 / 3)
    assert second["sums/avg@4_change_se"] == pytest.approx(1 / 3)
    assert 0.1 < second["sums/avg@4_change_p"] < 0.25
    harder = stage_with(SUMS.replace("max_new_tokens: 4", "max_new_tokens: 5"))
    others = EvalSets(harder, "grpo", Characters(), RUNNER, tmp_path)
    third = others.evaluate(4, others.sets, Guessing(lambda p, i: correct(p)))
    assert not any("_change" in name for name in third), "other sampling is not compared"


def evaluate_here(directory):
    runner = runner_of_completions(Ranks.detect())
    with mock.patch.object(eval_sets, "Scorer", Here):
        sets = EvalSets(stage_with(SUMS), "grpo", Characters(), runner, directory)
        return sets.evaluate(0, sets.sets, Guessing(lambda prompt, index: correct(prompt)))


@pytest.mark.change
def test_every_rank_has_the_metrics_which_rank_0_computes(tmp_path, ranks):
    first, second = ranks.run(2, evaluate_here, tmp_path)
    assert first == second and first["sums/avg@4"] == 1


def test_the_results_of_every_problem_are_in_a_parquet_file(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    sets = EvalSets(stage_with(SUMS), "grpo", Characters(), RUNNER, tmp_path)
    sets.evaluate(2, sets.sets, Guessing(lambda prompt, i: correct(prompt) if i % 3 == 0 else "7777"))
    table = parquet.read_table(results_file(tmp_path, "grpo", "sums", 2)).to_pylist()
    assert [line["answer"] for line in table] == [problem.answer for problem in PROBLEMS]
    assert table[0]["rewards"] == [1.0] * 4 and table[1]["completions"] == ["7777"] * 4
    assert table[1]["truncated"] == [True] * 4 and json.loads(table[0]["values"])["pass@1"] == 1.0


def test_the_best_checkpoint_by_a_set_needs_its_evaluation_at_every_checkpoint():
    names = list_set_metric_names(stage_with(SUMS), Characters())
    check_keep_best(stage_with(SUMS, more=["train.keep_best=sums/pass@2"]), names)
    with pytest.raises(ConfigError, match="sums/avg@8 is not an eval metric.*sums/avg@4"):
        check_keep_best(stage_with(SUMS, more=["train.keep_best=sums/avg@8"]), names)
    rarely = stage_with(SUMS.replace("every: 2", "every: 3"), more=["train.keep_best=sums/avg@4"])
    with pytest.raises(ConfigError, match="train.save_every=4 is not a multiple of the set's every=3"):
        check_keep_best(rarely, list_set_metric_names(rarely, Characters()))


def test_a_file_is_evaluated_as_a_whole_and_a_directory_by_its_held_out_split(tmp_path):
    lines = [json.dumps({"question": f"{i} + 1?", "answer": f"#### {i + 1}"}) + "\n" for i in range(6)]
    for name, content in (("train", lines[:4]), ("test", lines[4:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(content))
    for place, number in ((tmp_path, 2), (tmp_path / "train.jsonl", 4)):
        stage = stage_with(f"{{name: words, task: gsm8k, path: {place}}}")
        assert len(read_set_problems(stage, stage.eval.sets[0]).problems) == number


def test_prompts_of_a_file_are_scored_by_the_reward_functions(tmp_path):
    (tmp_path / "few.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "2+2=", "answer": "4"}\n')
    more = ["reward.functions=[exact_match]"]
    stage = stage_with(f"{{name: few, path: {tmp_path / 'few.jsonl'}}}", more=more)
    few = EvalSet(stage, stage.eval.sets[0], Characters(), Ranks())
    assert few.num_completions == 2 and not any("maj" in name for name in few.metric_names)
    assert [function.name for function in few.scorer.settings.functions] == ["exact_match"]


@pytest.mark.parametrize(
    ("one", "message"),
    [
        ("{name: a, task: gsm8k, path: nowhere.jsonl}", "eval.sets, the set a: .*nowhere.jsonl"),
        ("{name: a, task: unknown}", "eval.sets, the set a: .*unknown"),
        ("{name: a, task: {name: arithmetic, digits: 3}}", "eval.sets, the set a: .*digits"),
    ],
)
def test_mistakes_in_files_and_tasks_name_the_set(one, message):
    with pytest.raises(ConfigError, match=message):
        check_set_files(stage_with(one), None)


def test_too_few_problems_are_refused(tmp_path):
    stage = stage_with("{name: a, task: arithmetic, num_problems: 999999}")
    with pytest.raises(ConfigError, match="the set a: num_problems=999999 exceeds the"):
        read_set_problems(stage, stage.eval.sets[0])
    (tmp_path / "all.jsonl").write_text('{"question": "1 + 1?", "answer": "#### 2"}\n' * 4)
    stage = stage_with(f"{{name: a, task: {{name: gsm8k, heldout_fraction: 0}}, path: {tmp_path / 'all.jsonl'}}}")
    with pytest.raises(ConfigError, match="the set a: task=.*'heldout_fraction': 0.* holds out no problems"):
        read_set_problems(stage, stage.eval.sets[0])


def test_workers_of_all_sets_are_ended(tmp_path):
    sets = EvalSets(stage_with(SUMS), "grpo", Characters(), RUNNER, tmp_path)
    sets.close()
    assert all(each.scorer.closed for each in sets.sets)
