from __future__ import annotations

from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from decodefleet.worker.text.detokenizer import IncrementalDetokenizer
from decodefleet.worker.text.tokenizer import Tokenizer

SMOLLM2_VOCAB = 49_152
SENTENCEPIECE_VOCAB = 271
FAMILY = "👩‍👩‍👧‍👦 🏳️‍🌈 é e\u0301 你好，世界 \u200bمرحبا"

texts = st.text(max_size=60) | st.lists(
    st.sampled_from(["👩‍👩‍👧‍👦", "🏳️‍🌈", "世界", " ", "  ", "\n", "é", "a", "\ufffd", " n't"]), max_size=20
).map("".join)


def stream(tokenizer: Tokenizer, ids: list[int], skip: bool = True, after: tuple[int, ...] = ()) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip, after)
    return [*(detokenizer.push([token]) for token in ids), detokenizer.finish()]


@given(st.lists(st.integers(0, SMOLLM2_VOCAB - 1), max_size=40), st.booleans())
def test_random_ids_joined_are_the_librarys_decode(
    smollm2_tokenizer: Tokenizer, smollm2_backend: Backend, ids: list[int], skip: bool
) -> None:
    whole = smollm2_backend.decode(ids, skip_special_tokens=skip)
    assert "".join(stream(smollm2_tokenizer, ids, skip)) == whole
    assert smollm2_tokenizer.decode(ids, skip) == whole


@given(texts)
def test_a_text_comes_back_without_a_replacement_character_on_the_way(
    smollm2_tokenizer: Tokenizer, text: str
) -> None:
    ids = smollm2_tokenizer.encode(text, add_special_tokens=False)
    # the vocabulary lacks some rare bytes: such a text is not in the ids
    assume(b"".join(map(smollm2_tokenizer.token_bytes, ids)) == text.encode())
    parts = stream(smollm2_tokenizer, ids, skip=False)
    assert "".join(parts) == text
    assert sum(part.count("\ufffd") for part in parts) == text.count("\ufffd")


@given(texts)
def test_byte_tokens_give_whole_characters_only(byte_level: Tokenizer, text: str) -> None:
    ids = byte_level.encode(text)
    assert len(ids) == len(text.encode())
    # one token per byte: a character comes exactly with its last byte
    expected = [part for character in text for part in [""] * (len(character.encode()) - 1) + [character]]
    assert stream(byte_level, ids) == [*expected, ""]


@given(texts)
def test_sentencepiece_text_comes_back(sentencepiece: Tokenizer, text: str) -> None:
    ids = sentencepiece.encode(text.replace("▁", " "))
    assert "".join(stream(sentencepiece, ids)) == text.replace("▁", " ")


@given(st.lists(st.integers(0, SENTENCEPIECE_VOCAB - 1), max_size=30), st.booleans())
def test_sentencepiece_ids_joined_are_the_full_decode(
    sentencepiece: Tokenizer, sentencepiece_backend: Backend, ids: list[int], skip: bool
) -> None:
    joined = "".join(stream(sentencepiece, ids, skip))
    assert joined == sentencepiece.decode(ids, skip)
    # the library replaces a whole run of byte tokens when any part of it is invalid
    if "\ufffd" not in joined:
        assert joined == sentencepiece_backend.decode(ids, skip_special_tokens=skip)


@given(st.lists(st.integers(0, SMOLLM2_VOCAB - 1), max_size=40), st.integers(1, 7))
def test_the_size_of_pushes_makes_no_difference(
    smollm2_tokenizer: Tokenizer, ids: list[int], size: int
) -> None:
    detokenizer = IncrementalDetokenizer(smollm2_tokenizer)
    parts = [detokenizer.push(ids[i : i + size]) for i in range(0, len(ids), size)]
    assert "".join(parts) + detokenizer.finish() == smollm2_tokenizer.decode(ids)


def test_invalid_bytes_become_replacement_characters_once_nothing_can_complete_them(
    byte_level: Tokenizer,
) -> None:
    first, second, _ = byte_level.encode("你")
    (letter,) = byte_level.encode("a")
    assert stream(byte_level, [first, second, letter]) == ["", "", "\ufffda", ""]
    assert stream(byte_level, [letter, first]) == ["a", "", "\ufffd"]


def test_a_leading_space_is_kept_when_the_text_continues_a_prompt(sentencepiece: Tokenizer) -> None:
    prompt = tuple(sentencepiece.encode("a"))
    continuation = sentencepiece.encode("b", add_special_tokens=False)
    assert "".join(stream(sentencepiece, continuation)) == "b"
    assert "".join(stream(sentencepiece, continuation, after=prompt)) == " b"
    assert "".join(stream(sentencepiece, continuation, after=(1,))) == "b"


def test_a_prompt_that_ends_inside_a_character_leaks_nothing_and_is_completed(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("secret你")
    assert stream(byte_level, ids[-1:], after=tuple(ids[:-1])) == ["你", ""]


def test_ids_outside_the_vocabulary_add_nothing(smollm2_tokenizer: Tokenizer) -> None:
    assert stream(smollm2_tokenizer, [SMOLLM2_VOCAB + 5]) == ["", ""]


def test_joined_emoji_and_scripts(smollm2_tokenizer: Tokenizer) -> None:
    assert "".join(stream(smollm2_tokenizer, smollm2_tokenizer.encode(FAMILY))) == FAMILY
