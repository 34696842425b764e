"""The Trie constraint: exactly the listed words, whichever begin like one another."""

from __future__ import annotations

from collections.abc import Sequence
from pydoc_data.topics import topics
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import FeedError, OptionError
from runtime.generation.constraints import Trie
from runtime.text import EOS, characters_of
from toolkit.data.bpe import train_bpe

WORDS = st.lists(st.lists(st.integers(4, 6), min_size=1, max_size=4), min_size=1, max_size=8)


def everything_allowed(trie: Trie, ending: set[int]) -> list[list[int]]:
    """Every text that ends within six tokens."""
    texts, open_texts = [], [[]]  # type: tuple[list[list[int]], list[list[int]]]
    while open_texts:
        text = open_texts.pop()
        assert len(text) <= 6
        for token in trie(text):
            if token in ending:
                texts.append(text)
            else:
                open_texts.append([*text, token])
    return texts


@given(WORDS)
def test_exactly_the_words_can_be_generated(words: list[list[int]]) -> None:
    assert sorted(everything_allowed(Trie(words, [EOS]), {EOS})) == sorted({tuple(word): word for word in words}.values())


@given(WORDS, st.lists(st.integers(4, 6), max_size=5))
def test_what_may_follow_is_what_continues_a_word(words: list[list[int]], generated: list[int]) -> None:
    length = len(generated)
    follows = {word[length] for word in words if len(word) > length and word[:length] == generated}
    allowed = Trie(words, [EOS, 9])(generated)
    assert set(allowed) == follows | ({EOS, 9} if generated in words else set())
    assert len(set(allowed)) == len(allowed)


def test_a_word_may_be_the_beginning_of_another() -> None:
    trie = Trie([[5], [5, 6, 7], [5, 6]], ending=[2, 3])
    assert [set(trie(text)) for text in ([], [5], [5, 6], [5, 6, 7])] == [{5}, {6, 2, 3}, {7, 2, 3}, {2, 3}]


def test_after_what_begins_no_word_nothing_is_allowed() -> None:
    trie = Trie([[5, 6]], ending=[2])
    assert [trie(text) for text in ([6], [5, 5], [5, 6, 7], [5, 6, 2])] == [(), (), (), ()]


@pytest.mark.parametrize(
    "tokenizer", [characters_of(["yes no nope"]), train_bpe([topics["if"]], vocabulary=300)], ids=["letters", "bpe"]
)
def test_texts_are_encoded(tokenizer: Any) -> None:
    trie = Trie.of_texts(["yes", "no", "nope"], tokenizer, [EOS])
    assert {tokenizer.decode(text) for text in everything_allowed(trie, {EOS})} == {"yes", "no", "nope"}


@pytest.mark.parametrize(
    ("words", "ending", "message"),
    [
        ([], [2], "a Trie of no words allows nothing; pass one or more"),
        ([[5], []], [2], "a Trie's words hold an empty one, and a text has one token or more; leave it out"),
        ([[5]], [], "a Trie without ending tokens allows nothing after a word; pass ending=[…] with <eos>"),
        ([[5, 2]], [2], "the word [5, 2] holds 2, which ends a text; leave it out, the Trie adds it"),
        (["yes"], [2], "a Trie's words hold 'yes', expected sequences of token numbers; for texts use Trie.of_texts"),
        ([5], [2], "a Trie's words hold 5, expected sequences of token numbers; for texts use Trie.of_texts"),
    ],
)
def test_words_that_cannot_be_generated_are_refused(words: Any, ending: Sequence[int], message: str) -> None:
    with pytest.raises(OptionError) as refused:
        Trie(words, ending)
    assert str(refused.value) == message


def test_texts_that_cannot_be_generated_are_refused() -> None:
    letters = characters_of(["yes"])
    with pytest.raises(OptionError, match=r"^texts is the text 'yes', expected a list; write \['yes'\]$"):
        Trie.of_texts("yes", letters, [EOS])
    with pytest.raises(OptionError, match=r"^a Trie's words hold an empty one"):
        Trie.of_texts(["yes", ""], letters, [EOS])
    with pytest.raises(FeedError, match=r"^'n' is outside the vocabulary"):
        Trie.of_texts(["no"], letters, [EOS])
