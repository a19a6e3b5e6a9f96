"""A vLLM executor whose first member is this process. Each further member is a process of its own, see `engine_members`.

vLLM's own executor for several processes (`mp`) keeps every worker outside of the engine's process. It needs one process more than
there are slots. The sampler, whose draws the engine reads after each step, would also be in another process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
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
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
        single_value: bool = False,
    ) -> Any:
        """Run `method` in every member, and return all results. A step returns this process's only."""
        for member in started:
            member.call(method, args, kwargs)
        if method not in STEP_CALLS:
            local_result = super().collective_rpc(method, timeout, args, kwargs, non_block, True)
            results = [local_result, *(member.result() for member in started)]
            return local_result if single_value else results
        try:
            return super().collective_rpc(method, timeout, args, kwargs, non_block, single_value)
        except Exception:
            time.sleep(NOTICE_S)  # if a lost member caused this, this process ends here, and the engine is replaced
            raise

    def load(self, method: Any, weights: Mapping[str, np.ndarray], *args: Any) -> list[Any]:
        """Run `method(worker, weights, *args)` in every member. The further members get the tensors while this one loads."""
        senders = []
        for member in started:
            member.call("load", (method, args))
            senders.append(threading.Thread(target=member.send_weights, args=(weights,), daemon=True))
            senders[-1].start()
        local_result = method(self.driver_worker, weights, *args)
        for sender in senders:
            sender.join()
        return [local_result, *(member.result() for member in started)]
