"""Export proves itself: right graphs are written, wrong ones are not, and the reason is told."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import runtime
from exporters import export as export_module
from exporters.export import export, refuse_failures
from exporters.parity import derive_tolerance, fresh_inputs, fuzz_cases, fuzz_sizes, precise_reference, torch_reference
from exporters.source import find_source
from exporters.trace import model_of
from runtime.bundle import Bundle
from runtime.errors import EdgekitError, ParityRefused, SourceError, UnknownName
from runtime.signature import GraphSignature, TensorSpec

from ..helpers import leftovers

FILE = Path(__file__).with_name("user_networks.py")


def user(name: str):
    return find_source(f"{FILE}:{name}")


@pytest.mark.parametrize("example", [1, 2, 3, 7, 64, 224])
def test_at_least_five_sizes_other_than_the_examples_are_tried(example: int) -> None:
    sizes = fuzz_sizes(example)
    assert len(set(sizes)) >= 5
    assert example not in sizes
    assert {1, 2} - {example} <= set(sizes)
    assert max(sizes) > 2 * example


def test_every_axis_is_varied_alone_and_all_together() -> None:
    cases = fuzz_cases({"batch": 3, "time": 5})
    assert any(case["batch"] != 3 and case["time"] == 5 for case in cases)
    assert any(case["batch"] == 3 and case["time"] != 5 for case in cases)
    assert any(case["batch"] != 3 and case["time"] != 5 for case in cases)
    assert fuzz_cases({}) == [{}, {}, {}]  # nothing to vary but the values


def test_fresh_inputs_stay_in_range_and_are_new() -> None:
    signature = GraphSignature((TensorSpec("t", "int64", ("batch", 3)), TensorSpec("x", "float32", ("batch", 2))), ())
    examples = {"t": np.array([[4, 7, 9]]), "x": np.zeros((1, 2), np.float32)}
    inputs = fresh_inputs(signature, examples, {"batch": 5}, seed=0)
    assert inputs["t"].shape == (5, 3)
    assert set(inputs["t"].ravel()) <= {4, 7, 9}
    assert inputs["x"].std() > 0


@pytest.mark.parametrize("name", ["tuple_inputs", "aliased_inputs", "dict_inputs"])
def test_inputs_keep_their_names_and_their_roles(name: str, tmp_path: Path) -> None:
    network = user(name)
    report = export(network, tmp_path / "x.bundle")
    feeds = {key: np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32) for key in ("left", "right")}
    feeds["right"] = feeds["right"] * 3
    expected = network.graph.module(torch.from_numpy(feeds["left"]), torch.from_numpy(feeds["right"])).detach().numpy()
    actual = runtime.load(report.bundle.root).run(feeds)["output"]
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


def test_outputs_in_dicts_and_tuples_get_names(tmp_path: Path) -> None:
    report = export(user("dict_outputs"), tmp_path / "x.bundle")
    assert [spec.name for spec in report.bundle.graph()[1].signature.outputs] == ["double", "parts.output_0", "parts.output_1"]


def test_tokens_with_two_dynamic_axes(tmp_path: Path) -> None:
    report = export(user("tokens"), tmp_path / "x.bundle")
    (spec,) = report.bundle.graph()[1].signature.inputs
    assert (spec.name, spec.dtype, spec.shape) == ("tokens", "int64", ("batch", "time"))
    assert report.bundle.manifest.name == "embedder"
    tried = {axis: {case.sizes[axis] for case in report.cases} for axis in ("batch", "time")}
    assert all(len(sizes) >= 5 for sizes in tried.values())


def test_convolution_with_moving_height_and_width(tmp_path: Path) -> None:
    network = user("normed")
    report = export(network, tmp_path / "x.bundle")
    image = torch.randn(2, 3, 13, 21)
    expected = network.graph.module.eval()(image).detach().numpy()
    actual = runtime.load(report.bundle.root).run({"image": image.numpy()})["output"]
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
    assert any("height=1" in text for text in report.refused_by_reference)  # PyTorch itself refuses a 1-pixel image


@pytest.mark.parametrize("name", ["any_inputs", "any_keywords", "scalar_input", "masked", "same_name", "lstm"])
def test_networks_of_many_forms_are_exported(name: str, tmp_path: Path) -> None:
    network = user(name)
    report = export(network, tmp_path / "x.bundle")
    signature = report.bundle.graph()[1].signature
    inputs = fresh_inputs(
        signature, {key: tensor.numpy() for key, tensor in network.graph.inputs.items()}, {"batch": 9}, seed=5
    )
    expected = network.graph.call({key: torch.from_numpy(array) for key, array in inputs.items()})
    actual = runtime.load(report.bundle.root).run(inputs)
    for output, tensor in expected.items():
        np.testing.assert_allclose(actual[output], tensor.numpy(), rtol=1e-4, atol=1e-5)


def test_whole_numbers_must_be_equal(tmp_path: Path) -> None:
    assert export(user("whole_numbers"), tmp_path / "x.bundle").tolerance["output"].allowed == 0


def test_the_precision_is_that_of_the_weights(tmp_path: Path) -> None:
    assert export(user("double_precision"), tmp_path / "x.bundle").bundle.manifest.precision == "fp64"


def test_what_a_users_code_prints_stays_out_of_the_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    user("prints")
    printed = capsys.readouterr()
    assert "HELLO" not in printed.out
    assert "HELLO" in printed.err


def test_a_batch_written_as_a_number_is_refused_when_declared_dynamic(tmp_path: Path) -> None:
    with pytest.raises((ParityRefused, SourceError), match=r"batch|x"):
        export(user("baked"), tmp_path / "x.bundle")
    assert list(tmp_path.iterdir()) == []


def test_a_network_for_one_batch_size_is_exported_as_such(tmp_path: Path) -> None:
    report = export(user("fixed"), tmp_path / "x.bundle")
    assert report.bundle.graph()[1].signature.inputs[0].shape[0] == 3


def test_a_network_with_float32_written_into_it_still_gets_a_derived_tolerance(tmp_path: Path) -> None:
    report = export(user("hard_float32"), tmp_path / "x.bundle")
    assert "disturbed" in report.tolerance["output"].derived or "float64" in report.tolerance["output"].derived
    assert 0 < report.tolerance["output"].allowed < 1e-4


def test_a_wrong_graph_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault planted in the translated weights is found, at the smallest size, and nothing is left behind."""
    network = find_source("linear")

    def wrong(*args, **options):
        model = model_of(*args, **options)
        weight = next(tensor for tensor in model.graph.initializer if tensor.name.endswith("bias"))
        weight.raw_data = (np.frombuffer(weight.raw_data, np.float32) + np.float32(1e-4)).tobytes()
        return model

    monkeypatch.setattr(export_module, "model_of", wrong)
    with pytest.raises(
        ParityRefused,
        match=r"was not written: .*smallest: at batch=1, output 'value': needs a tolerance of (1\.0\de-04|9\.9\de-05)",
    ):
        export(network, tmp_path / "x.bundle")
    assert not (tmp_path / "x.bundle").exists()
    assert leftovers(tmp_path) == []


