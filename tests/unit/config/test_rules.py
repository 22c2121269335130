"""Values out of range, and keys that contradict each other: the message names key, value and rule."""

import re

import pytest

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.loading.load import load_config
from rl_megatron.config.stages import find_previous_stage


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
        ("output_dir=7", "string"),
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
    assert message.startswith(f"algorithm.{setting} has no effect: it applies to advantages relative to a group")
    assert f"set it to {remedy}, or algorithm.advantage_estimator=group_relative" in message
    load_config(["algorithm=grpo", f"algorithm.{setting}"])


def test_dynamic_sampling_works_with_reinforce_plus_plus():
    """It chooses the groups that are kept, and does not depend on the advantage estimator."""
    assert load_config([*REINFORCE, "algorithm.dynamic_sampling=true"]).first.algorithm.dynamic_sampling


def experiment_of(directory, stages):
    """Return the run of an experiment with these stages."""
    (directory / "experiment").mkdir(exist_ok=True)
    (directory / "experiment" / "mine.yaml").write_text(
        f"# @package _global_\ndefaults:\n  - override /data: gsm8k_pairs\ndata: {{path: x}}\nstages:\n{stages}"
    )
    return load_config(["experiment=mine"], str(directory))


SFT = "  sft: {algorithm: {name: sft}, data: {source: prompt_answer}}\n"
SCORER = "  scorer: {algorithm: {name: reward_model}}\n"
AFTER = "  after: {algorithm: {name: dpo}, init_from: stages.sft}\n"
REWARDED = (
    "  ppo: {{algorithm: {{name: ppo}}, init_from: stages.sft, data: {{source: prompts}}, "
    "reward: {{functions: [{{name: reward_model, kwargs: {{{}}}}}]}}}}\n"
)


