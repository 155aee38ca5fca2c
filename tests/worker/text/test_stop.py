from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decodefleet.worker.text.stop import StopStrings


def reference(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Slow and obvious: every prefix in turn, until one ends with a stop string."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[:end] if include else text[: end - len(longest)], longest
    return text, None


def run(pieces: list[str], stops: list[str], include: bool) -> tuple[str, str | None, list[str]]:
    search = StopStrings(stops, include)
    given_out, match = [], None
    for piece in pieces:
        text, found = search.push(piece)
        given_out.append(text)
        match = match or found
    given_out.append(search.flush())
    return "".join(given_out), match, given_out


letters = st.text(alphabet="ab你", max_size=30)
stop_strings = st.lists(st.text(alphabet="ab你", min_size=1, max_size=5), max_size=4)


@given(st.lists(letters, max_size=12), stop_strings, st.booleans())
def test_any_chunking_gives_what_the_whole_text_gives(
    pieces: list[str], stops: list[str], include: bool
) -> None:
    text, match, _ = run(pieces, stops, include)
    assert (text, match) == reference("".join(pieces), stops, include)


@given(st.lists(letters, max_size=12), stop_strings)
def test_what_was_given_out_could_not_yet_be_part_of_a_stop_string(
    pieces: list[str], stops: list[str]
) -> None:
    search = StopStrings(stops)
    seen, given_out = "", ""
    for piece in pieces:
        seen += piece
        text, match = search.push(piece)
        given_out += text
        if match:
            break
        held = seen[len(given_out) :]
        longest = max(
            (n for stop in stops for n in range(1, len(stop)) if seen.endswith(stop[:n])), default=0
        )
        assert len(held) == longest


def test_the_match_that_is_complete_first_wins() -> None:
    assert run(["abcd"], ["bcd", "c"], False)[:2] == ("ab", "c")


def test_of_matches_that_end_together_the_longest_wins() -> None:
    assert run(["xab"], ["b", "ab"], False)[:2] == ("x", "ab")


def test_nothing_follows_a_match() -> None:
    search = StopStrings(["\n\n"])
    assert search.push("one\n") == ("one", None)
    assert search.push("\ntwo") == ("", "\n\n")
    assert search.push("three") == ("", None)
    assert search.flush() == ""


@pytest.mark.parametrize(("include", "expected"), [(False, "one"), (True, "one###")])
def test_include_keeps_the_stop_string(include: bool, expected: str) -> None:
    assert run(["one#", "##two"], ["###"], include)[:2] == (expected, "###")


def test_without_stop_strings_text_passes_at_once() -> None:
    assert StopStrings(()).push("text") == ("text", None)
