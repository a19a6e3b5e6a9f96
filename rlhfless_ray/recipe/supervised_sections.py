"""Recipe of a supervised stage: SFT, reward models, DPO, KTO or distillation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, model_validator

from rlhfless_ray.recipe.data_sections import DataSources
from rlhfless_ray.recipe.learn_sections import LearnerConfig, LoraConfig, mistakes_in_precision, mistakes_in_slices
from rlhfless_ray.recipe.local_path import InputPaths, LocalPath
from rlhfless_ray.recipe.recipe_file import RecipeFile
from rlhfless_ray.recipe.rollout_sections import PolicyConfig
from rlhfless_ray.recipe.run_sections import ClusterConfig, PriceConfig, SaveConfig, WatchConfig
from rlhfless_ray.recipe.section import MAX_ROWS, AutoCount, Name, RunName, Section, SwitchOrAuto, raise_first

SupervisedTask = Literal["sft", "rm", "dpo", "kto", "kd", "prm"]
PAIRED = ("rm", "dpo")
WITH_REFERENCE = ("dpo", "kto")
BY_TOKEN = ("sft", "kd", "prm")
"""Tasks whose loss is a mean over tokens. `prm` has one token for each step of a response."""
WITH_NEXT = ("rm", "prm")
"""Tasks that predict a value at a token. A sequence has one more token, and the token after the value's counts as trained."""


class SupervisedRun(Section):
    name: RunName = ""
    """Name of the run's folder below `root`. Empty: the recipe's file name. A number is added if that folder exists already."""
    root: LocalPath = Field("runs", min_length=1)
    """Folder for run folders. With several nodes it must be on a file system that all of them share, because Ray Train requires it."""
    epochs: int = Field(1, ge=1)
    """Passes over the rows. They determine the number of optimizer steps unless `steps` is set."""
    steps: int | None = Field(None, ge=1)
    """Optimizer steps in total. None: `epochs` decides."""
    schedule_end: Literal["last_step", "whole_batches"] = "last_step"
    """End of `learner.schedule`. `whole_batches`: only the batches that an epoch fills by itself count, as in OpenRLHF. With
    `data.remainder: carry` there may be more steps, in which the rate follows the schedule's formula beyond its end."""
    seed: int = 0
    """Seed of the order of rows and of random weights."""
    deterministic: bool = False
    """Use only those PyTorch kernels that add up in the same order in every run. On GPUs this is slower; kernels of CPU cores do so in any
    case."""
    min_ranks: int | None = Field(None, ge=1)
    """Minimum number of ranks to start with, and to continue with after a node was lost or while another run needs slots. Training takes
    up to `learner.ranks` if there are slots for them. The result does not depend on their number. None: `learner.ranks`."""
    max_restarts: int = Field(3, ge=0)
    """Number of times that the ranks start again from the last checkpoint because one of them died, before the run ends."""


class SupervisedData(DataSources):
    section = "data"
    task: str = ""
    """A built-in task, `chain` or `sort`: its supervised responses, or pairs of a right and a wrong one. Set exactly one of this,
    `path` and `paths`."""
    prompt_column: str = "prompt"
    """Column with the prompt: a text or, with `template: chat`, a text or a list of turns. Empty: there is none, and the other columns
    hold whole texts or conversations."""
    response_column: str = "response"
    """sft, kto, kd: column with the response: a text or a list of turns. Empty: the prompt's column holds the whole text or conversation.
    prm: not read; the prompt's column holds the whole text."""
    chosen_column: str = Field("chosen", min_length=1)
    """rm, dpo: column with the preferred response."""
    rejected_column: str = Field("rejected", min_length=1)
    """rm, dpo: column with the other response."""
    margin_column: str = "margin"
    """rm: column with the margin, the minimum difference of the two rewards; 0 for rows without it."""
    label_column: str = Field("label", min_length=1)
    """kto: column that says whether the response is desirable: true or false. prm: column with a list, which has a label for each
    placeholder of the text: one of `reward_tokens`, or the probability of the first of them."""
    placeholder_token: Name = ""
    """prm: the token that ends each step of a text. The reward of the step is predicted there."""
    reward_tokens: list[str] | None = Field(None, min_length=2)
    """prm: tokens that a label may be, the best one first. The loss compares their logits only. None: any token of the vocabulary."""
    chat_template: str = ""
    """A chat template (Jinja) in place of the tokenizer's, which the saved model gets too."""
    train_on: Literal["response", "assistant", "all"] = "response"
    """sft, kd: tokens that the loss counts. `response`: the response, or the last turn. `assistant`: every turn of the assistant.
    `all`: every token, as in pre-training; no end-of-sequence token is added."""
    contract: Literal["own", "openrlhf"] = "own"
    """How text becomes tokens. `own`: prompt and response are tokenized separately, as in a rollout, and the end-of-sequence token
    follows. `openrlhf`: as in its data sets: prompt and response are one text, which ends with a space and the end-of-sequence token;
    longer ones lose their last tokens."""
    max_tokens: int = Field(2048, ge=4)
    """Maximum tokens of a sequence. `overlong` says what happens to longer ones."""
    overlong: Literal["stop", "leave_out", "cut_right"] = "stop"
    """Longer sequences end the run before it starts (`stop`), or are left out (`leave_out`), or lose their last tokens (`cut_right`).
    Sequences that are left out or cut are counted and reported."""
    batch_rows: int = Field(32, ge=1)
    """Rows, or pairs, of an optimizer step."""
    remainder: Literal["short", "drop", "carry"] = "short"
    """An epoch's last rows that do not fill a batch make a shorter one (`short`), are not trained in this epoch (`drop`), or begin the next
    epoch's first batch (`carry`; those of the last epoch are not trained)."""


