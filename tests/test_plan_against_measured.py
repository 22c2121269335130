"""What a plan predicts is what the same step allocates: to the byte between phases, and within 5 % at the peak."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks.plan_against_measured import __main__ as command
from benchmarks.plan_against_measured.cases import CASES, Case
from benchmarks.plan_against_measured.measured import measure
from benchmarks.plan_against_measured.memory import OfPhase, OfRank, Static
from benchmarks.plan_against_measured.predicted import predict

CASE_OF = {case.name: case for case in CASES}


@pytest.mark.change
@pytest.mark.parametrize("name", ["weights sent", "tensor 2, sequence"])
def test_the_plan_predicts_what_a_step_allocates(ranks, fresh_process, name):
    case = replace(CASE_OF[name], sequences=2)  # one microbatch
    measured = ranks.run(case.world_size, measure, case)
    predicted = [fresh_process.run(predict, case, rank) for rank in range(case.world_size)]
    rows = command.rows_of(case, predicted, measured)
    assert len(rows) == len(case.phases) * case.world_size
    for row in rows:
        assert row.static_is_equal, row
        assert row.ratio == pytest.approx(1.0, abs=command.TOLERANCE), row
        # A CPU's kernels have a MiB of scratch memory, which counts more if a phase adds little.
        assert row.ratio_of_phase == pytest.approx(1.0, abs=0.03 if row.phase == "train" else 0.1), row
    for phase in case.phases:
        for plan, real in zip(predicted, measured, strict=True):
            # The ranks measured on a CPU also have the batch.
            assert plan.phases[phase].before == pytest.approx(real.phases[phase].before, abs=2**19)


def test_a_plan_that_misses_memory_is_found():
    case = Case("small", phases=("train",))

    def of(parameters: int, peak: int) -> list[OfRank]:
        return [OfRank(Static(parameters, 20, 30), {"train": OfPhase(60, peak, 60)})]

    (good,) = command.rows_of(case, of(10, 195), of(10, 200))
    assert good.is_good and good.ratio == 0.975 and good.ratio_of_phase == 135 / 140
    assert not command.rows_of(case, of(10, 189), of(10, 200))[0].is_good
    assert not command.rows_of(case, of(10, 211), of(10, 200))[0].is_good
    assert not command.rows_of(case, of(11, 200), of(10, 200))[0].is_good


@pytest.mark.change
def test_a_case_that_has_been_measured_is_not_run_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "CASES", [replace(CASES[0], sequences=2, length=256)])
    output = tmp_path / "rows.json"
    assert command.main(["--output", str(output)]) == 0
    rows = json.loads(output.read_text())["rows"]
    assert [(row["case"], row["phase"]) for row in rows] == [("one rank", "logprobs"), ("one rank", "train")]
    assert all(row["measured"] > row["before"] > 2**20 for row in rows)
    monkeypatch.setattr(command.ranks, "measured", None)
    assert command.main(["--output", str(output)]) == 0
    assert capsys.readouterr().out.count("one rank") > 3
