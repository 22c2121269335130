"""The training service over HTTP: several losses, layouts and tenants, errors, and servers that are killed."""

from __future__ import annotations

import random
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.end_to_end.launch import TINY
from tests.ports import free_port
from tests.service_client import Client, RequestFailed, as_text, read, read_key, read_logprobs
from tests.unit.service.cases import random_datums

VOCAB_SIZE = 250  # tokens of the datums; the tokenizer has some more
LAYOUT = ("parallel.tensor=2", "parallel.pipeline=2", "parallel.sequence=true")


@pytest.fixture(scope="module")
def weights(tmp_path_factory, forks) -> Path:
    """Return a checkpoint with a tokenizer: that of a run of one step."""
    directory = tmp_path_factory.mktemp("base")
    overrides = [setting for setting in TINY if not setting.startswith(("model.num_layers", "train.steps"))]
    finished = forks.run(directory, "train", "algorithm=sft", *overrides, "model.num_layers=2", "train.steps=1")
    assert finished.status == 0, finished.err
    (checkpoint,) = (directory / "out").glob("checkpoints/*/step-*")
    return checkpoint


@contextmanager
def serving(forks, weights, directory, *overrides, ranks=1, port=None, keys=None):
    """Yield (a running server, its address)."""
    port = port or free_port()
    directory.mkdir(exist_ok=True)
    options = ["--directory", str(directory / "service"), "--port", str(port), "--name", "tiny"]
    options += [] if keys is None else ["--keys", str(keys)]
    command = ("training-server", f"init_from={weights}", "device=cpu", *overrides, *options)
    with forks.start(directory, *command, ranks=ranks) as running:
        running.wait_until((directory / "service" / "key").exists if keys is None else lambda: True, "its key")
        yield running, f"http://127.0.0.1:{port}"


def datums(count, name, seed):
    return random_datums(
        count, name, "next tokens" if name == "cross_entropy" else "other targets", seed, VOCAB_SIZE, 20
    )


def train(client: Client, run: str, steps: int) -> list[str]:
    """Run a loop with several losses, saves, loads and samples; return everything that the server answered."""
    results = []
    for number in range(steps):
        name = ("cross_entropy", "importance_sampling", "gspo")[number % 3]
        results.append(client.loss(run, datums(4, name, 2 * number), name))
        results.append(client.loss(run, datums(3, "cross_entropy", 2 * number + 1), "cross_entropy"))
        results.append(client.step(run, learning_rate=1e-2, grad_clip_norm=1.0))
        if number % 4 == 1:
            client.save(run, f"step-{number}")
        if number % 4 == 3:
            client.load(run, f"tinker://{run}/weights/step-{number - 2}", optimizer=number % 8 == 3)
    sampler = client.sampler(run, 1)
    samples = client.sample(sampler, [1, 2, 3], max_tokens=4, seed=5, num_samples=3, prompt_logprobs=True)
    return [*map(as_text, results), samples.SerializeToString().hex()]


@pytest.fixture(scope="module")
def alone(tmp_path_factory, forks, weights):
    """Return what a server without other clients answers."""
    directory = tmp_path_factory.mktemp("alone")
    with serving(forks, weights, directory) as (running, url):
        client = Client(url, read_key(directory / "service"))
        return train(client, client.create("tiny", rank=3, seed=7), 5)


def test_layouts_give_the_metrics_of_one_process(tmp_path, forks, weights, alone):
    with serving(forks, weights, tmp_path, *LAYOUT, ranks=4) as (running, url):
        client = Client(url, read_key(tmp_path / "service"))
        results = train(client, client.create("tiny", rank=3, seed=7), 5)
    for ours, theirs in zip(results[:-1], alone[:-1], strict=True):
        if ours.startswith("{"):
            continue
        ours, theirs = (bytes.fromhex(one) for one in (ours, theirs))
        for our, their in zip(read_logprobs(ours), read_logprobs(theirs), strict=True):
            np.testing.assert_allclose(our, their, rtol=1e-4, atol=1e-4)
        metrics = [read("ForwardBackwardOutput", one).metrics["loss:sum"] for one in (ours, theirs)]
        assert metrics[0] == pytest.approx(metrics[1], rel=1e-4)


