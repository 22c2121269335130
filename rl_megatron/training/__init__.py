"""Train a policy: plan its optimizer steps, run microbatches on megatron-core's schedules, and take the steps."""
