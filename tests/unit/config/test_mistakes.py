"""Mistakes in a configuration: exit status 2, one line that names key, value and rule, and nothing written."""

import re

import pytest
import yaml

from rl_megatron.cli import main
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.load import load_config


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """`refused(*arguments)`: the one line that `rl-megatron train` answers with."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        before = sorted(tmp_path.rglob("*"))
        status = main(["train", *arguments])
        out, err = capsys.readouterr()
        assert status == 2
        assert out == ""
        assert re.fullmatch(r"error: [^\n]+\n", err)
        assert sorted(tmp_path.rglob("*")) == before
        return err.removeprefix("error: ").rstrip("\n")

    return run


@pytest.fixture
def experiment(tmp_path):
    """`experiment(tree)`: the arguments that choose an experiment of the user's own with this content."""

    def write(tree):
        directory = tmp_path / "mine" / "experiment"
        directory.mkdir(parents=True)
        (directory / "own.yaml").write_text("# @package _global_\n" + yaml.safe_dump(tree, sort_keys=False))
        return "experiment=own", "--config-dir", str(tmp_path / "mine")

    return write


# An experiment that sets what the tests below override; the shipped ones may change.
THREE = {
    "stages": {
        "pretrain": {"algorithm": {"name": "pretrain"}, "train": {"steps": 3}, "data": {"sequence_length": 64}},
        "sft": {"algorithm": {"name": "sft"}, "train": {"steps": 2}},
        "grpo": {
            "algorithm": {"name": "grpo", "prompts_per_step": 4},
            "train": {"steps": 1, "eval_every": 1},
            "optimizer": {"lr": 5.0e-4},
            "loss": {"reference_policy_kl_penalty": 0.0},
        },
    }
}


@pytest.fixture
def three(experiment):
    """The arguments that choose `THREE`."""
    return experiment(THREE)


@pytest.mark.parametrize(
    ("override", "mistyped", "nearest"),
    [
        ("train.stpes=3", "train.stpes", "train.steps"),
        ("+train.stpes=3", "train.stpes", "train.steps"),
        ("optimzer.lr=3", "optimzer.lr", "optimizer.lr"),
        ("output_dri=x", "output_dri", "output_dir"),
        ("+output_dri=x", "output_dri", "output_dir"),
        ("precison=bf16", "precison", "precision"),
        ("modl=nano", "modl", "model"),
        ("model.hiden_size=32", "model.hiden_size", "model.hidden_size"),
        ("parallel.tensr=2", "parallel.tensr", "parallel.tensor"),
        ("loss.ratio_clp_min=0.3", "loss.ratio_clp_min", "loss.ratio_clip_min"),
        ("generation.topp=0.3", "generation.topp", "generation.top_p"),
        ("data.pth=x", "data.pth", "data.path"),
        ("tokenizer.vocabsize=300", "tokenizer.vocabsize", "tokenizer.vocab_size"),
    ],
)
def test_a_mistyped_override_names_the_nearest_key(refused, override, mistyped, nearest):
    message = refused(override)
    assert f"unknown key {mistyped!r}" in message
    assert f"did you mean {nearest!r}?" in message


def test_a_mistyped_algorithm_key_is_compared_with_the_keys_of_that_algorithm(refused):
    assert "unknown key 'algorithm.promts_per_step'; did you mean 'algorithm.prompts_per_step'?" in refused(
        "algorithm=grpo", "algorithm.promts_per_step=3"
    )
    message = refused("algorithm=sft", "algorithm.prompts_per_step=3")
    assert "unknown key 'algorithm.prompts_per_step'" in message
    assert "did you mean 'algorithm.prompts_per_step'" not in message, "sft has no such key"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("stages.sft.train.stpes=3", ["unknown key 'stages.sft.train.stpes'", "'train.steps'"]),
        ("stages.sft.trian.steps=3", ["unknown key 'stages.sft.trian'", "'train'"]),
        ("stages.sft.modle=nano", ["unknown key 'stages.sft.modle'", "'model'"]),
        (
            "stages.grpo.algorithm.promts_per_step=3",
            ["unknown key 'stages.grpo.algorithm.promts_per_step'", "prompts_per_step"],
        ),
        ("stages.stf.train.steps=3", ["no stage 'stf'", "did you mean 'sft'?"]),
        ("stages.sft=3", ["stages.sft=3", "mapping"]),
        ("stages=3", ["stages=3", "mapping"]),
    ],
)
def test_a_mistyped_stage_key_names_the_nearest_key(refused, three, override, words):
    message = refused(*three, override)
    assert all(word in message for word in words), message


