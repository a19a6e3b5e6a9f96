"""What a turn over HTTP takes beside the policy's own time: `python -m benchmarks.door`.

A server with a made-up policy, which takes `POLICY_S`, and a process of clients that hold conversations. An answer's time beyond the
policy's is the overhead. It includes the client's work for the request, and the chat template and tokens on the server.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

SESSIONS, TURNS, POLICY_S, REPLY_TOKENS = 64, 20, 1.0, 64


async def serve() -> None:
    from rlhfless_ray.agent.engine_api import PolicyReply
    from rlhfless_ray.agent.sampling_params import SamplingParams
    from rlhfless_ray.door.conversation import branches_of
    from rlhfless_ray.door.policy_server import PolicyServer, Session
    from tests.chat_policy import chat_tokenizer

    with tempfile.TemporaryDirectory() as folder:
        texts = Path(folder) / "texts.txt"
        texts.write_text("the sum of the numbers is the number of the sum " * 99)
        tokenizer = chat_tokenizer(texts)
    ids = [*(tokenizer("the sum of the numbers ")["input_ids"] * REPLY_TOKENS)[: REPLY_TOKENS - 1], tokenizer.eos_token_id]
    text, took_s = tokenizer.decode(ids[:-1]), list[float]()

    async def generate(context: list[int], params: Any) -> PolicyReply:
        began_s = time.perf_counter()
        await asyncio.sleep(POLICY_S)
        took_s.append(time.perf_counter() - began_s)
        return PolicyReply(ids, text, [-1.0] * len(ids), "stop")

    server = PolicyServer(100_000)
    for number in range(SESSIONS):
        server.sessions[f"sk-{number}"] = Session(tokenizer, SamplingParams(temperature=1.0, max_tokens=None), generate)
    await server.start()
    server.sessions["sk-0"].conversation.chat_context([{"role": "user", "content": "compile the template"}], [])
    began_cpu_s = time.process_time()
    command = [sys.executable, "-m", "benchmarks.door", server.url]
    clients = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    out, _ = await clients.communicate()
    whole_s, cpu_ms = np.array(json.loads(out)), 1000 * (time.process_time() - began_cpu_s) / (SESSIONS * TURNS)
    await server.close()
    assert all(len(branches_of(session.conversation.turns)) == 1 for session in server.sessions.values()), "a conversation has forked"
    over_ms = 1000 * (whole_s - np.mean(took_s))
    print(f"{SESSIONS} sessions of {TURNS} turns, policy {POLICY_S:g} s: {over_ms.mean():.1f} ms a turn beyond the policy's time")
    print(f"median {np.median(over_ms):.1f} ms, p95 {np.quantile(over_ms, 0.95):.1f} ms; {cpu_ms:.2f} ms of the server's CPU")


async def hold_conversations(url: str) -> None:
    import httpx

    async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=SESSIONS), trust_env=False) as client:

        async def converse(number: int) -> list[float]:
            await asyncio.sleep(POLICY_S * number / SESSIONS)  # sessions are not in step with each other
            messages, took_s = [{"role": "user", "content": "the sum of the numbers"}], []
            for _ in range(TURNS):
                began_s = time.perf_counter()
                answer = await client.post(
                    f"{url}/v1/chat/completions", json={"messages": messages}, headers={"Authorization": f"Bearer sk-{number}"}
                )
                message = answer.raise_for_status().json()["choices"][0]["message"]
                took_s.append(time.perf_counter() - began_s)
                messages += [message, {"role": "user", "content": "and the number of the sum"}]
            return took_s

        found = await asyncio.gather(*map(converse, range(SESSIONS)))
    print(json.dumps([one for each in found for one in each]))


if __name__ == "__main__":
    asyncio.run(hold_conversations(sys.argv[1]) if len(sys.argv) > 1 else serve())
