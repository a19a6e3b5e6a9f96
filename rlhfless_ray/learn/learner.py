"""One rank of the learner gang: a DeepSpeed engine that turns batches into updates and weights."""

from __future__ import annotations

import gc
import importlib
import json
import math
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlhfless_ray.learn.batch import Batch, micro_batches, mini_batches
from rlhfless_ray.learn.loss import clipped_policy_loss, importance_weights, kl_estimate, token_weights
from rlhfless_ray.learn.model import TokenLogprobs, check_head, load_model, padded
from rlhfless_ray.learn.offload import leave_device, return_to_device
from rlhfless_ray.learn.optimizer_state import full_moments, full_weights, plain_optimizer, restore_moments
from rlhfless_ray.learn.overlap import inexact
from rlhfless_ray.types import Span, UpdateStats
from rlhfless_ray.weights.folder import write_folder

SUMS = ("loss", "policy_loss", "kl", "entropy", "clipped", "importance", "capped", "mismatch")
WEIGHTED = 3  # of SUMS, the first ones: weighted as the loss is; the others count every token the same


class Learner:
    """A plain class: the gang wraps it in a Ray actor, a test or a debugger calls it as it is."""

    def __init__(self, settings: dict[str, Any]) -> None:
        """`settings`: sections `learner`, `algorithm`, `policy` of the recipe, `temperature`, `rank`, `device`."""
        self.settings = settings
        self.learner, self.algorithm = settings["learner"], settings["algorithm"]
        self.rank, self.ranks = settings["rank"], settings["learner"]["ranks"]
        self.stage = self.learner["zero_stage"]
        self.device = torch.device("cuda" if settings["device"] == "gpu" else "cpu")
        self.optimizer_steps = 0
        self.skipped_in_a_row = 0
        self.engine: Any = None
        self.early: _Sums | None = None  # of groups whose gradients were accumulated before their step was complete
        self.reference: TokenLogprobs | None = None
        self.away = False  # parked on a GPU's host
        self.kept: dict[str, Any] | None = None  # the snapshot while away, where it cannot be made there

    # ---- life -------------------------------------------------------------------------------------------------

    def open(
        self, files: dict[str, bytes], rendezvous: tuple[str, int], threads: int, state: dict[str, Any] | None = None
    ) -> list[Span]:
        """Build the engine from a model folder's files; `state` (see `snapshot`) continues a stopped run.

        rendezvous: address and port of rank 0.
        """
        start = time.time()
        torch.set_num_threads(threads)
        os.environ.setdefault("DS_ACCELERATOR", "cuda" if self.device.type == "cuda" else "cpu")
        import deepspeed

        self._join_gang(rendezvous)
        with tempfile.TemporaryDirectory(prefix="rlhfless-policy-") as name:
            folder = write_folder(Path(name), files)
            policy = self.settings["policy"]
            model = load_model(folder, policy["dtype"], policy["trust_remote_code"])
            check_head(model)
            if self.algorithm["kl"]["coefficient"] > 0:
                reference = load_model(folder, policy["dtype"], policy["trust_remote_code"])
                self.reference = TokenLogprobs(reference).eval().requires_grad_(False).to(self.device)
        if state is not None:
            missing, unexpected = model.load_state_dict(state["weights"], strict=False)  # a tied head is stored once
            if unexpected or set(missing) - {"lm_head.weight"}:
                raise ValueError(f"the checkpoint is of another model: {(unexpected or missing)[0]} is in one of them only")
        model.train()
        if self.learner["gradient_checkpointing"]:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        betas = tuple(self.learner["betas"])
        wrapped = TokenLogprobs(model).to(self.device)
        optimizer = torch.optim.AdamW(
            wrapped.parameters(), lr=self._rate(), betas=betas, weight_decay=self.learner["weight_decay"], fused=True
        )
        bf16 = self.settings["policy"]["dtype"] == "bfloat16"
        self.engine, *_ = deepspeed.initialize(
            model=wrapped,
            optimizer=optimizer,
            config={
                "train_micro_batch_size_per_gpu": 1,
                "managed_gradient_accumulation": False,  # the number of micro-batches is open: we call step()
                "gradient_clipping": self.learner["grad_clip"] if self.stage else 0.0,  # stage 0: see `_apply`
                "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False,
                "bf16": {"enabled": bf16},
                "zero_optimization": {"stage": self.stage, "overlap_comm": False, "contiguous_gradients": True},
                "steps_per_print": 10**9,
            },
        )
        if self.stage == 0:
            self.engine.enable_backward_allreduce = False  # `_apply` reduces, so that it can look before it steps
        self._forget_trial_step()
        if state is not None:
            self.optimizer_steps = int(state["optimizer_steps"])
            restore_moments(self.engine, self.stage, state["moments"], self.optimizer_steps)
            torch.set_rng_state(state["rng"])
        return [Span("start", "open learner", start, time.time())]

    def _join_gang(self, rendezvous: tuple[str, int]) -> None:
        import deepspeed
        import torch.distributed as dist

        address, port = rendezvous
        if dist.is_initialized():
            return
        os.environ.update(
            MASTER_ADDR=address, MASTER_PORT=str(port), RANK=str(self.rank), LOCAL_RANK="0",
            WORLD_SIZE=str(self.ranks), LOCAL_SIZE="1",
        )
        if address.startswith("127."):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if self.device.type == "cpu":
            # DeepSpeed would compile a shared-memory all-reduce (about 45 s, needs g++ and ninja); gloo does it too.
            setattr(importlib.import_module("deepspeed.comm.torch"), "build_shm_op", lambda: None)  # noqa: B010
        deepspeed.init_distributed(
            dist_backend="nccl" if self.device.type == "cuda" else "gloo",
            init_method=f"tcp://{address}:{port}", rank=self.rank, world_size=self.ranks, verbose=False,
        )

    def _forget_trial_step(self) -> None:
        """DeepSpeed's ZeRO creates the optimizer state by a step on zero gradients; undo its count, which would
        distort Adam's bias correction of the first real step."""
        for state in plain_optimizer(self.engine).state.values():
            if torch.is_tensor(state.get("step")):
                state["step"].zero_()

    # ---- the update -------------------------------------------------------------------------------------------

    def update(self, batch: Batch, threads: int) -> tuple[UpdateStats, list[Span]]:
        """One rollout batch → `updates_per_step` optimizer steps. Every rank gets the whole batch, takes its share."""
        start = time.time()
        torch.set_num_threads(threads)
        if self.early is not None:
            return self._finish_early(batch), [Span("work", "update", start, time.time())]
        if len(batch) == 0:
            return _nothing("no sample of the step has a reward"), [Span("work", "update", start, time.time())]
        parts = mini_batches(batch, self.algorithm["updates_per_step"])
        # With one optimizer step the old policy is the current one: its log-probabilities need no pass of their own.
        old = self._logprobs(batch) if len(parts) > 1 else None
        stats = [self._step(batch, part, old) for part in parts]
        return _merge(stats), [Span("work", "update", start, time.time())]

    def accumulate(self, batch: Batch, threads: int) -> list[Span]:
        """Gradients of groups that are complete while others of their step are still being answered. `update` with the others
        then makes the step, which is that of the whole batch to rounding: gradients add up, and are divided by the step's
        tokens (or sequences) once these are known.

        Raises ValueError where that does not hold.
        """
        if reason := inexact(self.algorithm, self.learner):
            raise ValueError(reason)
        start = time.time()
        torch.set_num_threads(threads)
        if len(batch):
            found = self._unscaled(batch)
            self.early = found if self.early is None else self.early.plus(found)
        return [Span("work", "accumulate", start, time.time())]

    def _finish_early(self, batch: Batch) -> UpdateStats:
        assert self.early is not None
        whole, self.early = self.early, None
        if len(batch):
            whole = whole.plus(self._unscaled(batch))
        return self._made(whole, 1 / whole.whole)

    def _unscaled(self, batch: Batch) -> _Sums:
        """Backward passes with weights that do not depend on what else the step holds."""
        indices = np.arange(len(batch))
        lengths = torch.from_numpy(batch.response_lengths)
        whole = float(lengths.sum() if self.algorithm["loss_mean"] == "token" else len(lengths))
        weight_of = token_weights(lengths, self.algorithm["loss_mean"]).numpy() * whole
        return self._backward(batch, indices, None, weight_of, whole)

    def _share(self, batch: Batch, indices: np.ndarray) -> list[np.ndarray]:
        cuts = micro_batches(batch.lengths[indices], self.learner["micro_batch_tokens"], self.ranks)[self.rank]
        return [indices[cut] for cut in cuts]

    def _logprobs(self, batch: Batch) -> torch.Tensor:
        """Log-probabilities of this rank's tokens under the weights before the first optimizer step."""
        flat = torch.zeros(len(batch.logprobs), device=self.device)
        with torch.no_grad():
            for part in mini_batches(batch, self.algorithm["updates_per_step"]):
                for cut in self._share(batch, part):
                    tensors = padded(batch, cut if len(cut) else part[:1], self.device)
                    logprobs, _ = self._forward(self.engine, tensors)
                    flat[tensors["flat"]] = logprobs
        return flat

    def _forward(self, module: Any, tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        names = ("ids", "rows", "columns", "targets")
        return module(*(tensors[name] for name in names), self.settings["temperature"])

    def _step(self, batch: Batch, indices: np.ndarray, old: torch.Tensor | None) -> UpdateStats:
        lengths = torch.from_numpy(batch.response_lengths[indices])
        weight_of = np.zeros(len(batch))
        weight_of[indices] = token_weights(lengths, self.algorithm["loss_mean"]).numpy()
        return self._made(self._backward(batch, indices, old, weight_of, 1.0), 1.0)

    def _backward(
        self, batch: Batch, indices: np.ndarray, old: torch.Tensor | None, weight_of: np.ndarray, whole: float
    ) -> _Sums:
        """Add the gradients of these sequences. `weight_of` (sequences of the batch,): weight of each one's tokens; `whole`: what
        the weights are to be divided by in the end."""
        weights = torch.from_numpy(weight_of).float().to(self.device)
        advantages = torch.from_numpy(batch.advantages).to(self.device)
        sampler = torch.from_numpy(batch.logprobs).to(self.device)
        sums = torch.zeros(len(SUMS), dtype=torch.float64)
        most = torch.zeros(1, dtype=torch.float64)
        for cut in self._share(batch, indices):
            # A rank without work still joins the collectives: one sequence at weight 0.
            tensors = padded(batch, cut if len(cut) else indices[:1], self.device)
            weight = weights[tensors["sequence"]] if len(cut) else torch.zeros(len(tensors["flat"]), device=self.device)
            loss, values, worst = self._micro_loss(tensors, weight, advantages, sampler, old)
            # DeepSpeed averages gradients over ranks; the weights already sum to 1 over all of them.
            self.engine.backward(loss * self.ranks, scale_wrt_gas=False)
            sums += values
            if len(cut):
                most = torch.maximum(most, worst)
        return _Sums(sums, most, int(batch.response_lengths[indices].sum()), whole)

    def _made(self, found: _Sums, scale: float) -> UpdateStats:
        """The optimizer step on what was accumulated; `scale`: of gradients and weighted sums."""
        sums, most = self._over_ranks(found.sums, found.most)
        rate = self._rate()
        norm, applied, reason = self._apply(bool(torch.isfinite(sums[0])), scale)
        sums[:WEIGHTED] *= scale
        sums[WEIGHTED:] /= found.tokens  # statistics are means over tokens, whatever the loss averages over
        named = dict(zip(SUMS, sums.tolist(), strict=True))
        return UpdateStats(
            loss=named["loss"], policy_loss=named["policy_loss"], kl=named["kl"], entropy=named["entropy"],
            clip_share=named["clipped"], importance_mean=named["importance"], importance_capped_share=named["capped"],
            mismatch_mean=named["mismatch"], mismatch_max=float(most), grad_norm=norm, learning_rate=rate,
            trained_tokens=found.tokens if applied else 0, skipped=int(not applied), reason=reason,
            applied=int(applied), skipped_last=int(not applied),
        )

    def _micro_loss(
        self, tensors: dict[str, torch.Tensor], weight: torch.Tensor, advantages: torch.Tensor,
        sampler: torch.Tensor, old: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Weighted loss of one micro-batch, its part of SUMS and the largest mismatch."""
        algorithm = self.algorithm
        logprobs, entropy = self._forward(self.engine, tensors)
        drawn = sampler[tensors["flat"]]
        before = logprobs.detach() if old is None else old[tensors["flat"]]
        cap = algorithm["importance_cap"]
        importance = importance_weights(before, drawn, cap)
        token_loss, clipped = clipped_policy_loss(
            logprobs, before, advantages[tensors["sequence"]], algorithm["clip_low"], algorithm["clip_high"]
        )
        policy_loss = (weight * importance * token_loss).sum()
        kl = torch.zeros((), device=self.device)
        if self.reference is not None:
            with torch.no_grad():
                reference, _ = self._forward(self.reference, tensors)
            kl = (weight * kl_estimate(logprobs, reference, algorithm["kl"]["estimator"])).sum()
        loss = policy_loss + algorithm["kl"]["coefficient"] * kl
        mismatch = (before - drawn).abs()
        capped = (importance >= cap) if cap else torch.zeros_like(clipped)
        each = weight > 0
        terms = [loss, policy_loss, kl, *((each * x).sum() for x in (entropy, clipped, importance, capped, mismatch))]
        values = torch.stack([t.detach().double().cpu() for t in terms])
        worst = mismatch.max().detach().double().cpu() if mismatch.numel() else torch.zeros(1).double()
        return loss, values, worst

    def _over_ranks(self, sums: torch.Tensor, most: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.ranks == 1:
            return sums, most
        import torch.distributed as dist

        sums, most = sums.to(self.device), most.to(self.device)
        dist.all_reduce(sums)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return sums.cpu(), most.cpu()

    def _rate(self) -> float:
        warmup = self.learner["warmup_steps"]
        return self.learner["learning_rate"] * min(1.0, (self.optimizer_steps + 1) / max(1, warmup))

    def _apply(self, loss_is_finite: bool, scale: float) -> tuple[float, bool, str]:
        """Scale, clip and step, or refuse: (gradient norm before clipping, applied, why not)."""
        for group in plain_optimizer(self.engine).param_groups:
            group["lr"] = self._rate()
        if self.stage == 0:
            if self.ranks > 1:
                self.engine.buffered_allreduce_fallback()
            if scale != 1:
                torch._foreach_mul_([p.grad for p in self.engine.module.parameters() if p.grad is not None], scale)
            norm = float(torch.nn.utils.clip_grad_norm_(self.engine.module.parameters(), self.learner["grad_clip"]))
            applied = loss_is_finite and math.isfinite(norm)
            if applied:
                self.engine.step()
            else:
                self.engine.zero_grad()
        else:  # DeepSpeed's ZeRO optimizers clip, and leave the weights alone when the norm is not finite
            with _loss_scale(self.engine.optimizer, 1 / scale):
                self.engine.step()
            norm = float(self.engine.get_global_grad_norm())
            applied = bool(self.engine.was_step_applied())
        if applied:
            self.optimizer_steps += 1
            self.skipped_in_a_row = 0
            return norm, True, ""
        self.skipped_in_a_row += 1
        return norm, False, "the loss is not finite" if not loss_is_finite else f"the gradient norm is {norm}"

    # ---- what others take -------------------------------------------------------------------------------------

    def weights(self) -> tuple[dict[str, np.ndarray] | None, list[Span]]:
        """{parameter name: array} for the engines, from rank 0; the other ranks take part and return None."""
        start = time.time()
        found = full_weights(self.engine, self.stage)
        span = [Span("transfer", "publish weights", start, time.time())]
        if self.rank:
            return None, span
        # Tied weights appear twice in a state dict; engines want the one they load.
        tied = getattr(self.engine.module.model.config, "tie_word_embeddings", False)
        return {k: as_numpy(v) for k, v in found.items() if not (tied and k == "lm_head.weight")}, span

    def snapshot(self) -> dict[str, Any] | None:
        """Everything a stopped run needs to go on, by parameter name: see `open`. From rank 0; others return None."""
        return self.kept if self.away and self.stage else self._state()

    def _state(self) -> dict[str, Any] | None:
        weights = full_weights(self.engine, self.stage)
        moments = full_moments(self.engine, self.stage)
        if self.rank:
            return None
        return {
            "weights": {name: tensor.clone() for name, tensor in weights.items()},
            "moments": moments,
            "optimizer_steps": self.optimizer_steps,
            "rng": torch.get_rng_state(),
        }

    def snapshot_bytes(self) -> dict[str, bytes] | None:
        """`snapshot` as safetensors files, which travel through Ray to wherever the run folder is."""
        from safetensors.torch import save

        state = self.snapshot()
        if state is None:
            return None
        weights = {name: tensor.contiguous() for name, tensor in state["weights"].items()}
        if getattr(self.engine.module.model.config, "tie_word_embeddings", False):
            weights.pop("lm_head.weight", None)
        numbers = {"optimizer_steps": state["optimizer_steps"]}
        return {
            "model.safetensors": save(weights, metadata={"format": "pt"}),
            "optimizer.safetensors": save({**state["moments"], "rng": state["rng"]}),
            "learner.json": json.dumps(numbers).encode(),
        }

    # ---- between updates --------------------------------------------------------------------------------------

    def park(self) -> list[Span]:
        """Give back device memory while no lease is held; nothing to do on CPU."""
        return self.leave_device() if self.device.type == "cuda" else []

    def unpark(self) -> list[Span]:
        return self.return_to_device() if self.device.type == "cuda" else []

    def leave_device(self) -> list[Span]:
        """All state goes to the host. Parts of several ranks can be put together on their devices only, so what a
        checkpoint may want before the next update is put together now."""
        if self.away:
            return []
        if self.early is not None:
            raise RuntimeError("the learner holds gradients of a step that is not complete: they would be lost with its device")
        start = time.time()
        if self.stage:
            self.kept = self._state()
        leave_device(self.engine, self.stage)
        if self.reference is not None:
            self.reference.to("cpu")
        self.away = True
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return [Span("transfer", "leave device", start, time.time())]

    def return_to_device(self) -> list[Span]:
        if not self.away:
            return []
        start = time.time()
        return_to_device(self.engine, self.stage, self.device)
        if self.reference is not None:
            self.reference.to(self.device)
        self.away, self.kept = False, None
        return [Span("transfer", "return to device", start, time.time())]


@dataclass(frozen=True)
class _Sums:
    """What backward passes added up on this rank: SUMS, the largest mismatch, tokens, and what the weights are divided by."""

    sums: torch.Tensor
    most: torch.Tensor
    tokens: int
    whole: float

    def plus(self, other: _Sums) -> _Sums:
        most = torch.maximum(self.most, other.most)
        return _Sums(self.sums + other.sums, most, self.tokens + other.tokens, self.whole + other.whole)


@contextmanager
def _loss_scale(optimizer: Any, scale: float) -> Iterator[None]:
    """DeepSpeed's ZeRO 1 and 2 divide gradients by the loss scale before they measure and clip them."""
    if scale != 1:
        optimizer.override_loss_scale(scale)
    try:
        yield
    finally:
        if scale != 1:
            optimizer.custom_loss_scaler = False


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    """bfloat16 has no numpy twin: it travels as float32, which holds it exactly."""
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).contiguous().numpy()


def state_from_bytes(files: dict[str, bytes]) -> dict[str, Any]:
    """The inverse of `Learner.snapshot_bytes`."""
    from safetensors.torch import load

    moments = load(files["optimizer.safetensors"])
    rng = moments.pop("rng")
    return {"weights": load(files["model.safetensors"]), "moments": moments, "rng": rng, **json.loads(files["learner.json"])}


def _nothing(reason: str) -> UpdateStats:
    """An update that had nothing to learn from."""
    numbers: dict[str, Any] = dict.fromkeys(UpdateStats.__dataclass_fields__, 0.0)
    counts: dict[str, Any] = {"trained_tokens": 0, "skipped": 1, "applied": 0, "skipped_last": 1, "reason": reason}
    return UpdateStats(**{**numbers, **counts})


def _merge(stats: list[UpdateStats]) -> UpdateStats:
    """One record for a step of several optimizer steps: means weighted by nothing, maxima and counts as such."""
    if len(stats) == 1:
        return stats[0]
    merged: dict[str, Any] = {}
    for name in UpdateStats.__dataclass_fields__:
        values = [getattr(s, name) for s in stats]
        if name == "reason":
            merged[name] = "; ".join(v for v in values if v)
        elif name == "mismatch_max":
            merged[name] = max(values)
        elif name in ("trained_tokens", "skipped", "applied"):
            merged[name] = sum(values)
        elif name == "skipped_last":
            merged[name] = next((i for i, s in enumerate(reversed(stats)) if s.applied), len(stats))
        else:
            merged[name] = float(np.mean(values))
    return UpdateStats(**merged)
