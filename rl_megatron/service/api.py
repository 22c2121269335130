"""`Api`: the verbs of the training API. Each turns a request into an operation, or answers it at once.

The API is that of the Tinker SDK: paths, bodies and answers are those that its clients send and expect.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rl_megatron import log
from rl_megatron.checkpoint.directory import REPLACED
from rl_megatron.config.peft import ALL_LINEAR, LoraConfig
from rl_megatron.generation.interfaces import Sampling
from rl_megatron.service import requests
from rl_megatron.service.datums import MOST_TARGETS, check_data
from rl_megatron.service.journal import Record
from rl_megatron.service.losses import choose_loss
from rl_megatron.service.operations import ComputeLoss, Create, Fail, Load, Operation, Sample, Save, Step, Unload, Work
from rl_megatron.service.registry import Accepted, Registry, Run, Session
from rl_megatron.service.requests import Refused, read_body
from rl_megatron.service.sampling import SamplePrompt
from rl_megatron.service.saved_weights import DELETED, is_gone, list_saved, read_saved, read_settings
from rl_megatron.service.stops import StopRules
from rl_megatron.service.wire import read_head, read_loss_request

NUMBERED = ("forward_backward", "optim_step", "save_weights", "save_weights_for_sampler")
"""The verbs whose requests have a number in their run, by which they are executed in order."""
_PATH = re.compile(r"tinker://([A-Za-z0-9:_-]+)/(weights|sampler_weights)/([A-Za-z0-9][A-Za-z0-9._-]*)")
_ATTENTION = r".*(self_attn|attention|attn|linear_attn)\..*"
_BYTES_OF_A_SESSION = 65_536
_ALPHA = 32.0  # the alpha of every adapter
_SECONDS_WITHOUT_NAME = 86400  # how long weights for sampling that have no name are kept


@dataclass(frozen=True)
class Base:
    """The base model of a service.

    Attributes:
        name: The name by which clients ask for it.
        tokenizer: The name or directory of its tokenizer, for clients; None if it is not known.
        vocab_size: The size of its vocabulary.
        longest: The maximum number of tokens of a sequence.
        stops: How completions end.
    """

    name: str
    tokenizer: str | None
    vocab_size: int
    longest: int
    stops: StopRules


class Api:
    """The verbs, for requests whose key was accepted. All methods run on the event loop of rank 0."""

    def __init__(self, registry: Registry, base: Base, saved: Path, seed: int):
        """Answer requests for `base`. Weights are saved in the directory `saved`; `seed` is the server's."""
        self.registry, self.base, self._saved, self._seed = registry, base, saved, seed

    # --- sessions ---

    async def create_session(self, owner: str, raw: bytes) -> dict[str, Any]:
        if len(raw) > _BYTES_OF_A_SESSION:
            raise Refused(f"a session's metadata must have at most {_BYTES_OF_A_SESSION} bytes", 413)
        body = read_body(requests.CreateSession, raw)
        name = f"session-{secrets.token_hex(8)}"
        details = {"display_name": body.display_name, "user_metadata": body.user_metadata, "tags": body.tags}
        await self.registry.write(Record({"kind": "session", "id": name, "owner": owner, "details": details}))
        self.registry.sessions[name] = Session(owner, details, time.time())
        return {"type": "create_session", "session_id": name}

    def heartbeat(self, owner: str, raw: bytes) -> dict[str, Any]:
        session = self._find_session(owner, read_body(requests.SessionOnly, raw).session_id)
        session.heard = time.time()
        return {"type": "session_heartbeat"}

    def _find_session(self, owner: str, name: str) -> Session:
        session = self.registry.sessions.get(name)
        if session is None or session.owner != owner:
            raise Refused(f"there is no session {name}", 404)
        return session

    # --- training ---

    async def create_model(self, owner: str, raw: bytes) -> dict[str, Any]:
        body = read_body(requests.CreateModel, raw)
        self._find_session(owner, body.session_id)
        return await self._accept(owner, "create_model", raw, f"{body.session_id}:train:{body.model_seq_id}", 0)

    async def accept_numbered(self, verb: str, owner: str, raw: bytes) -> dict[str, Any]:
        """Acknowledge a numbered request of a run; one for a verb that is not there fails in its turn."""
        body = read_head(raw) if verb == "forward_backward" else read_body(requests.Numbered, raw)
        refusal = None if verb in NUMBERED else f"{verb} is not a verb of this server"
        return await self._accept(owner, verb, raw, body.model_id, body.seq_id, refusal)

    async def load_weights(self, owner: str, raw: bytes) -> dict[str, Any]:
        head = read_body(requests.LoadHead, raw)
        if head.model_id is not None and head.seq_id is not None:
            refusal = None
            try:
                self._find_saved(owner, read_body(requests.LoadWeights, raw).path)
            except (ValueError, Refused) as error:
                refusal = str(error)
            return await self._accept(owner, "load_weights", raw, head.model_id, head.seq_id, refusal)
        if head.session_id is None or head.model_seq_id is None:
            raise Refused("load_weights needs model_id and seq_id, or session_id and model_seq_id for a new run")
        self._find_session(owner, head.session_id)
        self._find_saved(owner, read_body(requests.LoadWeights, raw).path)
        return await self._accept(owner, "load_weights", raw, f"{head.session_id}:train:{head.model_seq_id}", 0)

    async def unload_model(self, owner: str, raw: bytes) -> dict[str, Any]:
        run = read_body(requests.ModelOnly, raw).model_id
        if not self._has_sent(owner, f"{run}:unload"):
            self._find_run(owner, run)
        return await self._unload(owner, run, raw)

    async def unload_silent_runs(self, since: float) -> None:
        """Unload the runs of sessions that were not heard of since a time, and that wait for nothing."""
        for name, run in list(self.registry.runs.items()):
            session = self.registry.sessions.get(run.session)
            heard = max(run.last_time, 0.0 if session is None else session.heard)
            if heard < since and not self.registry.has_unfinished(name):
                log.LOGGER.info("the run %s is unloaded: its session was not heard of for a long time", name)
                await self._unload(run.owner, name, b"")

    async def _unload(self, owner: str, run: str, raw: bytes) -> dict[str, Any]:
        name = f"{run}:unload"
        header = {"kind": "request", "request": "unload_model", "id": name, "owner": owner, "run": run}
        record = Record({**header, "time": time.time()}, raw)
        if await self.registry.accept(owner, record):
            self.add(record, self.translate(record))
        return {"request_id": name, "model_id": run}

    def _find_run(self, owner: str, name: str) -> Run:
        run = self.registry.runs.get(name)
        if run is None or run.owner != owner:
            raise Refused(f"there is no training run {name}", 404)
        return run

    async def _accept(
        self, owner: str, kind: str, raw: bytes, run: str, seq: int, refusal: str | None = None
    ) -> dict[str, Any]:
        """Acknowledge a request of a run, after it is in the journal. A request that came before is not repeated.

        With a `refusal`, the request fails with this message in its turn.
        """
        name = f"{run}:{seq}"
        if not self._has_sent(owner, name):
            if seq and seq < self._find_run(owner, run).next_seq:
                raise Refused(f"the run {run} has had its request {seq} long ago", 410)
            if not seq and run in self.registry.runs:
                raise Refused(f"there is a run {run} already", 409)
        header = {
            "kind": "request", "request": kind, "id": name, "owner": owner, "run": run, "seq": seq, "time": time.time(),
        }  # fmt: skip
        if refusal is not None:
            header["refusal"] = refusal
        record = Record(header, raw)
        accepted = self.translate(record)
        if await self.registry.accept(owner, record):
            self.add(record, accepted)
        return {"request_id": name, "model_id": run}

    def _has_sent(self, owner: str, name: str) -> bool:
        """Return whether a key has sent a request before."""
        future = self.registry.futures.get(name)
        return future is not None and future.owner == owner

    def accept_again(self, record: Record) -> None:
        """Accept a request from the journal again."""
        self.add(record, self.translate(record, must=True))

    def add(self, record: Record, accepted: Accepted) -> None:
        """Append an accepted request to its queue, and make its run if it begins one."""
        header, work = record.header, accepted.operation.work
        if isinstance(work, Create):
            settings = {"peft": _as_json(work.config), "base_model": self.base.name, "time": header["time"]}
            session = header["run"].partition(":train:")[0]
            self.registry.runs[header["run"]] = Run(header["owner"], session, settings, last_time=header["time"])
        if (sampler := _find_new_sampler(header, record.body)) is not None and isinstance(work, Save):
            session = header["run"].partition(":train:")[0]
            self.registry.samplers[sampler] = (header["owner"], session, work.path)
        self.registry.add(header["owner"], accepted, header.get("seq") or None)

    def translate(self, record: Record, must: bool = False) -> Accepted:
        """Return the operation of a request's record, the same whenever it is read.

        A numbered request of a run that cannot be executed becomes an operation that fails, so that it has its turn.
        Other requests raise ValueError or Refused, unless they `must` become an operation: they were accepted before.
        """
        header, raw = record.header, record.body
        name, run = header["id"], header.get("run")
        translators: Mapping[str, Callable[[Mapping[str, Any], bytes], Work]] = {
            "create_model": self._translate_create,
            "forward_backward": self._translate_loss,
            "optim_step": lambda header, raw: Step(read_body(requests.OptimStep, raw).adam_params.params()),
            "save_weights": self._translate_save,
            "save_weights_for_sampler": self._translate_save_for_sampler,
            "load_weights": self._translate_load,
            "unload_model": lambda header, raw: Unload(),
            "asample": self._translate_sample,
        }
        try:
            if "refusal" in header:
                raise Refused(header["refusal"])
            work = translators[header["request"]](header, raw)
        except (ValueError, Refused) as error:
            if not header.get("seq") and not must:
                raise
            work = Fail(str(error))
        return Accepted(Operation(name, run, work, self._build_answer(header, raw, work)), record)

    def _build_answer(self, header: Mapping[str, Any], raw: bytes, work: Work) -> dict[str, Any]:
        """Return what is known of a request's answer before it is executed."""
        kind, run = header["request"], header.get("run")
        if isinstance(work, Fail):
            return {}
        if isinstance(work, Save):
            if (sampler := _find_new_sampler(header, raw)) is not None:
                return {"type": kind, "sampling_session_id": sampler}
            return {"type": kind, "path": "tinker://" + "/".join(Path(work.path).parts[-3:])}
        if kind == "load_weights":
            return {"type": kind, "model_id": run, "path": read_body(requests.LoadWeights, raw).path}
        return {"type": kind, "model_id": run} if isinstance(work, (Create, Unload)) else {}

    def _translate_create(self, header: Mapping[str, Any], raw: bytes) -> Create:
        body = read_body(requests.CreateModel, raw)
        self._require_base(body.base_model)
        settings = body.lora_config
        if settings is None:
            raise Refused("create_model needs lora_config: this server trains adapters, not whole models")
        if not (settings.train_attn or settings.train_mlp):
            raise Refused("lora_config: train_attn or train_mlp must be true; the unembedding has no adapter here")
        seed = self._derive_seed(header["run"]) if settings.seed is None else settings.seed % 2**63
        return Create(_build_lora(settings.rank, settings.train_attn, settings.train_mlp), seed)

    def _require_base(self, name: str) -> None:
        if name != self.base.name:
            raise Refused(f"this server has the base model {self.base.name}, not {name}")

    def _derive_seed(self, name: str) -> int:
        digest = hashlib.blake2b(f"{self._seed}/{name}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1

    def _translate_loss(self, header: Mapping[str, Any], raw: bytes) -> ComputeLoss:
        body = read_loss_request(raw)
        loss = choose_loss(body.loss_fn, body.options)
        check_data(body.data, loss, self.base.vocab_size, self.base.longest)
        return ComputeLoss(body.data, body.loss_fn, body.options, not body.forward_only)

    def _translate_save(self, header: Mapping[str, Any], raw: bytes) -> Save:
        body = read_body(requests.SaveWeights, raw)
        return self._build_save(header, "weights", body, body.overwrite)

    def _translate_save_for_sampler(self, header: Mapping[str, Any], raw: bytes) -> Save:
        return self._build_save(header, "sampler_weights", read_body(requests.SaveForSampler, raw), False)

    def _build_save(self, header: Mapping[str, Any], kind: str, body: requests.SaveBody, overwrite: bool) -> Save:
        name, ttl = body.path, body.ttl_seconds
        if ttl is None and name is None and kind == "sampler_weights":
            ttl = _SECONDS_WITHOUT_NAME  # a loop makes such weights in each step
        name = name or f"{header['seq']:06d}"
        if name.endswith(REPLACED):
            raise Refused(f"path={name!r}: weights must not have a name that ends with {REPLACED}")
        manifest = {
            "owner": header["owner"], "kind": kind, "time": header["time"], "user_metadata": body.user_metadata,
            "request": header["id"],
            "base_model": self.base.name, "expires": None if ttl is None else header["time"] + ttl,
        }  # fmt: skip
        return Save(str(self._saved / header["run"] / kind / name), manifest, kind == "weights", overwrite)

    def _translate_load(self, header: Mapping[str, Any], raw: bytes) -> Create | Load:
        body = read_body(requests.LoadWeights, raw)
        path = self._locate(body.path)
        if header["seq"]:
            return Load(str(path), body.optimizer)
        config = read_settings(read_saved(path))
        return Create(config, self._derive_seed(header["run"]), str(path), body.optimizer)

    # --- saved weights ---

    def _locate(self, path: str) -> Path:
        match = _PATH.fullmatch(path)
        if match is None:
            raise Refused(f"{path[:200]} is not a path of saved weights, tinker://RUN/weights/NAME")
        return self._saved / match[1] / match[2] / match[3]

    def _find_saved(self, owner: str, path: str) -> dict[str, Any]:
        """Return the manifest of saved weights that a key owns."""
        directory = self._locate(path)
        manifest = read_saved(directory) if directory.is_dir() else None
        if manifest is None or manifest["owner"] != owner or is_gone(directory, manifest):
            raise Refused(f"there are no weights {path}", 404)
        if manifest["base_model"] != self.base.name:
            raise Refused(f"{path} has the base model {manifest['base_model']}, not {self.base.name}")
        return manifest

    def weights_info(self, owner: str, raw: bytes) -> dict[str, Any]:
        manifest = self._find_saved(owner, read_body(requests.WeightsPath, raw).tinker_path)
        return {"base_model": manifest["base_model"], "is_lora": True, **_describe_lora(read_settings(manifest))}

    def list_checkpoints(self, owner: str, run: str | None = None) -> list[dict[str, Any]]:
        """Return the saved weights of a key, of one run or of all, the newest first."""
        pattern = f"{run or '*'}/*/*"
        if run is not None and not re.fullmatch(r"[A-Za-z0-9:_-]+", run):
            raise Refused(f"there is no training run {run[:200]}", 404)
        checkpoints = []
        for directory in list_saved(self._saved, pattern):
            manifest = read_saved(directory)
            if manifest["owner"] == owner and not is_gone(directory, manifest):
                checkpoints.append(_describe_saved(directory, manifest))
        return sorted(checkpoints, key=lambda one: one["time"], reverse=True)

    def delete_checkpoint(self, owner: str, run: str, checkpoint: str) -> None:
        """Delete saved weights. Their files go with the next kept state, because operations may need them till then."""
        path = f"tinker://{run}/{checkpoint}"
        self._find_saved(owner, path)
        (self._locate(path) / DELETED).touch()

    # --- sampling ---

    async def create_sampling_session(self, owner: str, raw: bytes) -> dict[str, Any]:
        body = read_body(requests.CreateSamplingSession, raw)
        self._find_session(owner, body.session_id)
        name = f"{body.session_id}:sample:{body.sampling_session_seq_id}"
        answer = {"type": "create_sampling_session", "sampling_session_id": name}
        if name in self.registry.samplers:
            return answer
        path = self._choose_weights(owner, body.model_path, body.base_model)
        await self.registry.write(
            Record({"kind": "sampler", "id": name, "owner": owner, "session": body.session_id, "path": path})
        )
        self.registry.samplers[name] = (owner, body.session_id, path)
        return answer

    def _choose_weights(self, owner: str, path: str | None, base: str | None) -> str | None:
        """Return the directory of weights, or None for the base model."""
        if path is None:
            self._require_base(str(base))
            return None
        manifest = self._find_saved(owner, path)
        if base is not None and base != manifest["base_model"]:
            raise Refused(f"{path} has the base model {manifest['base_model']}, not {base}")
        return str(self._locate(path))

    def find_sampler(self, owner: str, name: str) -> str | None:
        """Return the directory of a sampler's weights, or None if it samples from the base model."""
        sampler = self.registry.samplers.get(name)
        if sampler is None or sampler[0] != owner:
            raise Refused(f"there is no sampler {name}", 404)
        return sampler[2]

    async def sample(self, owner: str, raw: bytes) -> dict[str, Any]:
        body = read_body(requests.Sample, raw)
        if body.sampling_session_id is not None:
            path = self.find_sampler(owner, body.sampling_session_id)
            if body.seq_id is None:
                raise Refused("a sample of a sampling session needs seq_id")
            name = f"{body.sampling_session_id}:{body.seq_id}"
        else:
            path = self._choose_weights(owner, body.model_path, body.base_model)
            name = f"sample-{secrets.token_hex(8)}"
        sequences = [f"{name}:{index}" for index in range(body.num_samples)]
        answer = {"request_id": name, "sample_sequence_ids": sequences}
        header = {
            "kind": "request", "request": "asample", "id": name, "owner": owner, "path": path, "time": time.time(),
        }  # fmt: skip
        record = Record(header, raw)
        accepted = self.translate(record)
        if await self.registry.accept(owner, record):
            self.add(record, accepted)
        return answer

    def _translate_sample(self, header: Mapping[str, Any], raw: bytes) -> Sample:
        body = read_body(requests.Sample, raw)
        tokens, params = body.prompt.tokens, body.sampling_params
        if not tokens or max(tokens) >= self.base.vocab_size:
            raise Refused(f"the prompt must have tokens, and tokens are 0 … {self.base.vocab_size - 1}")
        left = self.base.longest - len(tokens)
        most = left if params.max_tokens is None else params.max_tokens
        if most < 1 or most > left:
            raise Refused(
                f"the prompt has {len(tokens)} tokens and max_tokens={most}; together they must not exceed "
                f"{self.base.longest}"
            )
        if body.num_samples * most * max(1, body.topk_sample_logprobs) > MOST_TARGETS:
            raise Refused(
                f"num_samples={body.num_samples} of max_tokens={most} with "
                f"topk_sample_logprobs={body.topk_sample_logprobs} are more than {MOST_TARGETS} values; ask for fewer"
            )
        stop_ids, stop_strings = self.base.stops.choose(params.stop)
        sampling = Sampling(
            most, params.temperature, max(params.top_k, 0), params.top_p, stop_ids, stop_strings
        )  # fmt: skip
        seed = self._derive_seed(header["id"]) if params.seed is None else params.seed % 2**63
        targets = None
        if body.target_prompt_logprobs is not None:
            targets = body.target_prompt_logprobs.to_array(len(tokens) - 1)
            if targets.size and targets.max() >= self.base.vocab_size:
                raise Refused(f"target_prompt_logprobs has a token that is not 0 … {self.base.vocab_size - 1}")
        prompt = SamplePrompt(
            header["id"], tokens, body.num_samples, sampling, seed, bool(body.prompt_logprobs),
            min(body.topk_prompt_logprobs, self.base.vocab_size), targets,
            min(body.topk_sample_logprobs, self.base.vocab_size), body.prompt_logprobs_last_n,
        )  # fmt: skip
        return Sample(header["path"], prompt)

    # --- information ---

    def get_info(self, owner: str, raw: bytes) -> dict[str, Any]:
        name = read_body(requests.ModelOnly, raw).model_id
        run = self._find_run(owner, name)
        data = {"model_name": self.base.name, "tokenizer_id": self.base.tokenizer}
        rank = run.settings["peft"]["r"]
        return {
            "type": "get_info", "model_id": name, "model_data": data, "is_lora": True, "lora_rank": rank,
            "model_name": self.base.name,
        }  # fmt: skip

    def get_capabilities(self) -> dict[str, Any]:
        model = {
            "model_name": self.base.name, "max_context_length": self.base.longest, "trainable": True,
            "sampleable": True,
        }  # fmt: skip
        return {"supported_models": [model]}

    def describe_run(self, owner: str, name: str) -> dict[str, Any]:
        """Return the training run as the API lists it."""
        run = self._find_run(owner, name)
        saved = self.list_checkpoints(owner, name)
        of_kind = {kind: [one for one in saved if one["checkpoint_type"] == kind] for kind in ("training", "sampler")}
        return {
            "training_run_id": name, "base_model": self.base.name, "model_owner": run.owner, "is_lora": True,
            "lora_rank": run.settings["peft"]["r"], "last_request_time": _format_time(run.last_time),
            "last_checkpoint": next(iter(of_kind["training"]), None),
            "last_sampler_checkpoint": next(iter(of_kind["sampler"]), None),
        }  # fmt: skip

    def describe_session(self, owner: str, name: str) -> dict[str, Any]:
        self._find_session(owner, name)
        return {
            "training_run_ids": [run for run, values in self.registry.runs.items() if values.session == name],
            "sampler_ids": [sampler for sampler, values in self.registry.samplers.items() if values[1] == name],
        }


def _find_new_sampler(header: Mapping[str, Any], raw: bytes) -> str | None:
    """Return the sampler that a request makes for weights without a name, or None if it makes none."""
    if header["request"] != "save_weights_for_sampler":
        return None
    try:
        body = read_body(requests.SaveForSampler, raw)
    except ValueError:  # the request fails in its turn
        return None
    if body.path is not None or body.sampling_session_seq_id is None:
        return None
    return f"{header['run'].partition(':train:')[0]}:sample:{body.sampling_session_seq_id}"


def _build_lora(rank: int, attention: bool, mlp: bool) -> LoraConfig:
    """Return the adapter that the API's flags describe: of attention, of MLPs and experts, or of both."""
    config = LoraConfig(r=rank, lora_alpha=_ALPHA)
    if attention and mlp:
        return config
    return replace(config, target_modules=_ATTENTION) if attention else replace(config, exclude_modules=_ATTENTION)


def _describe_lora(config: LoraConfig) -> dict[str, Any]:
    return {
        "lora_rank": config.r, "train_unembed": False, "train_attn": config.exclude_modules is None,
        "train_mlp": config.target_modules == ALL_LINEAR,
    }  # fmt: skip


def _describe_saved(directory: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    run, kind, name = directory.parts[-3:]
    return {
        "checkpoint_id": f"{kind}/{name}", "checkpoint_type": "training" if kind == "weights" else "sampler",
        "time": _format_time(manifest["time"]), "tinker_path": f"tinker://{run}/{kind}/{name}",
        "size_bytes": sum(entry["bytes"] for entry in manifest["files"].values()),
        "user_metadata": manifest["user_metadata"],
        "expires_at": None if manifest["expires"] is None else _format_time(manifest["expires"]),
    }  # fmt: skip


def _format_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _as_json(config: LoraConfig) -> dict[str, Any]:
    return json.loads(json.dumps(asdict(config)))
