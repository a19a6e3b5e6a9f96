"""The process of a stock engine. vLLM computes in further processes, which this one starts under its lease."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rlhfless_ray.engine.engine_actor import EngineActor

if TYPE_CHECKING:
    from rlhfless_ray.engine.stock_engine import StockEngine


class StockEngineActor(EngineActor):
    def _import(self) -> None:
        import vllm  # noqa: F401

        import rlhfless_ray.engine.stock_engine  # noqa: F401

    def _build(self, scratch: Path, threads: int) -> StockEngine:
        from rlhfless_ray.engine.engine_arguments import engine_folder
        from rlhfless_ray.engine.stock_engine import StockEngine

        folder, width = engine_folder(scratch, self.files, self.settings), self.settings.tensor_parallel
        return StockEngine(folder, self.settings, threads // width, self._tokenizer)
