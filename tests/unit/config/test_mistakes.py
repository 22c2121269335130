"""Mistyped keys, and overrides without effect: the message names the nearest key, or the key that works."""

import shlex

import pytest

from rl_megatron.config import schema
from rl_megatron.config.algorithms import GRPOConfig
from rl_megatron.config.clipped_pg import ClippedPGLossConfig
from rl_megatron.config.loading.hints import NAMES_ELSEWHERE, schema_paths, suggest_key
from rl_megatron.config.loading.load import load_config


@pytest.mark.parametrize(
    ("override", "mistyped", "nearest"),
    [
        ("train.stpes=3", "train.stpes", "train.steps"),
        ("+train.stpes=3", "train.stpes", "train.steps"),
        ("optimzer.lr=3", "optimzer.lr", "optimizer.lr"),
        ("output_dri=x", "output_dri", "output_dir"),
        ("+output_dri=x", "output_dri", "output_dir"),
        ("precison=bf16", "precison", "precision"),
        ("modl=nano", "modl", "model"),
        ("model.hiden_size=32", "model.hiden_size", "model.hidden_size"),
        ("parallel.tensr=2", "parallel.tensr", "parallel.tensor"),
        ("loss.ratio_clp_min=0.3", "loss.ratio_clp_min", "loss.ratio_clip_min"),
        ("generation.topp=0.3", "generation.topp", "generation.top_p"),
        ("data.pth=x", "data.pth", "data.path"),
        ("tokenizer.vocabsize=300", "tokenizer.vocabsize", "tokenizer.vocab_size"),
    ],
)
def test_a_mistyped_override_names_the_nearest_key(refused, override, mistyped, nearest):
    message = refused(override)
    assert f"unknown key {mistyped!r}" in message
    assert f"did you mean {nearest!r}?" in message


def test_a_mistyped_algorithm_key_is_compared_with_the_keys_of_that_algorithm(refused):
    assert "unknown key 'algorithm.promts_per_step'; did you mean 'algorithm.prompts_per_step'?" in refused(
        "algorithm=grpo", "algorithm.promts_per_step=3"
    )
    message = refused("algorithm=sft", "algorithm.prompts_per_step=3")
    assert "unknown key 'algorithm.prompts_per_step'" in message
    assert "did you mean 'algorithm.prompts_per_step'" not in message, "sft has no such key"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("stages.sft.train.stpes=3", ["unknown key 'stages.sft.train.stpes'", "'train.steps'"]),
        ("stages.sft.trian.steps=3", ["unknown key 'stages.sft.trian'", "'train'"]),
        ("stages.sft.modle=nano", ["unknown key 'stages.sft.modle'", "'model'"]),
        (
            "stages.grpo.algorithm.promts_per_step=3",
            ["unknown key 'stages.grpo.algorithm.promts_per_step'", "prompts_per_step"],
        ),
        ("stages.stf.train.steps=3", ["no stage 'stf'", "did you mean 'sft'?"]),
        ("stages.sft=3", ["stages.sft=3", "mapping"]),
        ("stages=3", ["stages=3", "mapping"]),
    ],
)
def test_a_mistyped_stage_key_names_the_nearest_key(refused, three, override, words):
    message = refused(*three, override)
    assert all(word in message for word in words), message


@pytest.mark.parametrize("where", ["", "stages.sft."])
def test_a_key_of_peft_that_is_not_supported_is_named(refused, three, where):
    given = three if where else ("algorithm=sft", "peft.r=4")
    message = refused(*given, f"{where}peft.bias=all")
    assert f"unknown key '{where}peft.bias'; biases are not trained beside an adapter; leave the key out" in message


@pytest.mark.parametrize(("key", "algorithm"), [("generation.vllm", "grpo"), ("data.columns", "sft")])
def test_null_for_a_mapping_is_answered_with_the_override_that_works(refused, three, key, algorithm):
    assert f"; leave it out for the default, or delete a value: '~{key}'" in refused(
        f"algorithm={algorithm}", f"{key}=null"
    )
    assert load_config([f"algorithm={algorithm}", "data=arithmetic", f"~{key}"])
    assert refused(*three, f"stages.sft.{key}=null").endswith("; leave it out for the default")


def test_a_stage_of_a_run_without_stages_is_refused(refused):
    message = refused("stages.sft.train.steps=3")
    assert "stages.sft.train.steps=3" in message and "leave stages.NAME out" in message


