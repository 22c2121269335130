"""The section `peft`: low-rank adapters (LoRA) that are trained instead of the model's weights."""

from __future__ import annotations

import math

from rl_megatron.config.field_types import Fraction, Positive, PositiveFloat, section

ALL_LINEAR = "all-linear"


@section
class LoraConfig:
    """A low-rank adapter W·x + s·B·A·x of linear layers. Keys and meanings are those of peft's `LoraConfig`.

    Source: Hu et al. 2021 (arXiv:2106.09685); `use_rslora` from Kalajdzievski 2023 (arXiv:2312.03732); `use_dora` from
    Liu et al. 2024 (arXiv:2402.09353).
    """

    r: Positive = 8  # the rank: the rows of A and the columns of B. NeMo's name is dim
    lora_alpha: PositiveFloat = 8.0  # the numerator of s = lora_alpha / r. NeMo's name is alpha
    lora_dropout: Fraction = 0.0  # dropout of the adapters' input while training. NeMo's name is dropout
    # Hugging Face names of the linears that get an adapter, such as [q_proj, v_proj]: the end of a name, or a regular
    # expression of whole names. all-linear: those of attention, MLP and experts.
    target_modules: str | tuple[str, ...] = ALL_LINEAR
    exclude_modules: str | tuple[str, ...] | None = None  # linears that get none, in the forms of target_modules
    # Modules that are trained whole beside the adapter, by the ends of their Hugging Face names: embedding,
    # head and norms, such as [embed_tokens, lm_head].
    modules_to_save: tuple[str, ...] | None = None
    use_rslora: bool = False  # divide by √r instead of r, so that a higher rank needs no other learning rate
    # DoRA: scale each row of W + s·B·A to a length that is trained. The lengths start as those of the rows of W.
    use_dora: bool = False
    # Start B as 0, so that training starts from the base. false: start it from random numbers, for tests.
    init_lora_weights: bool = True

    @property
    def scaling(self) -> float:
        """Return s, the factor of B·A."""
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)
