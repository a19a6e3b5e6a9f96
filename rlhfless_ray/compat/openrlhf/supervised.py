"""Translate command lines of OpenRLHF's launchers that train on rows into recipes of supervised stages."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.compat.openrlhf.dialect import CommandLine
from rlhfless_ray.compat.openrlhf.elastic_flags import own_value, separate
from rlhfless_ray.compat.openrlhf.flag_semantics import folder_name, switched_dtype, template_notes
from rlhfless_ray.compat.openrlhf.flags import flags_of, place
from rlhfless_ray.compat.openrlhf.launcher_flags import LauncherTranslation, Values, defaults, read_line
from rlhfless_ray.compat.openrlhf.recipe_keys import nested
from rlhfless_ray.compat.openrlhf.starters import process_place
from rlhfless_ray.compat.openrlhf.supervised_table import ALWAYS, KD, KTO, OLDER_NAMES, OWN, RANKS, RM, RULES, SFT, TASKS
from rlhfless_ray.recipe.supervised_sections import SupervisedRecipe

EVALUATED_SHARE = 0.01  # of the training rows, by train_rm without an evaluation data set
MEAN_OF_BATCH_SINCE = "0.10.4"  # before, the loss of train_sft was a mean of the means of micro-batches
ALL_STEPS_SINCE = "0.11.2"  # before, the schedule of train_sft counted whole batches of each epoch, as the others do
MASKED_SINCE = "0.8.6"  # before, packed samples were one sequence to transformers if there was no flash attention
NO_DTYPE_UNTIL = "0.9.1"  # without --bf16 these versions keep the dtype of the model's folder


@dataclass
class SupervisedTranslation(LauncherTranslation):
    """A command line as a recipe."""

    load_flag: str = ""
    """The flag that continues a run, as the dialect spells it."""
    resumes: bool = False
    """Whether the flag is given."""

    @property
    def tree(self) -> JsonObject:
        return nested({"task": TASKS[self.launcher], **self.settings})

    def recipe(self) -> SupervisedRecipe:
        with self.flags_in_errors():
            return SupervisedRecipe.parse(self.tree).with_named(self.own)


def translate_supervised(
    launcher: str, tokens: Sequence[str], environment: Mapping[str, str] = os.environ, ranks: int = 1
) -> SupervisedTranslation:
    """Translate a command line.

    Args:
        launcher: One of `TASKS`.
        tokens: Its flags.
        environment: The variables of torchrun, deepspeed or MPI tell the number of ranks.
        ranks: Number of ranks without them.

    Raises:
        UserError: If no version accepts the line.
    """
    theirs, ours, wanted = separate(tokens)
    line = read_line(launcher, theirs, wanted)
    version, given = line.version, line.given
    values = {_newest(flag): value for flag, value in defaults(launcher, version).items()}
    spelled = {name: flag for flag in flags_of(version, launcher) for name in [_newest(flag[2:])]}
    for flag, value in given.items():
        newest = _newest(flag[2:])
        other = spelled.get(newest, flag)
        if other != flag and other in given and values[newest] != value and not isinstance(values[newest], bool):
            raise UserError(f"{flag}: {other} is the same setting with another value; leave one of them out")
        values[newest], spelled[newest] = value, flag
    _, started = process_place(environment)
    ranks = started or ranks
    own: JsonObject = {
        key: own_value(flag, text, key, SupervisedRecipe) for flag, text in ours for key in [flag.removeprefix("--elastic.")]
    }
    if isinstance(own.get("learner.ranks"), int):
        ranks = own["learner.ranks"]
    values[RANKS], values[OWN] = ranks, [flag for flag, _ in ours]
    settings: JsonObject = {**ALWAYS, "learner.ranks": ranks, "run.name": launcher}
    if launcher != SFT or place(version) < place(ALL_STEPS_SINCE):
        settings["run.schedule_end"] = "whole_batches"
    if "lr_scheduler" not in values:  # the launchers' own before it was a flag
        settings["learner.schedule"] = "cosine_with_min_lr"
        values["lr_scheduler"] = None
    if "min_lr_ratio" not in values and values["lr_scheduler"] in (None, "cosine_with_min_lr"):  # likewise
        settings["learner.min_rate_share"] = 0.1
    translation = SupervisedTranslation(
        launcher=launcher, line=line, settings=settings, load_flag=spelled["ckpt.load_enable"], resumes=bool(values["ckpt.load_enable"])
    )
    rules = {rule.name: rule for rule in RULES}
    for name, flag in spelled.items():
        translation.apply(rules[name], flag, values, flag in given)
    translation.flags.sort(key=lambda outcome: [*given].index(outcome.flag) if outcome.flag in given else -1)
    translation.set_own(ours, SupervisedRecipe)
    if launcher == RM:  # each evaluation sets the scale of the rewards in config.json
        settings["evaluate.each_epoch"] = True
        if not (settings.get("evaluate.path") or settings.get("evaluate.rows")):
            settings.setdefault("evaluate.train_share", EVALUATED_SHARE)
    translation.notes = _notes(launcher, version, values, spelled)
    if _stored_dtype_elsewhere(line, values):
        translation.notes.append(
            f"weights are bfloat16; OpenRLHF {NO_DTYPE_UNTIL} and older accept this command too and keep the dtype of the model's folder, "
            f"which --elastic.dialect {NO_DTYPE_UNTIL} does"
        )
    if "watch.run_name" in settings:
        settings["run.name"] = folder_name(str(settings["watch.run_name"])) or launcher
    return translation


def _stored_dtype_elsewhere(line: CommandLine, v: Values) -> bool:
    """Return whether older versions accept the line too, and train in the dtype of the model's folder, which is another one."""
    if place(line.version) <= place(NO_DTYPE_UNTIL) or v["ds.param_dtype"] != "bf16" or NO_DTYPE_UNTIL not in line.accepted_by:
        return False
    return switched_dtype(False, v["model.model_name_or_path"])["policy.dtype"] != "bfloat16"


def _notes(launcher: str, version: str, v: Values, spelled: Mapping[str, str]) -> list[str]:
    notes = []
    if launcher == SFT and place(version) < place(MEAN_OF_BATCH_SINCE):
        notes.append(
            f"the loss is the mean over all tokens of a batch; before {MEAN_OF_BATCH_SINCE} OpenRLHF's is a mean of the means of its "
            "micro-batches"
        )
    if v.get("ds.packing_samples") and place(version) < place(MASKED_SINCE) and not v["ds.attn_implementation"]:
        notes.append(
            f"--packing_samples: samples never see one another; without --flash_attn OpenRLHF before {MASKED_SINCE} lets each see those "
            "before it in its micro-batch"
        )
    if launcher == KTO:
        notes.append("the KL divergence is estimated over a whole batch; OpenRLHF estimates it over each micro-batch")
    if launcher == KD:
        notes.append("the teacher is evaluated at the trained tokens; OpenRLHF evaluates it one token later, up to the token after the end")
    if "data.input_template" in v and not v["data.apply_chat_template"]:
        notes += template_notes(spelled["data.input_template"], v["data.input_template"])
    if launcher == RM and not v["data.prompt_key"]:
        notes.append("both texts of a pair are computed whole, so their common prompt is computed twice")
    return notes


def _newest(flag: str) -> str:
    return OLDER_NAMES.get(flag, flag)