def test_the_tolerance_is_the_networks_own_rounding_error() -> None:
    network = find_source("mlp")
    inputs = {"features": np.random.default_rng(0).standard_normal((5, 1, 8, 8)).astype(np.float32)}
    single, double = torch_reference(network.graph), precise_reference(network.graph)
    tolerance = derive_tolerance(single, double, [inputs])["logits"]
    measured = np.abs(single(inputs)["logits"].astype(np.float64) - double(inputs)["logits"]).max()
    assert tolerance.measured == pytest.approx(measured)
    assert measured <= tolerance.allowed <= 1e-4


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises", r"user_networks.py:raises raised KeyError: 'no such layer' at user_networks.py:\d+"),
        ("returns_nothing", r"returned a NoneType; expected \(module, example_inputs\)"),
        ("returns_a_function", "not an nn.Module"),
        ("no_inputs", "no example inputs"),
        ("number_input", "fails on its own example inputs: TypeError: .* must be Tensor, not int at user_networks.py"),
        ("wrong_axis", r"dynamic_axes of 'left' has 5: 'batch'"),
        ("wrong_example", "fails on its own example inputs: RuntimeError"),
        ("not_a_number", "NaN values in the original itself"),
        ("data_dependent", r"cannot be traced: its forward branches on values .* use torch.where"),
        ("random_numbers", "differs between two runs on the same inputs.*remove the randomness"),
        ("unstable", "changes by .* with rounding alone"),
        ("leaves", "raised SystemExit"),
        ("one_logit", "expected .batch, classes. with 2 or more"),
        ("few_labels", "there are 1 labels but .* has 3 classes"),
        ("wide_regression", "expected .batch. or .batch, 1."),
        ("bfloat16", "has dtype torch.bfloat16"),
        ("nothing_in_it", "has no elements"),
        ("named_axis", "expected e.g. {'x': {0: 'batch'}} or {'x': .0.}"),
        ("labels_number", "expected a list of names"),
    ],
)
def test_a_users_mistake_is_told_in_one_line(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(EdgekitError, match=message) as caught:
        export(user(name), tmp_path / "x.bundle")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("lennet", UnknownName, "did you mean 'lenet'"),
        ("nowhere/run", SourceError, "expected a run, an architecture's name, file.py:function or a .onnx file"),
        (f"{FILE}", SourceError, r"name the function that builds the network: .*user_networks.py:build"),
        (f"{FILE}:tuple_input", UnknownName, "did you mean 'tuple_inputs'"),
        ("no/such/file.py:build", SourceError, "there is no file"),
        (":build", SourceError, "is not understood"),
        ("no.such.module:build", SourceError, "there is no module 'no.such.module'"),
        (f"{FILE}:wrong_option", UnknownName, "did you mean 'dynamic_axes'"),
        (f"{FILE.parent}", SourceError, "directory without run.json"),
    ],
)
def test_a_source_that_cannot_be_found_says_what_was_expected(source: str, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        find_source(source)


def test_a_function_in_a_module_is_found() -> None:
    assert find_source("tests.exporters.user_networks:tuple_inputs").name == "user_networks"


def test_settings_reach_an_architecture_and_nothing_else() -> None:
    assert find_source("mlp", {"outputs": "3"}).graph.call(find_source("mlp").graph.inputs)["logits"].shape == (3, 3)
    with pytest.raises(SourceError, match="--set applies to an architecture's name"):
        find_source(f"{FILE}:tuple_inputs", {"outputs": "3"})


def test_no_failing_case_is_no_refusal() -> None:
    refuse_failures("x", [])


def test_lineage_tells_where_a_bundle_came_from(tmp_path: Path) -> None:
    export(user("tuple_inputs"), tmp_path / "x.bundle")
    (step,) = Bundle.open(tmp_path / "x.bundle").manifest.lineage
    assert step["source"]["kind"] == "function"
    assert step["parent"] is None


@pytest.mark.parametrize("name", ["rnn", "relu", "gru", "lstm", "stepper"])
def test_a_users_recurrent_layers_take_any_number_of_steps(name: str, tmp_path: Path) -> None:
    """Not unrolled to the example's, all in one process, and nothing the graph declares is the example's size."""
    report = export(find_source(f"{FILE.with_name('recurrent_networks.py')}:{name}"), tmp_path / "x.bundle")
    assert len({case.sizes["time"] for case in report.cases}) >= 6
    signature = report.bundle.manifest.graphs["model"].signature
    assert {"batch", "time"} <= set(signature.outputs[0].shape)
    operators = report.bundle.manifest.requirements["operators"]
    assert {"RNN", "GRU", "LSTM"} & set(operators)
    assert not {"Loop", "Scan"} & set(operators)


def test_an_example_of_one_value_only_is_varied_all_the_same(tmp_path: Path) -> None:
    """A mask of ones would not show that the graph ignores it."""
    with pytest.raises(ParityRefused, match="the graph disagrees with the original"):
        export(user("constant_mask"), tmp_path / "x.bundle")


def test_a_parameter_may_be_an_output(tmp_path: Path) -> None:
    assert export(user("parameter_output"), tmp_path / "x.bundle").cases
