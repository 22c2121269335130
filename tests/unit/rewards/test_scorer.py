"""Rewards of samples, from several functions and on several ranks."""

import dataclasses
import os
from pathlib import Path

import pytest
import torch

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.loading.load import load_config
from rl_megatron.config.rewards import RewardConfig, RewardFunctionConfig
from rl_megatron.data.tasks import Problem
from rl_megatron.rewards import workers
from rl_megatron.rewards.loading import check_rewards
from rl_megatron.rewards.metrics import RewardMetrics
from rl_megatron.rewards.scorer import RewardFailed, Scorer
from rl_megatron.rewards.workers import WORKER_MODULE
from rl_megatron.topology.ranks import Ranks
from tests.child_processes import children_with
from tests.unit.rewards.user_file import Spelled

FILE = str(Path(__file__).parent / "user_file.py")


def function(name, **keys):
    return RewardFunctionConfig(path=FILE, name=name, **keys)


def scored(config, completions, task=None, **record):
    """Return the rewards and the metrics of completions, or the error, as every rank sees them."""
    scorer = Scorer(config, lambda: task, Ranks())
    problems = [Problem(f"prompt {text}", "a", record) for text in completions]
    try:
        ids = [[0] * len(text) for text in completions]
        rewards, metrics = scorer.score(problems, completions, ids, [False] * len(completions))
        return rewards, metrics.values()
    finally:
        scorer.close()


def test_the_reward_is_the_weighted_sum_of_the_scores():
    config = RewardConfig(
        functions=(function("length", weight=0.5), function("fields", weight=2.0), function("everything", weight=0.0))
    )
    rewards, metrics = scored(config, ["a", "bbb"], level=4)
    assert torch.equal(rewards, torch.tensor([0.5 + 2.0, 1.5])) and rewards.dtype == torch.float32
    assert metrics == {
        "reward_length_score": 2.0, "reward_fields_score": 0.5, "reward_fields_level": 4.0, "reward_fields_cut": 0.0,
        "reward_everything_score": 0.5,
    }  # fmt: skip


def test_without_functions_the_reward_is_the_tasks():
    rewards, metrics = scored(RewardConfig(), ["1", "2", "-0.25"], Spelled())
    assert rewards.tolist() == [1.0, 2.0, -0.25] and metrics == {}
    with pytest.raises(ValueError):
        Scorer(RewardConfig(), Spelled, Ranks()).score([Problem("a", "1")] * 2, ["1"], [[1]], [False])


@pytest.mark.parametrize("reward", ["nan", "inf", "-inf"])
def test_a_reward_that_is_not_finite_names_task_prompt_and_completion(reward):
    with pytest.raises(RewardFailed) as refused:
        scored(RewardConfig(), ["1", reward], Spelled())
    for word in ("'spelled'", f"'prompt {reward}'", repr(reward), "finite", "reward.on_error=zero"):
        assert word in str(refused.value)


def test_a_reward_that_overflows_as_a_32_bit_number_is_a_failure():
    with pytest.raises(RewardFailed, match=r"'spelled' returned 1e\+300; a reward must be finite as a 32-bit number"):
        scored(RewardConfig(), ["1e300"], Spelled())
    heavy = RewardConfig(functions=(function("length", weight=1e38), function("everything")), on_error="zero")
    rewards, metrics = scored(heavy, ["a", "bbbb"])
    assert rewards.tolist() == [torch.tensor(1e38).item(), 0.0] and metrics["reward_length_errors"] == 1.0
    with pytest.raises(RewardFailed, match=r"'length' scored 4, and with the weight 1e\+38 the reward is not finite"):
        scored(dataclasses.replace(heavy, on_error="error"), ["bbbb"])


def test_workers_that_cannot_start_are_an_error_that_names_them(monkeypatch):
    def refused(*arguments, **options):
        raise OSError("too many processes")

    monkeypatch.setattr(workers, "ChildProcess", refused)
    scorer = Scorer(RewardConfig(functions=(function("length"),)), lambda: None, Ranks())
    scorer.start()  # the other ranks do not learn of it here
    with pytest.raises(RewardFailed, match="the reward workers cannot continue: .*too many processes"):
        scorer.score([Problem("p", "a")], ["x"], [[1]], [False])


def test_a_failure_that_scores_zero_is_counted_and_logged(logged):
    config = RewardConfig(functions=(function("misbehave"), function("length", weight=0.5)), on_error="zero")
    rewards, metrics = scored(config, ["none", "x"] + ["raise"] * 6)
    assert rewards.tolist() == [2.0, 1.5] + [2.5] * 6
    assert metrics["reward_misbehave_errors"] == 7.0 and metrics["reward_misbehave_score"] == 1.0
    assert metrics["reward_length_errors"] == 0.0 and "reward_misbehave_timeouts" not in metrics
    named = [message for message in logged if "'misbehave'" in message]
    assert len(named) == 5 and "only counted" in named[-1]
    assert "returned None" in named[0] and "'prompt none'" in named[0] and "completion 'none'" in named[0]


def test_a_function_may_leave_samples_to_the_others():
    config = RewardConfig(functions=(function("trl"), function("length")))
    rewards, metrics = scored(config, ["aa"], solution="skip")
    assert rewards.tolist() == [2.0] and "reward_trl_score" not in metrics
    alone = RewardConfig(functions=(function("trl"),))
    with pytest.raises(RewardFailed, match="'trl' does not apply to the sample, and no other function does"):
        scored(alone, ["aa"], solution="skip")


