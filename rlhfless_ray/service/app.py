"""The HTTP routes of the remote training interface. A call that works returns a promise at once; `retrieve_future` waits for it."""

from __future__ import annotations

import asyncio
import secrets
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.door.http import HttpError, read_body, read_json
from rlhfless_ray.service.requests import Job, QueueFull
from rlhfless_ray.service.tenant import ID, KINDS, Sampling, ServedModel, Tenant, failure
from rlhfless_ray.service.wire import PROTOBUF, ClientMistake, read_passes
from rlhfless_ray.service.work import AdamStep, passes_of
from rlhfless_ray.types import Request

MAX_BODY_BYTES = 64 * 2**20
POLL_S = 20.0  # the client's own limit of a call is 45 s
MAX_SAMPLES = 1024  # of one request
REQUIRED = object()

Reply = JsonObject | Response
Handler = Callable[[Tenant, JsonObject, Mapping[str, str]], Reply]


def read(body: JsonObject, name: str, kind: type | tuple[type, ...], default: Any = REQUIRED, where: str = "") -> Any:
    """Return a field of a JSON body; null is like a field that is not there. Raises ClientMistake."""
    value = body.get(name)
    if value is None:
        if default is REQUIRED:
            raise ClientMistake(f"{where}{name}: is missing")
        return default
    kinds = (int, float) if kind is float else kind
    if not isinstance(value, kinds) or (isinstance(value, bool) and kind is not bool):
        raise ClientMistake(f"{where}{name}: has the wrong type ({type(value).__name__})")
    return value


