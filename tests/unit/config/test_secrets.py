"""A configuration and a log line are written without their secrets, and with everything else."""

import os
import sys

import pytest

from rl_megatron import log
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.load import from_yaml, load_config, to_yaml
from rl_megatron.config.secrets import without_secrets
from rl_megatron.config.servers import VllmConfig


@pytest.mark.parametrize(
    ("tree", "written"),
    [
        ({"api_key": "abc"}, {"api_key": "***"}),
        ({"judge": {"openai-api-key": "abc", "model": "m"}}, {"judge": {"openai-api-key": "***", "model": "m"}}),
        ({"hf_token": "abc", "password": "abc"}, {"hf_token": "***", "password": "***"}),
        ({"url": "https://me:abc@host/x"}, {"url": "https://***@host/x"}),
        ({"urls": ["http://abc@host:80"]}, {"urls": ["http://***@host:80"]}),
        ({"extra_args": ["--hf-token", "abc", "--seed", "1"]}, {"extra_args": ["--hf-token", "***", "--seed", "1"]}),
        ({"extra_args": ["--api-key=abc"]}, {"extra_args": ["--api-key=***"]}),
        ({"path": "data/planted-0123456789"}, {"path": "data/***"}),
    ],
)
def test_a_secret_is_left_out(tree, written, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "planted-0123456789")
    assert without_secrets(tree) == written


@pytest.mark.parametrize(
    "tree",
    [
        {"stop_tokens": ["<|im_end|>"], "max_new_tokens": 32, "micro_batch_tokens": 64, "eos_token": "<eos>"},
        {"path": "s3://bucket/key", "email": "me@host", "template": "{question} @ {answer}"},
        {"api_key": None, "password": 3},
    ],
)
def test_what_is_no_secret_is_kept(tree):
    assert without_secrets(tree) == tree


def test_short_values_of_such_variables_are_not_searched_for(monkeypatch):
    monkeypatch.setenv("USE_TOKEN", "true")
    assert log.redact("train.fused_head=true") == "train.fused_head=true"


def test_a_configuration_with_a_secret_can_be_read_back():
    config = load_config(
        ["algorithm=grpo", "data=arithmetic", "generation.engine=vllm",
         'generation.vllm.server_urls=["http://me:secret@10.0.0.5:8000"]']
    )  # fmt: skip
    text = to_yaml(config)
    assert "secret" not in text
    assert from_yaml(text, "config.yaml").first.generation.vllm.server_urls == ("http://***@10.0.0.5:8000",)


def test_log_lines_and_errors_have_no_secrets(monkeypatch, capsys):
    monkeypatch.setenv("WANDB_API_KEY", "planted-0123456789")
    monkeypatch.setattr(log.LOGGER, "handlers", [])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    log.setup()
    message = f"http://me:planted-password@host refused {os.environ['WANDB_API_KEY']}"
    try:  # a traceback quotes this line
        raise RuntimeError(message)
    except RuntimeError as error:
        log.LOGGER.exception("asked %s", "http://me:planted-password@host")
        log.error(ConfigError("server http://me:planted-password@host: wrong"))
        sys.excepthook(type(error), error, error.__traceback__)
    shown = capsys.readouterr().err
    assert "planted" not in shown and "RuntimeError" in shown
    assert shown.count("http://***@host") >= 4


def test_a_key_among_the_arguments_of_a_server_is_refused():
    with pytest.raises(ConfigError, match="extra_args has --api-key: the run sends no key"):
        VllmConfig(extra_args=("--api-key", "abc")).check()
