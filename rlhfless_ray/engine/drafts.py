"""Drafted tokens inside vLLM: which sequences get drafts, and how many of them each decode step verifies.

Imported by engines with `rollout.speculation` only.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from placement.drafting.acceptance import MODEL_SEQUENCES, MOST_TOKENS, Acceptance, Drafts
from placement.drafting.attempts import Attempts, Learned
from placement.drafting.token_values import FIRST_CHANCE, DraftWorth
from rlhfless_ray.common.errors import one_line_with_type
from rlhfless_ray.engine.head_config import is_head
from rlhfless_ray.engine.text_drafts import TextSource
from rlhfless_ray.types import EngineStep

if TYPE_CHECKING:
    import torch

    from rlhfless_ray.engine.control_queue import DraftNews
    from rlhfless_ray.engine.head_drafts import HeadSource
    from rlhfless_ray.engine.model_drafts import Ask, DraftSource

ALL = 1 << 30  # sequences
MODEL = "model"  # name of the drafter among the sequences that rest; those have numbers
TRIAL_PASSES = 4  # passes of the drafter until their time is known, and in each step without `auto`
SURVIVAL_RATE = 0.1  # weight of a proposal in the mean survival of its tokens, by which the next one's passes are chosen
ENOUGH_PROMISED = 4.0  # a draft from text with so many expected tokens is used without a draft by the model


class _Running(NamedTuple):
    """Sequences of an engine's batch, by column, and what remains the same while they are in it."""

    names: list[str]  # vLLM's request ids
    keys: list[int]  # the requests' numbers
    responses: list[int]  # their keys in the rollout
    rows: np.ndarray  # (n,) of the batch
    prompts: list[int]  # tokens of the prompts, with those that other engines have generated
    before: np.ndarray  # (n,) tokens that other engines have generated
    limits: np.ndarray  # (n,) tokens after which nothing is drafted

    def take(self, places: Sequence[int]) -> _Running:
        """Return some of the sequences."""

        def some(column: list[Any]) -> list[Any]:
            return [column[i] for i in places]

        names, keys, responses, prompts = some(self.names), some(self.keys), some(self.responses), some(self.prompts)
        return _Running(names, keys, responses, self.rows[places], prompts, self.before[places], self.limits[places])


class _Offer(NamedTuple):
    """Drafts whose first tokens a step verifies."""

    rows: dict[str, int]  # by vLLM's request id: place in the following
    sources: list[int]
    cells: np.ndarray  # (drafts, tokens), as in `DraftTable`
    values: np.ndarray  # (drafts,) what an accepted token is worth, see `token_values`


NO_OFFER = _Offer({}, [], np.zeros((0, 0), int), np.zeros(0))


