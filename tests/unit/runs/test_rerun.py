"""An output directory that holds a run: what may change in it, what is refused, and what is kept of finished stages."""

import json
import re
from dataclasses import replace
from functools import cache

import pytest
import yaml

from rl_megatron.api.settings import run_config
from rl_megatron.checkpoint.directory import publish
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.loading.load import load_config, to_yaml
from rl_megatron.rollouts.rows import rollout_file
from rl_megatron.runs.rerun import (
    build_run_yaml,
    check_replays,
    describe_weights,
    find_earlier_run,
    move_aside,
    refuse_changes,
)
from rl_megatron.runs.user_files import digest_files

BASE = ("experiment=quickstart", "stages.sft.train.steps=8")


def saved(directory, step, yaml_text=None, **manifest):
    path, partial = directory / f"step-{step:06d}", directory / "partial"
    partial.mkdir(parents=True)
    if yaml_text is not None:
        (partial / "config.yaml").write_text(yaml_text)
    publish(partial, path, {"step": step, **manifest})
    return path


@cache
def composed(*overrides):
    return load_config([*overrides])


@pytest.fixture
def loaded(tmp_path):
    """`loaded(*overrides)`: the configuration of a run in `tmp_path/run`."""
    return lambda *overrides: replace(composed(*overrides), output_dir=f"{tmp_path}/run")


@pytest.fixture
def run(tmp_path, loaded):
    """A run that finished pretrain, was in the middle of sft, and has not begun grpo."""
    directory, config = tmp_path / "run", loaded(*BASE)
    stages = directory / "checkpoints"
    saved(stages / "pretrain", 650, to_yaml(config), weights_from="init_from=null, new weights of train.seed=0")
    sft_from = "step 650 of stage 'pretrain' (stages.pretrain.train.steps)"
    saved(stages / "sft", 2, to_yaml(config), weights_from=sft_from)
    saved(stages / "sft", 4, to_yaml(config), weights_from=sft_from)
    (directory / "config.yaml").write_text(to_yaml(config))
    return directory


def refusal(config):
    with pytest.raises(ConfigError) as refused:
        refuse_changes(config)
    return str(refused.value)


ALLOWED = (
    "stages.sft.train.steps=16", "stages.grpo.train.eval_every=7", "stages.sft.train.save_every=2",
    "train.async_save=false", "train.keep_checkpoints=5", "data.num_eval_examples=8", "parallel.tensor=2",
    "train.batching=packed", "train.micro_batch_tokens=9999", "device=cpu", "metric_sinks=[jsonl]",
    "train.collective_timeout_minutes=3", "model.head_dim=32", "generation.engine=transformers",
    "generation.gate_prompts=0", "optimizer.overlap=true", "model.recompute=full", "train.fused_head=true",
    "model.cudnn_attention=true",
)  # fmt: skip


def test_a_run_goes_on_with_other_steps_evaluation_saving_logging_layout_and_engines(run, loaded):
    config = loaded(*BASE, *ALLOWED)
    assert config != loaded(*BASE)
    refuse_changes(config)


@pytest.mark.change
@pytest.mark.parametrize(
    ("override", "change"),
    [
        ("stages.sft.optimizer.lr=0.5", "stages.sft.optimizer.lr: 0.0001 → 0.5"),
        ("generation.temperature=0.2", "stages.pretrain.generation.temperature: 1.0 → 0.2"),
        ("stages.sft.train.global_batch_size=64", "stages.sft.train.global_batch_size: 32 → 64"),
        ("data.task.max_operand=9", "stages.sft.data.task.max_operand: 99 → 9"),
        ("model.hidden_size=64", "model.hidden_size: 128 → 64"),
        ("stages.pretrain.train.steps=700", "step 650 of stage 'pretrain' (stages.pretrain.train.steps) → step 700 of"),
        ("init_from=somewhere", "initial weights: init_from=null, new weights of train.seed=0 → init_from=/"),
    ],
)
def test_a_changed_setting_is_refused_with_the_ways_on(run, loaded, override, change):
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    message = refusal(loaded(*BASE, override))
    assert message.startswith(f"output_dir={run} holds a run with other settings (") and change in message
    assert "set another output_dir" in message and f"resume=false, which moves that run to {run}.previous" in message
    assert "only these may change: steps, evaluation, saving, " in message
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_a_changed_key_of_an_element_of_a_list_is_named_alone(tmp_path, loaded):
    before = loaded("algorithm=grpo", "data=arithmetic", "reward.functions=[{name: exact_match, weight: 1.0}]")
    saved(tmp_path / "run" / "checkpoints" / "grpo", 4, to_yaml(before))
    now = loaded("algorithm=grpo", "data=arithmetic", "reward.functions=[{name: exact_match, weight: 2.0}]")
    assert "other settings (reward.functions[0].weight: 1.0 → 2.0);" in refusal(now)


