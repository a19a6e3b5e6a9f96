"""`rlhfless simulate` as a user meets it."""

import json
from pathlib import Path

import pytest
import yaml

from tests.conftest import command_here

pytestmark = pytest.mark.slow  # twenty commands, some of which simulate


def spec(tmp_path, **changes) -> str:
    tree = {"like": "qwen3b-gsm8k-grpo", "prompts": 8, "samples": 4, "nodes": 1, "steps_per_epoch": 1, "epochs": 1, **changes}
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(tree))
    return str(path)


def test_a_table(tmp_path):
    done = command_here("simulate", spec(tmp_path), "--policy", "fixed", "--policy", "global-cut")
    assert done.returncode == 0, done.stderr
    assert "8 × L40S" in done.stdout and "global-cut" in done.stdout and "no policy can come below" in done.stdout


def test_json_has_means_over_seeds(tmp_path):
    done = command_here("simulate", spec(tmp_path), "--policy", "fixed", "--json", "--seeds", "2")
    found = json.loads(done.stdout)
    row = found["policies"]["fixed"]
    assert found["seeds"] == 2 and row["step_s"]["sd"] > 0
    assert row["full_device_s"]["mean"] == pytest.approx(8 * row["step_s"]["mean"])
    assert row["step_s"]["mean"] >= found["bound"]["step_s"]


def test_partial_rollouts_have_no_bound_of_one_step(tmp_path):
    done = command_here("simulate", spec(tmp_path, max_lag_steps=2, partial=True), "--policy", "april", "--json")
    assert json.loads(done.stdout)["bound"] is None


def test_plain_fixed_has_neither_drafts_nor_8_bit_weights(tmp_path):
    plain, changed = (
        json.loads(command_here("simulate", spec(tmp_path, **change), "--policy", "fixed", "--json").stdout)
        for change in ({}, {"quantization": "int8", "acceptance": 0.5})
    )
    assert changed["plain_fixed"] == plain["plain_fixed"] and (changed["quantization"], changed["acceptance"]) == ("int8", 0.5)
    speedups = [found["policies"]["fixed"]["over_plain_fixed"]["speedup"] for found in (plain, changed)]
    assert speedups[1] > 1.1 * speedups[0]
    large = {"quantization": "int8", "device": "B200", "model": "llama-2-70b"}
    done = command_here("simulate", spec(tmp_path, **large, tensor_parallel=1), "--policy", "fixed")
    assert "engines of 1; plain fixed has engines of 2 without drafts or 8-bit weights" in " ".join(done.stdout.split()), done.stderr
    done = command_here("simulate", spec(tmp_path, **large, nodes=16, devices_per_node=1), "--policy", "fixed")
    said = "plain fixed has engines of 1 without drafts and with int8 weights, because no width holds the model in bf16, and takes"
    assert said in " ".join(done.stdout.split()), done.stderr


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"device": "H10"}, "unknown device `H10`; did you mean `H100`?"),
        ({"model": "qwen2.5-7"}, "did you mean `qwen2.5-7b`?"),
        ({"nodes": 0}, "a cluster without devices runs nothing"),
        ({"trace": "nowhere.csv"}, "nowhere.csv: no such file"),
        ({"deadline_s": 3}, "for a deadline or a budget use `rlhfless plan`"),
        ({"phases": 3}, "`phases` must be a mapping"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(tmp_path, change, said):
    done = command_here("simulate", spec(tmp_path, **change))
    assert done.returncode == 2 and "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(lines) == 1 and said in lines[0]


def test_a_malformed_trace_names_line_and_column(tmp_path):
    (tmp_path / "lengths.csv").write_text("response_tokens\n" + "5\n" * 8 + "many\n")
    done = command_here("simulate", spec(tmp_path, trace="lengths.csv"))
    assert done.returncode == 2 and "line 10, column `response_tokens`" in done.stderr


def test_a_device_may_be_changed_field_by_field_and_a_number_written_as_yaml_takes_for_text(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(Path(spec(tmp_path)).read_text() + "\ndevice: {like: H100, memory_bytes_per_s: 2e12}\n")
    done = command_here("simulate", str(path), "--policy", "fixed", "--json")
    slower = json.loads(done.stdout)["policies"]["fixed"]["step_s"]["mean"]
    done = command_here("simulate", spec(tmp_path, device="H100"), "--policy", "fixed", "--json")
    assert slower > json.loads(done.stdout)["policies"]["fixed"]["step_s"]["mean"]


def test_prefer_is_checked_and_used(tmp_path):
    done = command_here("simulate", spec(tmp_path), "--prefer", "1.5")
    assert done.returncode == 2 and "`prefer` must lie in 0" in done.stderr
    cheap, fast = (
        json.loads(command_here("simulate", spec(tmp_path), "--policy", "rlhfless-paper", "--json", "--prefer", p).stdout)
        for p in ("0", "1")
    )
    assert cheap["prefer"] == 0 and fast["prefer"] == 1
    cost = [found["policies"]["rlhfless-paper"]["full_device_s"]["mean"] for found in (cheap, fast)]
    assert cost[0] < cost[1]


def test_files_that_are_no_text(tmp_path):
    (tmp_path / "lengths.csv").write_bytes(bytes(range(200, 256)))
    done = command_here("simulate", spec(tmp_path, trace="lengths.csv"))
    assert done.returncode == 2 and "lengths.csv: not a text file" in done.stderr
    done = command_here("simulate", str(tmp_path))
    assert done.returncode == 2 and "no such file" in done.stderr


def test_nothing_or_both_named(tmp_path):
    assert command_here("simulate").returncode == 2
    assert command_here("simulate", spec(tmp_path), "--setting", "qwen3b-gsm8k-grpo").returncode == 2
    done = command_here("simulate", "--setting", "qwen3b-gsm8k-grp")
    assert done.returncode == 2 and "did you mean `qwen3b-gsm8k-grpo`?" in done.stderr


def test_the_shipped_settings_are_listed():
    done = command_here("simulate", "--setting", "list")
    assert done.returncode == 0 and "llama70b-20-nodes" in done.stdout.split()
