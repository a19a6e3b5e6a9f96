"""A further member of an engine: a process with its part of the weights and KV cache, which carries out the engine's calls.

`python -m rlhfless_ray.engine.engine_member ON_CPU ARCHITECTURE…` starts one, whose standard input is the connection.
"""

from __future__ import annotations

import pickle
import sys
from typing import Any, BinaryIO

import cloudpickle

from rlhfless_ray.engine.engine_members import STEP_CALLS
from rlhfless_ray.local.member_process import connect


class MemberWorker:
    """vLLM's worker in this process."""

    def __init__(self) -> None:
        self.worker: Any = None

    def build(self, config: Any, rank: int, init_method: str) -> None:
        from vllm.platforms import current_platform
        from vllm.v1.worker.worker_base import WorkerWrapperBase

        from rlhfless_ray.engine.prepare_vllm import install_sampler, use_fast_products

        on_cpu = config.device_config.device_type == "cpu"
        use_fast_products(str(config.model_config.dtype).removeprefix("torch."), on_cpu)
        if config.lora_config is not None and on_cpu:
            from rlhfless_ray.engine.adapter_layers import replace_products

            replace_products()
        self.worker = WorkerWrapperBase(rpc_rank=rank)
        arguments = {
            "vllm_config": config,
            "local_rank": rank,
            "rank": rank,
            "distributed_init_method": init_method,
            "is_driver_worker": False,
        }
        self.worker.init_worker(all_kwargs=[{}] * rank + [arguments])
        self.worker.init_device()
        self.worker.load_model()
        current_platform.update_block_size_for_backend(config)
        self.sampler = install_sampler(self.worker)

    def step(self, method: str, args: tuple[object, ...], kwargs: dict[str, Any]) -> None:
        """Do this member's part of a step. It draws the same tokens as the engine, which reads its own."""
        getattr(self.worker, method)(*args, **kwargs)
        self.sampler.records.clear()
        self.sampler.outputs.clear()

    def run(self, method: object, args: tuple[object, ...], kwargs: dict[str, Any]) -> Any:
        from vllm.v1.serial_utils import run_method

        return run_method(self.worker, method, args, kwargs)


def serve(reader: BinaryIO, writer: BinaryIO) -> None:
    """Carry out calls for ever. An exception in a step ends the process: the engine waits in a collective operation then."""
    member = MemberWorker()
    while True:
        method, args, kwargs = pickle.load(reader)
        if method in STEP_CALLS:
            member.step(method, args, kwargs)
            continue
        try:
            result: Any = None
            if method == "build":
                member.build(*args)
            else:
                result = member.run(method, args, kwargs)
            reply = cloudpickle.dumps(result)
        except Exception as error:
            reply = pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
        writer.write(reply)
        writer.flush()


def main() -> None:
    reader, writer = connect()
    from rlhfless_ray.engine.prepare_vllm import prepare

    prepare(sys.argv[1] == "1", sys.argv[2:])
    import torch

    torch.set_num_threads(1)
    serve(reader, writer)


if __name__ == "__main__":
    main()
