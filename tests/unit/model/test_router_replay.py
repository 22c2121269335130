"""The experts and weights of a token whose recorded experts are replayed, against formulas."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

from rl_megatron.batching.routing import check_routed_experts
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.model import ModelConfig
from rl_megatron.model.layers.router_replay import ReplayedTopK, decode_numbers, number_tokens

LOGITS = torch.tensor([[3.0, 2.0, 1.0, -1.0], [0.0, 4.0, -2.0, 1.0], [1.0, 0.5, 3.0, 2.0]])
RECORDED = torch.tensor([[9, 9], [2, 3], [-1, -1], [3, 0]], dtype=torch.int16)  # of tokens 0 to 3


def replayed(**settings):
    """Return weights [3, 4] and their sum's gradient, for tokens 1 to 3, of which token 2 is routed by its scores."""
    router = SimpleNamespace(replayed=torch.zeros(2), training=True, count=lambda flags: flags.sum(dim=0))
    top_k = ReplayedTopK(router, RECORDED)
    padding = torch.tensor([[False, False, False]])
    top_k.numbers, mask = decode_numbers(number_tokens(padding, first=1))
    top_k.padding = mask[0]
    assert torch.equal(mask, padding)
    logits = LOGITS.clone().requires_grad_()
    weights, chosen = topk_routing_with_score_function(logits, 2, router_replay=top_k, **settings)
    weights.square().sum().backward()
    return weights, chosen, logits.grad, router.replayed


CHOSEN = torch.tensor([[0, 0, 1, 1], [0, 1, 0, 1], [1, 0, 0, 1]]).bool()
SIGMOID = LOGITS.sigmoid() * CHOSEN
BIAS = torch.tensor([0.0, 0.0, -9.0, 0.0])  # it would exclude expert 2, which was recorded
CASES = {
    "Mixtral": ({}, LOGITS.masked_fill(~CHOSEN, -torch.inf).softmax(-1)),
    "Qwen3-MoE, not normalised": ({"use_pre_softmax": True}, LOGITS.softmax(-1) * CHOSEN),
    "DeepSeek-V3": (
        {"score_function": "sigmoid", "expert_bias": BIAS, "scaling_factor": 2.5},
        2.5 * SIGMOID / SIGMOID.sum(-1, keepdim=True),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_recorded_experts_get_weights_from_the_routers_own_scores(case):
    settings, wanted = CASES[case]
    weights, chosen, gradient, _ = replayed(**settings)
    assert torch.equal(chosen, CHOSEN)
    torch.testing.assert_close(weights, wanted)
    assert gradient.abs().sum(dim=-1).gt(0).all()


def test_replaced_choices_are_counted_for_tokens_with_recorded_experts():
    assert replayed()[3].tolist() == [2, 2]  # tokens 1 and 3; token 2 was not recorded


@pytest.mark.parametrize(
    ("shape", "value", "message"),
    [
        ((2, 3, 4, 1), 0, r"shape \(2, 3, 4, 1\), but .* require \(2, 3, 4, 2\)"),
        ((2, 3, 4, 2), 8, "expert 8, but model.num_experts=8"),
        ((2, 3, 4, 2), -2, "expert -2, but"),
    ],
)
def test_experts_that_the_model_does_not_have_are_refused(shape, value, message):
    model = ModelConfig(num_layers=4, num_experts=8, experts_per_token=2)
    batch = {"input_ids": torch.zeros(2, 3), "routed_experts": torch.full(shape, value, dtype=torch.int16)}
    with pytest.raises(ConfigError, match=message):
        check_routed_experts(batch, model)
