"""A vLLM executor whose first member is this process. Each further member is a process of its own, see `engine_members`.

vLLM's own executor for several processes (`mp`) keeps every worker outside of the engine's process. It needs one process more than
there are slots. The sampler, whose draws the engine reads after each step, would also be in another process.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from vllm.v1.executor.uniproc_executor import UniProcExecutor

from rlhfless_ray.engine.engine_members import STEP_CALLS, start_members, started

NOTICE_S = 1.0  # time for the thread that watches a lost member to end this process


class MemberExecutor(UniProcExecutor):
    def _init_executor(self) -> None:
        from vllm.transformers_utils.config import maybe_register_config_serialize_by_value

        maybe_register_config_serialize_by_value()  # classes of a model folder's own code
        start_members(self.vllm_config.parallel_config.world_size - 1, self.vllm_config.device_config.device_type == "cpu")
        self.init_method = super()._distributed_args()[0]
        for rank, member in enumerate(started, 1):
            member.call("build", (self.vllm_config, rank, self.init_method))
        super()._init_executor()
        for member in started:
            member.result()
        # The members have mapped their shared memory by now. Nothing else would remove its files after a kill.
        for file in Path("/dev/shm").glob(f"{Path(self.init_method.removeprefix('file://')).name}*"):
            file.unlink()

    def _distributed_args(self) -> tuple[str, int, int]:
        return self.init_method, 0, 0

    def collective_rpc(
        self,
        method: object,
        timeout: float | None = None,
        args: tuple[object, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
        single_value: bool = False,
    ) -> Any:
        """Run `method` in every member, and return all results. A step returns this process's only."""
        for member in started:
            member.call(method, args, kwargs)
        if method not in STEP_CALLS:
            run_here = partial(super().collective_rpc, method, timeout, args, kwargs, non_block, True)
            results, errors = [], []
            calls: list[Callable[[], Any]] = [run_here, *(member.result for member in started)]
            for result in calls:
                try:
                    results.append(result())
                except Exception as error:  # the other replies would be taken for those of the next call
                    errors.append(error)
            if errors:
                raise errors[0]
            return results[0] if single_value else results
        try:
            return super().collective_rpc(method, timeout, args, kwargs, non_block, single_value)
        except Exception:
            time.sleep(NOTICE_S)  # if a lost member caused this, this process ends here, and the engine is replaced
            raise
