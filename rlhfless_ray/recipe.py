"""The recipe: one typed section per stage, one docstring per field, read from YAML with dotted overrides."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from rlhfless_ray.errors import UserError

MOST_ROWS = 1_000_000  # that a built-in task generates: half a minute's work
Decay = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False)


class Run(Section):
    name: str = Field("", pattern=r"^(\w[\w.-]*)?$")
    """Folder below `root`. Empty: the recipe's file name; a number is added when that folder exists already."""
    root: str = "runs"
    """Where run folders go."""
    steps: int = Field(100, ge=0)
    """Steps to train in total (a resumed run counts the steps before)."""
    seed: int = 0
    """Every sample, shuffle and initial weight follows from it."""


class Policy(Section):
    path: str = ""
    """A local Hugging Face folder of a causal LM. Empty: a small one is made from scratch for a built-in task."""
    hidden_size: int = Field(128, ge=32, multiple_of=32)
    """Width of a policy made from scratch (heads are 32 wide: vLLM's CPU attention refuses narrower ones)."""
    layers: int = Field(3, ge=1)
    """Layers of a policy made from scratch."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights in learner and engines."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model folder. Off unless you trust its author."""


class WarmStart(Section):
    steps: int = Field(0, ge=0)
    """Supervised steps before the first rollout, for a policy made from scratch. The result is cached."""
    batch_size: int = Field(64, ge=1)
    """Supervised responses per step."""
    learning_rate: float = Field(3e-3, gt=0)
    """Peak; linear warm-up over the first tenth, then cosine to zero."""


class Prompts(Section):
    task: str = ""
    """A built-in task: `chain` or `sort`. Set this or `path`."""
    path: str = ""
    """A JSONL, JSON, CSV or parquet file."""
    prompt_column: str = "question"
    """Column with the prompt's text."""
    answer_column: str = "answer"
    """Column with the reference answer, handed to the reward function as part of the row. Empty: there is none."""
    template: Literal["none", "chat"] = "none"
    """`chat`: wrap each prompt as a user turn with the tokenizer's chat template."""
    system: str = ""
    """System turn put before each prompt when `template` is `chat`."""
    rows: int = Field(4096, ge=1, le=MOST_ROWS)
    """Rows a built-in task generates for training."""
    batch_prompts: int = Field(32, ge=1)
    """Prompts per step."""
    max_prompt_tokens: int = Field(512, ge=1)
    """A longer prompt ends the run before it starts: prompts are never truncated."""
    shuffle: bool = True
    """Shuffle every epoch, by the run's seed."""


class Evaluate(Section):
    prompts: int = Field(256, ge=0, le=MOST_ROWS)
    """Held-out prompts. Built-in tasks generate them; with a file, its last rows are held out of training."""
    every_steps: int = Field(0, ge=0)
    """0: before the first step and after the last only."""
    greedy: bool = True
    """Evaluate greedily too, besides the sampling temperature of training."""


def _yaml_off(value: Any) -> Any:
    """YAML reads a bare `off` as false; where a setting has the word, the word is meant."""
    return "off" if value is False else value


class Rollout(Section):
    samples_per_prompt: int = Field(8, ge=1)
    """The group size."""
    max_tokens: int = Field(256, ge=1)
    """Longest response; a response cut there has finish reason `length`."""
    temperature: float = Field(1.0, gt=0)
    """Of the sampling distribution, which is also the one that is trained."""
    min_actors: int = Field(1, ge=1)
    """Fewest engines; a rollout waits until it has a slot for each."""
    max_actors: int = Field(2, ge=1)
    """Most engines at once. The plan of each step decides how many there are."""
    max_running: int = Field(256, ge=1)
    """Sequences one engine decodes at once."""
    kv_cache_mb: int = Field(256, ge=16)
    """KV cache of one engine on CPU."""
    gpu_memory_share: float = Field(0.85, gt=0, le=1)
    """Share of a GPU's memory one engine takes."""
    block_size: int = Field(32, ge=1)
    """Tokens of a KV block; prefixes are shared in whole blocks."""
    stream_interval_s: float = Field(0.25, gt=0)
    """How often an engine tells what it generated. What it has not told yet is generated again if it dies."""
    migrate: Annotated[Literal["off", "tau", "auto"], BeforeValidator(_yaml_off)] = "auto"
    """Moving responses between engines while they are generated. `auto`: as the planner expects it to save time or leases;
    `tau`: the RLHFless paper's rule, an engine of which a share `migrate_tau` has finished hands the rest on; `off`."""
    migrate_tau: float = Field(0.7, gt=0, le=1)
    """For `migrate: tau` only."""
    deadline_s: float = Field(1800, gt=0)
    """A rollout that takes longer ends the run."""