def test_a_stage_of_a_run_without_stages_is_refused(refused):
    message = refused("stages.sft.train.steps=3")
    assert "stages.sft.train.steps=3" in message and "leave stages.NAME out" in message


@pytest.mark.parametrize(
    ("tree", "mistyped", "nearest"),
    [
        ({"optimzer": {"lr": 1.0}}, "optimzer", "optimizer"),
        ({"train": {"stpes": 3}}, "train.stpes", "train.steps"),
        ({"stages": {"one": {"algorithm": {"name": "sft"}, "trian": {"steps": 1}}}}, "stages.one.trian", "train"),
        ({"stages": {"one": {"train": {"stpes": 1}}}}, "stages.one.train.stpes", "train.steps"),
        (
            {"stages": {"one": {"data": {"numeval_examples": 1}}}},
            "stages.one.data.numeval_examples",
            "data.num_eval_examples",
        ),
        (
            {"stages": {"one": {"algorithm": {"name": "grpo", "leave_one_uot": True}}}},
            "stages.one.algorithm.leave_one_uot",
            "algorithm.leave_one_out",
        ),
    ],
)
def test_a_mistyped_key_of_an_own_experiment_names_the_nearest(refused, experiment, tree, mistyped, nearest):
    message = refused(*experiment(tree))
    assert f"unknown key {mistyped!r}" in message
    assert f"did you mean {nearest!r}?" in message


def test_an_own_experiment_loads(experiment):
    tree = {"train": {"steps": 3}, "stages": {"one": {"algorithm": {"name": "sft"}}, "two": None}}
    name, _, directory = experiment(tree)
    config = load_config([name, "train.seed=4"], directory)
    assert list(config.stages) == ["one", "two"]
    assert {(stage.train.steps, stage.train.seed) for stage in config.stages.values()} == {(3, 4)}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["experiment=quickstrt"], ["experiment/quickstrt", "quickstart"]),
        (["model=nan"], ["string"]),
        (["model=huge"], ["model/huge", "nano"]),
        (["train.steps"], ["'train.steps'", "key=value"]),
        (["train.steps=${nowhere}"], ["train.steps", "nowhere"]),
        (["~optimizer"], ["optimizer"]),
        (["~algorithm"], ["algorithm"]),
        (["--config-dir", "nowhere"], ["--config-dir nowhere"]),
    ],
)
def test_errors_of_hydra_are_one_line(refused, arguments, words):
    message = refused(*arguments)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("override", "rule"),
    [
        ("train.steps=0", "greater than or equal to 1"),
        ("train.steps=1.5", "integer"),
        ("train.steps=many", "integer"),
        ("train.steps=True", "number, not true or false"),
        ("train.seed=-1", "greater than or equal to 0"),
        ("train.keep_checkpoints=0", "greater than or equal to 1"),
        ("optimizer.lr=0", "greater than 0"),
        ("optimizer.lr=nan", "finite"),
        ("optimizer.lr=inf", "finite"),
        ("optimizer.lr=True", "number, not true or false"),
        ("optimizer.beta1=1.0", "less than 1"),
        ("optimizer.clip_grad=-1", "greater than or equal to 0"),
        ("optimizer.decay_style=sine", "cosine"),
        ("model.num_layers=0", "greater than or equal to 1"),
        ("model.recompute=some", "selective"),
        ("generation.top_p=0", "greater than 0"),
        ("generation.top_p=1.1", "less than or equal to 1"),
        ("generation.temperature=-1", "greater than or equal to 0"),
        ("data.heldout_fraction=1", "less than 1"),
        ("data.source=web", "prompt_answer"),
        ("algorithm.name=gpro", "did you mean 'grpo'?"),
        ("data.too_long=ignore", "truncate"),
        ("precision=fp8", "bf16"),
        ("device=tpu", "cuda"),
        ("resume=maybe", "boolean"),
        ("output_dir=null", "string"),
    ],
)
def test_a_value_out_of_range_names_key_value_and_rule(refused, override, rule):
    key, value = override.split("=")
    message = refused(override)
    assert message.startswith(f"{key}="), message
    assert value.strip("0").lower() in message.lower().replace("none", "null")
    assert rule in message


def test_the_values_of_an_algorithm_are_checked_under_its_key(refused):
    message = refused("algorithm=grpo", "algorithm.samples_per_prompt=0")
    assert message.startswith("algorithm.samples_per_prompt=0: ") and "greater than or equal to 1" in message


