"""Code written against NeMo RL runs on this package: imports, both ways of calling, configs, metrics."""

from __future__ import annotations

import contextlib
import io
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rl_megatron.compat import nemo_rl
from rl_megatron.compat.nemo_rl.loss_inputs import PackedLossWrapper, prepare_loss_input
from rl_megatron.compat.nemo_rl.losses import DPOLossFn, calculate_kl, calculate_kl_penalty_joschu2020
from rl_megatron.losses import LossInputType, NLLLoss
from tests.docs.forked import Fork

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("nemo_user_script.py")
INSTALL = "import rl_megatron.compat.nemo_rl as compat\ncompat.install()\n"

# Per kind of training, the metrics NeMo RL reports.
SFT = {"loss", "num_unmasked_tokens", "num_valid_samples"}
PREFERENCE = {"loss", "accuracy", "rewards_chosen_mean", "rewards_rejected_mean", "num_valid_samples"}
METRICS = {
    "sft": SFT,
    "grpo": {
        "loss", "probs_ratio", "probs_ratio_min", "probs_ratio_max", "probs_ratio_clamped", "probs_ratio_clamped_min",
        "probs_ratio_clamped_max", "kl_penalty", "token_mult_prob_error", "gen_kl_error", "policy_kl_error",
        "js_divergence_error", "sampling_importance_ratio", "num_valid_samples", "approx_entropy", "positive_nll_loss",
    },
    "dpo": PREFERENCE | {"sft_loss", "preference_loss"},
    "reward model": PREFERENCE,
    "value": {
        "loss", "vf_clipfrac", "returns_mean", "values_mean", "values_min", "values_max", "returns_sq_mean",
        "residual_sq_mean", "num_valid_samples",
    },
    "distillation": {"loss", "num_valid_samples"},
}  # fmt: skip


def executed(program: str, search: list[str]) -> tuple[str, str]:
    """Return what a program prints, and the error that ends it, in a process that imports `nemo_rl` for this only."""
    sys.path[:0] = search
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(program, {"__name__": "__main__"})
    except Exception as error:
        return printed.getvalue(), f"{type(error).__name__}: {error}"
    return printed.getvalue(), ""


@pytest.fixture(scope="module")
def run(forks, tmp_path_factory):
    """`run(program, *paths)`: what it prints, and its error, in a fork, as `nemo_rl` cannot be taken back."""

    def run(program: str, *paths: Path) -> tuple[str, str]:
        with Fork(forks.context, tmp_path_factory.mktemp("program")) as fork:
            return fork.call(executed, program, [str(path) for path in (REPOSITORY, *paths)])

    return run


@pytest.fixture(scope="module")
def output_of(run):
    def output_of(program: str, *paths: Path) -> str:
        printed, error = run(program, *paths)
        assert not error
        return printed

    return output_of


@pytest.fixture(scope="module")
def trainings(output_of):
    """Name → what the user's script printed of it."""
    lines = output_of(INSTALL + f"import runpy\nrunpy.run_path({str(SCRIPT)!r}, run_name='__main__')").splitlines()
    return {training["name"]: training for training in map(json.loads, lines)}


FORMS = {
    "sft": ("logits", "logprobs", "packed", "packed at once", "own loss", "own loss packed"),
    "grpo": ("logits", "logprobs", "prepared", "packed", "packed at once"),
    "dpo": ("logits", "logprobs", "packed"),
    "reward model": ("rewards",),
    "value": ("logits",),
    "distillation": ("prepared",),
}
TRAININGS = [f"{kind}, {form}" for kind, forms in FORMS.items() for form in forms]


@pytest.mark.change
@pytest.mark.parametrize("name", TRAININGS)
def test_it_learns(trainings, name):
    losses = trainings[name]["losses"]
    assert all(later < earlier for earlier, later in zip(losses, losses[1:], strict=False)), losses


@pytest.mark.parametrize("name", [name for name in TRAININGS if "own loss" not in name])
def test_metrics_have_their_names(trainings, name):
    metrics = trainings[name]["first"]
    assert METRICS[name.split(",")[0]] <= metrics.keys()
    assert all(isinstance(value, int | float) for value in metrics.values())


@pytest.mark.parametrize("name", [name for name in TRAININGS if name.split(",")[0] in ("sft", "grpo", "dpo")])
def test_every_way_of_calling_trains_the_same(trainings, name):
    want, got = trainings[f"{name.split(',')[0]}, logits"], trainings[name]
    assert got["losses"] == pytest.approx(want["losses"], rel=1e-5, abs=1e-7)
    if "own loss" not in name:
        assert got["last"] == pytest.approx(want["last"], rel=1e-5, abs=1e-6)


