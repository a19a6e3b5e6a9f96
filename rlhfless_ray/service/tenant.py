"""A tenant: one key's models and engines. It is a run of the pool of slots, with leases and a ledger of its own."""

from __future__ import annotations

import itertools
import json
import logging
import re
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import ray

from rlhfless_ray.common.deadlines import get, wait_any
from rlhfless_ray.common.disk_space import replace_file
from rlhfless_ray.common.errors import RunError, Stopped, one_line
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.engine.engine_settings import engine_settings
from rlhfless_ray.engine.exact_actor import ExactEngineActor
from rlhfless_ray.engine.token_deltas import ENDS
from rlhfless_ray.functions.broker import SlotBroker
from rlhfless_ray.functions.fetch_weights import fetch_into
from rlhfless_ray.functions.instance import GONE, Instance, ProcessLost, State, reason_of
from rlhfless_ray.functions.lease import LeaseManager
from rlhfless_ray.functions.worker_pool import WorkerPool
from rlhfless_ray.learn.rank_settings import learner_settings
from rlhfless_ray.learn.trainer import OptimizerStep
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.runtime.worker_pools import PoolMaker
from rlhfless_ray.service.model_group import ModelActor, ModelGroup
from rlhfless_ray.service.requests import Job, Requests
from rlhfless_ray.service.wire import ClientMistake, write_passes, write_samples
from rlhfless_ray.service.work import AdamStep, PassesDone, TokenPasses
from rlhfless_ray.types import Request, WeightVersion
from rlhfless_ray.weights.channel import stored_version
from rlhfless_ray.weights.model_folder import read_files, stored_weights, without_weights
from rlhfless_ray.weights.remote_folder import StoredFiles
from rlhfless_ray.weights.tensor_file import Files, as_numpy

LOG = logging.getLogger(__name__)
RECORD_S = 10.0  # between two records of a tenant's costs
POLL_S = 0.25  # between looks for other tenants that wait, while this one is idle
LORA_ALPHA = 32
KEPT_VERSIONS = 4  # of a model's weights for sampling, in memory
ABOUT = "checkpoint.json"  # in the folder of a complete checkpoint
KINDS = {"weights": "training", "sampler_weights": "sampler"}  # folder of a checkpoint → its type on the wire
ID, NAME = re.compile(r"\w[\w.:-]{0,199}"), re.compile(r"\w[\w.-]{0,127}")  # of a model; of a checkpoint


@dataclass(frozen=True)
class ServedModel:
    """A model that tenants may train. `context`: longest sequence in tokens."""

    name: str
    folder: Path
    recipe: Recipe
    files: Files
    context: int
    vocabulary: int
    end_token_id: int | None  # the tokenizer's


@dataclass(frozen=True)
class Sampling:
    """`count` responses to one request. Their seeds follow from the request's."""

    request: Request
    count: int

    def requests(self, keys: Iterator[int]) -> list[Request]:
        seeds = np.random.default_rng(self.request.seed).integers(2**62, size=self.count).tolist()
        return [replace(self.request, key=next(keys), seed=seed) for seed in seeds]


@dataclass
class Generated:
    """A response so far, in the parts that the engine has reported."""

    token_ids: list[np.ndarray] = field(default_factory=list)
    logprobs: list[np.ndarray] = field(default_factory=list)
    finish_reason: str = ""

    def whole(self) -> tuple[str, np.ndarray, np.ndarray]:
        return self.finish_reason, np.concatenate(self.token_ids), np.concatenate(self.logprobs)


@dataclass
class TenantModel:
    id: str
    base: ServedModel
    lora_rank: int
    group: ModelGroup
    versions: OrderedDict[str, WeightVersion]


