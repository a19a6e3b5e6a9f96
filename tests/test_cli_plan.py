"""`rlhfless plan`: what it says is the planner's, and every mistake gets one sentence and exit code 2."""

from __future__ import annotations

import itertools
import json
import math
import re
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from placement import Objective, Pool, Speed, choose, frontier, rollout_bounds
from placement.catalog import catalog
from placement.forecast.forecaster import LengthForecaster
from rlhfless_ray.cli.main import app
from rlhfless_ray.common.errors import UserError
from rlhfless_ray.report.inline import ticks
from tests.conftest import command_here
from tests.placement.test_memory import QWEN_05B
from tests.test_memory_check import folder

SPEED = ("--actors", "6", "--speed", "0.0085,3e-5")


def run(*arguments: object) -> None:
    """As the command line does, in this process: user mistakes come out as UserError."""
    app([str(a) for a in ("plan", *arguments)], standalone_mode=False)


def said(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict:
    run(*arguments, "--json")
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def grouped(tmp_path: Path) -> Path:
    """Twelve prompts with four responses each."""
    rng = np.random.default_rng(0)
    path = tmp_path / "lengths.json"
    path.write_text(json.dumps([np.ceil(np.exp(rng.normal(mean, 0.3, 4))).tolist() for mean in rng.normal(5, 0.6, 12)]))
    return path


# ---- what it says ------------------------------------------------------------------------------------------------


def test_json_is_the_planners_frontier_choice_and_bounds(grouped: Path, capsys) -> None:
    lengths = np.concatenate(json.loads(grouped.read_text()))
    found = said(capsys, grouped, *SPEED, "--prefer", "0.7")
    plans = frontier(lengths, Speed(0.0085, 3e-5), max_actors=6, thin=0.005)
    choice, bounds = choose(plans, Objective(prefer=0.7), "device-s"), rollout_bounds(lengths, Speed(0.0085, 3e-5), 6)
    assert [row["time_s"] for row in found["frontier"]] == pytest.approx([p.time_s for p in plans])
    assert [row["actors"] for row in found["frontier"]] == [p.actors for p in plans]
    assert (found["bounds"]["time_s"], found["bounds"]["cost"]) == pytest.approx((bounds.time_s, bounds.cost))
    chosen = found["chosen"]
    assert (chosen["index"], chosen["reason"]) == (choice.index, choice.reason)
    assert sorted(i for group in chosen["groups"] for i in group) == list(range(48))
    by_hand = [0.0085 * lengths[g].max() + 3e-5 * lengths[g].sum() for g in chosen["groups"]]
    assert max(by_hand) == pytest.approx(chosen["time_s"]) and sum(by_hand) == pytest.approx(chosen["cost"])
    assert chosen["largest_group"] == max(map(len, chosen["groups"]))
    assert all(row["time_over_bound"] >= 1 - 1e-9 and row["cost_over_bound"] >= 1 - 1e-9 for row in found["frontier"])
    assert found["lengths"]["prompts"] == 12


def test_goals(grouped: Path, capsys) -> None:
    every = said(capsys, grouped, *SPEED)["frontier"]
    deadline, budget = (every[0]["time_s"] + every[-1]["time_s"]) / 2, (every[0]["cost"] + every[-1]["cost"]) / 2
    in_time = said(capsys, grouped, *SPEED, "--deadline", deadline)["chosen"]
    assert in_time["cost"] == min(row["cost"] for row in every if row["time_s"] <= deadline)
    paid = said(capsys, grouped, *SPEED, "--budget", budget)["chosen"]
    assert paid["time_s"] == min(row["time_s"] for row in every if row["cost"] <= budget)
    assert said(capsys, grouped, *SPEED, "--prefer", 1)["chosen"]["index"] == 0
    assert said(capsys, grouped, *SPEED, "--prefer", 0)["chosen"]["index"] == len(every) - 1
    assert "knee" in said(capsys, grouped, *SPEED, "--knee")["chosen"]["reason"]


def test_scenarios_are_draws_of_what_the_same_prompts_do_next(grouped: Path, capsys) -> None:
    recorded = json.loads(grouped.read_text())
    forecaster = LengthForecaster(float(np.mean(recorded)))
    forecaster.observe(range(12), [0] * 12, [np.array(group) for group in recorded])
    drawn = forecaster.scenarios(range(12), [0] * 12, 4, 32, 5)
    found = said(capsys, grouped, *SPEED, "--scenarios", 32, "--seed", 5)
    plans = frontier(drawn, Speed(0.0085, 3e-5), max_actors=6, thin=0.005)
    assert [(r["time_s"], r["cost"]) for r in found["frontier"]] == [pytest.approx((p.time_s, p.cost), rel=1e-6) for p in plans]
    alone = found["frontier"][-1]
    assert alone["time_s"] == pytest.approx(np.mean(0.0085 * drawn.max(0) + 3e-5 * drawn.sum(0)), rel=1e-6)
    assert found["scenarios"] == 32
    longest = int(max(max(group) for group in recorded))
    cut = said(capsys, grouped, *SPEED, "--scenarios", 32, "--seed", 5, "--max-tokens", longest)
    assert drawn.max() > longest and cut["frontier"][-1]["time_s"] < alone["time_s"]
    forecaster.max_tokens = longest
    assert forecaster.scenarios(range(12), [0] * 12, 4, 32, 5).max() == longest


def test_start_price_and_context(tmp_path: Path, capsys) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("prompt_tokens,response_tokens\n100,50\n10,200\n300,120\n")
    found = said(capsys, path, "--actors", 1, "--speed", "0.01,1e-4,1e-6", "--price", 2, "--start", 3)
    lengths, prompts = np.array([50, 200, 120.0]), np.array([100, 10, 300.0])
    time_s = 3 + Speed(0.01, 1e-4, 1e-6).rollout_s(lengths, prompts)
    (row,) = found["frontier"]
    assert row.pop("actors_of_pools") == {"0": 1}
    assert row == pytest.approx(
        {
            "time_s": time_s,
            "cost": 2 * time_s,
            "actors": 1,
            "largest_group": 3,
            "smallest_group": 3,
            "time_over_bound": 1,
            "cost_over_bound": 1,
        },
        rel=1e-6,
    )


def test_by_roofline(grouped: Path, capsys) -> None:
    one = said(capsys, grouped, "--actors", 4, "--device", "h100", "--model", "qwen2.5-3b")
    two = said(capsys, grouped, "--actors", 4, "--device", "H100", "--model", "Qwen2.5-3B", "--tensor-parallel", 2)
    one, two = one["pools"][0], two["pools"][0]
    read = one["speed"]["base_s"] - catalog.device("H100").step_s
    assert 6e9 / 3.35e12 < read < 3 * 6.2e9 / 3.35e12, "at least the weights over the bandwidth"
    assert two["speed"]["base_s"] > one["speed"]["base_s"] / 2, "half the weights each, and the all-reduces"
    assert one["capacity"] > 100_000 and two["capacity"] > 2 * one["capacity"] and two["devices_per_actor"] == 2


def test_a_device_of_ones_own_is_a_yaml_file(grouped: Path, capsys, tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("like: H100\nmemory_bytes_per_s: 6.7e12\n")
    fast, known = (
        said(capsys, grouped, "--actors", 4, "--device", device, "--model", "qwen2.5-3b")["pools"][0] for device in (mine, "H100")
    )
    fixed = catalog.device("H100").step_s
    assert fast["speed"]["base_s"] - fixed == pytest.approx((known["speed"]["base_s"] - fixed) / 2)
    mistakes = {"like: [": "not valid YAML", "- 1": "expected the fields of a device", "like: H101": "did you mean `H100`"}
    for text, sentence in mistakes.items():
        mine.write_text(text)
        with pytest.raises(UserError, match=sentence):
            run(grouped, "--actors", 4, "--device", mine, "--model", "qwen2.5-3b")


def test_the_table_names_the_chosen_point_and_the_reason(grouped: Path, capsys, tmp_path: Path) -> None:
    found = said(capsys, grouped, *SPEED, "--knee")
    plot = tmp_path / "frontier.svg"
    run(grouped, *SPEED, "--knee", "--plot", plot)
    text = capsys.readouterr().out
    arrow = next(line for line in text.splitlines() if "→" in line)
    assert f"{found['chosen']['time_s']:.4g}" in arrow and f"{found['chosen']['cost']:.4g}" in arrow
    assert "48 responses to 12 prompts" in text and "lengths known" in text
    flat = " ".join(text.split())
    assert found["chosen"]["reason"] in flat and str(plot.name) in flat.replace(" ", "")
    drawn = ElementTree.parse(plot).getroot()
    dots = next(group for group in drawn.iter("{http://www.w3.org/2000/svg}g") if group.get("id") == "PathCollection_1")
    at = [(float(dot.get("x")), float(dot.get("y"))) for dot in dots.iter("{http://www.w3.org/2000/svg}use")]
    assert len(at) == len(found["frontier"]) and at == sorted(at), "slower plans are further right"
    assert [y for _, y in at] == sorted(y for _, y in at), "and lower, because they are cheaper"


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (13.4, 24.4), (0.0, 3e-5), (7.0, 7.0), (0.0, 0.0), (99.0, 101.0)])
def test_ticks_span_what_is_drawn(low: float, high: float) -> None:
    found = ticks(low, high)
    assert found[0] <= low + 1e-12 and found[-1] >= high - 1e-9 and 2 <= len(found) <= 9
    assert all(b > a for a, b in itertools.pairwise(found))


