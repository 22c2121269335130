"""Distillation: closed forms of both divergences, the alignment of the teacher's logits, settings and errors."""

import math
import re
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import yaml

from rl_megatron.losses import DistillationLossConfig, DistillationLossFn, build_loss

ROWS, LENGTH, VOCAB = 3, 6, 7
KINDS = [{"kl_type": kind} for kind in ("forward", "reverse", "mixed")]


def make(num_topk=3, seed=0):
    """(student logits [B, S, V], batch) in fp64; the teacher says its `num_topk` best of all its logits, unordered."""
    generator = torch.Generator().manual_seed(seed)
    student, teacher = 2 * torch.randn(2, ROWS, LENGTH, VOCAB, generator=generator, dtype=torch.float64)
    order = torch.rand(num_topk, generator=generator).argsort()
    indices = teacher.topk(num_topk).indices[..., order]
    token_mask = torch.tensor([[0, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1], [0, 1, 1, 0, 0, 0]]).double()
    return student, {
        "input_ids": torch.randint(VOCAB, (ROWS, LENGTH), generator=generator),
        "token_mask": token_mask,
        "sample_mask": torch.tensor([1.0, 1.0, 0.0]).double(),
        "teacher_topk_indices": indices,
        "teacher_topk_logits": teacher.gather(-1, indices),
    }


def mean_over_tokens(per_position, batch, tokens):
    """per_position [B, S]: entry t belongs to token t+1."""
    mask = batch["token_mask"][:, 1:] * batch["sample_mask"][:, None]
    return (per_position[:, :-1] * mask).sum() / tokens


def kl(log_a, log_b):
    return (log_a.exp() * (log_a - log_b)).sum(-1)


def mixture(forward, reverse, kl_type, mixed_kl_weight=0.5):
    w = {"forward": 1.0, "reverse": 0.0, "mixed": mixed_kl_weight}[kl_type]
    return w * forward + (1 - w) * reverse


def on_vocabulary(batch, fill):
    """The teacher's logits [B, S, V], `fill` outside its top-k."""
    everywhere = torch.full((ROWS, LENGTH, VOCAB), fill, dtype=torch.float64)
    return everywhere.scatter(-1, batch["teacher_topk_indices"], batch["teacher_topk_logits"])


@pytest.mark.parametrize("zero_outside_topk", [False, True])
@pytest.mark.parametrize("kind", [*KINDS, {"kl_type": "mixed", "mixed_kl_weight": 0.9}], ids=str)
def test_with_the_whole_vocabulary_it_is_the_full_divergence(kind, zero_outside_topk):
    student, batch = make(num_topk=VOCAB)
    student.requires_grad_()
    value, _ = DistillationLossFn({**kind, "zero_outside_topk": zero_outside_topk})(student, batch, 2, 7)
    log_q, log_p = student.log_softmax(-1), on_vocabulary(batch, 0.0).log_softmax(-1)
    want = mean_over_tokens(mixture(kl(log_p, log_q), kl(log_q, log_p), **kind), batch, 7)
    torch.testing.assert_close(value, want, rtol=1e-12, atol=1e-12)
    got, expected = (torch.autograd.grad(x, student)[0] for x in (value, want))
    # The probability left over is 0 only up to rounding, and counts a hundredfold.
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-13)


