"""Bad input is refused before the first step: exit status 2, one line of error, no file. A NaN ends every rank."""

import json
import re
import shutil

import pytest
import yaml

from rl_megatron.config.errors import ConfigError
from tests.end_to_end.launch import TINY, checkpoints, metrics

PRETRAIN = ("data=text", "algorithm=pretrain")
ANSWERS = ("data=gsm8k",)
GRPO = ("algorithm=grpo", "algorithm.prompts_per_step=2", "algorithm.samples_per_prompt=2")


def tiny_for(overrides):
    """TINY without the keys that have no effect on data from files."""
    of_tasks = ("data.num_documents", "data.task", "data.num_demonstrations")
    unused = {"data=text": of_tasks, "data=gsm8k": (*of_tasks, "data.sequence_length")}
    return [key for key in TINY if not any(key.startswith(unused.get(chosen, ())) for chosen in overrides)]


def let_another_run_come_first():
    """Let another run take the output directory while this one makes it."""
    from rl_megatron.runs import output as run_output

    def refuse(config):
        raise ConfigError(f"output_dir={config.output_dir} is in use by another run (process 1 on node)")

    run_output.move_aside = refuse


def test_a_directory_that_another_run_takes_first_is_said_to_be_in_use(tmp_path, forks):
    done = forks.run(tmp_path, "train", *TINY, before=let_another_run_come_first)
    assert done.status == 2
    assert "error: output_dir=out is in use by another run (process 1 on node)\n" in done.err


@pytest.fixture
def refused(tmp_path, forks):
    """Return a function that starts a run with overrides that must be refused, and returns its error line.

    It also checks the exit status, and that the run wrote no file.
    """

    def run(*overrides):
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        done = forks.run(tmp_path, "train", *tiny_for(overrides), *overrides)
        assert done.status == 2, done.err
        assert re.fullmatch(r"error: [^\n]+\n", done.err), done.err
        assert done.out == ""
        after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        assert {path: text for path, text in after.items() if path.name not in ("out0.txt", "err0.txt")} == {
            path: text for path, text in before.items() if path.name not in ("out0.txt", "err0.txt")
        }
        return done.err

    return run


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return f"data.path={path.name}"


def jsonl(*records):
    return "".join(json.dumps(record) + "\n" for record in records)


def answer(length=3):
    return {"question": "1+1", "answer": "x" * length + "#### 2"}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ["data.path", "data.txt"]),
        ("", ["data.txt", "empty"]),
        (b"abc\xff\xfedef", ["data.txt", "UTF-8"]),
    ],
)
def test_text_that_cannot_be_read_is_refused(tmp_path, refused, content, words):
    path = tmp_path / "data.txt"
    override = f"data.path={path.name}" if content is None else write(path, content)
    message = refused(*PRETRAIN, override)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ["data.path", "data.jsonl"]),
        ("", ["data.jsonl", "no records"]),
        (jsonl(answer(), answer()) + '{"question": "1+1", "ans', ["data.jsonl:3", "not JSON"]),
        (jsonl(answer()) + "[1, 2]\n", ["data.jsonl:2", "JSON object"]),
        (
            jsonl(*[answer()] * 9, {"question": "1+1", "anser": "2"}, *[answer()] * 9),
            ["data.jsonl:10", "'answer'", "'anser'"],
        ),
        (jsonl(answer()), ["leaves nothing to train on"]),
        (
            jsonl(*[answer()] * 5, answer(length=200), *[answer()] * 5),
            ["data.jsonl:6", "tokens", "max_sequence_length", "48"],
        ),
        (jsonl(*[answer()] * 6), ["train.global_batch_size", "8"]),
    ],
)
def test_the_error_of_an_unreadable_record_names_file_and_line(tmp_path, refused, content, words):
    path = tmp_path / "data.jsonl"
    override = f"data.path={path.name}" if content is None else write(path, content)
    message = refused(*ANSWERS, "data.too_long=error", "data.num_eval_examples=1", override)
    assert all(word in message for word in words), message


def test_a_run_without_held_out_data_is_refused(tmp_path, refused):
    message = refused(*PRETRAIN, write(tmp_path / "data.txt", "some text\n" * 200), "data.heldout_fraction=0")
    assert "data.heldout_fraction=0" in message and "data.txt" in message


