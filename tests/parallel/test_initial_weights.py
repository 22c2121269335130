"""Random weights are drawn once, from our own numbers, and not at all for a model whose weights are loaded next."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rl_megatron.model import build
from rl_megatron.training.megatron_policy import MegatronPolicy
from tests.parallel.family_cases import hf_model, save
from tests.parallel.layouts import EXPERTS, MODEL, build_policy


def count_draws(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets "ours" for every model that draws, and "torch" for every tensor that is drawn by others.

    megatron-core would draw the weights of each layer by functions of `torch.nn.init`.
    """
    draws: list[str] = []
    drawn = build.initialise_parameters
    monkeypatch.setattr(build, "initialise_parameters", lambda *a, **k: draws.append("ours") or drawn(*a, **k))
    for name in ("normal_", "kaiming_uniform_", "xavier_normal_", "trunc_normal_"):
        monkeypatch.setattr(torch.nn.init, name, lambda *a, **k: draws.append("torch"))
    return draws


def draws_of_each(hf: str, directory: str) -> dict[str, list[str]]:
    """Return the draws of models that are built in different ways."""
    found = {}
    with pytest.MonkeyPatch.context() as monkeypatch:
        draws = count_draws(monkeypatch)

        def record(name: str) -> None:
            found[name] = draws.copy()
            draws.clear()

        build_policy({}, model=EXPERTS)
        record("random, with experts")
        policy = build_policy({}, model=MODEL)
        saved = policy.save_checkpoint(directory, 1)
        record("random")
        policy.freeze_reference()
        record("reference")
        MegatronPolicy.from_checkpoint(saved, device="cpu")
        record("checkpoint")
        MegatronPolicy.from_checkpoint(saved, device="cpu", weights_only=True, head="score")
        record("score head on a checkpoint")
        MegatronPolicy.from_hf(Path(hf), device="cpu")
        record("Hugging Face")
        MegatronPolicy.from_hf(Path(hf), device="cpu", head="score")
        record("score head on Hugging Face")
    return found


def test_weights_are_drawn_only_for_a_model_or_a_head_that_starts_at_random(ranks, tmp_path):
    save(hf_model("llama"), tmp_path / "hf")
    drawn = ranks.run(1, draws_of_each, str(tmp_path / "hf"), str(tmp_path / "saved"))[0]
    assert drawn == {
        "random, with experts": ["ours"],
        "random": ["ours"],
        "reference": [],
        "checkpoint": [],
        "score head on a checkpoint": ["ours"],
        "Hugging Face": [],
        "score head on Hugging Face": ["ours"],
    }