class SupervisedEvaluation(Section):
    path: InputPaths = ""
    """A data set to evaluate on, or several separated by commas. Empty: held-out rows."""
    split: str = Field("train", min_length=1)
    """Split of that data set."""
    rows: int = Field(0, ge=0, le=MAX_ROWS)
    """Number of held-out rows. Built-in tasks generate them; of a file the last rows are held out of training. With `path`: the
    first rows of it, 0: all."""
    every_steps: int = Field(0, ge=0)
    """Steps between two evaluations. 0: only before the first step and after the last."""
    each_epoch: bool = False
    """Also evaluate after every epoch."""
    train_share: float = Field(0.0, ge=0, le=1)
    """Share of the training rows, from the first on, that are evaluated on where no row is held out. They are trained on too."""


class SupervisedLoss(Section):
    kind: Literal["sigmoid", "logexp", "ipo"] = "sigmoid"
    """rm: `sigmoid` (with margins) or `logexp` (without). dpo: `sigmoid`, or `ipo` for the squared loss of IPO."""
    beta: float = Field(0.1, gt=0)
    """dpo, kto: β, the weight of the distance to the reference."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """dpo: probability that a pair's labels are the wrong way around (cDPO)."""
    nll_coefficient: float = Field(0.0, ge=0)
    """dpo: weight of the chosen responses' negative log-likelihood, a mean over their tokens, which is added to the loss."""
    desirable_weight: float = Field(1.0, ge=0)
    """kto: weight of desirable responses."""
    undesirable_weight: float = Field(1.0, ge=0)
    """kto: weight of undesirable responses."""
    mean: Literal["token", "sequence"] = "token"
    """sft, kd: the loss is a mean over all tokens of a batch (`token`), or over its sequences of the mean of each (`sequence`)."""
    teacher_weight: float = Field(0.4, ge=0, le=1)
    """kd: weight of the cross-entropy with the teacher's distribution. The negative log-likelihood of the rows has the rest of 1."""
    value_head: str = Field("score", min_length=1)
    """rm: name of the scalar head's weights in the model folder. Weights that it lacks are random."""


class SupervisedLearner(LearnerConfig):
    learning_rate: float = Field(1e-5, gt=0)
    """Peak learning rate."""
    pack_rows: SwitchOrAuto = "auto"
    """Let the rows of a micro-batch lie end to end, without padding. Each sequence sees itself only, so what is learned is the same to
    rounding. `auto`: on CPU slots, for the model families that are tested, where it saves time. Sums are then taken in another
    order than in padded rows, also when a run continues from a checkpoint of padded rows. With `micro_batch_tokens: auto` a packed
    micro-batch on CPU slots has at most 512 tokens, or one longer row (a pair counts as one), unless its ranks have collectives in every
    micro-batch (ZeRO 2 and 3, `tensor_parallel`)."""


class SupervisedReference(Section):
    path: LocalPath = ""
    """dpo, kto: a Hugging Face folder of the reference model. Empty: the policy before its first step."""


class SupervisedTeacher(Section):
    path: LocalPath = ""
    """kd: a Hugging Face folder of the teacher, whose tokenizer must have the policy's vocabulary. Every rank holds the whole
    teacher, or one slice of it with `learner.tensor_parallel`."""


