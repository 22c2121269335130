"""The benchmarks run, and their results have the properties that docs/performance.md claims."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import (
    async_learning,
    async_throughput,
    checkpoint,
    convert_memory,
    data_plane,
    distillation,
    early_answers,
    eval_layouts,
    gateway_load,
    generation,
    grpo_step,
    misbehaving_rewards,
    observability_cost,
    packing,
    paired_steps,
    plan_memory,
    refit,
    reward_failures,
    rewards,
    rollout_workers,
    shared_prefixes,
    train_step,
)
from benchmarks.gpu_check import __main__ as gpu_check_command
from benchmarks.gpu_check import bundle as gpu_bundle
from benchmarks.grpo_sides import PHASES, Step
from benchmarks.logprobs import __main__ as logprobs_command
from rl_megatron.generation.interfaces import Sampling
from rl_megatron.generation.requests import derive_seed, draw_uniforms, make_requests
from tests.docs.forked import Fork
from tests.unit.data.shared_data import shared

REPOSITORY = Path(__file__).resolve().parents[1]


def test_packing_wastes_little_and_balances_the_ranks():
    """One global batch holds all of GSM8K. A smaller one can waste more, as the benchmark's docstring says."""
    lengths, cost = packing.read_lengths(str(shared("gsm8k")), pack_size=4096)
    whole = len(lengths) - len(lengths) % 8
    measured = {
        name: packing.measure(planner, lengths, whole, num_ranks=8, pack_size=4096, cost=cost)
        for name, planner in packing.PLANNERS.items()
    }
    balanced = measured.pop("balanced")
    assert balanced.waste_of_full_packs <= 0.03 and balanced.waste_computed == 0
    assert balanced.rank_imbalance <= 0.02 and balanced.microbatch_imbalance <= 0.02
    assert all(balanced.waste_of_full_packs <= other.waste_of_full_packs for other in measured.values())
    assert measured["padding to the longest row"].waste_computed > 0.5


def test_what_a_rank_holds_and_receives_hardly_grows_with_the_number_of_ranks(forks, tmp_path):
    with Fork(forks.context, tmp_path) as fork:  # it starts a fake process group, of which a process can have one
        few, many = fork.call(data_plane.measure, 8192, (8, 256), 1)
    assert many.held <= 1.05 * few.held and many.moved <= 1.05 * few.moved
    assert many.imbalance <= 0.01 and many.stay >= 0.95


def test_packing_prints_a_table_per_batch_size(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "150")
    line = '{{"question": "What is {0} and {0}?", "answer": "{1}"}}\n'
    for name in ("train.jsonl", "test.jsonl"):
        (tmp_path / name).write_text("".join(line.format(number, "so " * (number % 9)) for number in range(50)))
    assert packing.main([str(tmp_path), "--global-batch-size", "16", "--data-parallel", "4", "--pack-size", "200"]) == 0
    printed = capsys.readouterr().out
    assert "16 rows per global batch" in printed and "48 rows per global batch (all)" in printed
    assert all(printed.count(f" {name} ") == 2 for name in packing.PLANNERS)


def test_packing_says_what_is_missing(tmp_path, capsys):
    assert packing.main([str(tmp_path / "absent")]) == 1
    assert "nothing at" in capsys.readouterr().err
    assert packing.main([str(tmp_path)]) == 1
    assert "has no data files" in capsys.readouterr().err


def lines_of(text, *words):
    return [line for line in text.splitlines() if all(word in line for word in words)]


