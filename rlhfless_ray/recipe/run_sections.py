"""Recipe sections of the whole run: cluster, cost, checkpoints and metrics."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rlhfless_ray.recipe.local_path import AddressOrPath, LocalPath, RemoteFolder
from rlhfless_ray.recipe.section import Name, OffIsAWord, RunName, Section


class RunConfig(Section):
    name: RunName = ""
    """Name of the run's folder below `root`. Empty: the recipe's file name. A number is added if that folder exists already."""
    root: LocalPath = Field("runs", min_length=1)
    """Folder for run folders."""
    mirror: RemoteFolder = ""
    """Remote folder, such as `s3://bucket/runs`, to which the run folder is copied while the run writes it. `--resume` fetches the run
    from there if this machine has none as new. Credentials come from the environment."""
    steps: int = Field(100, ge=0)
    """Steps to train in total. A resumed run counts the steps before it."""
    episodes: int | None = Field(None, ge=1)
    """Passes over the training prompts, which then determine `steps`. The last step of each pass has the remaining prompts. None:
    `steps` is used."""
    seed: int = 0
    """Seed of every sample, shuffle and initial weight."""
    deterministic: bool = False
    """Use only those PyTorch kernels that add up in the same order in every run, in the processes of learner, critic and reference. On
    GPUs this is slower; kernels of CPU cores do so in any case, as long as the number of threads is the same (`exact`). Engines are not
    affected: on a GPU a token's logits may depend on the other requests in its batch."""
    exact: bool = False
    """CPU only: let the weights follow from the recipe alone, bit for bit, whatever the planner, a pause or a resume does to the times. A
    rank then always runs `learner.max_slots_per_rank` threads, on fewer cores if fewer are free. Nothing is computed in the tail of a
    rollout, a reward model scores each sample alone, and `algorithm.importance_cap` counts as 0. What would depend on times is refused."""
    sigterm_s: float = Field(3.0, gt=0)
    """Seconds between SIGTERM and SIGKILL: 3 s with `ray job stop`, 30 s by default with Kubernetes and Slurm. The current update may
    take half of it, and the learner's snapshot two thirds."""


class FunctionsConfig(Section):
    slot: Literal["auto", "cpu", "gpu"] = "auto"
    """Kind of slot: one core or one GPU. `auto`: GPUs if the cluster has any."""
    elastic: bool = True
    """Off: every pool holds its maximum number of slots from the first step to the last, without planning. This is the baseline for
    elasticity."""
    keep_alive_s: float = Field(300.0, ge=0, allow_inf_nan=True)
    """Time for which a parked rollout or reward instance stays warm without work. The learner keeps the optimizer state and stays
    parked for the whole run."""
    parked_mb: float | None = Field(None, ge=0)
    """Memory in MB that processes without work may hold on each node: prewarmed or parked engines, prefill and reward processes, not
    the learner. Beyond it no process is started ahead, and those that have waited longest end. None: half of the node's memory
    according to Ray, which the runs of a shared pool divide."""
    lease_deadline_s: float = Field(300.0, gt=0)
    """The run ends if Ray cannot grant a lease within this time, with a message that names what is missing. A process that has not
    started by then is replaced."""
    max_replacements: int = Field(3, ge=0)
    """Number of processes that may die or hang and be replaced before the run ends. Every step without such a fault adds one to this
    budget, up to the number. Processes whose node was lost or drained do not count."""
    demand: bool = False
    """Tell Ray's autoscaler, with each plan, how many slots the cluster must have: those of the plan that the objective would choose if
    nodes came for all engines that `rollout.max_actors` and `rollout.pools` allow. Needs `cluster.pool: false`, because Ray keeps one
    announcement for a cluster. At the end of the run nothing is asked for."""
    notice: AddressOrPath = ""
    """Where a node reads that it will be taken away: `aws`, `gcp` or `azure` for the metadata server of that cloud, a URL, or a file. Each
    node reads its own, every second. With `{address}` in it the driver's node reads it for every node's address (docs/spot.md). Empty:
    Ray alone says so, when it drains a node."""


class LocalNode(Section):
    """One Ray node of several on this machine. Its cores are logical: nodes may have more of them than the machine."""

    cpus: int = Field(ge=1)
    """Cores of the node."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Ray labels of the node, such as `{market: spot}`."""