class SupervisedCheckpoints(Section):
    path: LocalPath = ""
    """Folder for checkpoints, in which Ray Train makes one of the run folder's name. Empty: the run folder."""
    every_steps: int = Field(0, ge=0)
    """Steps between two checkpoints. 0: only when the run ends or is stopped."""
    keep: int = Field(2, ge=1)
    """Number of checkpoints to keep: the newest."""
    save_hf: bool = False
    """With `path`: every `every_steps` steps also write a Hugging Face model folder, `global_step<n>_hf`, with adapters the adapter. These
    are never removed. Those of a later run in the same `path` take the place of those of the same step, as in OpenRLHF."""
    resumable: bool = True
    """Off (needs `save_hf`): write model folders only, and a checkpoint when the run ends or is stopped. If a rank is lost, all of them
    then start again from the first step."""

    @property
    def has_regular(self) -> bool:
        """Whether there are checkpoints before the end of a run."""
        return self.every_steps > 0 and self.resumable

    @model_validator(mode="after")
    def _check_folders(self) -> SupervisedCheckpoints:
        if self.save_hf and not (self.path and self.every_steps):
            raise ValueError("checkpoint.save_hf: needs a folder in checkpoint.path, and checkpoint.every_steps")
        if not self.resumable and not self.save_hf:
            raise ValueError("checkpoint.resumable: without checkpoint.save_hf nothing would be written; leave checkpoint.every_steps out")
        return self


class SupervisedFunctions(Section):
    slot: Literal["auto", "cpu", "gpu"] = "auto"
    """Kind of slot: one core or one GPU. `auto`: GPUs if the cluster has any."""
    lease_deadline_s: float = Field(300.0, gt=0)
    """The run ends if the ranks do not start within this time, with a message that names what is missing."""