def test_a_stage_that_has_not_begun_may_change_in_everything(run, loaded):
    refuse_changes(loaded(*BASE, "stages.grpo.optimizer.lr=0.5", "stages.grpo.algorithm.prompts_per_step=32"))


def test_a_stage_without_a_checkpoint_has_begun_with_its_first_recorded_step(run, loaded):
    changed = loaded(*BASE, "stages.grpo.optimizer.lr=0.5")
    lines = [{"stage": "grpo", "step": 0, "kind": "eval"}, {"stage": "sft", "step": 1, "kind": "train"}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    refuse_changes(changed)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"stage": "grpo", "step": 1, "kind": "train"}) + "\n")
    assert "stages.grpo.optimizer.lr: 6e-05 → 0.5" in refusal(changed)


def test_stages_may_be_added_but_neither_removed_nor_reordered(run, loaded):
    config = loaded(*BASE)
    more = replace(config, stages={**config.stages, "again": config.stages["grpo"]})
    refuse_changes(more)
    for names in (["pretrain"], ["sft", "grpo"], ["pretrain", "grpo", "sft"]):
        other = replace(config, stages={name: config.stages[name] for name in names})
        assert f"stages: pretrain, sft → {', '.join(names)}" in refusal(other)


def test_keys_that_an_algorithm_declares_may_change(tmp_path):
    dpo = ["algorithm=dpo", "loss=dpo", "data=gsm8k_pairs", "data.path=x", f"output_dir={tmp_path}"]
    saved(tmp_path / "checkpoints" / "dpo", 3, to_yaml(load_config(dpo)))
    (tmp_path / "config.yaml").write_text(to_yaml(load_config(dpo)))
    refuse_changes(load_config([*dpo, "algorithm.precompute_reference=true"]))
    assert "loss.reference_policy_kl_penalty" in refusal(load_config([*dpo, "loss.reference_policy_kl_penalty=1"]))


def test_microbatches_may_not_change_if_the_load_balancing_loss_depends_on_them(tmp_path, loaded):
    experts = ("model=nano_moe", "model.router_aux_loss=0.01")
    saved(tmp_path / "run" / "checkpoints" / "sft", 3, to_yaml(loaded(*experts)))
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(loaded(*experts)))
    assert "train.micro_batch_size: 8 → 4" in refusal(loaded(*experts, "train.micro_batch_size=4"))
    assert "parallel.tensor: 1 → 2" in refusal(loaded(*experts, "parallel.tensor=2"))


def test_microbatches_and_layouts_may_change_if_the_balance_is_that_of_the_whole_batch(tmp_path, loaded):
    experts = ("model=nano_moe", "model.router_aux_loss=0.01", "model.router_aux_loss_scope=global")
    saved(tmp_path / "run" / "checkpoints" / "sft", 3, to_yaml(loaded(*experts)))
    refuse_changes(loaded(*experts, "parallel.tensor=2", "train.micro_batch_size=4"))


def test_a_path_may_be_written_in_another_way(tmp_path, monkeypatch, loaded):
    monkeypatch.chdir(tmp_path)
    text = ("algorithm=pretrain", "data=text")
    saved(tmp_path / "run" / "checkpoints" / "pretrain", 3, to_yaml(loaded(*text, "data.path=a/../b.txt")))
    refuse_changes(loaded(*text, f"data.path={tmp_path}/b.txt"))
    assert "data.path: a/../b.txt → c.txt" in refusal(loaded(*text, "data.path=c.txt"))


def test_a_run_goes_on_after_a_key_was_added(run, loaded):
    for path in (run / "config.yaml", *run.rglob("step-*/config.yaml")):
        before = yaml.safe_load(path.read_text())
        for stage in before["stages"].values():
            del stage["model"]["num_experts"], stage["train"]["batching"]
        path.write_text(yaml.safe_dump(before, sort_keys=False))
    refuse_changes(loaded(*BASE))
    assert "model.num_experts: None → 4" in refusal(loaded(*BASE, "model.num_experts=4"))


def test_many_settings_are_cut_short(run, loaded):
    overrides = ["train.seed=7", "generation.top_k=3", "generation.top_p=0.5", "optimizer.beta1=0.5"]
    message = refusal(loaded(*BASE, *overrides))
    assert message.partition("; set another")[0].count(" → ") == 6 and "and 2 more" in message


def test_an_unreadable_record_names_the_remedy(run, loaded):
    (run / "config.yaml").write_text("")
    with pytest.raises(ConfigError, match="(?s)config.yaml is not a configuration .*restore it"):
        refuse_changes(loaded(*BASE))


