"""FLOPs against hand-counted cases and PyTorch's own counter; memory and caches against hand-counted cases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from exporters.check import check
from exporters.figures import Figures
from exporters.flops import flops_of
from runtime.signature import StateSpec

from ...helpers import gemm_bundle, gemm_model, make_model, save
from .support import FLOAT, HALF, bundle_of, weights


def node(operator: str, inputs: int = 2, outputs: int = 1, domain: str = "", **attributes: Any) -> onnx.NodeProto:
    names = [f"i{index}" for index in range(inputs)], [f"o{index}" for index in range(outputs)]
    return helper.make_node(operator, *names, domain=domain, **attributes)


@pytest.mark.parametrize(
    ("item", "shapes", "expected"),
    [
        (node("MatMul"), {"i0": (5, 2, 3), "i1": (3, 4), "o0": (5, 2, 4)}, 2 * 5 * 2 * 3 * 4),
        (node("FusedMatMul", transA=1), {"i0": (3, 2), "i1": (3, 4), "o0": (2, 4)}, 2 * 2 * 3 * 4),
        (node("Gemm", transA=1), {"i0": (3, 2), "i1": (3, 4), "o0": (2, 4)}, 2 * 2 * 3 * 4),
        (node("MatMulNBits", 3, K=64, N=8), {"i0": (2, 64), "o0": (2, 8)}, 2 * 2 * 64 * 8),
        (node("Conv"), {"i0": (1, 4, 8, 8), "i1": (6, 2, 3, 3), "o0": (1, 6, 6, 6)}, 2 * (6 * 6 * 6) * (2 * 3 * 3)),
        (node("ConvTranspose"), {"i0": (1, 4, 8, 8), "i1": (4, 6, 2, 2), "o0": (1, 6, 16, 16)}, 2 * (4 * 8 * 8) * (6 * 2 * 2)),
        (node("LSTM", 3), {"i0": (7, 2, 3), "i1": (1, 20, 3), "i2": (1, 20, 5)}, 2 * 7 * 2 * (20 * 3 + 20 * 5)),
        (node("GRU", 3), {"i0": (7, 2, 3), "i1": (2, 15, 3), "i2": (2, 15, 5)}, 2 * 7 * 2 * 2 * (15 * 3 + 15 * 5)),
        (node("Einsum", equation="bij,bjk->bik"), {"i0": (2, 3, 4), "i1": (2, 4, 5)}, 2 * 2 * 3 * 4 * 5),
        # 2 rows, 2 heads of 8, 3 queries against 4 + 5 keys: scores and values
        (
            node("Attention", 6, 3),
            {"i0": (2, 2, 3, 8), "i1": (2, 2, 4, 8), "i4": (2, 2, 5, 8), "o0": (2, 2, 3, 8)},
            2 * 2 * 2 * (2 * 3 * 9 * 8),
        ),
        (
            node("MultiHeadAttention", 7, 1, "com.microsoft", num_heads=2),
            {"i0": (2, 3, 16), "i1": (2, 4, 16), "i6": (2, 2, 5, 8), "o0": (2, 3, 16)},
            2 * 2 * 2 * (2 * 3 * 9 * 8),
        ),
        # a whole preallocated cache of 32 is shaped, and 9 of it are said to be filled
        (
            node("GroupQueryAttention", 7, 3, "com.microsoft", num_heads=2, kv_num_heads=1),
            {"i0": (2, 3, 16), "i1": (2, 3, 8), "o0": (2, 3, 16), "o1": (2, 1, 32, 8)},
            2 * 2 * 2 * (2 * 3 * 9 * 8),
        ),
        # com.microsoft Attention projects as well: 3 tokens of 16 by (16, 48)
        (
            node("Attention", 2, 1, "com.microsoft", num_heads=2),
            {"i0": (2, 3, 16), "i1": (16, 48), "o0": (2, 3, 16)},
            2 * 2 * 3 * 16 * 48 + 2 * 2 * 2 * (2 * 3 * 3 * 8),
        ),
        (node("Relu", 1), {}, 0),
        (node("MatMul"), {"i0": (2, 3)}, None),
    ],
)
def test_flops_of_one_node(item: onnx.NodeProto, shapes: dict[str, tuple[int, ...]], expected: int | None) -> None:
    assert flops_of(item, shapes, {"i6": (9,)}) == expected


def exported(module: nn.Module, inputs: tuple[torch.Tensor, ...], path: Path) -> Figures:
    torch.onnx.export(module, inputs, str(path), opset_version=20, verbose=False)
    return check(path).figures[path.stem]


@pytest.mark.parametrize("kind", ["convolutions", "attention", "recurrence"])
def test_flops_and_parameters_equal_pytorch(kind: str, tmp_path: Path) -> None:
    if kind == "convolutions":
        layers = (
            nn.Conv2d(3, 8, 3, groups=1),
            nn.ReLU(),
            nn.ConvTranspose2d(8, 4, 2, stride=2),
            nn.Flatten(),
            nn.Linear(4 * 12 * 12, 5),
        )
        module, example = nn.Sequential(*layers).eval(), torch.randn(2, 3, 8, 8)
    elif kind == "recurrence":
        module, example = nn.GRU(6, 5, bidirectional=True, batch_first=True).eval(), torch.randn(2, 7, 6)
    else:
        module, example = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0).eval(), torch.randn(2, 5, 16)
    for item in module.parameters():
        nn.init.normal_(item)  # the exporter drops a bias of zeros
    figures = exported(module, (example,), tmp_path / "m.onnx")
    torch.backends.mha.set_fastpath_enabled(False)
    with (
        FlopCounterMode(display=False) as counter,
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
        torch.no_grad(),
    ):
        module(example)
    torch.backends.mha.set_fastpath_enabled(True)
    assert figures.flops == counter.get_total_flops()
    constants = {"convolutions": 0, "attention": 1, "recurrence": 2 * 2 * 5}[kind]  # the scale of scores; the initial state
    assert figures.parameters == sum(item.numel() for item in module.parameters()) + constants
    assert figures.notes == ()


def test_peak_memory_of_a_hand_counted_graph(tmp_path: Path) -> None:
    """x (2, 4): 32 B. wide = x W (2, 100): 800 B, flat shares it. bent = relu(flat): 800 B. y = bent V (2, 3): 24 B."""
    nodes = [
        helper.make_node("MatMul", ["x", "W"], ["wide"]),
        helper.make_node("Reshape", ["wide", "shape"], ["flat"]),
        helper.make_node("Relu", ["flat"], ["bent"]),
        helper.make_node("MatMul", ["bent", "V"], ["y"]),
    ]
    constants = {"W": weights(4, 100), "V": weights(100, 3), "shape": np.array([-1, 100])}
    model = make_model(nodes, constants, inputs={"x": (FLOAT, [2, 4])}, outputs={"y": (FLOAT, [2, 3])})
    figures = check(save(model, tmp_path / "m.onnx")).figures["m"]
    assert figures.peak_activation_bytes == 32 + 800 + 800
    assert figures.flops == 2 * 2 * 4 * 100 + 2 * 2 * 100 * 3
    assert figures.parameters == 4 * 100 + 100 * 3
    assert figures.weight_bytes == (4 * 100 + 100 * 3) * 4 + 2 * 8


def test_a_reshape_takes_no_memory_of_its_own(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "W"], ["wide"]),
        helper.make_node("Reshape", ["wide", "shape"], ["flat"]),
        helper.make_node("MatMul", ["flat", "V"], ["y"]),
    ]
    constants = {"W": weights(4, 100), "V": weights(50, 3), "shape": np.array([-1, 50])}
    model = make_model(nodes, constants, inputs={"x": (FLOAT, [2, 4])}, outputs={"y": (FLOAT, [4, 3])})
    assert check(save(model, tmp_path / "m.onnx")).figures["m"].peak_activation_bytes == 32 + 800 + 48


def test_a_tensor_that_is_read_late_lives_till_then(tmp_path: Path) -> None:
    """y = neg(neg(neg x)) + first: the first result lives through the whole chain. Every tensor has 400 B."""
    names = ["x", "a", "b", "c"]
    nodes = [helper.make_node("Neg", [names[index]], [names[index + 1]]) for index in range(3)]
    sides = (FLOAT, [100])
    kept = make_model([*nodes, helper.make_node("Add", ["a", "c"], ["y"])], inputs={"x": sides}, outputs={"y": sides})
    freed = make_model([*nodes, helper.make_node("Neg", ["c"], ["y"])], inputs={"x": sides}, outputs={"y": sides})
    peaks = [check(save(model, tmp_path / "m.onnx")).figures["m"].peak_activation_bytes for model in (kept, freed)]
    assert peaks == [400 * 4, 400 * 3]  # x a b c, or x a b


def test_a_dequantized_weight_is_not_an_activation(tmp_path: Path) -> None:
    nodes = [helper.make_node("DequantizeLinear", ["Q", "s"], ["W"]), helper.make_node("MatMul", ["x", "W"], ["y"])]
    constants = {"Q": np.ones((4, 3), np.int8), "s": np.array(0.1, np.float32)}
    model = make_model(nodes, constants, inputs={"x": (FLOAT, [2, 4])}, outputs={"y": (FLOAT, [2, 3])})
    assert check(save(model, tmp_path / "m.onnx")).figures["m"].peak_activation_bytes == 2 * (4 + 3) * 4


def test_figures_are_stated_at_the_sizes_of_the_goldens(tmp_path: Path) -> None:
    figures = check(gemm_bundle(tmp_path)).figures["model"]
    rows = figures.sizes["batch"]
    assert figures.flops == 2 * rows * 4 * 3
    assert figures.peak_activation_bytes == rows * (4 + 3) * 4
    assert figures.kv_cache_bytes_per_token is None
    assert check(save(gemm_model(), tmp_path / "m.onnx")).figures["m"].sizes == {"batch": 1}


def test_bytes_of_a_cache_for_each_token_and_of_a_state_for_each_row(tmp_path: Path) -> None:
    """Keys and values of 2 heads of 8 in float16: 2 x 2 x 8 x 2 B a token. A hidden state of 6 in float32: 24 B a row."""
    nodes = [
        helper.make_node("Concat", ["past_k", "k"], ["new_k"], axis=2),
        helper.make_node("Concat", ["past_v", "k"], ["new_v"], axis=2),
        helper.make_node("Relu", ["hidden"], ["new_hidden"]),
    ]
    past, new, hidden = (HALF, ["batch", 2, "past", 8]), (HALF, ["batch", 2, "time", 8]), (FLOAT, [1, "batch", 6])
    total = (HALF, ["batch", 2, "total", 8])
    model = make_model(
        nodes,
        inputs={"past_k": past, "past_v": past, "k": new, "hidden": hidden},
        outputs={"new_k": total, "new_v": total, "new_hidden": hidden},
    )
    cached = [StateSpec("past_k", "new_k", 0, 2), StateSpec("past_v", "new_v", 0, 2), StateSpec("hidden", "new_hidden", 1)]
    kept = np.zeros((3, 2, 5, 8), np.float16)
    feeds = {"past_k": kept, "past_v": kept, "k": kept[:, :, :1], "hidden": np.zeros((1, 3, 6), np.float32)}
    bundle = bundle_of(tmp_path, {"step": model}, {"step": tuple(cached)}, {"step": feeds})
    figures = check(bundle).figures["step"]
    assert figures.sizes == {"batch": 3, "past": 5, "time": 1}
    assert figures.kv_cache_bytes_per_token == 2 * 2 * 8 * 2
    assert figures.state_bytes_per_row == 24


def test_a_preallocated_cache_is_counted_once_and_read_as_far_as_it_is_filled(tmp_path: Path) -> None:
    """1 row, 2 heads of 8, 1 query against 3 of 32 places; each cache has 2 x 32 x 8 x 4 B = 2048 B."""
    names = ["q", "k", "v", "past_k", "past_v", "filled", "total32"]
    attend = node("GroupQueryAttention", 7, 3, "com.microsoft", num_heads=2, kv_num_heads=2)
    del attend.input[:], attend.output[:]
    attend.input.extend(names)
    attend.output.extend(["y", "new_k", "new_v"])
    nodes = [
        helper.make_node("Cast", ["total"], ["total32"], to=onnx.TensorProto.INT32),
        attend,
        helper.make_node("Identity", ["filled"], ["now_filled"]),
    ]
    rows, cache, count = (FLOAT, ["batch", "time", 16]), (FLOAT, ["batch", 2, 32, 8]), (onnx.TensorProto.INT32, ["batch"])
    inputs = {"q": rows, "k": rows, "v": rows, "past_k": cache, "past_v": cache, "filled": count}
    model = make_model(
        nodes,
        inputs=inputs | {"total": (onnx.TensorProto.INT64, [])},
        outputs={"y": rows, "new_k": cache, "new_v": cache, "now_filled": count},
    )
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    states = tuple(StateSpec(f"past_{side}", f"new_{side}", 0, 2, filled="now_filled") for side in "kv")
    feeds = {"past_k": weights(1, 2, 32, 8), "past_v": weights(1, 2, 32, 8), "filled": np.array([2], np.int32)}
    feeds |= {name: weights(1, 1, 16) for name in "qkv"} | {"total": np.array(3)}
    figures = check(bundle_of(tmp_path, {"step": model}, {"step": states}, {"step": feeds})).figures["step"]
    assert figures.flops == 2 * 2 * (2 * 1 * 3 * 8)
    assert figures.peak_activation_bytes == 2 * 2048 + 4 * 64 + 4 + 8 + 4  # caches, q k v y, filled, total, total32
    assert figures.kv_cache_bytes_per_token == 2 * 2 * 8 * 4


def test_shapes_that_inference_does_not_know_are_taken_from_a_run(tmp_path: Path) -> None:
    """onnx knows no shapes of com.microsoft operators."""
    nodes = [helper.make_node("Gelu", ["x"], ["h"], domain="com.microsoft"), helper.make_node("MatMul", ["h", "W"], ["y"])]
    model = make_model(nodes, {"W": weights(4, 3)})
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    figures = check(save(model, tmp_path / "m.onnx")).figures["m"]
    assert (figures.flops, figures.peak_activation_bytes, figures.notes) == (2 * 4 * 3, (4 + 4 + 3) * 4, ())


def test_four_bit_weights_are_counted_as_weights_not_as_bytes(tmp_path: Path) -> None:
    names = ["x", "B", "scales"]
    item = helper.make_node("MatMulNBits", names, ["y"], domain="com.microsoft", K=64, N=8, bits=4, block_size=32)
    packed = {"B": np.zeros((8, 2, 16), np.uint8), "scales": np.ones((8, 2), np.float32)}
    model = make_model([item], packed, inputs={"x": (FLOAT, ["batch", 64])}, outputs={"y": (FLOAT, ["batch", 8])})
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    figures = check(save(model, tmp_path / "m.onnx")).figures["m"]
    assert figures.parameters == 64 * 8 + 16
    assert figures.weight_bytes == 64 * 8 // 2 + 16 * 4


def test_what_cannot_be_known_is_said(tmp_path: Path) -> None:
    model = make_model([helper.make_node("NoSuchThing", ["x"], ["y"], domain="com.microsoft")])
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    figures = check(save(model, tmp_path / "m.onnx")).figures["m"]
    assert (figures.flops, figures.peak_activation_bytes) == (None, None)
    assert figures.notes == ("shapes are not known, so FLOPs and memory are not",)


def test_a_loop_is_counted_once_and_says_so(tmp_path: Path) -> None:
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["on"]), helper.make_node("MatMul", ["h", "W"], ["next"])],
        "body",
        [
            helper.make_tensor_value_info("step", onnx.TensorProto.INT64, []),
            helper.make_tensor_value_info("go", onnx.TensorProto.BOOL, []),
            helper.make_tensor_value_info("h", FLOAT, [2, 4]),
        ],
        [helper.make_tensor_value_info("on", onnx.TensorProto.BOOL, []), helper.make_tensor_value_info("next", FLOAT, [2, 4])],
    )
    loop = helper.make_node("Loop", ["count", "", "x"], ["y"], body=body)
    constants = {"count": np.array(3), "W": weights(4, 4)}
    model = make_model([loop], constants, inputs={"x": (FLOAT, [2, 4])}, outputs={"y": (FLOAT, [2, 4])})
    figures = check(save(model, tmp_path / "m.onnx")).figures["m"]
    assert figures.flops == 2 * 2 * 4 * 4
    assert "counted once" in figures.notes[0]
