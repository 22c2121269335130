"""`rl-megatron migrate`: the tables of other libraries' keys, conversions of values, and files that are refused."""

import dataclasses
import importlib
import json
import subprocess
import sys
from dataclasses import asdict, fields
from pathlib import Path

import pytest
import yaml

from docs.generate_coming_from import FILES, PAGES
from rl_megatron.cli import main
from rl_megatron.config import schema
from rl_megatron.config.checkpoint_metadata import FORMAT, MANIFEST
from rl_megatron.config.loading.hints import schema_paths, suggest_key
from rl_megatron.config.loading.load import load_config
from rl_megatron.config.loading.settings import LOSS_SETTINGS
from rl_megatron.config.migration import trl
from rl_megatron.config.migration.experiment import translate, write_experiment
from rl_megatron.config.migration.read import LIBRARIES, read_source
from rl_megatron.config.model import ModelConfig

REAL_FILES = [PAGES / "files" / name for name in FILES.values()]
ROWS = [(library, key) for library in LIBRARIES.values() for key in library.keys]


def real_keys():
    """Return every key here, and the groups of presets that an experiment chooses."""
    keys = {*schema_paths(schema.StageConfig), *schema_paths(schema.RunConfig), "loss", "model", "algorithm"}
    for section, registry in (("algorithm", schema.ALGORITHM_CONFIGS), ("data", schema.SOURCE_CONFIGS)):
        keys |= {path for config in registry.values() for path in schema_paths(config, f"{section}.")}
    return keys | {f"loss.{field.name}" for config in LOSS_SETTINGS.values() for field in fields(config)}


@pytest.fixture
def compose(tmp_path, monkeypatch):
    """`compose(text)`: the configuration of an experiment that `migrate` printed, whose checkpoint exists."""
    monkeypatch.chdir(tmp_path)

    def load(text):
        directory = tmp_path / "mine"
        (directory / "experiment").mkdir(parents=True)
        (directory / "experiment" / "theirs.yaml").write_text(text)
        begun = yaml.safe_load(text).get("init_from")
        if begun is not None:
            Path(begun).mkdir(parents=True)
            (Path(begun) / MANIFEST).write_text(json.dumps({"format": FORMAT, "model": asdict(ModelConfig())}))
        return load_config(["experiment=theirs"], str(directory))

    return load


def translate_text(directory, content, name="theirs.yaml"):
    """Return the translation of a file with this content."""
    file = directory / name
    file.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return translate(read_source(file))


def nest(**dotted):
    """Return nested mappings from keys in which two underscores stand for a dot."""
    tree = {}
    for key, value in dotted.items():
        *sections, name = key.split("__")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    return tree


def test_every_key_of_the_tables_sets_keys_that_exist():
    known = real_keys()
    wrong = [(library.name, key, here) for library, key in ROWS for here in library.keys[key].here if here not in known]
    assert len(ROWS) > 500 and not wrong


def test_a_key_that_sets_nothing_has_a_reason():
    assert not [(library.name, key) for library, key in ROWS if not (library.keys[key].here or library.keys[key].note)]


@pytest.mark.parametrize("file", REAL_FILES, ids=lambda file: file.stem)
def test_conversions_set_only_the_keys_that_their_row_names(file):
    source = read_source(file)
    settings = {**source.defaults, **source.settings}
    for key, value in settings.items():
        converted = source.library.find(key).translate(value, settings)
        converted = converted[0] if isinstance(converted, tuple) else converted
        if isinstance(converted, dict):
            assert set(converted) <= set(source.library.find(key).here), key


def test_a_file_of_nemo_rl_becomes_an_experiment_that_is_accepted(compose):
    stage = compose(write_experiment(read_source(REAL_FILES[0]))).first
    assert (stage.algorithm.prompts_per_step, stage.algorithm.samples_per_prompt) == (16, 8)
    assert (stage.algorithm.leave_one_out, stage.train.global_batch_size) == (True, 128)
    assert (stage.optimizer.lr, stage.optimizer.clip_grad, stage.train.micro_batch_tokens) == (2e-6, 1.0, 2048)
    assert (stage.generation.engine, stage.generation.refit, stage.precision) == ("vllm", "shared_memory", "bf16")
    assert (stage.generation.max_new_tokens, stage.rollout.max_tokens, stage.model.max_sequence_length) == (
        512, 512, 1024,
    )  # fmt: skip
    assert [(each.name, each.weight) for each in stage.reward.functions] == [("overlong", 0.5), ("math_verify", 1.0)]
    assert stage.loss["truncated_importance_sampling_type"] == "tis"


