"""Every loss on a tree of sequences is the loss on padded rows: each token that sequences share is read once."""

import random

import pytest
import torch

from rl_megatron.batching.prefix_tree import PrefixTree
from rl_megatron.batching.shared_prefixes import PREFIX_SET, SharedPrefixes, find_shared_prefixes
from rl_megatron.logprobs import Sharding, next_token_stats
from rl_megatron.losses import build_loss
from rl_megatron.topology.token_layout import TokenLayout
from tests.contract.packing import PACKABLE, Shape, random_batch
from tests.contract.test_losses import valid_counts
from tests.contract.test_packing import assert_close, padded_rows

SHAPES = [Shape((7, 9, 10, 5, 8, 10), 11), Shape((10, 8, 1, 3, 9, 9), 10), Shape((10,) * 6, 10)]


def grow(batch, lengths, rng):
    """Give sequences common beginnings, also within their unmasked tokens; return their tree."""
    ids = batch["input_ids"]
    for row in range(1, len(lengths)):
        like, common = rng.randrange(row), rng.randint(0, min(lengths))
        common = max(common, rng.randint(0, min(lengths[row], lengths[like])))
        ids[row, :common] = ids[like, :common]
        if "temperature" in batch and rng.random() < 0.8:
            batch["temperature"][row] = batch["temperature"][like]
    facts = find_shared_prefixes({**batch, PREFIX_SET: torch.zeros(len(lengths), dtype=torch.long)}, lengths)
    return SharedPrefixes(facts).grow(range(len(lengths)), lengths)


def lay_out(tree: PrefixTree, width: int, multiple: int) -> TokenLayout:
    segments = [(segment.begin, segment.length) for segment in tree.segments]
    padded = [-(-length // multiple) * multiple for _, length in segments]
    return TokenLayout.from_segments(segments, tree.paths, padded, width, None)


def agree(layout: TokenLayout, output: torch.Tensor) -> torch.Tensor:
    """Return a model's output that is the same for sequences which are the same up to its token.

    So it also is for the first tokens that sequences do not share: they are the same token after the same ones.
    """
    output = output.clone()
    for row, column in (layout.index >= 0).nonzero().tolist():
        before = max(column - 1, 0)
        output[row, column] = output[(layout.index[:, before] == layout.index[row, before]).nonzero()[0, 0], column]
    return output


@pytest.mark.change
@pytest.mark.parametrize("case", PACKABLE, ids=str)
def test_a_loss_reads_each_shared_token_once(case):
    most_shared, moved = 1, False
    for seed, shape in enumerate(SHAPES):
        batch, output = random_batch(case, shape, torch.Generator().manual_seed(seed))
        tree = grow(batch, shape.lengths, random.Random(seed))
        layout = lay_out(tree, shape.width, multiple=1 + seed)
        output = agree(layout, output)
        batch |= {key: agree(layout, batch[key]) for key in case.outputs_in_batch}
        counts, loss = valid_counts(batch), build_loss(case.name, case.cfg)
        unmasked = batch["token_mask"][:, 1:] * batch["sample_mask"][:, None] != 0
        counted = torch.nn.functional.pad(unmasked, (0, 1)) & (layout.index >= 0)
        most_sharing = int(layout.index[counted].bincount().max())
        sharding = Sharding(shared_index=layout.index, most_sharing=most_sharing)
        data = batch | {key: layout.scatter(batch[key], torch.nan) for key in case.outputs_in_batch}

        rows = layout.scatter(output, torch.nan).requires_grad_()
        value, metrics = loss.evaluate(data, *counts, **loss.read_output(rows, data, sharding))
        (gradient,) = torch.autograd.grad(value, rows)
        want_value, want_metrics, want_gradient = padded_rows(loss, batch, output, counts)
        total = torch.zeros_like(gradient[0])
        is_there = layout.index >= 0
        total.index_add_(0, layout.index[is_there], want_gradient[is_there])
        found, wanted = (value.item(), metrics, gradient[0]), (want_value, want_metrics, total)
        assert_close(found, wanted, torch.float64, (str(case), seed))
        most_shared = max(most_shared, most_sharing)
        moved |= want_value != 0 and total.abs().max().item() > 1e-4
    assert most_shared > 1, "no unmasked token is shared"
    assert moved, "nothing to compare"


def test_a_mask_with_more_sharing_than_was_counted_is_refused():
    tree = PrefixTree.build([5, 5, 5], [0, 3, 3])
    layout = lay_out(tree, 5, 1)
    ids, mask = torch.ones(3, 5, dtype=torch.long), torch.ones(3, 5)
    logits = torch.zeros(*layout.local_shape, 8)
    sharding = Sharding(shared_index=layout.index, most_sharing=2)
    with pytest.raises(ValueError, match=r"most_sharing=2 is too small.*most_counted=None"):
        next_token_stats(logits, ids, sharding, mask=mask, gather_ids=ids[:, 1:, None], most_counted=9)
    stats = next_token_stats(logits, ids, sharding, mask=mask, gather_ids=ids[:, 1:, None])
    assert (stats.gathered - stats.logprobs[..., None]).abs().max() < 1e-6
