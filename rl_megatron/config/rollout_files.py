"""The settings of files of rollouts, which a run writes, and from which a run can learn again."""

from __future__ import annotations

from rl_megatron.config.field_types import NonNegative, Positive, section


@section
class RolloutFilesConfig:
    """Files of rollouts: rollouts/STAGE/step-NNNNNN.parquet in output_dir, with one trajectory in each row."""

    save_every: NonNegative = 0  # write the rollouts of every so many steps; 0: of none
    # Prompts of a round whose samples are written; null: all, which a replay needs.
    num_prompts: Positive | None = None
    # Learn from the rollouts of a directory rollouts/STAGE of another run, instead of generating and scoring. null: no.
    replay: str | None = None