@pytest.mark.parametrize(
    ("data", "environment", "functions"),
    [
        ({}, {"num_workers": 8}, [{"name": "math_verify"}]),
        ({}, {}, [{"name": "math_verify"}]),
        ({"env_name": "math"}, {"num_workers": 8}, [{"name": "math_verify"}]),
        ({"default": {"env_name": "code"}}, {"num_workers": 8}, None),
    ],
)
def test_the_environment_math_of_nemo_rl_gives_its_reward(tmp_path, data, environment, functions):
    file = {"grpo": {"max_num_steps": 3}, "policy": {"model_name": "a/b"}, "data": data, "env": {"math": environment}}
    result = translate_text(tmp_path, file)
    assert result.values.get("reward.functions") == functions
    assert result.values.get("reward.num_workers") == environment.get("num_workers")
    reported = [reason for setting, reason in result.missing if "env_name" in setting]
    assert bool(reported) == (functions is None) and not result.unknown


def test_a_file_of_verl_becomes_an_experiment_that_is_accepted(compose):
    Path("rewards.py").write_text("def compute_score(solution_str): ...\n")
    config = compose(write_experiment(read_source(REAL_FILES[1])))
    stage = config.first
    assert (stage.algorithm.prompts_per_step, stage.train.global_batch_size) == (64, 512)
    assert (stage.model.max_sequence_length, stage.data.too_long, stage.model.recompute) == (768, "drop", "full")
    assert (stage.parallel.tensor, stage.parallel.sequence, stage.train.reference) == (2, True, "offload")
    assert (stage.loss["reference_policy_kl_penalty"], stage.loss["ratio_clip_c"]) == (0.001, 3.0)
    assert (config.output_dir, stage.optimizer.decay_style) == ("checkpoints/word_problems", "constant")


def test_a_script_of_trl_becomes_an_experiment_that_is_accepted(compose):
    stage = compose(write_experiment(read_source(REAL_FILES[2]))).first
    assert (stage.algorithm.prompts_per_step, stage.train.global_batch_size, stage.train.steps) == (8, 64, 400)
    assert (stage.peft.r, stage.peft.lora_alpha, stage.data.path) == (16, 32, "path/to/problems.jsonl")
    assert [(each.shown_name, each.weight) for each in stage.reward.functions] == [("correct", 1.0), ("brief", 0.1)]
    assert (stage.optimizer.weight_decay, stage.optimizer.beta2) == (0.0, 0.999), "the defaults of TRL"
    assert stage.loss["ratio_clip_max"] == 0.28


@pytest.mark.parametrize(
    ("trainer", "arguments", "algorithm", "loss"),
    [
        ("SFT", "packing=True, max_steps=5", "sft", "clipped_pg"),
        ("DPO", "loss_type=['ipo'], beta=0.2, max_steps=5", "dpo", "ipo"),
        ("KTO", "max_steps=5", "kto", "kto"),
        ("Reward", "max_steps=5", "reward_model", "preference"),
        ("RLOO", "max_steps=5, per_device_train_batch_size=4", "grpo", "clipped_pg"),
        ("CPO", "loss_type='simpo', simpo_gamma=0.7, max_steps=5", "dpo", "simpo"),
        ("CPO", "max_steps=5", "dpo", "cpo"),
        ("ORPO", "max_steps=5", "dpo", "orpo"),
        ("OnlineDPO", "max_steps=5", "online_dpo", "dpo"),
        ("GRPO", "max_steps=5, importance_sampling_level='sequence', beta=0.1", "grpo", "clipped_pg"),
        ("GMPO", "max_steps=5, epsilon=0.3", "grpo", "clipped_pg"),
    ],
)
def test_every_kind_of_trainer_is_accepted(compose, tmp_path, trainer, arguments, algorithm, loss):
    file = tmp_path / "script.py"
    file.write_text(f"{trainer}Trainer('a/b', args={trainer}Config('out', {arguments}), train_dataset=data)\n")
    text = write_experiment(read_source(file))
    stage = compose(text).first
    assert (stage.algorithm.name, stage.loss["name"], stage.train.steps) == (algorithm, loss, 5)
    assert "Not recognised" not in text


