"""NeMo RL's import paths, provided by this package, so that code written for NeMo RL's losses runs unchanged.

    import rl_megatron.compat.nemo_rl as compat
    compat.install()
    from nemo_rl.algorithms.loss_functions import ClippedPGLossFn

`MODULES` lists all names that are provided, for both generations of NeMo RL: losses in `algorithms.loss_functions` that
take logits, and losses in `algorithms.loss` that take log-probabilities. If a name changed between the generations,
both names are the same object. A loss has its settings as attributes, which can be assigned. A truncation ratio without
a truncation type means the type "tis". A value that breaks a rule of NeMo RL raises `RuleError`, which is a ValueError
and an AssertionError.

The intended differences from NeMo RL are:

- Settings are strict. A key that NeMo RL would ignore raises a KeyError that suggests the nearest key, and a value out
  of range is refused. A truncation type without its bound is an error, and so is a lower bound without a type.
  Missing keys take defaults. The `dpo` section of a recipe, which also has the trainer's keys, may be given to
  `DPOLossFn` unchanged. Settings are dataclasses, and plain dicts are accepted too.
- A mean divides by the count, not by the count plus 1e-8, and is 0 if nothing counts. Masked positions are not read, so
  a NaN there has no effect. If an unmasked input makes a loss NaN, a ValueError names the input.
- log π/π_prev and the log-ratios of the generation metrics are clamped to ±20.
- A preference pair counts only if both of its sequences count and have a token that counts (NeMo RL reads only the
  chosen sequence's mask). An odd number of sequences is an error.
- A value loss ignores the value at the first token.
- `num_valid_samples` is the sum of sample_mask in all losses. Keys of a batch that only metrics read may be missing;
  these metrics are then missing too.
- In both generations, the KL has the gradient of the newer generation (see `functional.score_function_weight`), and
  the NLL term (`positive_example_nll_weight`) is divided by a global count, not the microbatch's (see
  `ClippedPGLossFn`).
- If a batch has `temperature`, the logits are divided by it.
- Backward overwrites the logits with their gradient. Call only one loss on them, before any other operation that saves
  them for backward. Clone logits that are needed afterwards or by a second loss.
- Under context parallelism the gradient needs no correction: remove `loss / cp_size`, which NeMo RL needs because the
  backward of its gather adds up the gradients of all ranks' equal losses.
- Both packing wrappers read packed logits in one pass, and refuse a `prepare_fn` other than NeMo RL's two. An
  unmasked token after the end of its sequence is an error (NeMo RL drops it).
- `prepare_loss_input` returns 0 at masked tokens.
- `DraftCrossEntropyLossFn` returns (loss, metrics), and accepts `vocab_parallel_group` only by name.
- An environment answers one trajectory at a time (see `environments`), and Ray is not needed.
- `use_fused_linear_logprobs` is not provided. In `metric_normalizations`, the divisor of `positive_nll_loss` is TOKENS.
- Multimodal batches and modules that need Ray are not provided; importing them raises an error with the reason.

`batched_data_dict` lists the differences of batches, `advantages` those of advantage estimators, and `reward_shaping`
describes the functions that change rewards.

Source: NVIDIA NeMo RL 0.1 to 0.8, its documentation of these modules.
"""

from __future__ import annotations

from rl_megatron.compat.nemo_rl import import_table
from rl_megatron.compat.nemo_rl.modules import LEFT_OUT, MODULES

__all__ = ["LEFT_OUT", "MODULES", "install"]


def install(replace: bool = False) -> None:
    """Make `import nemo_rl.…` find the modules of `MODULES`. A second call changes nothing.

    Args:
        replace: Whether to replace an installed NeMo RL. Modules that `MODULES` lacks then cannot be imported, because
            they would use NeMo RL's own BatchedDataDict and losses.

    Raises:
        ImportError: NeMo RL is installed and `replace` is false, or NeMo RL is already imported.
    """
    import_table.answer("nemo_rl", MODULES, replace, LEFT_OUT)