# ---- what bad input gets -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--actors", 0, "--speed", "1,1"), "--actors: must be at least 1"),
        (("--speed", "1,1"), "either --actors or --devices"),
        ((*SPEED, "--devices", 4), "either --actors or --devices"),
        (("--devices", 4, "--speed", "1,1"), "--devices needs --device and --model"),
        (("--devices", 0, "--device", "H100", "--model", "qwen2.5-3b"), "--devices: must be at least 1"),
        (("--devices", 2, "--device", "L40S", "--model", "llama-2-70b"), "does not fit 2 x L40S"),
        (("--actors", 4, "--device", "H100", "--model", "qwen2.5-3b", "--tensor-parallel", 3), "3 devices cannot share the 16 heads"),
        ((*SPEED, "--preempt", "nan"), "--preempt must be finite"),
        ((*SPEED, "--preempt", 10**5, "--start", 5), "it would never decode"),
        ((*SPEED, "--pool", "actrs=3"), "unknown `actrs`; did you mean `actors`?"),
        ((*SPEED, "--pool", "price=much"), "`price` cannot be 'much'"),
        (("--actors", 2), "give an actor's speed"),
        (("--actors", 2, "--speed", "1,1", "--device", "H100"), "either --speed"),
        (("--actors", 2, "--device", "H100"), "give --device and --model together"),
        (("--actors", 2, "--speed", "fast"), "give base,per_seq"),
        (("--actors", 2, "--speed", "1,-1"), "give base,per_seq"),
        (("--actors", 2, "--device", "H10", "--model", "qwen2.5-3b"), "unknown device `H10`; did you mean `H100`?"),
        (("--actors", 2, "--device", "H100", "--model", "qwen25-3b"), "unknown model `qwen25-3b`; did you mean `qwen2.5-3b`?"),
        (("--actors", 2, "--device", "L40S", "--model", "llama-2-70b"), "does not fit"),
        ((*SPEED, "--prefer", 2), "--prefer: prefer lies between 0"),
        ((*SPEED, "--prefer", 0.5, "--knee"), "--prefer and --knee: a plan has one goal"),
        ((*SPEED, "--deadline", -1), "--deadline: deadline_s must be"),
        ((*SPEED, "--scenarios", -1), "--scenarios"),
        ((*SPEED, "--max-tokens", 10**6), "--max-tokens: known lengths are not cut"),
        ((*SPEED, "--scenarios", 4, "--max-tokens", 1), "--max-tokens 1: the longest of these responses has"),
        ((*SPEED, "--plot", "a.poster"), "--plot a.poster: cannot be written"),
        ((*SPEED, "--column", "nothing"), "column `nothing` was requested, but this entry has no columns"),
        ((*SPEED, "--capacity", 10), "hold"),
        ((*SPEED, "--price", -1), "must be finite and above 0"),
    ],
)
def test_mistakes_in_options(grouped: Path, arguments: tuple, sentence: str) -> None:
    with pytest.raises(UserError, match=re.escape(sentence)) as caught:
        run(grouped, *arguments)
    assert "\n" not in str(caught.value)


