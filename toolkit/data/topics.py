"""English about Python: the help topics of the standard library (Python Software Foundation), one document each.

Some topics repeat whole pages of others ("assignment" is also in "specialnames"). A paragraph that an earlier topic has is
left out, so that held-out text is no copy of training text. Paragraphs are told apart by blank lines, and compared without
regard to indentation and line breaks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from .text_data import Documents

_BLANK_LINES = re.compile(r"\n(?:[ \t]*\n)+")


def load() -> Documents:
    from pydoc_data.topics import topics

    return Documents("topics", without_repeats(topics))


def without_repeats(topics: Mapping[str, str]) -> tuple[str, ...]:
    """The texts in alphabetical order of their names, less the paragraphs of earlier ones, less what is then empty."""
    seen: set[str] = set()
    texts = []
    for _, text in sorted(topics.items()):
        kept = [part for part in _BLANK_LINES.split(text.strip("\n")) if " ".join(part.split()) not in seen]
        seen.update(" ".join(part.split()) for part in kept)
        if kept:
            texts.append("\n\n".join(kept))
    return tuple(texts)
