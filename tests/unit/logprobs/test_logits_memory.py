"""The operator in the logits' memory: layouts used in place, and a buffer that becomes the gradient."""

import pytest
import torch

from tests.unit.logprobs.logprob_cases import expected, expected_gradient, gradient, random_case


def test_leading_shapes_and_permuted_layouts_share_the_logits_memory(logprobs_of):
    logits, targets, ids, upstream = random_case(12, 33)
    want_stats = expected(logits, targets, ids)
    want = expected_gradient(logits, targets, ids, upstream)
    base = logits.clone().requires_grad_()
    sequence_first = (base * 1).view(3, 4, 33).transpose(0, 1).contiguous()  # [S=4, B=3, V]
    batch_first = sequence_first.transpose(0, 1)  # [B, S, V] without a copy
    stats = logprobs_of(batch_first, targets.view(3, 4), entropy=True, gather_ids=ids.view(3, 4, 5))
    for got, expect in zip(stats, want_stats, strict=True):
        torch.testing.assert_close(got.double(), expect.view(got.shape), rtol=2e-6, atol=2e-6)
    got = gradient(stats, [g.view(3, 4, *g.shape[1:]) for g in upstream], base)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=2e-6)
    assert not torch.equal(sequence_first.transpose(0, 1).reshape(12, 33), logits)  # overwritten: no copy was made


def test_a_sliced_view_of_a_leaf_is_right_and_leaves_the_leaf_alone(logprobs_of):
    logits, targets, ids, upstream = random_case(12, 33)
    leaf = logits.view(3, 4, 33).clone().requires_grad_()
    stats = logprobs_of(leaf[:, :-1], targets.view(3, 4)[:, :-1])
    (got,) = torch.autograd.grad(stats.logprobs.sum(), leaf)
    exact = logits.double().view(3, 4, 33).requires_grad_()
    log_p = exact[:, :-1].log_softmax(-1).gather(-1, targets.view(3, 4, 1)[:, :-1])
    torch.testing.assert_close(got.double(), torch.autograd.grad(log_p.sum(), exact)[0], rtol=1e-5, atol=2e-6)
    assert torch.equal(leaf, logits.view(3, 4, 33))


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3)], ids=str)
def test_no_rows_at_all(shape, logprobs_of):
    leaf = torch.randn(*shape, 9, requires_grad=True)
    ids = torch.zeros(*shape, 2, dtype=torch.long)
    stats = logprobs_of(leaf, torch.zeros(shape, dtype=torch.long), entropy=True, gather_ids=ids)
    assert stats.logprobs.shape == shape and stats.gathered.shape == (*shape, 2)
    stats.logprobs.sum().backward()
    assert leaf.grad.shape == leaf.shape


def test_a_single_token(logprobs_of):
    logits = torch.randn(9, requires_grad=True)
    stats = logprobs_of(logits, torch.tensor(3), entropy=True, gather_ids=torch.tensor([1, 2]))
    assert stats.logprobs.shape == stats.entropy.shape == () and stats.gathered.shape == (2,)
    torch.testing.assert_close(stats.logprobs, logits.log_softmax(-1)[3])
    torch.testing.assert_close(torch.autograd.grad(stats.logprobs, logits)[0].sum(), torch.zeros(()), atol=1e-6, rtol=0)