def test_goals_that_cannot_be_met_say_the_nearest_that_can(grouped: Path, capsys) -> None:
    every = said(capsys, grouped, *SPEED)["frontier"]
    with pytest.raises(UserError) as caught:
        run(grouped, *SPEED, "--deadline", every[0]["time_s"] / 2)
    assert f"the nearest deadline that can be met is {every[0]['time_s']:.4g} s" in str(caught.value)
    with pytest.raises(UserError) as caught:
        run(grouped, *SPEED, "--budget", every[-1]["cost"] / 2)
    assert f"the nearest budget that can be met is {every[-1]['cost']:.4g}" in str(caught.value)
    met = said(capsys, grouped, *SPEED, "--deadline", math.nextafter(every[0]["time_s"], math.inf))
    assert met["chosen"]["index"] == 0


def test_exit_codes_and_one_sentence(tmp_path: Path) -> None:
    done: subprocess.CompletedProcess[str] = command_here("plan", str(tmp_path / "nothing.json"), *SPEED)
    assert done.returncode == 2 and "no such file" in done.stderr and "Traceback" not in done.stderr
    path = tmp_path / "a.json"
    path.write_text("[5, 6, 7]")
    done = command_here("plan", str(path), *SPEED, "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["lengths"]["max"] == 7


def test_several_kinds_in_one_plan_are_the_planners_pools(grouped: Path, capsys) -> None:
    lengths = np.concatenate(json.loads(grouped.read_text()))
    found = said(capsys, grouped, *SPEED, "--price", 3, "--pool", "actors=4,speed=0.02:6e-5,price=0.5,preempt=2,start=0.5")
    spot = Pool(Speed(0.02, 6e-5), 0.5, 4, 0.5, 2.0)
    plans = frontier(lengths, pools=[Pool(Speed(0.0085, 3e-5), 3.0, 6), spot], thin=0.005)
    points = np.array([(row["time_s"], row["cost"]) for row in found["frontier"]])
    np.testing.assert_allclose(points, [(p.time_s, p.cost) for p in plans])
    assert found["chosen"]["actors_of_pools"] and found["pools"][1]["preempt_per_hour"] == 2
    assert {pool for row in found["frontier"] for pool in row["actors_of_pools"]} == {"0", "1"}, "either pays somewhere"


def test_devices_are_joined_to_engines_of_every_width_and_none_is_used_twice(grouped: Path, capsys) -> None:
    found = said(capsys, grouped, "--devices", 4, "--device", "L40S", "--model", "qwen2.5-7b")
    assert [(p["devices_per_actor"], p["actors"]) for p in found["pools"]] == [(1, 4), (2, 2), (4, 1)]
    kind = ("--device", "L40S", "--model", "qwen2.5-7b")
    each = [said(capsys, grouped, "--actors", 4 // w, *kind, "--tensor-parallel", w) for w in (1, 2, 4)]
    alone = [(row["time_s"], row["cost"]) for one in each for row in one["frontier"]]
    for row in found["frontier"]:
        assert len(row["actors_of_pools"]) == 1 and (row["time_s"], row["cost"]) in alone
    for time_s, cost in alone:
        assert any(row["time_s"] <= time_s and row["cost"] <= cost * (1 + 1e-9) for row in found["frontier"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--seed", "-3", "--scenarios", "5"), "--seed: must be 0 or more, got -3"),
        (("--scenarios", 10**8), "--scenarios 100000000: with .* responses at most 10000"),
        (("--price", 0), "--price must be finite and above 0, got 0"),
        (("--capacity", 0), "--capacity: must be at least 1, got 0"),
        (("--pool", f"actors={10**23}"), "--actors: must be at most 1,000,000,000"),
        (("--pool", "speed=1e-320:0"), "together must be 1e-09 to"),
        (("--pool", "speed=1e300:1"), "together must be 1e-09 to"),
    ],
)
def test_figures_beyond_reason_are_refused_before_anything_is_planned(grouped: Path, options: tuple[object, ...], said: str) -> None:
    with pytest.raises(UserError, match=said):
        run(grouped, *SPEED, *options)


def test_memory_of_a_recipe(unjoined: None, tmp_path: Path, capsys) -> None:
    """494 M parameters in bfloat16 at ZeRO 1: 18 bytes each while they are trained, 2 in an engine."""
    model = tmp_path / "model"
    model.mkdir()
    shape = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2}
    config = {"model_type": "qwen2", "vocab_size": 151_936, "tie_word_embeddings": True, **shape}
    (model / "config.json").write_text(json.dumps(config))
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        f"policy: {{path: {model}, dtype: bfloat16}}\nlearner: {{zero_stage: 1}}\nprompts: {{path: p}}\nreward: {{function: math}}"
    )
    told = said(capsys, recipe, "--memory")
    needs = {(need["what"], need["one_process"]): need["bytes"] for need in told["needs"]}
    assert needs["the learner's update", False] == pytest.approx(18 * 494_032_768, rel=1e-4)  # and activations
    assert needs["an engine", True] == 2 * 494_032_768 + 16 * 2**20, "KV of one sequence"
    with pytest.raises(UserError, match="`stages` makes it a workflow; run it with `rlhfless workflow`"):
        run(Path(__file__).parents[1] / "recipes" / "workflow.yaml", "--memory")
    with pytest.raises(UserError, match=r"policy\.path: nowhere is not a folder"):
        run(recipe, "--memory", "policy.path=nowhere")
    for setting, word in (
        ("rollout.tensor_parallel=3", "3 slots cannot share"),
        ("rollout.quantization=fp8", "vLLM on CPU cannot quantise"),
    ):
        with pytest.raises(UserError, match=word):
            run(recipe, "--memory", setting)
    with pytest.raises(UserError, match="`grid` makes it a sweep; run it with `rlhfless sweep`"):
        run(Path(__file__).parents[1] / "recipes" / "sweep.yaml", "--memory")
    (model / "config.json").write_text(json.dumps({**config, "num_attention_heads": 0}))
    with pytest.raises(UserError, match=r"^policy\.path: its config\.json describes no model: `num_attention_heads` must be a positive"):
        run(recipe, "--memory")
    for changes, word in (({"hidden_act": "banana"}, "no activation"), ({"architectures": ["BananaForCausalLM"]}, "vLLM has no model")):
        (model / "config.json").write_text(json.dumps({**config, **changes}))
        with pytest.raises(UserError, match=word):
            run(recipe, "--memory")
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        UserError, match=r"^rollout\.max_tokens: a prompt and a response of 40000 tokens exceed the policy's context of 32768"
    ):
        run(recipe, "--memory", "rollout.max_tokens=40000")
    run(recipe, "--memory", "rollout.max_tokens=32500")
    text = " ".join(capsys.readouterr().out.split())
    assert "with prompts of 268 and responses of 32500 tokens" in text and "a run refuses prompts of more than 268 tokens" in text
    run(recipe, "--memory", "rollout.max_tokens=40000", "rollout.max_total_tokens=32768")
    assert "a run refuses" not in capsys.readouterr().out
    run(recipe, "--memory", "rollout.kv_cache_mb=512")
    text = capsys.readouterr().out
    assert "494 M parameters in bfloat16" in text and "1.5 GB" in text and "every need fits this machine" in text


