"""The user's own network: what goes in, what comes out, which sizes may vary, and what is said when it cannot be exported."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

import runtime
from exporters import dynamic_axes
from exporters import export as export_module
from exporters.export import export
from exporters.exportable import Exportable, GraphSource, named_outputs
from exporters.source import find_source
from runtime.errors import EdgekitError, ParityRefused, SourceError

from . import odd_networks


def user(name: str) -> Exportable:
    torch.manual_seed(0)
    file = "odd_networks" if hasattr(odd_networks, name) else "untraceable_networks"
    return find_source(f"{Path(__file__).with_name(file)}.py:{name}")


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory):
    """Exports by name, each made once: the network, the runtime's model and what was said on the way."""

    @cache
    def make(name: str):
        network = user(name)
        said: list[str] = []
        report = export(network, tmp_path_factory.mktemp(name) / "x.bundle", progress=said.append)
        return network, runtime.load(report.bundle.root), said

    return make


def shapes(model, which: str = "inputs") -> dict[str, tuple]:
    return {spec.name: spec.shape for spec in getattr(model.bundle.graph()[1].signature, which)}


def assert_agrees(network: Exportable, model, **sizes: int) -> None:
    """PyTorch and the bundle give the same on new values, at these sizes of the named axes."""
    generator = torch.Generator().manual_seed(1)
    inputs = {}
    for name, example in network.graph.inputs.items():
        dims = [sizes.get(dim, 2) if isinstance(dim, str) else dim for dim in shapes(model)[name]]
        inputs[name] = torch.randn(dims, generator=generator) if example.is_floating_point() else torch.ones(dims).to(example)
    expected = network.graph.call(inputs)
    actual = model.run({name: tensor.numpy() for name, tensor in inputs.items()})
    assert list(actual) == list(expected)
    for name, tensor in expected.items():
        np.testing.assert_allclose(actual[name], tensor.numpy(), rtol=1e-4, atol=1e-5)


# Which sizes may vary


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("image", {"image": {0: "batch", 2: "height", 3: "width"}}),
        ("flattened_image", {"input": {0: "batch"}}),  # 28 and 29 pixels pool to the same 14
        ("full_length_tokens", {"tokens": {0: "batch", 1: "time"}, "mask": {0: "batch", 1: "time"}}),  # no size above 6
        ("square", {"matrix": {0: "batch", 1: "matrix_1", 2: "matrix_1"}}),
        ("broadcast", {"x": {0: "batch", 1: "x_1"}, "shift": {0: "batch"}}),
        ("reduced_one", {"x": {0: "batch", 2: "x_2"}}),
        ("split", {"x": {0: "batch"}}),
        ("idle_mask", {"x": {0: "batch", 1: "x_1"}, "mask": {0: "batch", 1: "x_1"}}),
        ("infinite_elsewhere", {"x": {1: "x_1"}}),
        ("nested_output", {"x": {0: "batch"}}),  # the deviation of one value is NaN
        ("loop_over_value", {"x": {0: "x_0", 1: "x_1"}}),  # a sum over everything has no batch
        ("listed_axes", {"input": {0: "batch", 1: "input_1"}}),
        ("exact", {}),
    ],
)
def test_the_axes_that_may_vary_are_found(name: str, axes: dict) -> None:
    assert user(name).graph.dynamic_axes == axes


def test_axes_that_must_be_equal_share_a_name_and_others_do_not() -> None:
    """Batch, heads and both lengths of an attention are free; keys and values, queries and keys have one size in common."""
    query, key, value = user("attention").graph.dynamic_axes.values()
    assert query[0] == key[0] == value[0] == "batch"
    assert query[1] == key[1] == value[1]
    assert query[2] != key[2] == value[2]
    assert query[3] == key[3] != value[3]


def test_keys_and_values_must_be_as_many_although_a_fused_kernel_would_not_mind() -> None:
    trials = dynamic_axes.Trials(user("attention").graph)
    key, value = (dynamic_axes.Axis(name, 2, 5) for name in ("key", "value"))
    assert trials.runs({key: 4}) is None
    assert trials.runs({key: 4, value: 4}) is not None


def test_what_was_found_is_said() -> None:
    found = "dynamic axes found: image[0] batch, image[2] height, image[3] width; declare dynamic_axes to override"
    assert user("image").notes == (found,)
    assert "x[0] and 4 more batch" in user("nested_input").notes[-1]
    assert "none; the network fails on other values" in user("exact").notes[-1]
    assert user("listed_axes").notes == ()


