"""Router replay: record the experts that routers choose, and make routers use recorded experts instead of their own.

megatron-core selects the top-k experts by a router's `router_replay`, if it is set. Within `reading_numbers` and
`recording`, this module sets it to an object of its own. megatron-core's own `RouterReplay` is not used, for three
reasons. All models of a process share its list of routers. It expects forward passes and recomputations in a fixed
order, and the caller must switch its mode between them. And it needs recorded experts for every token.

Source: Ma et al. 2025 (arXiv:2510.11370), rollout routing replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

from rl_megatron.batching.routing import UNKNOWN_EXPERT
from rl_megatron.model.layers.router import BalancedRouter


def find_expert_layers(model_chunks: Iterable[torch.nn.Module]) -> list[int]:
    """Return the index, counted from 0 over the whole model, of each layer of these model chunks that has experts."""
    return [layer.router.layer_number - 1 for layer in _find_layers(model_chunks)]


def number_tokens(padding: Tensor, first: int) -> Tensor:
    """Return a code of each token of a microbatch, for `reading_numbers`: twice its number, plus 1 if it is padding.

    Args:
        padding: [R, L] bool, true for tokens that do not count in the balance of experts.
        first: The number of the first token.

    Returns:
        [R, L] int64, to be passed to the model as megatron-core's padding mask.
    """
    numbers = torch.arange(first, first + padding.numel(), device=padding.device)
    return 2 * numbers.view_as(padding) + padding


def decode_numbers(codes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the numbers of the tokens, in the order of the hidden states [L, R, hidden], and the padding [R, L]."""
    return codes.transpose(0, 1).flatten() // 2, codes % 2 == 1


@contextmanager
def reading_numbers(
    model_chunks: Iterable[torch.nn.Module], experts: Tensor | None, counts: Tensor | None
) -> Iterator[None]:
    """Make the routers of these model chunks look up each token's recorded experts and count, within the context.

    With recorded experts, a router computes its scores as always. The weights of the recorded experts, and their
    gradients, come from its own scores of these experts, normalised as in the model. A token without recorded experts
    is routed by its scores.

    megatron-core passes the padding mask to every layer, splits it over sequence-parallel ranks, and keeps it with a
    layer's input for the recomputation of activations. The tokens' numbers take the mask's place, so every layer knows
    its tokens in a forward pass and in its recomputation, in whatever order the pipeline runs these.

    Args:
        model_chunks: This rank's model chunks. Their padding mask must be what `number_tokens` returns.
        experts: [N, layers, k] The recorded experts of token n of this rank in the layers of `find_expert_layers`;
            `UNKNOWN_EXPERT` if none are recorded. None: the routers choose.
        counts: [N] `BalancedRouter.token_counts` of token n of this rank; None: tokens are not shared.
    """
    handles = []
    layers = _find_layers(model_chunks)
    try:
        for index, layer in enumerate(layers):
            replay = None if experts is None else ReplayedTopK(layer.router, experts[:, index])
            _set_top_k(layer.router, replay)
            handles.append(
                layer.register_forward_pre_hook(partial(_read_codes, replay=replay, counts=counts), with_kwargs=True)
            )
        yield
    finally:
        for layer in layers:
            _set_top_k(layer.router, None)
            layer.router.token_counts = None
        for handle in handles:
            handle.remove()


def _read_codes(
    layer: Any, args: tuple, kwargs: dict[str, Any], replay: ReplayedTopK | None, counts: Tensor | None
) -> tuple[tuple, dict[str, Any]]:
    """Take the tokens' numbers out of the arguments of a layer's forward, before it runs."""
    numbers, mask = decode_numbers(kwargs["padding_mask"])
    if replay is not None:
        replay.numbers, replay.padding = numbers, mask.transpose(0, 1).flatten()
    if counts is not None:
        layer.router.token_counts = counts[numbers]
    return args, kwargs | {"padding_mask": mask}


class ReplayedTopK:
    """The top-k selection of one layer's router while recorded experts are replayed.

    Attributes:
        numbers: [tokens] The numbers of the tokens that the layer is computing.
        padding: [tokens] Which of these tokens are padding.
    """

    numbers: Tensor
    padding: Tensor

    def __init__(self, router: BalancedRouter, experts: Tensor):
        self._router, self._experts = router, experts

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Return the scores and indices of each token's experts, both [tokens, k]. megatron-core calls it."""
        _, preferred = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        recorded = self._experts[self.numbers].long()
        is_recorded = recorded[:, :1] != UNKNOWN_EXPERT
        chosen = torch.where(is_recorded, recorded, preferred)
        if self._router.replayed is not None and self._router.training and torch.is_grad_enabled():
            counted = is_recorded[:, 0] & ~self.padding
            differs = (preferred.sort().values != chosen.sort().values).any(dim=-1)
            self._router.replayed += self._router.count(torch.stack([counted & differs, counted], dim=1))
        return scores.gather(1, chosen), chosen


@contextmanager
def recording(model_chunks: Iterable[torch.nn.Module], keep: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Call `keep` with the experts that the routers of these model chunks choose, within the context.

    Args:
        model_chunks: This rank's model chunks.
        keep: Called in each layer's forward pass with the layer's index, counted from 0 over the whole model, and the
            experts of its tokens, [tokens, k]. The tokens are in the order of the hidden states [L, R, hidden].
    """
    layers = _find_layers(model_chunks)
    try:
        for layer in layers:
            _set_top_k(layer.router, RecordedTopK(partial(keep, layer.router.layer_number - 1)))
        yield
    finally:
        for layer in layers:
            _set_top_k(layer.router, None)


class RecordedTopK:
    """The top-k selection of one layer's router while its choices are recorded."""

    def __init__(self, keep: Callable[[Tensor], None]):
        self._keep = keep

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Return what `default_compute_topk` returns, and call `keep` with the experts. megatron-core calls it."""
        values, experts = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        self._keep(experts)
        return values, experts


def _find_layers(model_chunks: Iterable[torch.nn.Module]) -> list[Any]:
    return [module for model_chunk in model_chunks for module in model_chunk.modules() if isinstance(module, MoELayer)]


def _set_top_k(router: BalancedRouter, top_k: ReplayedTopK | RecordedTopK | None) -> None:
    setattr(router, "router_replay", top_k)  # noqa: B010  # megatron-core's annotation names its own class only
