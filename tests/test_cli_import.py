"""`rlhfless import-logs`: logs as other systems write them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from placement.forecast.training_logs import read_log
from rlhfless_ray.cli.main import app
from rlhfless_ray.common.errors import UserError

VERL = """(TaskRunner pid=7) step:0 - val-core/openai/gsm8k/acc/mean@1:0.508
(TaskRunner pid=7) step:1 - actor/lr:1e-06 - response_length/mean:288.698 - response_length/max:963.000 - timing_s/gen:12.5 - timing_s/agent_loop/tool_calls/max:0.0 - timing_s/update_actor:20.0 - timing_s/step:40.0
(TaskRunner pid=7) step:2 - response_length/mean:np.float64(300.698) - response_length/max:961.0 - timing_s/gen:13.5 - timing_s/update_actor:21.0 - timing_s/step:42.0
"""  # noqa: E501
TRL = {"completions/mean_length": 53.35, "completions/max_length": 128.0, "step_time": 4.5, "step": 1}
OPENRLHF = {"response_length": 210.5, "timing/make_experience": 30.0, "timing/ppo_train": 11.0, "timing/broadcast": 1.5}


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_verl_on_the_console(tmp_path: Path) -> None:
    log = read_log(written(tmp_path / "verl.log", VERL))
    assert (log.system, log.steps, log.mean_tokens, log.max_tokens, log.step_s) == ("verl", 2, pytest.approx(294.698), 962, 41)
    assert log.phases_s == {"gen": 13, "update_actor": 20.5}


def test_verl_as_json_lines(tmp_path: Path) -> None:
    row = {"step": 1, "data": {"response_length/mean": 200, "response_length/max": 900, "timing_s/step": 9}}
    log = read_log(written(tmp_path / "verl.jsonl", json.dumps(row)))
    assert (log.system, log.mean_tokens, log.step_s) == ("verl", 200, 9)


@pytest.mark.parametrize("text", [json.dumps({"log_history": [TRL, {"train_runtime": 9.0}]}), f"5%|▌ | 5/100\n{TRL}\n"])
def test_trl_from_its_state_or_its_console(tmp_path: Path, text: str) -> None:
    log = read_log(written(tmp_path / "trl", text))
    assert (log.system, log.steps, log.mean_tokens, log.max_tokens, log.step_s) == ("TRL", 1, 53.35, 128, 4.5)


def test_openrlhf(tmp_path: Path) -> None:
    log = read_log(written(tmp_path / "openrlhf.jsonl", json.dumps(OPENRLHF)))
    assert (log.system, log.step_s) == ("OpenRLHF", None)
    assert log.phases_s == {"broadcast": 1.5, "make_experience": 30, "ppo_train": 11}
    with pytest.raises(ValueError, match="without the longest response"):
        log.lengths(4, 2)


def test_drawn_lengths_are_like_the_logs(tmp_path: Path) -> None:
    drawn = read_log(written(tmp_path / "verl.log", VERL)).lengths(128, 8)
    assert drawn.shape == (128, 8) and drawn.mean() == pytest.approx(294.7, rel=0.02) and 860 < drawn.max() <= 962


def test_the_command_compares_with_a_plan(tmp_path: Path, capsys) -> None:
    log, out = written(tmp_path / "verl.log", VERL), tmp_path / "lengths.json"
    app(["import-logs", str(log), "--write", str(out), "--model", "qwen2.5-7b", "--prompts", "16"], standalone_mode=False)
    said = capsys.readouterr().out
    assert "2 steps of verl" in said and "your run: 41 s a step; planned here:" in said
    assert len(json.loads(out.read_text())) == 16
    planned, factor = float(said.split("planned here: ")[1].split()[0]), float(said.split("--calibrate ")[1].split()[0])
    assert factor * planned == pytest.approx(41, rel=0.01)


@pytest.mark.parametrize(
    ("text", "options", "sentence"),
    [
        ("", [], "no step of a known system"),
        ("{broken", [], "no step of a known system"),
        ('{"response_length/mean": "many"}', [], "no step of a known system"),
        (VERL, ["--model", "qwen2.5-7b"], "--model needs --write"),
        (VERL, ["--write", "lengths.csv"], "ends in .json"),
        (VERL, ["--samples", "1"], "must be at least 1 and 2"),
    ],
)
def test_mistakes(tmp_path: Path, text: str, options: list[str], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        app(["import-logs", str(written(tmp_path / "log", text)), *options], standalone_mode=False)
    with pytest.raises(UserError, match="absent: no such file"):
        app(["import-logs", str(tmp_path / "absent")], standalone_mode=False)
    with pytest.raises(UserError, match="cannot be read"):
        app(["import-logs", str(tmp_path)], standalone_mode=False)
