"""load(path) → Model: what an application calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from numpy.typing import NDArray

from .answers import Answerer
from .bundle import DECODER, GENERATOR, Bundle
from .errors import FeedError, OptionError
from .feeds import example_feeds, natural_batch
from .filling import fill_texts
from .generation.generate import Batch, Context, TextGenerator
from .generation.requests import requests_of
from .generation.scheduler import MOST_ROWS
from .generation.wrapped import WrappedGenerator, wrapped_generator
from .prediction import Prediction, softmax
from .samples import as_batch, convert
from .scoring import Scorer, scorer_of
from .session import Session
from .state import TOKENS, step_feeds
from .tokens import token_input

__all__ = ["Model", "Prediction", "as_batch", "convert", "load", "softmax"]

_PAST = 1  # tokens before the step that warms a decoder up
_SHORT_STEP = 128 << 20  # bytes of weights that are read in a few milliseconds


def _spins(bundle: Bundle) -> bool:
    """Whether threads wait busily for the next run. A decoder's host works between two runs: then it pays only where waking
    them would take a good part of a short step, and not with several graphs, whose threads take the cores from each other.
    """
    graphs = bundle.manifest.graphs
    return DECODER not in graphs or (len(graphs) == 1 and bundle.graph_bytes < _SHORT_STEP)


class Model:
    """A bundle ready to run. Make one with `load`; use it as a context manager or `close` it to free its memory.

    Several threads may use one model at once. A call that fails leaves it as it was.
    """

    def __init__(
        self,
        bundle: Bundle,
        *,
        device: str = "auto",
        threads: int | None = None,
        strict: bool = False,
        many_rows: bool = False,
    ) -> None:
        self.bundle = bundle
        self._many_rows = many_rows
        self.task = bundle.manifest.task
        self._sessions: dict[str, Session] | None = {
            name: Session(
                bundle.graph_path(name),
                graph.signature,
                device=device,
                threads=threads,
                strict=strict,
                spins=_spins(bundle),
            )
            for name, graph in bundle.manifest.graphs.items()
        }
        self.device = next(iter(self._sessions.values())).device

    @property
    def sessions(self) -> dict[str, Session]:
        """The graphs by name."""
        if self._sessions is None:
            raise OptionError(f"the model {self.bundle.manifest.name} is closed; load it again with runtime.load(…)")
        return self._sessions

    def close(self) -> None:
        """Free the sessions, once calls that are under way have ended. Closing twice does nothing."""
        self._sessions = None
        for made in ("_answerer", "_scorer", "_generator", "_wrapped"):
            self.__dict__.pop(made, None)

    def __enter__(self) -> Self:
        _ = self.sessions  # a closed model cannot be entered
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def warmup(self) -> None:
        """Run each graph once, a decoder also by one token, so that the first request does not pay for what is made then."""
        goldens = {entry.graph: inputs for entry, inputs, _ in self.bundle.goldens()}
        for name, session in self.sessions.items():
            signature = session.signature
            session.run(goldens[name] if name in goldens else example_feeds(signature, {}))
            if signature.states:
                try:
                    feeds = step_feeds(signature, natural_batch(signature), _PAST)
                except FeedError:  # a cache of one: there is no second step
                    continue
                session.run(feeds)

    def run(self, feeds: Mapping[str, NDArray[Any]], *, graph: str | None = None) -> dict[str, NDArray[Any]]:
        """Raw tensors in and out, for any graph of any bundle."""
        sessions = self.sessions
        name, _ = self.bundle.graph(graph)
        return sessions[name].run(feeds)

    def predict(self, inputs: Any) -> Prediction:
        """Labels or values of one sample, or of a list or batch of them.

        A sample is raw pixels or raw columns; for networks on text a text, or its token numbers. Texts of different lengths are
        padded, and other samples of different sizes run in groups of equal ones; the order stays. A dict gives every input by
        name.
        """
        others = {"embedding": "embed", "masked-lm": "fill", "language-model": "generate", "seq2seq": "generate"}
        self._require("predict", ("classification", "regression"), others.get(self.task, "run"))
        output, _ = self._answerer.answers(inputs)
        if self.task == "regression":
            return Prediction(values=output.reshape(len(output), -1)[:, 0])
        winners = output.argmax(axis=-1)
        known = self.bundle.manifest.labels or tuple(str(index) for index in range(output.shape[-1]))
        return Prediction(labels=tuple(known[index] for index in winners), probabilities=softmax(output))

    def embed(self, inputs: Any) -> NDArray[Any]:
        """The vector (width,) of one text or sample, or the vectors (batch, width) of a list of them."""
        self._require("embed", ("embedding",), "run")
        vectors, one = self._answerer.answers(inputs)
        return vectors[0] if one else vectors

    def fill(self, texts: Any, *, top: int = 5) -> Any:
        """The likeliest tokens for every <mask> of a text: a `Filling`, or a list of them for a list of texts."""
        self._require("fill", ("masked-lm",), "run")
        one = isinstance(texts, str)
        filled = fill_texts(self._answerer, [texts] if one else texts, top)
        return filled[0] if one else filled

    def score(self, texts: Any, source: Any = None) -> Any:
        """The log-probability of a text (given its source, for encoder–decoders): a `Score`, or a list for a list of texts.

        Texts may be token numbers. One source serves several texts. See scoring.py for what counts.
        """
        self._require("score", ("language-model", "seq2seq"), "run")
        scores, one = self._scorer.score(texts, source)
        return scores[0] if one else scores

    # Generating, for language models and encoder–decoders

    def generate(self, prompts: Any, **options: Any) -> Any:
        """What follows a prompt, or the target of a source: a `Generation`; for a list of prompts a list of them.

        A prompt is a text or token numbers. With n_best > 1 there is a list for each prompt. See `generation.Options`.
        """
        if self._is_wrapped:
            return self._wrapped.generate(prompts, options)
        return self._generator.generate(prompts, options)

    def stream(self, prompt: Any, **options: Any) -> Iterator[str]:
        """The text that `generate` would give, piece by piece as it becomes final. To cancel, close the iterator."""
        if self._is_wrapped:
            return self._wrapped.stream(prompt, options)
        return self._generator.stream(prompt, options)

    def read(self, text: Any) -> Context:
        """A beginning that is computed once and then continued as often as one likes; for language models."""
        return self._generator.read(text)

    def scheduler(self, *, most_rows: int = MOST_ROWS, memory_limit: int | None = None) -> Batch:
        """A running batch that requests can join at any time."""
        return Batch(self._generator, most_rows=most_rows, memory_limit=memory_limit)

    def cache_bytes(self, *, rows: int = 1, tokens: int) -> int:
        """Memory that the states of so many rows (beams, texts of a batch) of so many tokens (prompt included) take."""
        return self._generator.decoder.cache_bytes(rows, tokens)

    @property
    def _is_wrapped(self) -> bool:
        """Whether the loop is inside the graph; see exporters/targets/in_graph.py."""
        return GENERATOR in self.sessions

    # Parts that are made when they are first needed

    @cached_property
    def _wrapped(self) -> WrappedGenerator:
        return wrapped_generator(self.bundle, self.sessions[GENERATOR])

    @cached_property
    def _answerer(self) -> Answerer:
        name, _ = self.bundle.graph()
        return Answerer(self.sessions[name], token_input(self.bundle, name, TOKENS))

    @cached_property
    def _scorer(self) -> Scorer:
        return scorer_of(self.bundle, self.sessions)

    @cached_property
    def _generator(self) -> TextGenerator:
        return TextGenerator(requests_of(self.bundle, self.sessions, many_rows=self._many_rows))

    def _require(self, verb: str, tasks: tuple[str, ...], instead: str) -> None:
        _ = self.sessions  # what is closed says so first
        if self.task not in tasks:
            raise OptionError(f"{verb} is for {' and '.join(tasks)}; this bundle's task is {self.task!r}: use {instead}")


def load(
    path: str | Path,
    *,
    device: str = "auto",
    threads: int | None = None,
    strict: bool = False,
    many_rows: bool = False,
) -> Model:
    """Open a bundle, check every file in it, and make it ready to run. See `Session` for `device`.

    `many_rows` is for beams and batches: some quantized bundles have a form of the decoder that is faster for them, and slower
    for single texts. Its answers differ within the quantization's error, and do not depend on the batch either.
    """
    return Model(Bundle.open(path), device=device, threads=threads, strict=strict, many_rows=many_rows)
