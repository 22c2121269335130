"""Compare the memory that `rl-megatron plan` predicts with the memory that the same steps really allocate on the CPU:

    python -m benchmarks.plan_against_measured                                  # all cases
    python -m benchmarks.plan_against_measured --case "tensor 2, sequence"      # one case
    python -m benchmarks.plan_against_measured --output outputs/plan_memory.json

For each case, one side asks the plan what every rank of the layout uses (`predicted.py`). The other side starts the
ranks as CPU processes with gloo, builds the policy, computes logprobs and takes a training step, while torch's profiler
records every allocation and every release of torch's CPU allocator (`measured.py`). The running sum of these events is
the measured memory. The sides share the case and nothing else, which is checked: a measured rank must not have imported
any module of `rl_megatron.plan`.

A plan is for GPUs, and some code chooses otherwise on a CPU. So the measured ranks make the choices of a GPU, which
`gpu_choices.py` lists. Nothing else is changed on either side, and no number is corrected. What remains of a CPU is the
batch, and the scratch memory of kernels, which exists only while a kernel runs: attention's, and oneDNN's for a product
in bf16. `--without-onednn` leaves out the latter.

With `--output`, results are written after each case, and cases that the file has already are not run again, unless
`--case` names them.

The columns are:

    before       the measured memory when the phase begins: weights, gradients and optimizer state
    predicted    the highest sum of live tensors in the phase, as the plan says
    measured     the highest sum that was really allocated
    ratio        predicted / measured; the goal is 0.95 to 1.05
    of the phase the ratio of what the phase itself adds to what was there before it

The exit status is 1 if a ratio misses the goal, or if weights, gradients and optimizer state are not equal to the byte.
"""