@pytest.mark.parametrize("config", [f"{name.removesuffix('Trainer')}Config" for name in trl.TRAINERS])
def test_the_defaults_of_trl_are_those_of_its_configurations(config, monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    module = "trl" if hasattr(importlib.import_module("trl"), config) else None
    module = module or f"trl.experimental.{config.removesuffix('Config').lower().replace('online', 'online_')}"
    own = {
        field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        for field in dataclasses.fields(getattr(importlib.import_module(module), config))
    } | {"bf16": True}  # None there, which means true unless fp16 is set
    stated = {key.rpartition(".")[2]: value for key, value in trl.find_defaults(config).items()}
    assert stated == {key: own[key] for key in stated}
    same_here = {"temperature": 1.0, "epsilon": 0.2, "max_completion_length": None}
    named = {key.rpartition(".")[2] for trainer in trl.TRAINERS for key in trl.find_defaults(f"{trainer[:-7]}Config")}
    unsaid = {key for key in named - {*stated, *same_here} if own.get(key) is not None}
    assert unsaid <= {"truncation_mode", "vllm_importance_sampling_mode"}
    assert all(own.get(key, value) == value for key, value in same_here.items() if key not in stated)


@pytest.mark.parametrize(
    ("section", "loss"), [("dpo", "dpo"), ("sft", "clipped_pg"), ("rm", "preference"), ("grpo", "clipped_pg")]
)
def test_every_algorithm_of_nemo_rl_is_accepted(compose, tmp_path, section, loss):
    file = tmp_path / "file.yaml"
    file.write_text(yaml.safe_dump({section: {"max_num_steps": 3}, "policy": {"train_global_batch_size": 8}}))
    stage = compose(write_experiment(read_source(file))).first
    assert (stage.loss["name"], stage.train.steps) == (loss, 3)
    assert stage.train.global_batch_size == (16 if section in ("dpo", "rm") else 8), "a pair is two sequences"


NEMO = {"grpo": {"max_num_steps": 1}, "policy": {"model_name": "a/b"}}
VERL = "actor_rollout_ref__actor__"


@pytest.mark.parametrize(
    ("content", "here", "value"),
    [
        (nest(grpo__adv_estimator={"name": "gdpo"}, policy={}), "algorithm.advantage_estimator", "group_decoupled"),
        (nest(grpo={}, policy__precision="float32"), "precision", "fp32"),
        (nest(grpo={}, policy__generation__backend="megatron"), "generation.engine", "embedded"),
        (
            nest(grpo={"seed": 3}, policy__generation__max_new_tokens="${mul:${grpo.seed}, 4}"),
            "generation.max_new_tokens",
            12,
        ),
        (
            nest(
                grpo={},
                policy={
                    "scheduler": [
                        {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"total_iters": 50}},
                        {"name": "torch.optim.lr_scheduler.ConstantLR", "kwargs": {"factor": 1.0}},
                        {"milestones": [50]},
                    ]
                },
            ),
            "optimizer.warmup_steps",
            50,
        ),
        (
            nest(grpo={}, policy={}, logger={"wandb_enabled": True, "wandb": {"project": "p", "name": "n"}}),
            "logger.wandb",
            {"project": "p", "name": "n"},
        ),
        (nest(algorithm__adv_estimator="rloo", actor_rollout_ref={}), "algorithm.leave_one_out", True),
        (nest(actor_rollout_ref={}), "algorithm", "ppo"),
        (nest(actor_rollout_ref={}), "optimizer.lr", 1e-6),
        (nest(actor_rollout_ref={}), "loss.reference_policy_kl_penalty", 0.0),
        (
            nest(algorithm={"use_kl_in_reward": True, "kl_ctrl": {"kl_coef": 0.2}}, actor_rollout_ref={}),
            "loss.reference_policy_kl_penalty",
            0.2,
        ),
        (nest(**{f"{VERL}loss_agg_mode": "seq-mean-token-sum-norm"}), "loss.fixed_sequence_length", 512),
        (nest(**{f"{VERL}policy_loss__loss_mode": "gspo"}), "loss.token_level_loss", False),
        (nest(**{f"{VERL}clip_ratio": 0.3, f"{VERL}clip_ratio_high": None}), "loss.ratio_clip_max", 0.3),
        (nest(**{f"{VERL}policy_loss__loss_mode": "sapo", f"{VERL}loss_agg_mode": "token-mean"}),
         "loss.token_level_loss", False),
        (nest(**{f"{VERL}policy_loss__loss_mode": "kl_cov"}), "loss.kl_cov_coef", 0.1),
        (nest(**{f"{VERL}tis_imp_ratio_cap": 2.0}), "loss.truncated_importance_sampling_ratio", 2.0),
        (nest(**{f"{VERL}optim": {"lr": 1e-5, "warmup_style": "cosine", "min_lr_ratio": 0.1}}),
         "optimizer.min_lr", pytest.approx(1e-6)),
        (nest(actor_rollout_ref__model={"lora_rank": 4}), "peft.lora_alpha", 16),
        (nest(algorithm__use_kl_in_reward=True, actor_rollout_ref={}), "loss.reference_policy_kl_type", "k1"),
        (nest(actor_rollout_ref={}), "train.keep_checkpoints", 10**6),
        (nest(grpo={}, policy={}, checkpointing__keep_top_k=None), "train.keep_checkpoints", 10**6),
        (nest(grpo={}, policy={}), "optimizer.decay_style", "constant"),
        (nest(trainer__save_freq=-1, actor_rollout_ref={}), "train.save_every", 0),
        (nest(actor_rollout_ref__model={"lora_rank": 4, "lora_alpha": 8}), "peft.lora_alpha", 8),
        (nest(actor_rollout_ref__rollout={"name": "sglang", "gpu_memory_utilization": 0.4}),
         "generation.sglang.mem_fraction_static", 0.4),
    ],
)  # fmt: skip
def test_a_value_is_converted(tmp_path, content, here, value):
    result = translate_text(tmp_path, content)
    assert result.values[here] == value and not result.unknown