class SupervisedRecipe(RecipeFile):
    """A supervised stage, which `task` names. Sections of the same name have the keys of `Recipe`.

    Examples:
        >>> SupervisedRecipe.parse({"task": "sft", "data": {"task": "chain"}}).data.batch_rows
        32
    """

    task: SupervisedTask
    """`sft`: next-token loss on responses. `rm`: a reward model from pairs. `dpo`: a policy from pairs. `kto`: a policy from responses
    with a label. `kd`: a policy from responses and a teacher's distribution. `prm`: a process reward model from texts with a label for
    each step."""
    run: SupervisedRun = SupervisedRun()
    policy: PolicyConfig = PolicyConfig()
    data: SupervisedData = SupervisedData()
    evaluate: SupervisedEvaluation = SupervisedEvaluation()
    loss: SupervisedLoss = SupervisedLoss()
    reference: SupervisedReference = SupervisedReference()
    teacher: SupervisedTeacher = SupervisedTeacher()
    learner: SupervisedLearner = SupervisedLearner()
    lora: LoraConfig = LoraConfig()
    functions: SupervisedFunctions = SupervisedFunctions()
    price: PriceConfig = PriceConfig()
    cluster: ClusterConfig = ClusterConfig()
    checkpoint: SupervisedCheckpoints = SupervisedCheckpoints()
    save: SaveConfig = SaveConfig()
    watch: WatchConfig = WatchConfig()

    @property
    def min_ranks(self) -> int:
        return self.run.min_ranks or self.learner.ranks

    @model_validator(mode="after")
    def _check_combinations(self) -> SupervisedRecipe:
        raise_first(
            self._mistakes_in_data,
            self._mistakes_in_templates,
            self._mistakes_in_steps,
            self._mistakes_in_losses,
            self._mistakes_in_learner,
        )
        return self

    def _mistakes_in_data(self) -> Iterator[str]:
        """Check where rows come from."""
        yield from self.data.mistakes(self.policy.path, self.evaluate.path)
        if self.evaluate.train_share and (self.evaluate.path or self.evaluate.rows):
            yield "evaluate.train_share: rows are held out by evaluate.path or evaluate.rows; leave it or these out"
        section = self.evaluate
        asked = "each_epoch" if section.each_epoch else "every_steps" if section.every_steps else ""
        has_rows = section.path or section.train_share or "rows" in section.model_fields_set  # 0 turns evaluations off
        if asked and self.data.contract == "own" and not has_rows:
            yield f"evaluate.{asked}: there are no rows to evaluate on; set evaluate.rows, evaluate.path or evaluate.train_share"

    def _mistakes_in_templates(self) -> Iterator[str]:
        """Check how rows become texts, and the tokens that count."""
        data = self.data
        if data.overlong == "cut_right" and data.contract == "own" and self.task not in BY_TOKEN:
            yield "data.overlong: cut_right would compare parts of responses; set `leave_out`, or `stop`"
        if data.chat_template and data.template != "chat":
            yield "data.chat_template: data.template is none, so leave it out, or set template to chat"
        if data.train_on == "assistant" and data.template != "chat":
            yield "data.train_on: `assistant` needs turns; set data.template to chat"
        if data.train_on != "response" and self.task not in ("sft", "kd"):
            yield f"data.train_on: {self.task} counts whole responses, so leave it out"
        if not data.prompt_column and not data.response_column and self.task in ("sft", "kto", "kd"):
            yield "data.prompt_column: both it and data.response_column are empty; name one"
        if self.task == "kto" and data.template == "none" and not (data.prompt_column and data.response_column):
            yield "data.response_column: kto needs prompts and responses in columns of their own; name both"

    def _mistakes_in_steps(self) -> Iterator[str]:
        """Check process reward models."""
        data = self.data
        if len(set(data.reward_tokens or [])) < len(data.reward_tokens or []):
            yield "data.reward_tokens: a token is named twice"
        if self.task != "prm":
            if data.placeholder_token or data.reward_tokens:
                yield f"data.placeholder_token: {self.task} has no steps; leave it and data.reward_tokens out"
        elif not data.placeholder_token:
            yield "data.placeholder_token: name the token that ends each step"
        elif data.task:
            yield "data.task: built-in tasks have no steps with labels; set data.path"
        elif not data.prompt_column:
            yield "data.prompt_column: name the column with the texts"
        elif data.template == "chat" or data.input_template is not None:
            yield "data.template: prm reads whole texts; leave it and data.input_template out"

    def _mistakes_in_losses(self) -> Iterator[str]:
        """Check the loss, reference and teacher."""
        loss = self.loss
        if bool(self.teacher.path) != (self.task == "kd"):
            yield f"teacher.path: {self.task} has no teacher; leave it out" if self.teacher.path else "teacher.path: name the teacher"
        kinds = {"rm": ("sigmoid", "logexp"), "dpo": ("sigmoid", "ipo")}.get(self.task, ("sigmoid",))
        if loss.kind not in kinds:
            yield f"loss.kind: {self.task} has {' and '.join(f'`{kind}`' for kind in kinds)} only"
        mine = {
            "sft": {"mean"},
            "rm": {"kind", "value_head"},
            "dpo": {"kind", "beta", "label_smoothing", "nll_coefficient"},
            "kto": {"beta", "desirable_weight", "undesirable_weight"},
            "kd": {"mean", "teacher_weight"},
            "prm": set(),
        }[self.task]
        for key in SupervisedLoss.model_fields:
            if key not in mine and getattr(loss, key) != SupervisedLoss.model_fields[key].default:
                yield f"loss.{key}: {self.task} does not use it; leave it out"
        if loss.kind == "ipo" and loss.label_smoothing:
            yield "loss.label_smoothing: ipo has none; leave it out"
        if self.reference.path and self.task not in WITH_REFERENCE:
            yield f"reference.path: {self.task} has no reference; leave it out"
        if self.reference.path and self.lora.rank and self.task in WITH_REFERENCE and self.reference.path != self.policy.path:
            yield "reference.path: with lora.rank the reference is the policy without its adapters; leave it out"

    def _mistakes_in_learner(self) -> Iterator[str]:
        """Check ranks, precision and adapters."""
        data = self.data
        if isinstance(self.learner.ranks, AutoCount):
            yield "learner.ranks: `auto` is for runs; give the most ranks of the stage, and the fewest as run.min_ranks"
        if self.min_ranks > self.learner.ranks:
            yield "run.min_ranks: must not exceed learner.ranks"
        if self.learner.ranks // self.learner.tensor_parallel // self.learner.sequence_parallel > data.batch_rows:
            yield "learner.ranks: must not exceed data.batch_rows"
        yield from mistakes_in_precision(self.policy.dtype, self.learner)
        if self.learner.overlap != "auto":
            yield "learner.overlap: a supervised stage has no rollout; leave it out"
        if self.learner.pack_rows is True and self.lora.dropout:
            yield "learner.pack_rows: lora.dropout is drawn for rows of one sequence; leave it out"
        if self.learner.pack_rows is True and self.learner.sequence_parallel > 1:
            yield "learner.pack_rows: with learner.sequence_parallel ranks share rows of one sequence; leave it out"
        yield from self.lora.mistakes()
        yield from mistakes_in_slices("learner", self.learner.sequence_parallel, self.lora)
        if self.lora.publish != "auto":
            yield "lora.publish: there are no engines; leave it out"