def test_a_group_needs_at_least_two_samples_if_they_are_compared(refused):
    alone = ["algorithm=grpo", "algorithm.samples_per_prompt=1"]
    assert "algorithm.samples_per_prompt=1" in refused(*alone)
    alone.append("algorithm.advantage_estimator=reinforce_plus_plus")
    assert load_config(alone).first.algorithm.samples_per_prompt == 1
    assert "without dynamic_sampling" in refused(*alone, "algorithm.dynamic_sampling=true")


REINFORCE = ("algorithm=grpo", "algorithm.advantage_estimator=reinforce_plus_plus")


@pytest.mark.parametrize(("setting", "remedy"), [("leave_one_out=true", "false"), ("normalize_std=false", "true")])
def test_keys_of_group_relative_advantages_are_refused_with_reinforce_plus_plus(refused, setting, remedy):
    message = refused(*REINFORCE, f"algorithm.{setting}")
    assert message.startswith(f"algorithm.{setting} has no effect: it is for advantages relative to a group")
    assert f"set it to {remedy}, or algorithm.advantage_estimator=group_relative" in message
    load_config(["algorithm=grpo", f"algorithm.{setting}"])


def test_dynamic_sampling_works_with_reinforce_plus_plus():
    """It chooses the groups that are kept, and does not depend on the advantage estimator."""
    assert load_config([*REINFORCE, "algorithm.dynamic_sampling=true"]).first.algorithm.dynamic_sampling


def test_a_reward_model_must_be_the_last_stage(refused, tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /data: gsm8k_pairs\ndata: {path: x}\nstages:\n"
        "  scorer: {algorithm: {name: reward_model}}\n  after: {algorithm: {name: dpo}}\n"
    )
    with pytest.raises(ConfigError, match="stages.scorer is a reward_model.*put it last"):
        load_config(["experiment=mine"], str(tmp_path))


@pytest.mark.parametrize(
    ("override", "rule"),
    [
        ("algorithm.discount=0", "greater than 0"),
        ("algorithm.discount=1.1", "less than or equal to 1"),
        ("algorithm.gae_lambda=-0.1", "greater than or equal to 0"),
        ("algorithm.gae_lambda=1.1", "less than or equal to 1"),
        ("algorithm.value_clip=0", "greater than 0"),
        ("algorithm.critic_warmup_steps=-1", "greater than or equal to 0"),
        ("algorithm.samples_per_prompt=0", "greater than or equal to 1"),
        ("algorithm.whiten_advantages=maybe", "boolean"),
        ("algorithm.critic_optimizer.lr=0", "greater than 0"),
    ],
)
def test_the_values_of_ppo(refused, override, rule):
    message = refused("algorithm=ppo", override)
    assert message.startswith(override.split("=")[0] + "=") and rule in message


def test_a_mistyped_key_of_the_critic_names_the_nearest(refused):
    message = refused("algorithm=ppo", "algorithm.critic_optimizer.wamup_steps=3")
    assert "unknown key 'algorithm.critic_optimizer.wamup_steps'" in message
    assert "did you mean 'algorithm.critic_optimizer.warmup_steps'?" in message


@pytest.mark.parametrize("algorithm", ["ppo", "dpo", "reward_model"])
def test_the_bounds_of_ppo_and_the_pairs_load(algorithm):
    """The rules must accept these values."""
    if algorithm == "ppo":
        values = ["discount=1", "gae_lambda=0", "value_clip=null", "critic_warmup_steps=99", "samples_per_prompt=1"]
        stage = load_config(["algorithm=ppo", *(f"algorithm.{value}" for value in values)]).first
        assert (stage.algorithm.gae_lambda, stage.algorithm.value_clip) == (0.0, None)
    else:
        pairs = ["data=gsm8k_pairs", "data.path=x", "train.global_batch_size=2", "train.micro_batch_size=2"]
        assert load_config([f"algorithm={algorithm}", *pairs]).first.algorithm.name == algorithm


def test_a_value_in_a_stage_is_named_with_its_stage(refused, three):
    message = refused(*three, "stages.grpo.train.steps=0")
    assert message.startswith("stages.grpo.train.steps=0: ")


def test_all_values_out_of_range_are_named_at_once(refused):
    message = refused("train.steps=0", "optimizer.lr=0")
    assert "train.steps=0" in message and "optimizer.lr=0" in message


