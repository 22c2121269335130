"""A loss that reads a number from the device in every microbatch, for a test that looks for such reads."""

from __future__ import annotations

from rl_megatron.losses.nll import NLLLoss


class ReadingLoss(NLLLoss):
    """The usual loss, with a read of its value."""

    def evaluate(self, *args, **kwargs):
        loss, metrics = super().evaluate(*args, **kwargs)
        loss.item()  # this line waits for the device
        return loss, metrics