@pytest.mark.parametrize(
    ("arguments", "here", "value"),
    [
        ("loss_type='cispo', epsilon_high=5.0", "loss.ratio_clip_max", 4.0),
        ("loss_type='dr_grpo', max_completion_length=300", "loss.fixed_sequence_length", 300.0),
        ("importance_sampling_level='sequence', loss_type='grpo'", "loss.token_level_loss", False),
        ("scale_rewards='none'", "algorithm.normalize_std", False),
        ("warmup_ratio=0.1, max_steps=200", "optimizer.warmup_steps", 20),
        ("gradient_accumulation_steps=2, steps_per_generation=4, max_steps=10", "train.steps", 5),
        ("gradient_accumulation_steps=2, steps_per_generation=4", "algorithm.prompts_per_step", 4),
        ("report_to='wandb', run_name='n'", "logger.wandb", {"name": "n"}),
        ("max_steps=10, save_steps=4, num_iterations=2", "train.save_every", 2),
        ("max_steps=10, eval_strategy='steps', eval_steps=3, num_iterations=2", "train.eval_every", 2),
        ("generation_batch_size=64", "algorithm.prompts_per_step", 8),
        ("beta=0.1", "loss.use_on_policy_kl_approximation", True),
        ("", "train.keep_checkpoints", 10**6),
        (
            "use_vllm=True, vllm_importance_sampling_mode='token_truncate', vllm_importance_sampling_cap=4.0",
            "loss.truncated_importance_sampling_ratio",
            4.0,
        ),
        (
            "use_vllm=True, vllm_importance_sampling_mode='token_truncate', vllm_importance_sampling_clip_min=0.5",
            "loss.truncated_importance_sampling_ratio_min",
            0.5,
        ),
        ("", "optimizer.lr", 1e-6),
        ("", "optimizer.decay_style", "linear"),
    ],
)
def test_an_argument_of_trl_is_converted(tmp_path, arguments, here, value):
    script = f"trainer = GRPOTrainer('a/b', reward_funcs=f, args=GRPOConfig('out', {arguments}))\n"
    assert translate_text(tmp_path, script, "script.py").values[here] == value


