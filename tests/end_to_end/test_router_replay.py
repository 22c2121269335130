"""GRPO of a model with experts on two expert-parallel ranks, with router replay."""

import pytest

from tests.end_to_end.launch import TINY, metrics

GRPO = (
    "model=nano_moe", *TINY, "model.expert_ffn_hidden_size=32", "model.shared_expert_ffn_hidden_size=32",
    "algorithm=grpo", "algorithm.prompts_per_step=4", "algorithm.samples_per_prompt=4", "parallel.expert=2",
    "train.micro_batch_tokens=128", "generation.router_replay=true",
)  # fmt: skip


@pytest.mark.parametrize("options", [("model.recompute=full",), ("algorithm.updates_per_rollout=2",)], ids=str)
def test_a_run_replays_what_the_embedded_engine_recorded(tmp_path, forks, options):
    first, _ = forks.run_ranks(tmp_path, "train", *GRPO, *options, ranks=2)
    assert first.status == 0, first.err
    steps = [line for line in metrics(tmp_path / "out") if line["kind"] == "train"]
    assert len(steps) == 3
    for step in steps:
        assert step["mismatch_max"] < 1e-5
        # A second update of the same rollouts may choose other experts, because the router has changed.
        assert 0 <= step["mismatch_routing"] < 0.2
