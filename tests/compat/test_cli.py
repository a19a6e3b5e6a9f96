"""The commands as users type them: exit codes, what is on stderr, and --json."""

import json
import os
import resource
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest
import yaml

from rlhfless_ray.common.errors import Stopped, UserError
from tests.conftest import ROOT, command, command_here, environment

LINE = "--pretrain /m --prompt_data /d.jsonl --remote_rm_url /r.py --advantage_estimator rloo --n_samples_per_prompt 4 --vllm_num_engines 2"


def launcher(*flags):
    return subprocess.run(
        [sys.executable, "-m", "rlhfless_ray.cli.train_ppo_ray", *flags], capture_output=True, text=True, timeout=120, cwd=ROOT,
        env=environment(),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--pretrain /m --sed 3", "unrecognized arguments: --sed"),
        ("--seed three", "argument --seed: invalid int value: 'three'"),
        ("--pretrain /m --prompt_data /d", "there is no reward"),
        (LINE + " --load_in_4bit", "--load_in_4bit: engines cannot load bitsandbytes"),
        (LINE + " --elastic.prefr 1", "did you mean --elastic.prefer?"),
        (LINE + " --seed 1 --train.seed 2", "--seed and --train.seed"),
        ("--use_icepop --elastic.dialect 0.11.2", "--use_icepop: exists in OpenRLHF 0.9.1 to 0.9.2 only"),
    ],
)
def test_mistakes_exit_with_two_with_usage_and_the_flag_on_stderr(flags, said):
    done = command_here(*flags.split(), module="rlhfless_ray.cli.train_ppo_ray")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("usage: train_ppo_ray.py [-h]") and said in done.stderr
    assert ("[--pretrain PRETRAIN]" in done.stderr) == ("0.11.2" not in flags)  # the dialect's own usage
    assert "train_ppo_ray.py: error: " in done.stderr and "Traceback" not in done.stderr


def test_help_is_light_and_says_what_is_ours():
    def taken_s(*flags):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = launcher(*flags)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.returncode == 0 and "--actor.adam.lr" in done.stdout and "--elastic.FIELD" in done.stdout
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert any(taken_s("--help") < 1.0 for _ in range(8)), "at least once: work beside it on the same core makes it slower"
    assert launcher("--pretrain", "x", "--hel").stdout == launcher("--help").stdout


@pytest.mark.slow
def test_reading_a_line_imports_nothing_heavy():
    script = "import importlib, sys\n"
    for module in ("compat.openrlhf.translate", "cli.train_ppo_ray", "cli.explain_command", "compat.openrlhf.explain_report"):
        script += f"importlib.import_module('rlhfless_ray.{module}')\n"
        script += f"print('{module}', [m for m in ('ray', 'torch', 'vllm', 'transformers') if m in sys.modules])\n"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT, env=environment())
    assert [line.partition(" ")[2] for line in done.stdout.splitlines()] == ["[]"] * 4, done.stdout


def test_explain():
    more = ["--perf", "--colocate_all_models", "--vllm_num_engines", "8"]
    done = command_here("explain", "--", "python3", "-m", "openrlhf.cli.train_ppo_ray", *LINE.split(), *more)
    told = {line.split()[0]: line for line in done.stdout.splitlines() if line and not line.startswith(" ")}
    assert "0.10.1" in told["dialect"] and "at most 8" in told["slots"]
    assert "--pretrain" in told["honoured"] and "--perf: " in told["no"] and "--vllm_num_engines 8: 8 engines at most" in done.stdout
    assert done.returncode == (2 if "refused" in told else 0)
    recipe = yaml.safe_load(done.stdout.partition("\nrecipe")[2].partition("\n")[2].partition("\ndoes not run")[0])
    assert recipe["policy"]["path"] == "/m" and recipe["rollout"]["samples_per_prompt"] == 4


def test_explain_counts_one_of_a_thing_in_the_singular():
    one = ["--actor_num_nodes", "1", "--actor_num_gpus_per_node", "1", "--vllm_num_engines", "1"]
    said = command_here("explain", "--", "python3", "-m", "openrlhf.cli.train_ppo_ray", *LINE.split(), *one).stdout
    assert "1 rank of the learner at most" in said and "1 engine at most" in said


def test_explain_for_programs():
    inner = f"cd / && ray job submit -- python -m openrlhf.cli.train_ppo_ray {LINE} --top_p 0.5"
    done = command_here("explain", "--json", "--", "srun", "bash", "-c", inner)
    told = json.loads(done.stdout)
    assert told["dialect"] == "0.10.1" and told["slots"]["at_most"] == 8 and told["recipe"]["policy"]["path"] == "/m"
    flags = [entry["flag"] for entry in told["flags"]]
    assert flags == [token for token in (LINE + " --top_p").split() if token.startswith("--")]
    assert told["runs"] == (done.returncode == 0) and told["runs"] == (not told["refused"] and told["problem"] is None)


