"""Experts on fake CUDA, where no router says which tokens they get."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class BalancedExperts:
    """The number of tokens that each expert gets if routers spread them evenly, for the dispatcher of one layer."""

    def __init__(self) -> None:
        self._dispatcher: Any = None
        self._routed = 0  # this rank's tokens times the experts of each

    def begin(self, dispatcher: Any, routing_map: Tensor) -> None:
        """Take note of the layer that is running, and of its tokens."""
        self._dispatcher, self._routed = dispatcher, routing_map.size(0) * dispatcher.config.moe_router_topk

    def counts(self, tensor: Tensor) -> Tensor:
        """Return the counts that the dispatcher copies to the host in the place of `tensor`.

        All ranks have the same number of tokens.
        """
        dispatcher = self._dispatcher
        of_expert = torch.full((dispatcher.num_experts,), self._routed // dispatcher.num_experts)
        of_expert[: self._routed % dispatcher.num_experts] += 1
        mine = of_expert[dispatcher.local_expert_indices]
        answers = {
            "input_splits": of_expert.view(dispatcher.ep_size, -1).sum(1),
            "output_splits": mine.sum().expand(dispatcher.ep_size),
            "output_splits_tp": mine.sum().expand(dispatcher.tp_size) * dispatcher.ep_size,
            "tokens_per_expert": mine * (dispatcher.ep_size * dispatcher.tp_size),
            "num_global_tokens_per_local_expert": mine.expand(dispatcher.ep_size * dispatcher.tp_size, -1),
        }
        return next(answer for name, answer in answers.items() if getattr(dispatcher, name) is tensor).contiguous()
