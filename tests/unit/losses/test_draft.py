"""Draft training: what meets what, the smaller vocabulary, the aligned form, and draft and policy trained together."""

import math
from pathlib import Path

import pytest
import torch
import yaml

from rl_megatron.losses import (
    DraftCrossEntropyLossFn,
    DraftLossWrapper,
    LossFunction,
    LossInputType,
    Reduction,
    SequencePackingLossWrapper,
    build_loss,
)
from tests.contract.packing import Shape

ROWS, LENGTH, VOCAB = 3, 6, 7


def make(seed=0):
    """(draft's logits [B, S, V], batch with the policy's) in fp64, random where no token is."""
    generator = torch.Generator().manual_seed(seed)
    student, teacher = 2 * torch.randn(2, ROWS, LENGTH, VOCAB, generator=generator, dtype=torch.float64)
    return student, {
        "token_mask": torch.tensor([[0, 0, 1, 1, 0, 1], [0, 1, 1, 0, 1, 0], [0, 1, 1, 1, 0, 0]]).double(),
        "sample_mask": torch.tensor([1.0, 1.0, 0.0]).double(),
        "teacher_logits": teacher,
    }


def expected(student, batch, tokens, ids=slice(None)):
    """Token by token: the draft's row t against the policy's row t+1, where token t+1 counts."""
    total = torch.zeros((), dtype=torch.float64)
    for row in range(ROWS):
        for t in range(LENGTH - 1):
            weight = batch["token_mask"][row, t + 1] * batch["sample_mask"][row]
            policy = batch["teacher_logits"][row, t + 1, ids].softmax(-1)
            total = total - weight * (policy * student[row, t, : policy.numel()].log_softmax(-1)).sum()
    return total / tokens


def gradient(value, *leaves):
    return torch.autograd.grad(value, leaves)


def test_the_drafts_position_meets_the_policys_next_one():
    student, batch = make()
    student.requires_grad_()
    value, metrics = DraftCrossEntropyLossFn()(student, batch, 2, 9)
    want = expected(student, batch, 9)
    torch.testing.assert_close(value, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient(value, student), gradient(want, student), rtol=1e-12, atol=1e-14)
    assert metrics == {"loss": pytest.approx(want.item(), rel=1e-12), "num_valid_samples": 2.0}


def test_what_is_read_of_either_model():
    student, batch = make()
    loss = DraftCrossEntropyLossFn()
    value, _ = loss(student, batch, 2, 9)
    counts = batch["token_mask"] * batch["sample_mask"][:, None] != 0
    student[:, :-1][~counts[:, 1:]] = student[:, -1] = math.nan
    batch["teacher_logits"][~counts] = math.nan
    assert loss(student, batch, 2, 9)[0] == value
    for position in counts.nonzero().tolist():
        other = {**batch, "teacher_logits": batch["teacher_logits"].clone()}
        other["teacher_logits"][*position, 0] += 1.0
        assert loss(student, other, 2, 9)[0] != value


def test_the_policy_is_a_constant():
    student, batch = make()
    batch["teacher_logits"].requires_grad_()
    value, _ = DraftCrossEntropyLossFn()(student.requires_grad_(), batch, 2, 9)
    value.backward()
    assert batch["teacher_logits"].grad is None and student.grad.abs().max() > 0


