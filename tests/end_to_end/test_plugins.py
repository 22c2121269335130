"""A module outside the package adds a loss, a task, a data source and an algorithm, and a run uses all of them."""

import shutil

import pytest
import yaml

from tests.end_to_end.launch import TINY, checkpoints, metrics

PLUGIN = """
from dataclasses import dataclass
from typing import ClassVar, Literal

from rl_megatron.algorithms.registry import LossNeeds, register_algorithm
from rl_megatron.config.data import ANSWERS
from rl_megatron.config.loading.settings import Positive, section
from rl_megatron.config.schema import AlgorithmConfig, DataConfig
from rl_megatron.data.datasets import PromptAnswerDataset
from rl_megatron.data.sources import DataSource, HeldoutBatch, register_source
from rl_megatron.data.tasks import Demonstration, Problem, register_task
from rl_megatron.losses import NLLLoss
from rl_megatron.losses.registry import configured_loss
from rl_megatron.losses.registry import register_loss
from rl_megatron.config.loading.settings import parse_settings


@dataclass(frozen=True)
class ScaledConfig:
    scale: float = 1.0


@register_loss("scaled_nll")
class ScaledNLL(NLLLoss):
    def __init__(self, cfg=None):
        super().__init__()
        self.settings = parse_settings(ScaledConfig, cfg)

    def evaluate(self, *args, **kwargs):
        loss, metrics = super().evaluate(*args, **kwargs)
        loss = self.settings.scale * loss
        return loss, {**metrics, "loss": loss.detach()}


@register_task("reverse")
@dataclass(frozen=True)
class Reverse:
    letters: int = 3

    def train_problems(self, count=None, seed=0):
        words = [f"{number:0{self.letters}d}" for number in range(100)]
        return [Problem(word + ">", word[::-1]) for word in words[10:]]

    def heldout_problems(self, count=None, seed=0):
        return [Problem(f"{number:0{self.letters}d}>", "") for number in range(10)][:count]

    def demonstrations(self, count=None, seed=0):
        return [Demonstration(problem.prompt, problem.answer) for problem in self.train_problems()]

    def reward(self, problem, completion):
        return float(len(completion)) / 10


@section
class WordsConfig(DataConfig):
    provides: ClassVar[tuple[str, ...]] = (ANSWERS,)
    heldout_kind: ClassVar[str] = ANSWERS
    reads_path: ClassVar[bool] = False

    source: Literal["words"] = "words"
    words: tuple[str, ...]
    repeats: Positive = 8


@register_source(WordsConfig)
class Words(DataSource[WordsConfig]):
    def texts(self):
        yield from self.data.words

    def dataset(self, kind, tokenizer):
        shown = [Demonstration(word, word).as_record() for word in self.data.words] * self.data.repeats
        return PromptAnswerDataset(shown, self.renderer(tokenizer), self.stage.model.max_sequence_length)

    def heldout(self, tokenizer):
        return HeldoutBatch(self.dataset(ANSWERS, tokenizer).batch(range(2)))


@section
class PassesConfig(AlgorithmConfig):
    learns_from: ClassVar[str] = ANSWERS

    name: Literal["passes"] = "passes"
    passes: Positive = 2

    def optimizer_steps(self, train):
        return train.steps * self.passes


KEYS = frozenset({"input_ids", "input_lengths", "token_mask", "sample_mask"})


@register_algorithm(PassesConfig, loss=LossNeeds("logprobs", lambda loss_fn: True, KEYS, "scaled_nll"))
def passes(loop, policy, data, settings):
    loss_fn = configured_loss(loop.config.loss)
    for step, batch in loop.whole_batches(data):
        for _ in range(settings.passes):
            report = loop.train(step, batch, loss_fn)
        loop.record(step, report | {"passes": float(settings.passes)})
"""
EXPERIMENT = {
    "plugins": ["my_plugin"],
    "data": {"source": "words", "words": ["alpha", "beta", "gamma"]},
    "stages": {
        "copy": {"algorithm": {"name": "passes", "passes": 3}, "loss": {"name": "scaled_nll", "scale": 0.5}},
        "rl": {
            "algorithm": {"name": "grpo", "prompts_per_step": 4, "samples_per_prompt": 2},
            "data": {"source": "task", "task": {"name": "reverse", "letters": 2}},
        },
    },
}
GIVEN = (key for key in TINY if not key.startswith("data.task"))  # the stages name their own tasks
TRAIN = ("train", *GIVEN, "experiment=mine", "--config-dir", "mine", "train.steps=2", "train.save_every=1")


@pytest.fixture
def mine(tmp_path):
    """Write a plugin, and an experiment that uses all its parts, to a user's directory below `tmp_path`."""
    (tmp_path / "mine" / "experiment").mkdir(parents=True)
    (tmp_path / "mine" / "my_plugin.py").write_text(PLUGIN)
    text = "# @package _global_\n" + yaml.safe_dump(EXPERIMENT, sort_keys=False)
    (tmp_path / "mine" / "experiment" / "mine.yaml").write_text(text)
    return tmp_path


def test_a_plugins_loss_task_source_and_algorithm_train_on_two_ranks_and_resume(mine, forks):
    done = forks.run_ranks(mine, *TRAIN, ranks=2)
    assert [rank.status for rank in done] == [0, 0], done
    out = mine / "out"
    before = metrics(out)
    copied = [line for line in before if (line["stage"], line["kind"]) == ("copy", "train")]
    assert [line["passes"] for line in copied] == [3.0, 3.0]
    heldout = [line["nll_per_token"] for line in before if (line["stage"], line["kind"]) == ("copy", "eval")]
    assert copied[0]["loss"] < 0.6 * heldout[0], "the loss is not the plugin's, which is half of the NLL"
    assert [line["step"] for line in before if (line["stage"], line["kind"]) == ("rl", "train")] == [1, 2]
    saved = yaml.safe_load((out / "config.yaml").read_text())
    assert saved["plugins"] == ["my_plugin"] and saved["stages"]["copy"]["data"]["repeats"] == 8
    assert "words" not in saved["stages"]["rl"]["data"], "a key of another source was kept"

    shutil.rmtree(out / "checkpoints" / "rl" / "step-000002")
    again = forks.run_ranks(mine, *TRAIN, ranks=2)
    assert [rank.status for rank in again] == [0, 0], again
    assert checkpoints(out, "rl") == ["step-000001", "step-000002"]
    assert metrics(out) == before, "the repeated step 2 gave other numbers"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("stages.copy.algorithm.passse=2", "unknown key 'stages.copy.algorithm.passse'; did you mean 'algorithm.pass"),
        ("stages.copy.algorithm.passes=0", "stages.copy.algorithm.passes=0: "),
        ("data.repaets=2", "data.repaets'; did you mean 'data.repeats'?"),
        ("stages.copy.loss.scael=2", "ScaledConfig has no key 'scael'; did you mean 'scale'?"),
        ("stages.rl.data.task.leters=2", "unknown option of task 'reverse' 'leters'; did you mean 'letters'?"),
        ("stages.copy.algorithm.name=pases", "there is no algorithm 'pases'; did you mean 'passes'?"),
        ("plugins=[my_plugn]", "there is no module 'my_plugn'"),
    ],
)
def test_a_typo_in_a_plugins_key_is_refused_by_name(mine, forks, override, words):
    refused = forks.run(mine, *TRAIN, override)
    assert refused.status == 2
    assert words in refused.err and refused.err.count("\n") == 1, refused.err
    assert not (mine / "out").exists()
