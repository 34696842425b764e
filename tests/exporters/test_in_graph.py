"""Generation inside the graph gives the texts of the loop outside it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

import runtime
from exporters.quantized_graphs import convert, draft
from exporters.targets.in_graph import Parts, generator_graph
from runtime.bundle import DECODER, ENCODER, GENERATOR, MANY, Bundle, Tolerance, write_bundle
from runtime.model import Model
from runtime.text import PAD
from runtime.verify import verify_bundle
from tests.runtime.generation.conftest import Make
from tests.runtime.generation.networks import ROOM, Tiny, assert_same, flat, generating, network, opened, prompts, write

from .conftest import BEAMS, Wrap

QUANTIZED = [("gpt", "onnxruntime"), ("seq2seq-attention", "portable")]


def assert_lawful(host: Model, graph: Model, beams: int, **options: Any) -> None:
    """Alone and in ragged batches, prompts give the same texts both ways."""
    ended = 0
    for some in (*([prompt] for prompt in prompts(4, seed=1)), prompts(3, seed=2), prompts(9, longest=12, seed=3)):
        for room in (1, ROOM):
            asked: dict[str, Any] = {"max_new_tokens": room, "n_best": beams, **options}
            expected = host.generate(some, beams=beams, **asked)
            for one, other in zip(graph.generate(some, **asked), expected, strict=True):
                assert_same(one, other)
                ended += sum(item.finish == "eos" for item in flat(other))
    assert ended > 3, "texts must end, and not all at once"


@pytest.mark.parametrize("beams", [1, BEAMS])
@pytest.mark.parametrize("case", generating(), ids="-".join)
def test_in_graph_generation_equals_the_host_loop(
    case: tuple[str, str],
    beams: int,
    tiny_network: Make,
    wrapped: Wrap,
) -> None:
    tiny = tiny_network(*case)
    graph = wrapped(tiny.model.bundle, beams)
    assert list(graph.bundle.manifest.graphs) == [GENERATOR]
    assert_lawful(tiny.model, graph, beams)
    assert verify_bundle(graph.bundle.root), "the goldens are the host's answers"


def quantized(tiny: Tiny, folder: Path, *, many: bool = True) -> Bundle:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("exporters.quantizers.scheme.FEWEST_WEIGHTS", 0)  # networks as tiny as these are not worth it
        converted = convert(tiny.model.bundle, "int8-weights", (), (), None)
    manifest, files = draft(tiny.model.bundle, converted if many else converted.without(MANY), "int8-weights", folder)
    tolerance = {"logits": Tolerance(0.1, 0.1, "of the quantization")}
    manifest = replace(manifest, tolerance={name: tolerance for name in (DECODER, MANY) if name in manifest.graphs})
    return write_bundle(folder / "quantized.bundle", manifest, files)


@pytest.mark.parametrize("beams", [1, BEAMS])
@pytest.mark.parametrize("case", QUANTIZED, ids="-".join)
def test_quantized_networks_obey_it_too(
    case: tuple[str, str],
    beams: int,
    tiny_network: Make,
    wrapped: Wrap,
    tmp_path: Path,
) -> None:
    bundle = quantized(tiny_network(*case), tmp_path)
    assert MANY in bundle.manifest.graphs
    graph = wrapped(bundle, beams)
    assert graph.bundle.manifest.precision == "int8-weights"
    assert_lawful(runtime.load(bundle.root, device="cpu", threads=1), graph, beams)
    assert verify_bundle(graph.bundle.root)


def test_without_a_form_for_prompts_it_obeys_too(gpt: Tiny, wrapped: Wrap, tmp_path: Path) -> None:
    bundle = quantized(gpt, tmp_path, many=False)
    assert_lawful(runtime.load(bundle.root, device="cpu", threads=1), wrapped(bundle, 1), 1)


def test_more_beams_than_the_vocabulary_has_tokens(gpt: Tiny, translator: Tiny, wrapped: Wrap) -> None:
    for tiny in (gpt, translator):
        graph = wrapped(tiny.model.bundle, 12)
        for room in (1, 2, 5):
            for prompt in prompts(3, seed=4):
                expected = tiny.model.generate(prompt, max_new_tokens=room, beams=12, n_best=12)
                assert_same(graph.generate(prompt, max_new_tokens=room, n_best=12), expected)
                assert room > 1 or len(expected) == 8, "all tokens but padding"


def test_a_network_without_padding_takes_prompts_of_equal_length_together(tmp_path: Path, wrapped: Wrap) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(generating.__globals__["SIZES"], "pad", -1)
        source = network("gpt", "onnxruntime")
    write(source, tmp_path / "x.bundle")
    tiny = opened(source, tmp_path / "x.bundle")
    assert (tiny.model.bundle.manifest.generation or {})["pad"] is None
    assert_lawful(tiny.model, wrapped(tiny.model.bundle, BEAMS), BEAMS)


# The graph


@pytest.mark.parametrize("beams", [1, BEAMS])
def test_the_raw_graph_takes_padding_at_either_end_and_pads_what_it_gives(gpt: Tiny, wrapped: Wrap, beams: int) -> None:
    graph = wrapped(gpt.model.bundle, beams)
    some = prompts(5, seed=5)
    longest = max(map(len, some)) + 1
    right = np.array([prompt + [PAD] * (longest - len(prompt)) for prompt in some])
    left = np.array([[PAD] * (longest - len(prompt)) + prompt for prompt in some])
    outputs = [graph.run({"prompt": batch, "max_new_tokens": np.array(ROOM)}) for batch in (left, right)]
    for name, array in outputs[0].items():
        np.testing.assert_array_equal(array, outputs[1][name])
    shape = (5,) if beams == 1 else (5, beams)
    tokens, lengths = outputs[0]["tokens"], outputs[0]["lengths"]
    assert lengths.shape == outputs[0]["score"].shape == shape
    assert tokens.shape == outputs[0]["logprobs"].shape == (*shape, lengths.max())
    assert lengths.min() < lengths.max()
    behind = np.arange(lengths.max()) >= lengths[..., None]
    assert (tokens[behind] == PAD).all()
    assert not (tokens[~behind] == PAD).any()
    assert (outputs[0]["logprobs"][behind] == 0).all()
    expected = outputs[0]["logprobs"].sum(axis=-1) / lengths
    np.testing.assert_allclose(outputs[0]["score"], expected, rtol=1e-5)


@pytest.mark.parametrize("beams", [1, BEAMS])
@pytest.mark.parametrize("name", ["gru", "seq2seq-attention"])
def test_the_loop_ends_when_every_row_has(
    name: str,
    beams: int,
    tiny_network: Make,
    wrapped: Wrap,
) -> None:
    tiny = tiny_network(name, "portable")
    model = onnx.load(str(wrapped(tiny.model.bundle, beams).bundle.graph_path()))
    loop = next(node for node in model.graph.node if node.op_type == "Loop")
    turns = loop.output[-1] if beams == 1 else loop.output[3]  # what is collected, or the beams' texts: one more every turn
    model.graph.output.append(onnx.helper.make_empty_tensor_value_info(turns))
    session = onnxruntime.InferenceSession(model.SerializeToString())
    some = [p for p in prompts(40, seed=6) if tiny.model.generate(p, max_new_tokens=60, beams=beams).finish == "eos"][:4]
    batch = np.array([prompt + [PAD] * (12 - len(prompt)) for prompt in some])
    taken = session.run([turns], {model.graph.input[0].name: batch, "max_new_tokens": np.array(400)})[0]
    assert len(some) == 4
    assert 1 < taken.shape[0 if beams == 1 else 1] < 200


def test_weights_are_stored_once_and_outside_the_loop(tiny_network: Make) -> None:
    bundle = tiny_network("transformer", "portable").model.bundle
    model, _ = generator_graph(Parts.of(bundle), BEAMS)
    onnx.checker.check_model(model, full_check=True)
    body = next(node for node in model.graph.node if node.op_type == "Loop").attribute[0].g
    assert not body.initializer
    kept = [tensor.raw_data for tensor in model.graph.initializer if len(tensor.raw_data) > 64]
    assert len(kept) == len(set(kept))
    before = {
        tensor.raw_data
        for name in (ENCODER, DECODER)
        for tensor in onnx.load(str(bundle.graph_path(name))).graph.initializer
        if len(tensor.raw_data) > 64
    }
    assert before <= set(kept)


def test_only_standard_operators_in_the_portable_profile(gpt: Tiny, wrapped: Wrap) -> None:
    requirements = wrapped(gpt.model.bundle, BEAMS).bundle.manifest.requirements
    assert list(requirements["opsets"]) == ["ai.onnx"]
    assert "Loop" in requirements["operators"]
