"""The YAML files agree with the dataclasses, and all shipped configurations load."""

from dataclasses import MISSING, asdict, fields, is_dataclass

import pytest
import yaml
from pydantic import TypeAdapter

from rl_megatron.config import algorithms, schema
from rl_megatron.config.generation import GenerationConfig
from rl_megatron.config.loading.compose import config_directory
from rl_megatron.config.loading.load import load_config, to_yaml
from rl_megatron.config.model import ModelConfig
from rl_megatron.config.optimizer import OptimizerConfig
from rl_megatron.config.parallel import ParallelConfig
from rl_megatron.config.tokenizer import TokenizerConfig
from rl_megatron.config.train import TrainConfig

CONFIGS = config_directory()
GROUPS = sorted(path.name for path in CONFIGS.iterdir() if path.is_dir() and path.name != "experiment")
EXPERIMENTS = sorted(path.stem for path in (CONFIGS / "experiment").glob("*.yaml"))
OPTIONS = [(group, path.stem) for group in GROUPS for path in sorted((CONFIGS / group).glob("*.yaml"))]
# What else a choice needs: files of the user's own, and an algorithm that reads this kind of data.
ALSO = {
    ("data", "gsm8k"): ["data.path=somewhere"],
    ("data", "gsm8k_pairs"): ["data.path=somewhere", "algorithm=dpo"],
    ("data", "verifiers"): [
        "algorithm=grpo",
        "rollout.worker=verifiers",
        "rollout.environment.name=reverse-text",
        "rollout.environment.kwargs={size: 3}",
    ],
    ("data", "text"): ["data.path=somewhere", "algorithm=pretrain"],
    ("algorithm", "distillation"): ["algorithm.teachers=[{path: somewhere}]"],
    ("algorithm", "on_policy_distillation"): ["algorithm.teachers=[{path: somewhere}]"],
    ("algorithm", "opd"): ["algorithm.teachers=[{path: somewhere}]"],
    ("algorithm", "dpo"): ["data=gsm8k_pairs", "data.path=somewhere"],
    ("algorithm", "reward_model"): ["data=gsm8k_pairs", "data.path=somewhere"],
}
ALGORITHMS = {
    "pretrain": algorithms.PretrainConfig,
    "sft": algorithms.SFTConfig,
    "dpo": algorithms.DPOConfig,
    "kto": algorithms.KTOConfig,
    "online_dpo": algorithms.OnlineDPOConfig,
    "distillation": algorithms.DistillationConfig,
    "on_policy_distillation": algorithms.OnPolicyDistillationConfig,
    "opd": algorithms.OnPolicyDistillationConfig,
    "reward_model": algorithms.RewardModelConfig,
    "grpo": algorithms.GRPOConfig,
    "ppo": algorithms.PPOConfig,
}
SECTIONS = {
    "parallel": ParallelConfig,
    "optimizer": OptimizerConfig,
    "train": TrainConfig,
    "tokenizer": TokenizerConfig,
    "generation": GenerationConfig,
}

# A run knows its last step, so its learning rate decays to it; a policy that is built in Python need not.
DECAYS = {"decay_style": "cosine"}


def read(*path):
    return yaml.safe_load(CONFIGS.joinpath(*path).read_text())


def default_of(field):
    return field.default if field.default_factory is MISSING else field.default_factory()


def plain(value):
    """As YAML would have it: a section is a mapping, a tuple a list."""
    if is_dataclass(value):
        return {key: plain(each) for key, each in asdict(value).items()}
    return list(value) if isinstance(value, tuple) else value


def needs_a_path(name):
    try:
        load_config([f"experiment={name}"])
    except ValueError as error:
        assert "data.path" in str(error)
        return True
    return False