def test_tenants_get_bitwise_what_each_gets_alone(tmp_path, forks, weights, alone):
    """Two clients with adapters of other ranks and targets send their requests in turn."""
    keys = tmp_path / "keys"
    keys.write_text("tml-aaaaaaaaaaaaaaaaaaaa anna\ntml-bbbbbbbbbbbbbbbbbbbb ben\n")
    keys.chmod(0o600)
    with serving(forks, weights, tmp_path, keys=keys) as (running, url):
        anna, ben = Client(url, "tml-aaaaaaaaaaaaaaaaaaaa"), Client(url, "tml-bbbbbbbbbbbbbbbbbbbb")
        others = [ben.create("tiny", rank=8, seed=1), ben.create("tiny", rank=3, seed=2, number=1, train_mlp=False)]
        run = anna.create("tiny", rank=3, seed=7)
        send = anna.post

        def disturbed(path, content):
            for other in others:
                ben.post("optim_step", {"model_id": other, "seq_id": ben.next_seq(other), "adam_params": {}})
                ben.send_loss(other, datums(2, "ppo", 3), "ppo")
            return send(path, content)

        anna.post = disturbed
        assert train(anna, run, 5) == alone
        with pytest.raises(RequestFailed, match="there is no training run"):
            ben.step(run)
        with pytest.raises(RequestFailed, match="there are no weights tinker://"):
            ben.load(others[0], f"tinker://{run}/weights/step-1", optimizer=True)
        with pytest.raises(RequestFailed, match="the key is not one of this server's"):
            Client(url, "tml-cccccccccccccccccccc")


@pytest.mark.parametrize("kills", [2, pytest.param(50, marks=pytest.mark.nightly)])
def test_a_killed_server_goes_on_where_it_was(tmp_path, forks, weights, alone, kills):
    """Whenever it is killed, the client's requests are answered bitwise as by a server that nothing disturbs."""
    rng, port, left = random.Random(0), free_port(), kills
    servers = []

    def start():
        server = serving(forks, weights, tmp_path, port=port)
        servers.append((server, server.__enter__()[0]))

    start()
    try:
        key = read_key(tmp_path / "service")
        while left:
            client = Client(f"http://127.0.0.1:{port}", key)
            run, send = client.create("tiny", rank=3, seed=7), client.post

            def disturbed(path, content, send=send):
                nonlocal left
                if left and rng.random() < 0.3:
                    left -= 1
                    servers[-1][1].kill()
                    start()
                return send(path, content)

            client.post = disturbed
            assert train(client, run, 5) == alone
    finally:
        for server, _ in servers:
            server.__exit__(None, None, None)


def test_errors_reach_the_client_and_change_nothing(tmp_path, forks, weights):
    """A request that cannot be executed fails in its turn, and the run goes on as if it had not come."""
    with serving(forks, weights, tmp_path) as (running, url):
        client = Client(url, read_key(tmp_path / "service"))
        run, other = (client.create("tiny", rank=2, seed=1, number=number) for number in range(2))
        data = datums(3, "cross_entropy", 0)
        wrong = datums(3, "cross_entropy", 1)
        wrong[1].tokens[0] = 999
        for call, message in (
            (lambda: client.loss(run, wrong, "cross_entropy"), r"data\[1\].model_input has the token 999"),
            (lambda: client.loss(run, [], "cross_entropy"), "the request has no datum"),
            (lambda: client.loss(run, data, "cross_entrpy"), "did you mean 'cross_entropy'"),
            (lambda: client.loss(run, data, "ppo"), "ppo needs target_tokens, logprobs, advantages"),
            (lambda: client.loss(run, data, "cross_entropy", beta=1.0), "is not an option of cross_entropy"),
            (lambda: client.step(run, learning_rate=-1.0), "learning_rate=-1.0: "),
            (lambda: client.load(run, f"tinker://{run}/weights/none", True), "there are no weights"),
            (lambda: client.save(run, "../outside"), "path='../outside'"),
            (lambda: client.create("large", 2, 1, number=7), "this server has the base model tiny, not large"),
            (lambda: client.create("tiny", 10**3, 1, number=8), "exceeds a dimension"),
            (lambda: client.post("forward_backward", b"garbage"), "is not a ForwardBackwardRequest"),
            (lambda: client.post("optim_step", {"model_id": run}), "seq_id: Field required"),
            (lambda: client.post("no_such_verb", {}), "is not a verb of this server"),
            (lambda: client.post("retrieve_future", {"request_id": "none"}), "410: .*there is no request none"),
        ):
            with pytest.raises(RequestFailed, match=message):
                call()
        path, wider = client.save(other, "saved"), client.create("tiny", rank=4, seed=1, number=9)
        for call, message in (
            (lambda: client.loss(f"{client.session}:train:8", data, "cross_entropy"), "there is no training run"),
            (lambda: client.save(other, "saved"), "there are weights with the name saved already"),
            (lambda: client.load(wider, path, True), "saved has another rank or other targets than the training run"),
        ):
            with pytest.raises(RequestFailed, match=message):
                call()
        for name in (run, other):
            client.loss(name, data, "cross_entropy")
            client.step(name, learning_rate=1e-3)
        assert client.loss(run, data, "cross_entropy") == client.loss(other, data, "cross_entropy")