class ClusterConfig(Section):
    address: str = ""
    """Ray address. Empty: RAY_ADDRESS or the surrounding job's cluster, else a private Ray on this machine."""
    cpus: int = Field(0, ge=0)
    """Cores of the private cluster. 0: those that this process may use."""
    local_nodes: list[LocalNode] = Field(default_factory=list)
    """Nodes of the private cluster, all on this machine, to try pools and lost nodes without a cluster. The driver is on the first one.
    Empty: one node with `cpus` cores."""
    pool: bool = True
    """Share the slots of a joined cluster with other runs through one pool, which divides them by their value to each run. `false`:
    Ray's queue alone decides. A private cluster has no other runs and no pool."""
    share: float | None = Field(None, gt=0, le=1)
    """Share of the pool's slots that this run may always have while it can use them. None: an equal part of what the shares of other
    runs leave."""
    priority: float = Field(1.0, gt=0)
    """Weight of this run when runs compete for slots above their shares."""
    memory_share: float = Field(1.0, gt=0, le=1)
    """Share of the memory of the cores' nodes. Settings that are `auto` are chosen for it. It also limits copies of the learner's state in
    the driver's memory, but not the memory of GPUs. A sweep gives each of its runs an equal part."""
    object_store_mb: int | None = Field(None, ge=80)
    """Object store of the private cluster in MB. None: the size of the weights and learner state in transit, at least 512 MB and at most
    0.3 of the memory. Beyond it Ray writes to disk."""

    @property
    def private_cpus(self) -> int:
        """Cores of all nodes of a private cluster. 0: those that this process may use."""
        return sum(node.cpus for node in self.local_nodes) or self.cpus

    @model_validator(mode="after")
    def _check_nodes(self) -> ClusterConfig:
        if self.local_nodes and self.cpus:
            raise ValueError("cluster.cpus: cluster.local_nodes says how many cores each node has; leave one of the two out")
        return self

    @model_validator(mode="after")
    def _check_pool(self) -> ClusterConfig:
        key = "cluster.share" if self.share is not None else "cluster.priority" if self.priority != 1.0 else ""
        if not self.pool and key:
            raise ValueError(f"{key}: it counts in the shared pool only; set cluster.pool to true, or leave it out")
        return self

    @property
    def memory_share_note(self) -> str:
        """How messages name a run's part of the memory: ` (cluster.memory_share=…)`, or nothing if that is all."""
        return "" if self.memory_share == 1 else f" (cluster.memory_share={self.memory_share:g})"


class ObjectiveConfig(Section):
    prefer: float = Field(0.5, ge=0, le=1)
    """0: cheapest, 1: fastest. Used if none of the next three keys is set."""
    deadline_s: float | None = Field(None, gt=0)
    """Take the cheapest rollout that is expected to end within this time."""
    budget: float | None = Field(None, gt=0)
    """Take the fastest rollout that is expected to cost no more than this, in slot-seconds."""
    knee: bool = False
    """Take the plan where the frontier bends most: a faster plan would cost much more, and a cheaper one would take much longer."""
    scenarios: int = Field(64, ge=1)
    """Joint draws of the response lengths on which plans are judged."""
    payback: float = Field(0.5, gt=0, le=1)
    """A resize may cost at most this share of its expected savings while it lasts."""

    @model_validator(mode="after")
    def _check_goal(self) -> ObjectiveConfig:
        named = [name for name in ("deadline_s", "budget", "knee") if getattr(self, name)]
        if len(named) > 1:
            raise ValueError(f"set one of `{named[0]}` and `{named[1]}`: a plan has one goal")
        return self


class PlanConfig(Section):
    search: Literal["auto", "fixed"] = "auto"
    """`auto`: calls of reference, critic and learner that do not need each other run side by side if there are slots and that pays.
    `fixed`: they take turns."""


class PriceConfig(Section):
    cpu_slot_per_hour: float = Field(0.04, ge=0)
    """Money per hour of a leased core, for the ledger's money column."""
    gpu_slot_per_hour: float = Field(2.5, ge=0)
    """Money per hour of a leased GPU."""
    rollout_slot_per_hour: float | None = Field(None, ge=0)
    """Money per hour of a slot on the nodes that `rollout.nodes` names, if these have another price. Empty: the price of any
    slot."""
    parked_share: float | None = Field(None, ge=0, le=1)
    """Price of a parked process for the memory that it keeps. Empty: the slot's price times the share of its memory in the memory of a
    slot (the node's according to Ray, divided by its slots). A number: this share of the slot's price if it keeps all its working
    memory, and proportionally less if it releases some. A process is kept warm only while that costs less than the start it saves.
    0: parked processes cost nothing."""

    def slot_per_hour(self, resource: str) -> float:
        """Return the price of a leased slot per hour. `resource`: "cpu" or "gpu"."""
        return self.gpu_slot_per_hour if resource == "gpu" else self.cpu_slot_per_hour


