"""`rl-megatron serve` and `--server-nodes`: mistakes are named before a server or a step starts."""

import pytest

from rl_megatron.cli import main
from rl_megatron.cli.serve import set_server_nodes
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.loading.load import load_config

GRPO = ("algorithm=grpo", "data=arithmetic", "generation.engine=vllm")
TWO_STAGES = (
    "experiment=quickstart", "stages.grpo.generation.engine=vllm", "stages.sft.generation.engine=vllm",
    "stages.sft.generation.vllm.max_model_len=40", "stages.sft.generation.vllm.python=sh",
    "stages.grpo.generation.vllm.python=sh",
)  # fmt: skip


def test_the_nodes_with_servers_replace_those_that_the_run_would_start_in_stages_that_use_servers():
    config = load_config(["experiment=quickstart", "stages.grpo.generation.engine=vllm"])
    changed = set_server_nodes(config, "a:8000,b:8000")
    assert changed.stages["grpo"].generation.vllm.urls == ("http://a:8000", "http://b:8000")
    assert changed.stages["sft"] == config.stages["sft"] and set_server_nodes(config, None) is config


def test_each_node_has_the_configured_number_of_servers_and_their_settings_are_kept():
    settings = ["generation.vllm.num_servers=2", "generation.vllm.tensor_parallel_size=4"]
    vllm = set_server_nodes(load_config([*GRPO, *settings]), "a:8000,b:9000").first.generation.vllm
    assert vllm.urls == ("http://a:8000", "http://a:8001", "http://b:9000", "http://b:9001")
    assert vllm.tensor_parallel_size == 4


@pytest.mark.parametrize(
    ("overrides", "nodes", "message"),
    [
        (GRPO, "a", "'a' is not HOST:PORT"),
        (GRPO, "a:80,http://b:80", "'http://b:80' is not HOST:PORT"),
        (GRPO, "a:0", "server_nodes has 'a:0', whose port is wrong"),
        ((*GRPO, "generation.vllm.num_servers=2"), "a:65535", "whose port is wrong for 2 server"),
        (GRPO, "a:80,a:80", "names a server twice"),
        ((*GRPO, "generation.vllm.server_urls=[http://c:80]"), "a:80", "both name servers"),
        (("algorithm=grpo", "data=arithmetic"), "a:80", "no stage completes prompts on servers .*engine=embedded"),
    ],
)
def test_wrong_nodes_are_refused(overrides, nodes, message):
    with pytest.raises(ConfigError, match=message):
        set_server_nodes(load_config(list(overrides)), nodes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("algorithm=grpo", "data=arithmetic"), "no stage completes prompts on servers"),
        ((*GRPO, "generation.vllm.server_urls=[http://a:1]"), "name servers that run already; leave them out"),
        ((*GRPO, "--port", "0"), "--port 0: must be from 1 to 65535"),
        ((*GRPO, "--stage", "grpp"), "--stage grpp: no stage that uses servers has this name; did you mean 'grpo'"),
        ((*GRPO, "generation.vllm.python=no/python"), "generation.vllm.python=no/python cannot be found"),
        (TWO_STAGES, "start their servers differently; choose one with --stage"),
        ((*GRPO, "generation.vllm.python=sh"), "generation.vllm.port=null: the run has to know"),
    ],
)
def test_a_mistake_is_named_before_a_server_starts(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert main(["serve", *arguments, "device=cpu", "data.num_documents=20", "tokenizer.vocab_size=260"]) == 2
    assert message in capsys.readouterr().err


def test_nodes_are_refused_in_a_sweep(capsys):
    with pytest.raises(SystemExit):
        main(["train", *GRPO, "--multirun", "train.seed=0,1", "--server-nodes", "a:80"])
    assert "the jobs of a sweep start their servers themselves" in capsys.readouterr().err
