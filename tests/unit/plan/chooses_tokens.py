"""A loss whose tensors have as many entries as the data says, which cannot be known without data."""

from __future__ import annotations

from rl_megatron.losses.nll import NLLLoss


class ChoosingLoss(NLLLoss):
    """The usual loss, which also looks up where its logprobs are low."""

    def evaluate(self, data, global_valid_seqs, global_valid_toks, next_token_logprobs):
        (next_token_logprobs < -1.0).nonzero()
        return super().evaluate(data, global_valid_seqs, global_valid_toks, next_token_logprobs)