@pytest.mark.change
@pytest.mark.parametrize("options", [[], ["--packed", "--precision", "bf16", "--fused-head"]], ids=["padded", "packed"])
def test_a_grpo_step_has_the_gradient_of_the_bare_step(options, tmp_path, forks):
    small = ["--model", "nano", "--vocab-size", "256", "--tokens", "256", "--length", "32", "--steps", "1"]
    small += ["--device", "cpu", "--micro-batch-tokens", "128", "--output", "figures.json"]
    done = forks.run(tmp_path, *small, *options, program=train_step.main)
    assert done.status == 0, done.err
    assert "GRPO, policy.train" in done.out and "megatron-core alone" in done.out
    figures = json.loads((tmp_path / "figures.json").read_text())["figures"]
    tolerance = 1e-2 if "bf16" in options else 1e-4
    assert figures["grpo_grad_norm"] == pytest.approx(figures["bare_grad_norm"], rel=tolerance)
    assert figures["ratio"] == figures["grpo"] / figures["bare"]
    if "bf16" not in options:
        assert figures["nll_grad_norm"] == pytest.approx(figures["transformers_grad_norm"], rel=tolerance)
        assert figures["nll_ratio"] == figures["nll"] / figures["transformers"]


@pytest.mark.change
def test_rollout_engines_do_the_work_of_model_generate(tmp_path, forks):
    """The benchmark itself refuses completions of other lengths than asked for."""
    small = ["--count", "6", "--tokens", "8", "--rounds", "1", "--threads", "1", "--device", "cpu"]
    done = forks.run(tmp_path, *small, "--output", "figures.json", program=generation.main)
    assert done.status == 0, done.err
    figures = json.loads((tmp_path / "figures.json").read_text())["tokens_per_s"]
    assert {mode: set(of_sides) for mode, of_sides in figures.items()} == {
        mode: {"model.generate", "embedded"} for mode in ("equal", "mixed")
    }


@pytest.mark.change
def test_a_whole_grpo_step_is_raced_against_trl_on_equal_work(tmp_path, forks):
    problems = [
        {"question": f"Ann has {n} {word} and buys {3 * n} more. How many are these?", "answer": f"#### {4 * n}"}
        for n in range(20) for word in ("apples", "pears", "red pencils")
    ]  # fmt: skip
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, problems)))
    small = ["--layers", "1", "--hidden", "32", "--vocab-size", "300", "--prompts", "2", "--samples", "3"]
    short = "--prompt-tokens 40 --new-tokens 5 --threads 1 --warmup 1 --steps 2 --case packed".split()
    done = forks.run(tmp_path, ".", *small, *short, "--output", "figures.json", program=grpo_step.main)
    assert done.status == 0, done.err
    rows = json.loads((tmp_path / "figures.json").read_text())["rows"]
    assert list(rows) == [
        "packed, recompute_logprobs=auto", "packed, recompute_logprobs=always", "packed, share_prefixes=auto",
        "TRL GRPOTrainer",
    ]  # fmt: skip
    for name, row in rows.items():
        assert sum(row["phases"].values()) == pytest.approx(row["step"], rel=0.02)
        assert all(row["phases"][phase] > 0 for phase in PHASES if phase != "logprobs"), name
        assert (row["phases"]["logprobs"] > 0) == name.endswith("always"), name
        assert f"{1000 * row['step']:.0f}" in done.out


@pytest.mark.change
def test_steps_with_shared_prefixes_are_raced_against_whole_sequences(tmp_path, forks):
    options = ["--layers", "1", "--hidden", "32", "--warmup", "0", "--steps", "1", "--shape", "6 turns"]
    done = forks.run(tmp_path, *options, program=shared_prefixes.main)
    assert done.status == 0, done.err
    (row,) = (line.split(" | ") for line in done.out.splitlines() if line.startswith("| 6 turns"))
    whole, shared, ratio, efficiency = (float(cell.rstrip(" |")) for cell in row[1:])
    assert whole / shared == pytest.approx(ratio, rel=0.05)
    # 4 trajectories of 6 turns with a prompt as long as a turn, of which each segment repeats what precedes it
    assert efficiency == pytest.approx(4 * sum(range(2, 8)) / (1 + 4 * 6), rel=0.05)


def test_sides_that_do_different_work_are_found():
    def steps(*completion_tokens):
        return [Step(1.0, dict.fromkeys(PHASES, 0.2), 10, count) for count in completion_tokens]

    same = {"packed": steps(8, 8), grpo_step.TRL: steps(8, 8)}
    assert grpo_step.different_work(same) is None
    assert "packed had" in (grpo_step.different_work(same | {"packed": steps(8, 7)}) or "")
    assert [row.ratio for row in grpo_step.medians(same, warmup=1)] == [1.0, 1.0]


