"""Recipe sections of the data for training and evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from rlhfless_ray.recipe.local_path import InputPath, InputPaths
from rlhfless_ray.recipe.section import MAX_ROWS, Name, Section


def one_gap(template: str) -> str:
    try:
        filled = template.format("\0")
    except (IndexError, KeyError, ValueError, AttributeError):
        filled = ""
    if filled.count("\0") != 1:
        raise ValueError("must hold one {} where the prompt goes; write other braces twice, as {{ and }}")
    return template


class DataSources(Section):
    """The data sets of a section, or the built-in task that generates its rows."""

    section: ClassVar[str]  # name of the section in its recipe
    task: str = ""
    """A built-in task: `chain`, `sort`, or in a run `pictures` or `noise_pictures`. Set exactly one of this, `path` and `paths`."""
    path: InputPath = ""
    """A JSONL, JSON, CSV, parquet or Arrow file, a folder that `datasets` can load (or one written by it), a Python file
    with a `datasets` builder, a data set's name on the Hugging Face hub, or the URL of a file or folder, such as `s3://bucket/data`."""
    paths: list[InputPath] = Field(default_factory=list)
    """Several data sets; `name@subdir` is a folder of one. They follow each other, or are mixed by `probabilities`."""
    probabilities: list[float] | None = None
    """Shares of `paths` in the mix. Rows are drawn by these shares until every data set is used up; smaller ones repeat."""
    split: str = Field("train", min_length=1)
    """Split of data sets that have several."""
    max_rows: int | None = Field(None, ge=1)
    """Keep only the first rows of each data set, and of their mix. None: all."""
    rows: int = Field(4096, ge=1, le=MAX_ROWS)
    """Rows that a built-in task generates for training."""
    shuffle: bool = True
    """Shuffle every epoch, by the run's seed."""
    template: Literal["none", "chat"] = "none"
    """`chat`: render turns with the tokenizer's chat template. A prompt that is a text is one turn of the user."""
    input_template: Annotated[str, AfterValidator(one_gap)] | None = None
    """Text with one `{}` into which each prompt is put, for `template: none`."""
    add_bos: bool = True
    """For `template: none`: begin with the tokenizer's beginning-of-text token, if it adds one itself and the text has none."""
    tools_column: str = "tools"
    """With `template: chat`: column with the tools that the chat template gets, a list of JSON schemas or its text. Rows may lack it.
    Empty: none."""

    @model_validator(mode="after")
    def _check_mix(self) -> Self:
        if self.probabilities is not None:
            key = f"{self.section}.probabilities"
            if len(self.probabilities) != len(self.paths):
                raise ValueError(f"{key}: {len(self.probabilities)} numbers for {len(self.paths)} data sets in {self.section}.paths")
            if any(share <= 0 for share in self.probabilities) or abs(sum(self.probabilities) - 1) > 1e-6:
                raise ValueError(f"{key}: must be positive and add up to 1")
        return self

    @property
    def sources(self) -> list[str]:
        """The data sets; none if a built-in task generates the rows."""
        return self.paths or ([self.path] if self.path else [])

    def mistakes(self, policy_path: str, evaluate_path: str) -> Iterator[str]:
        """Check the sources against the policy and the held-out rows."""
        if sum(map(bool, (self.task, self.path, self.paths))) != 1:
            yield f"{self.section}: set exactly one of `task` (built in) and `path` (a file) or `paths` (several)"
        if evaluate_path and self.task:
            yield "evaluate.path: a built-in task generates its own held-out rows; leave it out"
        if self.max_rows is not None and self.task:
            yield f"{self.section}.max_rows: it limits data sets, and a built-in task generates {self.section}.rows rows; set that instead"
        if self.input_template is not None and self.template == "chat":
            yield (f"{self.section}.input_template: the chat template replaces it; set {self.section}.template to none, or leave it out")
        if self.sources and not policy_path:
            yield "policy.path: name a local Hugging Face model folder; only built-in tasks create their own policy"


class PromptsConfig(DataSources):
    section = "prompts"
    max_rows: int | None = Field(None, ge=1)
    """Keep only the first rows of each data set, of their mix, and of the one in `evaluate.path`. None: all."""
    prompt_column: str = "question"
    """Column with the prompt's text, or, for `template: chat`, with a list of turns or its JSON text."""
    answer_column: str = "answer"
    """Column with the reference answer, which the reward function gets as part of the row. Empty: there is none."""
    image_column: str = "images"
    """Column with the images of a prompt, one or a list: paths, bytes, data URIs or the Image feature of `datasets`. The prompt has
    `<image>` where each goes. Rows may lack it. Empty: nothing reads images."""
    max_pixels: int | None = Field(None, ge=1)
    """Make larger images smaller, keeping their shape, until they have at most so many pixels. None: the limit of the policy's image
    processor, which holds in any case."""
    system: Name = ""
    """System turn put before each prompt when `template` is `chat`."""
    batch_prompts: int = Field(32, ge=1)
    """Prompts per step."""
    max_prompt_tokens: int = Field(512, ge=1)
    """Maximum tokens of a prompt. `overlong` says what happens to longer ones."""
    overlong: Literal["stop", "leave_out", "cut_left"] = "stop"
    """Longer prompts end the run before it starts (`stop`), or are left out (`leave_out`), or lose their first tokens as in OpenRLHF
    (`cut_left`). Prompts that are left out or cut are counted and reported."""


class EvaluateConfig(Section):
    path: InputPaths = ""
    """A data set to evaluate on, as in `prompts.path`, or several separated by commas. Empty: held-out rows."""
    split: str = Field("train", min_length=1)
    """Split of that data set."""
    prompts: int = Field(256, ge=0, le=MAX_ROWS)
    """Number of held-out prompts. Built-in tasks generate them; of a file the last rows are held out of training. The prompts of
    `path` are all used. 0 turns evaluation off in any case."""
    every_steps: int = Field(0, ge=0)
    """Steps between two evaluations. 0: only before the first step and after the last."""
    greedy: bool = True
    """Also evaluate greedily."""
    temperature: float | None = Field(None, ge=0)
    """Temperature of sampled responses; 0 is greedy. None: that of training."""
    samples_per_prompt: int = Field(1, ge=1)
    """Sampled responses to each prompt. Their mean reward is pass1; the mean of each prompt's best is pass<k>."""
    source_column: str = "datasource"
    """Column with the name of a row's data set, for metrics of each. A row without it belongs to `default`."""
