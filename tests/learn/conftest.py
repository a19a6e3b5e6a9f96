"""Every learner case of the tests, run once in three processes: a gang of one rank and a gang of two."""

from __future__ import annotations

import json
import os
import pickle
import re
import socket
import subprocess
import sys
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from rlhfless_ray.learn import rank_settings
from rlhfless_ray.learn.batch import Batch
from rlhfless_ray.learn.carry import carried
from rlhfless_ray.learn.rank_settings import CriticSettings, RankSettings
from rlhfless_ray.local.laptop.local_ray import forked
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.weights.tensor_slice import HeldSlices
from tests.conftest import made_once

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))


def learner_settings(ranks: int = 1, stage: int = 0, temperature: float = 1.0, **changes: Any) -> RankSettings:
    """Every part of the update is at work: warm-up, weight decay, clipping of gradients and ratios, importance weights."""
    learner = {
        "ranks": ranks,
        "zero_stage": stage,
        "learning_rate": 1e-3,
        "warmup_steps": 2,
        "weight_decay": 0.1,
        "betas": [0.9, 0.95],
        "grad_clip": 0.1,
        "micro_batch_tokens": 150,  # two micro-batches of a batch, one or two of half a batch
    }
    tree: dict[str, Any] = {
        "prompts": {"task": "chain"},
        "reward": {"function": "task"},
        "learner": {**learner, **changes.get("learner", {})},
        "algorithm": {"clip_low": 0.01, "clip_high": 0.015, "importance_cap": 1.5, **changes.get("algorithm", {})},
        "policy": {"dtype": changes.get("dtype", "float32")},
        "ema": changes.get("ema", {}),
        "lora": changes.get("lora", {}),
        "rollout": {"temperature": temperature},
        "run": {"seed": 3},
    }
    return rank_settings.learner_settings(Recipe.parse(tree))


def critic_settings(ranks: int = 1, stage: int = 0, dtype: str = "float32", normalize: bool = False, **lora: Any) -> CriticSettings:
    """Warm-up, decay of the rate, weight decay on some weights, clipping of gradients and values, two steps an update."""
    recipe = Recipe.parse({
        "prompts": {"task": "chain"}, "reward": {"function": "task"}, "run": {"steps": 6, "seed": 3}, "policy": {"dtype": dtype},
        "algorithm": {"advantage": {"estimator": "gae"}, "updates_per_step": 2}, "lora": lora,
        "learner": {"zero_stage": stage, "micro_batch_tokens": 100},
        "critic": {
            "ranks": ranks, "learning_rate": 3e-3, "warmup_share": 0.2, "weight_decay": 0.2, "value_clip": 0.01, "grad_clip": 0.3,
            "normalize": normalize,
        },
    })  # fmt: skip
    return rank_settings.critic_settings(recipe)