def test_the_divergences_from_several_teachers_are_weighted():
    student, first = make(seed=0)
    _, second = make(seed=1)
    weights = torch.tensor([[0.25, 0.75], [1.0, 0.0], [0.5, 0.5]], dtype=torch.float64)
    batch = first | {"teacher_weights": weights[:, None]}
    wanted = 0.0
    for teacher, weight in zip((first, second), weights.T, strict=True):
        log_q = student.gather(-1, teacher["teacher_topk_indices"]).log_softmax(-1)
        wanted = wanted + weight[:, None] * kl(teacher["teacher_topk_logits"].log_softmax(-1), log_q)
    for key in ("teacher_topk_indices", "teacher_topk_logits"):
        batch[key] = torch.cat([first[key], second[key]], dim=-1)
    value, _ = DistillationLossFn({"kl_type": "forward"})(student, batch, 2, 7)
    torch.testing.assert_close(value, mean_over_tokens(wanted, batch, 7), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_by_default_both_are_renormalised_over_the_teachers_choice(kind):
    student, batch = make()
    log_q = student.gather(-1, batch["teacher_topk_indices"]).log_softmax(-1)
    log_p = batch["teacher_topk_logits"].log_softmax(-1)
    value, metrics = DistillationLossFn(kind)(student, batch, 2, 7)
    forward, reverse = (mean_over_tokens(x, batch, 7) for x in (kl(log_p, log_q), kl(log_q, log_p)))
    torch.testing.assert_close(value, mixture(forward, reverse, **kind), rtol=1e-12, atol=1e-12)
    want = {"forward_kl": forward.item(), "reverse_kl": reverse.item()}
    unused = {"forward": "reverse_kl", "reverse": "forward_kl"}.get(kind["kl_type"])
    want.pop(unused, None)
    assert metrics == pytest.approx({"loss": value.item(), "num_valid_samples": 2.0, **want}, rel=1e-12)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_zero_outside_the_topk_is_a_teacher_of_minus_100_nats_there(kind):
    student, batch = make()
    log_q = student.log_softmax(-1)
    inside = torch.zeros_like(log_q, dtype=torch.bool).scatter(-1, batch["teacher_topk_indices"], True)
    log_p = torch.where(inside, on_vocabulary(batch, -math.inf).log_softmax(-1), -100.0)
    # In the forward direction what is outside has probability 0, not e^−100.
    forward = torch.where(inside, log_p.exp() * (log_p - log_q), 0.0).sum(-1)
    want = mean_over_tokens(mixture(forward, kl(log_q, log_p), **kind), batch, 7)
    value, _ = DistillationLossFn({**kind, "zero_outside_topk": True})(student, batch, 2, 7)
    torch.testing.assert_close(value, want, rtol=1e-12, atol=1e-12)


def test_one_token_of_two_by_hand():
    """p = (1, 0), q = (¼, ¾): KL(p‖q) = log 4, and KL(q‖p') = ¼·log ¼ + ¾·(log ¾ + 100)."""
    batch = {
        "input_ids": torch.tensor([[0, 1]]), "token_mask": torch.tensor([[0.0, 1.0]]), "sample_mask": torch.ones(1),
        "teacher_topk_logits": torch.full((1, 2, 1), 3.0), "teacher_topk_indices": torch.zeros(1, 2, 1).long(),
    }  # fmt: skip
    student = torch.tensor([[[0.25, 0.75], [math.nan, math.nan]]]).log()
    forward, reverse = math.log(4), 0.25 * math.log(0.25) + 0.75 * (math.log(0.75) + 100)
    for cfg, want in [
        ({"kl_type": "forward"}, forward),
        ({"kl_type": "reverse"}, reverse),
        ({"mixed_kl_weight": 0.2}, 0.2 * forward + 0.8 * reverse),
    ]:
        value, _ = DistillationLossFn({**cfg, "zero_outside_topk": True})(student, batch, 1, 1)
        assert value.item() == pytest.approx(want, rel=1e-6)
        assert DistillationLossFn(cfg)(student, batch, 1, 1)[0] == 0  # renormalised, one token is certain


@pytest.mark.parametrize("cfg", [*KINDS, {"kl_type": "forward", "zero_outside_topk": True}], ids=str)
def test_a_student_like_its_teacher_has_nothing_to_learn(cfg):
    _, batch = make()
    student = on_vocabulary(batch, -math.inf).requires_grad_()
    value, _ = DistillationLossFn(cfg)(student, batch, 2, 7)
    assert abs(value.item()) < 1e-14 and torch.autograd.grad(value, student)[0].abs().max() < 1e-14


def test_entry_t_of_the_teacher_corresponds_to_token_t_plus_1():
    student, batch = make()
    loss = DistillationLossFn()
    value, _ = loss(student, batch, 2, 7)
    counted = torch.zeros(ROWS, LENGTH, dtype=torch.bool)
    counted[:, :-1] = (batch["token_mask"][:, 1:] * batch["sample_mask"][:, None]) != 0
    for row in range(ROWS):
        for t in range(LENGTH):
            other = {**batch, "teacher_topk_logits": batch["teacher_topk_logits"].clone()}
            other["teacher_topk_logits"][row, t, 0] += 1.0
            assert (loss(student, other, 2, 7)[0] != value) == counted[row, t], (row, t)
    # Where nothing is read, the ids may be anything.
    other = {**batch, "teacher_topk_indices": batch["teacher_topk_indices"].masked_fill(~counted[..., None], -7)}
    assert loss(student, other, 2, 7)[0] == value


@pytest.mark.parametrize("temperature", [0.5, torch.tensor(0.5), torch.tensor([0.5, 2.0, 1.0]), "per token"], ids=str)
@pytest.mark.parametrize("zero_outside_topk", [False, True])
def test_the_temperature_divides_the_logits_of_both(temperature, zero_outside_topk):
    student, batch = make()
    loss = DistillationLossFn({"zero_outside_topk": zero_outside_topk})
    if temperature == "per token":
        temperature = 0.5 + torch.rand(ROWS, LENGTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    value, _ = loss(student, {**batch, "temperature": temperature}, 2, 7)
    divisor = torch.as_tensor(temperature, dtype=torch.float64)
    divisor = divisor[:, None] if divisor.dim() == 1 else divisor
    # Entry t of a temperature is that at which token t was sampled, from the logits at t−1.
    divisor = torch.broadcast_to(divisor, (ROWS, LENGTH)).roll(-1, dims=1)[..., None]
    cooled = {**batch, "teacher_topk_logits": batch["teacher_topk_logits"] / divisor}
    torch.testing.assert_close(value, loss(student / divisor, cooled, 2, 7)[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kl_type", ["forward", "reverse"])
@pytest.mark.parametrize("who", ["teacher", "both"])
def test_what_has_no_probability_adds_nothing(kl_type, who):
    """A filtered top-k arrives as −inf: the same as a smaller one, but for a student that is sure of what it lacks."""
    student, batch = make(num_topk=3)
    narrow = {**batch, **{key: batch[key][..., :2] for key in ("teacher_topk_logits", "teacher_topk_indices")}}
    filtered = {**batch, "teacher_topk_logits": batch["teacher_topk_logits"].clone()}
    filtered["teacher_topk_logits"][..., 2] = -math.inf
    if who == "both":
        student = student.scatter(-1, batch["teacher_topk_indices"][..., 2:], -math.inf)
    student.requires_grad_()
    value, _ = DistillationLossFn({"kl_type": kl_type})(student, filtered, 2, 7)
    if (who, kl_type) == ("teacher", "reverse"):
        assert value == math.inf
        return
    log_q = student.gather(-1, batch["teacher_topk_indices"]).log_softmax(-1)[..., :2]
    log_p = narrow["teacher_topk_logits"].log_softmax(-1)
    pair = (log_p, log_q) if kl_type == "forward" else (log_q, log_p)
    torch.testing.assert_close(value, mean_over_tokens(kl(*pair), batch, 7), rtol=1e-12, atol=1e-12)
    assert torch.isfinite(torch.autograd.grad(value, student)[0]).all()


def test_half_precision_logits():
    student, batch = make()
    loss = DistillationLossFn({"zero_outside_topk": True})
    want, _ = loss(student.bfloat16().double(), batch, 2, 7)
    leaf = student.bfloat16().requires_grad_()
    value, _ = loss(leaf, {**batch, "teacher_topk_logits": batch["teacher_topk_logits"].float()}, 2, 7)
    assert value.dtype == torch.float32 and value.item() == pytest.approx(want.item(), rel=1e-5)
    assert torch.autograd.grad(value, leaf)[0].dtype == torch.bfloat16


def test_the_teacher_is_required():
    assert {"teacher_topk_logits", "teacher_topk_indices"} <= set(DistillationLossFn().required_keys)


def test_seed_form():
    student, batch = make()
    log_q = student[:, :-1].log_softmax(-1)
    inputs = {
        "student_topk_logprobs": log_q.gather(-1, batch["teacher_topk_indices"][:, :-1]),
        "teacher_topk_logprobs": batch["teacher_topk_logits"][:, :-1].log_softmax(-1),
        "H_all": (log_q.exp() * log_q).sum(-1),
    }
    loss = DistillationLossFn({"zero_outside_topk": True})
    masks = {key: batch[key] for key in ("token_mask", "sample_mask")}
    value, _ = loss(data=masks, global_valid_seqs=torch.tensor(2), global_valid_toks=torch.tensor(7), **inputs)
    torch.testing.assert_close(value, loss(student, batch, 2, 7)[0], rtol=1e-12, atol=1e-12)
    without = {key: value for key, value in inputs.items() if key != "H_all"}
    with pytest.raises(ValueError, match="zero_outside_topk=True with a reverse KL needs H_all"):
        loss(data=masks, global_valid_seqs=2, global_valid_toks=7, **without)
    forward = DistillationLossFn({"zero_outside_topk": True, "kl_type": "forward"})
    assert not forward.needs_entropy and "H_all" not in forward.metric_reductions
    assert math.isfinite(forward(data=masks, global_valid_seqs=2, global_valid_toks=7, **inputs)[0])
    with pytest.raises(ValueError, match=r"student_topk_logprobs \(3, 5, 3\) and teacher_topk_logprobs \(3, 5, 2\)"):
        loss(data=masks, global_valid_seqs=2, global_valid_toks=7,
             **inputs | {"teacher_topk_logprobs": inputs["teacher_topk_logprobs"][..., 1:]})  # fmt: skip


class TestBadBatches:
    @pytest.mark.parametrize("key", ["input_ids", "teacher_topk_logits", "teacher_topk_indices"])
    def test_missing_keys(self, key):
        student, batch = make()
        batch.pop(key)
        with pytest.raises(KeyError, match=rf"DistillationLossFn needs data\['{key}'\]"):
            DistillationLossFn()(student, batch, 2, 7)

    @pytest.mark.parametrize(
        "change",
        [
            lambda logits, ids: (logits[..., 1:], ids),
            lambda logits, ids: (logits[..., :0], ids[..., :0]),
            lambda logits, ids: (logits[:, 1:], ids[:, 1:]),
            lambda logits, ids: (logits[..., 0], ids[..., 0]),
        ],
        ids=["two values of K", "K = 0", "another length", "no K"],
    )
    def test_shapes(self, change):
        student, batch = make()
        logits, ids = change(batch["teacher_topk_logits"], batch["teacher_topk_indices"])
        shapes = re.escape(f"teacher_topk_logits {tuple(logits.shape)} and teacher_topk_indices {tuple(ids.shape)}")
        with pytest.raises(ValueError, match=shapes + r".*the same K ≥ 1 for input_ids \(3, 6\)"):
            DistillationLossFn()(student, {**batch, "teacher_topk_logits": logits, "teacher_topk_indices": ids}, 2, 7)

    def test_dtypes_and_ids_outside_the_vocabulary(self):
        student, batch = make()
        with pytest.raises(TypeError, match=r"data\['teacher_topk_indices'\] is float64; it must hold ids"):
            DistillationLossFn()(student, {**batch, "teacher_topk_indices": batch["teacher_topk_logits"]}, 2, 7)
        batch["teacher_topk_indices"][0, 1, 2] = VOCAB
        with pytest.raises(ValueError, match=rf"id {VOCAB} among the targets or gather_ids"):
            DistillationLossFn()(student, batch, 2, 7)

    def test_a_nan_of_the_teacher_is_named(self):
        student, batch = make()
        batch["teacher_topk_logits"][1, 2, 1] = math.nan
        with pytest.raises(ValueError, match=r"is NaN: data\['teacher_topk_logits'\]\[1, 2, 1\]"):
            DistillationLossFn()(student, batch, 2, 7)


class TestSettings:
    def test_the_shipped_file_holds_the_defaults(self):
        given = yaml.safe_load((Path(__file__).parents[3] / "configs/loss/distillation.yaml").read_text())
        assert given == {"name": "distillation", **asdict(DistillationLossConfig())}
        assert asdict(DistillationLossConfig()) == {
            "kl_type": "mixed", "mixed_kl_weight": 0.5, "jsd_beta": 0.5, "nll_weight": 0.0, "zero_outside_topk": False
        }  # fmt: skip

    @pytest.mark.parametrize("weight", [0.0, 1.0])
    def test_a_mix_of_one_is_that_one(self, weight):
        """Also where the other one is infinite."""
        student, batch = make()
        batch["teacher_topk_logits"][..., 0] = -math.inf
        mixed, metrics = DistillationLossFn({"mixed_kl_weight": weight})(student, batch, 2, 7)
        only, only_metrics = DistillationLossFn({"kl_type": "forward" if weight else "reverse"})(student, batch, 2, 7)
        assert torch.equal(mixed, only) and metrics == only_metrics
        assert math.isfinite(only) == bool(weight)

    @pytest.mark.parametrize(
        ("cfg", "error", "message"),
        [
            ({"kl_type": "backward"}, ValueError, "kl_type='backward' must be one of"),
            ({"mixed_kl_weight": 1.5}, ValueError, r"mixed_kl_weight=1.5 must lie in \[0, 1\]"),
            ({"mixed_kl_weight": -0.1}, ValueError, r"mixed_kl_weight=-0.1 must lie in \[0, 1\]"),
            ({"jsd_beta": 0.0}, ValueError, r"jsd_beta=0.0 must lie in \(0, 1\).*kl_type=forward"),
            ({"jsd_beta": 1.0}, ValueError, r"jsd_beta=1.0 must lie in \(0, 1\).*kl_type=reverse"),
            ({"nll_weight": 1.0}, ValueError, r"nll_weight=1.0 must lie in \[0, 1\)"),
            ({"mixed_kl_weight": True}, TypeError, "mixed_kl_weight=True must be a number"),
            ({"zero_outside_topk": 1}, TypeError, "zero_outside_topk=1 must be true or false"),
            ({"zero_outside": True}, KeyError, "no key 'zero_outside'; did you mean 'zero_outside_topk'"),
        ],
    )
    def test_mistakes_are_named(self, cfg, error, message):
        with pytest.raises(error, match=message):
            build_loss("distillation", cfg)