def test_a_stage_starts_from_the_stage_that_it_names(tmp_path):
    stages = experiment_of(tmp_path, SFT + SCORER + AFTER).stages
    assert [find_previous_stage(stages, name) for name in stages] == [None, "sft", "sft"]
    experiment_of(tmp_path, SFT + SCORER + REWARDED.format("init_from: stages.scorer"))


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        (SCORER + "  after: {algorithm: {name: dpo}}\n", "which leaves no language model; set another order"),
        (SFT + SCORER + "  after: {algorithm: {name: dpo}}\n", "set stages.after.init_from=stages.sft"),
        (SFT + SCORER + AFTER.replace(".sft", ".sfd"), "stages.after.init_from=stages.sfd is not an earlier stage"),
        (SFT + SCORER + AFTER.replace("stages.sft", "sft"), "stages.after.init_from=sft is not an earlier stage"),
        (AFTER + SFT, "none, because this is the first stage"),
        (SFT + SCORER + REWARDED.format("init_from: stages.sft"), "stages.sft is a sft, which has no score head"),
        (SFT + SCORER + REWARDED.format("init_from: stages.ppo"), "init_from=stages.ppo is not an earlier stage"),
        (SFT + SCORER + REWARDED.format("init_from: a, hf: b"), "set one of init_from"),
        (SFT + SCORER + REWARDED.format(""), "set one of init_from"),
        (SFT + SCORER + REWARDED.format("models: [{hf: a}], init_from: b"), "models is an ensemble"),
        (SFT + SCORER + REWARDED.format("hf: a, cilp: 1"), "reward.functions[0].kwargs.cilp"),
        (SFT + SCORER + REWARDED.format("hf: a, std: 0"), "reward.functions[0].kwargs.std"),
    ],
)
def test_wrong_beginnings_of_stages_and_reward_models_are_named(tmp_path, stages, words):
    with pytest.raises(ConfigError) as refused:
        experiment_of(tmp_path, stages)
    assert words in str(refused.value)


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
    ("overrides", "words"),
    [
        (["model.num_query_groups=3"], ["model.num_query_groups=3", "model.num_attention_heads=4", "divide"]),
        (["model.hidden_size=30"], ["model.hidden_size=30", "model.num_attention_heads=4", "model.head_dim"]),
        (["data=gsm8k"], ["data.path", "data.dataset_name", "data=arithmetic"]),
        (["data=text", "algorithm=pretrain"], ["data.path"]),
        (["data=text", "data.path=x"], ["algorithm=sft", "data.source"]),
        (["data=gsm8k", "data.path=x", "algorithm=grpo"], ["algorithm=grpo", "rewards", "data.source=prompts or task"]),
        (["data=gsm8k", "data.path=x", "algorithm=pretrain"], ["algorithm=pretrain", "data.source=text"]),
        (["data.source=task", "data.task.max_operand=9"], ["data.task.name", "arithmetic"]),
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
        (["data=gsm8k", "data.path=x", "algorithm=ppo"], ["algorithm=ppo", "rewards", "data.source=prompts or task"]),
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
        (
            ["algorithm=dpo", "data=arithmetic"],
            ["algorithm=dpo", "pairs", "data.source=task", "use data.source=preference"],
        ),
        (["data=gsm8k", "data.path=x", "algorithm=reward_model"], ["algorithm=reward_model", "data.source=preference"]),
        (["data=gsm8k_pairs", "data.path=x", "algorithm=sft"], ["algorithm=sft", "prompt_answer or task"]),
        (["data=gsm8k_pairs", "data.path=x", "algorithm=pretrain"], ["algorithm=pretrain", "text or task"]),
        (["data=gsm8k_pairs", "data.path=x", "algorithm=grpo"], ["algorithm=grpo", "data.source=prompts or task"]),
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
    ("written", "template"),
    [
        (r'"Q: {question}\nA:\t"', "Q: {question}\nA:\t"),
        (r'"{question}\\n in \boxed{{}}"', r"{question}\n in \boxed{{}}"),
        (r'"{question} \\theta"', r"{question} \theta"),
    ],
)
@pytest.mark.parametrize("prefix", ["", "++", "stages.sft."])
def test_a_line_break_in_a_template_on_the_command_line(written, template, prefix):
    base = (
        ["experiment=gsm8k_dpo", "data.path=x"]
        if "stages" in prefix
        else ["data=gsm8k", "data.path=x", "algorithm=sft"]
    )
    stage = load_config([*base, f"{prefix}data.prompt_template={written}"]).first
    assert stage.data.prompt_template == template


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data=text", "algorithm=pretrain", "data.path=x", "data.format=chat"], "data.format='chat' has no effect on"),
        (
            ["data=gsm8k", "algorithm=sft", "data.path=x", "data.sequence_length=7"],
            "data.sequence_length=7 has no",
        ),
        (
            ["data=arithmetic", "data.heldout_fraction=0.5"],
            "data.heldout_fraction=0.5 has no effect on",
        ),
        (["data=arithmetic", "data.format=plain", "data.trained_turns=last"], "no effect with data.format=plain"),
        (["data=gsm8k", "algorithm=sft", "data.path=x", "data.num_documents=3"], "data.num_documents=3 has no effect"),
    ],
)
def test_a_key_of_data_without_effect_is_refused(overrides, words):
    with pytest.raises(ConfigError) as error:
        load_config(overrides)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("algorithm", "size", "said"),
    [
        ("grpo", 256, "256 completions a rollout step, 1 optimizer step of 256"),
        ("ppo", 128, "128 completions a rollout step, 1 optimizer step of 128"),
        ("online_dpo", 64, "64 completions a rollout step, 1 optimizer step of 64"),
    ],
)
def test_the_policy_takes_one_step_on_a_rollout_unless_the_user_says_otherwise(algorithm, size, said):
    chosen = [f"algorithm={algorithm}", "data=arithmetic", *(["loss=dpo"] if algorithm == "online_dpo" else [])]
    stage = load_config(chosen).first
    assert stage.train.global_batch_size == size and stage.algorithm.describe_step(stage.train) == said
    assert stage.algorithm.optimizer_steps(stage.train) == stage.train.steps
    fewer = load_config([*chosen, f"train.global_batch_size={size // 2 - 2}"]).first
    assert fewer.algorithm.describe_step(fewer.train).endswith(f", 3 optimizer steps of {size // 2 - 2}, the last of 4")
    larger = load_config([*chosen, f"train.global_batch_size={size * 2}"]).first
    assert f"{said}, because train.global_batch_size={size * 2} exceeds" in larger.algorithm.describe_step(larger.train)
    assert load_config([*chosen, "algorithm.prompts_per_step=3"]).first.train.global_batch_size == size * 3 // 32
    more = size if algorithm == "online_dpo" else 32 * 16  # of which the best and the worst of a prompt form a pair
    assert load_config([*chosen, "algorithm.samples_per_prompt=16"]).first.train.global_batch_size == more
    assert load_config(["algorithm=sft", "data=arithmetic"]).first.train.global_batch_size == 32


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_rollouts_are_packed_unless_the_user_says_otherwise(refused, algorithm):
    chosen = [f"algorithm={algorithm}"]
    assert load_config(chosen).first.train.batching == "packed"
    for batching in ("padded", "dynamic"):
        assert load_config([*chosen, f"train.batching={batching}"]).first.train.batching == batching
    message = refused(*chosen, "train.micro_batch_size=4")
    assert message.startswith(f"train.micro_batch_size=4 has no effect: {algorithm} uses train.batching=packed")
    assert "train.micro_batch_tokens, or set train.batching=padded" in message
    assert load_config([*chosen, "train.micro_batch_size=4", "train.batching=padded"]).first.train.micro_batch_size == 4