class TestTheAlignedForm:
    def rolled(self, batch):
        """Policy and mask rolled by −1 along the sequence, nothing coming in at the end."""
        teacher, mask = batch["teacher_logits"].roll(-1, dims=1), batch["token_mask"].roll(-1, dims=1)
        teacher[:, -1], mask[:, -1] = math.nan, 0
        return teacher, mask

    @pytest.mark.parametrize("name", ["mask", "token_mask"])
    def test_it_is_the_loss_of_rolled_inputs(self, name):
        student, batch = make()
        teacher, mask = self.rolled(batch)
        leaf = student.clone().requires_grad_()
        value, metrics = DraftCrossEntropyLossFn()(
            data={"sample_mask": batch["sample_mask"], "token_mask": batch["token_mask"]},
            global_valid_seqs=torch.tensor(2), global_valid_toks=torch.tensor(9), teacher_logits=teacher,
            student_logits=leaf, **{name: mask},
        )  # fmt: skip
        again = student.clone().requires_grad_()
        want, want_metrics = DraftCrossEntropyLossFn()(again, batch, 2, 9)
        torch.testing.assert_close(value, want, rtol=1e-14, atol=0)  # one more 0 in the sum, so perhaps another order
        assert metrics == pytest.approx(want_metrics, rel=1e-14)
        assert torch.equal(*gradient(value, leaf), *gradient(want, again))

    def test_the_last_entry_counts_where_the_mask_says_so(self):
        student, batch = make()
        mask = torch.zeros(ROWS, LENGTH)
        mask[0, LENGTH - 1] = 1
        value, _ = DraftCrossEntropyLossFn()(
            data=batch, global_valid_seqs=1, global_valid_toks=1, student_logits=student, mask=mask.bool(),
            teacher_logits=batch["teacher_logits"],
        )  # fmt: skip
        want = -(batch["teacher_logits"][0, -1].softmax(-1) * student[0, -1].log_softmax(-1)).sum()
        torch.testing.assert_close(value, want, rtol=1e-12, atol=1e-12)

    def test_what_does_not_fit_is_named(self):
        student, batch = make()
        teacher, mask = self.rolled(batch)
        call = {"data": batch, "global_valid_seqs": 1, "global_valid_toks": 1, "student_logits": student}
        with pytest.raises(ValueError, match=r"teacher_logits= needs mask= .*\(3, 6, 7\), but got None"):
            DraftCrossEntropyLossFn()(**call, teacher_logits=teacher)
        with pytest.raises(ValueError, match=r"needs mask= .*got \(3, 5\)"):
            DraftCrossEntropyLossFn()(**call, teacher_logits=teacher, mask=mask[:, 1:])
        with pytest.raises(ValueError, match=r"teacher_logits \(3, 5, 7\) must be laid out like student_logits"):
            DraftCrossEntropyLossFn()(**call, teacher_logits=teacher[:, 1:], mask=mask)