def test_the_launcher_hands_its_recipe_to_the_runtime(monkeypatch, capsys):
    """With a runtime that records what it gets."""
    import rlhfless_ray.runtime.runtime
    from rlhfless_ray.cli.train_ppo_ray import _train

    got, how = [], []

    class Recording:
        def __init__(self, recipe, *, resume, resume_changed):
            got.append(recipe)
            how.append((resume, resume_changed))
            self.folder = type("Folder", (), {"path": ROOT})()

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def __iter__(self):
            return iter([1, 2])

    monkeypatch.setattr(rlhfless_ray.runtime.runtime, "Runtime", Recording)
    monkeypatch.setenv("WANDB_API_KEY", "")
    monkeypatch.delenv("WANDB_API_KEY")
    key = "0123456789abcdef" * 3
    line = LINE.replace("/d.jsonl", "/d.jsonl --use_wandb " + key) + " --perf --elastic.cluster.cpus 2"
    _train(line.split())
    (recipe,) = got
    _train(f"{line} --elastic.resume previous --elastic.resume changed".split())
    assert how == [(False, False), ("previous", True)] and got[1] == recipe, "no recipe keeps how a run is continued"
    assert recipe.policy.path == "/m" and recipe.rollout.samples_per_prompt == 4 and recipe.rollout.max_actors == 2
    assert recipe.reward.function == "/r.py:reward_func" and recipe.run.seed == 42 and recipe.watch.wandb == "online"
    assert os.environ["WANDB_API_KEY"] == key and key not in recipe.to_yaml()
    told = capsys.readouterr().out
    assert "[rlhfless] command line of OpenRLHF 0.10.1" in told and "no effect here: --perf" in told and key not in told
    assert recipe.learner.ranks <= 8 and ("it starts with" in told) == (recipe.learner.ranks < 8)

    def stopped(self):
        stop = Stopped(15)
        stop.resumable = True
        raise stop

    monkeypatch.setattr(Recording, "__iter__", stopped)
    for more, said in (" --save_steps 1", "--load_checkpoint"), ("", f"rlhfless train {ROOT / 'recipe.yaml'} --resume"):
        with pytest.raises(Stopped) as caught:
            _train((line + more).split())
        assert caught.value.continue_with == said


def test_explain_what_is_wrong():
    done = command_here("explain", "--", "python3", "-m", "openrlhf.cli.train_ppo_ray", "--flash_atn")
    assert done.returncode == 2 and "did you mean --flash_attn (0.8.0 to 0.8.9" in done.stderr
    done = command_here("explain", "--", "python3", "-m", "openrlhf.cli.train_kd", "--pretrain", "m", "--dataset", "d")
    assert done.returncode == 2 and "--teacher_model: name the teacher" in done.stdout
    done = command_here("explain", "--flags")
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 167
    for launcher, least, named in (
        ("train_prm", 60, "--placeholder_token"),
        ("batch_inference", 36, "--best_of_n"),
        ("train_sft", 75, "--data.multiturn"),
    ):
        done = command_here("explain", "--flags", launcher)
        assert done.returncode == 0 and len(done.stdout.splitlines()) >= least and named in done.stdout


def test_run_and_submit_build_the_command():
    start = ["python3", "-m", "openrlhf.cli.train_ppo_ray"]
    done = command_here("run", "--dry-run", "--", *start, "--seed", "3")
    assert done.stdout.split() == [sys.executable, "-m", "rlhfless_ray.cli.train_ppo_ray", "--seed", "3"]
    done = command_here("run", "--dry-run", "--", "ray", "job", "submit", "--address", "http://h:1", "--", *start, "--seed", "3")
    assert done.stdout.startswith("ray job submit --address http://h:1 --runtime-env-json ") and "py_modules" in done.stdout
    assert done.stdout.rstrip().endswith("-- python3 -m rlhfless_ray.cli.train_ppo_ray --seed 3")
    done = command_here("submit", "--dry-run", "--address", "http://h:1", "--", *start, "--sed", "3")
    assert done.returncode == 2 and "--sed" in done.stderr
    rows = ["python3", "-m", "openrlhf.cli.train_kd", "--pretrain", "m", "--dataset", "d"]
    done = command_here("submit", "--dry-run", "--address", "http://h:1", "--", *rows)
    assert done.returncode == 2 and "--teacher_model: name the teacher" in done.stderr
    done = command_here("submit", "--dry-run", "--address", "http://h:1", "--", *rows, "--teacher_model", "t", "--max_len", "3")
    assert done.returncode == 2 and "--max_len: recipe: `data.max_tokens`: input should be greater" in done.stderr
    done = command_here("submit", "--dry-run", "--no-package", "--working-dir", ".", "--", "bash", "train.sh")
    assert "py_modules" not in done.stdout and done.stdout.rstrip().endswith("-- python3 -m rlhfless_ray run -- bash train.sh")
    assert command_here("submit", "--dry-run").returncode == 2
    for start_job in (["submit"], ["run", "--", "ray", "job", "submit"]):
        done = command_here(*start_job, "--address", "http://127.0.0.1:9", "--", *start, *LINE.split())
        assert done.returncode == 2 and "--address http://127.0.0.1:9: no cluster answers there" in done.stderr
    assert command("run", "--", "no-such-program-here").returncode == 2


@pytest.mark.slow
def test_run_runs_it(tmp_path):
    done = command("run", "--", "python3", "-m", "openrlhf.cli.train_ppo_ray", "--no_such_flag", cwd=tmp_path)
    assert done.returncode == 2 and "--no_such_flag: no version of OpenRLHF" in done.stderr
    assert os.listdir(tmp_path) == []


def test_a_cluster_that_asks_for_a_token_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlhfless_ray.cli.run_command import _check_address

    class Refuses(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(401)

        def log_message(self, *_: object) -> None: ...

    for name in ("http_proxy", "HTTP_PROXY", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("urllib.request.getproxies", dict)
    with HTTPServer(("127.0.0.1", 0), Refuses) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        with pytest.raises(UserError, match=f"^--address {address}: this cluster asks for a token; set RAY_AUTH_MODE=token"):
            _check_address(["--address", address])
        monkeypatch.setenv("RAY_AUTH_MODE", "token")
        _check_address(["--address", address])
        server.shutdown()
