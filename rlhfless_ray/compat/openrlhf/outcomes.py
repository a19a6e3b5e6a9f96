"""What translations of all launchers share: outcomes of flags, errors that name flags, and parts of an explanation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import yaml

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.compat.openrlhf.elastic_flags import CHANGED, PREVIOUS, RESUME
from rlhfless_ray.compat.openrlhf.recipe_keys import nested

if TYPE_CHECKING:
    from rlhfless_ray.recipe.recipe_file import RecipeFile

HONOURED, HINT, NO_EFFECT, REFUSED = "honoured", "hint", "no effect", "refused"


class Outcome(NamedTuple):
    """Outcome of one flag, spelled as in the command line or, for a default, as in its dialect."""

    flag: str
    status: str
    why: str = ""


@dataclass(kw_only=True)
class CommandTranslation(ABC):
    """A command line as settings of a recipe."""

    settings: JsonObject = field(default_factory=dict)
    """Dotted recipe key → value."""
    flags: list[Outcome] = field(default_factory=list)
    """Outcomes of the command line's flags. Launchers other than PPO's have refused defaults here too."""
    notes: list[str] = field(default_factory=list)

    @property
    def tree(self) -> JsonObject:
        """The settings as a nested dict."""
        return nested(self.settings)

    def with_status(self, status: str) -> list[Outcome]:
        return [outcome for outcome in self.flags if outcome.status == status]

    @property
    def refused(self) -> list[Outcome]:
        """Outcomes with which the command cannot run."""
        return self.with_status(REFUSED)

    @abstractmethod
    def recipe(self) -> RecipeFile | None:
        """Return the recipe, or None if the launcher needs none. Raises UserError, which names the flag of an invalid value."""

    @abstractmethod
    def by_flag(self, error: UserError) -> UserError:
        """Return the error with the flags that decide the recipe keys it names."""

    def refusal(self) -> UserError | None:
        """Return an error that names every refused flag, or None if the command can run."""
        return UserError("; ".join(f"{outcome.flag}: {outcome.why}" for outcome in self.refused)) if self.refused else None

    def problem(self) -> UserError | None:
        """Return why the recipe is invalid, or None if it is valid."""
        try:
            self.recipe()
        except UserError as error:
            return error
        return None

    @contextmanager
    def flags_in_errors(self) -> Iterator[None]:
        """Make UserErrors name the flags that decide the keys they name."""
        try:
            yield
        except UserError as error:
            text = str(error).replace("--resume=previous", f"{RESUME} {PREVIOUS}").replace("--resume-changed", f"{RESUME} {CHANGED}")
            raise self.by_flag(UserError(text)) from None


def block(title: str, entries: list[str]) -> list[str]:
    """Return lines of an explanation, with the title beside the first entry."""
    return [f"{title if not index else '':<12}{entry}" for index, entry in enumerate(entries)]


def recipe_lines(tree: JsonObject, refused: bool) -> list[str]:
    """Return the recipe as the last lines of an explanation. `refused`: whether it lacks refused flags."""
    text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
    return ["recipe" + (" (without the refused flags)" if refused else ""), *("  " + line for line in text.splitlines())]
