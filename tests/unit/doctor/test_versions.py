"""`rl-megatron doctor` finds versions and packages that do not fit each other."""

import re

import pytest

from rl_megatron.doctor.versions import check_apex, check_transformer_engine, check_triton, check_versions
from tests.unit.doctor.planted import installed, module


def test_versions_that_fit_are_listed(tmp_path):
    (finding,) = check_versions(installed(tmp_path), (3, 12))
    assert finding.state == "ok"
    assert "torch 2.13.0, megatron-core 0.19.2, transformers 5.23.0, numpy 2.4.6" in finding.message


@pytest.mark.parametrize(
    ("versions", "without", "python", "message", "remedy"),
    [
        ({}, (), (3, 10), r"Python 3\.10: this package needs 3\.11", "PYTHON=python3.12"),
        ({}, (), (3, 11), r"megatron-core 0\.19\.2 with Python 3\.11: 0\.16\.1 is its last", "megatron-core==0.16.1"),
        ({"torch": "2.6.0"}, (), (3, 12), r"torch 2\.6\.0 is outside the range .*>=2\.10", "pip install"),
        ({"megatron_core": "0.20.0"}, (), (3, 12), r"megatron-core 0\.20\.0 is outside", "pip install"),
        ({"numpy": "1.24"}, (), (3, 12), r"numpy 1\.24 is outside the range >=1\.26", "pip install"),
        ({"transformers": "4.57.1"}, (), (3, 12), r"transformers 4\.57\.1 is outside the range >=5", "pip install"),
        ({}, ("transformers",), (3, 12), "transformers is not installed", "scripts/install.sh"),
        ({"tokenizers": "0.20.1"}, (), (3, 12), r"transformers 5\.23\.0 needs tokenizers.* 0\.20\.1", "pip install"),
        ({"triton": "3.5.0"}, (), (3, 12), r"torch 2\.13\.0 needs triton==3\.7\.1, and 3\.5\.0", "pip install"),
    ],
)
def test_versions_that_do_not_fit_are_problems(tmp_path, versions, without, python, message, remedy):
    (finding,) = check_versions(installed(tmp_path, *without, **versions), python)
    assert finding.state == "problem"
    assert re.search(message, finding.message) and remedy in finding.remedy


def test_a_pair_that_was_not_tried_is_a_warning(tmp_path):
    (finding,) = check_versions(installed(tmp_path, megatron_core="0.16.1"), (3, 12))
    assert finding.state == "warning" and "was not tried" in finding.message


def test_a_development_build_of_the_container_is_in_the_range(tmp_path):
    (finding,) = check_versions(installed(tmp_path, torch="2.12.0a0+5228986c39.nv26.05"), (3, 12))
    assert finding.state == "ok"


def test_the_unrelated_apex_of_the_index_is_a_problem(tmp_path):
    (finding,) = check_apex(installed(tmp_path, apex="0.9.10.dev0"))
    assert finding.state == "problem" and "unrelated package" in finding.message and "uninstall" in finding.remedy


def test_apex_of_nvidia_is_accepted(tmp_path):
    environment = installed(tmp_path, apex="0.1")
    module(tmp_path, "apex", "multi_tensor_apply/__init__.py")
    assert check_apex(environment)[0].state == "ok"
    assert check_apex(installed(tmp_path / "none"))[0].state == "ok"


def test_transformer_engine_without_its_part_for_torch_is_a_problem(tmp_path):
    (finding,) = check_transformer_engine(installed(tmp_path, transformer_engine="2.9.0"), has_gpu=True)
    assert finding.state == "problem" and "transformer_engine_torch" in finding.message


def test_transformer_engine_for_another_cuda_is_a_problem(tmp_path):
    environment = installed(tmp_path, cuda="13.0", transformer_engine="2.9.0", transformer_engine_cu12="2.9.0")
    module(tmp_path, "transformer_engine_torch")
    (finding,) = check_transformer_engine(environment, has_gpu=True)
    assert finding.state == "problem" and "CUDA 12" in finding.message and "13.0" in finding.message


def test_an_old_transformer_engine_is_a_problem_and_a_missing_one_a_warning(tmp_path):
    old = installed(tmp_path / "old", transformer_engine="1.13")
    assert check_transformer_engine(old, has_gpu=True)[0].state == "problem"
    missing = installed(tmp_path / "missing")
    assert check_transformer_engine(missing, has_gpu=True)[0].state == "warning"
    assert check_transformer_engine(missing, has_gpu=False)[0].state == "ok"


def test_an_old_triton_is_a_problem_and_a_missing_one_a_warning(tmp_path):
    assert check_triton(installed(tmp_path / "old", triton="3.1.0"), has_gpu=True)[0].state == "problem"
    missing = installed(tmp_path / "missing", "triton")
    assert check_triton(missing, has_gpu=True)[0].state == "warning"
    assert check_triton(missing, has_gpu=False)[0].state == "ok"