def test_a_data_directory_without_its_files_is_refused(tmp_path, refused):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "notes.md").write_text("x")
    assert "data has no data files (found: notes.md)" in refused(*ANSWERS, "data.path=data")
    (tmp_path / "data" / "test.jsonl").write_text(jsonl(answer()))
    assert "data has test data, and no train data" in refused(*ANSWERS, "data.path=data")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ((*GRPO, "+loss.ratio_clp_min=0.1"), ["loss", "'ratio_clp_min'", "'ratio_clip_min'"]),
        ((*GRPO, "loss.ratio_clip_min=wide"), ["loss", "ratio_clip_min='wide'", "number"]),
        ((*GRPO, "loss.ratio_clip_min=-1"), ["loss", "ratio_clip_min=-1"]),
        ((*GRPO, "~loss.name"), ["loss.name is not set", "clipped_pg"]),
        ((*GRPO, "loss.name=cliped_pg"), ["loss", "'cliped_pg'", "'clipped_pg'"]),
        ((*GRPO, "generation.max_new_tokens=60"), ["generation.max_new_tokens=60", "model.max_sequence_length=48"]),
        (
            (*GRPO, "generation.engine=transformers", "model.num_experts=4", "model.shared_expert_ffn_hidden_size=32"),
            ["generation.engine=transformers", "LlamaForCausalLM", "generation.engine=embedded"],
        ),
        ((*GRPO, "generation.stop_tokens=[abc]"), ["generation.stop_tokens", "'abc'"]),
        (("data.task.name=arithmatic",), ["'arithmatic'", "'arithmetic'"]),
        (("data.task.max_operant=3",), ["'max_operant'", "'max_operand'"]),
        (("data.task.max_operand=0",), ["max_operand", "at least 1"]),
        (("data.num_eval_examples=100000",), ["100000", "held"]),
        (("data.num_demonstrations=4",), ["train.global_batch_size", "4"]),
        (("model.max_sequence_length=6",), ["max_sequence_length", "6"]),
        (("tokenizer.vocab_size=100",), ["vocab_size", "258"]),
        (("tokenizer.path=nowhere",), ["nowhere"]),
        (("parallel.tensor=2",), ["parallel.tensor=2", "world size 1", "torchrun --nproc-per-node 2"]),
        (("parallel.sequence=true",), ["parallel.sequence=true", "parallel.tensor"]),
        (("parallel.tensor=0",), ["parallel.tensor=0"]),
        (("init_from=nowhere",), ["nowhere", "does not exist"]),
        (("init_from=.",), ["manifest.json", "checkpoint"]),
    ],
)
def test_settings_that_do_not_fit_are_refused(refused, overrides, words):
    message = refused(*overrides)
    assert all(word in message for word in words), message


def test_too_few_problems_for_a_step_are_refused(tmp_path, refused):
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text(jsonl(*[answer()] * 3))
    task = ("data.task.name=gsm8k", "data.path=.", "data.num_eval_examples=2")
    assert "algorithm.prompts_per_step=4" in refused(*GRPO, *task, "algorithm.prompts_per_step=4")


def test_a_mistake_in_a_later_stage_is_found_before_the_first_stage(tmp_path, refused):
    stages = {
        "good": {"algorithm": {"name": "sft"}},
        "bad": {"algorithm": {"name": "grpo", "prompts_per_step": 2}, "loss": {"ratio_clip_mx": 0.3}},
    }
    (tmp_path / "mine" / "experiment").mkdir(parents=True)
    tree = yaml.safe_dump({"stages": stages}, sort_keys=False)
    (tmp_path / "mine" / "experiment" / "two.yaml").write_text("# @package _global_\n" + tree)
    message = refused("experiment=two", "--config-dir", "mine")
    assert "'ratio_clip_mx'" in message and "'ratio_clip_max'" in message


def test_an_output_directory_that_is_a_file_is_refused(tmp_path, refused):
    (tmp_path / "out").write_text("mine")
    assert "output_dir=out" in refused()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("parallel.tensor=3",), ["parallel.tensor=3", "world size 2", "[1, 2]"]),
        (("parallel.tensor=2", "model.num_query_groups=1"), ["parallel.tensor=2", "model.num_query_groups=1"]),
        (("parallel.pipeline=2",), ["parallel.pipeline", "model.num_layers=1"]),
        (("data.task.name=arithmatic",), ["'arithmetic'"]),
    ],
)
def test_two_ranks_refuse_and_rank_0_prints_the_error(tmp_path, forks, overrides, words):
    done = forks.run_ranks(tmp_path, "train", *TINY, *overrides, ranks=2)
    assert [rank.status for rank in done] == [2, 2], done
    assert re.fullmatch(r"error: [^\n]+\n", done[0].err) and all(word in done[0].err for word in words), done[0].err
    assert done[1].err == done[1].out == done[0].out == ""
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def trained(tmp_path_factory, forks):
    """Return the output directory of a finished run; tests must copy it, not change it."""
    directory = tmp_path_factory.mktemp("trained")
    done = forks.run(directory, "train", *TINY)
    assert done.status == 0, done.err
    return directory / "out"


