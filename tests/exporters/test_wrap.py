"""`edgekit wrap`: what it writes is used like any bundle, and what does not obey the law is not written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from exporters.quantize import _refuse_request
from exporters.targets import choosing, law
from exporters.targets.decisions import withstands
from exporters.targets.in_graph import Parts, generator_graph
from exporters.targets.wrap import wrap
from runtime.bundle import DECODER, ENCODER, GENERATOR, Bundle
from runtime.errors import GenerationError, OptionError, OutputExists, ParityRefused, QuantizationRefused
from runtime.generation import wrapped as wrapped_module
from runtime.generation.options import Options
from runtime.signature import GraphSignature, TensorSpec
from runtime.text import EOS, PAD
from tests.runtime.generation.networks import ROOM, Tiny, assert_same, prompts

from .conftest import BEAMS, Wrap

# The runtime


def test_where_nobody_says_how_many_tokens_it_is_what_fits(gpt: Tiny, wrapped: Wrap) -> None:
    some = [*prompts(6, seed=7), [4, 5, 6] * 15]
    for beams in (1, BEAMS):
        graph = wrapped(gpt.model.bundle, beams)
        expected = gpt.model.generate(some, beams=beams)
        assert any(found.finish == "length" for found in expected), "some must reach the network's last position"
        for one, other in zip(graph.generate(some), expected, strict=True):
            assert_same(one, other)


def test_the_number_of_tokens_can_be_wrapped_in(translator: Tiny, wrapped: Wrap) -> None:
    graph = wrapped(translator.model.bundle, 1, max_new_tokens=2)
    for prompt in prompts(5, seed=8):
        assert_same(graph.generate(prompt), translator.model.generate(prompt, max_new_tokens=2))
        assert_same(graph.generate(prompt, max_new_tokens=5), translator.model.generate(prompt, max_new_tokens=5))


def test_texts_go_in_and_come_out_and_a_stream_is_the_text(gpt: Tiny, wrapped: Wrap) -> None:
    graph = wrapped(gpt.model.bundle, BEAMS)
    expected = gpt.model.generate("abc", max_new_tokens=ROOM, beams=BEAMS)
    assert_same(graph.generate("abc", max_new_tokens=ROOM), expected)
    assert_same(graph.generate("abc", max_new_tokens=ROOM, beams=BEAMS), expected)
    assert "".join(graph.stream("abc", max_new_tokens=ROOM)) == expected.text != ""
    two = graph.generate(["abc", "d"], max_new_tokens=ROOM, n_best=2)
    assert [len(found) for found in two] == [2, 2]
    assert_same(two[0], gpt.model.generate("abc", max_new_tokens=ROOM, beams=BEAMS, n_best=2))


def test_more_prompts_than_rows_go_one_after_the_other(gpt: Tiny, wrapped: Wrap, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = wrapped(gpt.model.bundle, BEAMS)
    some = prompts(9, seed=9)
    expected = graph.generate(some, max_new_tokens=ROOM)
    rows: list[int] = []
    run = graph.sessions[GENERATOR].run
    monkeypatch.setattr(graph.sessions[GENERATOR], "run", lambda feeds: rows.append(len(feeds["prompt"])) or run(feeds))
    monkeypatch.setattr(wrapped_module, "MOST_ROWS", 4 * BEAMS)
    for one, other in zip(graph.generate(some, max_new_tokens=ROOM), expected, strict=True):
        assert_same(one, other)
    assert rows == [4, 4, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beams": 2}, r"beams is 2, and this graph was made for 3; leave it out, or wrap .* with --beams 2"),
        ({"temperature": 1.0}, r"temperature is not inside this graph, .* use the bundle it was wrapped from"),
        ({"prefix": "a"}, r"prefix is not inside this graph"),
        ({"stop": ["a"]}, r"stop is not inside this graph"),
        ({"length_penalty": 0.5}, r"length_penalty is not inside this graph"),
        ({"min_new_tokens": 2}, r"min_new_tokens is not inside this graph"),
        ({"constraint": lambda tokens: None}, r"constraint is not inside this graph"),
        ({"n_best": 4}, r"n_best=4 is more than beams=3 can give"),
        ({"max_new_tokens": 0}, r"max_new_tokens is 0, expected a whole number of 1 or more"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_not_inside_the_graph_is_refused(gpt: Tiny, wrapped: Wrap, options: dict[str, Any], message: str) -> None:
    graph = wrapped(gpt.model.bundle, BEAMS)
    for ask in (graph.generate, graph.stream):
        with pytest.raises(OptionError, match=message):
            ask("abc", **options)


def test_what_needs_the_steps_one_by_one_is_refused(gpt: Tiny, wrapped: Wrap) -> None:
    graph = wrapped(gpt.model.bundle, BEAMS)
    for ask in (lambda: graph.read("abc"), graph.scheduler, lambda: graph.score("abc")):
        with pytest.raises(OptionError, match="gpt generates inside one graph, which gives whole texts only; use generate, or"):
            ask()
    with pytest.raises(OptionError, match="a stream is one text and n_best is more; use generate for several"):
        graph.stream("abc", n_best=2)
    with pytest.raises(OptionError, match="a list of 2 prompts was given and one is expected"):
        graph.stream(["abc", "d"])


def test_what_does_not_fit_is_refused_as_outside_the_graph(gpt: Tiny, wrapped: Wrap) -> None:
    graph = wrapped(gpt.model.bundle, 1)
    with pytest.raises(GenerationError, match="the prompt has 64 tokens and the network 64 positions; shorten it"):
        graph.generate([5] * 64)
    with pytest.raises(GenerationError, match=r"65 tokens do not fit: the network has 64 positions; shorten the prompt or"):
        graph.generate([5] * 60, max_new_tokens=5)


# The proof


def _second_likeliest(self: Any, nodes: Any, logits: str) -> str:
    _, best = nodes.several("TopK", 2, logits, [3], axis=-1)
    return nodes.flat(nodes.part(best, 1, 2))


def _without_length(nodes: Any, length: str) -> str:
    return nodes.constant(1.0, np.float64)


@pytest.mark.parametrize(
    ("beams", "part", "broken"),
    [(1, "Greedy._likeliest", _second_likeliest), (BEAMS, "_power", _without_length)],
    ids=["greedy", "beams"],
)
def test_a_graph_that_gives_other_texts_is_not_written(
    gpt: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beams: int, part: str, broken: Any
) -> None:
    monkeypatch.setattr(f"exporters.targets.choosing.{part}", broken)
    with pytest.raises(
        ParityRefused, match=r"gpt was not wrapped: the graph gives other texts .* no tie, its closest decision"
    ):
        wrap(gpt.model.bundle, tmp_path / "x.bundle", beams=beams)
    assert not (tmp_path / "x.bundle").exists()


def test_numbers_that_differ_too_much_are_not_written(gpt: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = wrapped_module.WrappedGenerator._generation
    monkeypatch.setattr(
        wrapped_module.WrappedGenerator, "_generation", lambda self, *found: replace(plain(self, *found), score=-1.0)
    )
    with pytest.raises(ParityRefused, match=r"log-probabilities differ from those of the loop .* by .*, and the bundle allows"):
        wrap(gpt.model.bundle, tmp_path / "x.bundle")


@pytest.mark.parametrize("beams", [1, BEAMS])
def test_ties_excuse_a_difference_and_are_no_goldens(
    gpt: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beams: int
) -> None:
    """Every other text is told to be a tie, and one of those differs."""
    tied = [text.prompt for trial in law.compare(gpt.model, gpt.model, beams).trials for text in trial][::2]
    plain_withstands, plain_told = law.withstands, law._told
    monkeypatch.setattr(law, "withstands", lambda g, prompt, o: 0.0 if prompt in tied else plain_withstands(g, prompt, o))
    monkeypatch.setattr(law.Text, "agrees", property(lambda text: text.prompt != tied[1] and plain_told(text.expected) != []))
    report = wrap(gpt.model.bundle, tmp_path / "x.bundle", beams=beams)
    assert (report.texts, report.ties) == (26, 1)
    for entry, inputs, _ in Bundle.open(tmp_path / "x.bundle").goldens():
        rows = [[token for token in row if token != PAD] for row in inputs["prompt"].tolist()]
        assert entry.graph == GENERATOR
        assert rows
        assert not any(row in tied for row in rows)


def test_without_a_single_clear_text_there_is_no_proof(gpt: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(law, "withstands", lambda *rest: 0.0)
    with pytest.raises(ParityRefused, match=r"every text is a tie within the noise .* wrap a network with trained weights"):
        wrap(gpt.model.bundle, tmp_path / "x.bundle")
    monkeypatch.setattr(law.Text, "agrees", False)
    with pytest.raises(ParityRefused, match=r"nothing is proved, because all 26 texts differ by ties within a noise of"):
        wrap(gpt.model.bundle, tmp_path / "x.bundle")


def test_a_greedy_text_withstands_half_the_smallest_lead_of_its_tokens(gpt: Tiny) -> None:
    for prompt in prompts(4, seed=10):
        found = gpt.model.generate(prompt, max_new_tokens=ROOM)
        whole = [*found.tokens, *([EOS] if found.finish == "eos" else [])]
        scores = gpt.logprobs(prompt, whole[:-1])
        scores[:, PAD] = -np.inf
        best = scores.sort(dim=-1, descending=True).values
        expected = float((best[:, 0] - best[:, 1]).min()) / 2
        assert withstands(gpt.model._generator, prompt, Options(max_new_tokens=ROOM)) == pytest.approx(expected, abs=1e-5)


def test_a_beam_search_withstands_less_than_what_changes_it(gpt: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors up to what it withstands leave the texts as they are; some that are much larger do not."""
    options = Options(max_new_tokens=6, beams=BEAMS, n_best=BEAMS)
    changed = 0
    for prompt in prompts(6, seed=11):
        limit = withstands(gpt.model._generator, prompt, options)
        assert limit > 0
        expected = [found.tokens for found in gpt.model.generate(prompt, max_new_tokens=6, beams=BEAMS, n_best=BEAMS)]
        for scale, seed in [(0.49, seed) for seed in range(4)] + [(200.0, seed) for seed in range(4)]:
            random = np.random.default_rng(seed)
            with monkeypatch.context() as patch:
                _disturb(patch, scale * limit, random)
                found = gpt.model.generate(prompt, max_new_tokens=6, beams=BEAMS, n_best=BEAMS)
            same = [item.tokens for item in found] == expected
            assert same or scale > 1
            changed += not same
    assert changed


