"""What the project builds without Transformer Engine has the names, shapes and states that were recorded with it."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import subprocess
import sys
from typing import Any

import pytest

from rl_megatron.cli import main
from rl_megatron.config.loading.load import load_config
from rl_megatron.model.families import family_of_model
from tests.transformer_engine import cases
from tests.transformer_engine.record import RECORDED

VARIABLE = "RL_MEGATRON_TRANSFORMER_ENGINE"
PLAN = "plan algorithm=grpo data=arithmetic model=nano model.vocab_size=512 precision=bf16 --gpus-per-node 1 --json"
FAMILIES = json.loads(RECORDED.read_text())["families"]
RANKS = {
    (family, layout, number): rank
    for family, layouts in FAMILIES.items()
    for layout, recorded in layouts.items()
    for number, rank in enumerate(recorded["ranks"])
}


def small_model(family: str, num_layers: int) -> Any:
    overrides = [f"model.{key}" for key in (*cases.SMALL, f"num_layers={num_layers}")]
    return load_config([*cases.FAMILIES[family], *overrides]).first.model


def without(names: tuple[str, ...], adam: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in adam.items() if name not in names}


def printed_plan() -> Any:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        main(PLAN.split())
    return json.loads(printed.getvalue())


def operators_of(plan: dict[str, Any]) -> dict[str, tuple[float, float]]:
    return {phase["name"]: (phase["kernels"], phase["flops"]) for phase in plan["ranks"][0]["phases"]}


def with_stand_in() -> list[dict[str, Any]]:
    """Return what a rank consists of if megatron-core takes the FusedAdam with which loading is tested."""
    from tests.parallel.test_optimizer_state import use_fused_adam

    use_fused_adam(True)
    try:
        return [cases.described("llama", "data 2", 0), cases.described("qwen3_moe", "expert 2", 0)]
    finally:
        use_fused_adam(False)


@pytest.mark.change
@pytest.mark.parametrize("family", cases.FAMILIES)
def test_portable_layers_have_the_same_tensors_checkpoints_and_exports(fresh_process, family):
    portable = fresh_process.run(cases.of_family, family)
    assert portable.keys() == FAMILIES[family].keys()
    for layout, recorded in FAMILIES[family].items():
        assert portable[layout]["checkpoint"] == recorded["checkpoint"], layout
        assert portable[layout]["export"] == recorded["export"], layout
        for ours, theirs in zip(portable[layout]["ranks"], recorded["ranks"], strict=True):
            assert (ours["backend"], theirs["backend"]) == ("portable", "transformer_engine")
            assert ours["pieces"] == theirs["pieces"], layout


@pytest.mark.change
@pytest.mark.parametrize("family", cases.FAMILIES)
def test_the_weight_table_has_the_tensors_of_the_layers(family):
    for layout, recorded in FAMILIES[family].items():
        pieces = {name: parts[0] for rank in recorded["ranks"] for name, parts in rank["pieces"].items()}
        model = small_model(family, num_layers=2 if layout == "pipeline 2" else 1)
        table = family_of_model(model, cases.VOCABULARY).table(model, cases.VOCABULARY)
        assert pieces.keys() == table.shapes.keys(), layout
        for name, shape in table.shapes.items():
            padded = name in ("embedding.word_embeddings.weight", "output_layer.weight")
            rows = pieces[name][0]
            assert pieces[name][1:] == [*shape[1:]] and (rows >= shape[0] if padded else rows == shape[0]), name
        assert {name: shape for name, (shape, _) in recorded["export"].items()} == {
            name: [*shape] for name, shape in table.hf_shapes.items()
        }


def test_every_parameter_of_the_layers_has_a_place():
    """A parameter that the sharding metadata lacked would be neither initialised nor saved."""
    for case, rank in RANKS.items():
        held = sum(math.prod(shape) for _, *parts in rank["pieces"].values() for _, shape in parts)
        assert held == sum(math.prod(shape) for shape in rank["parameters"].values()), case
        # This is how `build_model` finds the parameters of experts, whose gradients are summed over fewer ranks.
        experts = {name for name in rank["parameters"] if "expert" in name}
        assert experts == {name for name in rank["parameters"] if ".experts." in name}, case
        assert bool(experts) == (case[0] in ("mixtral", "qwen3_moe")), case


def test_checkpoints_have_no_extra_states():
    for family, layouts in FAMILIES.items():
        for layout, recorded in layouts.items():
            assert any(rank["extra_states"] for rank in recorded["ranks"]), (family, layout)
            assert not [name for name in recorded["checkpoint"] if "_extra_state" in name], (family, layout)
            prefixes = [sorted(prefixes) for prefixes in recorded["checkpoint"].values()]
            assert all(each == ["", *cases.PREFIXES] for each in prefixes), (family, layout)


def test_adam_counts_steps_as_an_int_of_each_group():
    state = {"exp_avg": "tensor of torch.float32", "exp_avg_sq": "tensor of torch.float32"}
    for case, rank in RANKS.items():
        for key, step in (("adam", 0), ("adam at step 5", 5)):
            for adam in rank[key]:
                assert adam["class"].endswith("FusedAdam"), case
                assert set(adam["steps"].split(", ")) == {f"int {step}"}, case
                assert adam["state"] == state, case


def test_the_fused_adam_of_other_tests_keeps_what_the_real_one_keeps(fresh_process):
    recorded = [FAMILIES["llama"]["data 2"]["ranks"][0], FAMILIES["qwen3_moe"]["expert 2"]["ranks"][0]]
    for ours, theirs in zip(fresh_process.run(with_stand_in), recorded, strict=True):
        for key in ("adam", "adam at step 5"):
            assert [without(("class", "known_states"), adam) for adam in ours[key]] == [
                without(("class", "known_states"), adam) for adam in theirs[key]
            ]
        assert {adam["known_states"] for adam in theirs["adam"]} == {"exp_avg exp_avg_sq master_param"}


def beside_transformer_engine(*program: str) -> Any:
    """Return the JSON that a program prints with Transformer Engine's Python in the directory `sys.argv[1]`."""
    directory = os.environ.get(VARIABLE)
    if not directory:
        pytest.skip(
            f"set {VARIABLE} to a directory with Transformer Engine's Python; see tests/transformer_engine/record.py"
        )
    command = [sys.executable, "-W", "ignore", "-c", "\n".join(program), directory]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout[done.stdout.index("{") :])


@pytest.mark.change
def test_a_plan_beside_transformer_engine_is_that_of_portable_layers_and_torchs_adam(fresh_process):
    found = beside_transformer_engine(
        "import pathlib, sys; from tests.transformer_engine.without_extension import provide",
        "provide(pathlib.Path(sys.argv[1]))",
        f"from rl_megatron.cli import main; sys.exit(main({PLAN.split()}))",
    )
    without_it = fresh_process.run(printed_plan)
    note = " The plan is for the portable layers and torch's Adam: Transformer Engine runs only on a GPU."
    assert found["fits"] and found["source"] == without_it["source"] + note
    # megatron-core's linears then keep a tensor of Transformer Engine, so bytes are not compared.
    assert operators_of(found) == operators_of(without_it)


@pytest.mark.change
def test_the_record_is_what_transformer_engine_gives():
    found = beside_transformer_engine(
        "import pathlib, sys; from tests.transformer_engine.record import record, text_of",
        "print(text_of(record(pathlib.Path(sys.argv[1]))))",
    )
    for family, layouts in FAMILIES.items():
        for layout, recorded in layouts.items():
            assert found["families"][family][layout] == recorded, (family, layout, found["versions"])
    assert found["families"].keys() == FAMILIES.keys()