class Reward(Section):
    function: str = ""
    """`task` (the built-in task's verifier), `math` (math-verify on the text after `####` or in a box), or
    `path/to/file.py:name` with `def name(prompt: str, response: str, row: dict) -> float`."""
    workers: int = Field(1, ge=1)
    """Processes that score at once, at most one per leased slot."""
    timeout_s: float = Field(10.0, gt=0)
    """For one sample."""
    max_failed_share: float = Field(0.05, ge=0, le=1)
    """The run ends when a larger share of a step's samples could not be scored. A sample that could not be scored is
    left out of its group and of the update, and is shown in the log: it never becomes a silent 0."""


class Kl(Section):
    coefficient: float = Field(0.0, ge=0)
    """0: no reference model is kept."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Schulman's estimators of KL(policy ‖ reference), added to the loss. As a loss `k1` does nothing but add noise: the
    expectation of its gradient is zero. `k2` has the gradient of the KL itself, `k3` comes close near the reference."""


class Algorithm(Section):
    normalize_std: bool = True
    """Divide a group's centred rewards by their standard deviation (GRPO); off: centred only (Dr. GRPO)."""
    clip_low: float = Field(0.2, gt=0)
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    clip_high: float = Field(0.2, gt=0)
    """Its upper side, see `clip_low`."""
    importance_cap: float = Field(2.0, ge=0)
    """Cap of the truncated importance weight learner / sampler. 0: no correction."""
    loss_mean: Literal["token", "sequence"] = "token"
    """Mean over all tokens of the optimizer step, or over sequences of each sequence's token mean."""
    updates_per_step: int = Field(1, ge=1)
    """Optimizer steps per rollout batch, each on its share of the prompts."""
    kl: Kl = Kl()
    """Distance to the policy the run started from."""


class Learner(Section):
    ranks: int = Field(1, ge=1)
    """Data-parallel ranks of the gang."""
    max_slots_per_rank: int = Field(1, ge=1)
    """CPU only: a rank runs as many threads as the slots it holds, up to this many when they are free."""
    zero_stage: Literal[0, 1, 2, 3] = 0
    """DeepSpeed ZeRO stage."""
    learning_rate: float = Field(1e-6, gt=0)
    """Constant after `warmup_steps`."""
    warmup_steps: int = Field(0, ge=0)
    """Linear warm-up of the learning rate, in optimizer steps."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's, on every weight."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Decay of AdamW's two moments."""
    grad_clip: float = Field(1.0, gt=0)
    """Longest gradient (Euclidean norm over all weights); a longer one is shortened to it."""
    micro_batch_tokens: int = Field(8192, ge=1)
    """Padded tokens of one micro-batch."""
    overlap: Annotated[Literal["auto", "off"], BeforeValidator(_yaml_off)] = "auto"
    """Scoring and gradients of complete groups on slots that engines have left, while others still decode. Gradients only
    where the update is then the same, to rounding: one per step, ZeRO 0, 1 or 2. `off`: the learner waits for the rollout."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them: less memory, more time."""
    max_skipped_updates: int = Field(3, ge=0)
    """The run ends after this many optimizer steps in a row were skipped for a non-finite loss or gradient."""
    deadline_s: float = Field(1800, gt=0)
    """An update that takes longer ends the run."""


