"""Settings of the clipped policy gradient loss: defaults, sources, and every refusal with what it must name."""

import dataclasses
import math

import omegaconf
import pytest

from rl_megatron.losses import ClippedPGLossConfig, ClippedPGLossFn, LossType

TIS = {"use_importance_sampling_correction": True, "truncated_importance_sampling_type": "tis"}


def test_defaults():
    assert dataclasses.asdict(ClippedPGLossFn({}).cfg) == {
        "disable_ppo_ratio": False,
        "token_level_loss": True,
        "fixed_sequence_length": None,
        "sequence_level_importance_ratios": False,
        "ratio_clip_min": 0.2,
        "ratio_clip_max": 0.2,
        "ratio_clip_c": None,
        "reference_policy_kl_penalty": 0.01,
        "reference_policy_kl_type": "k3",
        "kl_input_clamp_value": 20.0,
        "kl_output_clamp_value": 10.0,
        "use_kl_in_reward": False,
        "use_importance_sampling_correction": False,
        "truncated_importance_sampling_type": None,
        "truncated_importance_sampling_ratio": None,
        "truncated_importance_sampling_ratio_min": None,
        "use_on_policy_kl_approximation": False,
        "force_on_policy_ratio": False,
        "use_cispo": False,
        "use_gmpo": False,
        "use_sapo": False,
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
        "use_clip_cov": False,
        "clip_cov_ratio": 0.0002,
        "clip_cov_min": 1.0,
        "clip_cov_max": 5.0,
        "use_kl_cov": False,
        "kl_cov_ratio": 0.0002,
        "kl_cov_coef": 1.0,
        "sequence_rejection_type": None,
        "sequence_rejection_max": None,
        "sequence_rejection_min": None,
        "token_veto_threshold": None,
        "positive_example_nll_weight": 0.0,
        "entropy_coeff": 0.0,
    }


