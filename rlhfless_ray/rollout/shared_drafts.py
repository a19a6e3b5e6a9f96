"""Data for drafts that a run's engines share: step times, acceptance rates, and responses to the same prompts."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from placement.drafting.acceptance import News
from placement.drafting.attempts import Learned
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.engine.control_queue import DraftNews, EngineCommand
from rlhfless_ray.rollout.engine_calls import Attached
from rlhfless_ray.rollout.events import Event, RolloutEnded, TokensArrived
from rlhfless_ray.rollout.live_rollout import LiveRollout, Plugin
from rlhfless_ray.rollout.token_log import NO_ENGINE
from rlhfless_ray.rollout.trained_drafter import TrainedDrafter
from rlhfless_ray.step.engine_steps import EngineSteps
from rlhfless_ray.types import Request

KEPT_TOKENS = 100_000  # tokens of responses of earlier steps. A checkpoint has them as numbers, about 0.6 MB


@dataclass
class _Text:
    """A response of an earlier step. `name`: the text's name in engines. `known_by`: ids of the instances that have it."""

    name: int
    tokens: np.ndarray
    known_by: set[str]


class SharedDrafts(Plugin):
    """The driver's shared data for drafts, for a whole run. `end` keeps a rollout's responses for later steps."""

    def __init__(self, drafter: TrainedDrafter | None = None, kept_tokens: int = KEPT_TOKENS) -> None:
        """`drafter`: a draft model that is trained during the run, whose newest weights engines get."""
        self.learned = Learned()
        self.kept_tokens = kept_tokens
        self.earlier: dict[str, list[_Text]] = {}  # by prompt, the least recently used first
        self.total = 0  # tokens in `earlier`
        self.names = itertools.count()
        self.drafter = drafter
        self.weights: tuple[int, Any] = (0, None)  # version of the drafter in this rollout, and a reference to its {name: array}
        self.versions: dict[str, int] = {}  # version of the drafter that each instance has, by instance id

    def begin(self, rollout: LiveRollout) -> None:
        """Start a rollout. Prompts that come later, as in multi-turn rollouts, share no text."""
        super().begin(rollout)
        if self.drafter is not None:
            self.weights = self.drafter.version, self.drafter.weights
        token_log = rollout.token_log
        self.log, self.kept = token_log, token_log.finished.copy()  # responses of earlier rollouts are in `earlier`
        self.prompts = [_digest(request) for request in token_log.requests]
        self.groups: dict[str, list[int]] = {}
        for i, prompt in enumerate(self.prompts):
            self.groups.setdefault(prompt, []).append(i)
        self.text_names = [next(self.names) for _ in self.prompts]
        self.instances: dict[int, str] = {}  # ids of the engines' instances, by number
        self.sent: dict[tuple[int, int], int] = {}  # (request, engine) → tokens of the response that were sent to the engine

    def attach(self, number: int, requests: list[Request]) -> Attached:
        return {"drafts": self.for_call(number, self.rollout.calls.engines[number].id, [request.key for request in requests])}

    def on_event(self, event: Event) -> None:
        if isinstance(event, TokensArrived):
            calls = self.rollout.calls
            self.observe(event.deltas.observed)
            for number, drafts in self.spread(event.deltas.keys.tolist(), event.call.number).items():
                if (other := calls.find(number)) is not None:
                    calls.send_command(other, EngineCommand(drafts=drafts))
        elif isinstance(event, RolloutEnded):
            result = self.rollout.result
            self.end(result.steps)
            result.drafts_saved_s = self.saved_s(result.steps)

    def for_call(self, number: int, instance: str, keys: Sequence[int]) -> DraftNews:
        """Return the data for an engine that begins to work on these requests."""
        texts = []
        self.instances[number] = instance
        for prompt in dict.fromkeys(self.prompts[i] for i in keys if i < len(self.prompts)):
            for text in self.earlier.get(prompt, ()):
                if instance not in text.known_by:
                    text.known_by.add(instance)
                    texts.append((text.name, text.tokens))
            texts += self._news((i for i in self.groups[prompt] if self.log.owner[i] != number), number)
        version, weights = self.weights
        known, self.versions[instance] = self.versions.get(instance, 0), version
        return DraftNews(self.learned.state(), tuple(texts), None if known == version else weights)

    def spread(self, keys: Iterable[int], number: int) -> dict[int, DraftNews]:
        """Return the data for other engines after an engine's report on these requests, by engine number.

        Only engines with unfinished requests of the same prompts get any.
        """
        news_of: dict[int, DraftNews] = {}
        for i in keys:
            group = self.groups[self.prompts[i]] if i < len(self.prompts) else []
            for other in {int(self.log.owner[j]) for j in group if not self.log.finished[j]} - {number, NO_ENGINE}:
                texts = tuple(self._news([i], other))
                news_of[other] = DraftNews({}, (news_of[other].texts if other in news_of else ()) + texts)
        return news_of

    def _news(self, keys: Iterable[int], number: int) -> list[tuple[int, np.ndarray]]:
        texts = []
        for i in keys:
            sent = self.sent.get((i, number), 0)
            if self.log.length[i] > sent and not self.kept[i]:
                texts.append((self.text_names[i], self.log.tokens(i)[sent:]))
                self.sent[i, number] = int(self.log.length[i])
        return texts

    def observe(self, observed: Sequence[News]) -> None:
        """Record which of an engine's drafts were accepted."""
        self.learned.acceptance.merge(observed)

    def end(self, steps: EngineSteps) -> None:
        """Fit the step times to the rollout's engine steps, and keep its responses."""
        times = self.learned.times
        for has_drafts in (False, True):
            kind = [step for step in steps if step.new_tokens == step.running and (step.drafted > 0) == has_drafts]
            for step in kind[:: len(kind) // times.KEPT + 1]:  # from the whole rollout, because its end has few sequences
                times.add(step.running, step.context_tokens, step.drafted, step.work_s)
        times.fit()
        self.learned.acceptance.age(len(steps) / max(len(self.instances), 1))
        known_by = [{self.instances[owner]} if owner != NO_ENGINE else set() for owner in self.log.owner.tolist()]
        for i, engine in self.sent:
            known_by[i].add(self.instances[engine])
        for i, prompt in enumerate(self.prompts):
            if self.log.finished[i] and self.log.length[i] and not self.kept[i]:
                self._keep(prompt, _Text(self.text_names[i], self.log.tokens(i), known_by[i]))
        while self.total > self.kept_tokens:
            self.total -= sum(len(text.tokens) for text in self.earlier.pop(next(iter(self.earlier))))

    def saved_s(self, steps: EngineSteps) -> float:
        """Return the engines' time that drafts saved in these steps against decoding without, by the fitted step times."""
        times = self.learned.times
        return sum(times.saved_s(step.running, step.context_tokens, step.drafted, step.accepted) - step.draft_s for step in steps)

    def _keep(self, prompt: str, text: _Text) -> None:
        self.earlier[prompt] = [*self.earlier.pop(prompt, []), text]
        self.total += len(text.tokens)

    def state(self) -> JsonObject:
        """Return the state as JSON types, for a checkpoint."""
        texts_of = {prompt: [text.tokens.tolist() for text in texts] for prompt, texts in self.earlier.items()}
        return {"learned": self.learned.state(), "said": texts_of}

    def restore(self, state: JsonObject) -> None:
        self.learned.restore(state.get("learned", {}))
        for prompt, texts in state.get("said", {}).items():
            for tokens in texts:
                self._keep(prompt, _Text(next(self.names), np.array(tokens, np.int32), set()))


def _digest(request: Request) -> str:
    return xxhash.xxh3_64_hexdigest(np.array(request.token_ids, np.int32).tobytes())
