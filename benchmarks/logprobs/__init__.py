"""Race this package's logprobs of vocab-parallel logits, and its fused head, against other implementations:

    python -m benchmarks.logprobs                                  on a GPU if there is one, else on the CPU
    python -m benchmarks.logprobs --peer my_package.kernels:logprobs --output outputs/logprobs

All variants of a case run in one process, with the same logits and the same upstream gradients. They alternate, one
repetition each, and the figures are medians over the repetitions. As in a model, the logits are not a leaf. Making them
is not timed, and the gradient is taken with respect to them.

The modes are:

    logprob      log p(target), forward and backward
    entropy      and the entropy of each row
    gather       and the entropy, and log p of K more ids of each row
    inference    log p(target) alone, without gradients
    fused        from hidden states and the head's weight to logprobs and both gradients

The columns are:

    time             the median of forward and backward; under tensor parallelism, of the slowest rank
    / ours           that time over ours: above 1, ours is faster
    forward          the part of the time until the logprobs are computed
    / floor          that time over a lower bound: each logit is read once in forward, and read and written once in
                     backward, at the speed of a large copy in the same run; in mode fused, the matrix products alone
    bytes/logit      the bytes that every operation reads and writes, over the local logits. Views cost nothing, and a
                     gather reads what it picks. Triton kernels are counted from their source; compiled code is not
                     counted
    from memory      of these, the bytes to and from tensors of more than 12 MiB: smaller ones may stay in a CPU's cache
    extra B/token    the peak of live memory beyond the logits (and, if written in place, their gradient), in bytes per
                     token. A gradient in a separate buffer counts. On a GPU its allocator counts; on the CPU, scratch
                     memory inside torch's operators does not count. In mode fused: beyond hidden states and weight
    collectives      forward + backward
    error            the absolute error of log p against fp64 on the same logits, for the worst token
    gradient error   the error of the gradient of 16 rows against fp64, relative to their largest entry. The gradient of
                     bf16 logits is bf16, and half a unit in its last place is 2e-3

`--peer MODULE:FUNCTION` adds another variant, for tensor-parallel degree 1 only. The function is called with logits
[N, V] and targets [N]. It returns log p(target) [N], differentiable once, or the pair (log p, entropy), and then also
takes part in mode entropy. It may overwrite the logits. MODULE is looked up in the current directory first.
"""