def _disturb(patch: pytest.MonkeyPatch, size: float, random: np.random.Generator) -> None:
    """Log-probabilities with an error of at most `size`."""
    from runtime.generation.ranking import Ranking

    plain = Ranking.best

    def best(self: Ranking, logits: Any, count: int) -> Any:
        noisy = logits + random.uniform(-size / 2, size / 2, logits.shape).astype(np.float32)  # and as much of the sum
        return plain(self, noisy, count)

    patch.setattr(Ranking, "best", best)


# What cannot be wrapped


def _with(bundle: Bundle, graph: str, change: Callable[[GraphSignature], GraphSignature]) -> Bundle:
    graphs = dict(bundle.manifest.graphs)
    graphs[graph] = replace(graphs[graph], signature=change(graphs[graph].signature))
    return replace(bundle, manifest=replace(bundle.manifest, graphs=graphs))


def _changed(bundle: Bundle, graph: str, name: str, shape: tuple[int | str, ...]) -> Bundle:
    """With another shape of an input."""

    def change(signature: GraphSignature) -> GraphSignature:
        inputs = tuple(TensorSpec(name, "int64", shape) if spec.name == name else spec for spec in signature.inputs)
        return replace(signature, inputs=inputs)

    return _with(bundle, graph, change)


def test_what_cannot_be_wrapped_says_why(gpt: Tiny, translator: Tiny, wrapped: Wrap, bundle: Path, tmp_path: Path) -> None:
    target = tmp_path / "x.bundle"
    without_logits = _with(gpt.model.bundle, DECODER, lambda signature: replace(signature, outputs=signature.outputs[1:]))
    manifest = translator.model.bundle.manifest
    no_first = replace(
        translator.model.bundle, manifest=replace(manifest, generation={**(manifest.generation or {}), "bos": None})
    )
    cases = [
        (Bundle.open(bundle), {}, r"gemm does not generate text: its task is .* wrap a language model or an encoder–decoder"),
        (wrapped(gpt.model.bundle, 1).bundle, {}, r"x.bundle is already wrapped; wrap the bundle it was made from"),
        (without_logits, {}, r"the decoder has no output 'logits' of a known vocabulary; optimize without --head to wrap it"),
        (
            _changed(gpt.model.bundle, DECODER, "tokens", (2, "time")),
            {},
            r"takes 2 rows at a time, .* export without --fix batch",
        ),
        (
            _changed(gpt.model.bundle, DECODER, "tokens", ("batch", 1)),
            {},
            r"takes 1 tokens at a time, .* export without --fix time",
        ),
        (no_first, {}, r"seq2seq names no token that its decoder begins with; export it with tokenizers"),
        (
            _changed(translator.model.bundle, ENCODER, "source", ("batch", 8)),
            {},
            r"takes sources of 8 tokens .* without --fix source",
        ),
        (gpt.model.bundle, {"beams": 0}, r"beams is 0, expected 1 or more"),
        (gpt.model.bundle, {"max_new_tokens": -1}, r"max_new_tokens is -1, expected 1 or more"),
    ]
    for source, options, message in cases:
        with pytest.raises(OptionError, match=message):
            wrap(source, target, **options)
        assert not target.exists()


