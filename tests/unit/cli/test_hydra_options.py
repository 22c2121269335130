"""What users of Hydra expect: sweeps, `--cfg`, `--info`, `--config-name`, and completion in bash."""

import os
import re

import pytest
import yaml

from rl_megatron.cli import main
from rl_megatron.cli.hydra_options import list_completions
from rl_megatron.cli.sweep import expand_sweep
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.loading.compose import config_directory

COMMANDS = ("train", "certify", "inspect")


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A directory with an experiment and a primary configuration of the user's own, in the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own" / "experiment").mkdir(parents=True)
    experiment = "# @package _global_\n# Learn to add.\n# And more.\ndefaults:\n  - override /algorithm: sft\n"
    (tmp_path / "own" / "experiment" / "sums.yaml").write_text(f"{experiment}train: {{steps: 5}}\n")
    primary = "defaults: [config, {override data: arithmetic}, {override algorithm: grpo}, _self_]\ntrain: {steps: 7}\n"
    (tmp_path / "own" / "mine.yaml").write_text(primary)
    return "own"


def shown(capsys, *arguments, status=0):
    assert main(list(arguments)) == status
    return capsys.readouterr()


@pytest.mark.parametrize("arguments", [["train"], ["train", "output_dir=x", "train.steps=3"]])
def test_a_command_that_chooses_nothing_lists_the_experiments(own, capsys, arguments):
    answer = shown(capsys, *arguments, "--config-dir", own, status=2)
    assert answer.out == "" and answer.err.startswith("error: nothing says what to train; add experiment=NAME")
    assert re.search(r"^  quickstart +Arithmetic from scratch: pretrain on sums, .*GRPO\.$", answer.err, re.MULTILINE)
    assert re.search(r"^in own:\n  sums  Learn to add\.$", answer.err, re.MULTILINE)
    assert os.listdir() == ["own"], "nothing was written"


def test_other_ranks_are_silent_and_end_with_the_same_status(own, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    for arguments in ([], ["train.stpes=1"], ["data=text", "algorithm=pretrain", "data.path=absent"]):
        assert shown(capsys, "train", *arguments, status=2) == ("", "")
    assert shown(capsys, "train", "--info", "searchpath") == shown(capsys, "train", "--hydra-help") == ("", "")


def test_a_file_that_is_missing_on_another_node_is_named_there(own, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "8")
    monkeypatch.setenv("LOCAL_RANK", "0")
    answer = shown(capsys, "train", "data=text", "algorithm=pretrain", "data.path=absent", status=2)
    assert answer.err.startswith("error: data.path: there is nothing at")


def test_every_experiment_is_described_by_its_first_sentence(own, capsys):
    _, listed, _ = shown(capsys, "train", status=2).err.split("\n\n")
    lines = listed.splitlines()[1:]
    assert len(lines) == len(list((config_directory() / "experiment").glob("*.yaml")))
    assert all(line.endswith(".") and ". " not in line for line in lines)
    assert any(line.endswith("with Qwen3-0.6B, in bf16 on one GPU with 80 GiB or more.") for line in lines)
    assert any(line.endswith("the teacher's distributions on its own completions.") for line in lines)


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize("option", [["--cfg", "job"], ["-c", "job"], ["--print-config"]])
def test_the_configuration_is_printed_on_rank_0_only(own, capsys, monkeypatch, option, rank):
    monkeypatch.setenv("RANK", rank)
    answer = shown(capsys, "train", *option, "-cd", own, "experiment=sums", "data=arithmetic")
    assert answer.err == ""
    assert (yaml.safe_load(answer.out)["output_dir"] == "outputs/sums") if rank == "0" else answer.out == ""


def test_another_primary_configuration_is_chosen_by_its_name(own, capsys):
    answer = shown(capsys, "train", "--config-dir", own, "--config-name", "mine", "train.seed=3", "--cfg", "job")
    config = yaml.safe_load(answer.out)
    assert config["output_dir"] == "outputs/mine"
    assert {key: config["stages"]["grpo"]["train"][key] for key in ("steps", "seed")} == {"steps": 7, "seed": 3}
    missing = shown(capsys, "train", "-cd", own, "-cn", "other", "--cfg", "job", status=2).err
    assert missing.startswith("error: ") and "other" in missing and missing.count("\n") == 1


def test_info_shows_the_search_path_and_the_defaults(own, capsys):
    assert f"{os.getcwd()}/own" in shown(capsys, "train", "--info", "searchpath", "-cd", own).out
    assert "experiment/sums" in shown(capsys, "train", "--info", "defaults", "-cd", own, "experiment=sums").out
    assert "choose one of all, config" in shown(capsys, "train", "--info", "wrong", status=2).err
    assert "did you mean 'train.steps'" in shown(capsys, "train", "train.stpes=1", "--info", "defaults", status=2).err


def test_hydras_help_lists_the_presets(own, capsys):
    out = shown(capsys, "train", "--hydra-help", "-cd", own).out
    assert re.search(r"^algorithm: distillation, dpo, grpo, ", out, re.MULTILINE)
    assert "quickstart_ppo, " in out and "sums" in out


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (["--config-path", "x"], "name a directory of your own with --config-dir"),
        (["--cfg", "hydra"], "choose from"),
        (["--multirun", "--cfg", "job"], "not allowed with"),
    ],
)
def test_options_without_a_meaning_are_refused(capsys, option, words):
    with pytest.raises(SystemExit) as end:
        main(["train", *option])
    assert end.value.code == 2 and words in capsys.readouterr().err


