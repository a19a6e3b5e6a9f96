"""The interface of everything that plays episodes: a picklable source, and the player that it creates in an agent process."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from rlhfless_ray.agent.engine_api import Generate
from rlhfless_ray.agent.episode import Episode
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.reward.source import Source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class EpisodePlayer(Protocol):
    """Play prompts, many at once on one event loop."""

    @property
    def seats(self) -> AbstractAsyncContextManager[object]:
        """Entered before an episode, whose time limit begins only then."""

    async def play(self, prompt: str, label: Any, sampling_params: Any, generate: Generate) -> Episode | str:
        """Play one prompt. Returns the episode, or an error message."""


class EpisodeSource(Source):
    """Samples come with their rewards, so no process scores them."""

    pool_kind: ClassVar[str] = "agent"

    @property
    def where(self) -> str:
        """The recipe's key and value, which begin error messages."""
        raise NotImplementedError

    def label(self, row: JsonObject, answer_column: str) -> Any:
        """Return what the player gets with a prompt."""
        return row.get(answer_column, "") if answer_column else ""

    def player(self, tokenizer: PreTrainedTokenizerBase, max_length: int) -> EpisodePlayer:
        """Create a player, inside the event loop. `max_length`: token limit of an episode."""
        raise NotImplementedError
