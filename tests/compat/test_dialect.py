"""Reading a line: each version as argparse reads it there, the dialect of a line, mixtures, and what cannot be read."""

from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlhfless_ray.compat.openrlhf import dialect
from rlhfless_ray.compat.openrlhf.dialect import Unreadable, read
from rlhfless_ray.compat.openrlhf.flags import flags_of, place
from rlhfless_ray.compat.openrlhf.parsers import Refused, parser_of
from tests.compat.reference import VERSIONS, definitions, lines, reference_parse, values_of


@given(lines())
@example(("0.9.5", ["--reward_clip_range", "-10", "10", "--seed=3", "--seed", "4", "--colocate_all"]))
@example(("0.11.2", ["--algo.advantage.is_correction_threshold", "4", "--actor.adam.betas", "0.9", "1"]))
@example(("0.8.11", ["--target_modules", "--load_in_4bit=3"]))
def test_a_version_reads_a_line_as_plain_argparse_does(line):
    version, tokens = line
    expected = reference_parse(version, tokens)
    try:
        given_values = parser_of(version).read(tokens)
    except Refused as refused:
        assert expected == str(refused)
        return
    assert not isinstance(expected, str), expected
    ours = {spec.dest: spec.default for spec in flags_of(version).values() if spec.action != "store_false"}
    for flag, value in given_values.items():
        spec = flags_of(version)[flag]
        ours[spec.dest] = spec.action == "store_true" if not spec.takes_value else value
    for dest, value in expected.items():
        if dest.endswith("muon.nesterov"):
            continue  # the last of two flags wins there; both are placeholders
        if value == "inf":
            value = float("inf")
        assert ours[dest] == value, dest


@settings(deadline=None, max_examples=40)
@given(lines(most=5))
def test_the_dialect_of_a_line_accepts_it_and_no_newer_version_knows_as_much(line):
    _, tokens = line
    accepting = [v for v in VERSIONS if not isinstance(reference_parse(v, tokens), str)]
    if not accepting:
        return
    names = [token.partition("=")[0] for token in tokens if token.startswith("--")]
    try:
        found = read(tokens)
    except Unreadable as refused:
        assert any(name not in ALL_FLAGS and f"ambiguous option: {name} could match" in str(refused) for name in names), refused
        return
    assert not found.mixed and found.version in accepting

    def known(v):
        return sum(name in definitions(v) for name in names)

    for other in accepting:
        assert (known(found.version), place(found.version)) >= (known(other), place(other))


ONE_OR_TWO = ("--vllm_is_truncated_threshold", "--algo.advantage.is_correction_threshold")  # a list or a number, by version


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_a_mixture_keeps_every_flag_with_its_own_value(data):
    one, other = data.draw(st.sampled_from([("0.8.9", "0.11.2"), ("0.9.2", "0.10.1"), ("0.11.0", "0.11.2"), ("0.9.7", "0.9.8")]))
    only = [sorted(set(definitions(a)) - set(definitions(b))) for a, b in ((one, other), (other, one))]
    only = [[f for f in flags if f not in definitions(v)] for flags, v in zip(only, (other, one), strict=True)]
    picked = data.draw(st.lists(st.sampled_from(only[0]), min_size=1, max_size=3, unique=True))
    picked += data.draw(st.lists(st.sampled_from(only[1]), min_size=1, max_size=3, unique=True))
    tokens: list[str] = []
    expected = {}
    for flag in data.draw(st.permutations(picked)):
        span = definitions(one).get(flag) or definitions(other)[flag]
        words = data.draw(values_of(span))
        tokens += [flag, *words]
        cast = {"int": int, "float": float}.get(span.get("type"), str)
        values = [cast(word) for word in words]
        expected[flag] = True if span.get("action") else values if span.get("nargs") else values[0]
    found = read(tokens)
    assert found.given == {**expected, **{f: found.given[f] for f in picked if f in ONE_OR_TWO}}
    for flag in set(picked) & set(ONE_OR_TWO):
        got = found.given[flag]
        assert (got if isinstance(got, list) else [got]) == (expected[flag] if isinstance(expected[flag], list) else [expected[flag]])


@pytest.mark.parametrize(
    ("line", "version"),
    [
        ("--pretrain m --flash_attn --bf16", "0.8.9"),
        ("--pretrain m --attn_implementation eager --bf16", "0.9.1"),
        ("--pretrain m --enable_vllm_is_correction --use_icepop --param_dtype bf16", "0.9.2"),
        ("--vllm_is_correction_type mis", "0.9.3"),
        ("--prompt_max_len 3 --vllm_is_correction_type icepop", "0.9.7"),
        ("--max_new_tokens 8", "0.10.1"),
        ("--actor.model_name_or_path m --algo.advantage.is_correction_enable", "0.11.1"),
        ("--actor.model_name_or_path m", "0.11.2"),
        ("--vllm_is_truncated_threshold 2", "0.9.0"),
        ("--vllm_is_truncated_threshold 0.5 2", "0.10.1"),
        ("--async_queue_size 2 --use_icepop", "0.9.2"),
        ("--vllm_is_truncated_threshold 2 --param_dtype bf16", "0.10.1"),
        ("", "0.11.2"),
    ],
)
def test_flags_that_tell_versions_apart(line, version):
    assert read(line.split()).version == version


