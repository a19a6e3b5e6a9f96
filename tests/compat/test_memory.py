"""Commands whose models no device holds: a run is refused before it starts, with the flag."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhfless_ray.compat.openrlhf.memory import too_large
from rlhfless_ray.compat.openrlhf.translate import translate
from rlhfless_ray.preflight import memory_check
from tests.conftest import command_here
from tests.placement.test_memory import LLAMA_70B, QWEN_7B
from tests.test_memory_check import ENORMOUS, folder

LINE = "--prompt_data /d.jsonl --remote_rm_url /r.py --advantage_estimator rloo --n_samples_per_prompt 4 --vllm_num_engines 2 --bf16"
NEW = (
    "--data.prompt_dataset /d.jsonl --reward.remote_url /r.py --algo.advantage.estimator rloo --rollout.n_samples_per_prompt 4 "
    "--vllm.num_engines 2 --ds.param_dtype bf16"
)
H100_BYTES = 85_520_809_984


def line(model: Path, *flags: str) -> list[str]:
    return ["--pretrain", str(model), *LINE.split(), *flags]


@pytest.fixture
def eight_gpus(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(memory_check, "visible_gpus", lambda: 8)
    monkeypatch.setattr(memory_check, "memory_bytes", lambda gpu: H100_BYTES)


def test_an_engine_that_one_device_cannot_hold_is_refused_unless_it_gets_several(tmp_path, eight_gpus):
    model = folder(tmp_path / "70b", LLAMA_70B)
    width, share = "--vllm_tensor_parallel_size", "--vllm_gpu_memory_utilization"
    said = too_large(translate(line(model)))
    assert "--pretrain" in said.partition(": ")[0] and width not in said  # who did not ask for several is told of the model alone
    assert "an engine needs at least 141.4 GB (141.1 GB weights, 0.3 GB KV cache" in said and "a GPU here has 85.5 GB" in said
    half = too_large(translate(line(model, width, "2", share, "0.5")))
    assert "an engine needs at least 70.7 GB (70.6 GB weights, 0.2 GB KV cache" in half and "on each of its 2 devices" in half
    said = too_large(translate(line(model, width, "2", share, "0.85")))
    assert "a learner rank needs at least" in said, "the engine fits two devices"
    new = ["--actor.model_name_or_path", str(model), *NEW.split(), "--vllm.tensor_parallel_size", "16"]
    assert too_large(translate(new)) != "" and translate(new).settings["rollout.tensor_parallel"] == 16


def test_where_one_device_holds_the_engine_it_still_gets_as_many_as_were_asked_for(tmp_path, eight_gpus):
    model = folder(tmp_path / "7b", QWEN_7B)
    found = translate(line(model, "--vllm_tensor_parallel_size", "2"))
    assert too_large(found) is None  # eight ranks of ZeRO 2 share the optimizer's state
    assert [o.status for o in found.flags if o.flag == "--vllm_tensor_parallel_size"] == ["hint"]
    assert found.settings["rollout.tensor_parallel"] == 2


def test_another_cluster_decides_for_itself(tmp_path, eight_gpus):
    model = folder(tmp_path / "70b", LLAMA_70B)
    assert too_large(translate(line(model)), {"RAY_ADDRESS": "head:6379"}) is None
    assert too_large(translate(line(model, "--elastic.cluster.address", "head:6379"))) is None


def test_models_that_are_not_here_have_no_sizes(monkeypatch):
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *a: None)
    for name in ("/nowhere", "org/name"):
        found = translate(line(Path(name), "--vllm_tensor_parallel_size", "2"))
        assert too_large(found) is None


def test_what_this_machine_cannot_hold_exits_with_two(tmp_path):
    flags = line(folder(tmp_path / "big", ENORMOUS), "--vllm_tensor_parallel_size", "2")
    done = command_here("explain", "--", "python3", "-m", "openrlhf.cli.train_ppo_ray", *flags)
    assert done.returncode == 2 and "\ndoes not run: --pretrain" in done.stdout and " GB" in done.stdout.splitlines()[-1], done.stderr
    run = command_here(*flags, module="rlhfless_ray.cli.train_ppo_ray", cwd=tmp_path)
    assert run.returncode == 2 and "error: --pretrain" in run.stderr and "needs at least" in run.stderr and "Traceback" not in run.stderr
    assert not (tmp_path / "runs").exists()
