"""A configuration and a log line are written without their secrets, and with everything else."""

import os
import sys

import pytest

from rl_megatron import log
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.generation import SglangConfig, VllmConfig
from rl_megatron.config.loading.load import from_yaml, load_config, to_yaml
from rl_megatron.config.secrets import without_secrets


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
        ({"secret_key": "abc", "passphrase": "abc"}, {"secret_key": "***", "passphrase": "***"}),
        (
            {"headers": {"Authorization": "abc", "X": "Bearer abcdefgh.ij"}},
            {"headers": {"Authorization": "***", "X": "Bearer ***"}},
        ),
        (
            {"url": "http://host/x?key=abc&n=1&access_token=abc&sig=a%2B"},
            {"url": "http://host/x?key=***&n=1&access_token=***&sig=***"},
        ),
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


@pytest.mark.parametrize(
    ("name", "is_secret"),
    [
        *((name, True) for name in (
            "HF_TOKEN", "MY_TOKENS", "WANDB_API_KEY", "OPENAI_KEY", "WANDB_KEY", "GITHUB_PAT", "AZURE_STORAGE_KEY",
            "DB_PASS", "SSHPASS", "JWT", "AUTH_JWT", "SLACK_WEBHOOK_URL", "AWS_SECRET_ACCESS_KEY", "KEY_PASSPHRASE",
        )),
        *((name, False) for name in (
            "PATH", "MAX_TOKENS", "MAX_NEW_TOKENS",
            "SSH_AUTH_SOCK", "PUBLIC_KEY", "COMPASS", "PYTHONPATH", "TOKENIZERS_PARALLELISM", "MONKEY",
            "BYPASS",
        )),
    ],
)  # fmt: skip
def test_the_name_of_a_variable_says_whether_it_is_a_secret(name, is_secret):
    assert log.is_secret_variable(name) == is_secret


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


@pytest.mark.parametrize("given", [("--api-key", "planted"), ("--admin-api-key=planted",)])
@pytest.mark.parametrize("kind", [VllmConfig, SglangConfig])
def test_a_key_among_the_arguments_of_a_server_is_refused(kind, given):
    name = given[0].partition("=")[0]
    with pytest.raises(ConfigError, match=f"extra_args has {name}, which .* require the run's own token") as refused:
        kind(extra_args=given).check()
    assert "planted" not in str(refused.value)
