"""The router of a mixture of experts, with a load-balancing loss that is scaled like the loss it is added to."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor


class BalancedRouter(TopKRouter):
    """megatron-core's top-k router with a balancing loss of our own, off unless `model.router_aux_loss` c is above 0:

        L_aux = c · Σ_layers Σ_m (T_m / T) · (E / k) · Σ_i f_i·P_i
        f_i = share of microbatch m's T_m tokens that go to expert i      P_i = mean probability of expert i over them

    (1·c per layer where experts are used evenly), a mean over the T tokens of the global batch, as the losses' own
    denominators are counted: before the first forward. Padding and rows without weight are no tokens. Tokens of a
    microbatch are those of all tensor- and context-parallel ranks; microbatches and data-parallel ranks each balance
    their own, so L_aux, by its nature, depends on which rows share a microbatch. No other layout changes it.

    megatron-core scales its own by token counts that its optimizer step divides by and ours does not, counts padding,
    and is NaN for a microbatch without tokens (NVIDIA/Megatron-LM issues 1652 and 1984).

    Source: Fedus et al. 2021 (arXiv:2101.03961), eq. 4–6.
    """

    step_tokens: Tensor | None = None  # T, of the step under way
    reported: Tensor | None = None  # this rank's part of L_aux in the step under way
    expert_bias: Tensor | None  # megatron-core's buffer; None where the router has no bias
    visits: Tensor | None = None  # [experts] tokens of this rank in the step under way, where they move the bias

    def _apply_aux_loss(
        self, probs: Tensor, scores_for_aux_loss: Tensor, routing_map: Tensor, with_padding_mask: bool = False
    ) -> Tensor:
        if self.step_tokens is None or self.reported is None:
            raise RuntimeError("the router's balancing loss needs the step's number of tokens: see begin_step")
        counts = routing_map.sum(dim=0).to(scores_for_aux_loss.dtype)
        dist.all_reduce(counts, group=self.tp_cp_group)
        tokens = (counts.sum() / self.topk).clamp(min=1.0)
        # This rank's tokens' part; f has no gradient. T_m·f_i = counts, T_m·P_i = Σ scores.
        balance = (counts * scores_for_aux_loss.sum(dim=0)).sum() / tokens
        coefficient = self.get_aux_loss_coeff("aux_loss") * routing_map.size(1) / self.topk
        loss = coefficient * balance / self.step_tokens
        self.reported = self.reported + loss.detach()
        return _AlsoMinimised.apply(probs, loss)

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Counts the tokens of each expert for `move_biases`, as the balancing loss does: padding and rows without
        weight are none. megatron-core's own count, which this leaves at 0, has padding in it, and moves the bias before
        it is known whether the step is taken."""
        if self.visits is not None and self.training and torch.is_grad_enabled():
            tokens = routing_map if padding_mask is None else routing_map & ~padding_mask[:, None]
            self.visits += tokens.sum(dim=0)


class _AlsoMinimised(torch.autograd.Function):
    """`output` as it is; backward adds the gradient of `loss` to that of whatever comes of it."""

    @staticmethod
    def forward(ctx, output: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return output.view_as(output)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        return gradient, torch.ones_like(loss)


def forget_graphs(model_chunks: Iterable[torch.nn.Module]) -> None:
    """Drops the tensors that experts' dispatchers keep of the last microbatch. They hold its autograd graph, whose
    nodes hold DDP's hooks and with them the model: a cycle that Python's collector cannot see, so that the model would
    outlive its last reference."""
    for layer in (
        module for model_chunk in model_chunks for module in model_chunk.modules() if isinstance(module, MoELayer)
    ):
        for name, value in vars(layer.token_dispatcher).items():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                setattr(layer.token_dispatcher, name, None)


def balancing_routers(model_chunks: Iterable[torch.nn.Module]) -> list[BalancedRouter]:
    """The routers whose balancing loss is on."""
    return [router for router in _routers(model_chunks) if router.is_aux_loss_enabled()]


def moving_routers(model_chunks: Iterable[torch.nn.Module]) -> list[BalancedRouter]:
    """The routers whose bias moves with each step."""
    moves = [router for router in _routers(model_chunks) if router.enable_expert_bias]
    return [router for router in moves if router.config.moe_router_bias_update_rate > 0]


def _routers(model_chunks: Iterable[torch.nn.Module]) -> list[BalancedRouter]:
    return [
        module for model_chunk in model_chunks for module in model_chunk.modules() if isinstance(module, BalancedRouter)
    ]


def begin_step(model_chunks: Iterable[torch.nn.Module], tokens: Tensor) -> None:
    """Tell the routers how many tokens the global batch has, without sequences of zero loss weight."""
    model_chunks = list(model_chunks)
    for router in balancing_routers(model_chunks):
        router.step_tokens, router.reported = tokens.clamp(min=1.0), torch.zeros_like(tokens)
    for router in moving_routers(model_chunks):
        router.visits = torch.zeros_like(_bias(router), dtype=torch.float32)


def move_biases(routers: Iterable[BalancedRouter], group: dist.ProcessGroup) -> None:
    """Move each expert's bias after a step: bᵢ += rate · sign(mean visits − visits of expert i).

    The call is collective over `group`, the ranks of a pipeline stage.

    Source: Wang et al. 2024 (arXiv:2408.15664), algorithm 1.
    """
    for router in routers:
        bias, visits = _bias(router), router.visits
        if visits is None:
            raise RuntimeError("the router has counted no tokens in this step: see begin_step")
        dist.all_reduce(visits, group=group)
        bias += router.config.moe_router_bias_update_rate * (visits.mean() - visits).sign()


def _bias(router: BalancedRouter) -> Tensor:
    if router.expert_bias is None:
        raise RuntimeError("the router has no bias: model.router_bias=false")
    return router.expert_bias


def balancing_loss(routers: list[BalancedRouter], group: dist.ProcessGroup, device: torch.device) -> float:
    """Return L_aux of the step that ends, over a pipeline stage's layers and all ranks of `group`; collective."""
    total = torch.zeros((), device=device)
    for router in routers:
        if router.reported is None:
            raise RuntimeError("the router has no balancing loss of this step: see begin_step")
        total += router.reported
    dist.all_reduce(total, group=group)
    return total.item()