@pytest.mark.change
def test_conversions_do_not_hold_the_whole_model_in_memory(tmp_path):
    """The model has three files; a conversion that held all of it would have a peak of three times the largest file.

    Smaller files would take little memory beside that of a process that has just started.
    """
    measured = convert_memory.measure(tmp_path, num_bytes=250_000_000, num_files=3, with_whole_parts=False)
    assert {row.name: row.ratio <= convert_memory.LIMIT for row in measured} == {"import": True, "export": True}
    assert all(row.peak > 2**20 for row in measured), "the peak is too small to be real"


@pytest.mark.change
def test_background_saves_are_compared_with_foreground_saves(tmp_path, forks):
    (tmp_path / "saves").mkdir()
    small = ["--hidden", "32", "--layers", "1", "--repetitions", "1", "--directory", "saves"]
    done = forks.run(tmp_path, *small, program=checkpoint.main)
    assert done.status == 0, done.err
    assert lines_of(done.out, "background") and lines_of(done.out, "foreground")
    (ratio,) = re.findall(r"pause, background / foreground: (\d+\.\d+)", done.out)
    assert float(ratio) > 0
    assert not list((tmp_path / "saves").iterdir()), "it left files behind"


@pytest.mark.change
@pytest.mark.parametrize(
    ("program", "what"),
    [*((observability_cost.main, what) for what in observability_cost.MEASURED), (rollout_workers.main, "completion")],
)
def test_costs_are_measured_in_pairs_of_steps(forks, tmp_path, program, what):
    small = ("train.steps=8", "model.num_layers=1", "algorithm.prompts_per_step=2", "train.global_batch_size=16")
    done = forks.run(tmp_path, what, *small, program=program)
    assert done.status == 0, done.err
    for kind in ("time", "CPU time"):
        measured = rf"3 pairs of steps of [\d.]+ ms of {kind}: {what} adds -?[\d.]+ ± [\d.]+ ms\nratio [\d.]+ ± "
        assert re.search(measured, done.out)


def test_the_benchmark_of_distillation_reports_when_a_student_is_near_its_teacher():
    assert distillation.parser().parse_args(["outputs/distillation", "--seeds", "2"]).seeds == 2
    fast, slow = ({0: 0.1, 20: first, 40: last, 100: 0.9} for first, last in ((0.86, 0.8), (0.5, 0.88)))
    runs = {
        "a": [distillation.Run(fast, 0.5), distillation.Run(slow, 1.5)],
        "b": [distillation.Run(slow, 1.0), distillation.Run({0: 0.1, 20: 0.2, 40: 0.3, 100: 0.4}, 1.0)],
    }
    assert distillation.report(runs, teacher=0.9)[2:] == [
        "| a | 0.100 ± 0.000 | 0.900 ± 0.000 | 30 ± 10 | 35 ± 25 | 2 of 2 |",
        "| b | 0.100 ± 0.000 | 0.650 ± 0.250 | 40 | 40 | 1 of 2 |",
    ]


def test_completions_that_differ_are_listed_with_how_near_the_other_token_was():
    request = make_requests([(), ()], Sampling(3), derive_seed(0, 0))[1]
    uniforms = draw_uniforms([request], 3)[0].tolist()
    one = {"completions": [[5, 6], [7, 8, 9]], "distances": list(zip(uniforms, (0.5, 0.25, 3e-6), strict=True))}
    assert eval_layouts.differences(one, {"completions": [[5, 6], [7, 8, 4]]}) == [(1, 2, 3e-6)]
    assert eval_layouts.differences(one, {"completions": [[5, 6], [7]]}) == [(1, 1, 0.25)]