class TestASmallerVocabulary:
    d2t = torch.tensor([1, 5, 0, 2])  # ids 1, 6, 2, 5
    ids = [1, 6, 2, 5]

    @pytest.mark.parametrize("padding", [0, 2])
    def test_the_policy_is_restricted_to_it_and_renormalised(self, padding):
        student, batch = make()
        student = torch.nn.functional.pad(student[..., :4], (0, padding), value=9.0).requires_grad_()
        value, _ = DraftCrossEntropyLossFn(d2t=self.d2t)(student, batch, 2, 9)
        want = expected(student, batch, 9, ids=self.ids)
        torch.testing.assert_close(value, want, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(gradient(value, student), gradient(want, student), rtol=1e-12, atol=1e-14)

    def test_in_the_aligned_form(self):
        student, batch = make()
        loss = DraftCrossEntropyLossFn(d2t=self.d2t)
        teacher, mask = TestTheAlignedForm().rolled(batch)
        value, _ = loss(data=batch, global_valid_seqs=2, global_valid_toks=9, teacher_logits=teacher, mask=mask,
                        student_logits=student[..., :4])  # fmt: skip
        torch.testing.assert_close(value, expected(student[..., :4], batch, 9, ids=self.ids), rtol=1e-12, atol=1e-12)

    def test_mistakes_are_named(self):
        student, batch = make()
        with pytest.raises(
            ValueError, match=r"\(3, 6, 7\).*\(3, 6, 4\); a draft with a vocabulary of its own needs d2t"
        ):
            DraftCrossEntropyLossFn()(student[..., :4], batch, 2, 9)
        with pytest.raises(ValueError, match=r"ids 1 … 6 must be in the vocabulary \[0, 6\)"):
            DraftCrossEntropyLossFn(d2t=self.d2t)(student[..., :4], batch, 2, 9, valid_vocab_size=6)
        with pytest.raises(ValueError, match="4 ids do not fit"):
            DraftCrossEntropyLossFn(d2t=self.d2t)(student[..., :3], batch, 2, 9)
        with pytest.raises(ValueError, match="several of the draft's ids to one of the policy's"):
            DraftCrossEntropyLossFn(d2t=torch.tensor([1, 0]))
        for bad in (torch.zeros(3), torch.zeros(0).long(), torch.zeros(2, 2).long()):
            with pytest.raises(ValueError, match=r"d2t must be \[V_draft\] integer offsets"):
                DraftCrossEntropyLossFn(d2t=bad)


def test_missing_policy_and_settings():
    student, batch = make()
    assert "teacher_logits" in DraftCrossEntropyLossFn().required_keys
    batch.pop("teacher_logits")
    with pytest.raises(KeyError, match=r"DraftCrossEntropyLossFn needs data\['teacher_logits'\]"):
        DraftCrossEntropyLossFn()(student, batch, 2, 9)
    given = yaml.safe_load((Path(__file__).parents[3] / "configs/loss/draft_cross_entropy.yaml").read_text())
    assert isinstance(build_loss(given.pop("name"), given), DraftCrossEntropyLossFn) and given == {}
    with pytest.raises(KeyError, match="no key 'd2t'"):
        build_loss("draft_cross_entropy", {"d2t": [1, 2]})


class TestTogetherWithThePolicy:
    def make(self):
        """(policy's logits, batch with the draft's), the policy's loss one over logprobs and entropy."""
        student, batch = make()
        teacher = batch.pop("teacher_logits")
        generator = torch.Generator().manual_seed(1)
        batch["input_ids"] = torch.randint(VOCAB, (ROWS, LENGTH), generator=generator)
        batch["advantages"] = torch.randn(ROWS, LENGTH, generator=generator, dtype=torch.float64)
        batch["prev_logprobs"] = -2 + 0.1 * torch.randn(ROWS, LENGTH, generator=generator, dtype=torch.float64)
        policy_loss = build_loss("clipped_pg", {"reference_policy_kl_penalty": 0.0, "entropy_coeff": 0.1})
        return teacher, student, batch, policy_loss

    def apart(self, teacher, student, batch, policy_loss, weight):
        """(value, metrics, gradients) of two losses with logits of their own."""
        policy, draft = teacher.clone().requires_grad_(), student.clone().requires_grad_()
        policy_value, metrics = policy_loss(policy, batch, 2, 9)
        draft_value, _ = DraftCrossEntropyLossFn()(draft, {**batch, "teacher_logits": teacher}, 2, 9)
        value = policy_value + weight * draft_value
        metrics |= {"loss": value.item(), "draft_loss": draft_value.item()}
        return value, metrics, gradient(value, policy, draft)

    @pytest.mark.parametrize("packed", [False, True])
    def test_it_is_the_sum_of_the_two(self, packed):
        """Also where each model's buffer turns into its gradient, the policy's being the draft's teacher."""
        teacher, student, batch, policy_loss = self.make()
        want, want_metrics, want_gradients = self.apart(teacher, student, batch, policy_loss, 0.3)
        shape = Shape((LENGTH,) * ROWS, LENGTH, multiple=4, slack=2)
        place, back = (lambda x: shape.pack(x, math.nan), shape.unpack) if packed else (lambda x: x, lambda x: x)
        policy, draft = place(teacher).requires_grad_() * 1, place(student).requires_grad_() * 1
        loss = DraftLossWrapper(policy_loss, 0.3)
        wrapped = SequencePackingLossWrapper(loss, *shape.cu_seqlens) if packed else loss
        value, metrics = wrapped(policy, {**batch, "student_logits": draft}, 2, 9)
        assert torch.equal(value, want) and metrics == want_metrics
        got = gradient(value, policy, draft)
        assert [g.data_ptr() for g in got] == [policy.data_ptr(), draft.data_ptr()]
        for one, other in zip(got, want_gradients, strict=True):
            assert torch.equal(back(one), other)

    def test_what_it_declares(self):
        *_, policy_loss = self.make()
        loss = DraftLossWrapper(policy_loss)
        assert isinstance(loss, LossFunction) and loss.input_type is LossInputType.LOGPROB
        assert loss.required_keys == (*policy_loss.required_keys, "student_logits"), "the teacher is its output"
        assert dict(loss.metric_reductions) == {**policy_loss.metric_reductions, "draft_loss": Reduction.SUM}

    def test_mistakes_are_named(self):
        teacher, student, batch, policy_loss = self.make()
        with pytest.raises(KeyError, match=r"DraftLossWrapper needs data\['student_logits'\]"):
            DraftLossWrapper(policy_loss)(teacher, batch, 2, 9)
        for bad in (-1.0, math.nan):
            with pytest.raises(ValueError, match=f"loss_weight={bad} must not be negative"):
                DraftLossWrapper(policy_loss, bad)
