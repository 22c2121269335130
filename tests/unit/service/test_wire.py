"""Messages of the training API: tensors are read as they were sent, and wrong ones are refused with their names."""

import numpy as np
import pytest

from rl_megatron.generation.interfaces import Completion, WeightSpan
from rl_megatron.service.datums import MOST_TARGETS, Datum, check_data
from rl_megatron.service.losses import choose_loss
from rl_megatron.service.protobuf import FLOAT32, INT64, new_message
from rl_megatron.service.requests import Adam, CreateModel, OptimStep, Sample, SaveWeights, TargetTokens, read_body
from rl_megatron.service.sampling import SampledPrompt, Top
from rl_megatron.service.trainer import LossResult
from rl_megatron.service.wire import read_loss_request, read_tensor, write_loss_result, write_samples


def message_with(**changes):
    """Return the bytes of a request with one datum of two tokens, after changes to its targets."""
    message = new_message("ForwardBackwardRequest")
    message.model_id, message.seq_id, message.loss_fn = "run", 3, "cross_entropy"
    message.loss_fn_config_v2["beta"].number = 0.5
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.array([5, 6], dtype="<i4").tobytes()
    targets = datum.loss_fn_inputs["target_tokens"]
    targets.dtype, targets.dense = INT64, np.array([6, 7], dtype="<i8").tobytes()
    targets.shape.extend([2])
    for name, value in changes.items():
        if name == "shape":
            del targets.shape[:]
            targets.shape.extend(value)
        else:
            setattr(targets, name, value)
    return message.SerializeToString()


def test_a_request_is_read_as_it_was_sent():
    request = read_loss_request(message_with())
    assert (request.model_id, request.seq_id, request.loss_fn, request.options) == (
        "run",
        3,
        "cross_entropy",
        {"beta": 0.5},
    )
    (datum,) = request.data
    assert datum.tokens.tolist() == [5, 6] and datum.inputs["target_tokens"].tolist() == [6, 7]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"dense": b"x" * 15},
            r"data\[0\].loss_fn_inputs.target_tokens has 15 bytes, which are no whole number of int64",
        ),
        ({"shape": [3]}, r"target_tokens has 2 values, which do not fill the shape \[3\]"),
        ({"shape": [-1, -2]}, r"do not fill the shape \[-1, -2\]"),
        ({"shape": [2**40, 2**40]}, "do not fill the shape"),
        ({"dtype": 9}, "target_tokens has the dtype 9"),
    ],
)
def test_a_wrong_tensor_is_refused_by_its_name(changes, message):
    with pytest.raises(ValueError, match=message):
        read_loss_request(message_with(**changes))


def test_an_image_is_refused():
    message = new_message("ForwardBackwardRequest")
    message.data.add().model_input.add().image.SetInParent()
    with pytest.raises(ValueError, match=r"data\[0\].model_input\[0\] is not text"):
        read_loss_request(message.SerializeToString())


def sparse(values, starts, columns, shape):
    message = new_message("Tensor")
    message.dtype = FLOAT32
    message.shape.extend(shape)
    message.sparse_csr.values = np.array(values, dtype="<f4").tobytes()
    message.sparse_csr.crow_indices = np.array(starts, dtype="<i8").tobytes()
    message.sparse_csr.col_indices = np.array(columns, dtype="<i8").tobytes()
    return message


def test_a_sparse_tensor_is_filled():
    dense = read_tensor(sparse([1.0, 2.0, 3.0], [0, 2, 2, 3], [0, 2, 1], [3, 3]), "weights", 0)
    assert dense.tolist() == [[1, 0, 2], [0, 0, 0], [0, 3, 0]]


@pytest.mark.parametrize(
    ("starts", "columns", "shape"),
    [
        ([0, 2], [0, 2], [2, 3]),
        ([0, 3, 2], [0, 2], [2, 3]),
        ([1, 1, 2], [0, 2], [2, 3]),
        ([0, 1, 2], [0, 3], [2, 3]),
        ([0, 1, 2], [-1, 2], [2, 3]),
        ([0, 1, 2], [0, 2], [2, 2**40]),
        ([0, 1, 2], [0, 2], [6]),
    ],
)
def test_a_sparse_tensor_that_does_not_fit_is_refused(starts, columns, shape):
    with pytest.raises(ValueError, match="weights is sparse"):
        read_tensor(sparse([1.0, 2.0], starts, columns, shape), "weights", 0)


def test_the_logprobs_of_datums_with_other_numbers_of_targets_are_written_apart():
    logprobs = [np.ones((2, 3)), np.zeros((4, 3)), np.ones(5)]
    message = new_message("ForwardBackwardOutput")
    message.ParseFromString(write_loss_result(LossResult(logprobs, {"loss:sum": 1.5})))
    assert dict(message.metrics) == {"loss:sum": 1.5}
    fields = [record.fields["logprobs"] for record in message.loss_fn_outputs]
    assert [record.num_datums for record in message.loss_fn_outputs] == [2, 1]
    assert [list(field.trailing_shape) for field in fields] == [[3], []]
    assert np.frombuffer(fields[0].offsets, "<i8").tolist() == [0, 24, 72]
    assert np.frombuffer(fields[1].data, "<f4").tolist() == [1.0] * 5


