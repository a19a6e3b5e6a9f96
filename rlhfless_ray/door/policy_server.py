"""The routes under which programs reach the policy. A bearer key names a session, whose requests become turns of one episode."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rlhfless_ray.agent.engine_api import Generate
from rlhfless_ray.agent.multi_turn_loop import SAMPLING_DEFAULTS, UNSUPPORTED, AgentError
from rlhfless_ray.agent.sampling_params import SamplingParams
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.door.answers import chat_answer, text_answer, token_answer
from rlhfless_ray.door.conversation import BadRequest, Turn, TurnTree, read_messages
from rlhfless_ray.door.http import HttpError, LoopbackServer, bearer_key, read_body, read_json
from rlhfless_ray.door.tool_calls import reply_message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MODEL = "policy"
MAX_TURNS = 512  # of a session; finding the branches takes a time that grows with their square
MAX_OPEN = 64  # requests of a session that are answered at the same time
COUNTS = ("max_tokens", "min_tokens", "n", "top_k")
RETRY_HEADER = "x-stainless-retry-count"  # of OpenAI's clients

Answer = Callable[["Session", JsonObject], Coroutine[Any, Any, Response]]


class Session:
    """One episode: what its program requests, and the policy's turns."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, given: SamplingParams, generate: Generate) -> None:
        """`given`: the recipe's sampling parameters, which requests may not change. `generate`: requests a turn of the policy."""
        self.tokenizer, self.conversation, self._given, self._generate = tokenizer, TurnTree(tokenizer), given, generate
        self._open: set[asyncio.Task[Response]] = set()
        self._by_digest: dict[bytes, asyncio.Task[Response]] = {}  # the newest answer to each body
        self._requests = 0

    async def answer(self, route: Answer, body: bytes, is_retry: bool) -> Response:
        """Answer a request. A client that repeats one because it has no answer gets the answer to the first one."""
        digest = hashlib.blake2b(body, digest_size=16).digest()
        task = self._by_digest.get(digest) if is_retry else None
        if task is None:
            if len(self._open) >= MAX_OPEN:
                raise HttpError(429, f"{MAX_OPEN} requests of this session are open already")
            if self._requests >= MAX_TURNS:
                raise HttpError(
                    400, f"this session has made {MAX_TURNS} requests, the most that an episode may make", code="too_many_turns"
                )
            self._requests += 1
            task = self._by_digest[digest] = asyncio.create_task(route(self, read_json(body)))
            self._open.add(task)
            task.add_done_callback(self._open.discard)
        await asyncio.wait([task])  # a client that goes away leaves the turn to one that comes back
        if task.cancelled():
            raise HttpError(410, "this session's episode is over")
        return task.result()

    def close(self) -> None:
        """Answer no further requests."""
        for task in self._open:
            task.cancel()

    async def turn(self, context: list[int], settings: JsonObject) -> Turn:
        """Request a turn of the policy. Raises HttpError for parameters that a session may not set."""
        params = self._given.clone()
        params.include_stop_str_in_output = False  # the text of a reply ends before what stopped it, as OpenAI's does
        names = (*SAMPLING_DEFAULTS, *UNSUPPORTED, "stop", "stop_token_ids", "max_tokens", "min_tokens")
        for name in names:
            if (value := settings.get(name)) is not None:
                if name in COUNTS and (isinstance(value, bool) or not isinstance(value, int)):
                    raise HttpError(400, f"{name}: {value!r:.100} is not a whole number", name)
                setattr(params, name, value)
        if not isinstance(params.stop, str | list | None):
            raise HttpError(400, f"stop: {params.stop!r:.100} is neither a text nor a list of texts", "stop")
        try:
            reply = await self._generate(context, params)
        except AgentError as error:
            raise HttpError(
                400, str(error).removeprefix("generate: "), code="context_length_exceeded" if "context" in str(error) else None
            ) from None
        except TimeoutError as error:
            raise HttpError(410, str(error)) from None
        return self.conversation.add(context, reply)


