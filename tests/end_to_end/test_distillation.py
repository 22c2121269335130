"""Distillation on the command line: off-policy and on-policy, one or two teachers, and teachers that do not fit."""

import json
import shutil

import pytest

from tests.end_to_end.launch import TINY, metrics

EARLY, TEACHER = (f"teacher/checkpoints/sft/step-0000{step}" for step in ("06", "12"))
STUDENT = ("train", *TINY, "model.hidden_size=16", "tokenizer.path=teacher/tokenizer")
ONE = f"algorithm.teachers=[{{path: {TEACHER}}}]"
OPD = ("algorithm=opd", "algorithm.prompts_per_step=8")


@pytest.fixture(scope="module")
def directory(tmp_path_factory, forks):
    """Return a directory with the run of a teacher, and its tokenizer with the ids of two letters swapped."""
    directory = tmp_path_factory.mktemp("distillation")
    done = forks.run(
        directory,
        "train",
        *TINY,
        "algorithm=sft",
        "train.steps=12",
        "optimizer.lr=0.03",
        "train.save_every=6",
        "output_dir=teacher",
    )
    assert done.status == 0, done.err
    shutil.copytree(directory / "teacher" / "tokenizer", directory / "swapped")
    definition = json.loads((directory / "swapped" / "tokenizer.json").read_text())
    ids = definition["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    (directory / "swapped" / "tokenizer.json").write_text(json.dumps(definition))
    return directory


def trained(directory, forks, name, *overrides, ranks=1):
    """Return the training lines of a run in `directory`/`name`."""
    done = forks.run_ranks(directory, *STUDENT, *overrides, f"output_dir={name}", ranks=ranks)
    assert [rank.status for rank in done] == [0] * ranks, done
    return [line for line in metrics(directory / name, timed=True) if line["kind"] == "train"]


def test_a_student_learns_from_a_teachers_whole_vocabulary(directory, forks):
    whole = trained(
        directory, forks, "whole", "algorithm=distillation", "loss=full_distillation", "loss.nll_weight=0.2", ONE,
        "optimizer.lr=0.01", "train.steps=8",
    )  # fmt: skip
    assert whole[-1]["forward_kl"] < 0.7 * whole[0]["forward_kl"]
    assert whole[0]["loss"] == pytest.approx(
        0.8 * (0.5 * whole[0]["forward_kl"] + 0.5 * whole[0]["reverse_kl"]) + 0.2 * whole[0]["nll"], rel=1e-5
    )
    # All of the vocabulary as the top-k, on two ranks, with a teacher whose layout is its own, gives the same steps.
    top_k = trained(
        directory, forks, "top_k", "algorithm=distillation", "loss=distillation", "loss.nll_weight=0.2",
        f"algorithm.teachers=[{{path: {TEACHER}, parallel: {{tensor: 2}}}}]", "algorithm.top_k=1000",
        "optimizer.lr=0.01", "train.steps=8", ranks=2,
    )  # fmt: skip
    for mine, other in zip(whole, top_k, strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-4)


@pytest.fixture(scope="module")
def mixture(directory):
    """Return the overrides of a student of two data sets, whose files are in the directory."""
    for name, operator in (("sums", "+"), ("differences", "-")):
        records = [
            {"question": f"{n}{operator}{n}=", "answer": str(2 * n if operator == "+" else 0)} for n in range(30)
        ]
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    of_tasks = ("data.num_documents", "data.num_demonstrations", "data.task", "data.sequence_length", "data.num_eval")
    student = [each for each in STUDENT if not each.startswith(of_tasks)]
    return *student, "train.steps=2", "data.mix=[{path: sums.jsonl, weight: 2}, {path: differences.jsonl}]"


def test_a_student_learns_from_the_teachers_of_its_prompts(directory, forks, mixture):
    def lines(name, first, second, ranks=1):
        teachers = f"{{path: {first}, data_sets: [sums]}}, {{path: {second}, data_sets: [differences]}}"
        done = forks.run_ranks(
            directory, *mixture, *OPD, "loss=clipped_pg", "loss.reference_policy_kl_penalty=0",
            "data.prompt_template='{question}'", "reward.functions=[{name: exact_match}]",
            f"algorithm.teachers=[{teachers}]", f"output_dir={name}", ranks=ranks,
        )  # fmt: skip
        assert [rank.status for rank in done] == [0] * ranks, done
        return [line for line in metrics(directory / name, timed=True) if line["kind"] == "train"]

    alone, swapped = lines("opd_by_data", EARLY, TEACHER), lines("opd_swapped", TEACHER, EARLY)
    for one, other in zip(alone, lines("opd_by_data_2", EARLY, TEACHER, ranks=2), strict=True):
        for name in ("loss", "teacher_kl", "grad_norm"):
            assert one[name] == pytest.approx(other[name], rel=1e-4), name
    assert alone[0]["teacher_kl"] != pytest.approx(swapped[0]["teacher_kl"], rel=1e-2)


def test_teachers_that_share_the_data_sets_of_a_mixture_are_one(directory, forks, mixture):
    mixed = ("algorithm=distillation", "loss=distillation", "algorithm.top_k=8")
    two = f"algorithm.teachers=[{{path: {TEACHER}, data_sets: [sums]}}, {{path: {TEACHER}, data_sets: [differences]}}]"
    lines = []
    for name, teachers, ranks in (("one", ONE, 1), ("two", two, 2)):
        done = forks.run_ranks(directory, *mixture, *mixed, teachers, f"output_dir={name}", ranks=ranks)
        assert [rank.status for rank in done] == [0] * ranks, done
        lines.append([line for line in metrics(directory / name, timed=True) if line["kind"] == "train"])
    for one, other in zip(*lines, strict=True):
        assert one["forward_kl"] > 0.001
        for name in ("loss", "forward_kl", "grad_norm"):
            assert one[name] == pytest.approx(other[name], rel=1e-5), name


@pytest.mark.parametrize("loss", ["full_distillation", "clipped_pg"])
def test_a_student_learns_from_a_teacher_on_its_own_samples(directory, forks, loss):
    alone = trained(directory, forks, f"{loss}_alone", *OPD, f"loss={loss}", ONE, "train.steps=2")
    # Two teachers with equal weights are one, whatever their layouts are.
    two = f"algorithm.teachers=[{{path: {TEACHER}}}, {{path: {TEACHER}, parallel: {{tensor: 2}}}}]"
    teachers = ONE if loss == "full_distillation" else two
    lines = trained(directory, forks, loss, *OPD, f"loss={loss}", teachers, "train.steps=2", ranks=2)
    compared = "forward_kl" if loss == "full_distillation" else "teacher_kl"
    for mine, other in zip(lines, alone, strict=True):
        assert mine[compared] > 0.001 and mine["completion_tokens"] == other["completion_tokens"]
        for name in ("loss", compared):
            assert mine[name] == pytest.approx(other[name], rel=1e-4), name
    if loss == "clipped_pg":
        assert lines[0]["teacher_kl"] == pytest.approx(-lines[0]["advantage_mean"], rel=1e-5)
        assert lines[0]["time_teacher_s"] > 0
    else:
        assert "advantage_mean" not in lines[0]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["loss=full_distillation"], "algorithm.teachers is empty"),
        (["loss=full_distillation", "algorithm.teachers=[{path: nowhere}]"], "there is no directory nowhere"),
        (
            ["loss=full_distillation", ONE, "tokenizer.path=swapped"],
            "has another tokenizer (a vocabulary of 2",
        ),
        (
            ["loss=full_distillation", "algorithm.teachers=[{url: 'http://127.0.0.1:9/v1', model: big}]"],
            "returns logprobs of a few tokens",
        ),
        (
            ["loss=distillation", "algorithm.teachers=[{url: 'http://127.0.0.1:9/v1', model: big, retries: 0}]"],
            "http://127.0.0.1:9/tokenize cannot be reached",
        ),
        (["loss=distillation", f"algorithm.teachers=[{{path: {TEACHER}, url: x}}]"], "needs either path"),
        (["loss=clipped_pg", ONE], "does not use a teacher's logits"),
        (
            ["loss=full_distillation", f"algorithm.teachers=[{{path: {TEACHER}}}, {{path: {TEACHER}}}]"],
            "name one teacher, or set loss=distillation",
        ),
        (
            ["loss=full_distillation", f"algorithm.teachers=[{{path: {TEACHER}, parallel: {{tensor: 1}}}}]"],
            "leave parallel out",
        ),
        (
            ["loss=distillation", f"algorithm.teachers=[{{path: {TEACHER}, parallel: {{tensor: 3}}}}]"],
            "cannot run in its own layout",
        ),
    ],
)
def test_a_teacher_that_does_not_fit_is_refused_before_the_first_step(directory, forks, tmp_path, overrides, message):
    done = forks.run(directory, *STUDENT, "algorithm=distillation", *overrides, f"output_dir={tmp_path}/refused")
    assert done.status == 2 and message in done.err, done.err
    assert not (tmp_path / "refused" / "metrics.jsonl").exists()