@pytest.mark.parametrize(
    ("trainer", "arguments", "here"),
    [
        ("CPO", "", {"loss.sft_average_log_probs": True, "loss.sft_loss_weight": 1.0, "loss.beta": 0.1}),
        ("CPO", "loss_type='simpo'", {"loss.gamma": 0.5, "loss.beta": 0.1, "loss.sft_loss_weight": 1.0}),
        ("DPO", "loss_type=['sigmoid', 'sft'], loss_weights=[1.0, 0.2]", {"loss.sft_average_log_probs": True}),
        ("OnlineDPO", "gradient_accumulation_steps=2",
         {"algorithm.prompts_per_step": 16, "train.global_batch_size": 32, "loss.reference_policy_kl_penalty": 0.1}),
        ("GMPO", "beta=0.5", {"loss.ratio_clip_min": 0.4, "loss.reference_policy_kl_penalty": 0.5}),
    ],
)  # fmt: skip
def test_an_argument_of_another_trainer_is_converted(tmp_path, trainer, arguments, here):
    result = translate_text(tmp_path, f"{trainer}Trainer('a/b', args={trainer}Config('out', {arguments}))", "script.py")
    assert {key: result.values[key] for key in here} == here


@pytest.mark.parametrize(
    ("content", "setting", "words"),
    [
        ("CPOTrainer('a/b', args=CPOConfig('out'))", "CPOConfig.cpo_alpha", "tokens of all chosen answers and their"),
        ("GRPOTrainer('a/b', args=GRPOConfig('out', importance_sampling_level='sequence'))",
         "importance_sampling_level", "and not as dapo"),
        ("GRPOTrainer('a/b', args=GRPOConfig('out', beta=0.1, use_bias_correction_kl=False))",
         "use_bias_correction_kl", "always has the term"),
        ("GRPOTrainer('a/b', args=GRPOConfig('out', generation_batch_size=64))",
         "generation_batch_size", "by your number of devices"),
        ("GRPOTrainer('a/b', args=GRPOConfig('out', vllm_structured_outputs_regex='a+'))",
         "vllm_structured_outputs_regex", "own distribution"),
        ("GRPOTrainer('a/b', args=GRPOConfig('out', **common))", "arguments of GRPOConfig", "NAME=VALUE"),
        ("GRPOTrainer('a/b', rewards, args=GRPOConfig('out'))", "arguments of GRPOTrainer", "NAME=VALUE"),
        ("SFTTrainer('a/b', args=SFTConfig('out', packing=True))", "per_device_train_batch_size", "counts packs"),
        ("SFTTrainer('a/b')", "assistant_only_loss", "all tokens"),
        ("d = load_dataset('a/b').train_test_split(0.1)\nSFTTrainer('a/b', eval_dataset=d['test'])",
         "eval_dataset", "data.heldout_fraction"),
        ("SFTTrainer('a/b', train_dataset=load_dataset('a/b', revision='main'))", "train_dataset", "revision"),
        (nest(actor_rollout_ref__rollout__do_sample=False), "actor_rollout_ref.rollout.do_sample", "always sampled"),
        (nest(actor_rollout_ref__rollout__val_kwargs__temperature=0.6),
         "actor_rollout_ref.rollout.val_kwargs.temperature", "eval.sets"),
        (nest(actor_rollout_ref={}, trainer__val_only=True), "trainer.val_only", "rl-megatron eval"),
        (nest(actor_rollout_ref={}, critic__ppo_epochs=3), "critic.ppo_epochs", "the policy's epochs"),
        (nest(**{f"{VERL}clip_ratio": 0.3}), f"{VERL}clip_ratio".replace("__", "."), "are 0.2 by default"),
        (nest(actor_rollout_ref={}, algorithm__rollout_correction__rollout_is_batch_normalize=True),
         "algorithm.rollout_correction.rollout_is_batch_normalize", "not normalized"),
        (nest(grpo__use_leave_one_out_baseline=True, policy={}), "grpo.use_leave_one_out_baseline", "the mean only"),
        (nest(sft={}, policy__max_total_sequence_length=64, data__max_input_seq_length=32),
         "data.max_input_seq_length", "more than 64 tokens"),
        (nest(grpo={}, policy__scheduler=[{"name": "LinearLR", "kwargs": {"start_factor": 0.1, "total_iters": 5}}]),
         "policy.scheduler", "begins at 0.1"),
        (nest(grpo={}, policy__scheduler=[{"name": "LinearLR", "kwargs": {"end_factor": 0.1, "total_iters": 5}}]),
         "policy.scheduler", "set optimizer.warmup_steps"),
        (nest(grpo={}, policy__dtensor_cfg__lora_cfg={"enabled": True, "dropout": 0.1, "dropout_position": "post"}),
         "policy.dtensor_cfg.lora_cfg.dropout_position", "of the adapters' input"),
        (nest(grpo={}, policy__megatron_cfg={"enabled": True, "peft": {"enabled": True, "exclude_modules": ["a"]}}),
         "policy.megatron_cfg.peft.exclude_modules", "Hugging Face names"),
    ],
)  # fmt: skip
def test_what_is_not_the_same_is_listed(tmp_path, content, setting, words):
    result = translate_text(tmp_path, content, "script.py" if isinstance(content, str) else "theirs.yaml")
    reasons = {shown.partition("=")[0]: reason for shown, reason in (*result.missing, *result.different)}
    assert words in reasons[setting] and not result.unknown


