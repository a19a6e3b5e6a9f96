"""Agents that are programs of the user's. A program reads an episode as a line of JSON, plays it over HTTP, and writes its reward as one.

A program that ends after an episode is started again for the next one, and one that reads on gets it on its next line.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shlex
import shutil
import signal
import sys
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rlhfless_ray.agent.engine_api import Generate
from rlhfless_ray.agent.episode import BadEpisode, Episode
from rlhfless_ray.agent.episode_source import EpisodeSource
from rlhfless_ray.agent.sampling_params import SamplingParams
from rlhfless_ray.common.errors import UserError
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.door.conversation import Branch, Turn, branches_of
from rlhfless_ray.door.policy_server import MODEL, PolicyServer, Session
from rlhfless_ray.recipe.shipped import shipped_folder
from rlhfless_ray.reward.values import to_finite_float

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KEY = "agent.command"
MAX_LINE_BYTES = 2**20  # of a program's output
KEPT_LINES = 5  # of its errors
END_S = 5.0  # limit for a program to end after it has closed its output


@dataclass(frozen=True)
class CommandSource(EpisodeSource):
    """A command line, and the folder in which it is run. `programs`: limit of its processes at the same time."""

    command: tuple[str, ...]
    folder: str
    programs: int

    @classmethod
    def load(cls, command: str, programs: int) -> CommandSource:
        """Read a command line. `python` is the Python of this project. Raises UserError if there is no such program."""
        try:
            words = shlex.split(command)
        except ValueError as error:
            raise UserError(f"{KEY}: `{command}` is not a command line: {error}") from None
        if not words:
            raise UserError(f"{KEY}: name a program")
        if words[0] == "python":
            words[0] = sys.executable
        elif shutil.which(words[0]) is None:
            raise UserError(f"{KEY}: there is no program `{words[0]}`")
        if len(words) > 1 and words[1].endswith(".py") and not os.path.isfile(words[1]):
            shipped = shipped_folder()
            if shipped is None or not (shipped.parent / words[1]).is_file():
                raise UserError(f"{KEY}: there is no file {words[1]} in {os.getcwd()}")
            words[1] = str(shipped.parent / words[1])
        return cls(tuple(words), os.getcwd(), programs)

    @property
    def where(self) -> str:
        return f"{KEY} `{shlex.join(self.command)}`"

    def label(self, row: JsonObject, answer_column: str) -> JsonObject:
        return row

    def player(self, tokenizer: PreTrainedTokenizerBase, max_length: int) -> CommandPlayer:
        return CommandPlayer(self, tokenizer, max_length)


class ProgramError(Exception):
    """What is wrong with a program's answer."""


class ProgramEnded(ProgramError):
    """A program has ended before it wrote a reward."""


class CommandPlayer:
    """Play episodes with programs. Each program has a key of its own and plays one episode at a time."""

    def __init__(self, source: CommandSource, tokenizer: PreTrainedTokenizerBase, max_length: int) -> None:
        self.source, self.tokenizer, self.max_length = source, tokenizer, max_length
        self.seats = asyncio.Semaphore(source.programs)
        self.server = PolicyServer(max_length)
        self.idle: list[_Program] = []
        self._starting = asyncio.get_running_loop().create_task(self.server.start())

    def _idle_program(self) -> _Program | None:
        while self.idle:
            program = self.idle.pop()
            if program.process.returncode is None:
                return program
        return None

    async def play(self, prompt: str, label: JsonObject, sampling_params: SamplingParams, generate: Generate) -> Episode | str:
        """Play one row, which is the label."""
        while True:
            idle = self._idle_program()
            program = idle or await _Program.start(self.source, self.server)
            session = self.server.sessions[program.key] = Session(self.tokenizer, sampling_params, generate)
            line = {"prompt": prompt, "row": label, "base_url": f"{self.server.url}/v1", "api_key": program.key, "model": MODEL}
            is_whole = False
            try:
                result = await program.play(line)
                is_whole = True
                return episode_of(session.conversation.turns, result)
            except ProgramEnded as error:
                if idle is None or session.conversation.turns:
                    return str(error)  # else it has ended after its last episode
            except (ProgramError, BadEpisode) as error:
                return str(error)
            finally:
                del self.server.sessions[program.key]
                session.close()
                if is_whole:
                    self.idle.append(program)
                else:
                    await program.kill()


