"""The section `eval`: sets and what is refused."""

import pytest

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.eval_sets import list_reported_ks, list_statistics
from rl_megatron.config.loading.load import from_yaml, load_config, to_yaml
from rl_megatron.config.metrics import higher_is_better, is_better, is_eval_metric
from rl_megatron.runs.rerun import MAY_CHANGE

SUMS = "{name: sums, task: arithmetic, n: 4, temperature: 0.7, max_new_tokens: 5, every: 2}"
GRPO = ["algorithm=grpo", "data=arithmetic"]


def test_a_stage_has_no_sets_unless_they_are_given():
    assert load_config([]).first.eval.sets == ()


def test_a_set_has_its_own_sampling_and_survives_config_yaml():
    config = load_config([*GRPO, f"eval.sets=[{SUMS},{{name: greedy, task: {{name: arithmetic, max_operand: 9}}}}]"])
    sums, greedy = config.first.eval.sets
    assert (sums.name, sums.task, sums.n, sums.temperature) == ("sums", {"name": "arithmetic"}, 4, 0.7)
    assert (greedy.task, greedy.n, greedy.every) == ({"name": "arithmetic", "max_operand": 9}, 1, None)
    assert from_yaml(to_yaml(config), "config.yaml") == config


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (
            "{name: a, task: arithmetic},{name: a, task: arithmetic}",
            r"eval.sets\[1\].name=a is also the name of another",
        ),
        ("{name: a}", r"eval.sets\[0\] \(a\) has no problems; set its path, its task"),
        ("{name: a, task: {max_operand: 9}}", r"eval.sets\[0\].task \(a\) has no name"),
        ("{name: a, path: x.jsonl}", r"nothing that scores its answers; set its task, or reward.functions"),
        ("{name: a, task: arithmetic, n: 2, temperature: 0}", r"eval.sets\[0\].n=2 .*greedy samples .* all the same"),
        ("{name: a/b, task: arithmetic}", r"eval.sets\[0\].name=.?a/b"),
        ("{name: a, task: arithmetic, n: 0}", r"eval.sets\[0\].n=0"),
        ("{name: a, task: arithmetic, samples: 3}", r"unknown key 'eval.sets\[0\].samples'"),
        ("{name: a, task: mine.py:Sums}", r"eval.sets\[0\].task.name"),
    ],
)
def test_mistakes_in_sets_name_the_set(sets, message):
    with pytest.raises(ConfigError, match=message):
        load_config([*GRPO, f"eval.sets=[{sets}]"])


def test_a_reward_model_has_no_sets():
    with pytest.raises(ConfigError, match="eval.sets needs a language model.*algorithm=reward_model"):
        load_config(["algorithm=reward_model", "data.path=x", "loss=preference", f"eval.sets=[{SUMS}]"])


def test_statistics_of_a_set_are_eval_metrics_with_a_direction():
    for name in (*list_statistics(8, has_answers=True), "maj@3"):
        assert is_eval_metric(f"aime-24.x/{name}"), name
    for name in ("aime/avg@8_se", "aime/avg", "aime/avg@0", "avg@8", "aime/length@2", "aime/reward", "a/b/avg@8"):
        assert not is_eval_metric(name), name
    assert higher_is_better("aime/pass@4") and not higher_is_better("aime/length")
    assert is_better("a/avg@2", 0.6, 0.5) and is_better("a/truncated", 0.1, 0.5) and not is_better("a/avg@2", 0.5, 0.5)


def test_the_best_checkpoint_can_be_chosen_by_a_set():
    assert load_config(["train.keep_best=aime/pass@8"]).first.train.keep_best == "aime/pass@8"
    with pytest.raises(ConfigError, match="train.keep_best='aime/pas@8'.*of a set of eval.sets"):
        load_config(["train.keep_best=aime/pas@8"])


def test_pass_at_k_is_reported_for_powers_of_two_and_all_samples():
    assert [list_reported_ks(n) for n in (1, 2, 6, 8)] == [(1,), (1, 2), (1, 2, 4, 6), (1, 2, 4, 8)]


def test_sets_may_change_when_a_run_is_resumed():
    assert "eval." in MAY_CHANGE["evaluation"]
