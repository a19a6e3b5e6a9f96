"""Launch scripts, run by a real bash: `rlhfless explain` records what they start."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rlhfless_ray.compat.openrlhf.script_run import run_script
from tests.conftest import command_here, environment

pytestmark = pytest.mark.slow  # each starts processes

PPO, SFT = "openrlhf.cli.train_ppo_ray", "openrlhf.cli.train_sft"
LINE = "--pretrain /m --prompt_data d.jsonl --remote_rm_url /r.py --advantage_estimator rloo --n_samples_per_prompt 2"

EVERY_FORM = f"""#!/usr/bin/env bash
set -euxo pipefail
HERE="$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)"
source ./settings.sh "$1"; shift
export PATH=/usr/bin:$PATH PYTHONPATH=/code/OpenRLHF
echo "python3 -m {PPO} --only printed"
python3 -m {PPO} --help > /dev/null
args=(--a "$HERE/my data"   # a comment
  --b $((4 * SIZE)))
train() {{ /opt/nowhere/bin/python -u -m {PPO} "${{args[@]}}" "$@"; }}
train --c 'x  y'
read -r -d '' flags <<EOF || true
{SFT} --d \\
  --e $SIZE
EOF
deepspeed --num_gpus 2 --module $flags
for ((tries = 0; tries < 3; tries++)); do
  id=$(ray job submit --address http://h:1 -- python3 -m {PPO} --f "$@" | grep -o "raysubmit_[a-z]*") && break
done
until ray job status "$id" | grep SUCCEEDED; do sleep 1; done
srun -N 1 bash -c "pip install nothing-of-this-name && cd /tmp && torchrun -m {SFT} --g" &
wait
echo "export M=7; python openrlhf/cli/train_rm.py --h \\$M" | env bash -s
"""


def test_every_form_of_launch_is_recorded_as_bash_expands_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "settings.sh").write_text("[[ $1 == big ]] && SIZE=8 || SIZE=1\n")
    (tmp_path / "train.sh").write_text(EVERY_FORM)
    monkeypatch.chdir(tmp_path)
    run = run_script(["bash", "train.sh", "big", "z"])
    assert run.notes == [] and run.lost == [] and run.is_complete
    assert [(launch.launcher, launch.flags, launch.is_away) for launch in run.launches] == [
        ("train_ppo_ray", ["--a", f"{tmp_path}/my data", "--b", "32", "--c", "x  y"], False),
        ("train_sft", ["--elastic.learner.ranks", "2", "--d", "--e", "8"], False),
        ("train_ppo_ray", ["--f", "z"], True),
        ("train_sft", ["--g"], True),
        ("train_rm", ["--h", "7"], False),
    ]
    assert [launch.folder for launch in run.launches][2:4] == [str(tmp_path), "/tmp"]


def test_batch_scripts_and_jobs_are_read_without_slurm_and_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.sh").write_text(f'#SBATCH -N 2\nall=($(scontrol show hostnames "$LIST"))\npython -m {PPO} --on "${{all[0]}}" "$@"\n')
    (tmp_path / "all.sh").write_text(
        "cp train.sh job.sbatch\nsbatch -N 2 job.sbatch --x >id\nray job submit --working-dir=folder -- bash in.sh\n"
    )
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "in.sh").write_text(f"python -m {PPO} --y\n")
    monkeypatch.chdir(tmp_path)
    assert [launch.flags for launch in run_script(["sbatch", "-N", "2", "train.sh", "--z"]).launches] == [["--on", "localhost", "--z"]]
    assert [launch.flags for launch in run_script(["./all.sh"]).launches] == [["--on", "localhost", "--x"], ["--y"]]
    assert (tmp_path / "id").read_text() == "Submitted batch job 1\n"


def test_what_a_script_does_besides_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Also by other Python programs. What it leaves running is ended."""
    (tmp_path / "own.py").write_text("import pathlib, sys; pathlib.Path('out').write_text(' '.join(sys.argv[1:]))")
    (tmp_path / "old").touch()
    python, ray = shlex.quote(sys.executable), shlex.quote(str(Path(sys.executable).parent / "ray"))
    (tmp_path / "s.sh").write_text(
        f"mkdir new; rm old; {python} own.py a 'b c'; python3 -c 'print(40 + 2)'; {ray} start --head\n"
        f"sleep 987 & setsid sleep 988 & python3 -m {PPO}; exit 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rlhfless_ray.compat.openrlhf.script_run.LEFT_S", 0.5)
    run = run_script(["bash", "s.sh"])
    assert sorted(os.listdir()) == ["new", "out", "own.py", "s.sh"] and (tmp_path / "out").read_text() == "a b c"
    out, err = capfd.readouterr()
    assert out == "" and "42\n" in err and "/ray start --head\n" in err
    assert len(run.launches) == 1 and "`bash s.sh` ended with exit code 3" in run.notes[0]
    assert "were ended" in run.notes[1] and all(f"sleep {seconds}" in run.notes[1] for seconds in (987, 988))
    assert not [process for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"] in (["sleep", "987"], ["sleep", "988"])]


def test_a_script_that_does_not_end_is_ended(tmp_path: Path) -> None:
    (tmp_path / "s.sh").write_text(f"trap '' TERM\npython3 -m {PPO} --x\nwhile true; do sleep 0.1; done\n")
    run = run_script(["bash", str(tmp_path / "s.sh")], deadline_s=1.5)
    assert not run.is_complete and [launch.flags for launch in run.launches] == [["--x"]]
    assert "still ran after 1.5 s" in run.notes[0]
    assert not [process for process in psutil.process_iter(["cmdline"]) if str(tmp_path / "s.sh") in (process.info["cmdline"] or [])]


def test_explain_translates_where_the_script_launches(tmp_path: Path) -> None:
    """Relative paths belong to the folder of the launch, and stdout has nothing but the explanation."""
    (tmp_path / "deep").mkdir()
    (tmp_path / "s.sh").write_text(f"echo noise; python -m {SFT} --bad\ncd deep; python -m {PPO} {LINE}\n")
    done = command_here("explain", "--json", "--", "bash", str(tmp_path / "s.sh"))
    told = json.loads(done.stdout)
    assert told["recipe"]["policy"]["path"] == "/m" and told["also_starts"][0]["launcher"] == "train_sft"
    assert done.returncode == 2 and "--bad" in told["also_starts"][0]["problem"] and "everything else" in done.stderr.lower()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("# a \\ \npython3 -m {} \\\n  --pretrain m --train_batch_size 64 \\ \n  --seed 1\n", "s.sh line 3: a blank after the backslash"),
        ("echo\nif true; then\n  python3 -m {} --save_path $HOME\\\t \n    --seed 1\nfi\n", "s.sh line 3: a blank after the backslash"),
        ("python3 -m {} \\\r\n  --seed 1\r\n", "s.sh line 1: a carriage return"),
    ],
)
def test_a_blank_that_ends_a_command_is_found_in_the_script(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "s.sh").write_bytes(text.format(PPO).encode())
    done = command_here("explain", "--", "bash", str(tmp_path / "s.sh"))
    assert done.returncode == 2 and said in done.stderr.splitlines()[-1]
    run = [sys.executable, "-m", "rlhfless_ray", "run", "--", "bash", "s.sh"]
    done = subprocess.run(run, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60)
    assert said in done.stderr


def test_flags_that_bash_takes_for_a_command_are_named(tmp_path: Path) -> None:
    (tmp_path / "s.sh").write_text(f"python3 -m {PPO} {LINE} \\\n  # --seed 1 \\\n  --top_p 0.5\n")
    done = command_here("explain", "--", "bash", str(tmp_path / "s.sh"))
    assert done.returncode == 2
    assert f"does not run: {tmp_path}/s.sh line 3: bash takes `--top_p 0.5` for a command" in done.stdout


def test_a_script_without_a_launch_says_how_it_ended(tmp_path: Path) -> None:
    (tmp_path / "s.sh").write_text("cd nowhere || exit 7\n")
    done = command_here("explain", "--", "bash", str(tmp_path / "s.sh"))
    assert done.returncode == 2 and "started no launcher of OpenRLHF" in done.stderr and "exit code 7" in done.stderr
