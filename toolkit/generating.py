"""edgekit run on texts: generated texts, labels, vectors or filled gaps, one answer for each."""

from __future__ import annotations

import json
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from itertools import islice
from typing import Any

from runtime import Model, load
from runtime.errors import EdgekitError, OptionError, UnknownName
from runtime.generation.options import Generation, Options

from .console import note, say
from .prediction import prediction_document, prediction_lines

_GENERATING = ("language-model", "seq2seq")
_NOT_ON_A_COMMAND_LINE = ("constraint",)


def run_texts(
    bundle: str,
    texts: Iterable[str],
    options: Mapping[str, Any],
    *,
    one: bool,
    stream: bool,
    scores: bool,
    as_json: bool,
    batch: int,
    device: str,
    threads: int | None,
    many_rows: bool,
) -> int:
    """Answer every text on stdout; the exit code. Of `one` text the answer may be streamed, of several each is a line."""
    with load(bundle, device=device, threads=threads, many_rows=many_rows) as model:
        if model.task not in _GENERATING and (options or scores):
            first = next(iter(options), "scores")
            raise OptionError(f"{first} is for networks that generate, and the task of {bundle} is {model.task}; leave it out")
        beams = (model.bundle.manifest.generation or {}).get("beams", 1)  # of a graph that generates by itself
        Options.of(**{"beams": beams, **options})  # what contradicts itself is said before anything is read
        if stream and one and not as_json and not scores and options.get("n_best", 1) == 1 and model.task in _GENERATING:
            for piece in model.stream(next(iter(texts)), **options):
                say(piece, end="")
            say("")
            return 0
        failed = 0
        for number, (text, answer) in enumerate(_answers(model, texts, options, batch), start=1):
            if isinstance(answer, EdgekitError):
                if one:
                    raise answer
                failed = answer.exit_code
                note(f"line {number}: {answer}")
                say(json.dumps({"input": text, "error": str(answer)}, ensure_ascii=False) if as_json else "")
            elif as_json:
                say(json.dumps({"input": text, **_document(answer)}, ensure_ascii=False))
            else:
                for line in _lines(answer, scores=scores):
                    say(line if one else _on_one_line(line))
        return failed


def _answers(model: Model, texts: Iterable[str], options: Mapping[str, Any], batch: int) -> Iterator[tuple[str, Any]]:
    """Every text with its answer, or with the error that it met; the others are not affected."""
    waiting = iter(texts)
    while together := list(islice(waiting, batch)):
        try:
            found: Sequence[Any] = _answer(model, together, options)
        except EdgekitError as error:
            alone = [] if len(together) == 1 else [_answers(model, [text], options, 1) for text in together]
            found = [answer for one in alone for _, answer in one] or [error]
        yield from zip(together, found, strict=True)


def _answer(model: Model, texts: list[str], options: Mapping[str, Any]) -> Sequence[Any]:
    if model.task in _GENERATING:
        found: Sequence[Any] = model.generate(texts, **options)
        return found
    if model.task == "embedding":
        return [vector.tolist() for vector in model.embed(texts)]
    if model.task == "masked-lm":
        filled: Sequence[Any] = model.fill(texts)
        return filled
    return [model.predict(text) for text in texts]


def _lines(answer: Any, *, scores: bool) -> list[str]:
    if generations := _generations(answer):
        return [f"{item.score:9.4f}  {item.text}" if scores else item.text for item in generations]
    if isinstance(answer, list):  # a vector
        return [" ".join(f"{value:.6g}" for value in answer)]
    if hasattr(answer, "labels"):
        return prediction_lines(answer)
    return str(answer).splitlines()


def _generations(answer: Any) -> list[Generation]:
    """The generated texts of an answer; none if it is of another kind."""
    listed = answer if isinstance(answer, list) else [answer]
    return [item for item in listed if isinstance(item, Generation)]


def _document(answer: Any) -> dict[str, Any]:
    if isinstance(answer, Generation):
        return _generation(answer)
    if generations := _generations(answer):
        return {"generations": [_generation(item) for item in generations]}
    if isinstance(answer, list):
        return {"vector": answer}
    if hasattr(answer, "labels"):
        return dict(prediction_document(answer)[0])
    return asdict(answer)


def _generation(generation: Generation) -> dict[str, Any]:
    document = asdict(generation)
    document["attention"] = None if generation.attention is None else generation.attention.tolist()
    return {name: value for name, value in document.items() if value not in (None, ())} | {"text": generation.text}


def _on_one_line(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")


def parse_option(text: str) -> tuple[str, Any]:
    """name=value for any of `Options`: numbers and true/false by the field's type, lists as JSON or separated by commas."""
    name, equals, value = text.partition("=")
    name = name.strip().replace("-", "_")
    kinds = typing.get_type_hints(Options)
    known = [item.name for item in fields(Options) if item.name not in _NOT_ON_A_COMMAND_LINE]
    if name not in known:
        raise UnknownName.of("generation option", name, known)
    if not equals:
        raise OptionError(f"--set {text!r} has no value; write {name}=…")
    kind = str(kinds[name])
    try:
        if "Sequence" in kind and name != "prefix":
            listed = json.loads(value) if value.startswith("[") else value.split(",")
            return name, list(map(int, listed)) if name == "stop_tokens" else listed
        if "bool" in kind:
            return name, {"true": True, "false": False}[value.lower()]
        if "float" in kind:
            return name, float(value)
        return name, int(value) if "int" in kind and name != "prefix" else value
    except (ValueError, KeyError, TypeError):
        raise OptionError(f"--set {text!r}: {value!r} is not a value of {name}; see docs/guide-runtime.md") from None