def test_samples_are_written_with_what_was_asked_for():
    completion = Completion("a", (3, 4), (-0.5, -1.0), (WeightSpan(0, 0, 2),), "stop")
    top = Top(np.array([[1, 2]]), np.array([[-0.1, -0.2]]))
    message = new_message("SampleResponse")
    result = SampledPrompt([completion], np.array([np.nan, -1.0]), top, np.array([[-2.0]]), [top])
    message.ParseFromString(write_samples(result))
    (sequence,) = message.sequences
    assert np.frombuffer(sequence.tokens, "<i4").tolist() == [3, 4] and sequence.topk_sampled_logprobs.k == 2
    assert np.frombuffer(message.prompt_logprobs, "<f4")[1] == -1.0
    assert (message.topk_prompt_logprobs.length, message.topk_prompt_logprobs.k) == (1, 2)
    assert list(message.target_prompt_logprobs.shape) == [1, 1]


BODIES = [
    (OptimStep, b'{"model_id": "m", "seq_id": 1, "adam_params": {"beta1": 1.0}}', "adam_params.beta1=1.0"),
    (OptimStep, b'{"model_id": "m", "seq_id": "1", "adam_params": {}}', "seq_id='1'"),
    (OptimStep, b'{"model_id": "m", "seq_id": 1}', "adam_params: Field required"),
    (OptimStep, b'{"model_id": "m", "seq_id": 1, "optimizer_params": {}, "adam_params": {}}', "optimizer_params"),
    (OptimStep, b"not JSON", "the body"),
    (SaveWeights, b'{"model_id": "m", "seq_id": 1, "path": "a/b"}', "path='a/b'"),
    (SaveWeights, b'{"model_id": "m", "seq_id": 1, "path": ".hidden"}', "path='.hidden'"),
    (CreateModel, b'{"session_id": "s", "model_seq_id": 0, "base_model": "b", "optimizer_config": {"type": "dimuon"}}',
     "this server has adamw"),
    (Sample, b'{"prompt": {"chunks": [{"tokens": [-1]}]}, "sampling_params": {}}', "prompt.chunks.0.tokens.0=-1"),
    (Sample, b'{"prompt": {"chunks": []}, "sampling_params": {}, "prompt_alt_tokens_k": 2}', "is not supported"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "content", "message"), BODIES)
def test_a_wrong_body_is_refused_by_its_field(kind, content, message):
    with pytest.raises(ValueError) as raised:
        read_body(kind, content)
    assert message in str(raised.value)


def test_the_hyperparameters_of_a_step_have_the_defaults_of_the_api():
    params = Adam().params()
    assert (params.learning_rate, params.beta1, params.beta2, params.eps) == (1e-4, 0.9, 0.95, 1e-12)
    assert (params.weight_decay, params.grad_clip_norm) == (0.0, 0.0)


def test_sparse_targets_of_a_prompt_have_no_token_elsewhere():
    tokens = TargetTokens(data=[7, 8], shape=[2, 2], sparse_crow_indices=[0, 1, 2], sparse_col_indices=[1, 0])
    assert tokens.to_array(2).tolist() == [[-1, 7], [8, -1]]
    with pytest.raises(ValueError, match=r"shape=\[2, 2\] must be \[3, K\]"):
        tokens.to_array(3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_tokens": np.array([1])}, r"target_tokens has the shape \[1\]; it must be \[2\] or \[2, K\]"),
        ({"target_tokens": np.array([1, 99])}, "target_tokens has the token 99; tokens are 0 … 9"),
        ({"weights": np.array([1.0])}, r"weights has the shape \[1\], and target_tokens has \[2\]"),
        ({"weights": np.array([1.0, np.inf])}, "weights has a value that is not finite"),
        (
            {"advantages": np.array([1.0, 2.0])},
            "cross_entropy needs target_tokens, and reads weights if they are there",
        ),
    ],
)
def test_a_datum_that_does_not_fit_is_refused(changes, message):
    datum = read_loss_request(message_with()).data[0]
    datum = Datum(datum.tokens, {**datum.inputs, **changes})
    with pytest.raises(ValueError, match=message):
        check_data([datum], choose_loss("cross_entropy"), 10, 16)


def test_data_whose_padded_batch_is_too_large_are_refused():
    """A datum with many tokens and one with many targets would make all of them large."""
    long = Datum(np.zeros(2**12, int), {"target_tokens": np.zeros(2**12, int)})
    wide = Datum(np.zeros(1, int), {"target_tokens": np.zeros((1, 2**14 + 1), int)})
    for data in ([long], [wide]):
        check_data(data, choose_loss("cross_entropy"), 10, 2**13)
    with pytest.raises(ValueError, match=f"more than {MOST_TARGETS} targets; send fewer datums at once"):
        check_data([long, wide], choose_loss("cross_entropy"), 10, 2**13)


def test_targets_of_a_prompt_are_limited():
    """The tokens may be sparse, so that few bytes ask for many logprobs."""
    tokens = TargetTokens(data=[], shape=[1, 10**9], sparse_crow_indices=[0, 0], sparse_col_indices=[])
    with pytest.raises(ValueError, match="K from 1 to 1000"):
        tokens.to_array(1)
