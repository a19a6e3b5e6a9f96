"""Every learner case of the tests, run once in three processes: a gang of one rank and a gang of two."""

from __future__ import annotations

import json
import os
import pickle
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from rlhfless_ray.learn import rank_settings
from rlhfless_ray.learn.batch import Batch
from rlhfless_ray.learn.carry import carried
from rlhfless_ray.learn.rank_settings import CriticSettings, RankSettings
from rlhfless_ray.local.local_ray import forked
from rlhfless_ray.recipe import Recipe
from rlhfless_ray.weights.parts import Assembled
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
    return {**every[0], "weights": [dict(Assembled(shards)) for shards in zip(*(found["weights"] for found in every), strict=True)]}


class Cases:
    """What the gangs are asked and what they answered."""

    def __init__(self, folder: Path) -> None:
        from tiny_policy import random_batch, tiny_policy

        self.folder = folder
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
        from tiny_policy import EARLY

        full = {"updates_per_step": 2, "loss_mean": "sequence", "kl": {"coefficient": 0.3, "estimator": "k3"}}
        sequence = {"loss_mean": "sequence", "kl": {"coefficient": 0.3, "estimator": "k3"}}
        k1 = {"importance_cap": 0, "kl": {"coefficient": 0.1, "estimator": "k1"}}
        cases: dict[str, Any] = {}
        two = self.batches[:2]  # where the schedule and a continued run play no part

        def add(name: str, files: dict[str, bytes], batches: list[Any], *stages: int, **changes: Any) -> None:
            for stage in stages:
                settings = learner_settings(ranks, stage, **changes)
                once = ("full", "tied", "lora", "bf16 lora", "hosted", "lora hosted")
                taken = {"plain": (0, 1), "bf16": (0, 1), "averaged": (1, 3), **dict.fromkeys(once, (1,))}
                snapshots = taken.get(name, ())
                cases[f"{name}/{stage}"] = {"settings": settings, "files": files, "batches": batches, "snapshots": snapshots}

        add("plain", self.files, self.batches, 0, 1, 2, 3)
        add("full", self.files, self.batches, 0, 1, 2, 3, temperature=0.7, algorithm=full)
        wide = {"micro_batch_tokens": 200}
        # ZeRO 1 and 2 leave the forward pass alone, in which prompts are shared
        add("shared", self.files, self.long, 0, 3, temperature=0.7, algorithm=full, learner=wide)
        add("nan", self.files, self.with_nan, 0, 1, 2, 3)
        add("few", self.files, self.few, 0, 2, 3)
        add("tied", self.tied, self.batches, 0, 2, 3)
        add("chunked", self.large, two, 0, 3)
        for stage in (0, 3):  # ranks have different numbers of chunks
            cases[f"chunked/{stage}"]["chunk_bytes"] = 4 * 1700 * 5
        add("wide", self.files, two, 0, learner={"micro_batch_tokens": 10**6})
        add("narrow", self.files, two, 0, learner={"micro_batch_tokens": 1})
        add("recompute", self.files, two, 0, learner={"gradient_checkpointing": True})
        hosted = {"optimizer_offload": True}
        add("hosted", self.files, self.batches, 1, 2, 3, learner={**hosted, "micro_batch_tokens": 100})
        add("hosted nan", self.files, self.with_nan, 2, 3, learner=hosted)
        unbounded = {"kl": {"coefficient": 0.3, "estimator": "k3", "unbiased_gradient": True, "limit": None}}
        add("infinite", self.files, self.with_infinite_loss, 0, 1, 2, 3, algorithm=unbounded)
        add("infinite hosted", self.files, self.with_infinite_loss, 2, 3, algorithm=unbounded, learner=hosted)
        add("bf16 hosted", self.bf16, self.batches, 2, 3, dtype="bfloat16", learner=hosted)
        add("nan sampler", self.files, self.with_nan_sampler, 0)
        gspo = {"kind": "gspo", "dual_clip": 1.002, "entropy_coefficient": 0.05, "correction_level": "seq", "correction_high": 1.1}
        add(
            "gspo",
            self.files,
            two,
            0,
            2,
            3,
            temperature=0.8,
            algorithm={"updates_per_step": 2, "epochs": 2, "loss_mean": "sequence", "importance_cap": 0, "loss": gspo},
        )
        of_gspo = {"loss_mean": "sequence", "importance_cap": 0, "clip_low": 0.2, "clip_high": 0.3, "loss": gspo}
        add("shared gspo", self.files, self.long, 0, 2, algorithm=of_gspo, learner=wide)
        add(
            "gspo sampler",
            self.files,
            two,
            0,
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
        add(
            "shuffled",
            self.files,
            two,
            0,
            1,
            algorithm={"batch_samples": 5, "epochs": 2, "importance_cap": 0, "loss": band, "kl": unbiased},
        )
        own = {"loss_mean": "sequence", "regularization_mean": "token", "kl": {"coefficient": 0.3, "estimator": "k3"}}
        add("own means", self.files, two, 0, 2, algorithm={**own, "updates_per_step": 2, "loss": {"entropy_coefficient": 0.05}})
        carry = {"batch_samples": 5, "epochs": 2, "remainder": "carry", "clip_low": 0.9, "clip_high": 4.0}  # `old` is made up
        add("carried", self.files, self.carried, 0, 2, algorithm=carry)
        masks = {"correction_level": "token", "correction_low": 0.5, "correction_high": 2, "entropy_coefficient": 0.1}
        add("masked", self.files, two, 0, 2, algorithm={"importance_cap": 0, "loss": masks})
        in_reward = {"kl": {"coefficient": 0.3, "estimator": "k2", "place": "reward"}}
        add("kl in reward", self.files, two, 0, 3, algorithm=in_reward)
        for stage in (0, 3):
            cases[f"kl in reward/{stage}"]["looks"] = ("old",)
        add("averaged", self.files, self.batches, 0, 2, 3, ema={"beta": 0.6})
        add("uncorrected", self.files, two, 0, algorithm=k1)
        add("bf16", self.bf16, self.batches, 2, 3, dtype="bfloat16")  # ZeRO 1 is the same, see `test_zero_1_of_bfloat16_is_zero_2`
        lora = {"rank": 3, "alpha": 7}
        of_lora = {"updates_per_step": 2, "kl": {"coefficient": 0.3, "estimator": "k3"}}
        add("lora", self.files, self.batches, 0, 1, 2, 3, algorithm=of_lora, lora=lora)
        add("lora hosted", self.files, self.batches, 2, 3, algorithm=of_lora, lora=lora, learner=hosted)
        drops = {"algorithm": {"updates_per_step": 2}, "lora": {**lora, "dropout": 0.3}}
        add("dropped", self.files, self.batches[:2], 0, 3, **drops)
        narrow = {"micro_batch_tokens": 1, "gradient_checkpointing": True}
        add("dropped narrow", self.files, self.batches[:2], 0, **drops, learner=narrow)
        add("bf16 lora", self.bf16, self.batches, 2, 3, dtype="bfloat16", lora={**lora, "target_modules": ["q_proj", "embed_tokens"]})
        for of in self.PARKED:  # the device's part is played by the host's own memory
            cases[of.replace("/", " parked/")] = {**cases[of], "parks": True, "snapshots": (1,)}
        add("bf16 nan", self.bf16, self.with_nan, 2, 3, dtype="bfloat16")
        for of in self.READS:
            cases[of.replace("/", " reads/")] = {**cases[of], "reads": True, "snapshots": (1,)}
        add("sequence", self.files, two, 0, 2, algorithm=sequence)
        for of, groups in EARLY.items():
            cases[of.replace("/", " early/")] = {**cases[of], "early": groups, "snapshots": ()}
        for of in self.PASSED:
            names = ("old", "reference") if of.startswith("lora") else ("old",)
            cases[of.replace("/", " passed/")] = {**cases[of], "passes": names, "snapshots": ()}
        for stage in (0, 1, 3):
            cases[f"critic/{stage}"] = {
                "settings": critic_settings(ranks, stage),
                "files": self.files,
                "batches": self.returned,
                "snapshots": (1,),
            }
        cases["critic scaled/0"] = {**cases["critic/0"], "settings": critic_settings(ranks, normalize=True), "files": self.scaled}
        for stage in (0, 3):
            cases[f"critic lora/{stage}"] = {**cases[f"critic/{stage}"], "settings": critic_settings(ranks, stage, rank=2, alpha=8)}
        return cases

    PASSED: ClassVar = ("full/3", "shuffled/1", "lora/1", "kl in reward/0")
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
            ("critic/1", 2, 0),
            ("averaged/3", 2, 0),
            ("lora/0", 1, 0),
            ("lora/3", 2, 0),
            ("bf16 lora/2", 2, 2),
            ("critic lora/3", 2, 0),
            ("hosted/3", 2, 0),
            ("hosted/2", 2, 1),
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
        self.results = run_gangs(self.folder / "first", {ranks: self.first(ranks) for ranks in (1, 2)})
        self.continued = run_gangs(self.folder / "second", {ranks: self.second(ranks) for ranks in (1, 2)})

    def result(self, name: str, ranks: int, rank: int = 0) -> dict[str, Any]:
        """What a rank found. Its weights and snapshots have those of all ranks."""
        every = [of_rank[name] for of_rank in (self.continued if " of " in name else self.results)[ranks]]
        for found in every:
            assert "error" not in found, found["error"]
        snapshots: dict[Any, dict[str, bytes]] = {}
        for found in every:
            for when, files in found.get("snapshots", {}).items():
                snapshots.setdefault(when, {}).update(files)
        weights = [dict(Assembled(shards)) for shards in zip(*(found["weights"] for found in every), strict=True)]
        model = {name: content for found in every for name, content in found.get("model", {}).items()}
        return {**every[rank], "snapshots": snapshots, "weights": weights, "model": model, "shards": every[rank]["weights"]}


@pytest.fixture(scope="session")
def cases(tmp_path_factory: pytest.TempPathFactory, warm_processes: None) -> Cases:
    folder = made_once(tmp_path_factory, "learner", lambda folder: Cases(folder).run())
    made = Cases(folder)
    made.run()
    return made