def test_a_loss_of_verl_without_a_dual_clip_gets_none(tmp_path):
    result = translate_text(tmp_path, nest(**{f"{VERL}policy_loss__loss_mode": "gspo", f"{VERL}clip_ratio_c": 3.0}))
    assert result.values["loss.sequence_level_importance_ratios"] and "loss.ratio_clip_c" not in result.values


def test_arguments_that_may_be_given_have_no_defaults(tmp_path):
    result = translate_text(tmp_path, "GRPOTrainer('a/b', args=GRPOConfig('out', **common))", "script.py")
    assert "optimizer.lr" not in result.values


@pytest.mark.parametrize("key", ["actor_rollout_ref.actor.new", "actor_rollout_ref.rollout.new", "trainer.new"])
def test_a_key_that_no_row_names_is_not_called_harmless(tmp_path, key):
    result = translate_text(tmp_path, nest(actor_rollout_ref__actor={}, **{key.replace(".", "__"): 1}))
    assert result.unknown == [f"{key}=1"]


def test_a_text_of_several_lines_stays_on_the_line_of_its_key(tmp_path):
    template = "{{ a }}\n# not: a comment\n: more"
    script = tmp_path / "script.py"
    script.write_text(f"SFTTrainer('a/b', args=SFTConfig({template!r}, new={template!r}))")
    text = write_experiment(read_source(script))
    assert yaml.safe_load(text)["output_dir"] == template
    assert all(line.startswith("#") for line in text.partition("# Not recognised")[2].splitlines()[1:])


@pytest.mark.parametrize(
    ("rewards", "functions"),
    [
        ("[own, other]", [{"name": "{file}:own"}, {"name": "rewards.maths:other"}]),
        ("'org/model'", [{"name": "reward_model", "kwargs": {"hf": "org/model"}}]),
    ],
)
def test_rewards_of_trl_are_named_where_they_are(tmp_path, rewards, functions):
    script = (
        "from rewards.maths import other\ndef own(completions): ...\n"
        f"if __name__ == '__main__':\n    GRPOTrainer('a/b', reward_funcs={rewards}, args=GRPOConfig('out'))\n"
    )
    result = translate_text(tmp_path, script, "script.py")
    named = [{**each, "name": each["name"].format(file=tmp_path / "script.py")} for each in functions]
    assert result.values["reward.functions"] == named
    assert not any("importing this file would train" in reason for _, reason in result.missing)