def test_graphs_of_different_opsets_are_refused(translator: Tiny) -> None:
    parts = Parts.of(translator.model.bundle)
    for opset, message in ((19, r"opsets 19 and 20 of ai.onnx, .* one --opset"), (12, r"opset 12, .* --opset 14 or more")):
        models = {name: onnx.ModelProto.FromString(model.SerializeToString()) for name, model in parts.models.items()}
        for name in [ENCODER] if opset == 19 else models:
            models[name].opset_import[0].version = opset
        with pytest.raises(OptionError, match=message):
            generator_graph(replace(parts, models=models), 1)


def test_a_wrapped_bundle_is_not_quantized(gpt: Tiny, wrapped: Wrap) -> None:
    with pytest.raises(QuantizationRefused, match=r"is wrapped, .* quantize the bundle it was made from, then wrap that"):
        _refuse_request(wrapped(gpt.model.bundle, 1).bundle, "int8-weights", None)


# The command


def test_the_command_wraps_and_what_it_wrote_verifies_and_runs(
    gpt: Tiny, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from toolkit.cli import run

    target = tmp_path / "one.bundle"
    assert run(["wrap", str(gpt.model.bundle.root), "-o", str(target), "--beams", "2", "--max-new-tokens", "5"]) == 0
    out = capfd.readouterr().out
    assert "26 texts equal those of the loop outside the graph (2 beams)" in out
    assert run(["verify", str(target)]) == 0
    expected = gpt.model.generate("abc", max_new_tokens=5, beams=2, n_best=2)
    capfd.readouterr()
    assert run(["run", str(target), "--text", "abc"]) == 0
    assert capfd.readouterr().out == expected[0].text + "\n"
    assert run(["run", str(target), "--text", "abc", "--n-best", "2"]) == 0
    assert capfd.readouterr().out.splitlines() == [found.text for found in expected]
    assert run(["run", str(target), "--text", "abc", "--temperature", "1"]) == 2
    assert "temperature is not inside this graph" in capfd.readouterr().err
    assert Bundle.open(target).manifest.lineage[-1]["step"] == "wrap"
    with pytest.raises(OutputExists):
        wrap(gpt.model.bundle, target)


def test_the_command_ends_with_1_where_the_law_does_not_hold(
    gpt: Tiny, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from toolkit.cli import run

    monkeypatch.setattr(choosing.Greedy, "_likeliest", _second_likeliest)
    assert run(["wrap", str(gpt.model.bundle.root), "-o", str(tmp_path / "x.bundle")]) == 1
    assert capfd.readouterr().err.splitlines()[-1].startswith("error: gpt was not wrapped")
    assert run(["wrap", str(tmp_path), "-o", str(tmp_path / "x.bundle")]) == 2
