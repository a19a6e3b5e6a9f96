"""HTTP on loopback in a running event loop: bearer keys, bodies of bounded size, and errors in OpenAI's form."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute

from rlhfless_ray.common.json_types import JsonObject

MAX_BODY_BYTES = 32 * 2**20
END_S = 30.0
KEEP_ALIVE_S = 3600  # of an idle connection: a loop that a busy machine has held up would close one whose request has arrived
TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 500: "server_error"}


class HttpError(Exception):
    """An error for the client. `param`: the field at fault."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


def error_response(status: int, message: str, param: str | None = None, code: str | None = None) -> JSONResponse:
    error = {"message": message, "type": TYPES.get(status, "invalid_request_error"), "param": param, "code": code}
    return JSONResponse({"error": error}, status)


async def _on_http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HttpError)
    return error_response(error.status, str(error), error.param, error.code)


async def _on_refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return error_response(error.status_code, error.detail)


async def _on_failure(_: Request, error: Exception) -> Response:
    return error_response(500, f"{type(error).__name__}: {error}")


def bearer_key(request: Request) -> str:
    """Return the key of a request, "" if there is none."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")


async def read_body(request: Request, max_bytes: int = MAX_BODY_BYTES) -> bytes:
    """Return a request's body. Raises HttpError 413 for one that is too large, without reading it all."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise HttpError(413, f"the body has more than {max_bytes} bytes")
    return bytes(body)


def read_json(body: bytes) -> JsonObject:
    """Return a body that is a JSON object. Raises HttpError 400 for any other."""
    try:
        value: Any = json.loads(body)
        json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair is no text
    except (ValueError, RecursionError) as error:
        raise HttpError(400, f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise HttpError(400, f"the body is a JSON {type(value).__name__}, not an object")
    return value


class LoopbackServer:
    """Serve routes in this event loop, at a free port of the loopback interface."""

    def __init__(self, routes: list[BaseRoute]) -> None:
        app = Starlette(routes=routes, exception_handlers={HttpError: _on_http_error, HTTPException: _on_refused, Exception: _on_failure})
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(app, log_level="critical", access_log=False, lifespan="off", ws="none", timeout_keep_alive=KEEP_ALIVE_S)
        self._server = uvicorn.Server(config)
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Serve until `close`, or the end of the process. Connections made before are answered too."""
        self._serving = asyncio.create_task(self._server.serve([self._socket]))

    async def close(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        if self._serving is not None:
            await asyncio.wait_for(self._serving, END_S)
