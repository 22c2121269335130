"""`rl-megatron plan` prints tables, JSON and a picture, and answers bad input before anything is computed."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from docs import generate_plan
from rl_megatron.checkpoint.directory import publish
from rl_megatron.cli import main
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.loading.load import load_config
from rl_megatron.config.model import ModelConfig
from rl_megatron.config.plan import PlanConfig
from rl_megatron.plan import command
from rl_megatron.plan.closed_use import estimate_use
from rl_megatron.plan.command import build_workload
from rl_megatron.plan.devices import GIB, Cluster
from rl_megatron.plan.estimate import choose_stages
from rl_megatron.plan.phases import Bytes, PhaseUse, RankUse
from rl_megatron.plan.search import search, without_layout
from rl_megatron.plan.settings import Settings
from rl_megatron.plan.workload import Workload

SMALL = ["plan", "algorithm=grpo", "data=arithmetic", "model=nano", "model.vocab_size=512", "precision=bf16"]
LLAMA = ["plan", "algorithm=sft", "model=llama3_1_8b", "model.vocab_size=128256", "precision=bf16"]
ALONE = ["--gpus-per-node", "1", "--closed-forms"]

CHOOSES = Path(__file__).parent / "chooses_tokens.py"

SEARCH = ["--search", "--top", "3", "--closed-forms"]


def planned(capsys, *arguments: str) -> dict:
    status = main([*arguments, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert status == (0 if found.get("fits", found.get("fitting")) else 1)
    return found


def test_tables_show_every_phase_and_say_that_times_are_estimates(capsys):
    assert main([*SMALL, *ALONE]) == 0
    printed = capsys.readouterr().out
    for phase in ("build", "generate", "reference", "train", "save"):
        assert f" {phase} " in printed
    assert "Memory: fits." in printed and "(not measured)" in printed and "Closed forms:" in printed


def test_json_has_bytes_by_rank_and_phase(capsys):
    found = planned(
        capsys, *LLAMA, "parallel.pipeline=4", "train.global_batch_size=64", "--nodes", "2", "--closed-forms"
    )
    assert [rank["kind"] for rank in found["ranks"]] == ["first stage", "middle stage", "last stage"]
    peaks = [phase["peak_bytes"] for rank in found["ranks"] for phase in rank["phases"]]
    assert found["peak_bytes"] == max(peaks)
    train = next(phase for phase in found["ranks"][0]["phases"] if phase["name"] == "train")
    assert sum(train["peak"].values()) == train["peak_bytes"]
    assert found["parallel"]["data"] == 4 and found["estimate"]["seconds"] > 0


@pytest.mark.parametrize("backend", ["portable", "transformer_engine"])
def test_a_plan_in_the_place_of_transformer_engine_says_so(capsys, backend):
    found = planned(capsys, *SMALL, *ALONE, f"model.backend={backend}")
    assert found["source"].endswith("Transformer Engine runs only on a GPU.") == (backend == "transformer_engine")


def test_a_run_that_does_not_fit_ends_with_status_1(capsys):
    found = planned(capsys, *LLAMA, *ALONE, "train.micro_batch_size=1")
    assert not found["fits"] and found["peak_bytes"] > 80 * GIB
    assert main([*LLAMA, *ALONE, "train.micro_batch_size=1"]) == 1
    printed = capsys.readouterr().out
    assert "Memory: does not fit." in printed and "--search ranks the layouts that fit" in printed


def test_a_step_of_sft_takes_six_operations_for_each_parameter_and_token(capsys):
    found = planned(
        capsys, *LLAMA, *ALONE, "plan.prompt_tokens=0", "plan.response_tokens=16", "train.micro_batch_size=1"
    )
    train = next(phase for phase in found["ranks"][0]["phases"] if phase["name"] == "train")
    parameters_in_products = 8_030_261_248 - 128_256 * 4096
    assert train["flops"] == pytest.approx(6 * parameters_in_products * 16 * 32, rel=1e-3)


def test_the_config_of_a_hugging_face_directory_has_the_shape(capsys, tmp_path):
    """The directory has no weights and no tokenizer."""
    shape = {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28}
    shape |= {"num_key_value_heads": 4, "vocab_size": 152_064, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6}
    shape |= {"tie_word_embeddings": False, "rope_theta": 1e6, "hidden_act": "silu"}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen2ForCausalLM"], **shape}))
    found = planned(
        capsys, "plan", "algorithm=sft", "model=init_from", f"init_from={tmp_path}", "precision=bf16", "--nodes", "8",
        "--closed-forms", "parallel.tensor=4",
    )  # fmt: skip
    build = found["ranks"][0]["phases"][0]["peak"]
    assert found["vocab_size"] == 152_064
    assert build["parameters"] == pytest.approx(2 * 7_615_616_512 / 4, rel=1e-3)


def test_lengths_are_by_default_all_that_the_model_allows(capsys):
    found = planned(capsys, *SMALL, *ALONE, "generation.max_new_tokens=9")
    assert (found["prompt_tokens"], found["response_tokens"]) == (64, 9)
    found = planned(capsys, "plan", "algorithm=pretrain", "data=arithmetic", "data.sequence_length=96", *ALONE)
    assert (found["prompt_tokens"], found["response_tokens"]) == (0, 96)


@pytest.mark.parametrize(
    ("overrides", "lengths"),
    [
        (["algorithm=grpo"], (4064, 32)),
        (["algorithm=grpo", "generation.max_new_tokens=1024"], (3072, 1024)),
        (["algorithm=grpo", "train.micro_batch_tokens=4128"], (4096, 32)),
        (["algorithm=sft", "train.batching=packed", "parallel.tensor=2", "parallel.sequence=true"], (2048, 2048)),
        (["algorithm=dpo", "loss=dpo", "train.batching=dynamic"], (1024, 1024)),
        (["algorithm=sft"], (4096, 4096)),
    ],
)
def test_default_lengths_fit_a_microbatch(overrides, lengths):
    stage = load_config(["model=llama3_1_8b", *overrides]).first
    workload = build_workload(stage, 2, PlanConfig())
    assert (workload.prompt_tokens, workload.response_tokens) == lengths
    assert workload.most_per_microbatch >= 1


def test_completions_without_space_for_a_prompt_in_a_microbatch_are_refused():
    stage = load_config(["model=llama3_1_8b", "algorithm=grpo", "generation.max_new_tokens=4096"]).first
    with pytest.raises(ConfigError, match="train.micro_batch_tokens=4096 is less than .* of 8192 tokens"):
        _ = build_workload(stage, 1, PlanConfig()).most_per_microbatch


def test_a_chosen_length_that_exceeds_a_microbatch_is_refused():
    stage = load_config(["model=llama3_1_8b", "algorithm=grpo"]).first
    with pytest.raises(ConfigError, match="train.micro_batch_tokens=4096 is less than .* of 4128 tokens"):
        _ = build_workload(stage, 1, PlanConfig(prompt_tokens=4096)).most_per_microbatch


def test_engines_in_processes_of_their_own_get_weights_and_are_not_planned(capsys):
    found = planned(capsys, *SMALL, *ALONE, "generation.engine=vllm")
    phases = [phase["name"] for phase in found["ranks"][0]["phases"]]
    assert "refit" in phases and "generate" not in phases


def test_an_engine_in_other_processes_is_named_where_time_and_memory_are_told(capsys):
    vllm = [*SMALL, *ALONE, "generation.engine=vllm"]
    assert main(vllm) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "s for a step without generation" in printed
    assert "Generation runs in processes of engine vllm and is in neither the time nor the memory." in printed
    expected = {"engine": "vllm", "releases_memory": False, "bytes_on_gpu": 0}
    assert planned(capsys, *vllm)["generation_in_processes"] == expected
    assert planned(capsys, *SMALL, *ALONE)["generation_in_processes"] is None


SHARED = ["generation.engine=vllm", "generation.refit=shared_memory"]


def phases_of(found: dict) -> dict[str, dict]:
    return {phase["name"]: phase for phase in found["ranks"][0]["phases"]}


def test_servers_on_the_gpus_of_the_policy_take_their_share_and_push_the_optimizer_state_to_the_host(capsys):
    alone, beside = (
        phases_of(planned(capsys, *SMALL, *ALONE, *more))
        for more in (SHARED[:1], [*SHARED, "generation.vllm.gpu_memory_utilization=0.5"])
    )
    refit = beside["refit"]
    assert refit["peak"]["servers"] == pytest.approx(0.5 * 79.1 * GIB, abs=1)
    assert alone["refit"]["peak"]["optimizer"] > 0 == refit["peak"]["optimizer"]
    assert refit["host_bytes"] == alone["refit"]["host_bytes"] + alone["refit"]["peak"]["optimizer"]
    assert beside["train"]["peak"] == alone["train"]["peak"]  # they sleep

    awake = phases_of(planned(capsys, *SMALL, *ALONE, *SHARED, "generation.vllm.enable_sleep_mode=false"))
    assert awake["train"]["peak"]["servers"] == pytest.approx(0.92 * 79.1 * GIB, abs=1)
    cache = phases_of(planned(capsys, *SMALL, *ALONE, *SHARED, "generation.vllm.kv_cache_memory_bytes=1000000000"))
    assert cache["refit"]["peak"]["servers"] == 10**9 + alone["build"]["peak"]["parameters"] // 2  # no reference


def test_servers_whose_share_is_not_free_do_not_fit(capsys):
    arguments = [*SMALL, *ALONE, *SHARED, "generation.vllm.gpu_memory_utilization=0.95"]
    assert planned(capsys, *arguments)["fits"] is False
    assert planned(capsys, *arguments, "--search", "--gpus-per-node", "1")["fitting"] == 0


@pytest.mark.change
def test_a_run_beside_servers_moves_the_optimizer_state_to_the_host(fresh_process):
    arguments = [*SMALL, *SHARED, "--gpus-per-node", "1", "--json"]
    status, printed = fresh_process.run(output_of, [*arguments, "generation.vllm.gpu_memory_utilization=0.5"])
    run = json.loads(printed)
    phases = phases_of(run)
    state = phases["build"]["peak"]["optimizer"]
    assert status == 0 and phases["refit"]["peak"]["optimizer"] < state / 2  # the moments are on the host
    assert phases["refit"]["host_bytes"] >= state / 2
    assert phases["train"]["peak"]["optimizer"] == state
    assert phases["refit"]["peak"]["servers"] == pytest.approx(0.5 * 79.1 * GIB, abs=1)


def test_a_critic_is_a_second_model_with_phases_of_its_own(capsys):
    one, two = (planned(capsys, *SMALL, *ALONE, *more)["ranks"][0]["phases"] for more in ([], ["algorithm=ppo"]))
    gradients = [phases[0]["peak"]["gradients"] for phases in (one, two)]
    assert gradients[1] == 2 * gradients[0] + 4 * 128  # the embedding is the policy's head, and the critic has its own
    by_name = {phase["name"]: phase for phase in two}
    added = [name for name in by_name if name not in {phase["name"] for phase in one}]
    assert added == ["values", "train_critic"]
    assert by_name["train_critic"]["peak"]["logits"] == 0 < by_name["train"]["peak"]["logits"]
    assert by_name["train_critic"]["flops"] < by_name["train"]["flops"]


def test_a_vocabulary_that_is_not_given_is_warned_about(capfd):
    arguments = [argument for argument in SMALL if not argument.startswith("model.vocab_size")]
    assert main([*arguments, *ALONE]) == 0
    assert "the plan uses tokenizer.vocab_size=" in capfd.readouterr().err
    assert main([*SMALL, *ALONE]) == 0
    assert "tokenizer.vocab_size" not in capfd.readouterr().err


def test_a_peak_above_the_memory_is_told_as_an_excess(capsys):
    assert main([*LLAMA, *ALONE, "train.micro_batch_size=1"]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "GiB exceeds 79.1 GiB by " in printed and "-" not in printed.split("Memory:")[1].split(";")[0]


def test_stages_between_are_represented_by_the_fullest():
    stage = load_config([*SMALL[1:], "model.num_layers=12", "model.num_experts=8", "model.first_dense_layers=3"]).first
    model = replace(stage.model, expert_ffn_hidden_size=4 * stage.model.ffn_hidden_size)
    stage = replace(stage, model=model, parallel=replace(stage.parallel, pipeline=6))
    workload = Workload(stage, 6, 512, 64, 64)
    settings = Settings.from_workload(workload)
    peaks = [estimate_use(settings, each).peak_phase.peak_bytes for each in range(6)]
    assert peaks[2] == max(peaks[1:5]) > peaks[1]  # stage 1 has a dense layer
    chosen = choose_stages(settings, Cluster.from_config(PlanConfig(), "h100", 1, 6))
    assert chosen == [0, 2, 5]


def test_layouts_that_were_run_and_do_not_fit_are_not_called_all_layouts(monkeypatch, capsys):
    stage = load_config(SMALL[1:]).first
    cluster = Cluster.from_config(PlanConfig(), "h100", 1, 8)
    found = search(build_workload(without_layout(stage), 8, PlanConfig()), cluster)
    assert len(found.ranked) > 4
    too_much = RankUse("last stage", 0, (PhaseUse("train", Bytes(activations=2**50)),))
    ran = []
    monkeypatch.setattr(command, "run_stages", lambda workload, *_: ran.append(workload.stage) or (too_much,))
    search_all = [*SMALL, "--search", "--gpus-per-node", "8"]
    assert main([*search_all, "--verify", "1"]) == 1
    lowest = min(range(len(found.ranked)), key=lambda n: found.ranked[n].peak_bytes)
    assert ran == [found.ranked[place].stage(stage) for place in (0, 1, 2, lowest)]
    printed = " ".join(capsys.readouterr().out.split())
    tried = f"4 of {len(found.ranked)} layouts that fit by closed forms were run"
    assert f"{tried}, and none of them fits: --verify N runs more" in printed
    monkeypatch.setattr(command, "search", lambda *_: replace(found, ranked=()))
    assert main(search_all) == 1
    assert "No layout fits" in capsys.readouterr().out


@pytest.mark.change  # it imports matplotlib
def test_a_picture_is_written(tmp_path):
    file = tmp_path / "memory.png"
    assert main([*SMALL, *ALONE, "--picture", str(file)]) == 0
    assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.change
def test_a_search_prints_reasons_and_a_command_line(capsys):
    assert main([*LLAMA, "train.global_batch_size=64", "--gpu", "h200", *SEARCH]) == 0
    printed = capsys.readouterr().out
    assert "The 3 fastest layouts" in printed and "Why others were rejected" in printed
    assert "torchrun --nproc-per-node 8 -m rl_megatron train algorithm=sft model=llama3_1_8b" in printed
    found = planned(capsys, *LLAMA, "train.global_batch_size=64", "--gpu", "h200", *SEARCH)
    assert len(found["ranked"]) == 3 and found["ranked"][0]["command"].startswith("torchrun")


def output_of(arguments: list[str]) -> tuple[int, str]:
    """Return the exit status of a command and what it prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        return main(arguments), printed.getvalue()