class Drafter:
    """vLLM's proposer of drafts (`method="custom_class"`), which hands them to the scheduler itself, after an engine step.

    vLLM would have drafts proposed within a step, and such a step takes a slower path even if it verifies nothing. `attach` completes
    the drafter. Before that, and in further members of an engine, it drafts nothing.
    """

    def __init__(self, vllm_config: Any) -> None:
        self.most_tokens = vllm_config.model_config.max_model_len
        self.runner: Any = None
        self.failure = ""  # why the drafter model was dropped

    def attach(self, runner: Any, scheduler: Any, always: bool, model: Path | None = None) -> None:
        """Start drafting. `always`: verify all drafts in each step. `model`: folder of a model, or of a head, that drafts too."""
        self.runner, self.scheduler, self.always = runner, scheduler, always
        # vLLM would verify zeros for all sequences when one is near the end of the context. `look_up` limits drafts to the end itself.
        runner.effective_drafter_max_model_len = self.most_tokens + MOST_TOKENS + 1
        # Without a speculative configuration a step takes vLLM's faster path, on which it verifies nothing.
        self.config, runner.speculative_config = runner.speculative_config, None
        runner.num_accepted_tokens_event = None  # only policies with recurrent layers read these numbers
        self.text, self.learned = TextSource(), Learned()
        self.attempts, self.values = Attempts(self.learned), DraftWorth()
        self.source: DraftSource | None = None  # not `model`: vLLM would take that for a module, and save its buffers when it parks
        if model is not None:
            with self._continuing_without_model():
                self.source = self._load(model)
        self.pass_s = 0.0  # seconds of a pass of the model, for one token of each sequence
        self.survivals = FIRST_CHANCE ** np.arange(1, MOST_TOKENS + 1)  # mean of the model's drafted tokens, by position
        self.offered = NO_OFFER  # for the next step
        self.verified = NO_OFFER  # of the step that has just ended
        self.batch: tuple[list[str], _Running] | None = None  # the last step's batch, if all of its sequences went on
        self.draft_s = 0.0  # seconds that were spent on drafts and decisions after the step, unless it is idle
        self.observe_s = 0.0  # of which: learning from the step before
        self.running = self.context_tokens = 0  # of the sequences that go on after the step
        self.is_idle = False  # whether drafting pauses in this step: nothing is verified, looked up or learned
        self.begun = 0  # requests that have begun, as `KeyedSampler.begun`

    def _load(self, folder: Path) -> DraftSource:
        from rlhfless_ray.engine.model_drafts import ModelSource

        longest = self.most_tokens + MOST_TOKENS + 1
        if is_head(json.loads((folder / "config.json").read_bytes())):
            return self._load_head(folder, longest)
        return ModelSource(folder, self.runner.model_config.get_vocab_size(), longest, self.runner.device)

    def _load_head(self, folder: Path, longest: int) -> HeadSource:
        """Load a head, and show it the policy's hidden states from now on. See `states_worker`."""
        from rlhfless_ray.engine.head_drafts import HeadSource

        runner = self.runner
        head = HeadSource(folder, longest, runner.dtype, runner.device, runner.get_model().embed_input_ids)
        forward = runner._model_forward

        def observed(**inputs: object) -> tuple[torch.Tensor, list[torch.Tensor]]:
            hidden, states = forward(**inputs)
            if self.source is head:
                with self._continuing_without_model():
                    self._read(self._show_states, head, states)
            return hidden, states

        runner._model_forward = observed
        return head

    def _show_states(self, head: HeadSource, states: list[torch.Tensor]) -> None:
        """Show a head the policy's hidden states of the running engine step."""
        batch, requests = self.runner.input_batch, self.runner.requests
        keys = [requests[name].sampling_params.extra_args["key"] for name in batch.req_ids]
        head.observe(keys, batch.num_computed_tokens_cpu[: len(keys)], self.runner.query_start_loc.np[: len(keys) + 1], states)

    @contextmanager
    def _continuing_without_model(self) -> Iterator[None]:
        """Drop the drafter model if the block raises: its failures, of many types, must not end a run."""
        try:
            yield
        except Exception as error:
            self.failure = one_line_with_type(error, 300)
            print(f"the drafter failed, so this engine continues without it ({self.failure})", file=sys.stderr, flush=True)
            self.source = None

    def count_by_model(self, tried: Mapping[str, tuple[int, int]]) -> tuple[int, int]:
        """Return how many of a step's verified and accepted tokens the drafter model had drafted."""
        rows, sources, *_ = self.verified
        if not any(sources):
            return 0, 0
        counts = [count for name, count in tried.items() if name in rows and sources[rows[name]]]
        return sum(drafted for drafted, _ in counts), sum(accepted for _, accepted in counts)

    def observe_step(self, step: EngineStep, tried: Mapping[str, tuple[int, int]]) -> None:
        """Record a step's time and its accepted drafts. `tried`: (drafted, accepted) tokens by vLLM's request id."""
        begin = time.thread_time()
        rows, _, cells, values = self.verified
        worth = 0.0
        if known := [(rows[name], *counts) for name, counts in tried.items() if name in rows]:
            places, drafted, accepted = np.array(known).T
            self.learned.acceptance.observe(cells[places], drafted, accepted)
            worth = float(values[places] @ accepted)
            self.values.observe(tried)
        if step.new_tokens == step.running:  # the step computed no prompt
            self.learned.times.observe(step.running, step.context_tokens, step.drafted, step.work_s)
        self.attempts.settle(step.running, step.context_tokens, step.drafted, worth, step.draft_s)
        self.observe_s = time.thread_time() - begin

    def finish(self, number: int, response: Sequence[int]) -> None:
        """Add a finished response to the texts that drafts come from."""
        self._read(self.text.finish, number, np.asarray(response, np.int32))

    def update(self, news: DraftNews) -> None:
        """Take over the run's fitted times and acceptance, and add responses of other engines and earlier steps to the texts."""
        self.learned.restore(news.learned)
        self.values.forecast(news.lengths)
        for name, tokens in news.texts:
            self._read(self.text.add, ("said", name), tokens)
        if news.weights is not None and self.source is not None:
            with self._continuing_without_model():
                self.source.load(news.weights)
            self.attempts.forget(MODEL)

    def _read(self, read: Callable[..., None], *text: object) -> None:
        """Add a text or hidden states, unless drafts have saved too little time to pay for it."""
        if self.always or self.attempts.may_read:
            begin = time.thread_time()
            read(*text)
            self.attempts.pay_reading(time.thread_time() - begin, self.running, self.context_tokens)

    def load_model(self, *_: object) -> None:
        """Do nothing. vLLM calls this, but there is no model."""

    def propose(self, sampled: list[list[int]], *_: object, **__: object) -> list[list[int]]:
        """Return no tokens. vLLM calls this within steps that verify drafts."""
        return [[] for _ in sampled]

    def look_up(self) -> None:
        """Look up drafts for sequences that go on after an engine step, and let the next step verify those that are worth it."""
        step, known = self.runner.sampler, self.begun
        self.begun = step.begun
        self.is_idle = self.attempts.skip_step(self.begun != known)
        if self.is_idle:
            self.running, self.context_tokens = step.running, step.context_tokens
            return
        self.verified, self.offered, begin = self.offered, NO_OFFER, time.thread_time()  # others may take the processor meanwhile
        looked_up = self._offer()
        self.draft_s = time.thread_time() - begin + self.observe_s
        if looked_up:
            self.attempts.observe_look_up(self.draft_s, looked_up)
        self.runner.speculative_config = self.config if self.offered.rows else None

    def _offer(self) -> int:
        """Give the scheduler drafts of sequences that may look up. Returns how many did."""
        batch, requests = self.runner.input_batch, self.scheduler.requests
        for name in self.verified.rows:
            if name in requests:
                requests[name].spec_token_ids = []  # of a sequence that the step had no tokens left for
        due = self._going_on(batch, requests)
        lengths = batch.num_tokens_no_spec[due.rows]
        self.running, self.context_tokens = len(lengths), int(lengths.sum())
        most = ALL if self.always else self.attempts.begin_step(self.running, self.context_tokens, self.values.most)
        values = self._values(due, lengths) if most and not self.always else np.ones(self.running)
        chosen = range(self.running) if self.always else self.attempts.due(due.names, most, values) if most else ()
        if not chosen:
            if most:
                self.attempts.pause_until_due(due.names)
            return 0
        self.text.forget_all_but(due.keys)
        if self.source is not None:
            self.source.forget_all_but(due.keys)
        if len(chosen) < self.running:
            due, lengths, values = due.take(chosen), lengths[chosen], values[chosen]
        left = np.minimum(np.maximum(due.limits - lengths, 0), MOST_TOKENS).tolist()
        drafts = self.text.propose(due.keys, due.prompts, batch.token_ids_cpu, due.rows, lengths, left)
        if self.source is not None and (self.always or (len(left) <= MODEL_SEQUENCES and self.attempts.due([MODEL], 1))):
            self._draft_by_model(self.source, due, lengths.tolist(), left, drafts, values)
        tokens, sources = drafts.tokens, drafts.sources
        if any(tokens):
            table = Acceptance.tabulate(drafts)
            counts = [*map(len, tokens)] if self.always else self.attempts.choose(table, self.running, self.context_tokens, values)
            rows = {}
            for row, (name, count) in enumerate(zip(due.names, counts, strict=True)):
                if count:
                    requests[name].spec_token_ids = tokens[row][:count]
                    rows[name] = row
            self.offered = _Offer(rows, sources, table.cells, values)
        self.attempts.note(due.names, self.offered.rows)
        return len(left)

    def _values(self, due: _Running, lengths: np.ndarray) -> np.ndarray:
        """Return (n,) what a token of each sequence is worth. `lengths`: (n,) tokens of the sequences so far."""
        costs = self.learned.times.rates(self.running, self.context_tokens)
        if costs is None:
            return np.ones(len(lengths))
        generated = lengths - due.prompts + due.before
        return self.values.get(due.names, due.responses, generated, due.limits - lengths, *costs)

    def _going_on(self, batch: Any, requests: dict[str, Any]) -> _Running:
        """Return the sequences that go on. They are those of the last step unless one has ended or begun."""
        ids = batch.req_ids
        if self.batch is not None and self.batch[0] == ids and all(map(requests.__contains__, ids)):
            return self.batch[1]
        names, rows = [], []
        for row, name in enumerate(ids):
            request = requests.get(name)  # None if it has ended
            if request is not None and not request.is_prefill_chunk and request.num_output_tokens:
                names.append(name)
                rows.append(row)
        asked = [self.runner.sampler.rows[name] for name in names]
        prompts = batch.num_prompt_tokens[rows]
        # A step draws one token besides the drafted ones.
        limits = np.minimum(prompts + [one["max_tokens"] for one in asked], self.most_tokens) - 1
        extra = [requests[name].sampling_params.extra_args for name in names]
        responses, before = [one["response"] for one in extra], np.array([one["offset"] for one in extra], int)
        running = _Running(names, [one["key"] for one in asked], responses, np.array(rows, int), prompts.tolist(), before, limits)
        self.batch = ([*ids], running) if len(names) == len(ids) else None
        self.attempts.forget_all_but([*names, MODEL])
        self.values.forget_all_but(names)
        return running

    def _draft_by_model(
        self, model: DraftSource, due: _Running, lengths: Sequence[int], most: Sequence[int], drafts: Drafts, values: np.ndarray
    ) -> None:
        """Replace drafts from text by the model's where those have more expected tokens.

        `lengths`, `most`: tokens of each sequence so far, and to draft. `values`: what a token of each is worth.
        """
        acceptance, times, table = self.learned.acceptance, self.learned.times, self.runner.input_batch.token_ids_cpu
        promised = acceptance.survival(acceptance.tabulate(drafts)).sum(1)
        asks, places = [], []
        for i in np.argsort(promised - values)[:MODEL_SEQUENCES].tolist():
            tokens = table[due.rows[i], : lengths[i]]
            if most[i] and model.fits(due.keys[i], tokens, most[i]) and promised[i] < ENOUGH_PROMISED:
                places.append(i)
                asks.append(self._ask(due.names[i], due.keys[i], tokens, most[i]))
        if not places:
            return
        step_s = times.step_s(self.running, self.context_tokens)
        token_s = 0.0 if step_s is None else step_s / self.running  # seconds of a token without drafts
        begin, passes = time.thread_time(), self._passes(float(values[places].sum()) * token_s, len(places))
        with self._continuing_without_model():
            by_model = model.propose(asks, passes)
        if self.source is None:
            return
        passes = max(len(draft.tokens) for draft in by_model)
        seconds = time.thread_time() - begin
        self.pass_s += 0.1 * (seconds / passes - self.pass_s) if self.pass_s else seconds / passes
        survival = acceptance.survival(acceptance.tabulate(Drafts.of(by_model)))
        self.survivals[:passes] += SURVIVAL_RATE * (survival.mean(0) - self.survivals[:passes])
        # Tokens that no pass was worth survive like those before them.
        self.survivals[passes:] = self.survivals[passes - 1] ** (np.arange(passes + 1, MOST_TOKENS + 1) / passes)
        gains = np.maximum(survival.sum(1) - promised[places], 0.0)
        for i, draft, gain in zip(places, by_model, gains.tolist(), strict=True):
            if gain:
                drafts.replace(i, draft)
        self.attempts.note([MODEL], [MODEL] if not token_s or float(values[places] @ gains) * token_s > seconds else [])

    def _passes(self, worth_s: float, sequences: int) -> int:
        """Return how many tokens the model drafts: each further one must be expected to save its pass and its verification.

        `worth_s`: seconds that an accepted token of every sequence would save.
        """
        if self.always or not worth_s or not self.pass_s:
            return TRIAL_PASSES
        verify_s = np.diff(self.learned.times.verify_s(self.running, sequences * np.arange(MOST_TOKENS + 1)))
        return max(1, int(np.argmin([*(worth_s * self.survivals > self.pass_s + verify_s), False])))

    def _ask(self, name: str, key: int, tokens: np.ndarray, most: int) -> Ask:
        from rlhfless_ray.engine.model_drafts import Ask

        state = self.runner.sampler.rows[name]
        begin = len(state["output"])
        return Ask(key, tokens.astype(np.int64), state["noise"][begin : begin + most], most, state["temperature"], state["truncation"])
