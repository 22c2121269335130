"""Each loss of the training service is its formula in fp64, with its gradient, summed over targets."""

import pytest
import torch

from rl_megatron.service.datums import form_batch
from rl_megatron.service.losses import LOSSES, choose_loss
from tests.unit.service.cases import VOCAB_SIZE, random_datums


def expected(name, datum, logprobs, options):
    """Return the loss of one datum [N] or [N, K] as the page of the API has it."""
    inputs = {key: torch.from_numpy(value).double() for key, value in datum.inputs.items()}
    if name == "cross_entropy":
        return -(logprobs * inputs["weights"]).sum()
    sampled, advantages = inputs["logprobs"], inputs["advantages"]
    ratio = (logprobs - sampled).exp()
    low, high = (inputs.get(f"clip_{end}_threshold", torch.tensor(options.get(f"clip_{end}_threshold", default)))
                 for end, default in (("low", 0.8), ("high", 1.2)))  # fmt: skip
    if name == "importance_sampling":
        return -(ratio * advantages).sum()
    if name == "ppo":
        return -torch.min(ratio * advantages, ratio.clip(low, high) * advantages).sum()
    if name == "cispo":
        return -(ratio.clip(low, high).detach() * logprobs * advantages).sum()
    if name == "dro":
        return -(logprobs * advantages - 0.5 * options.get("beta", 0.05) * (logprobs - sampled) ** 2).sum()
    chosen = inputs["sequence_ratio_mask"] != 0
    mean = (logprobs - sampled)[chosen].mean().detach() if chosen.any() else torch.zeros((), dtype=torch.double)
    ratio = (mean + logprobs - logprobs.detach()).exp()
    return -torch.min(ratio * advantages, ratio.clip(low, high) * advantages).sum()


OPTIONS = [
    *((name, {}) for name in LOSSES),
    ("ppo", {"clip_low_threshold": 0.5, "clip_high_threshold": 1.05}),
    ("cispo", {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
    ("dro", {"beta": 0.7}),
    ("gspo", {"clip_low_threshold": 0.99, "clip_high_threshold": 1.01}),
]


@pytest.mark.parametrize(
    ("name", "options", "kind"),
    [
        *((name, options, kind) for name, options in OPTIONS for kind in ("next tokens", "other targets")),
        ("cross_entropy", {}, "several targets"),
        ("ppo", {}, "thresholds of each token"),
    ],
)
def test_a_loss_is_the_sum_of_its_formula(name, options, kind):
    """Value, logprobs and the gradient of the logits are those of an independent formula, to 1e-6."""
    data = random_datums(5, name, kind, seed=3)
    loss = choose_loss(name, options)
    batch = form_batch(data, loss)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(*batch["input_ids"].shape, VOCAB_SIZE, generator=generator, dtype=torch.double)
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    value, metrics = loss(batch, 1, 1, next_token_logits=ours)
    value.backward()
    total = 0
    for number, datum in enumerate(data):
        targets = torch.from_numpy(datum.targets)
        logprobs = theirs[number, : len(targets)].log_softmax(-1).gather(-1, targets).reshape(datum.shape)
        total = total + expected(name, datum, logprobs, options)
        read = loss.logprobs[0][number, : len(targets), : targets.shape[1]].reshape(datum.shape)
        torch.testing.assert_close(read, logprobs.detach(), rtol=1e-6, atol=1e-6)
    total.backward()
    torch.testing.assert_close(value, total, rtol=1e-6, atol=1e-6)
    assert metrics["loss:sum"] == pytest.approx(total.item(), rel=1e-6)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("cross_entrpy", {}, "loss_fn='cross_entrpy' is not a loss of this server; did you mean 'cross_entropy'?"),
        ("dro", {"bta": 1.0}, "loss_fn_config.bta is not an option of dro, which has beta"),
        ("importance_sampling", {"beta": 1.0}, "is not an option of importance_sampling, which has no option"),
        ("dro", {"beta": "much"}, "loss_fn_config.beta='much' must be a number"),
    ],
)
def test_an_unknown_loss_or_option_is_refused(name, options, message):
    with pytest.raises(ValueError, match=message.replace("?", r"\?").replace(".", r"\.")):
        choose_loss(name, options)
