"""`LayerwiseSink`: loads verified tensors into a model of vLLM, with vLLM's layerwise reload.

It runs in vLLM's workers; `weight_sync.vllm_plugin` describes what it may import.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from rl_megatron.weight_sync.buckets import RefitPlan, WeightsRefused

# Entries of config.json that change what a model computes. Entries that both sides have must be equal.
_DECISIVE = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "rms_norm_eps", "hidden_act", "tie_word_embeddings", "num_experts_per_tok",
)  # fmt: skip
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 1e-2}  # relative to the largest logit of a head


class LayerwiseSink:
    """A `WeightSink` for a model of vLLM, whose parameters are fused, sharded and packed for kernels."""

    def __init__(self, model: torch.nn.Module, model_config: Any):
        """Keep this worker's part of vLLM's model, and vLLM's configuration of the model."""
        self._model, self._model_config = model, model_config
        self._parameters = {name for name, _ in model.named_parameters()}
        self._loaded: set[str] | None = set()
        self._loading = False
        self._why_not = ""

    def check(self, plan: RefitPlan) -> None:
        """Check that the server's model and the policy's have the same configuration.

        The tensors themselves are checked when they are loaded.

        Raises:
            WeightsRefused: An entry of their config.json differs. The message names it.
        """
        here = self._model_config.hf_config
        for key in _DECISIVE:
            ours, theirs = getattr(here, key, None), plan.hf_config.get(key)
            if ours is not None and theirs is not None and ours != theirs:
                raise WeightsRefused(f"the server's model has {key}={ours}, and the policy's has {key}={theirs}")

    def begin(self) -> None:
        """Prepare the model for new weights. It computes no logits until `finish` has succeeded."""
        from vllm.model_executor.model_loader.reload import (  # pyright: ignore[reportMissingImports]
            initialize_layerwise_reload,
        )

        self._close("this server's weights are incomplete: a weight sync was interrupted or refused")
        if self._loading:  # vLLM must not count weights of an interrupted weight sync
            self._finalize()
        self._loaded, self._loading = set(), True
        initialize_layerwise_reload(self._model)

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load tensors by their Hugging Face names.

        vLLM keeps a tensor until all tensors of its layer have arrived, perhaps in a later bucket. So vLLM gets copies.

        Raises:
            WeightsRefused: The model's loader does not know a tensor, or expects another shape.
        """
        from vllm.model_executor.model_loader.mtp_validation import (  # pyright: ignore[reportMissingImports]
            disable_mtp_completeness_check,
        )

        last = ""

        def copies() -> Iterator[tuple[str, Tensor]]:
            nonlocal last
            for name, weight in weights:
                last = name
                yield name, weight.clone()

        try:
            with disable_mtp_completeness_check():  # it expects a whole checkpoint in one call
                loaded = self._model.load_weights(copies())  # pyright: ignore[reportCallIssue]
        except (AssertionError, KeyError, ValueError, RuntimeError) as error:
            raise WeightsRefused(f"{last} cannot be loaded into the server's model: {error!r}") from error
        if loaded is None:
            self._loaded = None  # this model's loader does not report what it has loaded
        elif self._loaded is not None:
            self._loaded |= set(loaded)

    def finish(self) -> None:
        """Pack the weights for vLLM's kernels, and let the model compute logits again.

        Raises:
            WeightsRefused: The policy did not send a parameter of the server's model, or the head still computes with
                older weights.
        """
        self._finalize()
        self._loading = False
        heads = dict(self._find_tied_heads())
        loaded = self._parameters if self._loaded is None else self._loaded
        missing = self._parameters - loaded - {f"{name}.weight" for name in heads}
        if missing:
            raise WeightsRefused(f"{min(missing)} of the server's model is missing from the policy's weights")
        for name, head in heads.items():
            repack_tied_head(head)
            _check_head(name, head)
        self._open()

    def _finalize(self) -> None:
        from vllm.model_executor.model_loader.reload import (  # pyright: ignore[reportMissingImports]
            finalize_layerwise_reload,
        )

        finalize_layerwise_reload(self._model, self._model_config)

    def _find_tied_heads(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """Yield (name, head) of each output head that is tied to the embedding."""
        if not getattr(self._model_config.hf_config, "tie_word_embeddings", False):
            return
        for name, module in self._model.named_modules():
            weight = getattr(module, "weight", None)
            if name.rpartition(".")[2] == "lm_head" and weight is not None and weight.numel() > 0:
                yield name, module

    def _close(self, why_not: str) -> None:
        def refuse(*_: object, **__: object) -> Tensor:
            raise RuntimeError(why_not)

        self._model.__dict__["compute_logits"] = refuse  # hides the method of the class

    def _open(self) -> None:
        del self._model.__dict__["compute_logits"]


def repack_tied_head(head: torch.nn.Module) -> None:
    """Pack the head's weights for its kernel again.

    On a CPU, the kernel has its own copy of the weights. A layerwise reload does not update the copy, because it finds
    no weights for a head that is tied to the embedding.
    """
    head.quant_method.process_weights_after_loading(head)  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]


@torch.no_grad()
def _check_head(name: str, head: torch.nn.Module) -> None:
    """Raise WeightsRefused if the kernel of a tied head does not compute with the head's weights."""
    weight = head.get_parameter("weight")
    if weight.dtype not in _TOLERANCE:
        return  # quantized
    width = weight.size(1)
    probe = torch.sin(torch.arange(1, width + 1, device=weight.device)).to(weight.dtype).unsqueeze(0)
    actual = head.quant_method.apply(head, probe).float()  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
    expected = (probe @ weight.t()).float()
    if not (actual - expected).abs().max() <= _TOLERANCE[weight.dtype] * expected.abs().max():
        raise WeightsRefused(f"{name}.weight is not the embedding that arrived: the head computes with older weights")