@pytest.mark.parametrize(
    ("override", "instead"),
    [
        ("train.steps=3", ["stages.pretrain.train.steps=…", "stages.sft.train.steps=…", "stages.grpo.train.steps=…"]),
        ("train.eval_every=3", ["stages.grpo.train.eval_every=…"]),
        ("++optimizer.lr=3", ["stages.grpo.optimizer.lr=…"]),
        ("data.sequence_length=32", ["stages.pretrain.data.sequence_length=…"]),
        ("loss.reference_policy_kl_penalty=0.1", ["stages.grpo.loss.reference_policy_kl_penalty=…"]),
        ("algorithm.prompts_per_step=3", ["stages.grpo.algorithm.prompts_per_step=…"]),
        ("algorithm.updates_per_rollout=3", ["stages.grpo.algorithm.updates_per_rollout=…"]),
        ("algorithm=grpo", [f"stages.{stage}.algorithm.name=…" for stage in ("pretrain", "sft", "grpo")]),
    ],
)
def test_an_override_that_stages_shadow_is_refused_with_the_paths_that_work(refused, three, override, instead):
    message = refused(*three, override)
    assert f"override {override!r} has no effect in stage(s)" in message
    assert message.partition("; write ")[2] == " ".join(instead)


@pytest.mark.parametrize(
    ("key", "remedy"),
    [
        ("algorithm.critic_optimizer.lr", "write stages.ppo.algorithm.critic_optimizer.lr=…"),
        ("algorithm.prompts_per_steps.lr", "none of them has this key"),
    ],
)
def test_a_nested_key_is_known_by_its_first_part(refused, experiment, key, remedy):
    arguments = experiment({"stages": {"sft": {"algorithm": {"name": "sft"}}, "ppo": {"algorithm": {"name": "ppo"}}}})
    message = refused(*arguments, f"{key}=0.1")
    assert f"override '{key}=0.1' has no effect in stage(s) ['sft', 'ppo']" in message
    assert message.endswith(f"; {remedy}")


def test_the_paths_that_the_refusal_proposes_work(three):
    name, _, directory = three
    config = load_config([name, "stages.grpo.algorithm.updates_per_rollout=3", "stages.sft.train.steps=7"], directory)
    assert config.stages["grpo"].algorithm.updates_per_rollout == 3
    assert config.stages["sft"].train.steps == 7


