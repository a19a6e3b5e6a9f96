"""Sections about a run as a whole: where it happens, what it may cost, what it leaves behind."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rlhfless_ray.recipe.section import OffIsAWord, Section


class Run(Section):
    name: str = Field("", pattern=r"^(\w[\w.-]*)?$")
    """Folder below `root`. Empty: the recipe's file name; a number is added when that folder exists already."""
    root: str = Field("runs", min_length=1)
    """Where run folders go."""
    steps: int = Field(100, ge=0)
    """Steps to train in total (a resumed run counts the steps before)."""
    episodes: int | None = Field(None, ge=1)
    """Passes over the training prompts, which then decide `steps`; the last step of each has the prompts that are left. None:
    `steps` counts."""
    seed: int = 0
    """Every sample, shuffle and initial weight follows from it."""
    sigterm_s: float = Field(3.0, gt=0)
    """What whoever sends SIGTERM leaves a run before killing it: `ray job stop` 3 s, Kubernetes and Slurm 30 s as they come. Half of it
    is for an update to end, two thirds for the learner's snapshot."""


class Functions(Section):
    slot: Literal["auto", "cpu", "gpu"] = "auto"
    """What a slot is: one core or one GPU. `auto`: GPUs where the cluster has any."""
    elastic: bool = True
    """Off: every pool holds its most slots from the first step to the last, planned for by nobody. What elasticity is
    compared with."""
    keep_alive_s: float = Field(300.0, ge=0, allow_inf_nan=True)
    """How long a parked rollout or reward instance stays warm without work. The learner keeps the optimizer state and
    stays parked for the whole run."""
    parked_mb: float | None = Field(None, ge=0)
    """Memory, MB, that processes without work may hold on each node: engines, prefill and reward processes that were started ahead or
    are parked, not the learner. Beyond it none is started ahead, and those that have waited longest end. None: half of what Ray
    counts as the node's memory."""
    lease_deadline_s: float = Field(300.0, gt=0)
    """A lease that Ray cannot grant by then ends the run with what is missing; a process that has not started by then is replaced."""
    max_replacements: int = Field(3, ge=0)
    """Processes that may die or hang and be replaced before the run ends; every step done without such a fault gives one of them
    back. Those whose node was lost or drained are not counted."""


class Cluster(Section):
    address: str = ""
    """Ray address; empty: RAY_ADDRESS or the surrounding job's cluster, else a private one on this machine."""
    cpus: int = Field(0, ge=0)
    """Cores of the private cluster. 0: those this process may use."""
    object_store_mb: int | None = Field(None, ge=80)
    """Object store of the private cluster, MB. None: what weights and learner state on their way take, 512 at least; no more than
    0.3 of the memory (beyond it Ray writes to disk)."""


class Objective(Section):
    prefer: float = Field(0.5, ge=0, le=1)
    """0: cheapest, 1: fastest. Holds where none of the next three is set."""
    deadline_s: float | None = Field(None, gt=0)
    """The cheapest rollout that is expected to end by then."""
    budget: float | None = Field(None, gt=0)
    """The fastest rollout that is expected to cost no more, in slot-seconds."""
    knee: bool = False
    """Where the frontier bends most: a second less would cost much more, a slot-second less would take much longer."""
    scenarios: int = Field(64, ge=1)
    """Joint draws of the response lengths that a plan is judged on."""
    payback: float = Field(0.5, gt=0, le=1)
    """A resize must cost no more than this share of what it is expected to save while it lasts."""

    @model_validator(mode="after")
    def _one_goal(self) -> Objective:
        named = [name for name in ("deadline_s", "budget", "knee") if getattr(self, name)]
        if len(named) > 1:
            raise ValueError(f"set one of `{named[0]}` and `{named[1]}`, a plan has one goal")
        return self