def test_of_a_slow_network_only_the_batch_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamic_axes, "_SLOW", -1.0)
    network = user("image")
    assert network.graph.dynamic_axes == {"image": {0: "batch"}}
    assert "only the batch was tried, as a run takes" in network.notes[-1]


def test_the_search_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamic_axes, "_MOST_TRIALS", 7)
    network = user("image")
    assert network.graph.dynamic_axes == {"image": {0: "batch"}}
    assert "stopped after 7 runs" in network.notes[-1]


def test_a_found_axis_that_tracing_freezes_is_fixed_and_named(exported) -> None:
    network, model, said = exported("frozen")
    assert shapes(model) == {"x": ("batch", 5, "x_2")}
    (text,) = (text for text in said if text.startswith("fixed at the example's size: time (x[1]); PyTorch runs"))
    assert "at odd_networks.py" in text
    assert "`for step in range(x.shape[1]):`" in text
    assert_agrees(network, model, batch=6, x_2=7)


def test_a_found_axis_at_which_the_graph_is_wrong_is_fixed_and_named(exported) -> None:
    network, model, said = exported("pooled")
    assert shapes(model) == {"image": ("batch", 1, 8, 8)}
    assert any("fixed at the example's size: height (image[2]), width (image[3]); PyTorch runs" in text for text in said)
    assert_agrees(network, model, batch=5)


@pytest.mark.parametrize(
    ("name", "line"),
    [("frozen_and_declared", r" at odd_networks.py:\d+ `for step in range\(x.shape"), ("number_in_reshape", "")],
)
def test_a_declared_axis_that_tracing_freezes_is_an_error(name: str, line: str, tmp_path: Path) -> None:
    with pytest.raises(
        SourceError, match=rf"one size only{line}.*: axis 1 of 'x' is always 5; .* leave the axis out of dynamic_axes"
    ):
        export(user(name), tmp_path / "x.bundle")


def test_a_graph_that_is_wrong_at_every_size_is_refused_after_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Giving up axes ends, does not hide a graph that is wrong at the example's own sizes, and says nothing on the way."""
    tried, said = [], []

    def refuse(self: object, graph: GraphSource, **options: object) -> None:
        names = sorted({name for entry in graph.dynamic_axes.values() for name in entry.values()})
        tried.append(names)
        refusal = ParityRefused(f"wrong with {names}")
        refusal.failed_sizes = ({"batch": 2, "height": 8, "width": 9},) if "width" in names else ({"batch": 7},)
        raise refusal

    monkeypatch.setattr(export_module.Prover, "__call__", refuse)
    with pytest.raises(ParityRefused, match=r"wrong with \[\]"):
        export(user("image"), tmp_path / "x.bundle", progress=said.append)
    assert tried == [["batch", "height", "width"], ["batch", "height"], []]
    assert not any("fixed" in text for text in said)


# What goes in and what comes out


def test_fields_of_dataclasses_become_outputs(exported) -> None:
    network, model, said = exported("dataclass_output")
    assert shapes(model, "outputs") == {"boxes": ("batch", "x_1"), "scores": ("batch",)}
    assert "output 'extra' is None and left out" in said
    assert_agrees(network, model, batch=5, x_1=4)


def test_named_tuples_lists_and_dicts_nest(exported) -> None:
    network, model, _ = exported("nested_output")
    assert list(shapes(model, "outputs")) == ["pair.mean", "pair.deviation", "hidden.output_0", "hidden.output_2.last"]
    assert_agrees(network, model, batch=5)


def test_a_result_that_is_both_a_dict_and_a_dataclass_gives_its_items() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    result = outputs.BaseModelOutput(last_hidden_state=torch.zeros(1), hidden_states=(torch.ones(1),))
    assert [name for name, _ in named_outputs(result)] == ["last_hidden_state", "hidden_states.output_0"]


def test_nested_examples_become_inputs_by_path_and_flags_become_constants(exported) -> None:
    network, model, said = exported("nested_input")
    past = [f"past_key_values.{layer}.{part}" for layer in (0, 1) for part in (0, 1)]
    assert list(shapes(model)) == ["x", *past]
    assert {"scale=0.5 is a constant of the graph", "double=True is a constant of the graph"} <= set(said)
    assert_agrees(network, model, batch=3, time=1, past_key_values_0_0_1=8, x_2=6)


def test_nested_examples_by_keyword_keep_their_order_and_constants() -> None:
    network = user("nested_keywords")
    assert list(network.graph.inputs) == ["past_key_values.0.0", "past_key_values.0.1", "x"]
    key, value, x = network.graph.inputs.values()
    total = (2 * torch.cat([key, x], 1) - torch.cat([value, 3 * x], 1)).sum(1)
    torch.testing.assert_close(network.graph.call(network.graph.inputs)["output_0"], total)