class Service:
    """The routes, for tenants by key."""

    def __init__(self, tenants: Mapping[str, Tenant], bases: Mapping[str, ServedModel]) -> None:
        self.tenants, self.bases = tenants, bases

    def app(self) -> Starlette:
        posts: dict[str, Handler] = {
            "client/config": lambda *_: {"fwdbwd_max_chunk_len": 1024},
            "create_session": lambda *_: {"session_id": uuid.uuid4().hex, "type": "create_session"},
            "session_heartbeat": lambda *_: {"type": "session_heartbeat"},
            "sessions/{session}/finish": lambda *_: {},
            "telemetry": lambda *_: {"status": "accepted"},
            "create_model": self.create_model,
            "unload_model": self.unload_model,
            "get_info": self.get_info,
            "optim_step": self.optim_step,
            "save_weights": self.save_weights,
            "load_weights": self.load_weights,
            "save_weights_for_sampler": self.save_weights_for_sampler,
            "weights_info": self.weights_info,
            "create_sampling_session": self.create_sampling_session,
            "asample": self.asample,
        }
        gets: dict[str, Handler] = {
            "get_server_capabilities": self.capabilities,
            "training_runs/{model}/checkpoints": self.checkpoints,
            "checkpoints": self.checkpoints,
            "bill": lambda tenant, *_: tenant.bill(),
        }
        routes = [Route(f"/api/v1/{path}", self._endpoint(handler), methods=["POST"]) for path, handler in posts.items()]
        routes += [Route(f"/api/v1/{path}", self._endpoint(handler), methods=["GET"]) for path, handler in gets.items()]
        routes += [
            Route("/api/v1/healthz", lambda _: JSONResponse({"status": "ok"})),
            Route("/api/v1/forward_backward", self._guarded(self._forward_backward), methods=["POST"]),
            Route("/api/v1/retrieve_future", self._guarded(self._retrieve), methods=["POST"]),
            Route("/api/v1/training_runs/{model}/checkpoints/{kind}/{name}", self._endpoint(self.delete), methods=["DELETE"]),
        ]
        return Starlette(routes=routes)

    # ---- HTTP -------------------------------------------------------------------------------------------------

    def _guarded(self, handler: Callable[[Tenant, HttpRequest], Awaitable[Response]]) -> Callable[[HttpRequest], Awaitable[Response]]:
        """Check the key, and answer mistakes in a sentence."""

        async def endpoint(request: HttpRequest) -> Response:
            given = request.headers.get("x-api-key", "").encode()
            tenant = next((one for key, one in self.tenants.items() if secrets.compare_digest(key.encode(), given)), None)
            if tenant is None:
                return JSONResponse({"error": "X-API-Key: unknown key", "category": "user"}, 401)
            try:
                return await handler(tenant, request)
            except HttpError as error:
                return JSONResponse({"error": str(error), "category": "user"}, error.status)
            except ClientMistake as error:
                return JSONResponse({"detail": str(error), **failure(error)}, 422)
            except QueueFull:
                return JSONResponse({"error": "too many open requests: retrieve some first", "category": "user"}, 429)

        return endpoint

    def _endpoint(self, handler: Handler) -> Callable[[HttpRequest], Awaitable[Response]]:
        async def answer(tenant: Tenant, request: HttpRequest) -> Response:
            content = await read_body(request, MAX_BODY_BYTES)
            reply = handler(tenant, read_json(content) if content else {}, request.path_params)
            return reply if isinstance(reply, Response) else JSONResponse(reply)

        return self._guarded(answer)

    async def _forward_backward(self, tenant: Tenant, request: HttpRequest) -> Response:
        asked = read_passes(await read_body(request, MAX_BODY_BYTES))
        base = tenant.model(asked.model_id).base
        item = passes_of(asked, base.vocabulary, base.context)
        return JSONResponse(ordered(tenant, asked.model_id, asked.seq_id, lambda: tenant.passes(asked.model_id, item)))

    async def _retrieve(self, tenant: Tenant, request: HttpRequest) -> Response:
        id = read(read_json(await read_body(request, MAX_BODY_BYTES)), "request_id", str)
        job = tenant.requests.known.get(id)
        if job is None:
            return JSONResponse({"error": f"request_id: {id!r} is unknown or too old", "category": "user"}, 410)
        try:
            result = await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(job.future)), POLL_S)
        except TimeoutError:
            state = "paused_capacity" if tenant.leases.pending else "active"
            return JSONResponse({"type": "try_again", "request_id": id, "queue_state": state}, 408)
        except Exception as error:  # the request's own failure is its result
            return JSONResponse(failure(error))
        return Response(result, media_type=PROTOBUF) if isinstance(result, bytes) else JSONResponse(result)

    # ---- models -----------------------------------------------------------------------------------------------

    def capabilities(self, tenant: Tenant, *_: object) -> Reply:
        of = {"trainable": True, "sampleable": True}
        return {"supported_models": [{"model_name": x.name, "max_context_length": x.context, **of} for x in self.bases.values()]}

    def base(self, name: str) -> ServedModel:
        if name not in self.bases:
            raise ClientMistake(f"base_model: {name!r} is not served, only {', '.join(self.bases)}")
        return self.bases[name]

    def create_model(self, tenant: Tenant, body: JsonObject, *_: object) -> Reply:
        base, id = self.base(read(body, "base_model", str)), model_id(body)
        lora = read(body, "lora_config", dict, {})
        rank, seed = read(lora, "rank", int, 32 if lora else 0, "lora_config."), read(lora, "seed", int, 0, "lora_config.")
        if lora and rank < 1:
            raise ClientMistake(f"lora_config.rank: must be at least 1, not {rank}")
        for part in ("train_mlp", "train_attn"):
            if not read(lora, part, bool, True, "lora_config."):
                raise ClientMistake(f"lora_config.{part}: adapters of all linear layers are trained, so it must be true")
        kind = read(read(body, "optimizer_config", dict, {}), "type", str, "adamw")
        if kind not in ("adam", "adamw"):
            raise ClientMistake(f"optimizer_config.type: only adamw is served, not {kind!r}")

        def create() -> JsonObject:
            tenant.create(id, base, rank, seed % 2**31)
            return {"model_id": id, "type": "create_model"}

        return promise(tenant, f"{id}:0", id, create)

    def unload_model(self, tenant: Tenant, body: JsonObject, *_: object) -> Reply:
        id = tenant.model(read(body, "model_id", str)).id
        return promise(tenant, f"{id}:unload", id, lambda: tenant.unload(id))

    def get_info(self, tenant: Tenant, body: JsonObject, *_: object) -> Reply:
        model = tenant.model(read(body, "model_id", str))
        name = model.base.name
        data = {"arch": model.base.folder.name, "model_name": name, "tokenizer_id": str(model.base.folder)}
        lora = {"is_lora": model.lora_rank > 0, "lora_rank": model.lora_rank or None}
        return {"model_id": model.id, "model_data": data, "model_name": name, "type": "get_info", **lora}

    def optim_step(self, tenant: Tenant, body: JsonObject, *_: object) -> Reply:
        given, where = read(body, "adam_params", dict, read(body, "optim_params", dict, {})), "adam_params."
        defaults = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 0.0}
        numbers = {name: float(read(given, name, float, default, where)) for name, default in defaults.items()}
        for name, value in numbers.items():
            if not 0 <= value < (1 if name.startswith("beta") else np.inf):
                raise ClientMistake(f"{where}{name}: {value:g} is out of range")
        id = tenant.model(read(body, "model_id", str)).id
        return ordered(tenant, id, read(body, "seq_id", int), lambda: tenant.step(id, AdamStep(**numbers)))

    # ---- checkpoints ------------------------------------------------------------------------------------------

    def save_weights(self, tenant: Tenant, body: JsonObject, *_: object) -> Reply:
        id, number = tenant.model(read(body, "model_id", str)).id, read(body, "seq_id", int)
        name = read(body, "path", str, f"{number:06d}")
        tenant.checkpoint_folder(f"tinker://{id}/weights/{name}")
        overwrite = read(body, "overwrite", bool, False)
        return ordered(tenant, id, number, lambda: tenant.save(id, name, overwrite=overwrite))

    def load_weights(self, tenant: Tenant, body: JsonObject, *_: object) -> Reply:
        path, optimizer = read(body, "path", str), read(body, "optimizer", bool)
        tenant.saved(path)
        if read(body, "model_id", str, ""):
            id = tenant.model(body["model_id"]).id
            return ordered(tenant, id, read(body, "seq_id", int), lambda: tenant.load(id, path, optimizer))
        new, base = model_id(body), read(body, "base_model", str, "")
        return promise(tenant, f"{new}:0", new, lambda: tenant.load(new, path, optimizer, base))

    def save_weights_for_sampler(self, tenant: Tenant, body: JsonObject, *_: object) -> Reply:
        id, number = tenant.model(read(body, "model_id", str)).id, read(body, "seq_id", int)
        name, session = read(body, "path", str, ""), read(body, "sampling_session_seq_id", int, -1)
        if name:
            tenant.checkpoint_folder(f"tinker://{id}/sampler_weights/{name}")
        elif session < 0:
            raise ClientMistake("path: name the weights, or give sampling_session_seq_id")
        of_session = f"{id}-sampler-{session}-{number}" if session >= 0 else ""
        return ordered(tenant, id, number, lambda: tenant.save_for_sampler(id, name, of_session))

    def weights_info(self, tenant: Tenant, body: JsonObject, *_: object) -> Reply:
        about = tenant.saved(read(body, "tinker_path", str, None) or read(body, "path", str))
        return {"base_model": about["base_model"], "is_lora": about["lora_rank"] > 0, "lora_rank": about["lora_rank"] or None}

    def checkpoints(self, tenant: Tenant, body: JsonObject, path: Mapping[str, str]) -> Reply:
        found = []
        for about in tenant.checkpoints(path.get("model", "")):
            kind, name = about["path"].split("/")[-2:]
            when = str(np.datetime64(int(about["time_s"]), "s")) + "Z"
            checkpoint = {"checkpoint_id": f"{kind}/{name}", "checkpoint_type": KINDS[kind], "time": when, "tinker_path": about["path"]}
            found.append(checkpoint)
        return {"checkpoints": found}

    def delete(self, tenant: Tenant, body: JsonObject, path: Mapping[str, str]) -> Reply:
        tenant.delete(f"tinker://{path['model']}/{path['kind']}/{path['name']}")
        return {}

    # ---- sampling ---------------------------------------------------------------------------------------------

    def create_sampling_session(self, tenant: Tenant, body: JsonObject, *_: object) -> Reply:
        where = self._weights(tenant, body)
        id = f"{read(body, 'session_id', str)}:sample:{read(body, 'sampling_session_seq_id', int)}"
        tenant.samplers[id] = where
        return {"sampling_session_id": id, "type": "create_sampling_session"}

    def _weights(self, tenant: Tenant, body: JsonObject) -> str:
        """Return the path of weights, or the name of a base model."""
        if path := read(body, "model_path", str, ""):
            tenant.saved(path)
            return path
        return self.base(read(body, "base_model", str)).name

    def asample(self, tenant: Tenant, body: JsonObject, *_: object) -> Reply:
        if session := read(body, "sampling_session_id", str, ""):
            if session not in tenant.samplers:
                raise ClientMistake(f"sampling_session_id: {session!r} is none of yours, or the server was started again since")
            where, id = tenant.samplers[session], f"{session}:{read(body, 'seq_id', int)}"
        else:
            where, id = self._weights(tenant, body), uuid.uuid4().hex
        for name in ("prompt_logprobs", "topk_prompt_logprobs", "topk_sample_logprobs", "target_prompt_logprobs", "prompt_alt_tokens_k"):
            if body.get(name):
                raise ClientMistake(f"{name}: is not served; `forward` returns the log-probabilities of given tokens")
        count = read(body, "num_samples", int, 1)
        if not 1 <= count <= MAX_SAMPLES:
            raise ClientMistake(f"num_samples: must be from 1 to {MAX_SAMPLES}, not {count}")
        base = self.bases[where] if where in self.bases else self._base_of(tenant, where)
        content = Sampling(sampling_request(body, base), count)
        job = Job(id, lambda jobs: tenant.sample(where, jobs), content, batch=where)
        return {"request_id": tenant.requests.submit(job).id, "sample_sequence_ids": [f"{id}:{number}" for number in range(count)]}

    def _base_of(self, tenant: Tenant, path: str) -> ServedModel:
        id = path.removeprefix("tinker://").split("/")[0]
        return tenant.models[id].base if id in tenant.models else self.base(tenant.saved(path)["base_model"])


