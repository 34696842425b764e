"""Text as it becomes final: what later tokens could still change is held back."""

from __future__ import annotations

from collections.abc import Sequence

from .search import Request

_INCOMPLETE = "\ufffd"  # what an unfinished UTF-8 character is decoded to


class TextStream:
    def __init__(self, request: Request) -> None:
        self._request = request
        self._given = 0  # characters that were handed out

    def add(self, tokens: Sequence[int]) -> str:
        """The text that `tokens`, all that are final so far, add to what was handed out."""
        request = self._request
        kept = len(tokens) - bool(tokens and tokens[-1] in request.ending)
        text = request.decode(tokens[:kept])
        while text.endswith(_INCOMPLETE):
            text = text[:-1]
        return self._hand_out(text[: _safe_length(text, request.options.stop)])

    def end(self, text: str) -> str:
        """The rest of the final text."""
        return self._hand_out(text)

    def _hand_out(self, text: str) -> str:
        piece = text[self._given :]
        self._given = max(self._given, len(text))
        return piece


def _safe_length(text: str, stops: Sequence[str]) -> int:
    """How much of `text` cannot become part of a stop text."""
    safe = len(text)
    for stop in stops:
        if (place := text.find(stop)) >= 0:
            safe = min(safe, place)
        for size in range(min(len(stop) - 1, len(text)), 0, -1):
            if text.endswith(stop[:size]):
                safe = min(safe, len(text) - size)
                break
    return safe