def test_input_names_name_examples_by_position() -> None:
    assert list(user("input_names").graph.inputs) == ["left", "right"]


def test_one_example_for_two_arguments_is_copied_apart(exported) -> None:
    network, model, said = exported("same_tensor")
    assert "examples 'a' and 'b' were the same tensor; copied apart" in said
    a, b = (np.full((2, 4), value, np.float32) for value in (1, 10))
    np.testing.assert_array_equal(model.run({"a": a, "b": b})["output"], a - 2 * b)
    assert_agrees(network, model, batch=5)


def test_examples_that_share_memory_are_copied_apart() -> None:
    network = user("shared_memory")
    assert "examples 'a' and 'b' share memory; copied apart" in network.notes
    a, b = network.graph.inputs.values()
    assert a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr()


def test_a_network_that_works_in_place_leaves_its_example_alone() -> None:
    assert user("works_in_place").graph.inputs["x"].eq(0).all()


def test_a_network_may_print_and_leave_something_behind(exported, capsys: pytest.CaptureFixture[str]) -> None:
    network, model, _ = exported("leaves_something_behind")
    assert "attending" not in capsys.readouterr().out
    assert_agrees(network, model, batch=5)


def test_outputs_whose_size_depends_on_values_are_exported(exported) -> None:
    network, model, _ = exported("sizes_from_values")
    assert_agrees(network, model, batch=5, x_1=6)


# What is said when it cannot be


def line(text: str) -> str:
    return rf" at untraceable_networks.py:\d+ `{text}`"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("number_output", r"returned a float as 'loss'; .* leave it out, or return torch.tensor\(0.5\)"),
        ("text_output", "returned a str as 'kind'; .* return only tensors"),
        ("no_output", "returned a tuple without any tensor; a graph must have an output"),
        ("too_few_input_names", r"gives 2 example inputs but input_names \['left'\]; give one name for each"),
        ("names_for_a_dict", "gives input_names, but its example inputs are a dict, which has names already"),
        ("array_input", r"example input 'b' of .* is a ndarray; expected a tensor: torch.as_tensor"),
        ("sparse_input", "example input 'b' of .* is sparse_coo; .* give it with .to_dense"),
        ("other_device", r"example input 'b' of .* is on device meta; give it on the CPU, with .cpu\(\)"),
        ("float64_example", "example 'input' is torch.float64 and the weights are torch.float32: give it as"),
        ("module_on_meta", r"a network on device meta \(weight\); export runs on the CPU"),
        ("scripted", "returned a TorchScript module, .* return the nn.Module that was given to torch.jit.script"),
        ("quantized", r"quantized already \(0 is a quantized Linear\); return the float network, .* edgekit quantize"),
        ("counts", rf"changes self.calls in forward{line('self.calls .= 1')} and answers .* take it as an input and return"),
        ("counts_in_python", rf"changes self.calls in forward{line('self.calls .= 1')} and answers differently"),
    ],
)
def test_what_cannot_be_traced_is_refused_before_tracing(name: str, message: str) -> None:
    with pytest.raises(EdgekitError, match=message) as caught:
        user(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("branch", rf"branches on values of a tensor{line('if x.sum.. > 0:')}, .* use torch.where instead of if"),
        ("branch_deep", rf"branches on values of a tensor{line('if x.sum.. > 0:')}"),
        ("exact", r"branches on values of a tensor at odd_networks.py:\d+ `if not torch.equal"),
        (
            "loop_over_value",
            rf"loops as often as values of a tensor say{line('for step in range.*')}, .* mask with torch.where",
        ),
        ("item", rf"makes Python numbers of a tensor's values{line('width = int.*')}, .* or take sizes from .shape"),
        ("sorted_values", rf"makes Python numbers of a tensor's values{line('return x . sorted.*tolist.*')}"),
        ("numpy_inside", rf"leaves PyTorch for numpy{line('return x .*np.interp.*')}, .* write that with torch functions"),
        ("no_operator", rf"uses aten::_linalg_svd{line('return torch.linalg.svdvals.x.')}, which has no ONNX operator"),
        ("python_random", "differs between two runs on the same inputs.*remove the randomness"),
    ],
)
def test_what_no_graph_can_hold_is_explained_with_its_line(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(EdgekitError, match=message) as caught:
        export(user(name), tmp_path / "x.bundle")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []
