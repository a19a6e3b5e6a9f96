"""Flag combinations of OpenRLHF's documentation and examples, read as their versions read them, and what they come to."""

import pytest

from rlhfless_ray.compat.openrlhf.dialect import read
from rlhfless_ray.compat.openrlhf.flags import flags_of, place
from rlhfless_ray.compat.openrlhf.normalise import canonical
from rlhfless_ray.compat.openrlhf.translate import translate
from tests.compat.commands import EXAMPLES, MIXTURES
from tests.compat.reference import VERSIONS, reference_parse

EVERY = pytest.mark.parametrize("example", [*EXAMPLES, *MIXTURES], ids=lambda example: example.name)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_each_version_accepts_or_refuses_the_line_as_it_did(example):
    tokens = example.line.split()
    accepting = [version for version in VERSIONS if not isinstance(reference_parse(version, tokens), str)]
    assert (accepting[0], accepting[-1]) == (example.first, example.last)
    found = read(tokens)
    assert found.version == example.last and found.accepted_by == accepting
    expected = reference_parse(example.last, tokens)
    for flag, value in found.given.items():
        assert expected[flags_of(example.last)[flag].dest] == value


@pytest.mark.parametrize("example", MIXTURES, ids=lambda example: example.name)
def test_no_version_accepts_a_mixture_and_ours_does(example):
    tokens = example.line.split()
    assert all(isinstance(reference_parse(version, tokens), str) for version in VERSIONS)
    found = read(tokens)
    assert found.mixed and found.version == example.last and not found.accepted_by
    assert set(found.given) == {token for token in tokens if token.startswith("--")}


@EVERY
def test_what_a_line_means_in_the_newest_names(example):
    values = canonical(read(example.line.split()), {})
    for name, value in example.means.items():
        assert values[name] == value, name


@EVERY
def test_every_flag_of_the_line_is_accounted_for_once(example):
    found = translate(example.line.split(), {})
    assert [outcome.flag for outcome in found.flags] == list(found.line.given)
    assert {outcome.status for outcome in found.flags} <= {"honoured", "hint", "no effect", "refused"}
    assert all(outcome.why for outcome in found.flags if outcome.status != "honoured")


def test_examples_cover_every_break_of_the_command_line():
    """0.8.10, 0.9.1, 0.9.2, 0.9.3, 0.9.8, 0.10.2 and 0.11.2 removed or changed flags: examples lie on both sides of each."""
    for version in ("0.8.10", "0.9.1", "0.9.2", "0.9.3", "0.9.8", "0.10.2", "0.11.2"):
        assert any(place(example.last) < place(version) for example in EXAMPLES)
        assert any(place(example.first) >= place(version) for example in EXAMPLES)
