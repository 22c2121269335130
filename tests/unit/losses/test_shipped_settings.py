"""configs/loss/*.yaml say what the settings classes say: every key, with its default."""

import dataclasses
from pathlib import Path

import pytest
import yaml

from rl_megatron.config.losses import LOSS_SETTINGS
from rl_megatron.losses import LOSSES, build_loss

OWN = "own"  # the preset for a user's loss, which has no keys
DIRECTORY = Path(__file__).resolve().parents[3] / "configs" / "loss"
FILES = sorted(path for path in DIRECTORY.glob("*.yaml") if path.stem != OWN)


def test_every_loss_has_a_file():
    assert {path.stem for path in FILES} == set(LOSSES) == set(LOSS_SETTINGS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_key_with_its_default(path):
    given = yaml.safe_load(path.read_text())
    assert given.pop("name") == path.stem
    assert given == dataclasses.asdict(build_loss(path.stem).cfg)
    assert isinstance(build_loss(path.stem).cfg, LOSS_SETTINGS[path.stem])
    assert build_loss(path.stem, given).cfg == build_loss(path.stem).cfg
