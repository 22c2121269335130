"""The arguments of training functions become the configuration of a run, and wrong ones are refused."""

from __future__ import annotations

import inspect
import json
import re

import pytest

import rl_megatron
from rl_megatron.api.model import StartingModel
from rl_megatron.api.settings import reward_functions, run_config
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.loading.load import load_config
from rl_megatron.rewards.registry import REWARDS
from tests.forkserver import REPOSITORY

QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 16, "intermediate_size": 32,
    "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 300,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": True,
    "hidden_act": "silu",
}  # fmt: skip


@pytest.fixture
def hugging_face(tmp_path):
    directory = tmp_path / "qwen2"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(QWEN2))
    return directory


def config_of(algorithm="sft", data="records.jsonl", rewards=(), begin=None, **settings):
    return run_config(algorithm, begin, data, rewards, "outputs/here", settings)


def test_the_settings_in_the_help_of_grpo_are_accepted():
    lines = [line.strip() for line in (rl_megatron.grpo.__doc__ or "").splitlines()]
    shown = "".join(line for line in lines if re.match(r"\w+=.*,$", line))
    settings = eval(f"dict({shown})")  # it is the package's own text
    stage = run_config("grpo", None, "prompts.jsonl", ["math_verify"], "outputs/here", settings).first
    assert {"algorithm", "generation", "optimizer", "loss", "train", "parallel", "precision"} == set(settings)
    assert (stage.generation.max_new_tokens, stage.parallel.tensor, stage.precision) == (512, 2, "bf16")


def test_the_tutorial_has_every_argument():
    page = (REPOSITORY / "docs" / "tutorials" / "grpo_from_python.md").read_text()
    listed = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert set(listed) == set(inspect.signature(rl_megatron.train).parameters)


def test_settings_are_those_of_the_command_line():
    overrides = ["algorithm=dpo", "loss=dpo", "data.path=records.jsonl", "output_dir=outputs/here"]
    wanted = load_config([*overrides, "train.steps=7", "optimizer.lr=0.5", "data.heldout_fraction=0.5"])
    for settings in (
        {"train": {"steps": 7}, "optimizer": {"lr": 0.5}, "data": {"path": "records.jsonl", "heldout_fraction": 0.5}},
        {"train.steps": 7, "optimizer.lr": 0.5, "data.heldout_fraction": 0.5},
        {"train": {"steps": 7}, "optimizer.lr": 0.5, "data.heldout_fraction": 0.5, "loss": "dpo"},
    ):
        assert config_of("dpo", **settings) == wanted


def test_several_files_are_a_list(tmp_path):
    assert config_of(data=[tmp_path / "one.jsonl", "two.jsonl"]).first.data.path == (
        str(tmp_path / "one.jsonl"), "two.jsonl",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train": {"setps": 1}}, "unknown key 'train.setps'; did you mean 'train.steps'?"),
        ({"train.lr": 1}, "unknown key 'train.lr'; did you mean 'optimizer.lr'?"),
        ({"optimiser": {"lr": 1}}, "unknown key 'optimiser'"),
        ({"train.steps": 0}, "train.steps=0: input should be greater than or equal to 1"),
        ({"train.steps": 1, "train": {"steps": 2}}, "train: 'steps' is given twice; write it once"),
        ({"loss": "dpo", "loss.reference_policy_kl_penalty": 1}, "loss is given as the name of a preset too"),
        ({"experiment": "quickstart"}, "a training function runs one stage"),
        ({"stages": {"sft": {}}}, "a training function runs one stage"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(ConfigError) as refused:
        config_of(**settings)
    assert message in str(refused.value)


# --- the model ---


def test_a_name_on_the_hub_is_answered_with_the_command_that_downloads_it(tmp_path):
    with pytest.raises(ConfigError, match=r"does not exist; .* `hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B`"):
        StartingModel.find("Qwen/Qwen3-0.6B", tmp_path / "out")
    with pytest.raises(ConfigError, match=r"config.json \(a Hugging Face directory\); nothing is downloaded$"):
        StartingModel.find(tmp_path / "absent", tmp_path / "out")


def test_the_model_of_a_hugging_face_directory_is_known_before_its_import(hugging_face, tmp_path):
    begin = StartingModel.find(hugging_face, tmp_path / "out")
    model = config_of(begin=begin, **{"model.max_sequence_length": 32}).first.model
    assert (model.num_layers, model.hidden_size, model.vocab_size, model.max_sequence_length) == (3, 16, 300, 32)
    assert begin.checkpoint is None and not (tmp_path / "out").exists()


def test_what_is_no_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="does not exist; it should be a directory with manifest.json"):
        StartingModel.find(tmp_path / "nowhere", tmp_path)
    with pytest.raises(ConfigError, match="has neither manifest.json .* nor config.json"):
        StartingModel.find(tmp_path, tmp_path)


# --- rewards ---


def right(completion, answer, **_):
    return float(answer in completion)


def test_functions_are_registered_under_their_names_and_may_be_defined_again():
    entries = reward_functions([right, "regex", {"name": right, "weight": 0.5, "label": "half"}])
    assert entries == [{"name": "right"}, {"name": "regex"}, {"name": "right", "weight": 0.5, "label": "half"}]
    assert REWARDS["right"] is right

    def other():
        return 1.0

    other.__name__ = "right"  # as in a cell of a notebook that runs again
    reward_functions([other])
    assert REWARDS["right"] is other


def test_a_function_needs_a_name_of_its_own():
    def regex():
        return 1.0

    with pytest.raises(ConfigError, match=r"rewards\[0\]: <lambda> has no name"):
        reward_functions([lambda completion: 1.0])
    with pytest.raises(ConfigError, match=r"rewards\[1\]: 'regex' is a reward function of the package"):
        reward_functions([right, regex])


def test_one_reward_function_needs_no_list():
    def is_short(completion):
        return len(completion) < 9

    assert reward_functions(is_short) == reward_functions([is_short]) == [{"name": "is_short"}]
    assert reward_functions("exact_match") == reward_functions({"name": "exact_match"}) == [{"name": "exact_match"}]


def train_on_two_ranks(directory):
    with pytest.raises(ConfigError, match="there is nothing at") as refused:
        rl_megatron.train(
            "sft", data=f"{directory}/missing.jsonl", output_dir=f"{directory}/out", parallel={"tensor": 2}
        )
    return str(refused.value)


def test_a_process_group_of_the_caller_has_the_ranks_of_the_layout(tmp_path, ranks):
    assert len(set(ranks.run(2, train_on_two_ranks, str(tmp_path)))) == 1
