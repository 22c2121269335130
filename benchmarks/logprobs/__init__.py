"""Races this package's logprobs of vocab-parallel logits, and its fused head, against the others there are:

    python -m benchmarks.logprobs                                  on a GPU where there is one, else on the CPU
    python -m benchmarks.logprobs --peer my_package.kernels:logprobs --output outputs/logprobs

All variants of a case meet in one run: the same logits, the same upstream gradients, one repetition of each in turn,
and medians over the repetitions. The logits are no leaf, as those of a model are not; making them is not timed, and the
gradient is taken with respect to them.

Modes:

    logprob      log p(target), forward and backward
    entropy      and the entropy of each row
    gather       and the entropy, and log p of K more ids of each row
    inference    log p(target) alone, without grad mode
    fused        from hidden states and the head's weight to logprobs and both gradients

Columns:

    time             median of forward and backward; under tensor parallelism of the slowest rank
    / ours           that time over ours: above 1, ours is faster
    forward          the part of the time until the logprobs are there
    / floor          that time over what cannot be undercut: each logit read once forward, read and written once in
                     backward, at the speed of a large copy in the same run; fused: the matrix products alone
    bytes/logit      what every operation reads and writes, counted, over the local logits; views are free, a gather
                     reads what it picks. Triton's kernels are counted from their source; compiled ones are not counted
    from memory      of these, to and from tensors of more than 12 MiB: smaller ones may never leave a CPU's cache
    extra B/token    peak of live memory beyond the logits (and, written in place, their gradient), bytes per token. A
                     gradient in a buffer of its own counts. On a GPU as its allocator saw it; on the CPU without the
                     scratch memory inside torch's operators. Fused: beyond hidden states and weight
    collectives      forward + backward
    error            of log p against fp64 on the same logits, absolute, the worst token
    gradient error   against fp64, of 16 rows, relative to their largest entry. Where the logits are bf16 so is their
                     gradient, and half a unit in its last place is 2e-3

`--peer MODULE:FUNCTION` brings another variant, tensor parallel 1 only. It is called with logits [N, V] and targets [N]
and returns log p(target) [N], differentiable once, or the pair (log p, entropy); then it races in the mode entropy too.
It may overwrite the logits. MODULE is found from the current directory on.
"""
