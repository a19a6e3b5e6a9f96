"""Errors of other libraries as one line."""

from __future__ import annotations

from rlhfless_ray.common.errors import one_line_with_type


def test_a_failed_assertion_without_a_message_shows_its_line() -> None:
    scale_by_layer = True
    try:
        assert not scale_by_layer
    except AssertionError as error:
        error.args = ()  # pytest's own message
        assert one_line_with_type(error) == "AssertionError: assert not scale_by_layer"
    assert one_line_with_type(ValueError("two\nlines")) == "ValueError: two lines"
    assert one_line_with_type(ValueError()) == "ValueError: "