@pytest.mark.parametrize(
    ("algorithm", "loss"),
    [
        ("dpo", "dpo"),
        ("online_dpo", "dpo"),
        ("kto", "kto"),
        ("reward_model", "preference"),
        ("distillation", "full_distillation"),
        ("on_policy_distillation", "clipped_pg"),
        ("grpo", "clipped_pg"),
    ],
)
def test_an_algorithm_chooses_its_usual_loss(algorithm, loss, tmp_path):
    given = [f"algorithm={algorithm}", *ALSO.get(("algorithm", algorithm), [])]
    assert load_config(given).first.loss == read("loss", f"{loss}.yaml")
    assert load_config(given) == load_config([*given, f"loss={loss}"]), "a run that is resumed compares them"
    assert load_config([*given, "loss=simpo"]).first.loss == read("loss", "simpo.yaml")
    own = tmp_path / "mine.py"
    own.write_text("class Loss: ...\n")
    assert load_config([*given, f"loss.name={own}:Loss", "loss.x=3"]).first.loss == {"name": f"{own}:Loss", "x": 3}
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "own.yaml").write_text(
        f"# @package _global_\ndefaults:\n  - override /loss: ipo\n  - override /algorithm: {algorithm}\n"
    )
    (tmp_path / "mine.yaml").write_text(f"defaults:\n  - config\n  - override algorithm: {algorithm}\n  - _self_\n")
    others = ALSO.get(("algorithm", algorithm), [])
    assert load_config(["experiment=own", *others], str(tmp_path)).first.loss == read("loss", "ipo.yaml")
    assert load_config(others, str(tmp_path), "mine").first.loss == read("loss", f"{loss}.yaml")


def test_stages_share_the_loss_of_the_run_as_before():
    losses = [stage.loss["name"] for stage in load_config(["experiment=gsm8k_dpo", "data.path=x"]).stages.values()]
    assert losses == ["dpo", "dpo"]
    losses = {stage.loss["name"] for stage in load_config(["experiment=quickstart"]).stages.values()}
    assert losses == {"clipped_pg"}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_loads(name):
    config = load_config([f"experiment={name}", *(["data.path=somewhere"] if needs_a_path(name) else [])])
    assert config.stages and config.output_dir == f"outputs/{name}"


def test_the_default_output_directory_carries_a_name(tmp_path):
    assert load_config([]).output_dir == "outputs/sft"
    assert load_config(["algorithm=grpo", "output_dir=null"]).output_dir == "outputs/grpo"
    assert load_config(["output_dir=mine"]).output_dir == "mine"
    (tmp_path / "own.yaml").write_text("defaults: [config, _self_]\ntrain: {steps: 7}\n")
    config = load_config(["train.seed=3"], str(tmp_path), "own")
    assert (config.output_dir, config.first.train.steps, config.first.train.seed) == ("outputs/own", 7, 3)


# model=init_from has its values from a checkpoint: tests/unit/config/test_checkpoint_metadata.py
@pytest.mark.parametrize(("group", "option"), [pair for pair in OPTIONS if pair != ("model", "init_from")])
def test_every_option_of_every_group_loads(group, option):
    also = ALSO.get((group, option), [])
    stage = load_config([f"{group}={option}", *also]).first
    chosen, given = getattr(stage, group), read(group, f"{option}.yaml")
    overridden = {override.partition("=")[0] for override in also}
    for key, value in given.items():
        if key != "defaults" and f"{group}.{key}" not in {"data.path", "data.source"} | overridden:
            found = chosen[key] if isinstance(chosen, dict) else getattr(chosen, key)
            if (group, option) == ("data", "verifiers") and key == "task":
                value = {"name": "verifiers", "environment": "reverse-text", "kwargs": {"size": 3}, "python": None}
            assert plain(found) == value


@pytest.mark.parametrize(("group", "option"), [pair for pair in OPTIONS if pair[0] in ("model", "data", "algorithm")])
def test_every_option_spells_out_every_key(group, option):
    if group == "data" and option != "files":
        assert read(group, f"{option}.yaml")["defaults"] == ["files", "_self_"], "the other keys come from there"
        return
    section = {
        "model": ModelConfig,
        "data": schema.DataConfig,
        "algorithm": ALGORITHMS.get(option),
    }[group]
    assert set(read(group, f"{option}.yaml")) - {"defaults"} == {field.name for field in fields(section)}


@pytest.mark.parametrize("option", ["gsm8k", "gsm8k_pairs", "text", "arithmetic"])
def test_data_presets_have_no_key_without_effect(option):
    given = read("data", f"{option}.yaml")
    assert not set(given) & set(schema.SOURCE_CONFIGS[given["source"]].ignores)