@pytest.mark.change
def test_the_phases_are_run_and_agree_with_the_closed_forms(fresh_process):
    arguments = [*LLAMA, "parallel.pipeline=4", "parallel.tensor=2", "parallel.sequence=true", "--nodes", "2", "--json"]
    arguments += ["train.global_batch_size=16", "train.micro_batch_size=1", "--gpu", "h200"]
    status, printed = fresh_process.run(output_of, arguments)
    run, closed = json.loads(printed), json.loads(output_of([*arguments, "--closed-forms"])[1])
    assert status == 0 and run["fits"] and "run on fake GPUs as rank(s) 0, 4, 12" in run["source"]
    assert run["peak_bytes"] == pytest.approx(closed["peak_bytes"], rel=0.1)
    for ran, computed in zip(run["ranks"], closed["ranks"], strict=True):
        assert (ran["kind"], ran["rank"]) == (computed["kind"], computed["rank"])
        of_run, of_closed = (
            next(phase for phase in rank["phases"] if phase["name"] == "train") for rank in (ran, computed)
        )
        assert of_run["flops"] == of_closed["flops"]
        for name in ("kernels", "memory_bytes"):
            assert of_run[name] == pytest.approx(of_closed[name], rel=0.5), name
        for name in ("parameters", "gradients", "optimizer"):
            assert of_run["peak"][name] == pytest.approx(of_closed["peak"][name], rel=1e-3), name
    assert run["estimate"]["seconds"] == pytest.approx(closed["estimate"]["seconds"], rel=0.25)


