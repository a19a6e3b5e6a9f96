"""Whole commands: finding the launcher in every launch shape in use, and what is run in its place."""

import json
import shlex
import subprocess
import sys

import pytest

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.compat.openrlhf.command import OURS, find_all, package_root, replaced, submission
from rlhfless_ray.compat.openrlhf.flags import launchers
from rlhfless_ray.compat.openrlhf.shell import simple_commands
from rlhfless_ray.compat.openrlhf.translate_launch import translate_launch
from tests.compat.commands import find

FLAGS = ["--pretrain", "/m", "--eps_clip_low_high", "0.2", "0.3", "--bf16"]
MODULE = "openrlhf.cli.train_ppo_ray"
JOB = 'ray job submit --address=http://127.0.0.1:8265 --runtime-env-json=\'{"working_dir": "/x y"}\' --'

ARRAYS = """#!/bin/bash
#SBATCH -N 2
set -x
MODEL="/m"   # the model
NAME=$(basename "$0")
CKPT=(
   --pretrain ${MODEL}
   # --reward_pretrain ${REWARD}
)
CKPT+=( --eps_clip_low_high 0.2 0.3 )
MORE=()
%s python3 -m openrlhf.cli.train_ppo_ray \\
   "${CKPT[@]}" ${MORE[@]} \\
   --bf16 2>&1 | tee log.txt
echo "done --bf16"
"""

SLURM = r"""#!/bin/bash
#SBATCH --ntasks-per-node=1        # one
IMAGE="reg/image:tag"
LOG="$(realpath .)/run-$SLURM_JOB_ID.log"
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
all=( $nodes )
head=${all[0]}
srun -w "$head" bash -c \
   "pip install ray \
   && ray start --head --port=$((6000 + 379)) --block" &>> ${LOG} &
for ((i = 1; i < SLURM_JOB_NUM_NODES; i++)); do
  srun -w "${all[$i]}" bash -c "ray start --address $head --block" &>> ${LOG} &
done
srun --overlap --container-image="$IMAGE" bash -c \
"pip install ray \
&& /root/.local/bin/ray job submit --address=http://localhost:8265 \
    --runtime-env-json='{\"working_dir\": \"/openrlhf\", \"pip\": \"/r.txt\"}' \
    -- python3 -m openrlhf.cli.train_ppo_ray \
    --pretrain /m \
    --eps_clip_low_high 0.2 0.3 \
    --bf16" &>> ${LOG}
echo "$(date) done" &>> ${LOG}
"""


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
        f"bash -c 'cd /x && python3 -m {MODULE} {shlex.join(FLAGS)} > log 2>&1 &'",
        f"srun --overlap bash -lc {shlex.quote(f'pip install x && /root/.local/bin/{JOB} python3 -m {MODULE} ' + shlex.join(FLAGS))}",
        f"srun bash -c {shlex.quote('bash -c ' + shlex.quote(f'python3 -m {MODULE} ' + shlex.join(FLAGS)))}",
        shlex.join(["bash", "-c", ARRAYS % ""]),
        shlex.join(["bash", "-c", ARRAYS % JOB]),
        shlex.join(["bash", "-c", SLURM]),
        shlex.join(FLAGS),
    ],
)
def test_the_launcher_is_found_in_every_shape(command):
    found = find(shlex.split(command))
    assert (found.launcher, found.flags) == ("train_ppo_ray", FLAGS)


def test_the_launcher_is_found_in_a_script(tmp_path):
    script = tmp_path / "train.sh"
    script.write_text(ARRAYS % JOB)
    assert find(["bash", str(script)]).flags == FLAGS == find(["sbatch", "-N", "2", str(script)]).flags
    assert find(["bash", "-c", f"NCCL_DEBUG=INFO bash {script}"]).flags == FLAGS


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


def test_a_script_needs_no_suffix(tmp_path):
    (tmp_path / "train").write_text(f"python3 -m {MODULE} {shlex.join(FLAGS)}\n")
    assert find(["bash", str(tmp_path / "train")]).flags == FLAGS


def test_a_starter_with_a_file():
    for command in ("deepspeed openrlhf/cli/train_sft.py --bf16", "torchrun --nproc_per_node=2 openrlhf/cli/train_sft.py --bf16"):
        ranks = ["--elastic.learner.ranks", "2"] if "=2" in command else []
        assert find(command.split()).flags == [*ranks, "--bf16"]
        assert replaced(command.split())[1:] == ["-m", "rlhfless_ray.cli.train_sft", *ranks, "--bf16"]


def test_every_launch_of_a_script_is_found_once(tmp_path):
    (tmp_path / "settings.sh").write_text("MODEL=/m\n")
    (tmp_path / "run.sh").write_text(
        f"source {tmp_path}/settings.sh\n. {tmp_path}/nowhere\n"
        'go() { echo "python -m openrlhf.cli.$1 --x"; deepspeed --module openrlhf.cli.$1 --pretrain $MODEL; }\n'
        "go train_sft; go train_sft; python -m openrlhf.cli.serve_rm &\n"
        "python -m openrlhf.cli.train_ppo_ray --help\npython -m openrlhf.cli.train_ppo_ray --pretrain $MODEL\n"
    )
    found = find_all(["bash", str(tmp_path / "run.sh")])
    assert [launch.launcher for launch in found] == ["train_ppo_ray", "train_sft", "serve_rm"]
    assert [launch.flags for launch in found[:2]] == [["--pretrain", "/m"]] * 2


def test_every_launcher_is_either_ours_or_said_not_to_be():
    for launcher in launchers():
        if launcher in OURS:
            assert find(["python", "-m", f"openrlhf.cli.{launcher}"]).launcher == launcher
        else:
            with pytest.raises(UserError, match="not covered"):
                translate_launch(find(["python", "-m", f"openrlhf.cli.{launcher}"]))


# ---------------------------------------------------------------- the shell's grammar, against a real shell


@pytest.mark.parametrize(
    "words",
    [
        "a 'b c' \"d e\" f\\ g",
        "a#b '#c' \\# # comment",
        "$'x\\ny' \"a\\\"b\\$c\\q\" 'it'\"'\"'s'",
        "a \\\n  b",
        '--x="1 2" --y=\'\' ""',
        "a\tb   c;",
    ],
)
def test_words_are_those_of_bash(words):
    script = f"printf '%s\\0' {words}\n"
    real = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.split("\0")[:-1]
    assert simple_commands(script, {})[0].words[2:] == real


@pytest.mark.parametrize(
    "setup",
    [
        'V="a b"; set -- $V "$V" ${V} "${V}x" \'$V\'',
        'V=(1 "2 3" 4); set -- "${V[@]}" ${V[@]} ${V[0]} "${V[1]}" "${V[*]}"',
        'V=(); set -- x "${V[@]}" y',
        'V=(a); V+=(b "c d"); set -- "${V[@]}"',
        'export V=q; W=$V/r; set -- $W ${X:-s} "${X:-t u}"',
        "V=1 && set -- $V || echo no",
        "set -- a 2>/dev/null b >/dev/null c",
        "cat <<EOF\n--not-me $V\nEOF\nset -- a",
        'V="a b"; V+=" c"; W+=d; set -- $V $W',
        'N=4; M=2; set -- $((N * 32 / M)) $(( ($N - 1) * ${M} )) "x$((-7 + 10))"',
        'set -- ${1:-x} "${2:-y z}"',
        "M=m; read -r -d '' V <<EOF\n--a $M \\\n  --b \"q\"\nEOF\nset -- $V",
        "read -r -d '' V <<'EOF'\n--a $M\nEOF\nset -- $V x",
        "A=(--n 4 --m 5); read -r -d '' V <<EOF\n--a b \\\n  ${A[@]} \\\n  --c \"${A[*]}\"\nEOF\nset -- $V",
        "cat <<EOF | cat >/dev/null\n--not-me\nEOF\nset -- a",
        "V=(\n  --a 1 # --b 2\n  # --c\n  --d\n)\nset -- ${V[@]}",
        'V=/a/b.c; X=; set -- ${V%.*} "${V##*/}" ${V#/} ${V/b/"d e"} ${V//[ab]/x} ${X:+no} ${V:+"y z" --w} ${X:-"q r"} ${#V}',
        'F=(1 2); F[1]=9; F[2]="a b"; set -- "${F[@]}" ${#F[@]} "x${F[@]}y"',
        'f() {\n  local a=$1; shift\n  V=("$@" "$a" $# "${1:-z}")\n}\nfunction g { f "$@" 3; }\ng a "b c"; set -- "${V[@]}"',
        'V=(a); if [ "$V" = b ]; then V+=(x); elif [[ $V == a* ]]; then V+=(y); else V+=(z); fi; set -- "${V[@]}"',
        'N=3; if [ $N -gt 4 ] || [ ! -z "$N" ]; then V=1; else V=2; fi; if ! false; then W=3; fi; set -- $V $W',
        'case "t o" in\n  one) V=1 ;;\n  t*|x) V=2\n    ;;\n  *) V=3 ;;\nesac; case $NONE in "") V+=4;; *) V+=5; esac; set -- $V',
        'for x in "1 2" 3; do V="$x"; break; done; while true; do W=4; break; done; set -- "$V" $W',
        '[ -n "$NONE" ] && V=(a) || V=(b); false && W=1; true || W=2; true && X=3; set -- "${V[@]}" ${W:-n} $X',
        'C="set --"; C="$C a"; C+=" b"; eval $C "\'c d\'"',
        "f() { case $1 in a) echo '}' ;; esac; { true; }; cat <<EOF\n}\nEOF\n}\nV=1\nset -- $V",
        ': ${V:=5}; : "${W:=a b}"; set -- $V "$W"',
        'f() { A=("${@:2}" "${@:1:1}"); }; f a "b c" d e; V=(1 2 3 4); W=abcdef; '
        'set -- "${A[@]}" ${V[@]:1:2} "${V[@]:3}" ${W:2} ${W:1:3} "${W: -2}" ${V[@]: -1}',
        'G=8; T=2; f() { echo --x $G "$1"; }; set -- $(expr $G / $T) $(f "y  z") "$(f "y  z")" $(echo -n a b) "q$(expr $G - 1)"',
        'V=aBC; W=V; X=none; set -- ${V,,} ${V^^} ${V,} ${V^} "${!W}" ${!W} a~b',
        "V=a; N=0; while [[ $N -gt 0 ]]; do V=c; done; until [ $V = a ]; do V=b; done; set -- $V",
        'while [ ! -z "$NONE" ]; do V=1; done; for x in p q; do W=$x; break; done; set -- ${V:-none} $W',
        'declare -A M=([a]=1 ["b c"]="2 3"); M[x-y]=4; M[a]=5; K=x-y; set -- ${M[a]} "${M[b c]}" ${M[$K]} ${M[none]:-n} ${#M[@]}',
        'A=(p q r); I=1; A[I+1]=s; A[-3]=t; set -- ${A[I]} ${A[$I]} ${A[I+1]} ${A[-1]} ${A[0]} "${!A[@]}"',
        "I=0; N=3; while (($I < $N)); do V=x; break; done; if ((I > 0)); then V=y; fi; ((N += 2)); ((I++)); "
        "for ((J = 4; J < 9; J++)); do W=$J; break; done; ((I == 1 && N != 5)) || X=no; set -- $V $N $I $W $X",
        'set -- {a,b}c x{1..3}y {3..1} {a,b}{1,2} a{,b} "{a,b}" {} {x}',
        "V={a,b}; W=q; for s in {7..9}; do X=$s; break; done; set -- {$W,r}/s$W $V --o={c,d} $X",
        "set -- a \\\n  `# why` \\\n  b",
        'read -r -d "" V <<EOF\n--x {\\"a\\": \\$b} \\\\"z --y\nEOF\nset -- $V',
        'V=$(cat <<EOF\n--a "q r" \\\n  --b\nEOF\n); W=$(cat <<-\'EOF\'\n\t--c $V\n\tEOF\n); set -- $V "$V" $W',
        'D=(a b "c d"); J=$(IFS=,; echo "${D[*]}"); join() { local IFS="$1"; shift; echo "$*"; }; set -- "$J" $(join + ${D[@]}) "${D[*]}"',
        'D="a b, c"; set -- ${D// /,} "${D//, /;}" ${D/#a/x} ${D/%c/y} ${D//;/z} "${D/ b, /"&"}"',
        'Y="a  b"; X=$Y Z=$(echo c d); export W=$(echo "$Y" e) V=f; A=(1 "2 3"); B=${A[@]}; set -- "$X" "$Z" "$W" $V "$B"',
        'if [[ -n "$NONE" && a != b || ! ( 3 -gt 4 || a == b* ) ]]; then V=1; else V=2; fi; if [ a = a -a b = c ]; then W=1; else W=2; fi; '
        "[[ x-1 =~ ^(x|y)-[0-9]+$ && 5 -lt 7 ]] && X=1 || X=2; set -- $V $W $X",
        "[ a = b ] && { V=1; W=1; } || { V=2; X=2; }; true || { V=3; X=3; }; false && ( V=4; true ); "
        "case x in (x) Y=5 ;; esac; if true; then { Z=6; }; fi; set -- $V ${W:-n} $X $Y $Z",
        'L="1e-6,5e-7,"; IFS=, read -ra A <<< "$L"; IFS=- read -r B C <<< a-b-c; read D E F <<< "x  y"; read -r G <<< " p q "; '
        'read -a H <<< $L; read -ra I <<<"s t"; set -- "${A[@]}" $B $C $D $E "<$F>" "$G" ${H[@]} "${I[@]}" "${A[*]}"',
        'V=$([ 1 = 1 ] && echo yes || echo no); W=/a/b.c/; set -- $V $([[ $V == n* ]] && echo --n) $(basename $W) $(dirname "$W")',
        "f() { A=1; local B=2 C; C=$B; local -a L=(x y); export D=$C; }; B=0; L=(z); f; V=1; V=2 W=3 true; "
        'set -- $A $B ${C:-n} $D "${L[@]}" $V ${W:-n}',
    ],
)
def test_expansions_are_those_of_bash(setup):
    real = subprocess.run(["bash", "-c", setup + "\nprintf '%s\\0' \"$@\""], capture_output=True, text=True, check=True).stdout
    real = real.rpartition("\0")[0].split("\0")
    real[0] = real[0].rpartition("\n")[2]
    ours = next(words for words, _ in simple_commands(setup, {}) if words[0] == "set")
    assert ours[2:] == real


def test_the_home_folder_and_an_eval_without_end():
    script = """e='eval "$e"'; eval "$e"; set -- ~/m ~ "~/m" x~ ~y"""
    (found,) = [words for words, _ in simple_commands(script, {"HOME": "/home/me"}) if words[0] == "set"]
    assert found[2:] == ["/home/me/m", "/home/me", "~/m", "x~", "~y"]


@pytest.mark.parametrize("script", ["M[x]=1\nset -- a", "A=(b <<EOF\nc\nEOF\n)\nset -- a", "echo {1..999999}\nset -- a"])
def test_what_bash_would_not_do_either_ends_nothing(script):
    assert simple_commands(script, {})[-1].words == ["set", "--", "a"]


def test_a_word_that_holds_itself_is_not_read_without_end():
    with pytest.raises(UserError, match="no launcher of OpenRLHF in it"):
        find(["bash", "-c", "x openrlhf.cl${i.train_sft --module openrlhf.cli.train_sft --bf16"])


@pytest.mark.parametrize("shell", ["bash", "srun -n 1 /bin/bash -s"])
def test_commands_that_a_shell_reads_from_its_input(shell):
    script = f"M=/m\n{shell} <<EOF 2>&1 | tee log\ncd /x\npython3 -m {MODULE} --pretrain $M {shlex.join(FLAGS[2:])}\nEOF\necho done\n"
    assert find(["bash", "-c", script]).flags == FLAGS


