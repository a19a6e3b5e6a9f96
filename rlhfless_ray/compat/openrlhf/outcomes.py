"""What translations of all launchers share: outcomes of flags, and errors that name flags."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.compat.openrlhf.dialect import CommandLine
from rlhfless_ray.compat.openrlhf.elastic_flags import CHANGED, PREVIOUS, RESUME
from rlhfless_ray.compat.openrlhf.flags import LAUNCHER
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

    launcher: str = LAUNCHER
    line: CommandLine
    settings: JsonObject = field(default_factory=dict)
    """Dotted recipe key → value."""
    flags: list[Outcome] = field(default_factory=list)
    """Outcomes of the command line's flags. Launchers other than PPO's have refused defaults here too."""
    notes: list[str] = field(default_factory=list)
    own: JsonObject = field(default_factory=dict)
    """Settings from --elastic.* and --prefix.*, which are also in `settings`."""

    @property
    def version(self) -> str:
        """The dialect."""
        return self.line.version

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
