"""The torch-free protobuf walk agrees with the onnx package."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from runtime.errors import BundleError
from runtime.onnx_file import external_files

from ..helpers import gemm_model, make_model, save


def test_a_model_without_external_data_names_none(tmp_path: Path) -> None:
    assert external_files(save(gemm_model(), tmp_path / "m.onnx")) == set()


def test_external_weights_are_found(tmp_path: Path) -> None:
    onnx.save(gemm_model(), str(tmp_path / "m.onnx"), save_as_external_data=True, location="w.data", size_threshold=0)
    assert external_files(tmp_path / "m.onnx") == {"w.data"}


def test_external_weights_inside_subgraphs_and_constants_are_found(tmp_path: Path) -> None:
    def pointing(name: str, location: str) -> onnx.TensorProto:
        tensor = numpy_helper.from_array(np.zeros(3, np.float32), name)
        onnx.external_data_helper.set_external_data(tensor, location)
        tensor.ClearField("raw_data")
        return tensor

    out = helper.make_tensor_value_info("o", TensorProto.FLOAT, [3])
    branch = helper.make_graph(
        [helper.make_node("Identity", ["hidden"], ["o"])], "branch", [], [out], [pointing("hidden", "in-branch.bin")]
    )
    other = helper.make_graph(
        [helper.make_node("Constant", [], ["o"], value=pointing("c", "in-constant.bin"))], "other", [], [out]
    )
    node = helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=other)
    model = make_model([node], inputs={"c": (TensorProto.BOOL, [])}, outputs={"y": (TensorProto.FLOAT, [3])})
    assert external_files(save(model, tmp_path / "m.onnx")) == {"in-branch.bin", "in-constant.bin"}


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").touch()
    with pytest.raises(BundleError, match="empty"):
        external_files(tmp_path / "m.onnx")


@settings(max_examples=200, deadline=None)
@given(st.binary(min_size=1, max_size=400), st.integers(0, 10**6))
def test_garbage_and_truncation_never_raise_anything_else(
    tmp_path_factory: pytest.TempPathFactory, noise: bytes, cut: int
) -> None:
    path = tmp_path_factory.mktemp("garbage") / "m.onnx"
    whole = gemm_model().SerializeToString()
    for content in (noise, whole[: 1 + cut % len(whole)], whole[: cut % len(whole)] + noise):
        path.write_bytes(content)
        try:
            external_files(path)
        except BundleError as error:
            assert "m.onnx" in str(error)
