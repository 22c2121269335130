import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from rl_megatron.batching.cost import SequenceCost
from rl_megatron.config.loading.load import load_config
from rl_megatron.config.model import ModelConfig
from rl_megatron.model.families import family_of_model


def test_the_cost_of_a_few_lengths():
    cost = SequenceCost(per_token=3.0, per_pair=0.5)
    assert [cost(length) for length in (0, 1, 10)] == [0, 3.5, 80]
    assert SequenceCost()(7) == 7


@pytest.mark.parametrize("numbers", [(-1.0, 1.0), (1.0, -1.0), (0.0, 0.0)])
def test_a_cost_that_ranks_nothing_is_refused(numbers):
    with pytest.raises(ValueError, match="above 0"):
        SequenceCost(*numbers)


def test_the_cost_of_a_known_model():
    """Qwen2.5-0.5B has 494,032,768 parameters, and its embedding is its output head; biases and norms do not count."""
    model = load_config(["experiment=gsm8k_sft", "model=qwen2_5_0_5b", "data.path=unread"]).first.model
    cost = SequenceCost.from_model(model, vocab_size=151_936)
    biases, norms = 24 * (896 + 2 * 128), (2 * 24 + 1) * 896
    assert cost.per_token == 6 * (494_032_768 - biases - norms)
    assert cost.per_pair == 6 * 24 * 14 * 64


def test_the_cost_of_a_model_counts_its_matmuls():
    """The matmuls of a decoder are counted, forward and backward.

    Attention is full here; a causal kernel computes half of the pairs of tokens.
    """
    model = ModelConfig(num_layers=3, hidden_size=24, ffn_hidden_size=40, num_attention_heads=4, num_query_groups=2)
    length, vocab_size, head_dim = 10, 50, 6
    shapes = [(24, 24), (24, 12), (24, 12), (24, 24), (24, 40), (24, 40), (40, 24)]
    layers = [[torch.randn(shape, requires_grad=True) for shape in shapes] for _ in range(3)]
    embedding = torch.randn(vocab_size, 24, requires_grad=True)

    def heads(states, weight):
        split = (states @ weight).view(length, -1, head_dim).transpose(0, 1)
        return split.repeat_interleave(4 // len(split), dim=0)

    with FlopCounterMode(display=False) as counter:
        states = embedding[torch.arange(length)]
        for query, key, value, output, gate, up, down in layers:
            scores = heads(states, query) @ heads(states, key).transpose(1, 2)
            mixed = (scores.softmax(-1) @ heads(states, value)).transpose(0, 1).reshape(length, 24)
            states = states + mixed @ output
            states = states + ((states @ gate).sigmoid() * (states @ up)) @ down
        (states @ embedding.T).sum().backward()
    cost = SequenceCost.from_model(model, vocab_size)
    assert counter.get_total_flops() == cost(length) + cost.per_pair * length**2


@pytest.mark.parametrize(("preset", "heads"), [("gemma3_1b", 4 * 256), ("deepseek_v3", 128 * (192 + 128) / 2)])
def test_the_cost_of_a_model_counts_its_weight_matrices(preset, heads):
    """A token costs six FLOPs for each element of the matrices that it is multiplied with.

    These are the matrices of the experts that it visits and the output head, but not the embedding.
    """
    model = load_config([f"model={preset}"]).first.model
    table = family_of_model(model, vocab_size=1000).table(model, 1000)
    elements = model.hidden_size * 1000 if model.tie_embeddings else 0
    for name, shape in table.shapes.items():
        if len(shape) == 2 and not name.startswith("embedding."):
            visited = model.experts_per_token / model.num_experts if ".mlp.experts." in name else 1
            elements += math.prod(shape) * visited
    cost = SequenceCost.from_model(model, vocab_size=1000)
    assert cost.per_token == pytest.approx(6 * elements, rel=1e-12)
    assert cost.per_pair == 6 * model.num_layers * heads