@pytest.mark.parametrize(
    ("tree", "mistyped", "nearest"),
    [
        ({"optimzer": {"lr": 1.0}}, "optimzer", "optimizer"),
        ({"train": {"stpes": 3}}, "train.stpes", "train.steps"),
        ({"stages": {"one": {"algorithm": {"name": "sft"}, "trian": {"steps": 1}}}}, "stages.one.trian", "train"),
        ({"stages": {"one": {"train": {"stpes": 1}}}}, "stages.one.train.stpes", "train.steps"),
        (
            {"stages": {"one": {"data": {"numeval_examples": 1}}}},
            "stages.one.data.numeval_examples",
            "data.num_eval_examples",
        ),
        (
            {"stages": {"one": {"algorithm": {"name": "grpo", "leave_one_uot": True}}}},
            "stages.one.algorithm.leave_one_uot",
            "algorithm.leave_one_out",
        ),
    ],
)
def test_a_mistyped_key_of_an_own_experiment_names_the_nearest(refused, experiment, tree, mistyped, nearest):
    message = refused(*experiment(tree))
    assert f"unknown key {mistyped!r}" in message
    assert f"did you mean {nearest!r}?" in message


def test_an_own_experiment_loads(experiment):
    tree = {"train": {"steps": 3}, "stages": {"one": {"algorithm": {"name": "sft"}}, "two": None}}
    name, _, directory = experiment(tree)
    config = load_config([name, "train.seed=4"], directory)
    assert list(config.stages) == ["one", "two"]
    assert {(stage.train.steps, stage.train.seed) for stage in config.stages.values()} == {(3, 4)}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["experiment=quickstrt"], ["experiment=quickstrt", "'quickstart'"]),
        (["model=nan"], ["string"]),
        (["model=huge"], ["model=huge", "nano"]),
        (["train.steps"], ["'train.steps'", "key=value"]),
        (["train.steps=${nowhere}"], ["train.steps", "nowhere"]),
        (["~optimizer"], ["optimizer"]),
        (["~algorithm"], ["algorithm"]),
        (["--config-dir", "nowhere"], ["--config-dir nowhere"]),
    ],
)
def test_errors_of_hydra_are_one_line(refused, arguments, words):
    message = refused(*arguments)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["algorithm=grpo", "loss.name=gspo"],
            ["no loss 'gspo'; for GSPO, set algorithm=grpo loss=clipped_pg "],
        ),
        (["algorithm=grpo", "loss=dr_grpo"], ["for Dr. GRPO, set algorithm=grpo", " algorithm.normalize_std=false "]),
        (["algorithm=dapo"], ["for DAPO, set algorithm=grpo", "algorithm.dynamic_sampling=true"]),
        (["algorithm=grpo", "algorithm.name=rloo"], ["no algorithm 'rloo'; for RLOO, set algorithm=grpo"]),
        (["algorithm=grpo", "algorithm.advantage_estimator=REINFORCE++"], ["for REINFORCE++, set algorithm=grpo"]),
        (["algorithm=gppo"], ["did you mean 'ppo'? Known: distillation, dpo, grpo, "]),
        (["algorithm=grpo", "loss.name=clipped"], ["did you mean 'clipped_pg'? Known: clipped_pg, cpo, "]),
    ],
)
def test_the_name_of_a_published_method_is_answered_by_its_settings(refused, arguments, words):
    message = refused(*arguments)
    assert all(word in message for word in words), message


def test_a_mistyped_key_of_the_critic_names_the_nearest(refused):
    message = refused("algorithm=ppo", "algorithm.critic_optimizer.wamup_steps=3")
    assert "unknown key 'algorithm.critic_optimizer.wamup_steps'" in message
    assert "did you mean 'algorithm.critic_optimizer.warmup_steps'?" in message


@pytest.mark.parametrize(
    ("override", "instead"),
    [
        ("train.steps=3", ["stages.pretrain.train.steps=…", "stages.sft.train.steps=…", "stages.grpo.train.steps=…"]),
        ("train.eval_every=3", ["stages.grpo.train.eval_every=…"]),
        ("++optimizer.lr=3", ["stages.grpo.optimizer.lr=…"]),
        ("data.sequence_length=32", ["stages.pretrain.data.sequence_length=…"]),
        ("loss.reference_policy_kl_penalty=0.1", ["stages.grpo.loss.reference_policy_kl_penalty=…"]),
        ("algorithm.prompts_per_step=3", ["stages.grpo.algorithm.prompts_per_step=…"]),
        ("algorithm.updates_per_rollout=3", ["stages.grpo.algorithm.updates_per_rollout=…"]),
        ("algorithm=grpo", [f"stages.{stage}.algorithm.name=…" for stage in ("pretrain", "sft", "grpo")]),
    ],
)
def test_an_override_that_stages_shadow_is_refused_with_the_paths_that_work(refused, three, override, instead):
    message = refused(*three, override)
    assert f"override {override!r} has no effect in stage(s)" in message
    assert message.partition("; write ")[2] == " ".join(instead)


