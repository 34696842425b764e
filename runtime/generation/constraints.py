"""A ready constraint: the generated text is one of a list.

    answers = Trie.of_texts(["yes", "no"], tokenizer, ending=[EOS])
    model.generate(prompt, constraint=answers)

Any function of the generated tokens is a constraint (see options.Constraint); a Trie is the one that most need.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import index

from ..errors import OptionError
from ..text import Tokenizer


class _Node:
    __slots__ = ("allowed", "children", "ends")

    def __init__(self) -> None:
        self.children: dict[int, _Node] = {}
        self.ends = False  # a word ends here
        self.allowed: tuple[int, ...] = ()  # what may follow, once all words are in


class Trie:
    """Allows the token sequences `words` and nothing else: each token one of those that continue a word, and `ending`
    (<eos>, stop tokens) where a word ends. A word may be the beginning of another.

    >>> words = Trie([[5, 6], [5, 6, 7], [8]], ending=[2])
    >>> words([]), words([5]), words([5, 6]), words([6])
    ((5, 8), (6,), (7, 2), ())
    """

    def __init__(self, words: Iterable[Sequence[int]], ending: Sequence[int]) -> None:
        self._root = _Node()
        end = tuple(map(index, ending))
        if not end:
            raise OptionError("a Trie without ending tokens allows nothing after a word; pass ending=[…] with <eos>")
        nodes = [self._root]
        for word in words:
            nodes += self._add(word, end)
        if not self._root.children:
            raise OptionError("a Trie of no words allows nothing; pass one or more")
        for node in nodes:
            node.allowed = tuple(node.children) + (end if node.ends else ())

    @classmethod
    def of_texts(cls, texts: Iterable[str], tokenizer: Tokenizer, ending: Sequence[int]) -> Trie:
        """Of texts as `tokenizer` encodes them: with byte pairs, a text that continues a sentence begins with a space."""
        if isinstance(texts, str):
            raise OptionError(f"texts is the text {texts!r}, expected a list; write [{texts!r}]")
        return cls((tokenizer.encode(text, strict=True) for text in texts), ending)

    def __call__(self, generated: Sequence[int]) -> tuple[int, ...]:
        """The tokens that may follow `generated`; none where no word begins like it."""
        node = self._root
        for token in generated:
            following = node.children.get(token)
            if following is None:
                return ()
            node = following
        return node.allowed

    def _add(self, word: Sequence[int], ending: tuple[int, ...]) -> list[_Node]:
        """The nodes that `word` added."""
        try:
            numbers = [index(token) for token in word]
        except TypeError:
            raise OptionError(
                f"a Trie's words hold {word!r}, expected sequences of token numbers; for texts use Trie.of_texts"
            ) from None
        if not numbers:
            raise OptionError("a Trie's words hold an empty one, and a text has one token or more; leave it out")
        added = []
        node = self._root
        for token in numbers:
            if token in ending:
                raise OptionError(f"the word {numbers} holds {token}, which ends a text; leave it out, the Trie adds it")
            if token not in node.children:
                node.children[token] = _Node()
                added.append(node.children[token])
            node = node.children[token]
        node.ends = True
        return added