PAGE = (REPOSITORY / "docs" / "performance.md").read_text()
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_is_valid(command):
    words = shlex.split(command)
    if "benchmarks.logprobs" in words:
        assert logprobs_command.parser().parse_args(words[words.index("benchmarks.logprobs") + 1 :])
    elif "benchmarks/train_step.py" in words:
        assert train_step.parser().parse_args(words[words.index("benchmarks/train_step.py") + 1 :])
    elif "benchmarks/generation.py" in words:
        assert generation.parser().parse_args(words[words.index("benchmarks/generation.py") + 1 :])
    elif "benchmarks/grpo_step.py" in words:
        assert grpo_step.parser().parse_args(words[words.index("benchmarks/grpo_step.py") + 1 :])
    elif "benchmarks/checkpoint.py" in words:
        assert checkpoint.parser().parse_args(words[words.index("benchmarks/checkpoint.py") + 1 :])
    elif "benchmarks.config_mutations" in words:
        assert (REPOSITORY / "benchmarks" / "config_mutations" / "__main__.py").is_file()
    elif "benchmarks/early_answers.py" in words:
        assert early_answers.parser().parse_args(words[words.index("benchmarks/early_answers.py") + 1 :])
    elif "benchmarks.observability_cost" in words:
        given = words[words.index("benchmarks.observability_cost") + 1 :]
        assert paired_steps.parser(None, list(observability_cost.MEASURED)).parse_args(given)
    elif "benchmarks.rollout_workers" in words:
        given = words[words.index("benchmarks.rollout_workers") + 1 :]
        assert paired_steps.parser(None, list(rollout_workers.MEASURED)).parse_args(given)
    elif "benchmarks.async_learning" in words:
        assert async_learning.parser().parse_args(words[words.index("benchmarks.async_learning") + 1 :])
    elif "benchmarks.async_throughput" in words:
        assert async_throughput.parser().parse_args(words[words.index("benchmarks.async_throughput") + 1 :])
    elif "benchmarks/eval_layouts.py" in words:
        assert eval_layouts.parser().parse_args(words[words.index("benchmarks/eval_layouts.py") + 1 :])
    elif "benchmarks/gateway_load.py" in words:
        assert gateway_load.parser().parse_args(words[words.index("benchmarks/gateway_load.py") + 1 :])
    elif "benchmarks/rewards.py" in words:
        assert rewards.parser().parse_args(words[words.index("benchmarks/rewards.py") + 1 :])
    elif "benchmarks.reward_failures" in words:
        assert reward_failures.parser().parse_args(words[words.index("benchmarks.reward_failures") + 1 :])
    elif "scripts/gpu_check.sh" in words:
        options = words[words.index("scripts/gpu_check.sh") + 1 :]
        assert gpu_check_command.parser().parse_args(options)
    elif "scripts/gpu_bundle.sh" in words:
        assert gpu_bundle.parser().parse_args(words[words.index("scripts/gpu_bundle.sh") + 1 :])
    else:
        script = next(word for word in words if word.startswith(("scripts/", "benchmarks/")))
        assert (REPOSITORY / script).is_file()


def test_links_of_the_page_are_valid():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", PAGE):
        assert (REPOSITORY / "docs" / target).exists(), target


@pytest.mark.change
def test_refit_needs_one_collective_per_bucket_instead_of_one_per_tensor(capsys):
    tiny = [
        "--layers",
        "2",
        "--hidden",
        "64",
        "--vocab",
        "256",
        "--repetitions",
        "1",
        "--bucket-mib",
        "1",
        "--markdown",
    ]
    assert refit.main(tiny) == 0
    printed = capsys.readouterr().out
    (bucketed,), (plain,) = lines_of(printed, "| bucketed"), lines_of(printed, "| one by one")
    of_bucketed, of_plain = ([int(cell) for cell in re.findall(r"\| +(\d+) ", line)] for line in (bucketed, plain))
    assert of_bucketed == [1, 0]
    tensors = 9 * 2 + 3  # 2 layers of 7 projections and 2 norms; embedding, last norm and head
    # The sharded tensors are qkv, output, gate, up and down of each layer, the embedding and the head.
    assert of_plain == [5 * 2 + 2, tensors]
    assert all(float(line.split("|")[3]) > 0 for line in (bucketed, plain))


