"""The graph of the attention to the source: what it gives, what it shares, and where it is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray

import runtime
from exporters.alignment import alignment_of
from exporters.check import check
from exporters.export import export
from exporters.fix import fix_sizes
from exporters.graph import read_model
from exporters.optimize import optimize
from exporters.pass_trials import trials_of, workload_of
from exporters.source import find_source
from runtime.bundle import Bundle
from runtime.errors import OptionError
from runtime.session import Session
from runtime.verify import verify_bundle
from toolkit.benchmark import default_batches
from toolkit.cli import run

from ..aligned_networks import NAMES, SIZES, aligned_network, attention_in_pytorch, network_of

Shared = Callable[[str, Callable[[Path], object]], Path]


@pytest.fixture(params=NAMES)
def bundle(request: pytest.FixtureRequest, shared: Shared) -> Bundle:
    name = request.param
    folder = shared(
        f"aligned-{name}", lambda folder: export(aligned_network(name, attention=True), folder / f"{name}.bundle", force=True)
    )
    return Bundle.open(folder / f"{name}.bundle")


def name_of(bundle: Bundle) -> str:
    return bundle.root.name.removesuffix(".bundle")


def large_weights(bundle: Bundle, graph: str) -> set[tuple[str, str]]:
    """Where the weights that are worth sharing are: (file, offset), or (graph, name) if they are in the graph alone."""
    model = onnx.load(bundle.graph_path(graph), load_external_data=False)
    found = set()
    for tensor in model.graph.initializer:
        if np.prod(tensor.dims) * 4 >= 1024:
            inside = tensor.data_location != onnx.TensorProto.EXTERNAL
            found.add((graph, tensor.name) if inside else (tensor.external_data[0].value, tensor.external_data[1].value))
    return found


def test_the_graph_takes_tokens_and_memory_and_gives_attention(bundle: Bundle) -> None:
    signature = bundle.manifest.graphs["alignment"].signature
    inputs = [spec.name for spec in signature.inputs]
    decoder = [spec.name for spec in bundle.manifest.graphs["decoder"].signature.inputs]
    assert inputs[0] == "tokens"
    assert set(inputs) <= set(decoder)
    if name_of(bundle) == "transformer":
        assert inputs == ["tokens", "memory.mask", "memory.0.key", "memory.0.value", "memory.1.key"]
        assert [str(spec) for spec in signature.outputs] == ["attention: float32[batch, time, source]"]
        assert not signature.states
    else:
        assert inputs == ["tokens", "memory.key", "memory.value", "memory.mask", "past.hidden"]
        assert str(signature.outputs[0]) == "attention: float32[batch, 1, source]"
        assert [state.output for state in signature.states] == ["present.hidden"]


def test_it_has_goldens_a_tolerance_and_standard_operators_and_shares_the_decoder_s_weights(bundle: Bundle) -> None:
    assert [golden.graph for golden in bundle.manifest.goldens].count("alignment") == 3
    tolerance = bundle.manifest.tolerance["alignment"]["attention"]
    assert tolerance.measured <= tolerance.allowed < 1e-4
    assert "float64" in tolerance.derived
    model = read_model(bundle.graph_path("alignment"))
    assert all(node.domain in ("", "ai.onnx") for node in model.graph.node)
    large = large_weights(bundle, "alignment")
    assert len(large) >= 2
    assert large <= large_weights(bundle, "decoder")
    assert verify_bundle(bundle.root)


def test_the_graph_gives_pytorch_s_own_weights_on_ragged_rows(bundle: Bundle) -> None:
    """The last layer's, and no other's: the layers of the Transformer are told apart by far more than the tolerance."""
    network = network_of(aligned_network(name_of(bundle)))
    sessions = runtime.load(bundle.root).sessions
    for left in (False, True) if name_of(bundle) == "transformer" else (False,):  # recurrent encoders take padding on the right
        compare_with_pytorch(network, sessions, *ragged(left))


def ragged(left: bool) -> tuple[NDArray[Any], NDArray[Any]]:
    """Source (3, 6) and tokens (3, 5), padded at one end."""
    random = np.random.default_rng(3)
    source, fed = random.integers(4, 18, (3, 6)), random.integers(4, 18, (3, 5))
    for array, lengths in ((source, (6, 3, 1)), (fed, (5, 2, 4))):
        for row, length in zip(array, lengths, strict=True):
            row[slice(0, len(row) - length) if left else slice(length, None)] = 0
    return source, fed


def compare_with_pytorch(network: Any, sessions: Mapping[str, Session], source: NDArray[Any], fed: NDArray[Any]) -> None:
    expected = attention_in_pytorch(network, source, fed)
    memory = sessions["encoder"].run({"source": source})
    signature = sessions["alignment"].signature
    given = {spec.name: memory[spec.name] for spec in signature.inputs if spec.name in memory}
    if signature.states:
        found = []
        for step in range(fed.shape[1]):
            outputs = sessions["alignment"].run({"tokens": fed[:, step : step + 1], **given})
            given["past.hidden"] = outputs["present.hidden"]
            found.append(outputs["attention"])
        attention = np.concatenate(found, axis=1)
    else:
        attention = sessions["alignment"].run({"tokens": fed, **given})["attention"]
        other = attention_in_pytorch(network, source, fed, layer=0)
        assert np.abs(other - expected)[fed != 0].max() > 0.05
    np.testing.assert_allclose(attention[fed != 0], expected[fed != 0], atol=1e-5)
    assert np.isfinite(attention).all()
    np.testing.assert_allclose(attention.sum(axis=-1), 1, atol=1e-5)
    hidden = np.broadcast_to((source == 0)[:, None], attention.shape)
    assert (attention[hidden] == 0).all()


def test_padding_leaves_the_states_of_a_row_as_they_were() -> None:
    network = network_of(aligned_network("seq2seq-attention"))
    memory, state = network.encode(torch.tensor([[5, 6, 7], [8, 9, 0]]))
    _, after = alignment_of(network).eval()(torch.tensor([[4], [0]]), *memory, *state)
    assert not torch.equal(after[:, 0], state[0][:, 0])
    assert torch.equal(after[:, 1], state[0][:, 1])


def test_of_three_layers_with_another_norm_it_is_the_last_one_s() -> None:
    settings = {**SIZES["transformer"], "decoder_layers": 3, "norm": "post", "vocabulary": 20, "target_vocabulary": 18}
    network = network_of(find_source("transformer", settings))
    source, tokens = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[2, 9, 4]])
    (mask, *caches), _ = network.encode(source)
    with torch.inference_mode():
        found = alignment_of(network).eval()(tokens, mask, *caches[:-1]).numpy()
    np.testing.assert_allclose(found, attention_in_pytorch(network, source, tokens), atol=1e-6)
    assert np.abs(found - attention_in_pytorch(network, source, tokens, layer=1)).max() > 1e-3


def test_check_and_optimize_take_such_a_bundle(bundle: Bundle, tmp_path: Path) -> None:
    assert "alignment" in check(bundle.root).figures
    report = optimize(bundle, tmp_path / "fast.bundle")
    assert {result.graph for result in report.passes} == {"encoder", "decoder", "alignment"}
    fast = Bundle.open(tmp_path / "fast.bundle")
    assert list(fast.manifest.graphs) == ["encoder", "decoder", "alignment"]
    assert verify_bundle(fast.root)
    assert default_batches((str(fast.root),)) == (1, 8, 32)


def test_what_optimize_times_runs_on_every_graph(bundle: Bundle) -> None:
    for name, session in runtime.load(bundle.root).sessions.items():
        model = read_model(bundle.graph_path(name))
        for sizes, inputs in workload_of(trials_of(bundle, name, model), model):
            assert session.signature.check_feeds(inputs) == sizes
            session.run(inputs)


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("seq2seq", "an encoder–decoder without attention"),
        ("gpt", "gpt, which is no encoder–decoder of the catalogue"),
        ("bert", "bert, which is no encoder–decoder of the catalogue"),
        ("lenet", "lenet, which is no encoder–decoder of the catalogue"),
        ("package.module:build", "package.module:build, which is no encoder–decoder of the catalogue"),
    ],
)
def test_a_network_that_does_not_look_at_a_source_is_refused(source: str, what: str) -> None:
    with pytest.raises(OptionError) as refusal:
        find_source(source, attention=True)
    assert str(refusal.value) == (
        f"--attention adds the weights with which a decoder looks at its source, and this is {what}; leave --attention out, "
        "or take transformer or seq2seq-attention"
    )


def test_a_fixed_number_of_tokens_contradicts_a_graph_for_whole_texts() -> None:
    with pytest.raises(OptionError, match="--fix time=1 with --attention: .* a whole text at once; leave out one of them"):
        fix_sizes(aligned_network("transformer", attention=True), {"time": 1})
    fix_sizes(aligned_network("transformer"), {"time": 1})
    fix_sizes(aligned_network("transformer", attention=True), {"batch": 1})


def test_the_command_adds_the_graph_and_refuses_it_for_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"vocabulary": 20, "target_vocabulary": 18, **SIZES["seq2seq-attention"]}
    sets = [f"--set={name}={value}" for name, value in settings.items()]
    assert run(["export", "seq2seq-attention", "-o", str(tmp_path / "x.bundle"), "--attention", *sets]) == 0
    assert "alignment:\nattention: error" in capsys.readouterr().out
    assert "alignment" in Bundle.open(tmp_path / "x.bundle").manifest.graphs
    assert run(["export", "x.onnx", "-o", str(tmp_path / "y.bundle"), "--attention"]) == 2
    assert "--attention and --thorough are for networks; a .onnx file is what it is" in capsys.readouterr().err