def test_metrics_have_their_values(trainings):
    """Of the first step, on-policy: what is known without computing it."""
    grpo = trainings["grpo, logits"]["first"]
    exact = {"probs_ratio": 1.0, "probs_ratio_min": 1.0, "probs_ratio_max": 1.0, "kl_penalty": 0.0, "gen_kl_error": 0.0,
             "token_mult_prob_error": 1.0, "sampling_importance_ratio": 1.0, "num_valid_samples": 6.0}  # fmt: skip
    assert {name: grpo[name] for name in exact} == pytest.approx(exact, abs=1e-5)
    dpo = trainings["dpo, logits"]["first"]
    assert dpo["preference_loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert (dpo["rewards_chosen_mean"], dpo["rewards_rejected_mean"]) == pytest.approx((0, 0), abs=1e-6)
    assert dpo["loss"] == pytest.approx(dpo["preference_loss"] + 0.1 * dpo["sft_loss"], rel=1e-6)
    assert dpo["num_valid_samples"] == trainings["reward model, rewards"]["first"]["num_valid_samples"] == 3.0
    assert trainings["sft, logits"]["first"]["num_unmasked_tokens"] == sum(n - 2 for n in (7, 4, 8, 6, 5, 8))
    assert trainings["k3"]["values"] == pytest.approx([math.exp(x) - 1 - x for x in (0.5, -0.5)], rel=1e-5)


# ---- the modules


def test_every_name_of_the_table_imports(output_of):
    imports = "".join(f"from {module} import {', '.join(names)}\n" for module, names in nemo_rl.MODULES.items())
    assert output_of(INSTALL + imports + "import nemo_rl\nprint(nemo_rl.algorithms.loss.utils.__name__)").split() == [
        "nemo_rl.algorithms.loss.utils"
    ]


MISTAKES = {  # statement → (error, module, what is missing, the nearest there is)
    "from nemo_rl.algorithms.loss import NLLLos": ("ModuleNotFoundError", "algorithms.loss", "NLLLos", "NLLLoss"),
    "import nemo_rl.algorithms.los": ("ModuleNotFoundError", "algorithms", "los", "loss"),
    "from nemo_rl.algorithms import loss_function": (
        "ModuleNotFoundError", "algorithms", "loss_function", "loss_functions",
    ),
    "import nemo_rl.models.policy.lm_policy": ("ModuleNotFoundError", "models.policy", "lm_policy", "interfaces"),
    "import nemo_rl.algorithms.utils as u; u.masked_men": (
        "AttributeError", "algorithms.utils", "masked_men", "masked_mean",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def messages(output_of):
    program = f"""
import json
messages = {{}}
for statement in {[*MISTAKES, *LEFT_OUT]}:
    try:
        exec(statement)
    except Exception as error:
        messages[statement] = [type(error).__name__, str(error)]
print(json.dumps(messages))
"""
    return json.loads(output_of(INSTALL + program))


@pytest.mark.parametrize("statement", MISTAKES)
def test_what_is_not_in_the_table_is_named_with_what_is(messages, statement):
    error, module, missing, nearest = MISTAKES[statement]
    kind, message = messages[statement]
    assert kind == error
    assert message.startswith(f"rl_megatron provides nemo_rl.{module}, but not its {missing!r}")
    assert nearest in message.partition(repr(missing))[2]


LEFT_OUT = {  # statement → why, with what to do instead
    "import nemo_rl.data.multimodal_utils": "Multimodal batches are not provided: train a text-only model",
    "import nemo_rl.distributed.virtual_cluster": "does not use Ray: start one process for each GPU",
    "from nemo_rl.models.policy.lm_policy import Policy": "does not use Ray: start one process for each GPU",
    "from nemo_rl.algorithms.grpo import grpo_train": "torchrun -m rl_megatron train algorithm=grpo",
    "import nemo_rl.algorithms.grpo as g; g.setup": "torchrun -m rl_megatron train algorithm=grpo",
}


def test_what_is_left_out_on_purpose_says_why(messages):
    for statement, reason in LEFT_OUT.items():
        assert reason in messages[statement][1]


def test_nothing_that_is_left_out_is_in_the_table():
    for name in nemo_rl.LEFT_OUT:
        module, _, member = name.rpartition(".")
        assert name not in nemo_rl.MODULES and member not in nemo_rl.MODULES.get(module, {})
        assert any(known == module or known.startswith(f"{module}.") for known in nemo_rl.MODULES), "nothing would ask"


@pytest.mark.change
def test_code_may_ask_what_there_is(output_of):
    program = """
import nemo_rl.algorithms.loss as loss
assert hasattr(loss, "NLLLossFn") and not hasattr(loss, "GRPOLoss") and getattr(loss, "GRPOLoss", 3) == 3
try:
    from nemo_rl.models.generation import vllm
except ImportError:
    print("without")
import importlib.util
assert importlib.util.find_spec("nemo_rl.algorithms.loss") is loss.__spec__
for unknown in ("nemo_rl.environments.games", "nemo_rl.algorithms.loss.triton"):
    assert importlib.util.find_spec(unknown) is None, unknown
"""
    assert output_of(INSTALL + program).strip() == "without"


@pytest.mark.change
def test_installing_twice_changes_nothing(output_of):
    program = "import nemo_rl.algorithms.loss as first\ncompat.install()\nimport nemo_rl.algorithms.loss as second\n"
    assert output_of(INSTALL + program + "print(first is second)").strip() == "True"


@pytest.fixture
def real(tmp_path):
    """A directory with another package called nemo_rl."""
    (tmp_path / "nemo_rl").mkdir()
    (tmp_path / "nemo_rl" / "__init__.py").write_text("REAL = True\n")
    return tmp_path


@pytest.mark.change
def test_an_installed_nemo_rl_is_not_shadowed_unasked(run, output_of, real):
    _, message = run(INSTALL, real)
    assert message.startswith("ImportError: nemo_rl itself is installed") and "install(replace=True)" in message
    program = "import rl_megatron.compat.nemo_rl as compat\ncompat.install(replace=True)\nimport nemo_rl\n"
    assert output_of(program + "print(hasattr(nemo_rl, 'REAL'))", real).strip() == "False"


@pytest.mark.change
def test_an_imported_nemo_rl_is_not_replaced_under_its_users(run, real):
    _, error = run("import nemo_rl, rl_megatron.compat.nemo_rl as compat\ncompat.install(replace=True)", real)
    assert error.startswith("ImportError: nemo_rl is already imported")


# ---- settings


def test_a_dpo_section_is_taken_whole_and_a_mistyped_key_is_not():
    section = {"max_num_steps": 150, "val_period": 25, "seed": 42, "reference_policy_kl_penalty": 0.1}
    assert DPOLossFn(section).cfg.reference_policy_kl_penalty == 0.1
    with pytest.raises(KeyError, match="sft_los_weight.*did you mean 'sft_loss_weight'"):
        DPOLossFn(section | {"sft_los_weight": 0.1})


# ---- functions


def test_masked_mean_takes_nemo_rls_arguments():
    masked_mean = nemo_rl.MODULES["nemo_rl.algorithms.utils"]["masked_mean"]
    values, mask = torch.tensor([[1.0, 2.0, math.nan], [3.0, 4.0, 5.0]]), torch.tensor([[1, 1, 0], [0, 1, 1]])
    assert masked_mean(values, mask).item() == 3.0
    assert masked_mean(values, mask, dim=-1).tolist() == [1.5, 4.5]
    assert masked_mean(values, mask, global_normalization_factor=torch.tensor(6)).item() == 2.0
    assert masked_mean(values, torch.zeros_like(mask)).item() == 0.0


def test_calculate_kl_takes_nemo_rls_arguments():
    logprobs, reference = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, 40.0])
    x = torch.tensor([-0.5, 20.0])  # the second is clamped
    for kind, kl in {"k1": -x, "k2": x**2 / 2, "k3": x.exp() - 1 - x}.items():
        torch.testing.assert_close(calculate_kl(logprobs, reference, kind, 20.0, None), kl)
        torch.testing.assert_close(calculate_kl(logprobs, reference, kl_type=kind), kl.clamp(-10, 10))
    weighted = calculate_kl(logprobs, reference, "k1", 20.0, None, torch.tensor([2.0, 3.0]))
    torch.testing.assert_close(weighted, -x * torch.tensor([2.0, 3.0]))
    torch.testing.assert_close(calculate_kl_penalty_joschu2020(logprobs[:1], reference[:1]), (x.exp() - 1 - x)[:1])


def test_another_preparation_of_packed_logits_is_refused():
    with pytest.raises(TypeError, match="prepare_loss_input or prepare_packed_loss_input"):
        PackedLossWrapper(NLLLoss(), lambda **inputs: inputs, torch.tensor([0, 4]))


def test_a_loss_that_prepares_its_own_input_is_refused():
    loss_fn = SimpleNamespace(input_type=LossInputType.DRAFT)
    with pytest.raises(ValueError, match="input_type=LossInputType.DRAFT, but a loss function"):
        prepare_loss_input(torch.zeros(1, 4, 3), {}, loss_fn)


def test_a_value_loss_takes_values_that_are_aligned_with_returns():
    """NeMo RL's workers shift a value head's output before its loss sees it."""
    values, returns = torch.tensor([[9.0, 1.0, 2.0, 4.0]]), torch.tensor([[9.0, 0.0, 0.0, 1.0]])
    batch = {"returns": returns, "token_mask": torch.tensor([[0.0, 1.0, 1.0, 1.0]]), "sample_mask": torch.ones(1)}
    counts = {"global_valid_seqs": torch.tensor(1.0), "global_valid_toks": torch.tensor(3.0)}
    loss, _ = nemo_rl.MODULES["nemo_rl.algorithms.loss"]["MseValueLossFn"]()(data=batch, logits=values, **counts)
    assert loss.item() == pytest.approx(0.5 * (1.0 + 4.0 + 9.0) / 3)
