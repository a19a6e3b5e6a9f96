"""Whole commands: finding the launcher in every launch shape in use, and what is run in its place."""

import json
import shlex
import sys

import pytest

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.compat.openrlhf.command import OURS, package_root, replaced, submission
from rlhfless_ray.compat.openrlhf.flags import launchers
from rlhfless_ray.compat.openrlhf.translate_launch import translate_launch
from tests.compat.commands import find

FLAGS = ["--pretrain", "/m", "--eps_clip_low_high", "0.2", "0.3", "--bf16"]
MODULE = "openrlhf.cli.train_ppo_ray"
JOB = 'ray job submit --address=http://127.0.0.1:8265 --runtime-env-json=\'{"working_dir": "/x y"}\' --'


@pytest.mark.parametrize(
    "command",
    [
        f"python3 -m {MODULE} {shlex.join(FLAGS)}",
        f"/opt/venv/bin/python -u -m {MODULE} {shlex.join(FLAGS)}",
        f"python3 -m{MODULE} {shlex.join(FLAGS)}",
        f"python3 /code/openrlhf/cli/train_ppo_ray.py {shlex.join(FLAGS)}",
        f"env NCCL_DEBUG=INFO python -m {MODULE} {shlex.join(FLAGS)}",
        f"python -m rlhfless_ray.cli.train_ppo_ray {shlex.join(FLAGS)}",
        f"{JOB} python3 -m {MODULE} {shlex.join(FLAGS)}",
        f"srun --nodes=1 -w node1 python3 -m {MODULE} {shlex.join(FLAGS)}",
        shlex.join(FLAGS),
    ],
)
def test_the_launcher_is_found_in_every_shape(command):
    found = find(shlex.split(command))
    assert (found.launcher, found.flags) == ("train_ppo_ray", FLAGS)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("deepspeed --module openrlhf.cli.train_ppo --x", "OpenRLHF removed it after 0.6.1; start openrlhf.cli.train_ppo_ray instead"),
        ("python -m openrlhf.cli.train_everything", "OpenRLHF has no such launcher"),
        ("python -m molt.cli.train_sft --x", "molt.cli.train_sft: of Molt's launchers only molt.cli.train_rl_ray is read"),
        ("python3 train.py", "no launcher of OpenRLHF in it"),
        ("bash nowhere.sh", "nowhere.sh: no such file"),
        ("srun bash nowhere --x", "nowhere: no such file"),
        ("", "no launcher of OpenRLHF in it"),
    ],
)
def test_commands_without_our_launcher(command, said):
    with pytest.raises(UserError, match=said):
        translate_launch(find(shlex.split(command)))


def test_a_starter_with_a_file():
    for command in ("deepspeed openrlhf/cli/train_sft.py --bf16", "torchrun --nproc_per_node=2 openrlhf/cli/train_sft.py --bf16"):
        ranks = ["--elastic.learner.ranks", "2"] if "=2" in command else []
        assert find(command.split()).flags == [*ranks, "--bf16"]
        assert replaced(command.split())[1:] == ["-m", "rlhfless_ray.cli.train_sft", *ranks, "--bf16"]


def test_every_launcher_is_either_ours_or_said_not_to_be():
    for launcher in launchers():
        if launcher in OURS:
            assert find(["python", "-m", f"openrlhf.cli.{launcher}"]).launcher == launcher
        else:
            with pytest.raises(UserError, match="not covered"):
                translate_launch(find(["python", "-m", f"openrlhf.cli.{launcher}"]))


# ---------------------------------------------------------------- running it


def test_the_launcher_is_replaced_where_it_can_be_seen():
    ours = ["-m", "rlhfless_ray.cli.train_ppo_ray"]
    assert replaced(["python3", "-m", MODULE, *FLAGS]) == [sys.executable, *ours, *FLAGS]
    assert replaced(["python3", f"-m{MODULE}", *FLAGS]) == [sys.executable, *ours, *FLAGS]
    assert replaced(["/usr/bin/python3", "-u", "-m", MODULE]) == ["/usr/bin/python3", "-u", *ours]
    assert replaced(["python", "/c/openrlhf/cli/train_ppo_ray.py", "--x"]) == [sys.executable, *ours, "--x"]
    nested = ["srun", "-n1", "bash", "-c", f"cd /openrlhf && python -m {MODULE} --x; python openrlhf/cli/train_ppo_ray.py"]
    here = "python -m rlhfless_ray.cli.train_ppo_ray"
    assert replaced(nested) == [*nested[:-1], f"cd /openrlhf && {here} --x; {here}"]
    other = ["bash", "train.sh", "openrlhf"]
    assert replaced(other) == other
    assert replaced(["python", "-m", "openrlhf.cli.train_es_ray"])[-1] == "openrlhf.cli.train_es_ray"


def test_a_flags_value_is_never_replaced():
    argv = ["python3", "-m", MODULE, "--ckpt_path", "/runs/openrlhf.cli.train_ppo_ray", "--input_template", f"run -m {MODULE}: {{}}"]
    assert replaced(argv)[3:] == argv[3:]


def test_a_job_submission_keeps_what_it_says_and_takes_our_packages_along():
    argv = [*shlex.split(JOB), "python3", "-m", MODULE, *FLAGS]
    done = submission(argv)
    cut = done.index("--")
    assert done[cut + 1 :] == ["python3", "-m", "rlhfless_ray.cli.train_ppo_ray", *FLAGS]
    assert done[:4] == ["ray", "job", "submit", "--address=http://127.0.0.1:8265"]
    runtime_env = json.loads(done[done.index("--runtime-env-json") + 1])
    assert runtime_env == {"working_dir": "/x y", "py_modules": [str(package_root() / name) for name in ("rlhfless_ray", "placement")]}
    for starter in (["deepspeed", "--num_gpus", "2", "--module"], ["torchrun", "-m"]):  # the ranks are Ray's
        started = submission([*shlex.split(JOB), *starter, "openrlhf.cli.train_sft", "--bf16"])
        assert started[started.index("--", cut) + 1 :][:3] == ["python3", "-m", "rlhfless_ray.cli.train_sft"]
    alone = submission(argv, ship=False)
    assert json.loads(alone[alone.index("--runtime-env-json") + 1]) == {"working_dir": "/x y"}


def test_a_submission_of_a_script_gets_the_import_hook(tmp_path, monkeypatch):
    """From where the package is on the cluster, which need not be where it is here; also when the script can be read here."""
    (tmp_path / "env.yaml").write_text("env_vars: {A: b, PYTHONPATH: /mine}\n")
    (tmp_path / "train.sh").write_text(f"python3 -m {MODULE} {' '.join(FLAGS)}\n")
    monkeypatch.chdir(tmp_path)
    done = submission(["ray", "job", "submit", "--runtime-env", "env.yaml", "--", "bash", "train.sh"], ship=False)
    assert json.loads(done[done.index("--runtime-env-json") + 1]) == {"env_vars": {"A": "b", "PYTHONPATH": "/mine"}}
    assert done[done.index("--") + 1 :] == ["python3", "-m", "rlhfless_ray", "run", "--", "bash", "train.sh"]


@pytest.mark.parametrize(
    "option",
    [
        ["--runtime-env-json", "{"],
        ["--runtime-env", "/nowhere.yaml"],
        ["--runtime-env-json=[1]"],
        ["--runtime-env-json", '{"py_modules": "x"}'],
    ],
)
def test_runtime_environments_that_cannot_be_read(option):
    with pytest.raises(UserError, match="--runtime-env"):
        submission(["ray", "job", "submit", *option, "--", "python3", "-m", MODULE])
