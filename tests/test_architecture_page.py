"""The page of the architecture: its tables, lists and pictures are those of the code."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import pytest
import torch

from docs import generate_architecture
from rl_megatron.losses import build_loss
from tests.parallel.layouts import build_policy
from tests.test_architecture import PACKAGE, PACKAGES

REWRITE = "run `python docs/generate_architecture.py`"


def test_the_page_and_its_pictures_are_those_of_the_imports():
    text = generate_architecture.PAGE.read_text()
    assert generate_architecture.page(text) == text, REWRITE
    assert generate_architecture.packages_picture() == generate_architecture.PACKAGES_PICTURE.read_text(), REWRITE
    assert generate_architecture.step_picture() == generate_architecture.STEP_PICTURE.read_text(), REWRITE
    assert list(generate_architecture.DESCRIPTIONS) == list(PACKAGES)


def test_a_picture_without_the_arrows_that_follow_from_others():
    graph = {"c": {"a", "b"}, "b": {"a"}, "a": set()}
    assert generate_architecture.needed_arrows(graph) == {("c", "b"), ("b", "a")}


def functions_of_a_step() -> list[tuple[str, str]]:
    """Return (file, function) of the package in the order in which a training step enters them."""
    policy = build_policy({})
    mask = torch.ones(4, 8)
    mask[:, 0] = 0
    batch = {"input_ids": torch.arange(32).view(4, 8) % 13, "input_lengths": torch.full((4,), 8), "token_mask": mask}
    batch |= {"sample_mask": torch.ones(4), "advantages": torch.ones(4, 8), "prev_logprobs": torch.zeros(4, 8)}
    batch |= {"generation_logprobs": torch.zeros(4, 8)}
    entered: dict[tuple[str, str], None] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            entered.setdefault((path.relative_to(PACKAGE).as_posix(), frame.f_code.co_qualname), None)

    sys.setprofile(note)
    try:
        policy.train(batch, build_loss("clipped_pg", {"reference_policy_kl_penalty": 0.0}))
    finally:
        sys.setprofile(None)
    return list(entered)


@pytest.mark.change
def test_a_training_step_enters_the_files_of_the_picture_in_their_order(ranks):
    shown = [(box.file, box.name) for box in generate_architecture.STEP[2:]]
    (entered,) = ranks.run(1, functions_of_a_step)
    assert [each for each in entered if each in shown] == shown