class CheckpointConfig(Section):
    path: LocalPath = ""
    """Folder for checkpoints in OpenRLHF's layout: `_actor/global_step<n>`, `_actor/latest`. Empty: the run folder."""
    every_steps: int = Field(20, ge=1)
    """Steps between two checkpoints. The last step always has one."""
    keep: int = Field(2, ge=1)
    """Number of checkpoints to keep. Those without an evaluation are removed first, then those with the worst `best_metric`, then
    the oldest."""
    memory_every_steps: int | None = Field(None, ge=0)
    """Steps between two copies of the learner's state on the driver's node, made while engines decode. A lost learner continues
    from there. 0: no copies; it continues from the checkpoint on disk and repeats the updates since. The samples in between are
    kept in memory either way and are not generated again. None: 1 if two copies take at most a quarter of the driver's memory,
    else 0."""
    max_gib: float = Field(float("inf"), gt=0, allow_inf_nan=True)
    """Checkpoints are also removed while all of them take more than this. The newest always stays."""
    resume: bool = False
    """Continue from the newest checkpoint if there is one, as `--resume` does; otherwise start from step 1."""
    best_metric: str = "none"
    """Metric of the evaluation, such as `eval_gsm8k_pass1` or `accuracy_sampled`, whose best value gets a separate checkpoint that is
    never removed. Empty: the first `*_pass1`, else `accuracy_sampled`. `none`: no such checkpoint."""
    save_hf: bool = False
    """With `path`: also write a Hugging Face model folder, `global_step<n>_hf`. These are never removed, but of the best checkpoint only
    the newest exists."""
    resumable: bool = True
    """Off, with `path`: write model folders only. Such a run cannot be resumed, and a lost learner ends it unless copies of its state are
    in memory (`memory_every_steps`)."""

    @model_validator(mode="after")
    def _check_path(self) -> CheckpointConfig:
        for name, wanted in (("save_hf", self.save_hf), ("resumable", not self.resumable)):
            if wanted and not self.path:
                raise ValueError(f"checkpoint.{name}: needs a folder in checkpoint.path")
        return self


class SaveConfig(Section):
    path: LocalPath = ""
    """Second folder for the final model, in the format of Hugging Face's libraries and vLLM. Other files there stay. Empty: it is
    only in the run folder's `model/`."""


class WatchConfig(Section):
    progress: Annotated[Literal["auto", "live", "plain", "off"], OffIsAWord] = "auto"
    """`live`: a panel that redraws. `plain`: a line per step. `auto`: live on a terminal, else plain."""
    tensorboard: bool = True
    """Also write the metrics for TensorBoard, into the run folder."""
    wandb: Annotated[Literal["auto", "online", "offline", "off"], OffIsAWord] = "auto"
    """Weights & Biases. `auto`: online with an API key, else offline (into the run folder)."""
    wandb_project: Name = "rlhfless-ray"
    """Project in Weights & Biases."""
    wandb_entity: str | None = None
    """Team or user in Weights & Biases. None: the account's own."""
    wandb_group: str | None = None
    """Group of runs in Weights & Biases. None: the name of the run, which joins the parts of a resumed run."""
    mlflow: AddressOrPath = ""
    """MLflow's tracking address, or a folder. Empty: off. Needs the extra `mlflow`."""
    mlflow_experiment: Name = Field("rlhfless-ray", min_length=1)
    """Experiment in MLflow."""
    trackio: str = ""
    """Project in trackio. Empty: off. Needs the extra `trackio`."""
    prometheus: bool = False
    """Export metrics through Ray's own, for Prometheus. The cluster must collect metrics; a private Ray does not."""
    run_name: Name = ""
    """Name of the run in Weights & Biases, and of its folder below `tensorboard_path`. Empty: the run folder's name."""
    tensorboard_path: LocalPath = ""
    """Folder for TensorBoard's files, below which each run has a folder of its name. Empty: the run folder's `tensorboard/`."""
    metric_names: Literal["own", "openrlhf"] = "own"
    """`openrlhf`: TensorBoard and Weights & Biases get OpenRLHF's names for metrics that it logs too, and each step is printed as
    `Global step N: {…}`. The run folder's `metrics.jsonl` keeps its own names."""
    every_steps: int = Field(1, ge=1)
    """Log to TensorBoard, Weights & Biases and the others every this many steps. Evaluations are always logged. `metrics.jsonl` has
    every step."""
    samples_per_step: int = Field(64, ge=0)
    """Number of samples written to `samples/step_<n>.jsonl`. 0: all."""
