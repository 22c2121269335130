"""The steps of a stage: when it evaluates and saves, where it resumes, and the evaluations on held-out data."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from rl_megatron.batching.batch import Batch
from rl_megatron.batching.shared_prefixes import PREFIX_SET
from rl_megatron.checkpoint.resumed_state import ResumedState
from rl_megatron.checkpoint.save import SaveFailed
from rl_megatron.config.algorithms import GRPOConfig
from rl_megatron.config.loading.load import load_config
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.data.encoding import EncodedPrompt
from rl_megatron.data.order import ShuffledEpochs
from rl_megatron.data.sources import HeldoutBatch
from rl_megatron.data.tasks import Problem
from rl_megatron.evaluation.heldout import HeldoutAnswers, HeldoutPairs, HeldoutProblems, HeldoutText
from rl_megatron.generation.interfaces import Sampling
from rl_megatron.losses import NLLLoss, build_loss
from rl_megatron.runs import checkpointer
from rl_megatron.runs import stage as stage_module
from rl_megatron.runs.evaluations import Evaluations
from rl_megatron.runs.stage import Stage
from rl_megatron.runs.stopping import RunStopped, Stopping
from rl_megatron.runs.verify import find_last_manifest
from rl_megatron.timing import PhaseTimer
from rl_megatron.training.metrics import NonFiniteLoss
from tests.unit.algorithms.fakes import ONE_RANK, Characters, Echo, ScoredHere, Scripted, rollouts_of, whole


class Policy:
    """A policy whose checkpoints are step numbers, with a NaN loss at a chosen step."""

    scheduler = SimpleNamespace(num_steps=0)
    topology = ONE_RANK

    def __init__(self, log, nan_at=None):
        self.log, self.nan_at, self.trained = log, nan_at, 0

    def as_batch(self, data):
        return data if isinstance(data, Batch) else Batch.from_whole(data)

    def train(self, batch, loss_fn, **options):
        self.trained += 1
        if self.trained == self.nan_at:
            raise NonFiniteLoss("the loss is nan (first seen in microbatch 0); metrics: loss=nan")
        self.log.append(("train", options))
        return {"loss": 0.5}

    def begin_checkpoint(self, directory, step, results, **kept):
        self.log.append(("save", step, dict(results)))
        return Written()

    def load_checkpoint(self, path, verify):
        self.log.append(("load", path))
        return {"step": int(path), "results": {"measures": {"accuracy": 0.25}, "samples": []}, "stage_state": {}}


class Written:
    """A save that is complete at once."""

    def is_written(self):
        return True

    def finish(self):
        pass


class Silent:
    """A metrics logger that writes into a list."""

    def __init__(self, log):
        self.log = log

    def begin_stage(self, stage, start, steps, metric):
        self.log.append(("begin", start))

    def has_steps(self, stage):
        return False

    def show_phase(self, phase):
        pass

    def end_stage(self):
        self.log.append(("end",))

    def record(self, step, metrics, kind="train"):
        self.log.append((kind, step))

    def record_samples(self, step, samples):
        pass

    def finish_writing(self):
        pass


class Engine:
    """An engine that writes into a list when it sleeps."""

    def __init__(self, log):
        self.log = log

    def sleep(self):
        self.log.append(("sleep",))


class Sets:
    """Two named sets: one that reaches a goal, which is due every 2 steps, and one that is due at the end only."""

    def select_due(self, step, last):
        return [name for name, is_due in (("often", last or step % 2 == 0), ("late", last)) if is_due]

    def evaluate(self, step, sets, engine):
        return {f"{name}/avg@1": 0.5 for name in sets}


@pytest.fixture
def make(monkeypatch):
    """`make(log, saved=…, steps=…)`: a stage that logs what happens."""

    def build(log, saved=(), nan_at=None, **train):
        for module in (stage_module, checkpointer):
            monkeypatch.setattr(module, "find_checkpoints", lambda directory: list(saved))
        monkeypatch.setattr(
            checkpointer, "delete_older", lambda directory, keep, *_: log.append(("delete older", keep))
        )
        monkeypatch.setattr(ResumedState, "load", lambda *_: None)  # the checkpoint of the policy here keeps nothing
        config = load_config([])
        config = replace(config.first, train=replace(config.first.train, **train))
        policy, logger, timer = Policy(log, nan_at), Silent(log), PhaseTimer()
        heldout = SimpleNamespace(evaluate=lambda policy, engine: ({"accuracy": 0.75}, ["sample"]))
        evaluations = Evaluations("sft", config.train, policy, Engine(log), heldout, logger, timer)
        return Stage("sft", config, policy, Characters(), logger, "here", evaluations, "a", timer=timer)

    return build


def walk(stage, log):
    for step in stage.steps():
        log.append(("step", step))
    return log


def happened(log, *kinds):
    return [entry[:2] for entry in log if entry[0] in kinds]


def test_a_goal_that_an_evaluation_reaches_ends_the_stage(make):
    log = []
    walk(make(log, steps=6, eval_every=2, stop_at={"accuracy": 0.75}), log)
    assert happened(log, "step", "eval", "save") == [
        ("eval", 0), ("step", 1), ("step", 2), ("eval", 2), ("save", 2),
    ]  # fmt: skip
    log = []
    walk(make(log, steps=3, eval_every=2, stop_at={"accuracy": 0.76}), log)
    assert happened(log, "step", "save") == [("step", 1), ("step", 2), ("step", 3), ("save", 3)]


def test_what_was_not_due_when_a_goal_was_reached_is_evaluated_then(make):
    log = []
    stage = make(log, steps=6, eval_every=3, stop_at={"often/avg@1": 0.5})
    stage.evaluations.sets = Sets()
    walk(stage, log)
    assert happened(log, "step", "eval", "save") == [
        ("eval", 0), ("step", 1), ("step", 2), ("eval", 2), ("eval", 2), ("save", 2),
    ]  # fmt: skip
    assert stage.evaluations.results["measures"] == {"often/avg@1": 0.5, "late/avg@1": 0.5, "accuracy": 0.75}


def test_a_run_that_is_asked_to_stop_after_a_save_that_failed_saves_again(make):
    log = []
    stage = make(log, steps=6, save_every=2, eval_every=0)
    save = stage.policy.begin_checkpoint
    failures = [SaveFailed("the disk is full")]

    def fail_once(*arguments, **keywords):
        if failures:
            raise failures.pop()
        return save(*arguments, **keywords)

    stage.policy.begin_checkpoint = fail_once
    stage.stopping = Stopping(environment={})
    stage.stopping.reason = lambda: "SIGTERM was received" if ("step", 2) in log else None
    with pytest.raises(RunStopped, match="stopped after step 2"):
        walk(stage, log)
    assert not failures and happened(log, "step", "save") == [("step", 1), ("step", 2), ("save", 2)]


def test_a_stage_evaluates_at_start_and_end_and_saves_at_the_end(make):
    """The engine sleeps before training goes on, which needs its memory."""
    log = []
    walk(make(log, steps=3), log)
    assert log == [
        ("begin", 0),
        ("sleep",),
        ("eval", 0),
        ("step", 1),
        ("step", 2),
        ("step", 3),
        ("sleep",),
        ("eval", 3),
        ("save", 3, {"measures": {"accuracy": 0.75}, "samples": ["sample"]}),
        ("delete older", 2),
        ("end",),
    ]


@pytest.mark.parametrize(
    ("shares", "samples", "warns"), [([0, 0, 0], 8, 1), ([0, 0.25, 0], 8, 0), ([0, 0, 0], 1, 0), ([], 8, 0)]
)
def test_a_stage_whose_groups_all_had_equal_rewards_ends_with_a_warning(make, caplog, shares, samples, warns):
    stage = make([], steps=3)
    stage.config = replace(stage.config, algorithm=GRPOConfig(samples_per_prompt=samples))
    for step in stage.steps():
        stage.record(step, {"informative_groups": shares[step - 1]} if shares else {})
    assert caplog.text.count("stage sft: the rewards were equal within every group of every step") == warns


def test_evaluations_and_checkpoints_come_when_due(make):
    log = []
    walk(make(log, steps=7, eval_every=3, save_every=2, keep_checkpoints=1), log)
    assert happened(log, "eval") == [("eval", step) for step in (0, 3, 6, 7)]
    assert happened(log, "save") == [("save", step) for step in (2, 4, 6, 7)]
    assert happened(log, "delete older") == [("delete older", 1)] * 4
    assert log.index(("eval", 6)) < log.index(("save", 6, {"measures": {"accuracy": 0.75}, "samples": ["sample"]}))


def test_a_resumed_stage_continues_after_the_newest_checkpoint(make):
    log = []
    stage = make(log, saved=["2", "4"], steps=6)
    walk(stage, log)
    assert log[:2] == [("load", "4"), ("begin", 4)]
    assert happened(log, "step") == [("step", 5), ("step", 6)]
    assert happened(log, "eval") == [("eval", 6)], "the evaluation at the start was done by the run before"


def test_a_stage_resumed_at_its_end_takes_no_step_and_has_its_results(make):
    log = []
    stage = make(log, saved=["6"], steps=6)
    walk(stage, log)
    assert log == [("load", "6"), ("begin", 6), ("end",)]
    assert stage.evaluations.results["measures"] == {"accuracy": 0.25}


def test_the_display_ends_when_a_training_loop_fails(make):
    log = []
    steps = make(log, steps=3).steps()
    next(steps)
    steps.close()
    assert log[-1] == ("end",)


def test_a_nan_names_stage_and_step_and_keeps_the_cause(make):
    log = []
    stage = make(log, steps=3, nan_at=2)
    stage.train(1, whole({"token_mask": torch.ones(1, 2)}), None)
    with pytest.raises(NonFiniteLoss, match=r"^stage sft, step 2: the loss is nan .*microbatch 0.*metrics: loss=nan"):
        stage.train(2, whole({"token_mask": torch.ones(1, 2)}), None)


def test_a_dictionary_becomes_a_batch_before_it_is_trained_on(make):
    log = []
    stage = make(log, steps=1)
    ids = torch.ones(2, 3, dtype=torch.long)
    values = {"input_ids": ids, "token_mask": ids.float(), "trajectory": torch.tensor([0, 0])}
    stage.train(1, values, NLLLoss())
    assert log[-1] == ("train", {"sizes": [2]})


def test_a_policy_learns_that_a_rollout_is_on_policy(make):
    """Then a loss may take the logprobs of before the step from the step itself, if a batch does not have them."""
    log = []
    stage = make(log, steps=3)
    for loss in (build_loss("clipped_pg"), NLLLoss()):
        stage.train(1, whole({"token_mask": torch.ones(2, 3)}), loss)
    assert log[-2:] == [("train", {"on_policy": True}), ("train", {})]


def test_a_finished_stage_is_known_by_its_last_step(monkeypatch, tmp_path):
    config = load_config(["train.steps=6"]).first
    manifest = {"step": 6, "results": {"measures": {}}}
    monkeypatch.setattr("rl_megatron.runs.verify.find_checkpoints", lambda directory: [tmp_path])
    monkeypatch.setattr("rl_megatron.runs.verify.read_manifest", lambda path, model: manifest)
    assert find_last_manifest(tmp_path, config) == manifest
    manifest["step"] = 5
    assert find_last_manifest(tmp_path, config) is None
    monkeypatch.setattr("rl_megatron.runs.verify.find_checkpoints", lambda directory: [])
    assert find_last_manifest(tmp_path, config) is None


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        (["algorithm=sft", "train.steps=7"], 7),
        (["algorithm=grpo", "train.steps=7", "train.global_batch_size=256"], 7),
        (["algorithm=grpo", "train.steps=7", "train.global_batch_size=128"], 14),
        (["algorithm=grpo", "train.steps=7", "train.global_batch_size=100"], 21),
        (["algorithm=grpo", "train.steps=7", "train.global_batch_size=128", "algorithm.updates_per_rollout=3"], 42),
    ],
)
def test_the_schedule_counts_optimizer_steps(overrides, steps):
    """32 prompts with 8 samples are 256 sequences, `global_batch_size` of them in an optimizer step."""
    stage = load_config(overrides).first
    assert stage.algorithm.optimizer_steps(stage.train) == steps


def test_heldout_problems_are_answered_and_scored():
    problems = [Problem(prompt, "1") for prompt in "abcdefgh"]
    prompts = [EncodedPrompt([ord(each.prompt)], each, each.as_record()) for each in problems]
    engine = Scripted({prompt: ["1" if prompt < "c" else "0"] for prompt in "abcdefgh"})
    evaluation = HeldoutProblems(prompts, Characters(), Sampling(4, temperature=0.0), "accuracy")
    evaluation = evaluation.with_rollouts(rollouts_of(ScoredHere(Echo())))
    measures, samples = evaluation.evaluate(None, engine)
    assert measures == {"accuracy": 0.25}
    assert samples[0] == {"prompt": "a", "completion": "1", "answer": "1", "reward": 1.0}
    assert [sample["prompt"] for sample in samples] == list("abcdef"), "a few of them"


def test_heldout_text_is_evaluated_in_one_batch_without_training():
    class Measuring:
        def train(self, batch, loss_fn, **options):
            assert isinstance(loss_fn, NLLLoss)
            assert options == {"eval_mode": True, "gbs": 5}
            return {"loss": 2.0}

    batch = BatchedDataDict(input_ids=torch.zeros(5, 3, dtype=torch.long))
    assert HeldoutAnswers(batch).evaluate(Measuring()) == ({"nll_per_token": 2.0}, [])
    assert HeldoutText(batch, 0.25).evaluate(Measuring()) == ({"nll_per_token": 2.0, "nll_per_character": 0.5}, [])
    assert HeldoutText(batch).evaluate(Measuring()) == ({"nll_per_token": 2.0, "nll_per_character": 2.0}, [])


class Pairs:
    """A dataset of ten pairs whose batches are the numbers of the pairs."""

    group_size = 2

    def __len__(self):
        return 10

    def batch(self, items):
        return list(items)


def test_batches_are_those_of_the_step_in_whole_pairs(make):
    """A batch of 8 sequences is 4 pairs; five batches are two epochs."""
    order = ShuffledEpochs(10, load_config([]).first.train.seed)
    drawn = list(make([], steps=5, global_batch_size=8).whole_batches(Pairs()))
    assert drawn == [(step, order.items(4 * (step - 1), 4)) for step in range(1, 6)]
    resumed = list(make([], saved=["3"], steps=5, global_batch_size=8).whole_batches(Pairs()))
    assert resumed == drawn[3:]


def test_distinct_batches_have_every_item_of_the_steps_once(make):
    order = ShuffledEpochs(10, load_config([]).first.train.seed)
    drawn = list(make([], steps=5, global_batch_size=8).distinct_batches(Pairs()))
    first, second, third = (order.items(start, 4) for start in (0, 4, 8))
    assert drawn[:2] == [first, second] and set(drawn[2]) == set(third) - {*first, *second}
    assert sorted(sum(drawn, [])) == list(range(10)), "no item of the second epoch comes again"
    few = list(make([], steps=1, global_batch_size=8).distinct_batches(Pairs()))
    assert few == [first], "nor one that no step reads"


class Judge:
    """A model with scripted logprobs and scores."""

    def __init__(self, head, **answers):
        self.model, self.answers = SimpleNamespace(head=head), answers
        self.reference = answers.get("reference_logprobs")

    def __getattr__(self, name):
        renamed = {"get_reference_policy_logprobs": "reference_logprobs", "score": "scores"}
        key = renamed.get(name, name.removeprefix("get_"))
        return lambda batch: {key: self.answers[key]}


PAIR_MASK = torch.tensor([[0.0, 1.0, 1.0, 1.0], [0.0, 1.0, 0.0, 0.0]] * 2)


def test_preference_is_by_sum_or_per_token():
    logprobs = torch.tensor([[9.0, -1.0, -1.0, -1.0], [9.0, -2.0, 9.0, 9.0]] * 2)
    batch = BatchedDataDict(token_mask=PAIR_MASK)
    assert HeldoutPairs(batch).evaluate(Judge("lm", logprobs=logprobs))[0] == {
        "preference_accuracy": 0.0, "preference_margin": -1.0,
    }  # fmt: skip
    assert HeldoutPairs(batch, per_token=True).evaluate(Judge("lm", logprobs=logprobs))[0] == {
        "preference_accuracy": 1.0, "preference_margin": 1.0,
    }  # fmt: skip


def test_rewards_are_relative_to_the_reference_and_ties_count_half():
    logprobs, reference = -PAIR_MASK, -PAIR_MASK.clone()
    reference[0, 1] = -3.0
    measured, _ = HeldoutPairs(BatchedDataDict(token_mask=PAIR_MASK)).evaluate(
        Judge("lm", logprobs=logprobs, reference_logprobs=reference)
    )
    assert measured["reward_accuracy"] == 0.75 and measured["reward_margin"] == 1.0


def test_a_reward_model_is_evaluated_by_its_scores():
    measured, _ = HeldoutPairs(BatchedDataDict(token_mask=PAIR_MASK)).evaluate(
        Judge("score", scores=torch.tensor([2.0, 1.0, 0.0, 4.0]))
    )
    assert measured == {"preference_accuracy": 0.5, "preference_margin": -1.5}


@pytest.mark.parametrize(("average", "per_token"), [("true", True), ("false", False)])
def test_pairs_are_compared_as_the_loss_compares_them(average, per_token):
    config = load_config(["algorithm=dpo", "loss=dpo", "data=gsm8k_pairs", "data.path=x",
                   f"loss.preference_average_log_probs={average}"]).first  # fmt: skip
    assert HeldoutPairs.from_stage(config, HeldoutBatch(BatchedDataDict()), Characters()).per_token is per_token


@pytest.mark.parametrize("setting", ["auto", "off"])
def test_held_out_pairs_may_share_their_prompts(setting):
    config = load_config(
        ["algorithm=dpo", "loss=dpo", "data=gsm8k_pairs", "data.path=x", f"train.share_prefixes={setting}"]
    ).first
    heldout = HeldoutPairs.from_stage(config, HeldoutBatch(BatchedDataDict(token_mask=PAIR_MASK)), Characters())
    read = []
    policy = Judge("lm", logprobs=torch.zeros(PAIR_MASK.shape))
    policy.get_logprobs = lambda batch: read.append(batch) or {"logprobs": torch.zeros(PAIR_MASK.shape)}
    heldout.evaluate(policy)
    sets = read[0].get(PREFIX_SET)
    assert sets is None if setting == "off" else sets.tolist() == [number // 2 for number in range(len(PAIR_MASK))]


def test_a_warning_names_the_records_that_its_step_has_learned_from(make, caplog):
    stage = make([], equal_rewards_steps=1)
    lines = lambda number: [f"a.jsonl:{2 * number + item}" for item in (1, 2)]  # noqa: E731
    stage.use_loader(SimpleNamespace(is_streamed=False, locations=lines))
    batch = BatchedDataDict(
        input_ids=torch.tensor([[97], [98]]), input_lengths=torch.ones(2).long(), rewards=torch.ones(2)
    )
    stage.record(2, stage.train(2, batch, NLLLoss()))  # a dictionary, as loops of users have it
    assert "all rewards are 1 in 1 steps in a row" in caplog.text
    assert "sequences 0 (a.jsonl:3): 'a', 1 (a.jsonl:4): 'b'" in caplog.text


def test_parts_that_end_with_a_stage_are_known_in_their_order(make):
    stage, parts = make([]), [SimpleNamespace(close=lambda: None) for _ in range(2)]
    for part in parts:
        stage.close_at_end(part)
    assert stage.closing == parts