# ---- whole steps on which devices --------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_fleet_is_chosen_among_those_that_nothing_beats(grouped: Path, capsys) -> None:
    found = said(capsys, grouped, "--model", "qwen2.5-7b", "--fleet", "4", "--prefer", "0", "--steps", "10")
    rows, chosen = found["best"], found["best"][found["chosen"]]
    assert len(rows) > 1 and chosen is not rows[0], "the cheapest is not the fastest"
    assert [row["time_s"] for row in rows] == sorted(row["time_s"] for row in rows)
    assert [row["cost"] for row in rows] == sorted((row["cost"] for row in rows), reverse=True)
    assert chosen["cost"] == min(row["cost"] for row in rows)
    for row in rows:
        assert row["cost"] == pytest.approx(row["time_s"] * row["count"] * row["price_per_hour"] / 3600)
        assert row["run_cost"] == pytest.approx(10 * row["cost"]) and row["rollout_s"] < row["time_s"]
    slower = said(capsys, grouped, "--model", "qwen2.5-7b", "--fleet", "4", "--prefer", "0", "--steps", "10", "--calibrate", "1.5")["best"]
    assert [row["time_s"] for row in slower] == pytest.approx([1.5 * row["time_s"] for row in rows])
    assert [row["cost"] for row in slower] == pytest.approx([1.5 * row["cost"] for row in rows])