@pytest.mark.parametrize(
    ("key", "remedy"),
    [
        ("algorithm.critic_optimizer.lr", "write stages.ppo.algorithm.critic_optimizer.lr=…"),
        ("algorithm.prompts_per_steps.lr", "none of them has this key"),
    ],
)
def test_a_nested_key_is_known_by_its_first_part(refused, experiment, key, remedy):
    arguments = experiment({"stages": {"sft": {"algorithm": {"name": "sft"}}, "ppo": {"algorithm": {"name": "ppo"}}}})
    message = refused(*arguments, f"{key}=0.1")
    assert f"override '{key}=0.1' has no effect in stage(s) ['sft', 'ppo']" in message
    assert message.endswith(f"; {remedy}")


def test_the_paths_that_the_refusal_proposes_work(three):
    name, _, directory = three
    config = load_config([name, "stages.grpo.algorithm.updates_per_rollout=3", "stages.sft.train.steps=7"], directory)
    assert config.stages["grpo"].algorithm.updates_per_rollout == 3
    assert config.stages["sft"].train.steps == 7


def test_a_scalar_that_a_stage_sets_shadows_the_override(refused, experiment):
    arguments = experiment({"stages": {"one": {"algorithm": {"name": "sft"}, "precision": "bf16"}}})
    assert "write stages.one.precision=…" in refused(*arguments, "precision=fp32")


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("train.lr=1", "'optimizer.lr'"),
        ("lr=1", "'optimizer.lr'"),
        ("seed=1", "'train.seed'"),
        ("+train.lr=1", "'optimizer.lr'"),
        ("~train.lr", "'optimizer.lr'"),
        ("train.temperature=1", "'generation.temperature'"),
        ("train.micro_batch=4", "'train.micro_batch_size'"),
        ("train.batch_size=4", "'generation.batch_size' or 'train.micro_batch_size'"),
    ],
)
def test_a_key_of_another_section_is_found_by_its_name(refused, override, meant):
    assert refused(override).endswith(f"; did you mean {meant}?")


def test_an_unknown_key_like_no_other_lists_the_keys_of_its_section(refused):
    message = refused("+train.foo=1")
    assert message.startswith("unknown key 'train.foo'; train has the keys anomaly_window, async_save, ")
    assert "steps" in message and "optimizer" not in message


def test_a_key_of_another_algorithm_names_the_algorithms_that_have_it(refused):
    message = refused("algorithm=sft", "algorithm.prompts_per_step=3")
    assert message.endswith("; only algorithm=on_policy_distillation, online_dpo, grpo or ppo has it")


@pytest.mark.parametrize(
    ("value", "quoted"),
    [
        ("{prompt}", "'data.prompt_template=\"{prompt}\"'"),
        (r"Q: {question}\nA: ", "'data.prompt_template=\"Q: {question}\\nA: \"'"),
    ],
)
def test_an_unquoted_template_is_refused_with_the_right_quoting(refused, value, quoted):
    message = refused(f"data.prompt_template={value}")
    assert message.startswith(f"override 'data.prompt_template={value}': Hydra cannot read the value")
    assert message.endswith(f": {quoted}") and "viable" not in message
    (words,) = shlex.split(quoted)
    assert load_config(["data=arithmetic", words]).first.data.prompt_template == value.replace(r"\n", "\n")


@pytest.mark.parametrize(
    ("value", "quoted", "read"),
    [
        ("[<|im_end|>]", """'generation.stop_tokens=["<|im_end|>"]'""", ("<|im_end|>",)),
        ("[<|im_end|>, <|a|>]", """'generation.stop_tokens=["<|im_end|>","<|a|>"]'""", ("<|im_end|>", "<|a|>")),
    ],
)
def test_a_list_of_unquoted_texts_is_refused_with_a_list_that_is_accepted(refused, value, quoted, read):
    assert refused(f"generation.stop_tokens={value}").endswith(f"for the shell: {quoted}")
    (words,) = shlex.split(quoted)
    assert load_config(["data=arithmetic", words]).first.generation.stop_tokens == read


def test_long_values_and_many_mistakes_are_cut_short(refused):
    message = refused(f"train.steps=[{','.join(map(str, range(1000)))}]")
    assert message.startswith("train.steps=[0, 1, 2,") and len(message) < 400
    assert refused(f"generation.stop_tokens=[{','.join(['{a: b}'] * 20)}]").endswith("; and 12 more mistakes")