@pytest.mark.change
def test_the_phases_of_a_critic_are_run_and_agree_with_the_closed_forms(fresh_process):
    arguments = [*SMALL, "algorithm=ppo", "model.num_layers=8", "model.hidden_size=256", "model.ffn_hidden_size=1024"]
    arguments += ["train.micro_batch_tokens=2048", "parallel.pipeline=2", "parallel.tensor=2", "parallel.sequence=true"]
    arguments += ["loss.reference_policy_kl_penalty=0.1", "--gpus-per-node", "8", "--json"]
    status, printed = fresh_process.run(output_of, arguments)
    run, closed = json.loads(printed), json.loads(output_of([*arguments, "--closed-forms"])[1])
    assert status == 0 and "run on fake GPUs as rank(s) 0, 4" in run["source"]
    for ran, computed in zip(run["ranks"], closed["ranks"], strict=True):
        assert [phase["name"] for phase in ran["phases"]] == [phase["name"] for phase in computed["phases"]]
        for name in ("values", "train_critic", "train"):
            of_run, of_closed = (next(p for p in rank["phases"] if p["name"] == name) for rank in (ran, computed))
            assert of_run["flops"] == of_closed["flops"], name
            for kind in ("parameters", "gradients", "optimizer"):
                assert of_run["peak"][kind] == pytest.approx(of_closed["peak"][kind], rel=2e-3), (name, kind)
            assert of_run["peak_bytes"] == pytest.approx(of_closed["peak_bytes"], rel=0.05), name