def test_metrics_add_up_over_calls():
    first, second = RewardMetrics(), RewardMetrics()
    for value in (1.0, 2.0):
        first.observe("score", value)
    second.observe("score", 6.0)
    for metrics in (first, second):
        metrics.count("errors", 2)
    first.add(second)
    assert first.values() == {"score": 3.0, "errors": 4.0}


def on_each_node(config, completions, num_nodes, record):
    """Score on a rank of `num_nodes` nodes; return the rewards or the error, and whether this rank has workers.

    Only rank 0 has samples.
    """
    if num_nodes == 2:
        os.environ["LOCAL_RANK"] = "0"
    scorer = Scorer(config, Spelled, Ranks.detect())
    completions = completions if torch.distributed.get_rank() == 0 else []
    problems = [Problem("p", "a", record) for _ in completions]
    try:
        rewards, metrics = scorer.score(problems, completions, [[0]] * len(completions), [False] * len(completions))
        outcome = rewards.tolist(), metrics.values()
    except (RewardFailed, ConfigError) as error:
        outcome = type(error), str(error)
    finally:
        has_workers = bool(children_with(WORKER_MODULE))
        scorer.close()
    return outcome, has_workers


@pytest.mark.change
@pytest.mark.parametrize("num_nodes", [1, 2])
def test_rank_0_gets_the_rewards_of_its_samples_from_the_workers_of_all_nodes(ranks, num_nodes):
    config = RewardConfig(functions=(function("trl"), function("fields"), function("judge")), num_workers=2)
    texts = ["a", "b", "a", "ccc", "dd"]
    (first, has_workers), (second, second_has) = ranks.run(
        2, on_each_node, config, texts, num_nodes, {"level": 1, "solution": "a"}
    )
    assert first[0] == [2 * (text == "a") + len(text) for text in texts]
    assert second == ([], {})
    assert (has_workers, second_has) == (True, num_nodes == 2)
    assert first[1]["reward_trl_seen"] == len(texts), "a list function gets the samples of all nodes"


@pytest.mark.change
@pytest.mark.parametrize("text", ["sleep", "raise", "exit"])
def test_a_failure_on_one_node_ends_the_run_on_all_ranks(ranks, text):
    config = RewardConfig(functions=(function("misbehave"),), timeout_seconds=0.5, num_workers=1)
    (first, _), (second, _) = ranks.run(2, on_each_node, config, ["well", text, "well"], 2, {})
    assert first == second and first[0] is RewardFailed
    assert "'misbehave'" in first[1] and f"completion {text!r}" in first[1]


@pytest.mark.change
def test_a_file_that_is_missing_on_the_workers_is_an_error_on_all_ranks(ranks, tmp_path):
    config = RewardConfig(functions=(RewardFunctionConfig(path=str(tmp_path / "gone.py"), name="f"),))
    (first, _), (second, _) = ranks.run(2, on_each_node, config, ["x"], 1, {})
    assert first == second and first[0] is ConfigError and "there is no file" in first[1]


def test_samples_have_their_whole_sequence_if_a_reward_model_reads_it():
    served = RewardFunctionConfig(name="reward_model", kwargs={"url": "http://127.0.0.1:9/pooling", "model": "m"})
    for functions, reads in (((served,), True), ((function("reward_model"),), False), ((), False)):
        assert Scorer(RewardConfig(functions=functions), lambda: None, Ranks()).reads_sequences == reads


def test_reward_functions_are_checked_with_the_own_problems_of_an_evaluation(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def graded(completion, level):\n    return 1.0\n")
    for name, fields in (("answers", '"question": "1", "answer": "2"'), ("leveled", '"question": "1", "level": 3')):
        (tmp_path / f"{name}.jsonl").write_text(f"{{{fields}}}\n" * 4)
    options = ["algorithm=sft", "data.path=answers.jsonl", "reward.functions=[{path: mine.py, name: graded}]"]
    for name in ("leveled", "answers"):
        stage = load_config([*options, f"eval.sets=[{{name: own, path: {name}.jsonl}}]"]).first
        if name == "leveled":  # the data that is learned from has no level, and no completion that is scored
            check_rewards(stage, loads=True)
        else:
            with pytest.raises(ConfigError, match="'level', .*answers.jsonl:1"):
                check_rewards(stage, loads=True)


def test_all_records_are_checked_for_a_reference_answer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    records = ['{"prompt": "a", "answer": "b"}\n'] * 6
    wrong = '{"prompt": "a", "answr": "b"}\n'
    (tmp_path / "right.jsonl").write_text("".join(records))
    (tmp_path / "last.jsonl").write_text("".join(records) + wrong)
    (tmp_path / "wrong.jsonl").write_text(wrong * 7)
    for path, heldout, sets, location in (
        ("last", "data.eval_path=right.jsonl", "[]", "last.jsonl:7"),
        ("right", "data.eval_path=wrong.jsonl", "[]", "wrong.jsonl:1"),
        ("right", "data.eval_path=right.jsonl", "[{name: own, path: last.jsonl}]", "last.jsonl:7"),
    ):
        stage = load_config(
            [
                "algorithm=grpo",
                f"data.path={path}.jsonl",
                heldout,
                f"eval.sets={sets}",
                "reward.functions=[exact_match]",
            ]
        ).first
        with pytest.raises(ConfigError, match=rf"exact_match needs the reference answer .*{location}"):
            check_rewards(stage, loads=True)
