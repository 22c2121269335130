"""Which adapters a directory of peft has: one in the directory itself, and others in subdirectories."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_megatron.checkpoint.hf_directory import ADAPTER_CONFIG, choose_adapters, find_adapter_directories
from rl_megatron.config.errors import ConfigError


def directory(where: Path, *adapters: str) -> Path:
    for adapter in adapters:
        (where / adapter).mkdir(parents=True, exist_ok=True)
        (where / adapter / ADAPTER_CONFIG).write_text("{}")
    return where


def test_adapters_are_found_by_name_and_the_earlier_steps_of_a_trainer_are_not(tmp_path):
    found = find_adapter_directories(directory(tmp_path, "style", ".", ".hidden", "checkpoint-500", "checkpoint-best"))
    assert found == {
        "default": tmp_path, "checkpoint-best": tmp_path / "checkpoint-best", "style": tmp_path / "style",
    }  # fmt: skip
    assert list(found)[0] == "default"


def test_the_directory_of_a_whole_model_has_no_adapters_even_if_a_subdirectory_has(tmp_path):
    directory(tmp_path, "style")
    assert list(find_adapter_directories(tmp_path)) == ["style"]
    (tmp_path / "config.json").write_text("{}")
    assert find_adapter_directories(tmp_path) == {}


@pytest.mark.parametrize(
    ("adapters", "message"),
    [((".", "my.style"), "my.style: the name of an adapter must be a word"), ((".", "default"), "the name of both")],
)
def test_names_that_cannot_be_told_apart_or_used_are_refused(tmp_path, adapters, message):
    with pytest.raises(ConfigError, match=message):
        find_adapter_directories(directory(tmp_path, *adapters))


def test_an_adapter_that_is_exported_alone_lies_in_the_directory_itself():
    manifest = {"peft": {"adapter_name": "style"}, "frozen_adapters": [{"r": 4}]}
    assert choose_adapters(Path("c"), manifest, None) == {"style": "style", "default": "default"}
    assert choose_adapters(Path("c"), manifest, "style") == {"style": "default"}
    with pytest.raises(ConfigError, match="--adapter stile: checkpoint c has no such adapter; did you mean 'style'"):
        choose_adapters(Path("c"), manifest, "stile")