# ---------------------------------------------------------------- abbreviations


ALL_FLAGS = {flag for version in VERSIONS for flag in definitions(version)}
ABBREVIATIONS = sorted({flag[:end] for flag in ALL_FLAGS for end in range(3, len(flag))} - ALL_FLAGS)
WORDS = {"int": "1", "float": "0.5", None: "x"}


def words_of(span):
    """Words that follow a flag, the same every time."""
    if span.get("action"):
        return []
    word = span["choices"][0] if span.get("choices") else WORDS[span.get("type")]
    return [word] * (span["nargs"] if isinstance(span.get("nargs"), int) else 1)


@cache
def candidates(name, version):
    return [flag for flag in definitions(version) if flag.startswith(name)]


def one_of_each_kind(names, flags):
    """Return the first of the names that abbreviate the same of these flags."""
    kinds = {}
    for name in names:
        kinds.setdefault(tuple(flag for flag in flags if flag.startswith(name)), name)
    return sorted(kinds.values())


@cache
def abbreviations():
    """Return one abbreviation for each set of flags of all versions that can be abbreviated alike, the shortest."""
    return one_of_each_kind(sorted(ABBREVIATIONS, key=len), sorted(ALL_FLAGS))


@pytest.mark.parametrize("version", VERSIONS)
def test_every_abbreviation_of_every_flag_is_read_as_the_named_version_reads_it(version, monkeypatch):
    monkeypatch.setattr(dialect, "advice", lambda *flag: "")  # comes after argparse's sentence, and is slow to find for every flag
    names = one_of_each_kind(abbreviations(), definitions(version))
    of_one = {name: candidates(name, version)[0] for name in names if len(candidates(name, version)) == 1}  # all on one line
    tokens = [token for name, flag in of_one.items() for token in (name, *words_of(definitions(version)[flag]))]
    expected = reference_parse(version, tokens)
    assert not isinstance(expected, str), expected
    assert list(read(tokens, version).given) == [*of_one.values()]
    for name in names:
        matching = candidates(name, version)
        if len(matching) != 1:
            tokens = [name, *(words_of(definitions(version)[matching[0]]) if matching else [])]
            expected = reference_parse(version, tokens)
            assert isinstance(expected, str), name
            with pytest.raises(Unreadable) as caught:
                read(tokens, version)
            assert expected in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    "context",
    [
        *([], ["--actor.model_name_or_path", "m"], ["--pretrain", "m", "--flash_attn"]),
        *(pytest.param(context, marks=pytest.mark.long) for context in (["--pretrain", "m"], ["--max_len", "9"])),
    ],
)
def test_an_abbreviation_is_read_by_the_version_of_the_rest_of_the_line_or_refused_with_its_candidates(context, monkeypatch):
    monkeypatch.setattr(dialect, "advice", lambda *flag: "")
    for name in abbreviations():
        having = [v for v in VERSIONS if all(flag in definitions(v) for flag in context if flag.startswith("--"))]
        knowing = [v for v in having if candidates(name, v)]
        everywhere = sorted({flag for v in VERSIONS for flag in candidates(name, v)})
        forms = {tuple(words_of(definitions(v)[flag])) for v in VERSIONS for flag in candidates(name, v)}
        for words in sorted(forms):
            tokens = [*context, name, *words]
            try:
                found = read(tokens)
            except Unreadable as refused:
                matching = candidates(name, refused.version)
                assert str(refused).startswith("argument") or all(flag in str(refused) for flag in matching or everywhere), refused
                continue
            if found.mixed:  # a value that only another version's definition of the flag takes
                assert len(candidates(name, found.version)) == 1
                continue
            expected = reference_parse(found.version, tokens)
            assert not isinstance(expected, str), (tokens, found.version, expected)
            (flag,) = candidates(name, found.version)
            assert flag in found.given
            newest = next(
                v for v in knowing[::-1] if any(not isinstance(reference_parse(v, [*context, f, *words]), str) for f in candidates(name, v))
            )
            assert len(candidates(name, newest)) == 1, (tokens, found.version, newest)