def test_other_algorithms_pad_and_stages_may_share_the_size_of_a_microbatch(refused, three):
    assert load_config(["train.micro_batch_size=4"]).first.train.batching == "padded"
    stages = load_config(["experiment=quickstart", "train.micro_batch_tokens=512"]).stages
    assert [stage.train.batching for stage in stages.values()] == ["padded", "padded", "packed"]
    stages = load_config(["experiment=quickstart", "train.batching=dynamic"]).stages
    assert {stage.train.batching for stage in stages.values()} == {"dynamic"}
    message = refused(*three, "stages.grpo.train.micro_batch_size=4")
    assert message.startswith("stages.grpo.train.micro_batch_size=4 has no effect")


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_kl_cov_needs_a_second_optimizer_step_on_a_rollout(refused, algorithm):
    given = [f"algorithm={algorithm}", "train.global_batch_size=256", "loss.use_kl_cov=true"]
    message = refused(*given)
    assert message.startswith("loss.use_kl_cov=true has no effect: ")
    assert "raise algorithm.updates_per_rollout or lower train.global_batch_size=256" in message
    load_config([*given, "algorithm.updates_per_rollout=2"])
    load_config([given[0], "train.global_batch_size=64", given[2]])
    load_config([*given[:2], "loss.use_clip_cov=true"])


def test_a_reward_function_may_not_have_the_name_of_rewards_of_environments(refused):
    message = refused("algorithm=grpo", "reward.functions=[{name: exact_match, label: environment}]")
    assert message.endswith("reward.functions[0].label") and "'environment'" in message


ON_POLICY = ("train.global_batch_size=256", "algorithm.recompute_logprobs=never")


@pytest.mark.change
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("train.global_batch_size=64", " optimizer steps on each rollout (algorithm.updates_per_rollout=1, "),
        ("algorithm.updates_per_rollout=2", "the policy takes 2 optimizer steps on each rollout"),
        ("loss.use_kl_in_reward=true", "loss.use_kl_in_reward=true subtracts a KL of these logprobs from the rewards"),
    ],
)
def test_logprobs_that_something_needs_cannot_be_left_out(refused, algorithm, override, reason):
    estimator = ["algorithm.advantage_estimator=reinforce_plus_plus"] if algorithm == "grpo" else []
    given = [f"algorithm={algorithm}", *ON_POLICY, *estimator]
    load_config(given)
    message = refused(*given, override)
    assert message.startswith("algorithm.recompute_logprobs=never: ") and reason in message and "to auto" in message
    load_config([*given, override, "algorithm.recompute_logprobs=auto"])
    load_config([*given, "loss.use_kl_in_reward=true", "loss.reference_policy_kl_penalty=0"])


def test_the_rate_of_a_critic_decays_in_a_stage_that_changes_another_key_of_its_optimizer(tmp_path):
    """As in a run of one stage, whose section begins with configs/algorithm/ppo.yaml."""
    settings = "{algorithm: {name: ppo, critic_optimizer: {lr: 0.5}}, init_from: stages.sft}"
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "own.yaml").write_text(
        f"# @package _global_\nstages:\n  sft: {{algorithm: {{name: sft}}}}\n  after: {settings}\n"
    )
    stages = load_config(["experiment=own"], str(tmp_path)).stages
    critic = load_config(["algorithm=ppo", "algorithm.critic_optimizer.lr=0.5"]).first.algorithm.critic_optimizer
    assert stages["after"].algorithm.critic_optimizer == critic
    assert critic.decay_style == stages["after"].optimizer.decay_style == "cosine"
