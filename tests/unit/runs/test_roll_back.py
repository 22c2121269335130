"""A stage that goes back to its newest checkpoint: which batches it leaves out, how often, and when it fails."""

from dataclasses import replace

import pytest

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.loading.load import load_config
from rl_megatron.runs import roll_back as roll_back_module
from rl_megatron.runs.roll_back import run_with_roll_backs
from rl_megatron.training.metrics import NonFiniteLoss

TRAIN = replace(load_config([]).first.train, on_nonfinite="roll_back", save_every=10, max_nonfinite_steps=2)


@pytest.fixture
def run(monkeypatch, tmp_path):
    """`run(fails, **train)`: run 40 steps that save every ten; batches in `fails` are not finite.

    It returns the batches of the steps that remained.
    """
    saved = []
    monkeypatch.setattr(roll_back_module, "find_checkpoints", lambda directory: saved)
    monkeypatch.setattr(roll_back_module, "read_manifest_alone", lambda step: {"step": step})

    def run(fails, **train):
        batches = {}

        def stage(roll_back):
            for step in range((saved or [0])[-1] + 1, 41):
                roll_back.step = step
                batches[step] = step + roll_back.batches_skipped
                if batches[step] in fails:
                    raise NonFiniteLoss(f"batch {batches[step]}")
                if step % 10 == 0:
                    saved.append(step)
            return list(batches.values())

        return run_with_roll_backs(stage, replace(TRAIN, **train), tmp_path)

    return run


def test_the_batches_since_the_checkpoint_are_left_out(run, logged):
    assert run({14}) == [*range(1, 11), *range(15, 45)]
    assert logged == [
        "batch 14; going back to step 10, and continuing with the batches after the failed one (1 of at most 2 times)"
    ]


def test_roll_backs_to_one_checkpoint_are_bounded_and_others_are_counted_anew(run):
    assert run({14, 16, 33, 35}) == [*range(1, 11), *range(17, 27), *range(36, 56)]


def test_a_stage_that_fails_again_and_again_fails(run):
    with pytest.raises(NonFiniteLoss, match=r"^batch 16; the stage has gone back to step 10 2 times already"):
        run({14, 15, 16})


def test_without_a_checkpoint_a_stage_fails(run):
    with pytest.raises(NonFiniteLoss, match=r"^batch 3; .* has no checkpoint of the stage"):
        run({3})


def test_a_stage_that_is_to_halt_fails(run):
    with pytest.raises(NonFiniteLoss, match=r"^batch 14$"):
        run({14}, on_nonfinite="halt")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["algorithm=sft"], ["train.on_nonfinite=roll_back", "train.save_every=0"]),
        (
            ["algorithm=dpo", "loss=dpo", "data=gsm8k_pairs", "data.path=x", "train.save_every=5",
             "algorithm.precompute_reference=true"],
            ["algorithm.precompute_reference=true", "train.on_nonfinite=roll_back"],
        ),
    ],
)  # fmt: skip
def test_a_roll_back_that_cannot_work_is_refused(overrides, words):
    with pytest.raises(ConfigError) as error:
        load_config([*overrides, "train.on_nonfinite=roll_back"])
    assert all(word in str(error.value) for word in words)
