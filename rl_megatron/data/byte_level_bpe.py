"""Train a byte-level BPE tokenizer, for runs that bring none."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from rl_megatron.data.tokenizer import Tokenizer

PAD_TOKEN = "<pad>"
EOS_TOKEN = "<eos>"
MIN_BPE_VOCAB_SIZE = 258  # every byte, pad and eos


def train_bpe(texts: Iterable[str], vocab_size: int, *, digits: bool = True) -> Tokenizer:
    """Return a byte-level BPE tokenizer learned from `texts`. It is lossless on any text, and deterministic.

    Args:
        texts: The corpus, read once.
        vocab_size: The most tokens, including 256 bytes, `<pad>` (id 0) and `<eos>` (id 1). A small corpus may have too
            few repeated pairs to reach this number; `Tokenizer.vocab_size` is the actual size.
        digits: Whether each digit is a separate token, so that numbers of equal length have equally many tokens.

    Raises:
        ValueError: `vocab_size` is too small for all bytes.
    """
    if vocab_size < MIN_BPE_VOCAB_SIZE:
        raise ValueError(
            f"tokenizer.vocab_size = {vocab_size} must be at least {MIN_BPE_VOCAB_SIZE} for a byte-level BPE "
            f"(256 bytes, {PAD_TOKEN} and {EOS_TOKEN}); raise it."
        )
    backend = Backend(models.BPE())
    bytes_of_words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    splitters = [pre_tokenizers.Digits(individual_digits=True), bytes_of_words] if digits else [bytes_of_words]
    backend.pre_tokenizer = pre_tokenizers.Sequence(splitters)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,  # a pair that occurs once would only waste a token
        special_tokens=[PAD_TOKEN, EOS_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return Tokenizer(backend, EOS_TOKEN, PAD_TOKEN)
