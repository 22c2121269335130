"""KTO from a file of answers with labels: it learns the labels, in two layouts the same, and refuses bad input."""

import json

import pytest

from tests.end_to_end.launch import TINY, metrics

KTO = (
    "train", *(override for override in TINY if not override.startswith(("data.", "algorithm", "train."))),
    "algorithm=kto", "loss=kto", "data=files", "data.path=answers.jsonl", "data.heldout_fraction=0.2",
    "tokenizer.vocab_size=300", "train.steps=8", "train.global_batch_size=16", "train.micro_batch_size=4",
    "optimizer.lr=0.01",
)  # fmt: skip


def answers():
    return [
        {"prompt": f"Is {n} a number?", "completion": f" {'yes' if n % 2 else 'no'}, {n}.", "label": n % 2 == 1}
        for n in range(10, 90)
    ]


@pytest.fixture
def directory(tmp_path):
    write(tmp_path, answers())
    return tmp_path


def write(directory, records):
    (directory / "answers.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def lines(directory, kind):
    return [line for line in metrics(directory) if line["kind"] == kind]


def test_it_learns_the_labels_in_two_layouts_the_same(directory, forks):
    done = forks.run_ranks(directory, *KTO, "parallel.tensor=2", "output_dir=tensor", ranks=2)
    assert [rank.status for rank in done] == [0, 0], done[0].err
    done = forks.run_ranks(directory, *KTO, "train.batching=packed", "output_dir=data", ranks=2)
    assert [rank.status for rank in done] == [0, 0], done[0].err
    steps = lines(directory / "tensor", "train")
    assert steps[0]["loss"] == pytest.approx(0.5) and steps[0]["reference_point"] == 0.0, "reference ≠ first policy"
    assert steps[-1]["rewards_desirable_mean"] > steps[-1]["rewards_undesirable_mean"]
    assert any(step["reference_point"] > 0 for step in steps)
    names = ("loss", "grad_norm", "reference_point", "rewards_desirable_mean", "rewards_undesirable_mean")
    for step, other in zip(steps, lines(directory / "data", "train"), strict=True):
        assert [other[name] for name in names] == pytest.approx([step[name] for name in names], rel=2e-3, abs=1e-4)
    before, after = lines(directory / "tensor", "eval")
    assert before["label_accuracy"] == 0.5 and after["label_accuracy"] > 0.9
    assert after["nll_per_token"] < before["nll_per_token"]


def test_answers_of_one_label_are_warned_about_and_learned_from(directory, forks):
    write(directory, [record | {"label": True} for record in answers()])
    done = forks.run(directory, *KTO, "train.steps=1")
    assert done.status == 0, done.err
    assert "data.path=answers.jsonl: all 64 answers are desirable; KTO is meant for data with undesirable" in done.err
    (step,) = lines(directory / "out", "train")
    assert step["rewards_undesirable_mean"] == 0.0 and step["grad_norm"] > 0


@pytest.mark.parametrize(
    ("change", "overrides", "words"),
    [
        (lambda record: record.pop("label"), [], ["answers.jsonl:5: the record has no 'label', which is true for"]),
        (lambda record: record.update(label="yes"), [], ["answers.jsonl:5: 'label' is 'yes'; it must be true"]),
        (lambda record: record.update(label=1), [], ["answers.jsonl:5: 'label' is 1; it must be true"]),
        (None, ["train.global_batch_size=1", "train.micro_batch_size=1"], ["set it to 2 or more"]),
        (None, ["loss=dpo"], ["loss.name=dpo does not use labels of answers", "set loss to kto"]),
        (None, ["loss.desirable_weight=-1"], ["desirable_weight=-1"]),
        (None, ["data.source=preference"], ["algorithm=kto needs answers with labels"]),
    ],
)
def test_bad_input_is_refused_before_the_first_step(directory, forks, change, overrides, words):
    if change is not None:
        records = answers()
        change(records[4])
        write(directory, records)
    refused = forks.run(directory, *KTO, *overrides)
    assert refused.status == 2 and all(word in refused.err for word in words), refused.err
    assert not (directory / "out").exists()