@pytest.fixture
def saved(tmp_path, trained):
    """Copy a finished run to `saved` in the test's directory and return the copy's last checkpoint."""
    shutil.copytree(trained, tmp_path / "saved")
    return tmp_path / "saved" / "checkpoints" / "sft" / "step-000003"


def truncate(checkpoint):
    """Remove the last byte of the largest file of `checkpoint` and return the file."""
    largest = max((path for path in checkpoint.iterdir()), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])
    return largest


def test_a_truncated_checkpoint_is_refused(saved, refused):
    file = truncate(saved)
    message = refused(f"init_from=saved/checkpoints/sft/{saved.name}")
    assert "damaged" in message and file.name in message and f"instead of {file.stat().st_size + 1}" in message


def test_a_checkpoint_without_one_of_its_files_is_refused(saved, refused):
    (saved / ".metadata").unlink()
    assert ".metadata is missing" in refused(f"init_from=saved/checkpoints/sft/{saved.name}")


def test_a_truncated_manifest_is_refused(saved, refused):
    manifest = saved / "manifest.json"
    manifest.write_text(manifest.read_text()[:100])
    assert "manifest.json is not valid JSON" in refused(f"init_from=saved/checkpoints/sft/{saved.name}")


def test_a_checkpoint_of_another_model_is_refused(saved, refused):
    message = refused(f"init_from=saved/checkpoints/sft/{saved.name}", "model.hidden_size=64", "model.qkv_bias=true")
    assert "model.hidden_size: checkpoint 32, run 64" in message
    assert "model.qkv_bias: checkpoint False, run True" in message and "set model=init_from" in message


def test_a_checkpoint_of_another_tokenizer_is_refused(saved, refused):
    message = refused(f"init_from=saved/checkpoints/sft/{saved.name}", "tokenizer.vocab_size=258")
    assert "another tokenizer" in message and "tokenizer.path" in message


def test_a_run_does_not_resume_with_another_configuration(saved, refused):
    message = refused("output_dir=saved", "precision=bf16", "train.steps=5")
    assert "precision: fp32 → bf16" in message and "resume=false" in message


def test_a_finished_run_met_with_other_settings_is_refused_and_its_record_stays(tmp_path, saved, forks, refused):
    record = tmp_path / "saved" / "config.yaml"
    before = record.stat().st_mtime_ns
    message = refused("output_dir=saved", "train.seed=7", "optimizer.lr=0.5", "generation.temperature=0.2")
    for change in ("train.seed: 0 → 7", "optimizer.lr: 0.001 → 0.5", "generation.temperature: 1.0 → 0.2"):
        assert change in message
    again = forks.run(tmp_path, "train", *TINY, "output_dir=saved", "train.keep_checkpoints=7", "train.steps=2")
    assert again.status == 0, again.err
    assert "have no effect on it: train.steps: 3 → 2, train.keep_checkpoints: 2 → 7" in again.err
    assert record.stat().st_mtime_ns == before, "the record of finished work was written again"


def test_a_finished_run_goes_on_with_more_steps(tmp_path, saved, forks):
    longer = forks.run(tmp_path, "train", *TINY, "output_dir=saved", "train.steps=5")
    assert longer.status == 0, longer.err
    assert "settings that changed apply from here on: train.steps: 3 → 5" in longer.err
    assert "stage sft: resuming after step 3 of 5, from saved/checkpoints/sft/step-000003" in longer.err
    assert yaml.safe_load((tmp_path / "saved" / "config.yaml").read_text())["stages"]["sft"]["train"]["steps"] == 5