def test_a_stage_is_compared_with_its_checkpoint_and_not_with_an_attempt_that_failed(run, loaded):
    """The run's config.yaml is written before the first step, so it may have settings that no step was taken with."""
    (run / "config.yaml").write_text(to_yaml(loaded(*BASE, "train.seed=7")))
    refuse_changes(loaded(*BASE))
    assert "train.seed: 0 → 7" in refusal(loaded(*BASE, "train.seed=7"))


# --- the record ---


def test_the_record_of_a_finished_run_stays_as_it_is(run, loaded, logged):
    one = replace(loaded(*BASE), stages={"pretrain": loaded(*BASE).stages["pretrain"]})
    text = to_yaml(one) + "# the user's note\n"
    (run / "config.yaml").write_text(text)
    shorter = replace(one.first, train=replace(one.first.train, steps=600))
    assert build_run_yaml(replace(one, stages={"pretrain": shorter}), run) == text
    assert logged == [
        f"stage pretrain: skipped, it is complete at step 650: {run}/checkpoints/pretrain/step-000650",
        "stage pretrain: settings that changed have no effect on it: train.steps: 650 → 600",
    ]


def test_finished_stages_keep_their_settings_and_a_resumed_one_says_what_changed(run, loaded, logged):
    config = loaded(*BASE, "stages.sft.train.steps=16", "train.keep_checkpoints=5")
    stages = yaml.safe_load(build_run_yaml(config, run))["stages"]
    assert {name: stage["train"]["keep_checkpoints"] for name, stage in stages.items()} == {
        "pretrain": 2, "sft": 5, "grpo": 5,
    }  # fmt: skip
    assert logged[1:] == [
        "stage pretrain: settings that changed have no effect on it: train.keep_checkpoints: 2 → 5",
        "stage sft: settings that changed apply from here on: train.steps: 8 → 16, train.keep_checkpoints: 2 → 5",
    ]


def test_a_run_in_a_new_directory_says_nothing(tmp_path, loaded, logged):
    config = loaded(*BASE)
    refuse_changes(config)
    assert build_run_yaml(config, tmp_path / "run") == to_yaml(config)
    assert logged == []


# --- resume=false ---


def test_without_resume_a_run_begins_anew_and_the_earlier_one_is_moved_aside(run, loaded, logged):
    anew = loaded(*BASE, "train.seed=7", "resume=false")
    refuse_changes(anew)
    assert not find_earlier_run(anew).exists() and find_earlier_run(loaded(*BASE)) == run
    files = sorted(path.relative_to(run) for path in run.rglob("*"))
    for number in ("previous", "previous-2"):
        move_aside(anew)
        moved = run.with_name(f"run.{number}")
        assert sorted(path.relative_to(moved) for path in moved.rglob("*")) == files and not run.exists()
        assert logged[-1] == f"resume=false: the earlier run is now in {moved}"
        moved.rename(run) if number == "previous" else None
        run.with_name("run.previous").mkdir(exist_ok=True)


def test_a_run_that_goes_on_is_not_moved(run, loaded, monkeypatch):
    move_aside(loaded(*BASE))
    assert run.exists()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")  # torchrun restarts the ranks after a failure
    anew = loaded(*BASE, "resume=false")
    move_aside(anew)
    assert run.exists() and find_earlier_run(anew) == run


def test_without_a_run_there_nothing_is_moved(tmp_path, loaded):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "slurm.log").write_text("")
    move_aside(loaded(*BASE, "resume=false"))
    assert (tmp_path / "run" / "slurm.log").exists()


@pytest.mark.parametrize("key", ["init_from", "tokenizer.path"])
def test_without_resume_a_run_does_not_read_files_of_the_run_that_it_moves(run, loaded, key):
    inside = run / "checkpoints" / "sft" / "step-000004"
    message = refusal(loaded(*BASE, "resume=false", f"{key}={inside}"))
    assert re.match(rf"{key}=.*step-000004 is in output_dir=.* whose run resume=false moves aside; set", message)


# --- initial weights ---