class TestTheBufferBecomesTheGradient:
    def make(self):
        logits, targets, ids, upstream = random_case(5, 20)
        leaf = logits.clone().requires_grad_()
        return leaf, leaf * 1, targets

    def test_in_place_gives_the_bits_of_out_of_place(self, logprobs_of):
        leaf, z, targets = self.make()
        (from_leaf,) = torch.autograd.grad(logprobs_of(leaf, targets).logprobs.sum(), leaf)
        address = z.data_ptr()
        (in_place,) = torch.autograd.grad(logprobs_of(z, targets).logprobs.sum(), z)
        assert in_place.data_ptr() == address and torch.equal(in_place, from_leaf)

    def test_a_leaf_keeps_its_values(self, logprobs_of):
        leaf, _, targets = self.make()
        before = leaf.detach().clone()
        logprobs_of(leaf, targets).logprobs.sum().backward()
        assert torch.equal(leaf, before)
        view = leaf.view(1, 5, 20)
        logprobs_of(view, targets[None]).logprobs.sum().backward()
        assert torch.equal(leaf, before)

    def test_no_grad_leaves_the_logits_intact(self, logprobs_of):
        _, z, targets = self.make()
        before = z.detach().clone()
        with torch.no_grad():
            stats = logprobs_of(z, targets, entropy=True)
        assert torch.equal(z, before) and not stats.logprobs.requires_grad

    def test_second_backward_raises(self, logprobs_of):
        _, z, targets = self.make()
        loss = logprobs_of(z, targets).logprobs.sum()
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="second backward"):
            loss.backward()

    def test_logits_changed_before_backward_raise(self, logprobs_of):
        _, z, targets = self.make()
        loss = logprobs_of(z, targets).logprobs.sum()
        with torch.no_grad():
            z.mul_(2)
        with pytest.raises(RuntimeError, match="modified before its backward"):
            loss.backward()

    def test_two_calls_on_one_buffer_raise_rather_than_corrupt(self, logprobs_of):
        _, z, targets = self.make()
        loss = logprobs_of(z, targets).logprobs.sum() + logprobs_of(z, targets).logprobs.sum()
        with pytest.raises(RuntimeError, match="second operator"):
            loss.backward()

    def test_another_consumer_that_saved_the_logits_raises_rather_than_reads_gradients(self, logprobs_of):
        _, z, targets = self.make()
        first = (z * z).sum()  # runs its backward after ours: autograd goes from the last node to the first
        loss = first + logprobs_of(z, targets).logprobs.sum()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    @pytest.mark.parametrize("kind", ["sliding windows", "one row for all", "one column for all"])
    def test_rows_that_share_memory_have_gradients_of_their_own(self, logprobs_of, kind):
        def rows(x):
            if kind == "sliding windows":
                return x.as_strided((3, 20), (10, 1))
            return x[:20].expand(3, 20) if kind == "one row for all" else x[:3, None].expand(3, 20)

        source, targets = torch.randn(40, dtype=torch.float32), torch.tensor([3, 19, 0])
        found, wanted = [], []
        for results, of in ((found, logprobs_of), (wanted, None)):
            leaf = source.clone().requires_grad_()
            logits = rows(leaf * 1)
            log_p = of(logits, targets).logprobs if of else logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
            results.append(torch.autograd.grad((log_p * torch.tensor([1.0, 2.0, -3.0])).sum(), leaf)[0])
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("how", ["checkpoint", "hooks"])
    def test_another_consumer_where_autograd_does_not_check_what_it_saved(self, logprobs_of, how):
        leaf, _, targets = self.make()

        def total(x, of):
            z = x * 1
            return (z * z).sum() + of(z)

        def ours(x):
            return total(x, lambda z: logprobs_of(z, targets).logprobs.sum())

        if how == "checkpoint":
            loss = torch.utils.checkpoint.checkpoint(ours, leaf, use_reentrant=False)
        else:
            with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
                loss = ours(leaf)
        (got,) = torch.autograd.grad(loss, leaf)
        want = total(leaf, lambda z: z.log_softmax(-1).gather(1, targets[:, None]).sum())
        torch.testing.assert_close(got, torch.autograd.grad(want, leaf)[0], rtol=1e-5, atol=1e-5)

    def test_under_activation_checkpointing(self, logprobs_of):
        leaf, _, targets = self.make()
        loss = torch.utils.checkpoint.checkpoint(
            lambda x: logprobs_of(x * 1, targets).logprobs.sum(), leaf, use_reentrant=False
        )
        (got,) = torch.autograd.grad(loss, leaf)
        (want,) = torch.autograd.grad(logprobs_of(leaf, targets).logprobs.sum(), leaf)
        assert torch.equal(got, want)