def test_a_script_is_not_executed_and_its_computed_values_are_listed(tmp_path):
    script = (
        "raise SystemExit('executed')\nrate = compute()\ndef own(completions): ...\n"
        "data = load_dataset('org/set', 'main', split='train').map(change)\n"
        "GRPOTrainer(model=AutoModel.from_pretrained('a/b'), reward_funcs=[own], train_dataset=data,\n"
        "    args=GRPOConfig('out', learning_rate=rate))\n"
    )
    result = translate_text(tmp_path, script, "script.py")
    missing = dict(result.missing)
    assert missing["learning_rate=compute()"] == "the file computes this value; set optimizer.lr"
    assert "optimizer.lr" not in result.values and result.values["init_from"] == "checkpoints/b"
    assert (result.values["data.dataset_name"], result.values["data.subset"]) == ("org/set", "main")
    assert "in code" in missing["train_dataset.map=true"]
    assert any("importing this file would train" in reason for reason in missing.values())


@pytest.mark.parametrize("option", ["gradient_accumulation_steps=size", "generation_batch_size=2 * size"])
def test_a_value_that_is_read_with_a_computed_one_is_listed(tmp_path, option):
    result = translate_text(
        tmp_path, f"GRPOTrainer('a/b', args=GRPOConfig('out', max_steps=3, {option}))\n", "script.py"
    )
    reasons = {setting.partition("=")[0]: reason for setting, reason in result.missing}
    assert "set train.steps" in reasons["max_steps"] and "train.steps" not in result.values
    key = "generation_batch_size" if option.startswith("gen") else "per_device_train_batch_size"
    assert "the file computes" in reasons[key] or "set train.global_batch_size or" in reasons[key]


def test_what_has_no_counterpart_and_what_is_not_known_is_listed(tmp_path):
    tree = {"grpo": {"overlong_filtering": True, "max_num_stpes": 3}, "policy": {"made_up": {"key": 1}}}
    file = tmp_path / "theirs.yaml"
    file.write_text(yaml.safe_dump(tree))
    text = write_experiment(read_source(file))
    assert "\n# - grpo.overlong_filtering=true: no completion is left out" in text
    unknown = text.partition("# Not recognised")[2]
    assert "\n# - grpo.max_num_stpes=3\n" in unknown and "\n# - policy.made_up.key=1\n" in unknown


def test_two_keys_with_different_values_of_one_key_here_are_reported(tmp_path):
    tree = nest(
        grpo={}, policy={"max_grad_norm": 1.0, "megatron_cfg": {"enabled": True, "optimizer": {"clip_grad": 2.0}}}
    )
    result = translate_text(tmp_path, tree)
    assert result.values["optimizer.clip_grad"] == 1.0
    assert dict(result.missing)["policy.megatron_cfg.optimizer.clip_grad"].startswith("it sets optimizer.clip_grad too")


@pytest.mark.parametrize(("saved", "kept"), [(20, "reward"), (15, None)])
@pytest.mark.parametrize("section", ["grpo", "dpo"])
def test_the_best_checkpoint_is_kept_only_if_every_saved_one_is_evaluated(tmp_path, section, saved, kept):
    checkpoints = {"enabled": True, "save_period": saved, "metric_name": "val:accuracy"}
    result = translate_text(tmp_path, nest(**{section: {"val_period": 10}}, policy={}, checkpointing=checkpoints))
    assert result.values.get("train.keep_best") == kept
    assert bool(result.missing) == (kept is None)


def test_keys_of_the_backend_that_is_off_are_not_read(tmp_path):
    tree = nest(
        grpo={},
        policy={
            "megatron_cfg": {"enabled": False, "tensor_model_parallel_size": 8},
            "dtensor_cfg": {"tensor_parallel_size": 2},
            "optimizer": {"kwargs": {"lr": 3e-6}},
        },
    )
    result = translate_text(tmp_path, tree)
    assert (result.values["parallel.tensor"], result.values["optimizer.lr"]) == (2, 3e-6)
    assert list(result.unread) == ["policy.megatron_cfg."]


def test_a_recipe_of_nemo_rl_is_read_on_top_of_its_defaults(tmp_path):
    (tmp_path / "base.yaml").write_text(yaml.safe_dump({**NEMO, "grpo": {"max_num_steps": 1, "seed": 4}}))
    result = translate_text(tmp_path, {"defaults": "base.yaml", "grpo": {"max_num_steps": 2}})
    assert (result.values["train.steps"], result.values["train.seed"]) == (2, 4) and not result.unknown


