"""The benchmarks run, and reach what they are there to show."""

from __future__ import annotations

from benchmarks import packing
from tests.unit.data.shared_data import shared


def test_packing_wastes_little_and_shares_out_evenly():
    """All of GSM8K in one global batch; a smaller one can waste more, as the benchmark's docstring says."""
    lengths, cost = packing.read_lengths(str(shared("gsm8k")), pack_size=4096)
    whole = len(lengths) - len(lengths) % 8
    measured = {
        name: packing.measure(planner, lengths, whole, num_ranks=8, pack_size=4096, cost=cost)
        for name, planner in packing.PLANNERS.items()
    }
    balanced = measured.pop("balanced")
    assert balanced.waste_of_full_packs <= 0.03 and balanced.waste_computed == 0
    assert balanced.rank_imbalance <= 0.02 and balanced.microbatch_imbalance <= 0.02
    assert all(balanced.waste_of_full_packs <= other.waste_of_full_packs for other in measured.values())
    assert measured["padding to the longest row"].waste_computed > 0.5


def test_packing_prints_a_table_per_batch_size(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "150")
    line = '{{"question": "What is {0} and {0}?", "answer": "{1}"}}\n'
    for name in ("train.jsonl", "test.jsonl"):
        (tmp_path / name).write_text("".join(line.format(number, "so " * (number % 9)) for number in range(50)))
    assert packing.main([str(tmp_path), "--global-batch-size", "16", "--data-parallel", "4", "--pack-size", "200"]) == 0
    printed = capsys.readouterr().out
    assert "16 rows per global batch" in printed and "48 rows per global batch (all)" in printed
    assert all(printed.count(f" {name} ") == 2 for name in packing.PLANNERS)


def test_packing_says_what_is_missing(tmp_path, capsys):
    assert packing.main([str(tmp_path / "absent")]) == 1
    assert "nothing at" in capsys.readouterr().err
    assert packing.main([str(tmp_path)]) == 1
    assert "has no train.jsonl" in capsys.readouterr().err