def test_spot_devices_cost_their_discount_and_the_steps_they_lose(grouped: Path, capsys) -> None:
    model = ("--model", "qwen2.5-7b", "--device", "H100", "--fleet", "8")
    free = said(capsys, grouped, *model, "--spot-discount", "0")["best"]
    assert not any(row["spot"] for row in free), "a preemptible device without a discount only loses time"
    cheap = {(r["count"], r["width"], r["spot"]): r for r in said(capsys, grouped, *model, "--spot-discount", "0.5")["best"]}
    both = [(cheap[n, w, True], cheap[n, w, False]) for n, w, spot in cheap if spot and (n, w, False) in cheap]
    assert both and all(spot["time_s"] > rent["time_s"] and 0.5 < spot["cost"] / rent["cost"] < 0.6 for spot, rent in both)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--fleet", "4"], "--fleet needs --model"),
        (["--fleet", "0", "--model", "qwen2.5-7b"], "--fleet: must be 1 to 1024, got 0"),
        (["--fleet", "4", "--model", "qwen2.5-7b", "--actors", "2", "--price", "3"], "leave out --actors, --price: --fleet chooses"),
        (["--steps", "4", "--actors", "2", "--speed", "0.01,0"], "leave out --steps: without --fleet it changes nothing"),
        (["--memory", "--actors", "2"], "leave out --actors: --memory shows no plans"),
        (["--fleet", "4", "--model", "qwen2.5-7b", "--spot-discount", "1"], "--spot-discount: must be a share from 0 to below 1"),
        (["--fleet", "4", "--model", "qwen2.5-7b", "--steps", "0"], "--steps: must be at least 1"),
        (["--fleet", "4", "--model", "qwen2.5-7b", "--calibrate", "0"], "--calibrate: must be above 0"),
        (["--fleet", "4", "--model", "llama-2-70b", "--device", "H100"], "nothing fits: H100: training llama-2-70b .* needs 20 x H100"),
        (["--fleet", "2", "--model", "qwen2.5-7b", "--deadline", "0.001"], "no plan"),
    ],
)
def test_what_a_fleet_cannot_be(grouped: Path, options: list[str], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        run(grouped, *options)


def test_a_warning_where_almost_no_kv_is_left(tmp_path: Path, capsys) -> None:
    path = tmp_path / "long.json"
    path.write_text("[[60000, 50000]]")
    run(path, "--model", "qwen2.5-7b", "--device", "L4", "--actors", "2")
    assert "room for" in (warned := capsys.readouterr().err) and warned.count("\n") == 1
    run(path, "--model", "qwen2.5-7b", "--device", "H200", "--actors", "2")
    assert capsys.readouterr().err == ""


def test_memory_of_shipped_recipes_whose_policy_is_made_from_scratch(unjoined: None, capsys) -> None:
    processes = {"quickstart": {"a learner rank", "an engine"}, "sort": {"a learner rank", "an engine"}, "sft": {"a rank"}}
    for name, expected in processes.items():
        told = said(capsys, Path(__file__).parents[1] / "recipes" / f"{name}.yaml", "--memory")
        assert expected <= {need["what"] for need in told["predicted"]}


def test_memory_of_a_supervised_stage(unjoined: None, tmp_path: Path, capsys) -> None:
    """494 M parameters in bfloat16 at ZeRO 1: 18 bytes each while they are trained."""
    model = folder(tmp_path / "model", QWEN_05B)
    recipe = tmp_path / "stage.yaml"
    recipe.write_text(
        f"task: sft\npolicy: {{path: {model}, dtype: bfloat16}}\nlearner: {{zero_stage: 1}}\ndata: {{path: p, max_tokens: 300}}"
    )
    told = said(capsys, recipe, "--memory")
    least = {(need["what"], need["one_process"]): need["bytes"] for need in told["needs"]}
    assert least["a rank", True] == least["the rank", False] == pytest.approx(18 * 494_032_768, rel=1e-4)
    predicted = {need["what"]: need["parts"] for need in told["predicted"]}
    assert predicted["the rank"] == {**predicted["a rank"], "driver": 500_000_000}
    run(recipe, "--memory", "data.max_tokens=400")
    text = capsys.readouterr().out
    assert "494 M parameters in bfloat16" in text and "Predicted peaks, with rows of 400 tokens" in text
    with pytest.raises(UserError, match=r"policy\.path: nowhere is not a folder"):
        run(recipe, "--memory", "policy.path=nowhere")


def test_execution_of_a_recipe(unjoined: None, tmp_path: Path, capsys) -> None:
    """A plan of the calls, on cores and on GPUs; what a recipe sets is a constraint."""
    recipe = tmp_path / "r.yaml"
    ppo = "algorithm: {advantage: {estimator: gae}, kl: {coefficient: 0.1, place: reward}}"
    stages = "learner: {zero_stage: 1}"
    model = folder(tmp_path / "model", QWEN_05B)
    recipe.write_text(f"policy: {{path: {model}, dtype: bfloat16}}\n{ppo}\nprompts: {{path: p}}\nreward: {{function: math}}\n{stages}")
    gpus = ("--execution", "--device", "H100", "--devices", "8", "--prefer", "1")
    told = said(capsys, recipe, *gpus)
    names = ["generate", "reference log-probabilities", "old log-probabilities", "values", "critic update", "policy update"]
    assert sorted(call["call"] for call in told["calls"]) == sorted(names)
    assert told["seconds"] <= told["in_turn_s"] and all(len(call["slots"]) <= 8 for call in told["calls"])
    two = said(capsys, recipe, "learner.ranks=2", *gpus)
    ranks = {call["call"]: len(call["slots"]) for call in two["calls"]}
    assert ranks["policy update"] == ranks["old log-probabilities"] == 2
    chosen = ("learner.ranks=auto", "critic.ranks=auto", "reference.ranks=auto", "learner.tensor_parallel=auto")
    assert said(capsys, recipe, *chosen, *gpus)["calls"] == told["calls"], "`auto` is no constraint"
    run(recipe, "--execution", "cluster.cpus=4")
    chart = capsys.readouterr().out
    assert all(name in chart for name in names) and "█" in chart and "one after the other" in chart
    for settings, message in (
        (("learner.ranks=3", *gpus), r"policy: no layout with 3 slots fits; the nearest that does is"),
        (("--execution", "cluster.cpus=4", "critic.ranks=6"), r"values: 6 ranks do not fit 4 slots; the most that do are 4"),
        (("--execution", "--device", "H100", "--devices", "12"), r"12 devices: more than 8 must be whole nodes of 8"),
        (("--execution", "--device", "H1000", "--devices", "8"), r"unknown device `H1000`; did you mean"),
        (("--execution", "--actors", "2"), r"leave out --actors: --execution plans a step"),
    ):
        with pytest.raises(UserError, match=message):
            run(recipe, *settings)
