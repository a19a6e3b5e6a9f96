"""OpenRLHF 0.11.2 on CPU cores: an environment of its own, with changes in eight of its files and a stand-in for `flash_attn`.

OpenRLHF needs GPUs. The changes replace calls of `torch.cuda`, the kind of the device mesh, and the transport of weights from the
learner to the engines. One repairs a fault that decides what is learned, see `NORMALIZED`. Nothing else that does is changed.
"""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.common.run_process import run_process
from benchmarks.peers.peer_env import HERE, layered_python

PINNED = HERE / "openrlhf_requirements.txt"
FOLDER = HERE / ".env-openrlhf"

DEVICE = """
import torch

torch.cuda.set_device = lambda device: None
torch.cuda.current_device = lambda: torch.device("cpu")
torch.cuda.synchronize = lambda device=None: None
torch.cuda.empty_cache = lambda: None
"""

PROCESS_GROUP = '''

class _Broadcasts:
    """Broadcasts tensors over gloo as bytes, with the interface of vLLM's PyNcclCommunicator."""

    def __init__(self, group):
        self.group = group

    def broadcast(self, tensor, src):
        import torch

        options = torch.distributed.BroadcastOptions()
        options.rootRank = src
        self.group.broadcast([tensor.detach().reshape(-1).view(torch.uint8)], options).wait()


def stateless_init_process_group(master_address, master_port, rank, world_size, device):
    from datetime import timedelta

    from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

    limit = timedelta(seconds=600)
    store = TCPStore(master_address, master_port, world_size, rank == 0, limit)
    return _Broadcasts(ProcessGroupGloo(PrefixStore("weights", store), rank, world_size, limit))
'''

# Engines on CPU keep packed weights, which only a complete reload computes again.
LOAD = """        if not hasattr(self, "_received"):
            self._received = []
        self._received.append((name, weight))
        if empty_cache:  # the last one
            received, self._received = self._received, []
            self.model_runner.reload_weights(weights_iterator=iter(received))
            seen = set()
            for module in self.model_runner.get_model().modules():
                held = getattr(module, "weight", None)
                if hasattr(module, "cpu_linear") and id(held) in seen:  # a head tied to the embeddings has a packed copy
                    module.quant_method.process_weights_after_loading(module)
                seen.add(id(held))
"""

# Transformers 5 builds a model without memory, and then allocates buffers that no file contains. The mean and standard deviation of a
# reward model, which its constructor reads from config.json, are whatever that memory held: rewards of -5e15 were measured.
NORMALIZED = """    set_z3_leaf_modules(model, detect_hybrid=False)
    model.mean[0], model.std[0] = getattr(config, "mean", 0.0), getattr(config, "std", 1.0)
"""

# file of the package: (text, replacement) of each change; "" is the end of the file
CHANGES: dict[str, list[tuple[str, str]]] = {
    "__init__.py": [("", DEVICE)],
    "models/model.py": [("    set_z3_leaf_modules(model, detect_hybrid=False)\n", NORMALIZED)],
    "utils/deepspeed/deepspeed.py": [('"cuda", (dp_size,', '"cpu", (dp_size,')],
    "trainer/ppo_utils/replay_buffer.py": [('torch.device(f"cuda:{torch.cuda.current_device()}")', "torch.cuda.current_device()")],
    "utils/distributed_util.py": [("", PROCESS_GROUP)],
    "trainer/ray/vllm_worker_wrap.py": [
        ('device="cuda")', 'device="cpu")'),
        ("broadcast(weight, src=0, stream=torch.cuda.current_stream())", "broadcast(weight, src=0)"),
        ("        self.model_runner.model.load_weights(weights=[(name, weight)])\n\n        del weight\n", LOAD),
    ],
    "trainer/ray/ppo_actor.py": [("broadcast(param.data, src=0, stream=torch.cuda.current_stream())", "broadcast(param.data, src=0)")],
    # a Ray of its own, with logical GPUs for PPO's five actors and some to spare; the dashboard's memory and time would count
    # as OpenRLHF's
    "cli/train_ppo_ray.py": [("ray.init(", 'ray.init(address="local", num_gpus=8, num_cpus=8, include_dashboard=False,')],
}

# Imported by name, and called with packed samples or ring attention only.
FLASH = {
    "__init__.py": "",
    "bert_padding.py": "from einops import rearrange\n\nindex_first_axis = pad_input = unpad_input = None\n",
    "utils/__init__.py": "",
    "utils/distributed.py": "all_gather = None\n",
}

# what a command needs besides: engines with a little KV cache, attention without flash_attn, weights over gloo
FLAGS = (
    *("--vllm.sync_backend", "gloo", "--vllm.gpu_memory_utilization", "0.1", "--vllm.enforce_eager"),
    *("--ds.attn_implementation", "sdpa"),
)
ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "RAY_worker_niceness": "0",  # as here; at Ray's 15 other programs would slow OpenRLHF down and not this project
}

# DeepSpeed compiles these when a run first needs them, and again in a checkout elsewhere: up to four minutes of start-up
COMPILE = """from deepspeed.accelerator import get_accelerator

for name in ("ShareMemCommBuilder", "FusedAdamBuilder"):
    get_accelerator().create_op_builder(name).load()
"""


def openrlhf_python(folder: Path) -> Path:
    """Return the interpreter of an environment with the changed OpenRLHF; see `layered_python`."""
    return layered_python(folder, PINNED, "OpenRLHF", port, version=repr((CHANGES, FLASH)))


def compile_operators(python: Path, scratch: Path) -> None:
    """Compile DeepSpeed's operators, if they are not in torch's cache."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run_process([python, "-c", COMPILE], scratch / "compile.log", environment={**variables, **ENVIRONMENT}, memory=False, timeout_s=1200)


def port(packages: Path) -> None:
    """Change an installed OpenRLHF. Raises RuntimeError if it is not the version that the changes are for."""
    for name, changes in CHANGES.items():
        file = packages / "openrlhf" / name
        text = file.read_text()
        for old, new in changes:
            if old and text.count(old) != 1:
                raise RuntimeError(f"{file}: {old!r} occurs {text.count(old)} times, not once")
            text = text.replace(old, new) if old else text + new
        file.write_text(text)
    for name, text in FLASH.items():
        file = packages / "flash_attn" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
