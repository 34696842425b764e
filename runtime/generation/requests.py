"""From prompts and options to requests in token numbers, and from sources to what an encoder gives for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..bundle import ALIGNMENT, DECODER, ENCODER, GENERATOR, MANY, Bundle
from ..errors import FeedError, GenerationError, OptionError
from ..session import Session
from ..state import LOGITS, SOURCE, TOKENS
from ..tokens import TokenInput, token_input
from .alignment import Align, aligner
from .decoder import Decoder, source_axis
from .filters import filters_for
from .options import Options
from .rows import padded
from .search import Array, Request
from .wrapped import inside_one_graph

Prompt = str | Sequence[int]
_DEFAULT_ROOM = 256


@dataclass(frozen=True)
class Requests:
    """A bundle's decoder, and encoder if it has one, with how texts get into them. Shared by all threads."""

    decoder: Decoder
    target: TokenInput
    encoder: Session | None = None
    source: TokenInput | None = None
    alignment: Session | None = None
    bos: int | None = None
    eos: int | None = None

    @property
    def prompts(self) -> TokenInput:
        """What a prompt is: the source of an encoder–decoder, or the beginning of a language model's text."""
        return self.source or self.target

    def request(self, prompt: Sequence[int], options: Options) -> Request:
        """The request of a prompt in token numbers."""
        prefix = self.target_tokens(options.prefix, "the prefix") if len(options.prefix) else []
        source: tuple[int, ...] | None = None
        begin = list(prompt)
        if self.encoder is not None:
            source, begin = tuple(prompt), [] if self.bos is None else [self.bos]
            if not begin and not prefix:
                raise FeedError("this bundle names no token to begin with; give the decoder's first as prefix=[…]")
            if not begin:
                begin, prefix = prefix[:1], prefix[1:]
        room = self._room(len(begin), len(prefix), options)
        if (options.stop or any(isinstance(word, str) for word in options.bad_words)) and self.target.tokenizer is None:
            raise OptionError(
                "stop and bad_words are texts, and this bundle has no tokenizer; use stop_tokens and token numbers"
            )
        ending = (*(() if self.eos is None else (self.eos,)), *map(int, options.stop_tokens))
        return Request(
            options,
            tuple(begin),
            tuple(prefix),
            room,
            self.eos,
            filters_for(options, ending=ending, encode=self._encode_text, vocabulary=self.decoder.vocabulary),
            self._decode,
            source,
            pad=self.target.pad,
            align=self._aligner(source, begin) if options.attention or options.coverage_penalty else None,
        )

    def target_tokens(self, text: Prompt, name: str) -> list[int]:
        """Token numbers of a text that the decoder is fed, without padding: a cache counts what it is fed."""
        tokens = [token for token in self.target.row(text, name) if token != self.target.pad]
        if not tokens:
            raise FeedError(f"{name} is empty; expected at least one token")
        return tokens

    def _aligner(self, source: Sequence[int] | None, prompt: Sequence[int]) -> Align:
        if source is None:
            raise OptionError("attention and coverage_penalty look at a source, and a language model has none; leave them out")
        if self.alignment is None:
            raise OptionError(
                "attention and coverage_penalty need the graph 'alignment', which this bundle does not have; make the bundle "
                "with: edgekit export … --attention"
            )
        return aligner(self.alignment, lambda: self.encode([source]), prompt, len(source))

    def _room(self, prompt: int, prefix: int, options: Options) -> int:
        longest = self.decoder.longest
        if self.decoder.fixed_capacity is not None:
            longest = min(longest or self.decoder.fixed_capacity, self.decoder.fixed_capacity)
        if longest is not None and prompt >= longest:
            raise GenerationError(f"the prompt has {prompt} tokens and the network {longest} positions; shorten it")
        room = options.max_new_tokens
        if room is None:
            room = max(_DEFAULT_ROOM, prefix + 1, options.min_new_tokens)
            room = room if longest is None else min(room, longest - prompt)
        if prefix >= room:
            raise OptionError(f"the prefix has {prefix} tokens and at most {room} are generated; raise max_new_tokens")
        if options.min_new_tokens > room:
            raise OptionError(f"min_new_tokens is {options.min_new_tokens} and only {room} tokens fit; lower it")
        return int(room)

    def _encode_text(self, text: str) -> list[int]:
        assert self.target.tokenizer is not None
        return self.target.tokenizer.encode(text)  # what is unknown cannot occur

    def _decode(self, tokens: Iterable[int]) -> str:
        return "" if self.target.tokenizer is None else self.target.tokenizer.decode(tokens)

    def encode(self, sources: Sequence[Sequence[int]]) -> Mapping[str, Array]:
        """What the encoder gives for sources, side by side; ragged ones are padded."""
        assert self.encoder is not None
        assert self.source is not None
        longest = max(map(len, sources))
        name = self.encoder.signature.inputs[0].name
        if self.source.pad is not None or all(len(source) == longest for source in sources):
            batch = np.full((len(sources), longest), self.source.pad or 0, np.int64)
            for row, source in zip(batch, sources, strict=True):
                row[: len(source)] = source
            return self.encoder.run({name: batch})
        alone = [self.encoder.run({name: np.array([source], np.int64)}) for source in sources]
        axes = {spec.name: source_axis(spec) for spec in self.encoder.signature.outputs}
        batch_axes = {state.input: state.batch_axis for state in self.decoder.session.signature.states}
        return {
            output: np.concatenate(
                [padded(found[output], axes[output], longest) for found in alone], axis=batch_axes.get(output, 0)
            )
            for output in axes
        }


def requests_of(bundle: Bundle, sessions: Mapping[str, Session], *, many_rows: bool) -> Requests:
    """How the bundle of a generating network is asked to generate.

    A decoder may come in a second form, for many rows: prompts are read with it, and with `many_rows` single tokens too. An
    encoder–decoder's has a single token to read before it writes.
    """
    manifest = bundle.manifest
    if GENERATOR in sessions:
        raise inside_one_graph(manifest.name)
    if manifest.generation is None or DECODER not in sessions:
        raise OptionError(f"{manifest.name} does not generate text: its task is {manifest.task!r}; use predict or run")
    about: Mapping[str, Any] = manifest.generation
    tolerance = manifest.tolerance.get(DECODER, {}).get(LOGITS)
    decoder = Decoder(
        sessions[MANY] if many_rows and MANY in sessions else sessions[DECODER],
        longest=about.get("longest"),
        reader=None if ENCODER in sessions else sessions.get(MANY),
        noise=0.0 if tolerance is None else tolerance.allowed,
    )
    target = token_input(bundle, DECODER, TOKENS)
    source = token_input(bundle, ENCODER, SOURCE) if ENCODER in sessions else None
    if target is None or (ENCODER in sessions) != (source is not None):
        raise OptionError(
            f"the graphs of {manifest.name} ({', '.join(sessions)}) are not those of a decoder on tokens; use run"
        )
    return Requests(
        decoder,
        target,
        sessions.get(ENCODER),
        source,
        sessions.get(ALIGNMENT),
        about.get("bos"),
        about.get("eos"),
    )
