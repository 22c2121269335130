"""The section `tokenizer`."""

from __future__ import annotations

from rl_megatron.config.loading.settings import Positive, section


@section
class TokenizerConfig:
    """The tokenizer, which all stages of a run share."""

    # A Hugging Face tokenizer's directory. null: the Hugging Face tokenizer that init_from was imported with or, if
    # there is none, a byte-level BPE trained on the first stage's training text.
    path: str | None = None
    vocab_size: Positive = 512  # tokens of the trained BPE, 258 or more; unused if path is set
