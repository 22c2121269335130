"""Policies built from a Hugging Face directory or a checkpoint have its weights, and training continues from them."""

from __future__ import annotations

import pytest
import torch

from rl_megatron.checkpoint.hf_convert import import_weights
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.optimizer import OptimizerConfig
from rl_megatron.config.parallel import ParallelConfig
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.losses import NLLLoss
from rl_megatron.training.megatron_policy import MegatronPolicy
from rl_megatron.weight_sync.exporter import digest_weights
from tests.parallel.family_cases import SHAPE, hf_model, save

TENSOR = {"parallel": ParallelConfig(tensor=2), "device": "cpu", "precision": "bf16"}
OPTIMIZER = OptimizerConfig(lr=1e-2, decay_style="constant")


def batch() -> BatchedDataDict:
    ids = torch.randint(SHAPE["vocab_size"], (4, 9), generator=torch.Generator().manual_seed(0))
    return BatchedDataDict(input_ids=ids, token_mask=torch.ones(4, 9), sample_mask=torch.ones(4))


def train_from_each(source: str, imported: str, directory: str) -> dict[str, str]:
    """Train a step from the directory and one from its import; continue from the checkpoint that the first saved.

    Returns:
        Digests of the weights after each.
    """
    digests = {}
    for name, policy in (
        ("hf", MegatronPolicy.from_hf(source, optimizer=OPTIMIZER, **TENSOR)),
        ("import", MegatronPolicy.from_checkpoint(imported, weights_only=True, optimizer=OPTIMIZER, **TENSOR)),
    ):
        policy.train(batch(), NLLLoss())
        digests[name] = digest_weights(policy.model)
        if name == "hf":
            saved = policy.save_checkpoint(directory, 1)
            policy.train(batch(), NLLLoss())
            digests["two steps"] = digest_weights(policy.model)
    again = MegatronPolicy.from_checkpoint(saved, parallel=TENSOR["parallel"], device="cpu", optimizer=OPTIMIZER)
    assert again.model.precision == "bf16"
    digests["saved"] = digest_weights(again.model)
    again.train(batch(), NLLLoss())
    digests["continued"] = digest_weights(again.model)
    return digests


def score_head(source: str) -> torch.Tensor:
    """Return the scores of a new score head on the weights of the directory."""
    policy = MegatronPolicy.from_hf(source, device="cpu", head="score")
    return policy.score(BatchedDataDict(batch(), input_lengths=torch.full((4,), 9)))["scores"]


def resume_an_import(imported: str) -> None:
    MegatronPolicy.from_checkpoint(imported, device="cpu", optimizer=OPTIMIZER)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    source = save(hf_model("qwen2"), directory / "hf")
    import_weights(source, directory / "imported")
    return str(source), str(directory / "imported")


def test_training_starts_from_the_weights_of_the_files_and_continues_from_a_checkpoint(ranks, files, tmp_path):
    digests = ranks.run(2, train_from_each, *files, str(tmp_path))[0]
    assert digests["hf"] == digests["import"] == digests["saved"] != digests["two steps"]
    assert digests["continued"] == digests["two steps"]


def test_a_score_head_starts_on_the_weights_of_a_language_model(ranks, files):
    assert ranks.run(1, score_head, files[0])[0].isfinite().all()


def test_a_checkpoint_without_moments_needs_weights_only(ranks, files):
    with pytest.raises(AssertionError, match=rf"(?s){ConfigError.__name__}: checkpoint \S*imported .*weights_only"):
        ranks.run(1, resume_an_import, files[1])