@pytest.mark.change
def test_the_first_choice_of_a_search_is_run_and_fits(fresh_process):
    arguments = [*LLAMA, "train.global_batch_size=64", "--gpu", "h200", "--search", "--top", "3"]
    status, printed = fresh_process.run(output_of, arguments)
    assert status == 0 and "was run on fake GPUs: its peak is" in printed and "and fits." in printed
    assert "The command line of layout" in printed


def errors_of(arguments: list[str]) -> tuple[int, str]:
    """Return the exit status of a command and what it writes to stderr."""
    written = io.StringIO()
    with contextlib.redirect_stderr(written):
        return main(arguments), written.getvalue()


def test_a_phase_that_cannot_be_planned_is_named_with_its_rank_and_the_cause(fresh_process):
    arguments = ["plan", "algorithm=sft", "data=arithmetic", "model=nano", "model.vocab_size=512", "precision=bf16"]
    arguments += [f"loss.name={CHOOSES}:ChoosingLoss", "parallel.pipeline=2", "--gpus-per-node", "4"]
    status, written = fresh_process.run(errors_of, arguments)
    assert status == 2
    line = next(n for n, text in enumerate(CHOOSES.read_text().splitlines(), 1) if "nonzero()" in text)
    assert "phase train cannot be run on fake GPUs as rank 2 (last stage): RuntimeError at " in written
    assert f"{CHOOSES}:{line}: aten::nonzero" in written and "--closed-forms" in written
    assert fresh_process.run(errors_of, [*arguments, "--closed-forms"])[0] == 0