def episode_of(turns: list[Turn], result: JsonObject) -> Episode:
    """Return an episode with the reward that the program wrote. The branch with the most sampled tokens is the first. Raises BadEpisode."""
    branches = branches_of(turns)
    if not branches:
        raise BadEpisode("the program has requested no turn of the policy")
    try:
        reward = to_finite_float(result["reward"])
        score = None if result.get("score") is None else to_finite_float(result["score"])
        logs = {str(name): to_finite_float(value) for name, value in (result.get("metrics") or {}).items()}
    except (ValueError, AttributeError) as error:
        raise BadEpisode(f"the program's `reward`, `score` or `metrics` is {error}") from None
    first, *further = sorted((_sequence(branch, reward) for branch in branches), key=lambda one: -int(one.action.sum()))
    return replace(first, score=score, extra_logs=logs, branches=tuple(further))


def _sequence(branch: Branch, reward: float) -> Episode:
    first = branch.prompt_tokens
    rest = branch.trained[first:], branch.logprobs[first:]
    return Episode(branch.token_ids, first, *rest, branch.turns, branch.is_truncated, reward)


class _Program:
    """A process of the user's program."""

    def __init__(self, process: asyncio.subprocess.Process, key: str) -> None:
        self.process, self.key = process, key
        self.errors: deque[str] = deque(maxlen=KEPT_LINES)
        self._reading_errors = asyncio.create_task(self._read_errors())

    @classmethod
    async def start(cls, source: CommandSource, server: PolicyServer) -> _Program:
        key = f"sk-{secrets.token_urlsafe(24)}"
        address = {"OPENAI_BASE_URL": f"{server.url}/v1", "OPENAI_API_KEY": key, "OPENAI_MODEL": MODEL}
        process = await asyncio.create_subprocess_exec(
            *source.command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=source.folder,
            env={**os.environ, **address, "no_proxy": "127.0.0.1", "NO_PROXY": "127.0.0.1", "PYTHONUNBUFFERED": "1"},
            limit=MAX_LINE_BYTES,
            start_new_session=True,
        )
        return cls(process, key)

    async def play(self, line: JsonObject) -> JsonObject:
        """Let the program play an episode. Returns the first line of its output that is a JSON object with a reward."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(ConnectionError):  # a program need not read; one that has ended is seen at its output
            self.process.stdin.write(json.dumps(line).encode() + b"\n")
            await self.process.stdin.drain()
        while True:
            try:
                written = await self.process.stdout.readline()
            except ValueError:
                raise ProgramError(f"the program wrote a line of more than {MAX_LINE_BYTES} bytes") from None
            if not written:
                raise ProgramEnded(await self._why_ended())
            if (result := _result_in(written)) is not None:
                return result

    async def _why_ended(self) -> str:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await self.process.wait()
                await self._reading_errors
        last = f": {self.errors[-1]}" if self.errors else ""
        if self.process.returncode is None:
            return "the program closed its output without a line of JSON with `reward`"
        return f"the program ended with code {self.process.returncode} without a line of JSON with `reward`{last}"

    async def _read_errors(self) -> None:
        assert self.process.stderr is not None
        while chunk := await self.process.stderr.read(MAX_LINE_BYTES):
            self.errors.extend(line[:500] for line in chunk.decode("utf-8", "replace").splitlines() if line.strip())

    async def kill(self) -> None:
        """End the program and what it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        await self.process.wait()


def _result_in(line: bytes) -> JsonObject | None:
    try:
        value: Any = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and "reward" in value else None