class PolicyServer(LoopbackServer):
    """Serve the policy to sessions, which are known by their keys."""

    def __init__(self, max_length: int) -> None:
        """`max_length`: token limit of an episode."""
        self.max_length = max_length
        self.sessions: dict[str, Session] = {}
        routes = {"/v1/chat/completions": _chat, "/v1/completions": _complete, "/inference/v1/generate": _generate}
        posts = [Route(path, self._endpoint(answer), methods=["POST"]) for path, answer in routes.items()]
        super().__init__([*posts, Route("/v1/models", self._models), Route("/healthz", _healthz)])

    def _endpoint(self, answer: Answer) -> Any:
        async def endpoint(request: Request) -> Response:
            session = self._session_of(request)
            return await session.answer(answer, await read_body(request), request.headers.get(RETRY_HEADER, "0") != "0")

        return endpoint

    def _session_of(self, request: Request) -> Session:
        session = self.sessions.get(bearer_key(request))
        if session is None:
            raise HttpError(401, "unknown key, or its episode is over", code="invalid_api_key")
        return session

    async def _models(self, request: Request) -> Response:
        self._session_of(request)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "rlhfless_ray", "max_model_len": self.max_length}
        return JSONResponse({"object": "list", "data": [model]})


async def _healthz(_: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def _chat(session: Session, body: JsonObject) -> Response:
    choice, kind = body.get("tool_choice") or "auto", (body.get("response_format") or {"type": "text"}).get("type")
    if choice not in ("auto", "none"):
        raise HttpError(400, f"tool_choice: {choice!r:.100} is not supported; leave it out, or use `auto` or `none`", "tool_choice")
    if kind != "text":
        raise HttpError(400, f"response_format: {kind!r:.100} is not supported; leave it out", "response_format")
    if body.get("top_logprobs"):
        raise HttpError(400, "top_logprobs: only the tokens that were sampled have log-probabilities", "top_logprobs")
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) and isinstance(tool.get("function"), dict) for tool in tools):
        raise HttpError(400, "tools: expected a list of objects with a function each", "tools")
    tools = [] if choice == "none" else tools
    settings = body if body.get("max_completion_tokens") is None else {**body, "max_tokens": body["max_completion_tokens"]}
    try:
        messages = read_messages(body.get("messages"))
        context = session.conversation.chat_context(messages, tools)
    except BadRequest as error:
        raise HttpError(400, str(error), "messages") from None
    turn = await session.turn(context, settings)
    message = reply_message(turn.reply.text, tools)
    session.conversation.remember_chat(turn, messages, tools, message)
    return chat_answer(turn, message, body, session.tokenizer)


async def _complete(session: Session, body: JsonObject) -> Response:
    prompt = body.get("prompt")
    if not isinstance(prompt, str):
        turn = await session.turn(_token_ids(prompt, "prompt", session), body)
    else:
        turn = await session.turn(session.conversation.text_context(prompt), body)
        session.conversation.remember_text(turn, prompt)
    return text_answer(turn, body, session.tokenizer)


async def _generate(session: Session, body: JsonObject) -> Response:
    settings = body.get("sampling_params") or {}
    if not isinstance(settings, dict):
        raise HttpError(400, "sampling_params: expected an object", "sampling_params")
    return token_answer(await session.turn(_token_ids(body.get("token_ids"), "token_ids", session), settings), body)


def _token_ids(value: object, name: str, session: Session) -> list[int]:
    """Return token ids of a body. Raises HttpError for anything else, and for tokens that the policy does not have."""
    if not isinstance(value, list) or not value or not all(type(token) is int for token in value):
        raise HttpError(400, f"{name}: expected {'a text or ' if name == 'prompt' else ''}a list of token ids", name)
    if unknown := next((token for token in value if not 0 <= token < len(session.tokenizer)), None):
        raise HttpError(400, f"{name}: {unknown} is not a token of the policy", name)
    return value