class Price(Section):
    cpu_slot_per_hour: float = Field(0.04, ge=0)
    """Money per hour of a leased core, for the money column of the ledger."""
    gpu_slot_per_hour: float = Field(2.5, ge=0)
    """Money per hour of a leased GPU."""
    rollout_slot_per_hour: float | None = Field(None, ge=0)
    """Money per hour of a slot on the nodes that `rollout.nodes` names, where these are cheaper. Empty: as any other."""
    parked_share: float | None = Field(None, ge=0, le=1)
    """What a parked process costs for the memory that it keeps from others. Empty: the part of a slot's price that this is of the
    memory that goes with a slot (the node's, as Ray counts it, by its slots). A number: so much of its slot's price for all that it
    works with, and less as it gives memory back. A process is kept warm only while that costs less than the start it saves; at 0
    it costs nothing."""


class Checkpoint(Section):
    path: str = ""
    """Where checkpoints go, as OpenRLHF lays them out: `_actor/global_step<n>`, `_actor/latest`. Empty: into the run folder."""
    every_steps: int = Field(20, ge=1)
    """Steps between two checkpoints; the last step always has one."""
    keep: int = Field(2, ge=1)
    """Others are removed: first those without an evaluation, then those of the worst `best_metric`, then the oldest."""
    memory_every_steps: int = Field(1, ge=0)
    """Steps between two copies of the learner's state on the driver's node, made while engines decode: a learner that dies goes
    on from there. 0: none, it goes on from the checkpoint on disk and learns again what came since. The samples in between are
    kept in memory either way, none is made again."""
    max_gib: float = Field(float("inf"), gt=0, allow_inf_nan=True)
    """They are removed too while all take more than that; the newest stays in any case."""
    resume: bool = False
    """Go on from the newest checkpoint where there is one, as `--resume` does, else start."""
    best_metric: str = "none"
    """Metric of the evaluation whose best value has a checkpoint of its own, which stays, such as `eval_gsm8k_pass1` or
    `accuracy_sampled`; empty: the first `*_pass1`, else `accuracy_sampled`. `none`: there is no such checkpoint."""
    save_hf: bool = False
    """With `path`: a model folder as Hugging Face's libraries load it besides, `global_step<n>_hf`. These are never removed,
    but for that of the best, of which there is one."""
    resumable: bool = True
    """Off, with `path`: model folders only. Such a run cannot be resumed."""

    @model_validator(mode="after")
    def _needs_a_path(self) -> Checkpoint:
        for name, wanted in (("save_hf", self.save_hf), ("resumable", not self.resumable)):
            if wanted and not self.path:
                raise ValueError(f"checkpoint.{name}: needs a folder in checkpoint.path")
        return self


class Save(Section):
    path: str = ""
    """Folder that the final model is written into too, as Hugging Face's libraries and vLLM load it. Other files there stay.
    Empty: it is in the run folder's `model/` only."""


class Watch(Section):
    progress: Annotated[Literal["auto", "live", "plain", "off"], OffIsAWord] = "auto"
    """`live`: a panel that redraws; `plain`: a line per step; `auto`: live on a terminal, else plain."""
    tensorboard: bool = True
    """Write the metrics for TensorBoard too, below the run folder."""
    wandb: Annotated[Literal["auto", "online", "offline", "off"], OffIsAWord] = "auto"
    """Weights & Biases. `auto`: online with an API key, else offline (into the run folder)."""
    wandb_project: str = "rlhfless-ray"
    """Project in Weights & Biases."""
    wandb_entity: str | None = None
    """Team or user there. None: the account's own."""
    wandb_group: str | None = None
    """Group of runs there. None: the name of the run, which joins the processes of one that was resumed."""
    run_name: str = ""
    """Name of the run in Weights & Biases, and of its folder below `tensorboard_path`. Empty: the run folder's name."""
    tensorboard_path: str = ""
    """Where TensorBoard's files go, into a folder of the run's name. Empty: the run folder's `tensorboard/`."""
    metric_names: Literal["own", "openrlhf"] = "own"
    """`openrlhf`: TensorBoard and Weights & Biases get OpenRLHF's names where it logs the same, and each step is told in a
    line `Global step N: {…}` too. The run folder's `metrics.jsonl` keeps its own."""
    every_steps: int = Field(1, ge=1)
    """Steps between two rows for TensorBoard and Weights & Biases; evaluations always get there, files have every step."""
    samples_per_step: int = Field(64, ge=0)
    """Samples written to `samples/step_<n>.jsonl`; 0: all of them."""