@pytest.mark.parametrize("name", sorted(SECTIONS.keys() - {"peft"}))  # there are no adapters by default
def test_the_yaml_defaults_are_those_of_the_schema(name):
    options = sorted((CONFIGS / name).glob("*.yaml")) if (CONFIGS / name).is_dir() else []
    assert len(options) < 2, "which of them holds the defaults?"
    given = yaml.safe_load(options[0].read_text()) if options else read("config.yaml")[name]
    declared = {field.name: plain(default_of(field)) for field in fields(SECTIONS[name])}
    if name == "train":
        for key in ("batching", "global_batch_size"):
            assert given.pop(key) is None, "each algorithm has its usual one"
            del declared[key]
    if name == "optimizer":
        declared |= DECAYS
    assert given == declared


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_the_defaults_of_an_algorithm_are_those_of_the_schema(name):
    declared = {field.name: plain(default_of(field)) for field in fields(ALGORITHMS[name])}
    given = read("algorithm", f"{name}.yaml")
    given.pop("defaults", None)  # they choose the loss
    assert given == declared


def test_the_top_level_names_every_section_and_key():
    given = read("config.yaml")
    groups = {next(iter(entry)) for entry in given.pop("defaults") if entry != "_self_"} - {"experiment"}
    declared = {f.name for f in fields(schema.StageConfig)} | {f.name for f in fields(schema.RunConfig)}
    assert groups | set(given) == declared
    for field in fields(schema.RunConfig):
        if default_of(field) is not MISSING:
            assert given[field.name] == plain(default_of(field))


def test_the_loss_defaults_are_those_of_the_loss():
    from rl_megatron.losses import ClippedPGLossConfig

    given = read("loss", "clipped_pg.yaml")
    assert given.pop("name") == "clipped_pg"
    assert given == {field.name: default_of(field) for field in fields(ClippedPGLossConfig)}


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["experiment=quickstart"],
        ["algorithm=ppo", "algorithm.critic_optimizer.lr=1e-30", "algorithm.value_clip=null"],
        ["algorithm=reward_model", "data=gsm8k_pairs", "data.path=x"],
        ["algorithm=grpo", "generation.stop_tokens=['\\n',x]", "model.head_dim=16", "optimizer.lr=1e-30"],
        [
            "data=text",
            "algorithm=pretrain",
            "data.path='a: b # c'",
            "init_from='~/x'",
            "output_dir='1'",
            "resume=false",
        ],
    ],
)
def test_the_effective_configuration_reads_back(overrides):
    config = load_config(overrides)
    text = to_yaml(config)
    assert TypeAdapter(schema.RunConfig).validate_python(yaml.safe_load(text)) == config
    assert list(yaml.safe_load(text)["stages"]) == list(config.stages), "the order of the stages is kept"


def test_stages_build_on_the_sections_of_the_run(tmp_path):
    stages = {
        "sft": {"algorithm": {"name": "sft"}, "optimizer": {"lr": 0.5}},
        "grpo": {"algorithm": {"name": "grpo"}, "loss": {"reference_policy_kl_penalty": 0.0}},
    }
    (tmp_path / "experiment").mkdir()
    tree = yaml.safe_dump({"stages": stages}, sort_keys=False)
    (tmp_path / "experiment" / "two.yaml").write_text("# @package _global_\n" + tree)
    config = load_config(["experiment=two", "optimizer.beta2=0.25", "stages.sft.train.seed=7"], str(tmp_path))
    assert [stage.optimizer.beta2 for stage in config.stages.values()] == [0.25] * 2
    assert [stage.optimizer.lr for stage in config.stages.values()] == [0.5, 1e-3]
    assert [stage.train.seed for stage in config.stages.values()] == [7, 0]
    assert config.stages["grpo"].loss["reference_policy_kl_penalty"] == 0.0
    assert config.stages["grpo"].loss["ratio_clip_max"] == 0.2, "the rest of the loss is the run's"


def test_the_configuration_is_frozen():
    config = load_config([])
    with pytest.raises(AttributeError):
        config.first.train.steps = 3