class Tenant:
    """Works on its requests one after the other, on one slot at most. Everything but `requests` belongs to its thread."""

    def __init__(
        self, name: str, folder: Path, bases: dict[str, ServedModel], leases: LeaseManager, idle_s: float, *, private: bool
    ) -> None:
        """`folder`: of its checkpoints. `idle_s`: after so many seconds without a request its processes are parked, without a slot."""
        self.name, self.folder, self.bases, self.leases, self.idle_s, self.private = name, folder, bases, leases, idle_s, private
        folder.mkdir(parents=True, exist_ok=True)
        self.broker, self.requests = SlotBroker(leases), Requests()
        self.models: dict[str, TenantModel] = {}
        self.samplers: dict[str, str] = {}  # id of a sampling session → path, or name of a base model
        self.stored: OrderedDict[str, WeightVersion] = OrderedDict()  # from files, by path or name of a base model
        self.engines: dict[str, WorkerPool] = {}  # by name of the base model
        self.numbers, self.epochs, self.keys = itertools.count(1), itertools.count(1), itertools.count()
        self.used_s = self.recorded_s = time.monotonic()
        self.billed = leases.ledger.totals()
        self.thread = threading.Thread(target=self._work, name=f"tenant {name}", daemon=True)
        self.thread.start()

    # ---- the thread -------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while not self.requests.closed:
            if jobs := self.requests.take(POLL_S):
                self._do(jobs)
                self.used_s = time.monotonic()
            try:
                if self.leases.held and (time.monotonic() - self.used_s > self.idle_s or self.leases.others_wait()):
                    self._leave()
                elif time.monotonic() - self.recorded_s > RECORD_S:
                    self._record()
                for pool in self.engines.values():
                    pool.end_expired(look_every_s=10.0)
            except RunError:  # of a parked process; its next use says so to the client
                LOG.exception("processes of %s could not be parked", self.name)
            except Stopped:
                break

    def _do(self, jobs: list[Job]) -> None:
        try:
            jobs[0].run(jobs)
        except Exception as error:  # a request fails alone, whatever the reason, and says so
            if not isinstance(error, ClientMistake | RunError):
                LOG.exception("a request of %s failed", self.name)
            for job in jobs:
                if not job.future.done():
                    job.future.set_exception(error)

    def _pools(self) -> list[WorkerPool]:
        return [*self.engines.values(), *(model.group.pool for model in self.models.values())]

    def _leave(self) -> None:
        """Park everything, and give the slot back."""
        for pool in self._pools():
            self.broker.put(pool.park_all())
        self.broker.release()
        self._record()

    def _record(self) -> None:
        """Close the ledger's rows, move them to its file, and update the bill."""
        ledger = self.leases.ledger
        ledger.begin_step(ledger.step + 1)
        ledger.append_to(self.folder / "ledger.csv")
        self.billed, self.recorded_s = ledger.totals(), time.monotonic()
        ledger.forget(ledger.count)

    def _turn_to(self, wanted: WorkerPool) -> None:
        """Park all processes but those of this pool, which may take their slot."""
        for pool in self._pools():
            if pool is not wanted:
                self.broker.put(pool.park_all())

    def bill(self) -> JsonObject:
        """Return what the tenant has cost since the server started, at most RECORD_S late, and how many slots it holds."""
        return {"key": self.name, "held_slots": len(self.leases.held), **self.billed}

    # ---- models -----------------------------------------------------------------------------------------------

    def model(self, id: str) -> TenantModel:
        if id not in self.models:
            raise ClientMistake(f"model_id: {id!r} is none of your models")
        return self.models[id]

    def create(self, id: str, base: ServedModel, lora_rank: int, seed: int, state: StoredFiles | None = None) -> TenantModel:
        """Make a model's worker group, load its weights, and keep its processes."""
        settings: JsonObject = {"run.seed": seed}
        if lora_rank:
            settings |= {"lora.rank": lora_rank, "lora.alpha": LORA_ALPHA, "lora.publish": "merged"}
        make = PoolMaker(base.recipe.with_settings(settings), self.broker, base.files, LOG.warning)
        group = make.worker_group("learn", ModelActor, learner_settings, f"model {id}", ModelGroup)
        model = self.models[id] = TenantModel(id, base, lora_rank, group, OrderedDict())
        try:
            self._turn_to(group.pool)
            self.broker.staff(group)
            group.build(StoredFiles(base.folder, base.files), self.private, state)
        except Exception:
            del self.models[id]
            self.broker.put(group.pool.close())
            raise
        return model

    def unload(self, id: str) -> JsonObject:
        model = self.model(id)
        self.broker.put(model.group.pool.close())
        model.group.forget()
        del self.models[id]
        return {"model_id": id, "type": "unload_model"}

    def staffed(self, id: str) -> TenantModel:
        """Return the model while its ranks hold the tenant's slot."""
        model = self.model(id)
        if not model.group.working:
            self._turn_to(model.group.pool)
            self.broker.staff(model.group)
        return model

    def passes(self, id: str, item: TokenPasses) -> bytes:
        done = self.staffed(id).group.work(item)
        assert isinstance(done, PassesDone)
        return write_passes(np.split(done.logprobs, np.cumsum(item.batch.lengths - 1)[:-1]), done.loss)

    def step(self, id: str, item: AdamStep) -> JsonObject:
        done = self.staffed(id).group.work(item)
        assert isinstance(done, OptimizerStep)
        if done.skipped:
            raise ClientMistake(f"optim_step: not applied, because {done.skipped}")
        return {"metrics": {"grad_norm:mean": done.grad_norm, "learning_rate:mean": done.learning_rate}}

    # ---- checkpoints ------------------------------------------------------------------------------------------

    def checkpoint_folder(self, path: str, field: str = "path") -> Path:
        """Return the folder of a path `tinker://model/kind/name`. Raises ClientMistake if it is none of the tenant's."""
        parts = path.removeprefix("tinker://").split("/")
        is_path = path.startswith("tinker://") and len(parts) == 3 and parts[1] in KINDS
        if not is_path or not ID.fullmatch(parts[0]) or not NAME.fullmatch(parts[2]):
            raise ClientMistake(f"{field}: expected tinker://model/weights/name, not {path!r}")
        return self._model_folder(parts[0]) / parts[1] / parts[2]

    def _model_folder(self, id: str) -> Path:
        return self.folder / re.sub(r"[^\w.-]", "_", id)

    def _new_folder(self, path: str, *, overwrite: bool) -> Path:
        """Make an empty folder for a checkpoint, which is none until `_complete`."""
        folder = self.checkpoint_folder(path)
        if (folder / ABOUT).exists() and not overwrite:
            raise ClientMistake(f"path: {path} exists already; set overwrite")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def _complete(self, model: TenantModel, path: str) -> None:
        about = {"path": path, "model": model.id, "base_model": model.base.name, "lora_rank": model.lora_rank, "time_s": time.time()}
        replace_file(self.checkpoint_folder(path) / ABOUT, json.dumps(about).encode())

    def save(self, id: str, name: str, *, overwrite: bool) -> JsonObject:
        path = f"tinker://{id}/weights/{name}"
        folder = self._new_folder(path, overwrite=overwrite)
        model = self.staffed(id)
        model.group.storage.save(folder)
        self._complete(model, path)
        return {"path": path, "type": "save_weights"}

    def saved(self, path: str) -> JsonObject:
        file = self.checkpoint_folder(path) / ABOUT
        if not file.is_file():
            raise ClientMistake(f"path: there is no checkpoint {path!r}")
        return json.loads(file.read_text())

    def load(self, id: str, path: str, optimizer: bool, base: str = "") -> JsonObject:
        """Continue a model from a checkpoint, or make one from it."""
        about = self.saved(path)
        folder = self.checkpoint_folder(path)
        files = {name: content for name, content in read_files(folder).items() if name != ABOUT}
        if not optimizer:
            numbers = {**json.loads(bytes(files["learner.json"])), "optimizer_steps": 0}
            files = {name: content for name, content in files.items() if not name.startswith("optimizer")}
            files["learner.json"] = json.dumps(numbers).encode()
        state = StoredFiles(None, files)
        if id not in self.models:
            name = base or about["base_model"]
            if name not in self.bases:
                raise ClientMistake(f"base_model: {name!r} is not served")
            self.create(id, self.bases[name], about["lora_rank"], 0, state)
        else:
            model = self.staffed(id)
            if (model.base.name, model.lora_rank) != (about["base_model"], about["lora_rank"]):
                raise ClientMistake(f"path: {path} is of {about['base_model']} with lora_rank {about['lora_rank']}, unlike the model")
            model.group.replace_state(state)
        return {"path": path, "model_id": id, "type": "load_weights"}

    def save_for_sampler(self, id: str, name: str, session: str) -> JsonObject:
        """Publish the weights for engines. With a `name` they are saved too, otherwise they are kept in memory for a while."""
        path, model = f"tinker://{id}/sampler_weights/{name or session}", self.staffed(id)
        if name:
            model.group.storage.save_model(self._new_folder(path, overwrite=False))
            self._complete(model, path)
        model.versions[path] = model.group.weights.publish(next(self.numbers))
        while len(model.versions) > KEPT_VERSIONS:
            model.versions.popitem(last=False)
        if session:
            self.samplers[session] = path
        return {"path": path if name else None, "sampling_session_id": session or None, "type": "save_weights_for_sampler"}

    def checkpoints(self, model: str = "") -> list[JsonObject]:
        files = sorted(self.folder.glob(f"*/*/*/{ABOUT}"), key=lambda file: file.stat().st_mtime)
        found: list[JsonObject] = [json.loads(file.read_text()) for file in files]
        return [about for about in found if model in ("", about["model"])]

    def delete(self, path: str) -> None:
        self.saved(path)
        shutil.rmtree(self.checkpoint_folder(path))

    # ---- sampling ---------------------------------------------------------------------------------------------

    def sample(self, where: str, jobs: Sequence[Job]) -> None:
        """Generate all responses of these jobs in one call of an engine. `where`: path of the weights, or name of a base model."""
        base, weights = self._weights_of(where)
        pool = self._engine(base)
        requests = [job.content.requests(self.keys) for job in jobs]
        found = self._generate(base, pool, weights, [one for of_job in requests for one in of_job])
        for job, of_job in zip(jobs, requests, strict=True):
            parts = [found[request.key].whole() for request in of_job]
            job.future.set_result(write_samples(parts))

    def _generate(self, base: ServedModel, pool: WorkerPool, weights: WeightVersion, requests: list[Request]) -> dict[int, Generated]:
        """Return what an engine generated for each request, by key. If its process is lost, another one begins again."""
        while True:
            self._turn_to(pool)
            self.broker.resize(pool, 1)
            [instance] = pool.working
            try:
                return self._generate_on(instance, weights, requests, base.recipe.learner.deadline_s)
            except (*GONE, ProcessLost) as error:
                pool.end_lost(instance, reason_of(error))

    def _generate_on(self, instance: Instance, weights: WeightVersion, requests: list[Request], deadline_s: float) -> dict[int, Generated]:
        leases, ledger = [lease.id for lease in instance.leases], self.leases.ledger
        if instance.state is State.STARTING:
            started = instance.start_result(deadline_s)
            instance.memory_mb = started["memory_mb"]
            ledger.spans(leases, started["spans"])
        fetch_into(instance, weights)
        if instance.loading is not None:
            ledger.spans(leases, get(instance.loading, deadline_s, f"{instance.id} to load weights"))
            instance.loading = None
        found = {request.key: Generated() for request in requests}
        call = instance.actor.rollout.options(num_returns="streaming")
        reports = call.remote(next(self.epochs), requests, POLL_S, len(leases))
        while wait_any([reports], deadline_s, "the engine's tokens") and (ref := next(reports, None)) is not None:
            deltas, _, spans = get(ref, deadline_s, "the engine's tokens")
            ledger.spans(leases, spans)
            bounds = deltas.bounds
            for key, end, first, last in zip(deltas.keys.tolist(), deltas.ends.tolist(), bounds, bounds[1:], strict=False):
                found[key].token_ids.append(deltas.token_ids[first:last])
                found[key].logprobs.append(deltas.logprobs[first:last])
                found[key].finish_reason = ENDS[end]
        return found

    def _weights_of(self, where: str) -> tuple[ServedModel, WeightVersion]:
        for model in self.models.values():
            if where in model.versions:
                return model.base, model.versions[where]
        base = self.bases[where] if where in self.bases else self.bases[self.saved(where)["base_model"]]
        if where not in self.stored:
            files = base.files if where in self.bases else read_files(self.checkpoint_folder(where))
            self.stored[where] = stored_version(next(self.numbers), {name: as_numpy(x) for name, x in stored_weights(files)})
            while len(self.stored) > KEPT_VERSIONS:
                self.stored.popitem(last=False)
        return base, self.stored[where]

    def _engine(self, base: ServedModel) -> WorkerPool:
        if base.name not in self.engines:
            make = PoolMaker(base.recipe, self.broker, base.files, LOG.warning)
            settings = replace(
                engine_settings(base.recipe, 1, self.leases.resource, end_token_id=base.end_token_id), max_model_len=base.context
            )
            config = ray.put(without_weights(base.files))
            self.engines[base.name] = make.engines("sample", ExactEngineActor, settings, config)
        return self.engines[base.name]

    def close(self) -> None:
        """End everything. Waits for the request that is being worked on."""
        self.requests.close()
        self.thread.join()
        for pool in self._pools():
            pool.close()
        self.leases.ledger.close()
        self.leases.ledger.append_to(self.folder / "ledger.csv")
        self.leases.release_all()


def failure(error: BaseException) -> JsonObject:
    """Return what a client gets for a failed request."""
    category = "user" if isinstance(error, ClientMistake) else "server"
    return {"error": one_line(error, 500), "category": category}
