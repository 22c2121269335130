"""The section `peft`: low-rank adapters (LoRA) that are trained instead of the model's weights."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Annotated

from pydantic import AfterValidator

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.loading.settings import Fraction, Positive, PositiveFloat, section

ALL_LINEAR = "all-linear"
DEFAULT_ADAPTER = "default"  # the name that peft gives to an adapter without a name
# Directories beside an adapter's files in which the Trainer of transformers keeps earlier steps
TRAINER_DIRECTORY = re.compile(r"checkpoint-\d+")
_NAME = re.compile(r"[A-Za-z0-9_-]+")


def plain_name(name: str) -> str:
    """Return an adapter's name if it can also name its directory: letters, digits, _ and -, but not checkpoint-N."""
    if _NAME.fullmatch(name) is None or TRAINER_DIRECTORY.fullmatch(name) is not None:
        raise ValueError("must be a word of letters, digits, '_' and '-', such as my_style, and not checkpoint-N")
    return name


@section
class LoraConfig:
    """A low-rank adapter W·x + s·B·A·x of linear layers. Keys and meanings are those of peft's `LoraConfig`.

    Source: Hu et al. 2021 (arXiv:2106.09685); `use_rslora` from Kalajdzievski 2023 (arXiv:2312.03732); `use_dora` from
    Liu et al. 2024 (arXiv:2402.09353).
    """

    # The name of the adapter that is trained. Adapters with other names, in the checkpoint that the stage starts from,
    # stay frozen and are applied in every forward pass.
    adapter_name: Annotated[str, AfterValidator(plain_name)] = DEFAULT_ADAPTER
    r: Positive = 8  # the rank: A has this many rows, and B this many columns. NeMo's name is dim
    lora_alpha: PositiveFloat = 8.0  # the numerator of s = lora_alpha / r. NeMo's name is alpha
    lora_dropout: Fraction = 0.0  # dropout of the adapters' input while training. NeMo's name is dropout
    # Hugging Face names of the linears that get an adapter, such as [q_proj, v_proj]: a list of name endings, or one
    # regular expression that matches whole names. all-linear: the linears of attention, MLP and experts.
    target_modules: str | tuple[str, ...] = ALL_LINEAR
    exclude_modules: str | tuple[str, ...] | None = None  # linears that get no adapter, in the forms of target_modules
    # Modules (embedding, head and norms) whose weights are trained fully besides the adapter, by the ends of their
    # Hugging Face names, such as [embed_tokens, lm_head].
    modules_to_save: tuple[str, ...] | None = None
    use_rslora: bool = False  # divide by √r instead of r, so that a higher rank needs no other learning rate
    # DoRA: scale each row of W + s·B·A to a length that is trained. The lengths start as those of the rows of W.
    use_dora: bool = False
    # Initialize B to 0, so that training starts from the base model. false: initialize it randomly, for tests.
    init_lora_weights: bool = True

    @property
    def scaling(self) -> float:
        """Return s, the factor of B·A."""
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)


def check_together(adapters: Sequence[LoraConfig]) -> None:
    """Check that these adapters can be in one model, which adds up their products B·A·x."""
    if len(adapters) == 1:
        return
    for adapter in adapters:
        refused = None
        if adapter.use_dora:
            refused = "peft.use_dora=true", "DoRA scales the sum of W and one adapter"
        elif adapter.modules_to_save:
            modules = ", ".join(adapter.modules_to_save)
            refused = f"peft.modules_to_save=[{modules}]", "a module has the weights of one adapter"
        if refused is not None:
            names = ", ".join(other.adapter_name for other in adapters)
            raise ConfigError(
                f"{refused[0]} of the adapter {adapter.adapter_name} does not go together with other adapters (the "
                f"model would have {names}), because {refused[1]}; merge the trained adapters with "
                "rl-megatron convert export --merge and start from the result, or leave the key out"
            )
