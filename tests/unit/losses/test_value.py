"""The critic's loss in scalar Python: values of prefixes, clipped and not."""

import pytest
import torch

from rl_megatron.losses import LossInputType, LossType, MSEValueLoss

# [B, S] with entry t about the prefix before token t; the critic says it after token t − 1.
BATCH = {
    "token_mask": torch.tensor([[0.0, 1.0, 1.0, 0.0], [0.0, 0.0, 1.0, 1.0], [0.0, 1.0, 1.0, 1.0]]),
    "sample_mask": torch.tensor([1.0, 1.0, 0.0]),
    "values": torch.tensor([[9.0, 1.0, 2.0, 9.0], [9.0, 9.0, -1.0, 0.5], [9.0, 9.0, 9.0, 9.0]]),
    "returns": torch.tensor([[9.0, 2.0, 1.0, 9.0], [9.0, 9.0, -1.0, 3.0], [9.0, 9.0, 9.0, 9.0]]),
}
# New values: +0.3 and inside, +1.0 towards 1 but clipped, unchanged, −1 away from 3 and clipped.
SCORES = torch.tensor([[1.3, 1.0, 7.0, 7.0], [7.0, -1.0, -0.5, 7.0], [7.0, 7.0, 7.0, 7.0]])
NEW, OLD, RETURNS = [1.3, 1.0, -1.0, -0.5], [1.0, 2.0, -1.0, 0.5], [2.0, 1.0, -1.0, 3.0]


def run(cfg, scores=SCORES, batch=BATCH, num_toks=4):
    scores = scores.clone().requires_grad_()
    loss, metrics = MSEValueLoss(cfg)(scores, batch, 2, num_toks)
    return loss.item(), metrics, torch.autograd.grad(loss, scores)[0]


class TestMSEValue:
    @pytest.mark.parametrize("scale", [1.0, 0.25])
    def test_squared_error(self, scale):
        loss, metrics, gradient = run({"scale": scale})
        squares = [(v - r) ** 2 for v, r in zip(NEW, RETURNS, strict=True)]
        assert loss == pytest.approx(scale * 0.5 * sum(squares) / 4)
        assert metrics == pytest.approx({
            "loss": loss, "vf_clipfrac": 0.0, "returns_mean": sum(RETURNS) / 4, "values_mean": sum(NEW) / 4,
            "values_min": -1.0, "values_max": 1.3, "returns_sq_mean": sum(r * r for r in RETURNS) / 4,
            "residual_sq_mean": sum(squares) / 4, "num_valid_samples": 2.0,
        })  # fmt: skip
        expected = torch.zeros_like(SCORES)
        for (row, column), v, r in zip([(0, 0), (0, 1), (1, 1), (1, 2)], NEW, RETURNS, strict=True):
            expected[row, column] = scale * (v - r) / 4
        torch.testing.assert_close(gradient, expected)

    def test_clipped(self):
        loss, metrics, gradient = run({"cliprange": 0.5})
        clipped = [max(o - 0.5, min(o + 0.5, v)) for v, o in zip(NEW, OLD, strict=True)]
        squares = [max((v - r) ** 2, (c - r) ** 2) for v, c, r in zip(NEW, clipped, RETURNS, strict=True)]
        assert loss == pytest.approx(0.5 * sum(squares) / 4)
        assert metrics["vf_clipfrac"] == 0.25, "only the second: moved beyond 0.5 towards its return"
        assert gradient[0, 1] == 0 and gradient[1, 2] == pytest.approx(-3.5 / 4), "a move away is not clipped off"

    def test_explained_variance_follows_from_the_metrics(self):
        _, metrics, _ = run({})
        returns, residual = torch.tensor(RETURNS), torch.tensor(RETURNS) - torch.tensor(NEW)
        mean_residual = metrics["returns_mean"] - metrics["values_mean"]
        assert metrics["returns_sq_mean"] - metrics["returns_mean"] ** 2 == pytest.approx(
            returns.var(correction=0).item(), rel=1e-6
        )
        assert metrics["residual_sq_mean"] - mean_residual**2 == pytest.approx(residual.var(correction=0).item())

    def test_old_values_are_needed_for_the_clip_only(self):
        batch = {key: value for key, value in BATCH.items() if key != "values"}
        assert run({}, batch=batch)[0] == run({})[0]
        with pytest.raises(KeyError, match=r"MSEValueLoss needs data\['values'\]"):
            run({"cliprange": 0.5}, batch=batch)

    def test_forms(self):
        want = run({})[0]
        assert run({}, SCORES[..., None])[0] == want
        counts = {"global_valid_seqs": 2, "global_valid_toks": 4}
        for given in ({"values": SCORES}, {"logits": SCORES[..., None]}, {"next_token_values": SCORES[:, :-1]}):
            assert MSEValueLoss()(data=BATCH, **counts, **given)[0].item() == want
        assert MSEValueLoss()(SCORES.bfloat16(), BATCH, 2, 4)[0].dtype == torch.float32
        loss_fn = MSEValueLoss()
        assert loss_fn.loss_type is LossType.TOKEN_LEVEL and loss_fn.input_type is LossInputType.LOGIT

    @pytest.mark.parametrize(
        ("cfg", "message"),
        [
            ({"scale": 0.0}, "scale=0.0 must be positive$"),
            ({"cliprange": 0.0}, r"cliprange=0.0 must be positive \(null disables it\)"),
            ({"clip_range": 0.2}, "did you mean 'cliprange'"),
        ],
    )
    def test_refusals(self, cfg, message):
        with pytest.raises((KeyError, ValueError), match=message):
            MSEValueLoss(cfg)