def test_a_checkpoint_of_another_model_is_refused(tmp_path, capfd):
    (tmp_path / "partial").mkdir()
    publish(tmp_path / "partial", tmp_path / "saved", {"model": asdict(ModelConfig())})
    arguments = [*SMALL, "--closed-forms", f"init_from={tmp_path}/saved"]
    assert main(arguments) == 2
    assert "holds another model" in (written := capfd.readouterr().err) and "model=init_from" in written
    assert main([*(word for word in arguments if not word.startswith("model")), "model=init_from"]) == 0


@pytest.mark.change
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "h300"], "--gpu h300"),
        (["plan.network=pigeon"], "plan.network=pigeon"),
        (["--gpus-per-node", "0"], "--gpus-per-node 0: must be at least 1"),
        (["--nodes", "4096"], "a plan has at most 16384"),
        (["parallel.tensor=3"], "does not divide the world size 8"),
        (["parallel.tensor=8"], "must divide model.num_attention_heads"),
        (["plan.prompt_tokens=1000"], "plan.prompt_tokens=1000 leaves no response tokens"),
        (["plan.prompt_tokens=100", "plan.response_tokens=100"], "exceeds model.max_sequence_length=128"),
        (
            ["train.micro_batch_tokens=16", "plan.prompt_tokens=64"],
            "train.micro_batch_tokens=16 is less than 1 sequence",
        ),
        (["model.vocab_size=null", "tokenizer.path=nowhere"], "set model.vocab_size"),
        (["--stage", "sfft"], "--stage sfft"),
        (["--search", "--top", "0"], "--top 0: must be at least 1"),
        (["--search", "--top", "-2"], "--top -2: must be at least 1"),
        (["--search", "--verify", "-1"], "--verify -1: must be at least 1; --closed-forms runs none"),
        (["--picture", "x.pdf"], "--picture x.pdf: the picture is a PNG"),
        (["--picture", "not/there/x.png"], "--picture not/there/x.png cannot be written"),
        (["--search", "--picture", "x.png"], "plan that layout without --search"),
    ],
)
def test_bad_input_is_answered(arguments, message, capfd):
    assert main([*SMALL, *arguments]) == 2
    assert message in capfd.readouterr().err


def test_the_tables_of_hardware_are_up_to_date():
    text = generate_plan.PAGE.read_text()
    assert generate_plan.page(text) == text, "run `python docs/generate_plan.py`"