def test_the_weights_that_a_stage_starts_from(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    alone = load_config(["init_from=runs/a/", "train.seed=4"])
    given = f"init_from={tmp_path.resolve()}/runs/a"
    for same in ("runs/a", "runs/b/../a", str(tmp_path / "runs" / "a")):
        assert describe_weights(replace(alone, init_from=same), tmp_path, "sft") == given
    assert describe_weights(replace(alone, init_from=None), tmp_path, "sft").endswith("new weights of train.seed=4")
    two = replace(alone, stages={"sft": alone.first, "dpo": alone.first})
    assert describe_weights(two, tmp_path, "sft") == given
    found = []
    for steps in (50, 60, 80):  # not yet there; already there; gone past
        saved(tmp_path / "checkpoints" / "sft", steps)
        first = replace(alone.first, train=replace(alone.first.train, steps=60))
        found.append(describe_weights(replace(two, stages={"sft": first, "dpo": first}), tmp_path, "dpo"))
    assert found == [f"step {step} of stage 'sft' (stages.sft.train.steps)" for step in (60, 60, 80)]


def test_the_number_of_held_out_examples_may_not_change_if_it_decides_what_is_trained(tmp_path):
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text('{"question": "1", "answer": "2"}\n' * 9)
    of_one_file = ["algorithm=sft", f"data.path={tmp_path}/train.jsonl", f"output_dir={tmp_path}/run"]
    saved(tmp_path / "run" / "checkpoints" / "sft", 3, to_yaml(load_config([*of_one_file, "data.streaming=true"])))
    changes = ["data.streaming=true", "data.num_eval_examples=4", "data.cache_dir=off"]
    message = refusal(load_config([*of_one_file, *changes]))
    assert "data.num_eval_examples: None → 4" in message and "cache_dir" not in message
    whole = ["algorithm=sft", f"data.path={tmp_path}/train.jsonl", f"output_dir={tmp_path}/whole"]
    saved(tmp_path / "whole" / "checkpoints" / "sft", 3, to_yaml(load_config(whole)))
    assert "data.num_eval_examples: None → 4" in refusal(load_config([*whole, "data.num_eval_examples=4"]))
    refuse_changes(load_config([*whole, "data.num_eval_examples=1"]))  # the fraction of 9 records is one
    mixed = ["algorithm=sft", f"data.mix=[{{path: {tmp_path}/train.jsonl}}]", f"output_dir={tmp_path}/mixed"]
    saved(tmp_path / "mixed" / "checkpoints" / "sft", 3, to_yaml(load_config(mixed)))
    assert "data.num_eval_examples: None → 4" in refusal(load_config([*mixed, "data.num_eval_examples=4"]))
    with_own_split = [*of_one_file, f"data.eval_path={tmp_path}/test.jsonl"]
    config = load_config([*with_own_split, "data.streaming=true"])
    saved(tmp_path / "run" / "checkpoints" / "sft", 4, to_yaml(config))
    refuse_changes(load_config([*with_own_split, *changes]))


def test_a_changed_file_is_reported_when_a_run_goes_on(tmp_path, loaded, logged):
    data, code, template = tmp_path / "data.jsonl", tmp_path / "mine.py", tmp_path / "chat.jinja"
    for file in (data, code, template):
        file.write_text("before")
    config = loaded(
        "algorithm=grpo", f"data.path={tmp_path}/da*.jsonl", "data.format=chat", f"data.chat_template={template}",
        f"reward.functions=[{{path: {code}, name: right}}]",
    )  # fmt: skip
    digests = digest_files(config.first)
    assert digests.keys() == {str(data), str(code), str(template)}
    saved(tmp_path / "run" / "checkpoints" / "grpo", 4, to_yaml(config), user_files=digests)
    build_run_yaml(config, tmp_path / "run")
    assert not any("changed" in line for line in logged)
    code.write_text("after")
    build_run_yaml(config, tmp_path / "run")
    said = f"stage grpo: {code} changed since the stage began, so its steps up to 4 were trained with other content"
    assert said in logged


def test_a_changed_python_reward_function_is_reported_when_a_run_goes_on(tmp_path, logged):
    def short(completion):
        return -len(completion)

    def settings(function):
        return run_config("grpo", None, data, function, tmp_path / "run", {})

    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "1+1="}\n')
    config = settings(short)
    digests = digest_files(config.first)
    assert digests.keys() == {str(data), "the function short"}
    saved(tmp_path / "run" / "checkpoints" / "grpo", 4, to_yaml(config), user_files=digests)
    build_run_yaml(settings(short), tmp_path / "run")
    assert not any("changed" in line for line in logged)

    def short(completion):
        return 1.0 - len(completion)

    build_run_yaml(settings(short), tmp_path / "run")
    assert any(line.startswith("stage grpo: the function short changed since the stage began") for line in logged)


def test_a_replay_needs_the_steps_that_are_left_and_only_the_first_if_a_goal_can_end_the_stage(tmp_path):
    recorded, output_dir = tmp_path / "rollouts", tmp_path / "out"
    recorded.mkdir()
    rollout_file(recorded, 3).touch()
    replay = ("algorithm=grpo", "data=arithmetic", "train.steps=4", f"rollout.replay={recorded}")
    config = load_config([*replay, f"output_dir={output_dir}"])
    with pytest.raises(ConfigError, match="has no rollouts of step 1 and of 2 further steps"):
        check_replays(config)
    saved(output_dir / "checkpoints" / "grpo", 2)
    with pytest.raises(ConfigError, match="has no rollouts of step 4;"):
        check_replays(config)
    check_replays(load_config([*replay, f"output_dir={output_dir}", "train.stop_at={reward: 1.0}"]))
