"""Keys that need an extra are refused before a run begins if it is not installed."""

import importlib.util
import re
import runpy
from pathlib import Path

import pytest
import setuptools

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.loading.load import load_config
from rl_megatron.data.eval_problems import check_set_files

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("overrides", "package", "said"),
    [
        (["rollout.save_every=5"], "pyarrow", "rollout.save_every=5 needs the Python package pyarrow, which is not"),
        (
            ["rollout.async_enabled=true", "loss.use_importance_sampling_correction=true"],
            "pyarrow",
            "rollout.async_enabled=true, which writes all trajectories",
        ),
        (["rollout.worker=agent", "rollout.agent.command=x"], "uvicorn", r"rl_megatron\[gateway\]"),
        (["rollout.worker=verifiers", "rollout.environment.name=x"], "starlette", r"rl_megatron\[gateway\]"),
        (["eval.sets=[{name: own, task: gsm8k}]", "data.path=x"], "pyarrow", r"eval.sets, .* pip install .*\[data\]"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(overrides, package, said, monkeypatch):
    found = importlib.util.find_spec
    arguments = ["algorithm=grpo", "data=arithmetic", *overrides]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else found(name))
    with pytest.raises(ConfigError, match=said):
        check_set_files(load_config(arguments).first, None)


@pytest.fixture
def extras(monkeypatch):
    """The extras of setup.py."""
    declared = {}
    monkeypatch.setattr(setuptools, "setup", lambda **keys: declared.update(keys))
    runpy.run_path(str(REPOSITORY / "setup.py"))
    return declared["extras_require"]


def test_the_page_lists_every_extra(extras):
    page = (REPOSITORY / "docs" / "install.md").read_text().partition("## Extras")[2].partition("\n## ")[0]
    listed = [name for row in re.findall(r"^\| (`.*?) \|", page, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)]
    assert sorted(listed) == sorted(extras)
    left_out = {"dev", "te", "verifiers", "openenv"}
    missing = {name for name in extras.keys() - left_out if not set(extras["dev"]) >= set(extras[name])}
    assert not missing, "dev is said to have them"
