"""`rlhfless import-logs`: logs as other systems write them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

from placement.forecast.rollout_dumps import is_dump, read_dump
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


def test_trls_console_with_transformers_5(tmp_path: Path) -> None:
    """Its progress bar prints numbers as texts of four digits."""
    row = {
        "loss": "0.01",
        "num_tokens": "1.2e+04",
        "completions/mean_length": "53.35",
        "completions/max_length": "128",
        "step_time": "4.52",
    }
    log = read_log(written(tmp_path / "trl", f"5%|▌ | 5/100\n{ {**row, 'kind': 'grpo', 'reward': 'nan'} }\n"))
    assert (log.system, log.steps, log.mean_tokens, log.max_tokens, log.step_s) == ("TRL", 1, 53.35, 128, 4.52)


def test_openrlhf(tmp_path: Path) -> None:
    timed = read_log(written(tmp_path / "timed.jsonl", json.dumps({**OPENRLHF, "timing/step_total": 44.0})))
    assert timed.step_s == 44 and "step_total" not in timed.phases_s
    named = {f"train/{name}": value for name, value in OPENRLHF.items()}  # by its loggers
    assert read_log(written(tmp_path / "named.jsonl", json.dumps(named))).mean_tokens == 210.5
    log = read_log(written(tmp_path / "openrlhf.jsonl", json.dumps(OPENRLHF)))
    assert (log.system, log.step_s) == ("OpenRLHF", None)
    assert log.phases_s == {"broadcast": 1.5, "make_experience": 30, "ppo_train": 11}
    with pytest.raises(ValueError, match="without the longest response"):
        log.lengths(4, 2)


def test_drawn_lengths_are_like_the_logs(tmp_path: Path) -> None:
    drawn = read_log(written(tmp_path / "verl.log", VERL)).lengths(128, 8)
    assert drawn.shape == (128, 8) and drawn.mean() == pytest.approx(294.7, rel=0.02) and 860 < drawn.max() <= 962
    for mean, longest in (("288.7", "100"), ("1e300", "1e308")):
        odd = f"step:1 - response_length/mean:{mean} - response_length/max:{longest} - timing_s/step:0\n"
        log = read_log(written(tmp_path / "odd.log", odd))
        assert log.step_s is None
        with pytest.raises(ValueError, match="no lengths have both"):
            log.lengths(4, 2)


def test_the_command_compares_with_a_plan(tmp_path: Path, capsys) -> None:
    log, out = written(tmp_path / "verl.log", VERL), tmp_path / "lengths.json"
    app(["import-logs", str(log), "--write", str(out), "--model", "qwen2.5-7b", "--prompts", "16"], standalone_mode=False)
    said = capsys.readouterr().out
    assert "2 steps of verl" in said and "the whole step: 41 s" in said and "your run: 41 s a step; planned here:" in said
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
        (VERL, ["--tokenizer", "t"], "leave out --tokenizer: .* has no dumps"),
        (VERL, ["--prompts", "9"], "leave out --prompts: without --write"),
        (VERL, ["--devices", "4"], "leave out --devices: without --model"),
        ('{"input": "a", "output": "b"}', ["--write", "a.json", "--samples", "4"], "leave out --samples: .* has dumps"),
    ],
)
def test_mistakes(tmp_path: Path, text: str, options: list[str], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        app(["import-logs", str(written(tmp_path / "log", text)), *options], standalone_mode=False)
    with pytest.raises(UserError, match="absent: no such file"):
        app(["import-logs", str(tmp_path / "absent")], standalone_mode=False)


def dump(path: Path, responses: list[tuple[str, str]]) -> Path:
    return written(
        path,
        "".join(
            json.dumps({"input": a, "output": b, "gts": "7", "score": 1.0, "step": 2}, ensure_ascii=False) + "\n" for a, b in responses
        ),
    )


@pytest.mark.slow
def test_verls_dumps_of_rollouts(tmp_path: Path, capsys) -> None:
    rows = [("a", "x"), ("a", "xyz"), ("b", ""), ("b", "xy"), ("c", "x"), ("c", "xx"), ("a", "xxxx"), ("a", "\u2028")]
    dump(tmp_path / "10.jsonl", rows)
    dump(tmp_path / "9.jsonl", rows[:2])
    read = read_dump(tmp_path, lambda texts: [len(text) for text in texts])
    assert read.path.name == "10.jsonl"
    assert read.lengths == [[1, 3], [4, 1], [1, 2], [1, 2]], "prompts that a step has twice, and responses of nothing but their end"
    assert is_dump(tmp_path / "9.jsonl") and not is_dump(written(tmp_path / "log", VERL))
    tokenizer, out = Path(tmp_path / "tokenizer"), tmp_path / "lengths.json"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text(character_tokenizer("abxyz").to_str())
    (tokenizer / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    options = ["--tokenizer", str(tokenizer), "--write", str(out), "--model", "qwen2.5-7b"]
    app(["import-logs", str(tmp_path), *options], standalone_mode=False)
    assert json.loads(out.read_text()) == read.lengths
    said = capsys.readouterr().out
    assert "8 responses to 4 prompts; 2 tokens on average, longest 4" in said and "planned here: " in said


def character_tokenizer(symbols: str) -> Tokenizer:
    tokenizer = Tokenizer(WordLevel({symbol: i for i, symbol in enumerate(symbols)}, unk_token=symbols[0]))
    tokenizer.pre_tokenizer = Split(Regex("."), "isolated")
    return tokenizer


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "no responses"),
        ('{"input": "a", "output": "b"}\n{"input": 1}\n', "line 2: not a response"),
        ("[1]\n", "line 1: not a response"),
        ('{"input": "a", "output": ""}\n' * 3 + '{"input": "b", "output": ""}\n' * 2, "one prompt has 3 responses and another 2"),
    ],
)
def test_broken_dumps(tmp_path: Path, text: str, sentence: str) -> None:
    written(tmp_path / "1.jsonl", text)
    with pytest.raises(ValueError, match=sentence):
        read_dump(tmp_path, lambda texts: [1] * len(texts))


def test_dumps_need_a_tokenizer(tmp_path: Path) -> None:
    for path in (tmp_path, dump(tmp_path / "1.jsonl", [("a", "b")])):
        with pytest.raises(UserError, match="give --tokenizer"):
            app(["import-logs", str(path)], standalone_mode=False)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="empty has no tokenizer"):
        app(["import-logs", str(tmp_path), "--tokenizer", str(tmp_path / "empty")], standalone_mode=False)
    with pytest.raises(ValueError, match="a folder without dumps"):
        read_dump(tmp_path / "empty", lambda texts: [])