@given(lines(most=4), st.sampled_from(ABBREVIATIONS), st.data())
def test_with_an_abbreviation_a_line_is_what_one_versions_argparse_makes_of_it_or_refused(line, name, data):
    version, tokens = line
    if matching := candidates(name, version):
        tokens = [*tokens, name, *data.draw(values_of(definitions(version)[data.draw(st.sampled_from(matching))]))]
    try:
        found = read(tokens)
    except Unreadable:
        return
    if found.mixed:
        return
    expected = reference_parse(found.version, tokens)
    assert not isinstance(expected, str), expected
    for flag, value in found.given.items():
        span = definitions(found.version)[flag]
        if span.get("dest", flag[2:]) in expected and not span.get("action"):
            assert expected[span.get("dest", flag[2:])] == value, flag


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--pretrain m --lr 1e-5", "--lr could match --lr_warmup_ratio (0.8.0 to 0.10.1), --lr_scheduler (0.8.5 to 0.10.1)"),
        ("--pretrain m --flash_attn --lr 1e-5", "--lr could match --lr_warmup_ratio (0.8.0 to 0.8.9), --lr_scheduler (0.8.5 to 0.8.9)"),
        ("--actor.model_name_or_path m --lr 1e-5", "--lr abbreviates no flag of OpenRLHF 0.11.2"),
        ("--actor.model_name_or_path m --num 4", "it could match --num_episodes (0.8.0 to 0.10.1); write the full name"),
        ("--pretrain m --over 8", "--over could match --overlap_comm (0.8.7 to 0.10.1), --overlong_buffer_len (0.8.7 to 0.10.1)"),
        ("--pretrain m --tra 8", "--tra could match --train_batch_size (0.8.0 to 0.10.1), --train_max_tokens_per_gpu"),
        ("--actor.model_name_or_path m --pretrain m --actor.adam.l 1e-5 --lr 3", "--lr abbreviates no flag"),
    ],
)
def test_an_abbreviation_that_no_one_version_decides_names_its_candidates(line, said):
    with pytest.raises(Unreadable) as caught:
        read(line.split())
    assert said in str(caught.value)


def test_the_version_named_decides_an_abbreviation():
    assert read(["--pretrain", "m", "--lr", "1e-5"], "0.8.2").given["--lr_warmup_ratio"] == 1e-5
    with pytest.raises(Unreadable, match="ambiguous option: --lr could match --lr_"):
        read(["--pretrain", "m", "--lr", "1e-5"], "0.9.10")


def test_in_a_mixture_the_base_reads_abbreviations_of_its_own():
    found = read(["--actor.model_name_or_path", "m", "--prompt_max_len", "5", "--actor.adam.l", "1e-5"])
    assert found.mixed and found.given["--actor.adam.lr"] == 1e-5
    with pytest.raises(Unreadable, match=r"--prompt_max abbreviates no flag of OpenRLHF 0.11.2.*--prompt_max_len \(0.8.0 to 0.9.7\)"):
        read(["--actor.model_name_or_path", "m", "--prompt_max", "5"])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--pretrain m --vllm_enable_is_correction", "did you mean --enable_vllm_is_correction (0.8.9 to 0.10.1"),
        ("--pretrain m --sed 3", "unrecognized arguments: --sed"),
        ("--actor.num 3", "ambiguous option: --actor.num could match"),
        ("--seed x --pretrain m", "argument --seed: invalid int value: 'x'"),
        ("--reward_clip_range 1", "argument --reward_clip_range: expected 2 arguments"),
        ("--perf=1", "argument --perf: ignored explicit argument '1'"),
        ("--actor.optim sgd", "argument --actor.optim: invalid choice: 'sgd'"),
        ("--pretrain m stray", "unrecognized arguments: stray"),
        ("--fsdp2_enable_sleep --pretrain m", "--fsdp2_enable_sleep: no version of OpenRLHF from 0.8.0 to 0.11.2 has it"),
    ],
)
def test_lines_that_cannot_be_read_name_the_flag(line, said):
    with pytest.raises(Unreadable) as caught:
        read(line.split())
    assert said in str(caught.value)


def test_read_as_one_version_removed_flags_are_named_with_what_to_write():
    with pytest.raises(Unreadable) as caught:
        read(["--pretrain", "m", "--use_icepop"], "0.11.2")
    said = str(caught.value)
    assert "--pretrain: exists in OpenRLHF 0.8.0 to 0.10.1 only; write --actor.model_name_or_path instead" in said
    assert "--use_icepop: exists in OpenRLHF 0.9.1 to 0.9.2 only; write --algo.advantage.is_correction_level token" in said
    with pytest.raises(Unreadable, match=r"is_correction_level: exists in OpenRLHF 0.11.2 only; leave --elastic.dialect out"):
        read(["--algo.advantage.is_correction_level", "token"], "0.11.0")
    with pytest.raises(Unreadable, match="none of the versions"):
        read([], "0.7.0")