def test_a_dict_a_dataclass_and_an_omegaconf_node_mean_the_same():
    cfg = {"ratio_clip_max": 0.28, "token_level_loss": False}
    node = omegaconf.OmegaConf.create({"clip": 0.28, "loss": {"ratio_clip_max": "${clip}", "token_level_loss": False}})

    @dataclasses.dataclass
    class Section:
        ratio_clip_max: float = 0.28
        token_level_loss: bool = False

    want = ClippedPGLossConfig(**cfg)
    for given in (cfg, want, node.loss, Section()):
        assert ClippedPGLossFn(given).cfg == want
    assert ClippedPGLossFn(cfg).loss_type is LossType.SEQUENCE_LEVEL


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        ({"ratio_clip_mn": 0.2}, r"no key 'ratio_clip_mn'; did you mean 'ratio_clip_min'"),
        ({"zzz": 0.2}, r"no key 'zzz'; known: clip_cov_max, "),
        ({"ratio_clip_min": -0.1}, r"ratio_clip_min=-0.1 must not be negative"),
        ({"ratio_clip_max": "0.2"}, r"ratio_clip_max='0.2' must be a number"),
        ({"ratio_clip_max": True}, r"ratio_clip_max=True must be a number"),
        ({"ratio_clip_max": math.nan}, r"ratio_clip_max=nan must be finite"),
        ({"use_cispo": "yes"}, r"use_cispo='yes' must be true or false"),
        ({"token_level_loss": None}, r"token_level_loss=None must be true or false"),
        ({"ratio_clip_c": 1.0}, r"ratio_clip_c=1.0 must exceed 1"),
        ({"reference_policy_kl_penalty": -1}, r"reference_policy_kl_penalty=-1 must not be negative"),
        ({"reference_policy_kl_type": "k4"}, r"reference_policy_kl_type='k4' must be one of .*'k3'"),
        ({"kl_input_clamp_value": 0.0}, r"kl_input_clamp_value=0.0 must be positive \(null"),
        ({"kl_output_clamp_value": -1.0}, r"kl_output_clamp_value=-1.0 must be positive"),
        ({"positive_example_nll_weight": -1.0}, r"positive_example_nll_weight"),
        ({"entropy_coeff": -1.0}, r"entropy_coeff"),
        ({"sequence_level_importance_ratios": True}, r"sequence_level_importance_ratios=True needs token_level_loss=F"),
        ({"use_cispo": True, "disable_ppo_ratio": True}, r"use_cispo=True excludes disable_ppo_ratio=True.*set dis"),
        ({"use_cispo": True, "force_on_policy_ratio": True}, r"use_cispo=True excludes force_on_policy_ratio=True"),
        ({"use_cispo": True, "ratio_clip_c": 3.0}, r"use_cispo=True excludes ratio_clip_c=3.0.*set ratio_clip_c=None"),
        ({"fixed_sequence_length": 0}, r"fixed_sequence_length=0 must be positive"),
        (
            {"fixed_sequence_length": 8, "token_level_loss": False},
            r"fixed_sequence_length=8 .*token_level_loss=False.*set token_level_loss=True or",
        ),
        ({"use_cispo": True, "token_level_loss": False}, r"use_cispo=True excludes token_level_loss=False"),
        ({"truncated_importance_sampling_ratio": 2.0}, r"truncated_importance_sampling_type is null; set the type"),
        ({"truncated_importance_sampling_type": "clip"}, r"'clip' must be one of .*'tis'"),
        ({"truncated_importance_sampling_type": "tis"}, r"set use_importance_sampling_correction=True"),
        (TIS, r"'tis' needs truncated_importance_sampling_ratio,"),
        (TIS | {"truncated_importance_sampling_ratio": 0.0}, r"truncated_importance_sampling_ratio=0.0 must be posit"),
        (
            TIS | {"truncated_importance_sampling_ratio": 1.0, "truncated_importance_sampling_ratio_min": 2.0},
            r"ratio_min=2.0 must lie between 0 and truncated_importance_sampling_ratio=1.0",
        ),
        (
            TIS | {"truncated_importance_sampling_type": "icepop", "truncated_importance_sampling_ratio": 2.0},
            r"'icepop' needs truncated_importance_sampling_ratio_min",
        ),
        (
            TIS
            | {
                "truncated_importance_sampling_type": "seq-mask-tis",
                "truncated_importance_sampling_ratio": 2.0,
                "truncated_importance_sampling_ratio_min": 0.5,
                "sequence_level_importance_ratios": True,
                "token_level_loss": False,
            },
            r"'seq-mask-tis' .* excludes sequence_level_importance_ratios=True",
        ),
        ({"use_gmpo": True}, r"use_gmpo=True excludes token_level_loss=True.*set token_level_loss=False"),
        (
            {"use_gmpo": True, "token_level_loss": False, "ratio_clip_c": 3.0},
            r"use_gmpo=True excludes ratio_clip_c=3.0",
        ),
        ({"use_sapo": True, "disable_ppo_ratio": True}, r"use_sapo=True excludes disable_ppo_ratio=True"),
        ({"use_sapo": True, "use_cispo": True}, r"use_sapo=True excludes use_cispo=True"),
        ({"sapo_temperature_pos": 0.0}, r"sapo_temperature_pos=0.0 must be positive"),
        ({"use_clip_cov": True, "force_on_policy_ratio": True}, r"excludes force_on_policy_ratio=True.*prev_logprobs"),
        ({"use_kl_cov": True, "use_clip_cov": True}, r"use_kl_cov=True excludes use_clip_cov=True"),
        (
            {"use_kl_cov": True, "ratio_clip_c": 3.0},
            r"use_kl_cov=True excludes ratio_clip_c=3.0.*set ratio_clip_c=None",
        ),
        ({"clip_cov_ratio": 1.5}, r"clip_cov_ratio=1.5 must be at most 1: it is a share of all tokens"),
        ({"kl_cov_ratio": 0.0}, r"kl_cov_ratio=0.0 must be positive"),
        ({"clip_cov_min": 5.0}, r"clip_cov_min=5.0 must be less than clip_cov_max=5.0"),
        ({"token_veto_threshold": 1.0}, r"token_veto_threshold=1.0 must lie between 0 and 1, .*; use 1e-4, or null"),
        ({"token_veto_threshold": 0.0}, r"token_veto_threshold=0.0 must lie between 0 and 1"),
        ({"sequence_rejection_max": 2.0}, r"sequence_rejection_type is null; set the type"),
        ({"sequence_rejection_type": "k2"}, r"'k2' must be one of .*'geometric'"),
        ({"sequence_rejection_type": "k3"}, r"'k3' needs sequence_rejection_max"),
        (
            {"sequence_rejection_type": "k3", "sequence_rejection_max": 1.0, "sequence_rejection_min": 0.5},
            r"_min=0.5: sequence_rejection_type='k3' has no lower bound; set it to null",
        ),
        (
            {"sequence_rejection_type": "geometric", "sequence_rejection_max": 1.1},
            r"_min=None: sequence_rejection_type='geometric' needs a lower bound; set it",
        ),
        (
            {"sequence_rejection_type": "geometric", "sequence_rejection_max": 1.0, "sequence_rejection_min": 2.0},
            r"sequence_rejection_min=2.0 must lie between 0 and sequence_rejection_max=1.0",
        ),
        (3, r"takes a mapping or a dataclass, got int"),
    ],
)
def test_refusals_name_key_value_and_remedy(cfg, message):
    with pytest.raises((KeyError, TypeError, ValueError), match=message):
        ClippedPGLossFn(cfg)