@pytest.mark.change
def test_reward_workers_hardly_wait_between_samples(capsys):
    assert rewards.main(["--samples", "64", "--workers", "2", "--repetitions", "1"]) == 0
    (ratio,) = re.findall(r"2 workers: .* ratio (\d+\.\d+)", capsys.readouterr().out)
    assert float(ratio) > 0.6, "0.8 is the goal for 512 samples on a machine without other load"


def test_a_mistake_in_a_path_is_timed_and_answered(capsys):
    early_answers.main(["--repetitions", "1", "--cases", "data.path is missing"])
    ((seconds, status),) = re.findall(r" +([\d.]+) .* 3\.00 +(\d+)  data.path is missing", capsys.readouterr().out)
    assert status == "2" and 0 < float(seconds) < 60, "3 s is the goal on a machine without other load"


def test_an_answer_that_is_late_or_another_is_found():
    name = "data.path is missing"
    good = early_answers.Answer(1.0, 2, "error: data.path: there is nothing at absent")
    assert early_answers.wrong(name, [good]) is None
    for change, words in (({"seconds": 3.1}, "slower"), ({"status": 1}, "status 1"), ({"line": "no"}, "does not have")):
        assert words in (early_answers.wrong(name, [good._replace(**change)]) or "")


def planned_rows(name):
    """Return the rows of the table that the benchmark prints for a case, as lists of its columns."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        plan_memory.main(["--case", name])
    return [re.split(r"\s*│\s*", line.strip("│\n ")) for line in printed.getvalue().splitlines() if name in line]


@pytest.mark.change
def test_the_page_has_the_planned_memory_of_a_rank(fresh_process):
    name = "llama, 4 layers, 2 ranks"
    ((_, _, static, peak, *_),) = fresh_process.run(planned_rows, name)
    (row,) = [line.split(" | ") for line in PAGE.splitlines() if line.startswith(f"| {name}")]
    assert row[1] == static and row[2].rstrip(" |") == peak


@pytest.mark.change
@pytest.mark.parametrize("number", range(8))
def test_rewards_that_misbehave_end_as_configured(ranks, number):
    case = reward_failures.random_case(seed=2, number=number)
    outcomes = ranks.run(2, reward_failures.run_case, case, misbehaving_rewards.__file__)
    assert reward_failures.wrong(case, outcomes) is None, (case, outcomes)


def test_a_case_that_does_not_end_as_configured_is_found():
    case = reward_failures.Case(0, ("sample",), (("well", "raise"),), "zero", "error", 0.4, 1, 1)
    good = {"rewards": [1.0, 0.0], "metrics": {"reward_f0_errors": 1.0}, "seconds": 1.0}
    rank_1 = good | {"rewards": []}  # rank 0 alone has the rewards
    assert reward_failures.wrong(case, [good, rank_1]) is None
    for change, words in (
        ({"rewards": [1.0, 1.0]}, "wanted the rewards"),
        ({"metrics": {}}, "1 errors of f0"),
        ({"seconds": 99.0}, "longer"),
    ):
        assert words in (reward_failures.wrong(case, [good | change, rank_1]) or "")
    assert reward_failures.wrong(case, [good, good]) == "the ranks differ"
    ends = reward_failures.Case(0, ("sample",), (("well", "raise"),), "error", "error", 0.4, 1, 1)
    said = "'f0' raised, for prompt 'prompt 1' and completion 'sample=1 f0=raise'; or reward.on_error=zero"
    assert reward_failures.wrong(ends, [{"failed": said, "seconds": 1.0}] * 2) is None
    other = said.replace("prompt 1", "prompt 0")
    assert "another" in (reward_failures.wrong(ends, [{"failed": other, "seconds": 1.0}] * 2) or "")
    assert "no failure" in (reward_failures.wrong(ends, [good, rank_1]) or "")


@pytest.mark.change
def test_random_mutations_of_configurations_are_refused_by_name_or_run(tmp_path):
    command = [sys.executable, "-m", "benchmarks.config_mutations", "--count", "12", "--seed", "5", "--out", tmp_path]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"seed 5: 12 mutations; .*\d+ ran", done.stdout), done.stdout