@pytest.mark.parametrize(
    "script",
    [
        "export M=/m\nN=no\nsrun bash -c 'python3 -m {} --pretrain $M {} ${{N:-}}'",
        "M=/m bash -c 'python3 -m {} --pretrain $M {}'",
        "declare -x M=/m\nbash <<'EOF'\npython3 -m {} --pretrain $M {}\nEOF",
        "train() {{ python3 -m {} --pretrain $1 {}; }}\ntrain /m",
        "go() {{\n  python3 -m {} --pretrain /m {}\n}}\ntrap go EXIT",
        "for m in /m /n; do\n  python3 -m {} --pretrain $m {}\ndone",
        "if [ $# -eq 3 ]; then python3 -m {} --pretrain /x; else\npython3 -m openrlhf.cli.train_ppo_ray --pretrain /m {}\nfi",
        "bash -c 'python3 -m {} --pretrain $1 {}' name /m",
    ],
)
def test_what_a_script_hands_on(script):
    assert find(["bash", "-c", script.format(MODULE, shlex.join(FLAGS[2:]))]).flags == FLAGS


def test_a_scripts_own_arguments(tmp_path):
    script = tmp_path / "train.sh"
    script.write_text(f'MODEL=$1; shift\npython3 -m {MODULE} --pretrain ${{MODEL:-/x}} "$@"\n')
    assert find(["sbatch", "-N2", str(script), *FLAGS[1:]]).flags == FLAGS
    assert find(["bash", str(script)]).flags == ["--pretrain", "/x"]


@pytest.mark.parametrize(
    "loop",
    [
        """
while [[ $# -gt 0 ]]; do
  case $1 in
    --m) M=$2; shift 2 ;;
    --n=*) N=${1#*=}; shift ;;
    *) E+=("$1"); shift ;;
  esac
done""",
        """
while (( $# > 0 )); do
  if [[ $1 == --m && -n "$2" ]]; then M=$2; shift; elif [[ $1 =~ ^--n=(.*)$ ]]; then N=${1/--n=}; else E+=("$1"); fi
  shift
done""",
        """
for a in "$@"; do
  case $a in --m) ;; --n=*) N="${a#*=}" ;; x*) E+=("$a") ;; *) M=$a ;; esac
done
shift $#""",
    ],
)
def test_a_loop_takes_all_of_a_scripts_arguments(loop):
    script = f'M=0 N=0 E=()\n{loop}\nset -- $M $N "${{E[@]}}" $#\nprintf "%s\\0" "$@"'
    given = ["--m", "7", "x y", "--n=8"]
    real = subprocess.run(["bash", "-c", script, "name", *given], capture_output=True, text=True, check=True).stdout.split("\0")[:-1]
    assert simple_commands(script, {}, given)[-2].words[2:] == real == ["7", "8", "x y", "0"]


def test_getopts_takes_a_scripts_options(tmp_path):
    script = tmp_path / "train.sh"
    script.write_text(
        "M=/x V=0\nwhile getopts 'm:vs:' o; do\n  case $o in\n    m) M=$OPTARG ;;\n    v) V=1 ;;\n    s) S=$OPTARG ;;\n  esac\ndone\n"
        f'shift $((OPTIND - 1))\npython3 -m {MODULE} --pretrain $M --seed $V${{S:-0}} "$@"\n'
    )
    assert find(["bash", str(script), "-vm", "/m", "-s7", "--bf16"]).flags == ["--pretrain", "/m", "--seed", "17", "--bf16"]
    assert find(["bash", str(script)]).flags == ["--pretrain", "/x", "--seed", "00"]


