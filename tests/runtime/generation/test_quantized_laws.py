"""What the bundles hold that test_laws.py is about, why two kinds are not among them, and the laws there are beside it where a
decoder comes in two forms."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest
from onnx import GraphProto, TensorProto, numpy_helper

from exporters.graph import read_model
from exporters.quantize import built
from exporters.quantized_graphs import Part
from runtime.bundle import DECODER, MANY
from runtime.errors import QuantizationRefused
from runtime.text import EOS

from .conftest import Make
from .networks import DIES_IN_HALF_PRECISION, ROOM, Tiny, attends, generating, has_laws, prompts
from .quantized import BF16, DYNAMIC, FP16, FP16_STORED, INT4, INT8, MANY_ROWS, OF_ONE_FORM, STATIC

networks = pytest.mark.parametrize("case", generating(), ids="-".join)


@networks
@pytest.mark.parametrize("exact", [False, True])
def test_laws_are_tested_on_quantized_graphs_and_int8_has_a_form_for_many_rows(
    case: tuple[str, str], exact: bool, tiny_network: Make
) -> None:
    for precision in (INT8, INT4):
        manifest = tiny_network(*case, precision=precision, exact=exact).model.bundle.manifest
        operators = manifest.requirements["operators"]
        assert any("MatMulNBits" in operator for operator in operators)
        assert not {"RNN", "GRU", "LSTM"} & set(operators)
        assert any("MatMulIntegerToFloat" in operator for operator in operators) == (precision == INT8 and not exact)
        assert (MANY in manifest.graphs) == (precision == INT8)


@networks
@pytest.mark.parametrize("exact", [False, True])
def test_laws_are_tested_on_activations_in_int8_and_exact_ones(case: tuple[str, str], exact: bool, tiny_network: Make) -> None:
    static = tiny_network(*case, precision=STATIC, exact=exact).model.bundle.manifest
    assert ("QuantizeLinear" in static.requirements["operators"]) != exact
    if has_laws(case[0], DYNAMIC):
        dynamic = tiny_network(*case, precision=DYNAMIC, exact=exact).model.bundle.manifest
        assert any("MatMulIntegerToFloat" in operator for operator in dynamic.requirements["operators"]) != exact
        assert MANY not in dynamic.graphs


@networks
@pytest.mark.parametrize(
    ("precision", "kind"),
    [(FP16, TensorProto.FLOAT16), (FP16_STORED, TensorProto.FLOAT16), (BF16, TensorProto.BFLOAT16)],
    ids=[FP16, FP16_STORED, BF16],
)
def test_laws_are_tested_on_weights_that_are_all_in_16_bits(
    case: tuple[str, str], precision: str, kind: int, tiny_network: Make
) -> None:
    if not has_laws(case[0], precision):
        return
    bundle = tiny_network(*case, precision=precision).model.bundle
    for graph in bundle.manifest.graphs:
        weights = [tensor for tensor in read_model(bundle.graph_path(graph)).graph.initializer if prod(tensor.dims) > 1]
        assert {tensor.data_type for tensor in weights} - {TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL} == {kind}


@pytest.mark.parametrize("name", DIES_IN_HALF_PRECISION)
def test_half_precision_is_refused_where_onnxruntime_dies_of_it(name: str, tiny_network: Make, tmp_path: Path) -> None:
    with pytest.raises(QuantizationRefused, match="fp16 gives a graph that onnxruntime cannot run: .* 'encoder' died with"):
        built(tiny_network(name, "portable").model.bundle, (Part(FP16),), None, 1, tmp_path, for_size=True)


@pytest.mark.parametrize("case", [case for case in generating() if attends(case[0])], ids="-".join)
def test_int8_dynamic_without_recurrent_layers_is_int8_weights_for_many_rows(case: tuple[str, str], tiny_network: Make) -> None:
    """So that the laws of one are those of the other."""
    dynamic, many = (tiny_network(*case, precision=precision).model.bundle for precision in (DYNAMIC, MANY_ROWS))
    for graph in dynamic.manifest.graphs:
        same = MANY if graph == DECODER else graph
        one, other = read_model(dynamic.graph_path(graph)).graph, read_model(many.graph_path(same)).graph
        assert list(one.node) == list(other.node)
        assert arrays(one) == arrays(other)


def arrays(graph: GraphProto) -> dict[str, Any]:
    return {tensor.name: numpy_helper.to_array(tensor).tolist() for tensor in graph.initializer}


@pytest.mark.parametrize("precision", OF_ONE_FORM)
def test_a_beams_score_is_the_sum_that_score_gives(tiny: Tiny) -> None:
    """With activations rounded as they are; where that is left out, PyTorch says the same (test_laws.py)."""
    for prompt in prompts(6, seed=9):
        for found in tiny.model.generate(prompt, max_new_tokens=ROOM, min_new_tokens=1, beams=3, n_best=3, length_penalty=0):
            ending = [EOS] if found.finish == "eos" else []
            written = [*found.tokens, *ending]
            if tiny.is_language_model:
                scored = tiny.model.score([*prompt, *written]).token_logprobs[len(prompt) - 1 :]
            else:
                scored = tiny.model.score(found.tokens, source=prompt).token_logprobs[: len(written)]
            assert found.token_logprobs == pytest.approx(scored[: len(found.tokens)], abs=tiny.noise)
            assert found.score == pytest.approx(sum(scored), abs=2 * tiny.noise)


@networks
def test_texts_are_scored_in_the_form_for_many_rows_alone_and_in_a_batch(case: tuple[str, str], tiny_network: Make) -> None:
    both, many = tiny_network(*case, precision=INT8), tiny_network(*case, precision=MANY_ROWS)
    texts = prompts(5, longest=9, seed=3)
    source = None if both.is_language_model else texts[0]
    texts = [[*text, 5, 6] for text in texts]
    alone = [both.model.score(text, source) for text in texts]
    for together in (both.model.score(texts, source), many.model.score(texts, source)):
        for score, expected in zip(together, alone, strict=True):
            assert score.token_logprobs == pytest.approx(expected.token_logprobs, abs=1e-4)
    assert both.model._scorer.decoder is both.model.sessions[MANY]
