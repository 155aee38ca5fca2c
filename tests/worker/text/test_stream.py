from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from decodefleet.worker.sampling_params import SamplingParams
from decodefleet.worker.text.stop import StopStrings
from decodefleet.worker.text.stream import TextDelta, TextStream
from decodefleet.worker.text.tokenizer import Tokenizer


def make_stream(tokenizer: Tokenizer, *stops: str, **options: object) -> TextStream:
    return TextStream(tokenizer, SamplingParams(stop=stops, **options))  # type: ignore[arg-type]


def drain(stream: TextStream, ids: list[int], size: int = 1) -> list[TextDelta]:
    deltas = [stream.push(ids[i : i + size]) for i in range(0, len(ids), size)]
    return [*deltas, stream.push((), finished=True)]


texts = st.text(alphabet="ab\n你👩‍👧", max_size=40)
stop_strings = st.lists(st.text(alphabet="ab\n你", min_size=1, max_size=4), max_size=3)


@given(texts, stop_strings, st.booleans(), st.integers(1, 5))
def test_text_and_match_are_those_of_the_whole_text(
    byte_level: Tokenizer, text: str, stops: list[str], include: bool, size: int
) -> None:
    stream = make_stream(byte_level, *stops, include_stop_str_in_output=include)
    deltas = drain(stream, byte_level.encode(text), size)
    search = StopStrings(stops, include)
    given_out, match = search.push(text)
    assert "".join(delta.text for delta in deltas) == given_out + search.flush()
    assert [delta.stop_match for delta in deltas if delta.stop_match] == ([match] if match else [])


@given(texts, stop_strings, st.integers(1, 5))
def test_tokens_are_accounted_for_in_step_with_the_text(
    byte_level: Tokenizer, text: str, stops: list[str], size: int
) -> None:
    ids = byte_level.encode(text)
    given_out, accounted = "", 0
    for delta in drain(make_stream(byte_level, *stops), ids, size):
        given_out += delta.text
        accounted += len(delta.offsets)
        # the tokens accounted for spell what has been given out, and no more
        assert b"".join(map(byte_level.token_bytes, ids[:accounted])) == given_out.encode()
        for offset in delta.offsets:
            assert offset < len(given_out)


@given(texts, st.integers(1, 5), st.booleans())
def test_without_accounts_the_text_is_the_same(
    byte_level: Tokenizer, text: str, size: int, stopped: bool
) -> None:
    ids = byte_level.encode(text)
    plain = TextStream(byte_level, SamplingParams(), account=False)
    accounting = make_stream(byte_level)
    for start in range(0, len(ids), size):
        part = ids[start : start + size]
        assert plain.push(part).text == accounting.push(part).text
    # ends inside a character, by a token that is not shown or not
    last: dict[str, Any] = {"finished": True, "stop_token": 65 if stopped else None}
    ending = [*byte_level.encode("你")[:-1], 65]
    assert plain.push(ending, **last).text == accounting.push(ending, **last).text
    assert plain.push(ids) == TextDelta()


def test_offsets_are_where_tokens_begin(smollm2_tokenizer: Tokenizer) -> None:
    ids = smollm2_tokenizer.encode("The 世界 ends")
    deltas = drain(make_stream(smollm2_tokenizer), ids)
    offsets = [offset for delta in deltas for offset in delta.offsets]
    assert len(offsets) == len(ids)
    for token, offset in zip(ids, offsets, strict=True):
        text = smollm2_tokenizer.token_text(token)
        if "\ufffd" not in text:
            assert "The 世界 ends"[offset:].startswith(text)


def test_a_stop_string_may_straddle_tokens(byte_level: Tokenizer) -> None:
    stream = make_stream(byte_level, "###")
    one, hash_, two = (byte_level.encode(text) for text in ("one", "#", "two"))
    assert stream.push(one).text == "one"
    assert stream.push(hash_) == TextDelta()
    assert stream.push([*hash_, *hash_, *two]) == TextDelta("", (), "###")
    assert stream.push(two, finished=True) == TextDelta()


def test_a_token_that_a_stop_string_cuts_in_two_is_accounted_for(smollm2_tokenizer: Tokenizer) -> None:
    ids = smollm2_tokenizer.encode("Hello world")
    deltas = drain(make_stream(smollm2_tokenizer, "rld"), ids)
    assert "".join(delta.text for delta in deltas) == "Hello wo"
    assert sum(len(delta.offsets) for delta in deltas) == len(ids) == 2


def test_the_stop_token_is_not_part_of_the_text(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("ab.")
    delta = make_stream(byte_level).push(ids, finished=True, stop_token=ids[-1])
    assert delta == TextDelta("ab", (0, 1))
    stream = make_stream(byte_level, include_stop_str_in_output=True)
    assert stream.push(ids, finished=True, stop_token=ids[-1]) == TextDelta("ab.", (0, 1, 2))


def test_special_tokens_are_skipped_but_accounted_for(smollm2_tokenizer: Tokenizer) -> None:
    ids = smollm2_tokenizer.encode("a<|im_start|>b")
    deltas = drain(make_stream(smollm2_tokenizer), ids)
    assert "".join(delta.text for delta in deltas) == "ab"
    assert sum(len(delta.offsets) for delta in deltas) == 3


def test_text_that_is_cut_inside_a_character_ends_in_a_replacement_character(byte_level: Tokenizer) -> None:
    first, *_ = byte_level.encode("你")
    stream = make_stream(byte_level)
    assert stream.push([first]) == TextDelta()
    assert stream.push((), finished=True) == TextDelta("\ufffd", (0,))


def test_stop_strings_are_ignored_in_the_first_min_tokens(byte_level: Tokenizer) -> None:
    stream = make_stream(byte_level, "a", min_tokens=2)
    deltas = drain(stream, byte_level.encode("aaba"))
    assert "".join(delta.text for delta in deltas) == "aab"
    assert deltas[3].stop_match == "a"
