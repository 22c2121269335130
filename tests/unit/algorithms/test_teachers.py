"""Several teachers share a batch by their weights, and by the data sets of its sequences."""

import torch

from rl_megatron.algorithms.teachers import Teachers
from rl_megatron.batching.batch import Batch
from rl_megatron.batching.config import Batching
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.losses import build_loss

VOCAB, TOP_K = 11, 4
SUMS, CHAT, BOTH = range(3)  # data sets
DATA_SETS = torch.tensor([SUMS, CHAT, BOTH, SUMS])
SHARES = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.75, 0.25], [1.0, 0.0]])  # of the teachers, for each sequence


class Table:
    """A teacher whose logits depend on the last token only. It keeps the sequences that it has read."""

    def __init__(self, seed):
        self.logits = 2 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed))
        self.read = []

    def topk_logits(self, batch, k, batching):
        self.read += batch["input_ids"].tolist()
        found = self.logits[batch["input_ids"]].topk(k)
        return found.values, found.indices

    def logprobs(self, batch, batching):
        self.read += batch["input_ids"].tolist()
        return self.logits.log_softmax(-1)[batch["input_ids"].roll(1, 1), batch["input_ids"]]


def batch_and_student():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCAB, (4, 6), generator=generator)
    lengths = torch.tensor([6, 4, 5, 3])
    mask = (torch.arange(6) < lengths[:, None]).float()
    batch = BatchedDataDict(
        input_ids=ids, input_lengths=lengths, token_mask=mask, sample_mask=torch.ones(4), data_set=DATA_SETS
    )
    return batch, torch.randn(4, 6, VOCAB, generator=generator, dtype=torch.float64)


def test_each_sequence_learns_from_the_teachers_of_its_data_set():
    models, loss = [Table(1), Table(2)], build_loss("distillation", {"kl_type": "mixed"})
    teachers = Teachers(models, [0.75, 0.25], Batching(sequences=4), TOP_K, [(SUMS, BOTH), (CHAT, BOTH)])
    batch, student = batch_and_student()
    student.requires_grad_()
    tokens = batch["token_mask"][:, 1:].sum()
    taught = teachers.add_topk(Batch.from_whole(batch), loss).local
    value, _ = loss(student, taught, 4, tokens)
    torch.testing.assert_close(taught["teacher_weights"], SHARES[:, None])
    for model, share in zip(models, SHARES.unbind(1), strict=True):
        assert model.read == batch["input_ids"][share > 0].tolist()

    want = torch.zeros((), dtype=torch.float64)  # every sequence alone, with every teacher alone
    for sequence in range(4):
        for model, share in zip(models, SHARES[sequence], strict=True):
            logits, indices = Table.topk_logits(model, batch, TOP_K, None)
            only = torch.zeros(4)
            only[sequence] = 1.0
            alone = batch | {"teacher_topk_logits": logits, "teacher_topk_indices": indices, "sample_mask": only}
            want = want + share * loss(student, alone, 4, tokens)[0]
    torch.testing.assert_close(value, want, rtol=1e-12, atol=1e-14)
    gradients = [torch.autograd.grad(each, student)[0] for each in (value, want)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-14)
    assert gradients[1].abs().amax(dim=(1, 2)).min() > 1e-3


def test_a_teacher_without_a_sequence_in_the_batch_reads_nothing():
    models, loss = [Table(1), Table(2)], build_loss("distillation")
    teachers = Teachers(models, [0.5, 0.5], Batching(sequences=4), TOP_K, [(), (CHAT,)])
    taught = teachers.add_topk(Batch.from_whole(batch_and_student()[0] | {"data_set": torch.full((4,), SUMS)}), loss)
    assert models[1].read == [] and len(models[0].read) == 4
    torch.testing.assert_close(taught["teacher_weights"], torch.tensor([[[1.0, 0.0]]] * 4))


def test_the_logprobs_of_each_sequence_are_those_of_the_teachers_of_its_data_set():
    models = [Table(1), Table(2)]
    teachers = Teachers(models, [0.75, 0.25], Batching(sequences=4), TOP_K, [(SUMS, BOTH), (CHAT, BOTH)])
    batch, _ = batch_and_student()
    found = teachers.logprobs(Batch.from_whole(batch))
    for model, share in zip(models, SHARES.unbind(1), strict=True):
        assert model.read == batch["input_ids"][share > 0].tolist()
    first, second = (model.logprobs(batch, None) for model in models)
    torch.testing.assert_close(found, SHARES[:, :1] * first + SHARES[:, 1:] * second)