@pytest.fixture
def refuse(tmp_path, monkeypatch, capsys):
    """`refuse(name, content, *options)`: the line with which `migrate` refuses a file."""
    monkeypatch.chdir(tmp_path)

    def run(name, content, *options):
        if content is not None:
            Path(name).write_text(content)
        assert main(["migrate", name, *options]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1
        return err.removeprefix("error: ")

    return run


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("none.yaml", None, "none.yaml cannot be read"),
        (
            "ours.yaml",
            "train: {steps: 3}",
            "is neither of NeMo RL, whose files have the sections policy and one of grpo",
        ),
        ("list.yaml", "[1, 2]", "list.yaml has no keys"),
        ("broken.yaml", "a: [1", "broken.yaml cannot be read as YAML"),
        ("recipe.yaml", "defaults: missing.yaml\npolicy: {}", "defaults names missing.yaml, which does not exist"),
        ("other.py", "import trl\n", "other.py calls 0 trainers; it must call exactly one of GRPOTrainer"),
        ("distil.py", "GKDTrainer(m)\n", "distil.py calls GKDTrainer, which has no translation; these do: GRPOTrainer"),
        ("two.py", "SFTTrainer(m)\nDPOTrainer(m)\n", "two.py calls 2 trainers (SFTTrainer, DPOTrainer)"),
        ("broken.py", "def f(:\n", "broken.py, line 1, is not Python"),
        (
            "parsed.py",
            "script, config = parser.parse()\nGRPOTrainer('m', args=config)\n",
            "the arguments of GRPOTrainer are not written in the script (config); write a call of GRPOConfig",
        ),
    ],
)
def test_a_file_that_cannot_be_translated_is_refused(refuse, name, content, words):
    assert words in refuse(name, content)


def test_a_file_is_never_overwritten(refuse, tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text("kept")
    message = refuse("theirs.yaml", yaml.safe_dump(NEMO), "--output", "mine.yaml")
    assert message.startswith("--output mine.yaml exists") and (tmp_path / "mine.yaml").read_text() == "kept"
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump({**NEMO, "made_up": 1}))
    assert main(["migrate", "theirs.yaml", "--output", "new/experiment/mine.yaml"]) == 0
    assert "1 not recognised" in capsys.readouterr().out
    assert (tmp_path / "new/experiment/mine.yaml").read_text().startswith("# @package _global_\n")


def test_the_library_can_be_named(tmp_path):
    file = tmp_path / "part.yaml"
    file.write_text(yaml.safe_dump({"trainer": {"test_freq": 4}}))
    assert translate(read_source(file, "verl")).values["train.eval_every"] == 4


@pytest.mark.parametrize("library", LIBRARIES.values(), ids=LIBRARIES)
def test_a_key_of_a_table_as_an_override_names_the_key_here(library):
    known = real_keys()
    for key in library.keys:
        if "*" in key or key in known or library.keys[key].is_automatic:
            continue
        rows = [each.keys[key] for each in LIBRARIES.values() if key in each.keys]  # libraries share some names
        hints = [f"did you mean {row.here[0]!r}" if row.is_translated and row.here else row.note for row in rows]
        assert suggest_key(key, known).startswith(tuple(f"; {hint}" for hint in hints)), key


@pytest.mark.parametrize(
    ("override", "here"),
    [
        ("grpo.num_generations_per_prompt=4", "algorithm.samples_per_prompt"),
        ("policy.megatron_cfg.tensor_model_parallel_size=2", "parallel.tensor"),
        ("policy.optimizer.kwargs.lr=1e-6", "optimizer.lr"),
        ("model.lora.rank=8", "peft.r"),
        ("lora.rank=8", "peft.r"),
    ],
)
def test_the_command_line_answers_a_key_of_another_library(tmp_path, monkeypatch, capsys, override, here):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "algorithm=grpo", override]) == 2
    assert f"did you mean {here!r}?" in capsys.readouterr().err


def test_the_command_does_not_import_torch():
    code = "import sys; from rl_megatron.cli import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, "migrate", REAL_FILES[0]], check=True, capture_output=True)
