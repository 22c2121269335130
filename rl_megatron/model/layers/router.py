"""The router of a mixture of experts. Its load-balancing loss is scaled like the loss to which it is added."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import compute_routing_scores_for_aux_loss
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

# Values of megatron-core's `moe_router_load_balancing_type`, by `model.router_aux_loss_scope`.
GLOBAL = "global_aux_loss"
SCOPES = {"microbatch": "aux_loss", "global": GLOBAL}


class BalancedRouter(TopKRouter):
    """megatron-core's top-k router with a different balancing loss, which is on if `model.router_aux_loss` c exceeds 0.

        L_aux = c · Σ_layers Σ_m (T_m / T) · (E / k) · Σ_i f_i·P_i
        f_i = share of tokens that go to expert i      P_i = mean probability of expert i over microbatch m's T_m tokens

    If experts are used evenly, each layer adds c. The loss is a mean over the T tokens of the global batch. Like the
    losses' denominators, T is counted before the first forward. Padding and sequences with zero loss weight do not
    count. The tokens of a microbatch are those of all tensor- and context-parallel ranks. With router replay, f_i still
    counts the experts that the router itself would choose, because the loss can balance only these. The bias, in
    contrast, follows the experts that compute the tokens.

    `model.router_aux_loss_scope` sets over which tokens f_i is computed. With "microbatch", every microbatch of every
    data-parallel rank is balanced separately, so L_aux depends on which sequences share a microbatch, but on no other
    part of the layout. With "global", f_i is the share of the global batch, which `counting` finds before the first
    backward pass, and L_aux depends on no part of the layout.

    megatron-core's own balancing loss is not used for three reasons. It is multiplied by the number of tokens, by which
    megatron-core divides later, but this package does not. It counts padding. And it is NaN for a microbatch without
    tokens (NVIDIA/Megatron-LM issues 1652 and 1984).

    Source: Fedus et al. 2021 (arXiv:2101.03961), eq. 4–6.

    Attributes:
        step_tokens: T of the current step.
        reported: This rank's part of L_aux in the current step.
        expert_bias: megatron-core's buffer, or None if the router has no bias.
        visits: [experts] The number of this rank's tokens per expert in the current step. None before the first step.
        counted: [experts] With the scope "global", the number of the global batch's tokens per expert in the current
            step.
        counts: Whether forward passes add to `counted`; true within `counting`.
        replayed: [2] Two numbers of this rank's tokens in the current step: those whose recorded experts are not the
            router's choice, and all that have recorded experts. None before the first step.
        token_counts: [tokens] fp32, in how many sequences with a loss weight each token that the layer computes is.
            None: sequences share no tokens, so each token is in one.
    """

    step_tokens: Tensor | None = None
    reported: Tensor | None = None
    expert_bias: Tensor | None
    visits: Tensor | None = None
    counted: Tensor | None = None
    counts: bool = False
    replayed: Tensor | None = None
    token_counts: Tensor | None = None

    def count(self, flags: Tensor) -> Tensor:
        """Return the sums over tokens of `flags` [tokens, n], which are 0 for padding."""
        return flags.sum(dim=0) if self.token_counts is None else self.token_counts @ flags.to(self.token_counts.dtype)

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the weights and the experts of each token. Within `counting`, also count the tokens per expert."""
        if self.counts and self.counted is not None:
            padding = None if padding_mask is None else padding_mask.reshape(-1)
            routing_map, _ = compute_routing_scores_for_aux_loss(
                logits.view(-1, logits.size(-1)), self.topk, self.score_function, padding_mask=padding
            )
            self.counted += self.count(routing_map)
        return super().routing(logits, padding_mask=padding_mask)

    def _apply_aux_loss(
        self, probs: Tensor, scores_for_aux_loss: Tensor, routing_map: Tensor, with_padding_mask: bool = False
    ) -> Tensor:
        if self.step_tokens is None or self.reported is None:
            raise RuntimeError("the router's balancing loss needs the step's number of tokens; call begin_step first")
        if self.counted is None:
            counts = self.count(routing_map).to(scores_for_aux_loss.dtype)
            dist.all_reduce(counts, group=self.tp_cp_group)
        else:
            counts = self.counted
        tokens = (counts.sum() / self.topk).clamp(min=1.0)
        # The part of this rank's tokens: f_i = counts/tokens, which has no gradient, and T_m·P_i = Σ scores.
        balance = (counts * self.count(scores_for_aux_loss)).sum() / tokens
        coefficient = sum(map(self.get_aux_loss_coeff, SCOPES.values())) * routing_map.size(1) / self.topk
        loss = coefficient * balance / self.step_tokens
        self.reported = self.reported + loss.detach()
        return _AlsoMinimised.apply(probs, loss)

    def _apply_global_aux_loss(
        self, probs: Tensor, scores_for_aux_loss: Tensor, routing_map: Tensor, with_padding_mask: bool = False
    ) -> Tensor:
        """Return `probs`: `_apply_aux_loss` handles both scopes. megatron-core would average over past microbatches."""
        return probs

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Count the tokens of each expert, except padding and sequences with zero loss weight.

        megatron-core's own count stays 0. It would include padding, and megatron-core would move the bias before it is
        known whether the optimizer step is taken.
        """
        if self.visits is not None and self.training and torch.is_grad_enabled():
            tokens = routing_map if padding_mask is None else routing_map & ~padding_mask[:, None]
            self.visits += self.count(tokens)


class _AlsoMinimised(torch.autograd.Function):
    """The identity of `output`; its backward also gives `loss` a gradient of 1, so that `loss` is minimised as well."""

    @staticmethod
    def forward(ctx, output: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return output.view_as(output)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        return gradient, torch.ones_like(loss)


def forget_graphs(model_chunks: Iterable[torch.nn.Module]) -> None:
    """Drop the tensors that the experts' token dispatchers keep from the last microbatch.

    These tensors refer to the autograd graph, whose nodes refer to DDP's hooks and so to the model. Python's garbage
    collector cannot see this cycle, so the model would never be freed.
    """
    for layer in (
        module for model_chunk in model_chunks for module in model_chunk.modules() if isinstance(module, MoELayer)
    ):
        for name, value in vars(layer.token_dispatcher).items():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                setattr(layer.token_dispatcher, name, None)


def find_balancing_routers(model_chunks: Iterable[torch.nn.Module]) -> list[BalancedRouter]:
    """Return the routers whose balancing loss is on."""
    return [router for router in _find_routers(model_chunks) if router.is_aux_loss_enabled()]


def find_moving_routers(model_chunks: Iterable[torch.nn.Module]) -> list[BalancedRouter]:
    """Return the routers whose bias moves with each step."""
    moves = [router for router in _find_routers(model_chunks) if router.enable_expert_bias]
    return [router for router in moves if router.config.moe_router_bias_update_rate > 0]


def _find_routers(model_chunks: Iterable[torch.nn.Module]) -> list[BalancedRouter]:
    return [
        module for model_chunk in model_chunks for module in model_chunk.modules() if isinstance(module, BalancedRouter)
    ]


def balances_globally(config: TransformerConfig) -> bool:
    """Return whether the balancing loss uses the experts' shares of the global batch's tokens."""
    return config.moe_router_load_balancing_type == GLOBAL


@contextmanager
def counting(model_chunks: Iterable[torch.nn.Module], group: dist.ProcessGroup) -> Iterator[None]:
    """Count the tokens per expert for the balancing losses, in the forward passes within the block.

    The end of the block is collective over `group`, the ranks of a pipeline stage.
    """
    routers = find_balancing_routers(model_chunks)
    for router in routers:
        router.counts, router.counted = True, torch.zeros(router.weight.size(0), device=router.weight.device)
    try:
        yield
    finally:
        for router in routers:
            router.counts = False
    for router in routers:
        dist.all_reduce(router.counted, group=group)


def begin_step(model_chunks: Iterable[torch.nn.Module], tokens: Tensor) -> None:
    """Set the number of tokens of the global batch in the routers, and reset their counts.

    `tokens` is this number, a scalar tensor, without sequences of zero loss weight.
    """
    model_chunks = list(model_chunks)
    for router in _find_routers(model_chunks):
        router.replayed = torch.zeros(2, device=tokens.device, dtype=torch.float64)
        router.visits = torch.zeros(router.config.num_moe_experts or 0, device=tokens.device)
    for router in find_balancing_routers(model_chunks):
        router.step_tokens, router.reported = tokens.clamp(min=1.0), torch.zeros_like(tokens)


def move_biases(routers: Iterable[BalancedRouter], group: dist.ProcessGroup) -> None:
    """Move each expert's bias after a step: bᵢ += rate · sign(mean visits − visits of expert i).

    Collective over `group`, the ranks of a pipeline stage.

    Source: Wang et al. 2024 (arXiv:2408.15664), algorithm 1.
    """
    for router in routers:
        bias, visits = router.expert_bias, router.visits
        if bias is None:
            raise RuntimeError("the router has no bias, because model.router_bias=false")
        if visits is None:
            raise RuntimeError("the router has not counted the tokens of this step; call begin_step first")
        dist.all_reduce(visits, group=group)
        bias += router.config.moe_router_bias_update_rate * (visits.mean() - visits).sign()


def sum_balancing_loss(routers: list[BalancedRouter], group: dist.ProcessGroup, device: torch.device) -> Tensor:
    """Return L_aux of the current step, summed over a pipeline stage's layers and all ranks of `group`. Collective.

    It is a scalar on the device.
    """
    total = torch.zeros((), device=device)
    for router in routers:
        if router.reported is None:
            raise RuntimeError("the router has no balancing loss in this step; call begin_step first")
        total += router.reported
    dist.all_reduce(total, group=group)
    return total


def compute_expert_load(
    model_chunks: Iterable[torch.nn.Module],
    stage_group: dist.ProcessGroup,
    world: dist.ProcessGroup,
    device: torch.device,
) -> dict[str, Tensor]:
    """Return the largest and the smallest load of an expert in the step: its tokens, divided by its layer's mean.

    Both are scalars on the device, over the experts of all layers; they are 1 if all experts get equally many tokens.
    Collective over `world`; `stage_group` has the ranks of this pipeline stage.
    """
    extremes = torch.full((2,), -torch.inf, device=device)
    visits = [router.visits for router in _find_routers(model_chunks) if router.visits is not None]
    if visits:
        counts = torch.stack(visits)
        dist.all_reduce(counts, group=stage_group)
        shares = counts / counts.mean(dim=1, keepdim=True).clamp(min=1.0)
        extremes = torch.stack([shares.max(), -shares.min()])
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=world)
    return {"expert_load_max": extremes[0], "expert_load_min": -extremes[1]}


def compute_replaced_share(
    model_chunks: Iterable[torch.nn.Module], group: dist.ProcessGroup, device: torch.device
) -> Tensor:
    """Return the share of replayed (token, layer) pairs of the step for which the router would choose other experts.

    Collective over `group`, all ranks. The result is a scalar on the device, and NaN if nothing was replayed.
    """
    counts = torch.zeros(2, device=device, dtype=torch.float64)
    for router in _find_routers(model_chunks):
        if router.replayed is not None:
            counts += router.replayed
    dist.all_reduce(counts, group=group)
    return counts[0] / counts[1]
