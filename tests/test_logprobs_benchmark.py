"""The benchmark of logprobs: its modes, its peers, and how it counts memory and bytes."""

from __future__ import annotations

import json
import re
from functools import partial
from itertools import product

import pytest
import torch

from benchmarks.logprobs import __main__ as logprobs_command
from benchmarks.logprobs.cases import MODES
from benchmarks.logprobs.counters import Counters
from tests.test_benchmarks import PAGE, lines_of


def exact_peer(logits, targets):
    log_p = logits.float().log_softmax(-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def plain_peer(logits, targets):
    return exact_peer(logits, targets)[0]


def broken_peer(logits, targets):
    return logits.sum()


def logprobs_with_forked_ranks(arguments: list[str]) -> int:
    torch.multiprocessing.spawn = partial(torch.multiprocessing.start_processes, start_method="fork")
    return logprobs_command.main(arguments)


@pytest.fixture(scope="module")
def quick_run(tmp_path_factory, forks):
    """Run every mode on tiny shapes in bf16, on one rank and on two, with peers; return the output and the JSON."""
    directory = tmp_path_factory.mktemp("logprobs")
    command = ["--quick", "--device", "cpu", "--threads", "1", "--repetitions", "1", "--markdown", "--output", "."]
    command += [
        "--dtypes",
        "bf16",
        *(f"--peer=tests.test_logprobs_benchmark:{name}" for name in ("exact_peer", "plain_peer")),
    ]
    done = forks.run(directory, *command, program=logprobs_with_forked_ranks)
    assert done.status == 0, done.err
    assert (directory / "logprobs.png").read_bytes().startswith(b"\x89PNG")
    return done.out, json.loads((directory / "logprobs.json").read_text())


def results_of(content, **wanted):
    """Return variant → result of the one case that has the values `wanted`."""
    (case,) = (case for case in content["cases"] if wanted.items() <= case["case"].items())
    return {result["variant"]: result for result in case["results"]}


@pytest.mark.change
def test_every_mode_of_the_logprobs_benchmark_runs(quick_run):
    _, content = quick_run
    cases = {(c["case"]["mode"], c["case"]["dtype"], c["case"]["tensor"]) for c in content["cases"]}
    assert cases == set(product(MODES, ("bf16",), (1, 2)))
    failed = [result for case in content["cases"] for result in case["results"] if result["failed"]]
    assert failed == []
    for case in content["cases"]:
        for result in case["results"]:
            assert result["seconds"] > 0 and result["ratio_to_ours"] > 0 and result["ratio_to_floor"] > 0
    assert content["environment"].keys() >= {"processor", "threads", "copy_bytes_per_second", "versions", "commit"}


@pytest.mark.change
def test_our_logprobs_are_exact_and_need_one_collective(quick_run):
    _, content = quick_run
    for mode, tensor in product(("logprob", "entropy", "gather"), (1, 2)):
        results = results_of(content, mode=mode, tensor=tensor)
        ours = results["rl_megatron torch"]
        assert ours["logprob_error"] < 1e-5 and ours["gradient_error"] < 5e-3
        assert ours["collectives_backward"] == 0
        assert ours["collectives_forward"] == (0 if tensor == 1 else 2 if mode == "gather" else 1)
    results = results_of(content, mode="logprob", tensor=1)
    assert results["torch log_softmax"]["logprob_error"] > 1e-3  # the reason for the next variant
    assert results["torch float().log_softmax"]["logprob_error"] < 1e-5


@pytest.mark.change
def test_several_ranks_are_compared_with_megatron_core(quick_run):
    _, content = quick_run
    results = results_of(content, mode="logprob", tensor=2)
    assert results["megatron-core cross entropy"]["collectives_forward"] == 3
    assert "torch log_softmax" not in results


@pytest.mark.change
def test_a_peer_is_timed_in_the_modes_that_it_supports(quick_run):
    printed, content = quick_run
    both, one = "tests.test_logprobs_benchmark:exact_peer", "tests.test_logprobs_benchmark:plain_peer"
    entropy = results_of(content, mode="entropy", tensor=1)
    assert entropy[both]["logprob_error"] < 1e-5 and entropy[both]["gradient_error"] < 5e-3 and one not in entropy
    assert {both, one} <= results_of(content, mode="logprob", tensor=1).keys()
    assert both not in results_of(content, mode="gather", tensor=1)
    assert lines_of(printed, "|", one, "1.00") or lines_of(printed, "|", one)


@pytest.mark.parametrize(
    ("peer", "message"),
    [
        ("tests.test_logprobs_benchmark", "give MODULE:FUNCTION"),
        ("no_such_module:logprobs", "no_such_module cannot be imported"),
        ("tests.test_logprobs_benchmark:absent", "has nothing called absent"),
        ("tests.test_logprobs_benchmark:MODES", "has a tuple called MODES"),
        ("tests.test_logprobs_benchmark:broken_peer", "it returned [()]; logprobs [4]"),
        ("json:loads", "it fails on logits [4, 8] and targets [4]"),
    ],
)
def test_a_wrong_peer_is_refused(peer, message, capsys):
    assert logprobs_command.main(["--quick", "--device", "cpu", "--peer", peer]) == 1
    assert message in capsys.readouterr().err


def test_a_vocabulary_that_cannot_be_cut_is_refused(capsys):
    assert logprobs_command.main(["--device", "cpu", "--vocab", "1001", "--tensor", "2"]) == 1
    assert "--vocab 1001 is not divisible by 2" in capsys.readouterr().err


def counted(run):
    with Counters() as counters:
        run()
    return counters


def test_bytes_are_counted_as_read_and_written_once():
    x, y, index = torch.zeros(8, 16), torch.zeros(1, 16), torch.zeros(8, 2, dtype=torch.long)
    size = x.nbytes
    for run, moved in {
        lambda: x.view(16, 8).T[2:]: 0,
        lambda: torch.empty(1000): 0,
        lambda: x.exp(): 2 * size,
        lambda: torch.exp(x, out=x): 2 * size,
        lambda: x.add_(1): 2 * size,
        lambda: x.zero_(): size,
        lambda: torch.zeros_like(x): size,
        lambda: x.copy_(y.expand(8, 16)): size + y.nbytes,
        lambda: x.bfloat16(): size + size // 2,
        lambda: x.gather(1, index): 2 * 16 * 4 + index.nbytes,
        lambda: x.scatter_add_(1, index, torch.empty(8, 2)): 2 * 16 * 4 + index.nbytes + 16 * 4,
    }.items():
        assert counted(run).bytes_moved == moved


def test_the_peak_counts_the_tensors_alive_at_once():
    x = torch.zeros(1000)

    def run():
        a = x + 1
        del a
        b = x + 1
        c = b + 1
        return c.view(10, 100)

    with Counters() as counters:
        kept = run()
    assert counters.peak == 2 * x.nbytes and counters.live == kept.untyped_storage().nbytes()


def test_the_peer_of_the_page_computes_logprobs():
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict = {}
    exec(compile(code, "performance.md", "exec"), names)
    logits, targets = torch.randn(4, 8), torch.arange(4)
    torch.testing.assert_close(names["logprobs"](logits, targets), plain_peer(logits, targets))