class Functions(Section):
    slot: Literal["auto", "cpu", "gpu"] = "auto"
    """What a slot is: one core or one GPU. `auto`: GPUs where the cluster has any."""
    elastic: bool = True
    """Off: every pool holds its most slots from the first step to the last, planned for by nobody. What elasticity is
    compared with."""
    keep_alive_s: float = Field(300.0, ge=0, allow_inf_nan=True)
    """How long a parked rollout or reward instance stays warm without work. The learner keeps the optimizer state and
    stays parked for the whole run."""
    lease_deadline_s: float = Field(300.0, gt=0)
    """A lease that Ray cannot grant by then ends the run with what is missing."""
    max_replacements: int = Field(3, ge=0)
    """Rollout or reward instances that may die and be replaced in one run before it ends."""


class Cluster(Section):
    address: str = ""
    """Ray address; empty: RAY_ADDRESS or the surrounding job's cluster, else a private one on this machine."""
    cpus: int = Field(0, ge=0)
    """Cores of the private cluster. 0: those this process may use."""
    object_store_mb: int = Field(512, ge=80)
    """Object store of the private cluster."""


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
            raise ValueError(f"objective: set one of `{named[0]}` and `{named[1]}`, a plan has one goal")
        return self


class Price(Section):
    cpu_slot_per_hour: float = Field(0.04, ge=0)
    """Money per hour of a leased core, for the money column of the ledger."""
    gpu_slot_per_hour: float = Field(2.5, ge=0)
    """Money per hour of a leased GPU."""
    parked_share: float = Field(0.0, ge=0, le=1)
    """What a parked process costs, as a share of its slot's price: the memory it keeps from others. Above 0 a process is
    kept warm only while that costs less than the start it saves."""


class Checkpoint(Section):
    every_steps: int = Field(20, ge=1)
    """Steps between two checkpoints; the last step always has one."""
    keep: int = Field(2, ge=1)
    """Older ones are removed."""


class Watch(Section):
    progress: Annotated[Literal["auto", "live", "plain", "off"], BeforeValidator(_yaml_off)] = "auto"
    """`live`: a panel that redraws; `plain`: a line per step; `auto`: live on a terminal, else plain."""
    tensorboard: bool = True
    """Write the metrics for TensorBoard too, below the run folder."""
    wandb: Annotated[Literal["auto", "online", "offline", "off"], BeforeValidator(_yaml_off)] = "auto"
    """Weights & Biases. `auto`: online with an API key, else offline (into the run folder)."""
    wandb_project: str = "rlhfless-ray"
    """Project in Weights & Biases."""
    samples_per_step: int = Field(64, ge=0)
    """Samples written to `samples/step_<n>.jsonl`; 0: all of them."""