def run_gangs(folder: Path, jobs: dict[int, dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    """{ranks: cases} → {ranks: [results of rank 0, …]}; the gangs work side by side. What is in the folder already is read."""
    if folder.exists():
        return {ranks: [pickle.loads((folder / f"results{ranks}-{k}").read_bytes()) for k in range(ranks)] for ranks in jobs}
    folder.mkdir(parents=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    worker_groups = []
    for ranks, cases in jobs.items():
        (folder / f"cases{ranks}").write_bytes(pickle.dumps(cases))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            worker_groups.append(f"{ranks}:{probe.getsockname()[1]}")
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            forked([sys.executable, str(HERE / "learner_process.py"), str(folder), *worker_groups]), env=environment, stdout=log, stderr=log
        )
    try:
        code = process.wait(timeout=800)
    finally:
        process.kill()
    said = "".join(f"{path.name}:\n{path.read_text(errors='replace')[-4000:]}\n" for path in sorted(folder.glob("log*")))
    assert code == 0, f"a learner process ended with an error:\n{said}"
    return run_gangs(folder, jobs)


def joined(ranks: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """What the first of these ranks found in a case, with the weights that all of them published together."""
    every = [of_rank[name] for of_rank in ranks]
    for found in every:
        assert "error" not in found, found["error"]
    return {**every[0], "weights": [dict(HeldSlices.of(*shards)) for shards in zip(*(found["weights"] for found in every), strict=True)]}


def without_first(batch: Batch) -> Batch:
    """The batch with a first response of which no token is the policy's, as agents may have."""
    sizes = batch.lengths - batch.prompt_lengths
    mask = np.ones(int(sizes.sum()), bool)
    mask[: sizes[0]] = False
    return replace(batch, mask=mask, logprobs=batch.logprobs[sizes[0] :], advantages=batch.advantages[sizes[0] :])


# ZeRO stages of each kind of case, of those with several. What DeepSpeed does at each one with each number of ranks is what the cases
# `plain` are about. Of the others `make test` runs the lowest stage on one rank and the highest on two.
STAGES = {
    **dict.fromkeys(("plain", "full", "nan", "infinite", "lora"), (0, 1, 2, 3)),
    **dict.fromkeys(("few", "tied", "gspo", "averaged"), (0, 2, 3)),
    **dict.fromkeys(("shared", "chunked", "kl in reward", "dropped", "critic lora"), (0, 3)),
    **dict.fromkeys(("shared gspo", "own means", "carried", "masked", "sequence"), (0, 2)),
    **dict.fromkeys(("hosted nan", "infinite hosted", "bf16", "bf16 hosted", "bf16 lora", "bf16 nan", "lora hosted"), (2, 3)),
    "hosted": (1, 2, 3),
    "shuffled": (0, 1),
    "critic": (0, 1, 3),
}
VARIANTS = re.compile(r" (parked|reads|passed)$")  # of a case, which is compared with it


def is_long(name: str, ranks: int) -> bool:
    """Whether only `make test-long` runs a case."""
    kind, _, stage = name.partition("/")
    base = VARIANTS.sub("", kind)
    if base not in STAGES:
        return ranks != (1 if base == "critic scaled" else 2)
    if kind == "plain":
        return False
    if base == "plain":
        return ranks != (1 if stage == "0" else 2)
    return (ranks, int(stage)) not in ((1, STAGES[base][0]), (2, STAGES[base][-1]))


def marked(*names: str) -> list[Any]:
    """Parameters `name` and `ranks`: each case on one rank and on two."""
    return [pytest.param(name, ranks, marks=[pytest.mark.long] * is_long(name, ranks)) for name in names for ranks in (1, 2)]


class Cases:
    """What the gangs are asked and what they answered."""

    def __init__(self, folder: Path) -> None:
        from tiny_policy import random_batch, tiny_policy

        self.folder = folder
        self.asked: dict[int, dict[str, Any]] = {}
        rng = np.random.default_rng(7)
        self.files = tiny_policy(width=63, layers=1)  # odd: the parts of two ranks are padded
        self.tied = tiny_policy(3, tied=True)
        self.large = tiny_policy(vocabulary=1700, layers=1)  # DeepSpeed shards parameters of more than 100,000 elements only
        self.bf16 = tiny_policy(0, dtype="bfloat16", width=63)
        self.batches = [random_batch(rng) for _ in range(3)]
        self.few = [random_batch(rng, groups=1, samples=1) for _ in range(2)]
        spoilt = self.batches[1].advantages.copy()
        spoilt[4] = np.nan
        self.with_nan = [self.batches[0], replace(self.batches[1], advantages=spoilt), self.batches[2]]
        far = np.full(len(self.batches[1].logprobs), 100, np.float32)  # k3 overflows, and the gradient of the KL does not
        self.with_infinite_loss = [self.batches[0], replace(self.batches[1], reference=far), self.batches[2]]
        drawn = self.batches[1].logprobs.copy()
        drawn[2] = np.nan
        self.returned = [replace(batch, returns=rng.normal(size=len(batch.logprobs)).astype(np.float32)) for batch in self.batches]
        config = {**json.loads(self.files["config.json"]), "mean": 0.2, "std": 0.5}
        self.scaled = {**self.files, "config.json": json.dumps(config).encode()}
        long = np.random.default_rng(8)
        self.long = [random_batch(long, prompts=(40, 60)) for _ in range(2)]  # prompts that are worth sharing
        left, self.carried = None, []
        for batch in self.batches:
            old = (batch.logprobs + 0.02 * rng.normal(size=len(batch.logprobs))).astype(np.float32)
            cut, left = carried(left, replace(batch, old=old), 5, 2, rng)
            self.carried.append(cut)
        self.with_nan_sampler = [replace(self.batches[1], logprobs=drawn), Batch.of([])]

    def first(self, ranks: int) -> dict[str, Any]:
        """Runs from the policy's files, named "<what>/<ZeRO stage>"."""
        if ranks not in self.asked:
            self.asked[ranks] = self._first(ranks)
        return self.asked[ranks]

    def _first(self, ranks: int) -> dict[str, Any]:

        full = {"updates_per_step": 2, "loss_mean": "sequence", "kl": {"coefficient": 0.3, "estimator": "k3"}}
        sequence = {"loss_mean": "sequence", "kl": {"coefficient": 0.3, "estimator": "k3"}}
        k1 = {"importance_cap": 0, "kl": {"coefficient": 0.1, "estimator": "k1"}}
        cases: dict[str, Any] = {}
        two = self.batches[:2]  # where the schedule and a continued run play no part

        def add(name: str, files: dict[str, bytes], batches: list[Any], **changes: Any) -> None:
            for stage in STAGES.get(name, (0,)):
                settings = learner_settings(ranks, stage, **changes)
                once = ("full", "tied", "lora", "bf16 lora", "hosted", "lora hosted")
                taken = {"plain": (0, 1), "bf16": (0, 1), "averaged": (1, 3), **dict.fromkeys(once, (1,))}
                snapshots = taken.get(name, ())
                cases[f"{name}/{stage}"] = {"settings": settings, "files": files, "batches": batches, "snapshots": snapshots}

        add("plain", self.files, self.batches)
        add("full", self.files, self.batches, temperature=0.7, algorithm=full)
        wide = {"micro_batch_tokens": 200}
        # ZeRO 1 and 2 leave the forward pass alone, in which prompts are shared
        add("shared", self.files, self.long, temperature=0.7, algorithm=full, learner=wide)
        add("nan", self.files, self.with_nan)
        add("few", self.files, self.few)
        add("tied", self.tied, self.batches)
        add("chunked", self.large, two)
        for stage in (0, 3):  # ranks have different numbers of chunks
            cases[f"chunked/{stage}"]["chunk_bytes"] = 4 * 1700 * 5
        add("wide", self.files, two, learner={"micro_batch_tokens": 10**6})
        add("narrow", self.files, two, learner={"micro_batch_tokens": 1})
        add("recompute", self.files, two, learner={"gradient_checkpointing": True})
        hosted = {"optimizer_offload": True}
        add("hosted", self.files, self.batches, learner={**hosted, "micro_batch_tokens": 100})
        add("hosted nan", self.files, self.with_nan, learner=hosted)
        unbounded = {"kl": {"coefficient": 0.3, "estimator": "k3", "unbiased_gradient": True, "limit": None}}
        add("infinite", self.files, self.with_infinite_loss, algorithm=unbounded)
        add("infinite hosted", self.files, self.with_infinite_loss, algorithm=unbounded, learner=hosted)
        add("bf16 hosted", self.bf16, self.batches, dtype="bfloat16", learner=hosted)
        add("nan sampler", self.files, self.with_nan_sampler)
        gspo = {"kind": "gspo", "dual_clip": 1.002, "entropy_coefficient": 0.05, "correction_level": "seq", "correction_high": 1.1}
        add(
            "gspo",
            self.files,
            two,
            temperature=0.8,
            algorithm={"updates_per_step": 2, "epochs": 2, "loss_mean": "sequence", "importance_cap": 0, "loss": gspo},
        )
        of_gspo = {"loss_mean": "sequence", "importance_cap": 0, "clip_low": 0.2, "clip_high": 0.3, "loss": gspo}
        add("shared gspo", self.files, self.long, algorithm=of_gspo, learner=wide)
        add(
            "gspo sampler",
            self.files,
            two,
            algorithm={
                "updates_per_step": 2,
                "loss_mean": "sequence",
                "importance_cap": 0,
                "clip_low": 0.8,
                "clip_high": 4.0,
                "loss": {"kind": "gspo", "ratio_to": "sampler", "entropy_coefficient": 0.05},
            },
        )
        band = {"correction_level": "token", "correction_mode": "clip", "correction_low": 0.8, "correction_high": 1.2}
        unbiased = {"coefficient": 0.3, "estimator": "k1", "unbiased_gradient": True}
        add("shuffled", self.files, two, algorithm={"batch_samples": 5, "epochs": 2, "importance_cap": 0, "loss": band, "kl": unbiased})
        own = {"loss_mean": "sequence", "regularization_mean": "token", "kl": {"coefficient": 0.3, "estimator": "k3"}}
        add("own means", self.files, two, algorithm={**own, "updates_per_step": 2, "loss": {"entropy_coefficient": 0.05}})
        carry = {"batch_samples": 5, "epochs": 2, "remainder": "carry", "clip_low": 0.9, "clip_high": 4.0}  # `old` is made up
        add("carried", self.files, self.carried, algorithm=carry)
        masks = {"correction_level": "token", "correction_low": 0.5, "correction_high": 2, "entropy_coefficient": 0.1}
        add("masked", self.files, two, algorithm={"importance_cap": 0, "loss": masks})
        in_reward = {"kl": {"coefficient": 0.3, "estimator": "k2", "place": "reward"}}
        add("kl in reward", self.files, two, algorithm=in_reward)
        for stage in (0, 3):
            cases[f"kl in reward/{stage}"]["looks"] = ("old",)
        add("averaged", self.files, self.batches, ema={"beta": 0.6})
        add("uncorrected", self.files, two, algorithm=k1)
        add("bf16", self.bf16, self.batches, dtype="bfloat16")  # ZeRO 1 is the same, see `test_zero_1_of_bfloat16_is_zero_2`
        lora = {"rank": 3, "alpha": 7}
        of_lora = {"updates_per_step": 2, "kl": {"coefficient": 0.3, "estimator": "k3"}}
        add("lora", self.files, self.batches, algorithm=of_lora, lora=lora)
        add("lora hosted", self.files, self.batches, algorithm=of_lora, lora=lora, learner=hosted)
        drops = {"algorithm": {"updates_per_step": 2}, "lora": {**lora, "dropout": 0.3}}
        add("dropped", self.files, self.batches[:2], **drops)
        narrow = {"micro_batch_tokens": 1, "gradient_checkpointing": True}
        add("dropped narrow", self.files, self.batches[:2], **drops, learner=narrow)
        add("bf16 lora", self.bf16, self.batches, dtype="bfloat16", lora={**lora, "target_modules": ["q_proj", "embed_tokens"]})
        for of in self.PARKED:  # the device's part is played by the host's own memory
            cases[of.replace("/", " parked/")] = {**cases[of], "parks": True, "snapshots": (1,)}
        add("bf16 nan", self.bf16, self.with_nan, dtype="bfloat16")
        for of in self.READS:
            cases[of.replace("/", " reads/")] = {**cases[of], "reads": True, "snapshots": (1,)}
        add("sequence", self.files, [without_first(batch) for batch in two], algorithm=sequence)
        for of in self.PASSED:
            names = ("old", "reference") if of.startswith("lora") else ("old",)
            cases[of.replace("/", " passed/")] = {**cases[of], "passes": names, "snapshots": ()}
        for stage in STAGES["critic"]:
            cases[f"critic/{stage}"] = {
                "settings": critic_settings(ranks, stage),
                "files": self.files,
                "batches": self.returned,
                "snapshots": (1,),
            }
        cases["critic scaled/0"] = {**cases["critic/0"], "settings": critic_settings(ranks, normalize=True), "files": self.scaled}
        for stage in STAGES["critic lora"]:
            cases[f"critic lora/{stage}"] = {**cases[f"critic/{stage}"], "settings": critic_settings(ranks, stage, rank=2, alpha=8)}
        return cases

    PASSED: ClassVar = ("full/3", "shuffled/1", "lora/3", "kl in reward/0")
    PARKED: ClassVar = ("plain/0", "plain/2", "plain/3", "bf16/2", "lora/0", "lora/2", "lora/3", "hosted/1", "hosted/3", "lora hosted/2")

    READS: ClassVar = ("plain/1", "plain/2", "full/2", "tied/2", "averaged/2", "hosted/1", "bf16/2", "bf16 nan/2")

    # (a run, its number of ranks, the ZeRO stage at which another gang goes on from its snapshot), by that gang's ranks
    CONTINUED: ClassVar = {
        1: [
            ("plain/0", 1, 0),
            ("plain/2", 2, 0),
            ("plain/3", 2, 1),
            ("plain/0", 1, 3),
            ("full/0", 1, 0),
            ("tied/3", 2, 2),
            ("bf16/2", 1, 2),
            ("bf16/3", 2, 1),
            ("critic/3", 2, 0),
            ("averaged/3", 2, 0),
            ("lora/0", 1, 0),
            ("lora/3", 2, 0),
            ("bf16 lora/3", 2, 2),
            ("critic lora/3", 2, 0),
            ("hosted/3", 2, 0),
            ("hosted/3", 2, 1),
        ],
        2: [
            ("plain/0", 1, 2),
            ("plain/2", 1, 3),
            ("plain/0", 2, 0),
            ("tied/0", 1, 3),
            ("bf16/2", 1, 3),
            ("critic/0", 1, 3),
            ("lora/0", 1, 3),
            ("hosted/1", 1, 3),
        ],
    }

    def second(self, ranks: int) -> dict[str, Any]:
        """Runs that go on from a snapshot, in new processes: after the first update, and a few before any."""
        cases = {}
        starts = [(*row, 1) for row in self.CONTINUED[ranks]] + [("plain/2", 2, ranks, 0), ("bf16/2", 1, 2, 0)]
        for name, from_ranks, stage, done in starts:
            before = self.first(from_ranks)[name]
            section = before["settings"].learner
            offloads = section.optimizer_offload and stage > 0
            changed = section.model_copy(update={"zero_stage": stage, "ranks": ranks, "optimizer_offload": offloads})
            cases[f"{name} of {from_ranks} at {stage} after {done}"] = {
                "settings": replace(before["settings"], learner=changed),
                "files": before["files"],
                "batches": before["batches"][done:],
                "state": self.result(name, from_ranks)["snapshots"][done],
                "snapshots": (2,) if name.startswith("averaged") else (),
            }
        return cases

    def run(self) -> None:
        self.results = run_gangs(self.folder / "first", self._those(long=False))
        self.continued = run_gangs(self.folder / "second", {ranks: self.second(ranks) for ranks in (1, 2)})

    def _those(self, long: bool) -> dict[int, dict[str, Any]]:
        """The cases of gangs of one and two ranks: those that only `make test-long` runs, or the others."""
        return {ranks: {name: case for name, case in self.first(ranks).items() if is_long(name, ranks) == long} for ranks in (1, 2)}

    @cached_property
    def long_results(self) -> dict[int, list[dict[str, Any]]]:
        return run_gangs(self.folder / "long", self._those(long=True))

    def result(self, name: str, ranks: int, rank: int = 0) -> dict[str, Any]:
        """What a rank found. Its weights and snapshots have those of all ranks."""
        results = self.continued if " of " in name else self.long_results if is_long(name, ranks) else self.results
        every = [of_rank[name] for of_rank in results[ranks]]
        for found in every:
            assert "error" not in found, found["error"]
        snapshots: dict[Any, dict[str, bytes]] = {}
        for found in every:
            for when, files in found.get("snapshots", {}).items():
                snapshots.setdefault(when, {}).update(files)
        weights = [dict(HeldSlices.of(*shards)) for shards in zip(*(found["weights"] for found in every), strict=True)]
        model = {name: content for found in every for name, content in found.get("model", {}).items()}
        return {**every[rank], "snapshots": snapshots, "weights": weights, "model": model, "shards": every[rank]["weights"]}


@pytest.fixture(scope="session")
def cases(tmp_path_factory: pytest.TempPathFactory, warm_processes: None) -> Cases:
    folder = made_once(tmp_path_factory, "learner", lambda folder: Cases(folder).run())
    made = Cases(folder)
    made.run()
    return made
