"""NeMo RL's import paths, answered by this package, so that code written against NeMo RL's losses runs unchanged:

    import rl_megatron.compat.nemo_rl as compat
    compat.install()
    from nemo_rl.algorithms.loss_functions import ClippedPGLossFn

`MODULES` is everything that is answered, for both generations of NeMo RL: losses in `algorithms.loss_functions` that
take logits, and losses in `algorithms.loss` that take log-probabilities. Names that changed between them are the same
object. A loss has its settings as attributes; assigning one takes effect. A truncation ratio without a type is the
plain upper clamp. What NeMo RL asserts raises `RuleError`, which is a ValueError as well as an AssertionError.

What is different, on purpose:

- Settings are strict. A key that NeMo RL would pass over is a KeyError that names the nearest one, and a value outside
  its range is refused. A truncation type without its bound is an error, and so is a lower bound without a type.
  Missing keys take defaults, and the `dpo` section of a recipe, which holds the trainer's keys as well, may go to
  `DPOLossFn` as it is. Settings are dataclasses, and plain dicts pass.
- A mean divides by the count, not by the count plus 1e-8, and is 0 if nothing counts. What is masked is not read: NaN
  there does no harm. A loss that is NaN because of an input that counts raises a ValueError that names the input.
- Log-ratios saturate at ±20: log π/π_prev, and those of the generation metrics.
- A preference pair counts only if both of its sequences do (NeMo RL asks the chosen one alone), and each has a token
  that counts. An odd number of sequences is an error.
- A value loss does not read the first token.
- `num_valid_samples` is the sum of sample_mask throughout. Keys of a batch that only metrics read may be missing; their
  metrics are then missing too.
- The KL's gradient is that of NeMo RL's newer generation in both (see `functional.score_function_weight`), and
  `positive_example_nll_weight` divides by a global count, not by the microbatch's own (see `ClippedPGLossFn`).
- A batch that carries `temperature` has its logits divided by it.
- The backward pass writes the gradient over the logits. Call one loss on them, and call it before anything else that
  saved them for its own backward; logits that are needed afterwards, or by a second loss, want a clone.
- Under context parallelism the gradient is whole as it is: remove a `loss / cp_size` that makes up for NeMo RL's
  gather, whose backward adds up the ranks' equal losses.
- Packed logits are read in one pass, by either wrapper; a `prepare_fn` other than NeMo RL's own two is refused. A token
  that counts past the end of its sequence is an error (NeMo RL cuts it off).
- `prepare_loss_input` gives 0 at masked tokens.
- `DraftCrossEntropyLossFn` returns (loss, metrics), and takes `vocab_parallel_group` by name.
- `use_fused_linear_logprobs` and `metric_normalizations` of the losses are not there.

`batched_data_dict` lists what is different about batches.

Source: NVIDIA NeMo RL 0.1 to 0.8, its documentation of these modules.
"""

from __future__ import annotations

from rl_megatron.compat.nemo_rl import import_table
from rl_megatron.compat.nemo_rl.modules import MODULES

__all__ = ["MODULES", "install"]


def install(replace: bool = False) -> None:
    """Make `import nemo_rl.…` find the modules of `MODULES`. A second call changes nothing.

    Args:
        replace: stand in for a NeMo RL that is installed as well. Its other modules are then out of reach: they would
            bring its own BatchedDataDict and losses along.

    Raises:
        ImportError: NeMo RL is installed and `replace` is not set, or it is imported already.
    """
    import_table.answer("nemo_rl", MODULES, replace)
