"""Random logits and what the statistics and gradients of them should be, from the definitions in fp64."""

import torch

OUTPUTS = ("logprobs", "entropy", "gathered")


def expected(logits, targets, gather_ids, temperature=1.0, vocab_size=None):
    """Straight from the definitions in fp64; logits of −inf have probability 0 and add 0 to the entropy."""
    temperature = torch.as_tensor(temperature, dtype=torch.float64, device=logits.device)
    x = logits.double()[..., :vocab_size] / (temperature[..., None] if temperature.dim() else temperature)
    log_p = x.log_softmax(-1)
    p = log_p.exp()
    entropy = -torch.where(p > 0, p * log_p.masked_fill(p == 0, 0.0), 0.0).sum(-1)
    return log_p.gather(-1, targets[..., None])[..., 0], entropy, log_p.gather(-1, gather_ids)


def rounding(dtype, backend="torch"):
    """(relative, absolute) error of a number rounded once to dtype: half a unit in the last place. Triton's interpreter
    truncates bf16, which errs by up to a whole one."""
    if backend == "triton" and dtype == torch.bfloat16:
        return 2.0**-7, 0.0
    return {torch.float32: (0.0, 0.0), torch.bfloat16: (2.0**-8, 0.0), torch.float16: (2.0**-11, 2.0**-24)}[dtype]


def random_case(rows, vocab, num_ids=5, dtype=torch.float32, scale=3.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, vocab, generator=generator) * scale).to(dtype)
    targets = torch.randint(vocab, (rows,), generator=generator)
    gather_ids = torch.randint(vocab, (rows, num_ids), generator=generator)
    gather_ids[:, 0] = targets  # the target among the ids, and twice over where num_ids allows
    gather_ids[:, -1] = targets
    upstream = [torch.randn(shape, generator=generator) for shape in ((rows,), (rows,), (rows, num_ids))]
    return logits, targets, gather_ids, upstream


def gradient(stats, upstream, logits, wanted=OUTPUTS):
    total = sum((getattr(stats, name) * g).sum() for name, g in zip(OUTPUTS, upstream, strict=True) if name in wanted)
    return torch.autograd.grad(total, logits)[0]


def expected_gradient(logits, targets, gather_ids, upstream, **options):
    exact = logits.detach().double().requires_grad_()
    outputs = expected(exact, targets, gather_ids, **options)
    total = sum((out * g.double()).sum() for out, g in zip(outputs, upstream, strict=True))
    return torch.autograd.grad(total, exact)[0]
