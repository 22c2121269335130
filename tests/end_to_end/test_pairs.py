"""DPO and reward models from a file of pairs: their eval metrics, the checkpoints they start from, and bad input."""

import json

import pytest

from tests.end_to_end.launch import TINY, checkpoints, metrics

PAIRS = (
    *(override for override in TINY if not override.startswith(("data.", "algorithm", "train."))),
    "data=gsm8k_pairs", "data.path=pairs.jsonl", "tokenizer.vocab_size=300",
    "train.steps=6", "train.global_batch_size=16", "train.micro_batch_size=4", "optimizer.lr=0.01",
)  # fmt: skip
DPO = ("train", *PAIRS, "algorithm=dpo", "loss=dpo")
REWARD_MODEL = ("train", *PAIRS, "algorithm=reward_model", "loss=preference")


@pytest.fixture
def pairs(tmp_path):
    """Write pairs whose chosen answer says yes, a rule that a few steps learn, and return the directory."""
    records = [
        {"question": f"Is {n} a number?", "chosen": f"yes, {n}.", "rejected": f"no, {n}."} for n in range(10, 60)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return tmp_path


def evaluations(directory):
    return [line for line in metrics(directory / "out") if line["kind"] == "eval"]


@pytest.mark.parametrize("loss", ["dpo", "ipo"])
def test_dpo_learns_to_prefer_the_chosen_answers(pairs, forks, loss):
    done = forks.run_ranks(pairs, *DPO[:-1], f"loss={loss}", "parallel.tensor=2", ranks=2)
    assert [rank.status for rank in done] == [0, 0], done
    first = next(line for line in metrics(pairs / "out") if line["kind"] == "train")
    assert abs(first["rewards_chosen_mean"]) < 1e-5 > abs(first["rewards_rejected_mean"]), "reference ≠ first policy"
    before, after = evaluations(pairs)
    assert before["reward_accuracy"] == 0.5 and before["reward_margin"] == 0.0, "reference ≠ first policy"
    assert after["preference_accuracy"] > 0.9 and after["reward_accuracy"] > 0.9
    assert after["preference_margin"] > before["preference_margin"]
    assert after["reward_margin"] == pytest.approx(after["preference_margin"] - before["preference_margin"], rel=1e-3)


def test_a_loss_without_a_reference_learns_and_keeps_none(pairs, forks):
    done = forks.run(pairs, *DPO[:-1], "loss=simpo")
    assert done.status == 0, done.err
    before, after = evaluations(pairs)
    assert after["preference_accuracy"] > 0.9 and after["preference_margin"] > before["preference_margin"]
    assert not any(name.startswith("reward_") for name in after), "there is no reference to compare with"


def test_a_precomputed_reference_is_kept_and_changes_no_number(pairs, forks):
    """Ten steps read every pair and start a second epoch; the run is resumed after six steps."""
    plain = forks.run(pairs, *DPO, "train.steps=10", "output_dir=plain")
    assert plain.status == 0, plain.err
    recorded = pairs / "out" / "reference_logprobs" / "dpo.safetensors"
    kept = ("algorithm.precompute_reference=true", "optimizer.decay_steps=10")
    for steps, overrides in ((6, ["train.save_every=6"]), (10, [])):
        done = forks.run(pairs, *DPO, *kept, f"train.steps={steps}", *overrides)
        assert done.status == 0, done.err
        assert recorded.is_file()
    found = {(line["kind"], line["step"]): line for line in metrics(pairs / "out")}
    for line in metrics(pairs / "plain"):
        again = found[line.pop("kind"), line["step"]]
        line.pop("stage")
        assert {key: again[key] for key in line} == pytest.approx(line, rel=1e-5, abs=1e-6)


def test_a_reward_model_scores_chosen_answers_higher_and_cannot_start_dpo(pairs, forks):
    done = forks.run(pairs, *REWARD_MODEL)
    assert done.status == 0, done.err
    before, after = evaluations(pairs)
    assert after["preference_accuracy"] > 0.9
    assert after["preference_margin"] > before["preference_margin"]
    saved = pairs / "out" / "checkpoints" / "reward_model" / checkpoints(pairs / "out", "reward_model")[-1]
    again = forks.run(pairs, *DPO, f"init_from={saved}", "output_dir=other", "tokenizer.path=out/tokenizer")
    assert again.status == 2 and "holds a reward model or critic (a score head)" in again.err
    assert not (pairs / "other").exists()


def test_a_reward_model_starts_from_a_policy(pairs, forks):
    assert forks.run(pairs, *DPO, "output_dir=policy").status == 0
    newest = pairs / "policy" / "checkpoints" / "dpo" / "step-000006"
    begun = forks.run(pairs, *REWARD_MODEL, f"init_from={newest}", "tokenizer.path=policy/tokenizer")
    assert begun.status == 0, begun.err


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["train.global_batch_size=15"], ["train.global_batch_size=15 must be even", "two sequences"]),
        (["train.micro_batch_size=3"], ["train.micro_batch_size=3 must be even"]),
        (["train.global_batch_size=200"], ["200 is 100 pairs of two sequences"]),
        (
            ["loss=clipped_pg"],
            ["loss.name=clipped_pg does not use logprobs of pairs", "set loss to dpo, ipo, simpo,"],
        ),
        (
            ["loss=orpo", "algorithm.precompute_reference=true"],
            ["algorithm.precompute_reference=true has no effect", "loss.name=orpo"],
        ),
        (["loss.sft_loss_wieght=1"], ["sft_loss_wieght"]),
        (["loss.reference_policy_kl_penalty=-1"], ["reference_policy_kl_penalty=-1"]),
        (["data=arithmetic"], ["algorithm=dpo needs pairs"]),
        (
            ["train.batching=packed", "train.micro_batch_tokens=9"],
            ["train.micro_batch_tokens=9 does not hold the largest pair of sequences: ", "raise it to"],
        ),
    ],
)
def test_bad_input_is_refused_before_the_first_step(pairs, forks, overrides, words):
    refused = forks.run(pairs, *DPO, *overrides)
    assert refused.status == 2 and all(word in refused.err for word in words), refused.err
    assert not (pairs / "out").exists()


def test_the_error_of_half_a_pair_names_its_line(pairs, forks):
    path = pairs / "pairs.jsonl"
    path.write_text(path.read_text() + json.dumps({"question": "Is it?", "chosen": "yes"}) + "\n")
    refused = forks.run(pairs, *DPO)
    assert refused.status == 2 and "pairs.jsonl:51" in refused.err and "'rejected'" in refused.err