def test_a_script_that_another_one_writes():
    line = f"python3 -m {MODULE} {shlex.join(FLAGS[2:])}"
    assert find(["bash", "-c", f"M=/m\ncat > job.sh <<EOF\n#!/bin/bash\n{line} --pretrain $M\nEOF\nsbatch job.sh"]).flags == [
        *FLAGS[2:],
        "--pretrain",
        "/m",
    ]


def test_a_sourced_file_has_arguments_of_its_own(tmp_path):
    (tmp_path / "stage.sh").write_text(f"flags='-m {MODULE} --pretrain m'\nif [[ $1 != slurm ]]; then python $flags --wrong; fi\nshift\n")
    (tmp_path / "run.sh").write_text(f'source {tmp_path}/stage.sh slurm\nsrun bash -c "python $flags --seed $1"\n')
    (only,) = find_all(["sbatch", str(tmp_path / "run.sh"), "7"])
    assert only.flags == ["--pretrain", "m", "--seed", "7"]


def test_without_arguments_a_loop_over_them_is_not_entered(tmp_path):
    script = tmp_path / "train.sh"
    script.write_text(
        'MODEL=/m\nwhile [[ $# -gt 0 ]]; do\n  case $1 in\n    --model) MODEL="$2"; shift 2 ;;\n    *) exit 1 ;;\n  esac\ndone\n'
        f"python3 -m {MODULE} --pretrain $MODEL\n"
    )
    assert find(["bash", str(script)]).flags == ["--pretrain", "/m"]
    assert find(["bash", str(script), "--model", "/n"]).flags == ["--pretrain", "/n"]


def test_nothing_is_executed_and_what_is_unknown_stays():
    commands = simple_commands('python $(touch /nowhere/x) $MISSING `date` "$1"', {})
    assert commands[-1].words == ["python", "$(touch /nowhere/x)", "$MISSING", "`date`", "$1"]
    assert [words for words, _ in commands[:-1]] == [["touch", "/nowhere/x"], ["date"]]


def test_an_unknown_substitution_is_one_word():
    script = 'HERE=$(cd "$(dirname "$0")/.." && pwd)\nOUT=${HERE}/out\nset -- --save ${OUT} a`date +%s`b "x $HERE"\n'
    here = '$(cd "$(dirname "$0")/.." && pwd)'
    assert simple_commands(script, {})[-1].words[2:] == ["--save", f"{here}/out", "a`date +%s`b", f"x {here}"]


@pytest.mark.parametrize("test", ["[ -f log ]", "grep -q x log"])
def test_an_unknown_value_does_not_replace_a_known_one_in_a_branch_that_may_not_run(test):
    script = f"N=0 M=1\nif {test}; then\n  N=$(cat log); M=2\nfi\nif true; then K=$(cat log); fi\npython $N $M $K\n"
    assert simple_commands(script, {})[-1].words == ["python", "0", "2", "$(cat log)"]
    script = "N=0\ncase $(uname) in Linux) N=`cat log` ;; esac\npython $N"
    assert simple_commands(script, {})[-1].words == ["python", "0"]


@pytest.mark.parametrize(
    "script",
    [
        'ID=$({} | tee log | grep -o id)\nif [ -n "$ID" ]; then echo "started $ID"; fi',
        'ID="$({} 2>&1)" || exit 1\nwhile true; do ray job status "$ID"; done',
        "ID=`{}`\necho $ID",
        'CMD={quoted}\necho "running: $CMD --extra"\n$CMD',
        "if python3 -m openrlhf.cli.train_ppo_ray --help | grep -q pretrain; then\n  {}\nfi",
        "if false; then ID=$(python3 -m openrlhf.cli.train_ppo_ray --pretrain /x); else ID=$({}); fi",
    ],
)
def test_a_launch_whose_output_is_kept(script):
    line = f"python3 -m {MODULE} {shlex.join(FLAGS)}"
    assert find(["bash", "-c", script.format(line, quoted=shlex.quote(line))]).flags == FLAGS


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
