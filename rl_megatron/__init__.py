"""rl_megatron: train language models, from pretraining to reinforcement learning, on megatron-core.

The rooms of the package, in the order in which data flows (and so in which imports point left):

    config → topology → data → logprobs → losses → model → schedule → policy → generation → algorithms → cli
"""

__version__ = "0.1.0"
