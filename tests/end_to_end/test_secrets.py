"""A run writes no secret, whether it is in the environment or in the configuration."""

import os

from tests.end_to_end.launch import TINY

IN_THE_ENVIRONMENT = {
    "HF_TOKEN": "hf_planted0123456789",
    "WANDB_API_KEY": "planted0wandb0key0123456789",
    "AWS_SECRET_ACCESS_KEY": "planted+aws/secret0123456789",
    "MY_DATABASE_PASSWORD": "planted-password-0123456789",
}
IN_THE_CONFIGURATION = "planted-in-the-configuration-0123456789"
REWARD = """
def length(prompt, completion, api_key, address, note):
    assert api_key == "planted-in-the-configuration-0123456789"
    assert address == "https://user:planted-in-the-configuration-0123456789@judge.example/score"
    return float(len(completion))
"""


def plant():
    os.environ.update(IN_THE_ENVIRONMENT)


def test_a_run_writes_no_secret(tmp_path, forks):
    (tmp_path / "reward.py").write_text(REWARD)
    address = f"https://user:{IN_THE_CONFIGURATION}@judge.example/score"
    run = forks.run_ranks(
        tmp_path,
        *("train", *TINY, "algorithm=grpo", "algorithm.prompts_per_step=2", "algorithm.samples_per_prompt=2"),
        *("train.steps=2", "train.save_every=1"),
        f"reward.functions=[{{path: reward.py, name: length, kwargs: {{api_key: {IN_THE_CONFIGURATION}, "
        f'address: "{address}", note: "${{oc.env:HF_TOKEN}}"}}}}]',
        ranks=1,
        before=plant,
    )[0]
    assert run.status == 0, run.err
    (tmp_path / "reward.py").unlink()
    secrets = [secret.encode() for secret in (*IN_THE_ENVIRONMENT.values(), IN_THE_CONFIGURATION)]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"config.yaml", "summary.json", "metrics.jsonl", "manifest.json", "out0.txt", "err0.txt"} <= {
        path.name for path in files
    }
    found = [
        (str(path.relative_to(tmp_path)), secret) for path in files for secret in secrets if secret in path.read_bytes()
    ]
    assert found == []
    config = (tmp_path / "out" / "config.yaml").read_text()
    assert "api_key: '***'" in config and "https://***@judge.example/score" in config and "note: '***'" in config

    again = forks.run_ranks(
        tmp_path,
        *("train", *TINY, "algorithm=grpo", "algorithm.prompts_per_step=2", "algorithm.samples_per_prompt=2"),
        *("train.steps=2", "train.save_every=1"),
        "reward.functions=[]",
        ranks=1,
        before=plant,
    )[0]
    assert again.status == 2 and IN_THE_CONFIGURATION not in again.err  # the refusal quotes what has changed