def test_without_resume_the_run_begins_anew_and_the_earlier_one_is_kept(tmp_path, saved, forks):
    before = metrics(tmp_path / "saved")
    anew = forks.run(tmp_path, "train", *TINY, "output_dir=saved", "resume=false", "train.seed=7", "train.steps=2")
    assert anew.status == 0, anew.err
    assert "resume=false: the earlier run is now in saved.previous" in anew.err
    assert metrics(tmp_path / "saved.previous") == before
    assert checkpoints(tmp_path / "saved.previous", "sft") == ["step-000003"]
    assert checkpoints(tmp_path / "saved", "sft") == ["step-000002"]


def test_the_error_of_a_missing_checkpoint_names_the_existing_ones(saved, refused):
    assert "existing checkpoints: step-000003" in refused("init_from=saved/checkpoints/sft/step-000007")


def test_a_run_does_not_resume_from_a_damaged_checkpoint(saved, refused):
    truncate(saved)
    assert "damaged" in refused("output_dir=saved")


def test_a_run_does_not_resume_with_another_model(saved, refused):
    assert "model.hidden_size: 32 → 64" in refused("output_dir=saved", "model.hidden_size=64")


def test_a_run_does_not_resume_with_another_reference_policy(tmp_path, saved, forks, refused):
    began_with = f"init_from=saved/checkpoints/sft/{saved.name}"
    begun = forks.run(tmp_path, "train", *TINY, *GRPO, began_with, "train.steps=1")
    assert begun.status == 0, begun.err
    message = refused(*GRPO, "train.steps=2")
    # The absolute path names the same directory.
    path = (tmp_path / began_with.removeprefix("init_from=")).resolve()
    assert f"initial weights: init_from={path} → init_from=null" in message
    assert forks.run(tmp_path, "train", *TINY, *GRPO, began_with, "train.steps=2").status == 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_nan_loss_ends_every_rank_and_keeps_the_checkpoints(tmp_path, forks, ranks):
    stages = {
        "calm": {"algorithm": {"name": "sft"}, "train": {"steps": 3}},
        "wild": {
            "algorithm": {"name": "sft"},
            "optimizer": {"lr": 1.0e15, "clip_grad": 0.0, "weight_decay": 0.0},
            "train": {"steps": 20, "save_every": 1},
        },
    }
    (tmp_path / "mine" / "experiment").mkdir(parents=True)
    tree = yaml.safe_dump({"stages": stages}, sort_keys=False)
    (tmp_path / "mine" / "experiment" / "blowup.yaml").write_text("# @package _global_\n" + tree)
    tiny = [override for override in TINY if not override.startswith("train.steps")]
    done = forks.run_ranks(tmp_path, "train", "experiment=blowup", "--config-dir", "mine", *tiny, ranks=ranks)
    assert [rank.status for rank in done] == [1] * ranks, done
    (message,) = [line for line in done[0].err.splitlines() if line.startswith("error: ")]
    taken = [line for line in metrics(tmp_path / "out") if line["stage"] == "wild" and line["kind"] == "train"]
    assert f"stage wild, step {len(taken) + 1}: the loss is nan" in message
    assert re.search(r"microbatch \d of data-parallel rank \d", message)
    assert "metrics: " in message and "loss=nan" in message and "num_unmasked_tokens=" in message
    assert message.endswith(f"the newest checkpoint is out/checkpoints/wild/step-{len(taken):06d}")
    assert all(rank.err == "" for rank in done[1:]), "another rank than rank 0 printed something"
    assert not (tmp_path / "out" / "summary.json").exists()

    assert checkpoints(tmp_path / "out", "calm") == ["step-000003"]
    assert all(not name.endswith(".incomplete") for name in checkpoints(tmp_path / "out", "wild"))
    again = forks.run(
        tmp_path, "train", *TINY, "train.steps=1", "init_from=out/checkpoints/calm/step-000003", "output_dir=later"
    )
    assert again.status == 0, again.err


def test_after_a_gradient_that_is_not_finite_no_checkpoint_is_written(tmp_path, forks):
    """With lr = 1e30 and clipping, a loss or a gradient soon is not finite; the newest checkpoint is from before it."""
    done = forks.run(tmp_path, "train", *TINY, "optimizer.lr=1e30", "train.steps=20", "train.save_every=1")
    assert done.status == 1
    assert "newest checkpoint is out/checkpoints/sft/step-" in done.err
    steps = [line["step"] for line in metrics(tmp_path / "out") if line["kind"] == "train"]
    assert checkpoints(tmp_path / "out", "sft")[-1:] == [f"step-{steps[-1]:06d}"]