def test_a_scalar_that_a_stage_sets_shadows_the_override(refused, experiment):
    arguments = experiment({"stages": {"one": {"algorithm": {"name": "sft"}, "precision": "bf16"}}})
    assert "write stages.one.precision=…" in refused(*arguments, "precision=fp32")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.num_query_groups=3"], ["model.num_query_groups=3", "model.num_attention_heads=4", "divide"]),
        (["model.hidden_size=30"], ["model.hidden_size=30", "model.num_attention_heads=4", "model.head_dim"]),
        (["data=gsm8k"], ["data.path"]),
        (["data=text", "algorithm=pretrain"], ["data.path"]),
        (["data=text", "data.path=x"], ["algorithm=sft", "data.source"]),
        (["data=gsm8k", "data.path=x", "algorithm=grpo"], ["algorithm=grpo", "rewards", "data.source=task"]),
        (["data=gsm8k", "data.path=x", "algorithm=pretrain"], ["algorithm=pretrain", "data.source=text"]),
        (["data.task={}", "data.task.max_operand=9", "~data.task.name"], ["data.task.name", "arithmetic"]),
        (
            ["algorithm=pretrain", "data.sequence_length=500"],
            ["data.sequence_length=500", "model.max_sequence_length=128"],
        ),
        (
            ["optimizer.warmup_steps=5", "optimizer.decay_steps=5"],
            ["optimizer.warmup_steps=5", "optimizer.decay_steps=5", "less than"],
        ),
        (["optimizer.min_lr=1"], ["optimizer.min_lr=1.0", "optimizer.lr=0.001", "exceed"]),
        (["algorithm=grpo", "generation.temperature=0"], ["generation.temperature=0", "grpo", "above 0"]),
        (["algorithm=ppo", "generation.temperature=0"], ["generation.temperature=0", "ppo", "above 0"]),
        (
            ["algorithm=grpo", "loss.use_kl_in_reward=true"],
            ["loss.use_kl_in_reward=true", "algorithm.advantage_estimator=reinforce_plus_plus"],
        ),
        (["data=gsm8k", "data.path=x", "algorithm=ppo"], ["algorithm=ppo", "rewards", "data.source=task"]),
        (
            ["algorithm=ppo", "algorithm.critic_warmup_steps=100"],
            ["algorithm.critic_warmup_steps=100", "train.steps=100", "less than"],
        ),
        (
            ["algorithm=ppo", "algorithm.critic_optimizer.min_lr=1"],
            ["algorithm.critic_optimizer.min_lr=1.0", "algorithm.critic_optimizer.lr=0.001", "exceed"],
        ),
        (
            [
                "algorithm=ppo",
                "algorithm.critic_optimizer.warmup_steps=5",
                "algorithm.critic_optimizer.decay_steps=5",
            ],
            ["algorithm.critic_optimizer.warmup_steps=5", "algorithm.critic_optimizer.decay_steps=5", "less than"],
        ),
        (["data=gsm8k_pairs", "algorithm=dpo"], ["data.path", "data.source=preference"]),
        (["algorithm=dpo"], ["algorithm=dpo", "pairs", "data.source=task", "use data.source=preference"]),
        (["data=gsm8k", "data.path=x", "algorithm=reward_model"], ["algorithm=reward_model", "data.source=preference"]),
        (["data=gsm8k_pairs", "data.path=x", "algorithm=sft"], ["algorithm=sft", "prompt_answer or task"]),
        (["data=gsm8k_pairs", "data.path=x", "algorithm=pretrain"], ["algorithm=pretrain", "text or task"]),
        (["data=gsm8k_pairs", "data.path=x", "algorithm=grpo"], ["algorithm=grpo", "data.source=task"]),
        *(
            (
                [f"algorithm={algorithm}", "data=gsm8k_pairs", "data.path=x", f"{key}=3"],
                [f"{key}=3", "even", "a pair is two sequences", "set it to 4"],
            )
            for algorithm in ("dpo", "reward_model")
            for key in ("train.global_batch_size", "train.micro_batch_size", "data.num_eval_examples")
        ),
    ],
)
def test_rules_that_span_sections(refused, overrides, words):
    message = refused(*overrides)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("stages.sft.model.num_layers=2", ["stages.sft.model", "share"]),
        ("stages.grpo.parallel.tensor=2", ["stages.grpo.parallel", "share"]),
        ("stages.grpo.optimizer.min_lr=1", ["optimizer.min_lr=1", "optimizer.lr=0.0005"]),
    ],
)
def test_rules_hold_in_every_stage(refused, three, override, words):
    message = refused(*three, override)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["model.expert_ffn_hidden_size=64"], "model.expert_ffn_hidden_size=64 does nothing: model.num_experts=null"),
        (["model.router_aux_loss=0.01"], "model.router_aux_loss=0.01 does nothing"),
        (["model.experts_per_token=4"], "set model.num_experts, or leave model.experts_per_token out"),
        (["model.normalize_expert_weights=false"], "model.normalize_expert_weights=false does nothing"),
        (["model.shared_expert_gate=true"], "set model.num_experts, or leave model.shared_expert_gate out"),
        (["model.num_experts=2", "model.experts_per_token=3"], "experts_per_token=3 exceeds model.num_experts=2"),
        (["model.num_experts=2", "model.experts_per_token=1"], "set normalize_expert_weights=false"),
        (["model.num_experts=2", "model.shared_expert_gate=true"], "set model.shared_expert_ffn_hidden_size"),
        (["train.batching=packd"], "train.batching='packd'"),
        (["train.micro_batch_tokens=0"], "train.micro_batch_tokens=0"),
    ],
)
def test_contradicting_keys_of_experts_and_batching(overrides, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        load_config(overrides)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("generation.num_engines=2", ["generation.num_engines=2 does nothing", "generation.engine=transformers"]),
        ("generation.refit=shared_memory", ["generation.refit=shared_memory does nothing"]),
        ("generation.engine_device=cpu", ["generation.engine_device=cpu does nothing"]),
        ("generation.max_engine_restarts=0", ["generation.max_engine_restarts=0 does nothing"]),
        ("generation.refit_bucket_mb=1", ["generation.refit_bucket_mb=1.0 does nothing"]),
        ("generation.engine_timeout_minutes=1", ["generation.engine_timeout_minutes=1.0 does nothing"]),
        ("generation.engine=vllm", ["generation.engine='vllm'", "no rollout engine", "embedded, transformers"]),
        ("generation.engine_device=gpu", ["generation.engine_device='gpu'", "cuda"]),
        ("generation.gate_limit=0", ["generation.gate_limit=0", "greater than 0"]),
    ],
)
def test_wrong_keys_of_rollout_engines_are_refused(refused, override, words):
    message = refused("algorithm=grpo", override)
    assert all(word in message for word in words), message


def test_gate_limit_is_refused_if_the_logprob_check_is_off(refused):
    message = refused("algorithm=grpo", "generation.gate_prompts=0", "generation.gate_limit=1")
    assert "generation.gate_limit=1.0 does nothing" in message and "generation.gate_prompts=0" in message
