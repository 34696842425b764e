"""Tokenizers: what is encoded comes back, bytes are joined as the `tokenizers` library joins them, damage is told."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import BundleError, FeedError, OptionError
from runtime.text import BOS, EOS, PAD, SPECIALS, UNK, Tokenizer, byte_symbols, characters_of, pad_batch, words_of
from toolkit.data.bpe import _train, train_bpe

TEXTS = [topics[name] for name in sorted(topics)[:12]]
BPE = train_bpe(TEXTS, vocabulary=600)
LIBRARY = _train(TEXTS, 600, SPECIALS)

odd = random.Random(0)
SAMPLES = {
    "documentation": "\n\n".join(topics.values()),
    "unicode": "Grüße, Ærøskøbing — 日本語のテキスト, हिन्दी, עברית, e\u0301 \u212b",
    "emoji": "👩‍👩‍👧‍👦 🇩🇪 a😀b 😀😀",
    "white space": " \t a  b\u00a0c\u2028d\u3000e\r\n\n   \x0b\x0c x \x1c\x85y   ",
    "control characters": "\x00\x01a\x7f \x80\x9f 1\x1f2",
    "one long word": "ab" * 4000,
    "noise": "".join(odd.choice(" \t\n\r\x0b\x0cab19!_'\x1f\x7f\x80é日😀") for _ in range(5000)),
    "every plane": "".join(chr(odd.choice([odd.randrange(0xD800), odd.randrange(0xE000, 0x110000)])) for _ in range(5000)),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_byte_pairs_equal_the_tokenizers_librarys(name: str) -> None:
    numbers = BPE.encode(SAMPLES[name])
    assert numbers == LIBRARY.encode(SAMPLES[name], add_special_tokens=False).ids
    assert BPE.decode(numbers) == SAMPLES[name]


@given(st.text())
def test_any_text_comes_back_from_byte_pairs(text: str) -> None:
    numbers = BPE.encode(text, strict=True)
    assert BPE.decode(numbers) == text
    assert UNK not in numbers


@given(st.text(alphabet=" \nabcé😀<>", max_size=30))
def test_any_text_comes_back_from_its_characters(text: str) -> None:
    assert characters_of([text]).decode(characters_of([text]).encode(text, strict=True)) == text


@given(st.lists(st.text(alphabet="abc<>", min_size=1, max_size=4)))
def test_words_come_back_joined_by_one_space(words: list[str]) -> None:
    tokenizer = words_of([" \n".join(words)])
    assert tokenizer.decode(tokenizer.encode("\t".join(words), strict=True)) == " ".join(words)


def test_merges_are_learnt() -> None:
    assert len(BPE) == 600
    assert len(BPE.encode("the statement")) == 2
    assert train_bpe(TEXTS, vocabulary=600) == BPE
    with pytest.raises(OptionError, match="a bpe vocabulary of 100 is too small; expected 261 or more"):
        train_bpe(TEXTS, vocabulary=100, specials=["<mask>"])


def test_special_tokens_come_first_and_no_text_makes_them() -> None:
    extra = ("<cls>", "<sep>", "<mask>")
    for tokenizer in (
        characters_of(["<pad>mask"], specials=extra),
        words_of(["<pad> <mask> b"], specials=extra),
        train_bpe(["<pad> <mask>"] * 9, vocabulary=300, specials=extra),
    ):
        assert [tokenizer.token_id(name) for name in (*SPECIALS, *extra)] == [0, 1, 2, 3, 4, 5, 6]
        assert (PAD, BOS, EOS, UNK) == (0, 1, 2, 3)
        assert not {0, 1, 2, 4, 5, 6} & set(tokenizer.encode("<pad> <bos> <eos> <cls> <sep> <mask>"))
        assert tokenizer.decode([0, 1, 2, 3, 4, 5, 6]) == ""


def test_vocabularies_are_in_a_fixed_order() -> None:
    assert characters_of(["ba", "c"]).vocabulary == (*SPECIALS, "a", "b", "c")
    assert words_of(["b c a c", "b c"]).vocabulary == (*SPECIALS, "c", "b", "a")
    assert words_of(["b c a c", "b c"], minimum_count=2).vocabulary == (*SPECIALS, "c", "b")
    assert words_of(["b"]).token_id("b") == 4


def test_the_unknown_is_a_token_or_an_error() -> None:
    letters, words = characters_of(["abc"]), words_of(["a bc"])
    assert letters.encode("axb") == [4, UNK, 5]
    assert words.encode("a x bc") == [4, UNK, 5]
    with pytest.raises(FeedError, match="'x' is outside the vocabulary of 7 characters"):
        letters.encode("axb", strict=True)
    with pytest.raises(FeedError, match="'xyz' is outside the vocabulary of 6 words"):
        words.encode("a xyz", strict=True)
    with pytest.raises(FeedError, match="no token 'q' in the vocabulary of 7 characters"):
        letters.token_id("q")
    with pytest.raises(FeedError, match="no token 7; the vocabulary has 0 to 6"):
        letters.decode([4, 7])
    with pytest.raises(FeedError, match="half of a surrogate pair"):
        BPE.encode("ab\ud800")


def test_half_a_character_is_shown_as_such() -> None:
    assert BPE.decode(BPE.encode("😀")[:-1]).strip("\ufffd") == ""
    assert BPE.decode(np.array(BPE.encode("naïve"))) == "naïve"


@pytest.mark.parametrize("tokenizer", [characters_of(['a"\\\n😀\u2028']), words_of(["b a b"], specials=["<cls>"]), BPE])
def test_a_saved_tokenizer_is_the_same(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "t.json")
    opened = Tokenizer.open(tmp_path / "t.json")
    assert opened == tokenizer
    assert opened.encode(SAMPLES["unicode"]) == tokenizer.encode(SAMPLES["unicode"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "is not a tokenizer of format 1"),
        ({"kind": "syllables"}, "damaged .*'syllables' is not known; expected characters, words, bpe"),
        ({"vocabulary": ["a", "b"]}, "damaged .*must start with <pad> <bos> <eos> <unk>"),
        ({"vocabulary": [*SPECIALS, "a", "a"]}, "damaged .*must differ and not be empty, but it has 'a'"),
        ({"vocabulary": [*SPECIALS, 7]}, "damaged .*expected a list of texts"),
        ({"vocabulary": None}, "damaged .*expected a list of texts"),
        ({"specials": ["<cls>"]}, "damaged .*must start with <pad> <bos> <eos> <unk> <cls>"),
        ({"merges": ["a b"]}, "damaged .*merges belong to a tokenizer of kind bpe"),
        ({"kind": "bpe"}, "damaged .*all 256 bytes, but 255 are missing"),
        ({"kind": "bpe", "vocabulary": [*SPECIALS, *byte_symbols()], "merges": ["a b"]}, "damaged .*'a' \\+ 'b'"),
        ({"kind": "bpe", "vocabulary": [*SPECIALS, *byte_symbols()], "merges": ["abc"]}, "damaged .*not a pair"),
    ],
)
def test_a_damaged_tokenizer_is_refused(change: dict, message: str) -> None:
    content = {"format": 1, "kind": "words", "specials": [], "vocabulary": [*SPECIALS, "a"]}
    with pytest.raises(BundleError, match=message):
        Tokenizer.from_json(json.dumps({**content, **change}))


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"the tokenizer .*t.json cannot be read: No such file"):
        Tokenizer.open(tmp_path / "t.json")
    for content in (b"", b"\xff\xfe\x00", b"[1]", BPE.to_json().encode()[:-9], b"[" * 100_000):
        (tmp_path / "t.json").write_bytes(content)
        with pytest.raises(BundleError, match=r"the tokenizer .*t.json is (damaged|not a tokenizer)"):
            Tokenizer.open(tmp_path / "t.json")
    with pytest.raises(BundleError, match="damaged .no 'vocabulary'"):
        Tokenizer.from_json('{"format": 1, "kind": "words"}')


def test_a_tokenizer_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        BPE.kind = "words"  # type: ignore[misc]


def test_a_batch_is_padded_at_the_side_asked_for() -> None:
    assert pad_batch([[5, 6], [7]]).tolist() == [[5, 6], [7, 0]]
    assert pad_batch([[5, 6], []], bos=True, eos=True).tolist() == [[1, 5, 6, 2], [1, 2, 0, 0]]
    assert pad_batch([[5, 6], [7]], eos=True, left=True).tolist() == [[5, 6, 2], [0, 7, 2]]
    assert pad_batch([[5, 6], []], bos=True, left=True).tolist() == [[1, 5, 6], [0, 0, 1]]
    assert pad_batch([]).shape == (0, 0)
    assert pad_batch([[1]]).dtype == np.int64