class Recipe(Section):
    """Everything a run needs to be repeated."""

    run: Run = Run()
    policy: Policy = Policy()
    warm_start: WarmStart = WarmStart()
    prompts: Prompts = Prompts()
    evaluate: Evaluate = Evaluate()
    rollout: Rollout = Rollout()
    reward: Reward = Reward()
    algorithm: Algorithm = Algorithm()
    learner: Learner = Learner()
    functions: Functions = Functions()
    objective: Objective = Objective()
    price: Price = Price()
    cluster: Cluster = Cluster()
    checkpoint: Checkpoint = Checkpoint()
    watch: Watch = Watch()

    @model_validator(mode="after")
    def _fits_together(self) -> Recipe:
        if bool(self.prompts.task) == bool(self.prompts.path):
            raise ValueError("prompts: set exactly one of `task` (built in) and `path` (a file)")
        if self.prompts.path and not self.policy.path:
            raise ValueError("policy.path: name a local Hugging Face model folder; only built-in tasks make their own policy")
        if self.rollout.samples_per_prompt < 2:
            raise ValueError(
                "rollout.samples_per_prompt: the group advantage compares responses to one prompt, so it must be at least 2"
            )
        if self.rollout.min_actors > self.rollout.max_actors:
            raise ValueError("rollout.min_actors: must not exceed rollout.max_actors")
        if self.algorithm.updates_per_step > self.prompts.batch_prompts:
            raise ValueError("algorithm.updates_per_step: must not exceed prompts.batch_prompts")
        if self.policy.dtype == "bfloat16" and self.learner.zero_stage == 0:
            raise ValueError(
                "learner.zero_stage: with policy.dtype bfloat16 it must be 1, 2 or 3, which keep the float32 weights that "
                "small updates need"
            )
        if self.reward.function == "task" and not self.prompts.task:
            raise ValueError("reward.function: `task` needs a built-in task in prompts.task")
        if not self.reward.function:
            raise ValueError("reward.function: name one: `task`, `math` or `path/to/file.py:name`")
        return self

    @classmethod
    def load(cls, path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Recipe:
        """Read a YAML file and apply `section.key=value` overrides (values are YAML).

        Raises UserError for a missing file, an unknown key (naming the nearest one), a wrong type or range.
        """
        path = Path(path)
        if not path.is_file():
            raise UserError(f"recipe {path}: no such file")
        try:
            tree = yaml.safe_load(path.read_text()) or {}
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise UserError(f"recipe {path}: not valid YAML: {_one_line(error)}") from None
        if not isinstance(tree, dict):
            raise UserError(f"recipe {path}: expected sections such as `rollout:` at the top, found {type(tree).__name__}")
        for override in overrides:
            _apply(tree, override)
        run = tree.get("run")
        if run is None or (isinstance(run, dict) and not run.get("name")):
            tree["run"] = {**(run or {}), "name": re.sub(r"[^\w.-]+", "-", path.stem).lstrip(".-")}
        return cls.parse(tree, where=f"recipe {path}")

    @classmethod
    def parse(cls, tree: dict[str, Any], where: str = "recipe") -> Recipe:
        """Validate a nested dict. Raises UserError with one sentence on the first mistake."""
        try:
            return cls.model_validate(tree)
        except ValidationError as error:
            raise UserError(f"{where}: {_sentence(cls, error)}") from None

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _apply(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise UserError(f"override `{override}`: expected section.key=value, for example rollout.temperature=0.7")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise UserError(f"override `{override}`: the value is not valid YAML") from None
    *parents, leaf = key.split(".")
    node = tree
    for parent in parents:
        child = node.setdefault(parent, {})
        if child is None:
            child = node[parent] = {}
        if not isinstance(child, dict):
            raise UserError(f"override `{override}`: `{parent}` is a value, not a section")
        node = child
    node[leaf] = value if text != "" else ""


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _sentence(model: type[BaseModel], error: ValidationError) -> str:
    first = error.errors()[0]
    path = [str(part) for part in first["loc"]]
    dotted = ".".join(path)
    if first["type"] == "extra_forbidden":
        nearest = _nearest(model, dotted)
        return f"unknown key `{dotted}`" + (f"; did you mean `{nearest}`?" if nearest else "")
    section = _section(model, path)
    if section is not None and first["type"] in ("model_type", "model_attributes_type"):
        return f"`{dotted}`: a section with keys such as `{next(iter(section.model_fields))}`, not a value (got {first.get('input')!r})"
    message = first["msg"].removeprefix("Value error, ")
    if not dotted:
        return message
    given = first.get("input")
    shown = "" if isinstance(given, (dict, BaseModel)) else f" (got {given!r})"
    return f"`{dotted}`: {message[0].lower()}{message[1:]}{shown}"


def _section(model: type[BaseModel], path: list[str]) -> type[BaseModel] | None:
    """The section at a dotted path, None where there is none."""
    found: Any = model
    for part in path:
        info = found.model_fields.get(part)
        found = info.annotation if info is not None else None
        if not (isinstance(found, type) and issubclass(found, BaseModel)):
            return None
    return found


def known_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Every dotted key of the recipe."""
    keys: list[str] = []
    for name, info in model.model_fields.items():
        dotted = f"{prefix}{name}"
        keys.append(dotted)
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            keys += known_keys(info.annotation, f"{dotted}.")
    return keys


def _nearest(model: type[BaseModel], dotted: str) -> str | None:
    keys = known_keys(model)
    close = difflib.get_close_matches(dotted, keys, n=1, cutoff=0.6)
    if close:
        return close[0]
    leaves = {key.rsplit(".", 1)[-1]: key for key in keys}
    close = difflib.get_close_matches(dotted.rsplit(".", 1)[-1], leaves, n=1, cutoff=0.5)
    return leaves[close[0]] if close else None