@pytest.mark.parametrize(("name", "keys"), NAMES_ELSEWHERE.items())
def test_a_name_of_another_library_names_the_key_here(name, keys):
    known = {*schema_paths(schema.StageConfig), *schema_paths(schema.RunConfig)}
    known |= {*schema_paths(GRPOConfig, "algorithm."), *schema_paths(ClippedPGLossConfig, "loss.")}
    assert set(keys) <= known
    for key in (name, f"actor.{name}"):
        assert suggest_key(key, known).startswith(f"; did you mean {' or '.join(map(repr, keys))}")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("algorithm.temperature=1", "did you mean 'generation.temperature'?"),
        ("data.seed=1", "did you mean 'train.seed'?"),
        ("rollout.n=8", "did you mean 'algorithm.samples_per_prompt'?"),
        ("model.path=x", "did you mean 'init_from'? It takes a checkpoint, which `rl-megatron convert import` makes"),
        ("data.mix=[{path: x, wieght: 1}]", "unknown key 'data.mix[0].wieght'; did you mean 'data.mix[0].weight'?"),
        ("reward.functions=[{nmae: x}]", "'reward.functions[0].nmae'; did you mean 'reward.functions[0].name'?"),
        ("experiment=gsm8k_sftt", "experiment=gsm8k_sftt: there is no such file; did you mean 'gsm8k_sft'?"),
        ("data=gsm8kk", "data=gsm8kk: there is no such file; did you mean 'gsm8k'?"),
        ("--config-name=confg", "--config-name confg: there is no such file, shipped or in --config-dir; did you mean"),
    ],
)
def test_a_wrong_name_is_answered_with_the_right_one(refused, override, words):
    assert words in refused("algorithm=grpo", override)


def test_a_text_among_the_reward_functions_is_the_name_of_one(experiment):
    tree = {"reward": {"functions": ["exact_match", {"name": "length_penalty", "weight": 0.1}]}}
    both = load_config(["algorithm=grpo", "reward.functions=[exact_match,{name: length_penalty, weight: 0.1}]"])
    _, _, directory = arguments = experiment({**tree, "algorithm": {"name": "grpo"}})
    assert [each.name for each in both.first.reward.functions] == ["exact_match", "length_penalty"]
    assert load_config([arguments[0]], directory).first.reward == both.first.reward
    assert load_config(["algorithm=grpo"], settings=tree).first.reward == both.first.reward


def test_a_mapping_in_place_of_a_template_names_the_quoting(refused):
    assert "as in 'data.prompt_template=\"{x}\"'" in refused("data.prompt_template={a: b}")


def test_several_values_without_multirun_name_the_ways_on(refused):
    message = refused("train.seed=0,1")
    assert message.startswith("override 'train.seed=0,1' has several values; add --multirun")
    assert "'train.seed=[0,1]'" in message and "'train.seed=\"0,1\"'" in message


@pytest.mark.parametrize(
    "arguments",
    [
        ["experiment=[quickstart,quickstart_ppo]"],
        ["experiment=[quickstart]"],
        ["experiment=quickstart", "experiment=quickstart_ppo"],
    ],
)
def test_a_run_has_one_experiment(refused, arguments):
    message = refused(*arguments)
    assert "a run has one experiment" in message and "--multirun experiment=quickstart" in message


@pytest.mark.parametrize(
    ("override", "instead"),
    [
        ("hydra.run.dir=elsewhere", "write output_dir=elsewhere"),
        ("++hydra.sweep.dir=elsewhere", "write output_dir=elsewhere"),
        ("hydra.searchpath=[file://x]", "--config-dir"),
        ("hydra/launcher=joblib", "leave it out"),
    ],
)
def test_settings_of_hydra_are_refused_with_the_key_to_use(refused, override, instead):
    message = refused(override)
    assert message.startswith(f"override {override!r} has no effect") and instead in message


def test_a_section_hydra_of_an_own_file_is_refused(refused, experiment):
    message = refused(*experiment({"hydra": {"run": {"dir": "elsewhere"}}}))
    assert "own.yaml: the section hydra has no effect" in message and "output_dir" in message


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("stages.grpo.optimizer.min_lr=1", ["stages.grpo.optimizer.min_lr=1.0", "stages.grpo.optimizer.lr=0.0005"]),
        ("stages.grpo.generation.temperature=0", ["stages.grpo: generation.temperature=0"]),
        ("stages.sft.generation.engine=vlm", ["stages.sft: generation.engine='vlm'"]),
    ],
)
def test_a_rule_that_a_stage_breaks_is_named_with_the_stage(refused, three, override, words):
    message = refused(*three, override)
    assert all(word in message for word in words), message


@pytest.mark.parametrize("name", ["7", "nan", "true", "[a]", "1.5"])
@pytest.mark.parametrize("key", ["data.task.name", "loss.name", "generation.engine", "algorithm.name", "data.source"])
def test_a_name_that_is_not_a_text_gives_no_traceback(refused, key, name):
    message = refused("algorithm=grpo", "data=arithmetic", f"{key}={name}")
    assert name.strip("[]").lower() in message.lower()


def test_a_path_that_the_system_refuses_gives_no_traceback(refused):
    assert refused(f"init_from={'x' * 300}").endswith("cannot be read: File name too long")
