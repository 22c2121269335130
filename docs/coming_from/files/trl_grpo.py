"""GRPO on word problems, as a script for TRL."""

from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

MODEL = "Qwen/Qwen2.5-0.5B"


def correct(completions, answer, **kwargs):
    """Return 1 for each completion that ends with its answer."""
    return [float(text.strip().endswith(str(right))) for text, right in zip(completions, answer, strict=True)]


def brief(completions, **kwargs):
    """Return a score that falls with the length of a completion."""
    return [-len(text) / 1000 for text in completions]


def main():
    """Train."""
    problems = load_dataset("json", data_files="path/to/problems.jsonl", split="train")
    config = GRPOConfig(
        output_dir="outputs/word_problems",
        learning_rate=2e-6,
        lr_scheduler_type="cosine",
        warmup_steps=10,
        max_steps=400,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=8,
        num_generations=8,
        num_iterations=1,
        max_completion_length=256,
        temperature=1.0,
        beta=0.001,
        loss_type="dapo",
        epsilon=0.2,
        epsilon_high=0.28,
        scale_rewards="group",
        mask_truncated_completions=True,
        reward_weights=[1.0, 0.1],
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.3,
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_max=2.0,
        bf16=True,
        gradient_checkpointing=True,
        logging_steps=1,
        log_completions=True,
        save_steps=50,
        save_total_limit=2,
        report_to=["tensorboard"],
        seed=7,
    )
    trainer = GRPOTrainer(
        model=MODEL,
        reward_funcs=[correct, brief],
        args=config,
        train_dataset=problems,
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer.train()


if __name__ == "__main__":
    main()