# --- sweeps ---


def swept(*overrides, config_dir=None):
    return [
        (job.name, job.config.output_dir) for job in expand_sweep(["data=arithmetic", *overrides], config_dir, "config")
    ]


def test_a_sweep_has_a_job_and_a_directory_for_each_combination():
    names = [f"train.seed={seed},optimizer.lr={rate}" for seed in (0, 1) for rate in ("0.001", "0.01")]
    jobs = expand_sweep(
        ["data=arithmetic", "train.seed=0,1", "optimizer.lr=1e-3,1e-2", "train.steps=3"], None, "config"
    )
    assert [job.config.output_dir for job in jobs] == [f"outputs/sft/{name}" for name in names]
    assert [(job.config.first.train.seed, job.config.first.optimizer.lr) for job in jobs] == [
        (0, 0.001), (0, 0.01), (1, 0.001), (1, 0.01),
    ]  # fmt: skip
    assert {job.config.first.train.steps for job in jobs} == {3}


@pytest.mark.parametrize(
    ("overrides", "directories"),
    [
        (["train.seed=range(2)", "output_dir=o"], ["o/train.seed=0", "o/train.seed=1"]),
        (["output_dir=a,b"], ["a", "b"]),
        (["output_dir=a,b", "train.seed=1,2"], [f"{o}/train.seed={n}" for o in "ab" for n in "12"]),
        (["algorithm=sft,grpo"], ["outputs/sft/algorithm=sft", "outputs/grpo/algorithm=grpo"]),
        (["train.seed=1"], ["outputs/sft"]),
        (["train.seed=1,2", "train.seed=3"], ["outputs/sft"]),
    ],
)
def test_the_directory_of_a_job_follows_from_its_overrides(overrides, directories):
    assert [directory for _, directory in swept(*overrides)] == directories


def test_values_that_are_no_file_names_have_directories_that_differ():
    first, second, long = (name for name, _ in swept(f"data.path=a/b,a-b,{'x' * 300}"))
    assert re.fullmatch(r"data.path=a-b-[0-9a-f]{8}", first) and second == "data.path=a-b"
    assert len(long) < 140
    ((template, _), (other, _)) = swept('data.prompt_template="Q: {question}\\nA: ","{question} ... {prompt}"')
    assert re.fullmatch(r"data.prompt_template=Q-question-A-[0-9a-f]{8}", template)
    assert re.fullmatch(r"data.prompt_template=question-...-prompt-[0-9a-f]{8}", other)


def test_quoted_values_reach_every_job_unchanged():
    template = 'data.prompt_template="{question} a,b\\\\n"'
    jobs = expand_sweep(["data=arithmetic", template, "train.seed=0,1"], None, "config")
    assert all(template in job.overrides for job in jobs)


def test_every_rank_shuffles_a_sweep_alike():
    jobs = [[name for name, _ in swept("train.seed=shuffle(range(5))")] for _ in range(3)]
    assert jobs[0] == jobs[1] == jobs[2] != [f"train.seed={seed}" for seed in range(5)]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optimizer.lr=interval(1,2)", "a sweep needs single values"),
        ("optimizer.lr=1e-3,-1", "optimizer.lr=-1: input should be greater than 0"),
        ("train.sede=0,1", "did you mean 'train.seed'?"),
        ("data.prompt_template={x},{y}", "quote it for Hydra"),
    ],
)
def test_a_mistake_in_any_job_is_refused_before_the_first(override, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        swept(override)


# --- completion ---


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("rl-megatron ", {"train", "certify", "inspect"}),
        ("rl-megatron tr", {"train"}),
        ("rl-megatron train experiment=quickstart_", {"experiment=quickstart_lora", "experiment=quickstart_ppo"}),
        ("rl-megatron train --config-dir own experiment=su", {"experiment=sums"}),
        ("rl-megatron train optimizer.warm", {"optimizer.warmup_steps="}),
        ("rl-megatron train algorithm=ppo algorithm.critic_w", {"algorithm.critic_warmup_steps="}),
        ("rl-megatron train algor", {"algorithm=", "algorithm."}),
        ("rl-megatron certify experiment=quickstart stages.grpo.optimizer.lr", {"stages.grpo.optimizer.lr="}),
        ("rl-megatron train --print-config parallel.ten", {"parallel.tensor="}),
        ("rl-megatron train experiment=nothing tra", set()),
        ("rl-megatron inspect out", set()),
        ("rl-megatron train --mul", set()),
    ],
)
def test_bash_completes_commands_experiments_presets_and_keys(own, line, expected):
    assert set(list_completions(line, COMMANDS, COMMANDS[:2])) == expected


def test_the_script_for_bash_completes_this_command(capsys, monkeypatch):
    def printed(action):
        with pytest.raises(SystemExit) as end:
            main(["-sc", action])
        assert end.value.code in (None, 0)
        return capsys.readouterr().out

    assert printed("install=bash").rstrip().endswith("-F hydra_bash_completion rl-megatron")
    assert "unset hydra_bash_completion" in printed("uninstall=bash")
    monkeypatch.setenv("COMP_LINE", "rl-megatron train model=na")
    assert printed("query=bash").split() == ["model=nano", "model=nano_moe"]
    for shell in ("fish", "zsh"):
        with pytest.raises(SystemExit) as end:
            main(["-sc", f"install={shell}"])
        assert end.value.code == 2 and "only bash is supported, not zsh, fish" in capsys.readouterr().err
