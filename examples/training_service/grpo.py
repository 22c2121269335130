"""A client of a training service: teach the served model sums with GRPO."""

import json
import statistics
from pathlib import Path

import tinker
from tinker import types

STEPS, PROBLEMS, SAMPLES = 80, 64, 8
ANSWER_TOKENS = 5


def main() -> None:
    problems = [json.loads(line) for line in Path("sums.jsonl").read_text().splitlines()]
    heldout = [json.loads(line) for line in Path("heldout_sums.jsonl").read_text().splitlines()]
    service = tinker.ServiceClient()  # it reads TINKER_BASE_URL and TINKER_API_KEY
    training = service.create_lora_training_client(base_model="sums", rank=16).result()
    tokenizer = training.get_tokenizer()

    def sample(sampler, some, count, temperature):
        """Yield the tokens of each problem's prompt, and its samples with their rewards."""
        params = types.SamplingParams(max_tokens=ANSWER_TOKENS, temperature=temperature)
        prompts = [tokenizer.encode(problem["prompt"]) for problem in some]
        futures = [sampler.sample(types.ModelInput.from_ints(prompt), count, params) for prompt in prompts]
        for problem, prompt, future in zip(some, prompts, futures, strict=True):
            samples = future.result().sequences
            texts = [tokenizer.decode(one.tokens, skip_special_tokens=True) for one in samples]
            yield prompt, samples, [float(text == problem["answer"]) for text in texts]

    def measure_accuracy(sampler):
        rewards = [reward for *_, one in sample(sampler, heldout, 1, 0.0) for reward in one]
        return statistics.mean(rewards)

    for step in range(STEPS):
        sampler = training.save_weights_and_get_sampling_client().result()
        if step == 0:
            print(f"step 0: held-out accuracy {measure_accuracy(sampler):.3f}", flush=True)
        batch, total = [], 0.0
        for prompt, samples, rewards in sample(sampler, problems[step * PROBLEMS :][:PROBLEMS], SAMPLES, 1.0):
            mean, spread = statistics.mean(rewards), statistics.pstdev(rewards) or 1.0
            total += mean
            for one, reward in zip(samples, rewards, strict=True):
                batch.append(make_datum(prompt, one, (reward - mean) / spread))
        training.forward_backward(batch, "importance_sampling")
        training.optim_step(types.AdamParams(learning_rate=1e-3 * (1 - step / STEPS))).result()
        print(f"step {step + 1}/{STEPS}: reward {total / PROBLEMS:.3f}", flush=True)
    sampler = training.save_weights_and_get_sampling_client().result()
    print(f"step {STEPS}: held-out accuracy {measure_accuracy(sampler):.3f}")
    print("saved as", training.save_state("sums").result().path)


def make_datum(prompt, sample, advantage):
    """Return one sample as training data: the prompt's tokens have no advantage."""
    tokens, before = prompt + sample.tokens, len(prompt) - 1
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": [0.0] * before + sample.logprobs,
            "advantages": [0.0] * before + [advantage] * len(sample.tokens),
        },
    )


if __name__ == "__main__":
    main()
