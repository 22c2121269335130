"""A run that exports every checkpoint: transformers loads an export, and gives the logprobs of the policy."""

from __future__ import annotations

import shutil

import torch

from rl_megatron import MegatronPolicy
from tests.end_to_end.launch import TINY, checkpoints
from tests.parallel.family_cases import assert_same_tensors, tensors

EXPORTING = ("train", *TINY, "train.steps=4", "train.save_every=2", "train.keep_checkpoints=1", "train.export_hf=true")


def logprobs_of(checkpoint: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return sequences and the logprobs of the policy in a checkpoint."""
    policy = MegatronPolicy.from_checkpoint(checkpoint, device="cpu", weights_only=True)
    ids = torch.randint(3, 259, (4, 12), generator=torch.Generator().manual_seed(1))
    found = policy.get_logprobs({"input_ids": ids, "input_lengths": torch.tensor([12, 12, 7, 3])})["logprobs"]
    policy.shutdown()
    return ids, found


def test_transformers_gives_the_logprobs_of_the_policy_in_every_kept_export(tmp_path, forks, ranks):
    done = forks.run_ranks(tmp_path, *EXPORTING, "parallel.tensor=2", ranks=2)
    assert [rank.status for rank in done] == [0, 0], done[0].err
    exports = tmp_path / "out" / "exported" / "sft"
    assert [path.name for path in exports.iterdir()] == checkpoints(tmp_path / "out", "sft") == ["step-000004"]
    assert "exported/sft/step-000002: exported for Hugging Face" in done[0].err + done[0].out

    from transformers import AutoModelForCausalLM, AutoTokenizer

    ((ids, wanted),) = ranks.run(1, logprobs_of, str(tmp_path / "out/checkpoints/sft/step-000004"))
    model = AutoModelForCausalLM.from_pretrained(exports / "step-000004", dtype="auto")
    assert len(AutoTokenizer.from_pretrained(exports / "step-000004")) == model.config.vocab_size == 259
    with torch.no_grad():
        logprobs = model(ids).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    within = torch.arange(1, 12) < torch.tensor([12, 12, 7, 3])[:, None]
    torch.testing.assert_close(wanted[:, 1:][within], logprobs[within], rtol=1e-5, atol=1e-5)
    assert wanted[:, 1:][within].std() > 0.01

    before = tensors(exports / "step-000004")  # a run that was killed before its last export was complete
    shutil.rmtree(exports)
    again = forks.run(tmp_path, *EXPORTING)
    assert again.status == 0, again.err
    assert_same_tensors(tensors(exports / "step-000004"), before)


def test_a_model_that_cannot_be_exported_is_refused_before_anything_is_written(tmp_path, forks):
    refused = forks.run(tmp_path, *EXPORTING, "model.attention_sinks=true")
    assert refused.status == 2 and not (tmp_path / "out").exists()
    assert "train.export_hf=true: model: none of LlamaForCausalLM" in refused.err
    assert "set train.export_hf=false" in refused.err
