"""Loops of a client that has only the Tinker SDK and torch: `python tinker_loops.py NAME` prints a line of JSON.

tests/end_to_end/test_tinker_sdk.py runs them in the SDK's environment, with torch from that of the tests.
"""

import json
import os
import random
import statistics
import sys

sys.path.append(os.environ["TORCH_SITE_PACKAGES"])

import tinker
import torch
from tinker import types

BASE, STEP = "qwen", types.AdamParams(learning_rate=1e-2)
DRAWN = random.Random(0)
PROMPTS = [[DRAWN.randrange(1, 100) for _ in range(4)] for _ in range(4)]
ANSWERS = [[DRAWN.randrange(1, 100) for _ in range(3)] for _ in range(4)]
OTHERS = [[DRAWN.randrange(1, 100) for _ in range(3)] for _ in range(4)]


def make_datum(prompt, answer, **inputs):
    """Return a prompt and an answer as training data: only the answer's tokens count."""
    tokens, before = prompt + answer, len(prompt) - 1
    given = {name: [0.0] * before + list(values) for name, values in inputs.items()}
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs={"target_tokens": tokens[1:], **given}
    )


DATA = [make_datum(prompt, answer, weights=[1.0] * 3) for prompt, answer in zip(PROMPTS, ANSWERS, strict=True)]


def fine_tune(training, steps):
    """Return the loss of each of several steps on the answers."""
    losses = []
    for _ in range(steps):
        gradient, update = training.forward_backward(DATA, "cross_entropy"), training.optim_step(STEP)
        losses.append(gradient.result().metrics["loss:sum"])
        update.result()
    return losses


def begin(service, seed=1):
    return service.create_lora_training_client(base_model=BASE, rank=8, seed=seed).result()


def resume(service):
    """Continue from a saved state, with and without the optimizer's, beside the run that goes on."""
    training = begin(service)
    before = fine_tune(training, 3)
    path = training.save_state("middle").result().path
    again = service.create_training_client_from_state_with_optimizer(path).result()
    anew = service.create_training_client_from_state(path).result()
    return {"before": before, "after": fine_tune(training, 3), "again": fine_tune(again, 3), "anew": fine_tune(anew, 3)}


def prefer(service):
    """Prefer answers to others by DPO, a loss that the client computes."""
    training = begin(service)
    data = [
        make_datum(prompt, answer)
        for prompt, *both in zip(PROMPTS, ANSWERS, OTHERS, strict=True)
        for answer in both
    ]  # fmt: skip

    def add_up(logprobs):
        return torch.stack([one[-3:].sum() for one in logprobs])

    outputs = training.forward(data, "cross_entropy").result().loss_fn_outputs
    reference = add_up([torch.tensor(output["logprobs"].data) for output in outputs])

    def compare(data, logprobs):
        chosen, rejected = (add_up(logprobs) - reference).reshape(-1, 2).T
        return -torch.nn.functional.logsigmoid(0.1 * (chosen - rejected)).mean(), {
            "margin": (chosen - rejected).mean().item()
        }

    margins = []
    for _ in range(8):
        margins.append(training.forward_backward_custom(data, compare).result().metrics["margin"])
        training.optim_step(STEP).result()
    return {"margin": margins}


def distill(service):
    """Let a teacher score what the student samples, by prompt logprobs."""
    teacher, student = begin(service), begin(service, seed=2)
    fine_tune(teacher, 12)
    teaching, divergences = teacher.save_weights_and_get_sampling_client().result(), []
    for _ in range(12):
        sampler = student.save_weights_and_get_sampling_client().result()
        params, batch, differences = types.SamplingParams(max_tokens=3, temperature=1.0, seed=5), [], []
        sampled = [
            (prompt, sample)
            for prompt in PROMPTS
            for sample in sampler.sample(types.ModelInput.from_ints(prompt), 8, params).result().sequences
        ]
        futures = [
            teaching.compute_logprobs(types.ModelInput.from_ints(prompt + sample.tokens)) for prompt, sample in sampled
        ]
        for (prompt, sample), future in zip(sampled, futures, strict=True):
            better = [one - two for one, two in zip(future.result()[len(prompt) :], sample.logprobs, strict=True)]
            differences += better
            batch.append(make_datum(prompt, sample.tokens, logprobs=sample.logprobs, advantages=better))
        divergences.append(-statistics.mean(differences))
        student.forward_backward(batch, "importance_sampling").result()
        student.optim_step(STEP).result()
    return {"divergence": divergences}


def take_turns(service):
    """Train two runs at once, and each of them again alone."""
    both = [begin(service, seed) for seed in (1, 2)]
    gradients = [[], []]
    for _ in range(3):
        for results, training in zip(gradients, both, strict=True):
            results.append(training.forward_backward(DATA, "cross_entropy"))
            training.optim_step(STEP)
    together = [[one.result().metrics["loss:sum"] for one in results] for results in gradients]
    return {"together": together, "alone": [fine_tune(begin(service, seed), 3) for seed in (1, 2)]}


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](tinker.ServiceClient())))