def model_id(body: JsonObject) -> str:
    session = read(body, "session_id", str)
    if not ID.fullmatch(session):
        raise ClientMistake("session_id: must be letters, digits and any of _.:-")
    return f"{session}:train:{read(body, 'model_seq_id', int)}"


def promise(tenant: Tenant, id: str, model: str, run: Callable[[], Any], number: int | None = None) -> JsonObject:
    """Submit work whose result is that of `run`, and return its promise."""
    job = Job(id, lambda jobs: jobs[0].future.set_result(run()))
    return {"request_id": tenant.requests.submit(job, model, number).id, "model_id": model}


def ordered(tenant: Tenant, model: str, number: int, run: Callable[[], Any]) -> JsonObject:
    """Submit work as request `number` of its model."""
    return promise(tenant, f"{model}:{number}", model, run, number)


def sampling_request(body: JsonObject, base: ServedModel) -> Request:
    """Read the prompt and the sampling parameters. Raises ClientMistake."""
    chunks = read(read(body, "prompt", dict), "chunks", list, where="prompt.")
    if any(not isinstance(chunk, dict) or chunk.get("type", "encoded_text") != "encoded_text" for chunk in chunks):
        raise ClientMistake("prompt.chunks: only encoded_text is served")
    tokens = [token for chunk in chunks for token in read(chunk, "tokens", list, where="prompt.chunks.")]
    if not tokens or any(type(token) is not int or not 0 <= token < base.vocabulary for token in tokens):
        raise ClientMistake(f"prompt.chunks.tokens: must be token ids from 0 to {base.vocabulary - 1}, at least one")
    given, where = read(body, "sampling_params", dict, {}), "sampling_params."
    room = base.context - len(tokens)
    longest = read(given, "max_tokens", int, room, where)
    if not 1 <= longest <= room:
        raise ClientMistake(f"{where}max_tokens: must be from 1 to {room}, the rest of the context, not {longest}")
    stop = read(given, "stop", (str, list), None, where)
    if stop == []:
        raise ClientMistake(f"{where}stop: an end-of-sequence token always ends a response, so it cannot be empty")
    words = [stop] if isinstance(stop, str) else stop or []
    if not (all(type(one) is str for one in words) or all(type(one) is int for one in words)):
        raise ClientMistake(f"{where}stop: must be texts or token ids")
    top_k, seed = read(given, "top_k", int, -1, where), read(given, "seed", int, None, where)
    return Request(
        key=0,
        token_ids=tuple(tokens),
        seed=secrets.randbits(62) if seed is None else seed % 2**62,
        max_tokens=longest,
        temperature=float(read(given, "temperature", float, 1.0, where)),
        stop=tuple(one for one in words if type(one) is str),
        stop_token_ids=tuple(one for one in words if type(one) is int),
        top_p=float(read(given, "top_p", float, 1.0, where)),
        top_k=max(0, top_k),
    )
