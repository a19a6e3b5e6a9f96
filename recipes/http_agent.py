"""An agent as a program of its own: it knows only OpenAI's client. `recipes/http_agent.yaml` trains its policy.

Each line of the input is an episode, and each line of the output its reward. Base URL and key are in the environment.
"""

import json
import sys

from openai import OpenAI

client = OpenAI()
for line in sys.stdin:
    episode = json.loads(line)
    messages = [{"role": "user", "content": episode["prompt"]}]
    reply = client.chat.completions.create(model=episode["model"], messages=messages)
    _, mark, answer = (reply.choices[0].message.content or "").partition("#")
    print(json.dumps({"reward": float(bool(mark) and answer == episode["row"]["answer"])}), flush=True)
