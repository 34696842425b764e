"""From prompts to generated texts: what `Model.generate`, `Model.stream` and `Model.read` do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..bundle import ALIGNMENT, DECODER, ENCODER, MANY, Bundle
from ..errors import FeedError, GenerationError, OptionError
from ..machine import available_memory
from ..session import Session
from ..state import LOGITS
from ..text import Tokenizer
from .alignment import Align, aligner
from .beam import common_beginning
from .decoder import Decoder, source_axis
from .filters import filters_for
from .options import Generation, Options
from .rows import Rows
from .scheduler import MOST_ROWS, Scheduler, Ticket
from .search import Array, Request
from .streaming import TextStream

Prompt = str | Sequence[int]
_DEFAULT_ROOM = 256
_WORTH_SHARING = 16  # tokens that all prompts begin with


@dataclass(frozen=True)
class SpecialTokens:
    bos: int | None
    eos: int | None
    pad: int | None


class TextGenerator:
    """A bundle's decoder, and encoder if it has one, with its tokenizers. Shared by all threads."""

    def __init__(
        self,
        decoder: Decoder,
        encoder: Session | None,
        *,
        special: SpecialTokens,
        source_tokenizer: Tokenizer | None,
        tokenizer: Tokenizer | None,
        alignment: Session | None = None,
    ) -> None:
        self.decoder = decoder
        self.encoder = encoder
        self.special = special
        self.source_tokenizer = source_tokenizer
        self.tokenizer = tokenizer
        self.alignment = alignment

    # What an application calls

    def generate(self, prompts: Prompt | Sequence[Prompt], given: Mapping[str, Any]) -> Any:
        one, several = _one_or_several(prompts)
        requests = [
            self.request(prompt, options) for prompt, options in zip(several, _each(given, len(several), one), strict=True)
        ]
        results = self._run(requests)
        shaped = [found if request.options.n_best > 1 else found[0] for request, found in zip(requests, results, strict=True)]
        return shaped[0] if one else shaped

    def stream(self, prompt: Prompt, given: Mapping[str, Any], start: Rows | None = None) -> Iterator[str]:
        options = Options.of(**given)
        if options.n_best > 1:
            raise OptionError(f"a stream is one text and n_best is {options.n_best}; use generate for several")
        return self._stream(self.request(prompt, options), start)

    def read(self, text: Prompt) -> Context:
        if self.encoder is not None:
            raise OptionError("read is for language models; an encoder–decoder reads its source as a whole: use generate")
        return Context(self, self.tokens_of(text, source=False))

    def _stream(self, request: Request, start: Rows | None) -> Iterator[str]:
        scheduler = self.scheduler()
        ticket = scheduler.submit(request, start)
        text = TextStream(request)
        going_on = True
        while going_on:
            going_on = scheduler.step()
            if ticket.search is not None and not ticket.done and (piece := text.add(ticket.search.stable())):
                yield piece
        if piece := text.end(ticket.results()[0].text):
            yield piece

    def _run(self, requests: Sequence[Request], start: Rows | None = None) -> list[list[Generation]]:
        scheduler = self.scheduler(most_rows=max([MOST_ROWS, *(request.options.beams for request in requests)]))
        shared = start or self._shared(requests)
        tickets = [scheduler.submit(request, shared) for request in requests]
        while scheduler.step():
            pass
        return [ticket.results() for ticket in tickets]

    def _shared(self, requests: Sequence[Request]) -> Rows | None:
        """A row that holds what all prompts begin with, if that is worth computing once."""
        if len(requests) < 2 or self.encoder is not None:
            return None
        beginning = common_beginning([request.prompt for request in requests])[: min(len(r.prompt) for r in requests) - 1]
        same_length = len({request.length for request in requests}) == 1
        if len(beginning) < _WORTH_SHARING or (same_length and len(beginning) < max(r.length for r in requests) // 2):
            return None
        return self.row_of(beginning)

    def row_of(self, tokens: Sequence[int]) -> Rows:
        rows = Rows(self.decoder, room=1, capacity=self.decoder.capacity(len(tokens)))
        rows.start(1)
        rows.advance(np.array([tokens], np.int64))
        return rows

    def scheduler(self, *, most_rows: int = MOST_ROWS, memory_limit: int | None = None) -> Scheduler:
        limit = available_memory() if memory_limit is None else memory_limit
        return Scheduler(self.decoder, self.encode if self.encoder else None, most_rows=most_rows, memory_limit=limit)

    # From texts to token numbers

    def request(self, prompt: Prompt, options: Options, before: Sequence[int] = ()) -> Request:
        """`before` are tokens that stand in front of a language model's prompt."""
        tokens = self.tokens_of(prompt, source=self.encoder is not None)
        prefix = tuple(self.tokens_of(options.prefix, source=False)) if len(options.prefix) else ()
        source = None
        if self.encoder is not None:
            source, tokens = tuple(tokens), [] if self.special.bos is None else [self.special.bos]
            if not source:
                raise FeedError("the source is empty; expected a text, or token numbers")
            if self.decoder.longest is not None and len(source) > self.decoder.longest:
                raise GenerationError(
                    f"the source has {len(source)} tokens and the network {self.decoder.longest} positions; shorten it"
                )
            if not tokens:
                if not prefix:
                    raise FeedError("this bundle names no token to begin with; give the decoder's first as prefix=[…]")
                tokens, prefix = list(prefix[:1]), prefix[1:]
        tokens = [*before, *tokens]
        if not tokens:
            raise FeedError("the prompt is empty, and a language model goes on from something; give it a token at least")
        room = self._room(len(tokens), len(prefix), options)
        ending = (*(() if self.special.eos is None else (self.special.eos,)), *map(int, options.stop_tokens))
        self._check_tokens([*prefix, *options.stop_tokens], self.decoder.vocabulary)
        if (options.stop or self._has_text(options.bad_words)) and self.tokenizer is None:
            raise OptionError(
                "stop and bad_words are texts, and this bundle has no tokenizer; use stop_tokens and token numbers"
            )
        align = self._aligner(source, tokens) if options.attention or options.coverage_penalty else None
        filters = filters_for(options, ending=ending, encode=self._encode_text, vocabulary=self.decoder.vocabulary)
        return Request(
            options,
            tuple(tokens),
            prefix,
            room,
            self.special.eos,
            filters,
            self._decode,
            source,
            pad=self.special.pad,
            align=align,
        )

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

    def tokens_of(self, prompt: Prompt, *, source: bool) -> list[int]:
        """Token numbers of a text, or those given, checked."""
        tokenizer = self.source_tokenizer if source else self.tokenizer
        if isinstance(prompt, str):
            if tokenizer is None:
                raise FeedError("this bundle has no tokenizer; give a prompt as token numbers, e.g. [17, 4, 256]")
            found = tokenizer.encode(prompt, strict=True)
            return [*found, self.special.eos] if source and found and self.special.eos is not None else found
        if not isinstance(prompt, Iterable):
            raise FeedError(f"a prompt is a {type(prompt).__name__}, expected a text or a list of token numbers")
        tokens = list(prompt)
        if wrong := [token for token in tokens if isinstance(token, bool) or not isinstance(token, int | np.integer)]:
            raise FeedError(f"a prompt holds {wrong[0]!r}, expected token numbers")
        numbers = [int(token) for token in tokens]
        self._check_tokens(numbers, len(tokenizer) if tokenizer else None if source else self.decoder.vocabulary)
        return numbers if source else [token for token in numbers if token != self.special.pad]  # a cache counts what it is fed

    @staticmethod
    def _check_tokens(tokens: Sequence[int], vocabulary: int | None) -> None:
        for token in tokens:
            if token < 0 or (vocabulary is not None and token >= vocabulary):
                known = "0 and up" if vocabulary is None else f"0 to {vocabulary - 1}"
                raise FeedError(f"there is no token {token}; expected numbers from {known}")

    @staticmethod
    def _has_text(words: Sequence[Any]) -> bool:
        return any(isinstance(word, str) for word in words)

    def _encode_text(self, text: str) -> list[int]:
        assert self.tokenizer is not None
        return self.tokenizer.encode(text)  # what is unknown cannot occur

    def _decode(self, tokens: Iterable[int]) -> str:
        return "" if self.tokenizer is None else self.tokenizer.decode(tokens)

    # The encoder

    def encode(self, sources: Sequence[Sequence[int]]) -> Mapping[str, Array]:
        """What the encoder gives for sources, side by side; ragged ones are padded."""
        assert self.encoder is not None
        longest = max(map(len, sources))
        name = self.encoder.signature.inputs[0].name
        if self.special.pad is not None or all(len(source) == longest for source in sources):
            batch = np.full((len(sources), longest), self.special.pad or 0, np.int64)
            for row, source in zip(batch, sources, strict=True):
                row[: len(source)] = source
            return self.encoder.run({name: batch})
        alone = [self.encoder.run({name: np.array([source], np.int64)}) for source in sources]
        axes = {spec.name: source_axis(spec) for spec in self.encoder.signature.outputs}
        batch_axes = {state.input: state.batch_axis for state in self.decoder.session.signature.states}
        return {
            output: np.concatenate(
                [_lengthened(found[output], axes[output], longest) for found in alone], axis=batch_axes.get(output, 0)
            )
            for output in axes
        }


def _lengthened(array: Array, axis: int | None, length: int) -> Array:
    if axis is None:
        return array
    widths = [(0, length - size if at == axis else 0) for at, size in enumerate(array.shape)]
    return np.pad(array, widths)


def text_generator(bundle: Bundle, sessions: Mapping[str, Session]) -> TextGenerator:
    """What a bundle of a generating network generates with."""
    manifest = bundle.manifest
    if manifest.generation is None or DECODER not in sessions:
        raise OptionError(f"{manifest.name} does not generate text: its task is {manifest.task!r}; use predict or run")
    about = manifest.generation
    tolerance = manifest.tolerance.get(DECODER, {}).get(LOGITS)
    decoder = Decoder(
        sessions[DECODER],
        longest=about.get("longest"),
        many=sessions.get(MANY),
        many_from=int(about.get("many_rows_from") or 0),
        noise=0.0 if tolerance is None else tolerance.allowed,
    )
    tokenizers = {name: Tokenizer.open(bundle.root / file) for name, file in manifest.tokenizers.items()}
    special = SpecialTokens(about.get("bos"), about.get("eos"), about.get("pad"))
    target = tokenizers.get("target") or tokenizers.get("text")
    return TextGenerator(
        decoder,
        sessions.get(ENCODER),
        special=special,
        source_tokenizer=tokenizers.get("source"),
        tokenizer=target,
        alignment=sessions.get(ALIGNMENT),
    )


class Context:
    """A beginning that is computed once and continued as often as one likes. Made by `Model.read`.

    Its row holds all tokens but the last, which every continuation feeds again: what follows from it is not kept.
    """

    def __init__(self, generator: TextGenerator, tokens: Sequence[int]) -> None:
        if not tokens:
            raise FeedError("the text is empty; expected at least one token")
        self._generator = generator
        self.tokens: tuple[int, ...] = ()
        self._rows: Rows | None = None
        self._add(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def read(self, text: Prompt) -> None:
        """Go on with a text."""
        self._add(self._generator.tokens_of(text, source=False))

    def rewind(self, length: int) -> None:
        """Return to the first `length` tokens."""
        if not 1 <= length <= len(self.tokens):
            raise OptionError(f"cannot rewind to {length} tokens; expected 1 to {len(self.tokens)}")
        kept = self.tokens[:length]
        if self._rows is not None and length > 1 and self._generator.decoder.can_rewind:
            self._rows.truncate(length - 1)
            self.tokens = kept
        elif length < len(self.tokens):  # a hidden state does not say what it was
            self.tokens, self._rows = (), None
            self._add(kept)

    def generate(self, prompt: Prompt = "", **options: Any) -> Any:
        """As `Model.generate`, of one prompt that follows what was read."""
        request = self._request(prompt, options)
        found = self._generator._run([request], self._rows)[0]
        return found if request.options.n_best > 1 else found[0]

    def stream(self, prompt: Prompt = "", **options: Any) -> Iterator[str]:
        return self._generator._stream(self._request(prompt, options), self._rows)

    def _request(self, prompt: Prompt, options: Mapping[str, Any]) -> Request:
        return self._generator.request(prompt or [], Options.of(**options), before=self.tokens)

    def _add(self, tokens: Sequence[int]) -> None:
        everything = (*self.tokens, *tokens)
        fed = everything[max(0, len(self.tokens) - 1) : -1]
        decoder = self._generator.decoder
        capacity = decoder.capacity(len(everything))
        if fed:
            if self._rows is None:
                self._rows = self._generator.row_of(fed)
            else:
                self._rows.reserve(1, capacity)
                self._rows.advance(np.array([fed], np.int64))
        self.tokens = everything


class Batch:
    """A running batch: requests join it at any time, and leave it when they are done. Made by `Model.scheduler`.

    tickets = [batch.submit("def "), batch.submit("class ", beams=4)]
    while batch.step(): ...
    tickets[0].results()[0].text
    """

    def __init__(self, generator: TextGenerator, *, most_rows: int, memory_limit: int | None) -> None:
        self._generator = generator
        self._scheduler = generator.scheduler(most_rows=most_rows, memory_limit=memory_limit)

    def submit(self, prompt: Prompt, **options: Any) -> Ticket:
        return self._scheduler.submit(self._generator.request(prompt, Options.of(**options)))

    def step(self) -> bool:
        """One more token for every request under way; False when all are done."""
        return self._scheduler.step()

    def run(self) -> None:
        """Until all requests are done."""
        while self.step():
            pass


def _one_or_several(prompts: Any) -> tuple[bool, list[Prompt]]:
    """Whether one prompt was given, and a list of what was given."""
    if isinstance(prompts, str):
        return True, [prompts]
    if isinstance(prompts, np.ndarray):
        prompts = prompts.tolist()
    if not isinstance(prompts, Iterable):
        raise FeedError(f"a prompt is a {type(prompts).__name__}, expected a text, token numbers, or a list of such")
    listed = list(prompts)
    if listed and not isinstance(listed[0], str | Iterable):
        return True, [listed]
    if not listed:
        raise FeedError("there is no prompt; expected a text, token numbers, or a list of such")
    return False, listed


def _each(given: Mapping[str, Any], count: int, one: bool) -> list[Options]:
    """Options of every prompt; `seed` may be a list with one number for each."""
    seed = given.get("seed")
    if isinstance(seed, Sequence) and not isinstance(seed, str):
        if one or len(seed) != count:
            raise OptionError(f"there are {len(seed)} seeds for {count} prompts; give one number, or one for each of a list")
        options = Options.of(**{**given, "seed": seed[0]})
        return [replace(options, seed=number) for number in seed]
    return [Options.of(**given)] * count
