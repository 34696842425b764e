"""Models that nobody here wrote, and models built as others build them. The wheels they come in are never imported."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from ..helpers import make_model, save

FLOAT = TensorProto.FLOAT
Node = helper.make_node
_CACHE = ("past.0.key", "past.0.value", "past.1.key", "past.1.value")


def inside(package: str, file: str) -> Callable[[Path], Path]:
    """A file of an installed package, found without running any of its code."""

    def find(folder: Path) -> Path:
        spec = find_spec(package)
        assert spec is not None, f"{package} is not installed; run: pip install --no-deps -r tests/third-party.txt"
        assert spec.submodule_search_locations
        return Path(spec.submodule_search_locations[0]) / file

    return find


def _weights(random: np.random.Generator, *shape: int) -> NDArray[Any]:
    return (random.standard_normal(shape) * np.sqrt(2 / np.prod(shape[1:]))).astype(np.float32)


def squeezenet_of_2018(folder: Path) -> Path:
    """Fire modules in opset 7 and IR 3, where every weight had to be listed among the inputs too."""
    random = np.random.default_rng(0)
    weights: dict[str, NDArray[Any]] = {}
    nodes: list[onnx.NodeProto] = []

    def conv(source: str, target: str, before: int, after: int, kernel: int, **options: Any) -> None:
        weights[f"{target}_w"] = _weights(random, after, before, kernel, kernel)
        weights[f"{target}_b"] = (0.1 * random.standard_normal(after)).astype(np.float32)
        names = [source, f"{target}_w", f"{target}_b"]
        nodes.append(Node("Conv", names, [f"{target}_c"], kernel_shape=[kernel] * 2, pads=[kernel // 2] * 4, **options))
        nodes.append(Node("Relu", [f"{target}_c"], [target]))

    conv("data", "stem", 3, 16, 3, strides=[2, 2])
    nodes.append(Node("MaxPool", ["stem"], ["pool"], kernel_shape=[3, 3], strides=[2, 2]))
    source, channels = "pool", 16
    for fire in ("fire2", "fire3"):
        conv(source, f"{fire}_squeeze", channels, 8, 1)
        conv(f"{fire}_squeeze", f"{fire}_narrow", 8, 16, 1)
        conv(f"{fire}_squeeze", f"{fire}_wide", 8, 16, 3)
        nodes.append(Node("Concat", [f"{fire}_narrow", f"{fire}_wide"], [fire], axis=1))
        source, channels = fire, 32
    nodes.append(Node("Dropout", [source], ["dropped"], ratio=0.5))
    conv("dropped", "classes", channels, 10, 1)
    nodes += [
        Node("AveragePool", ["classes"], ["mean"], kernel_shape=[7, 7]),
        Node("Flatten", ["mean"], ["flat"]),
        Node("Softmax", ["flat"], ["prob"]),
    ]
    listed = {name: (FLOAT, list(array.shape)) for name, array in weights.items()}
    model = make_model(
        nodes, weights, inputs={"data": (FLOAT, [1, 3, 32, 32])} | listed, outputs={"prob": (FLOAT, [1, 10])}, opset=7
    )
    model.ir_version = 3
    return save(model, folder / "squeezenet7.onnx")


def residual_cnn() -> onnx.ModelProto:
    """Eight residual convolutions and a softmax: deep enough that rounding adds up."""
    random = np.random.default_rng(0)
    weights = {"w0": _weights(random, 16, 3, 3, 3), "wy": _weights(random, 16, 10)}
    nodes = [Node("Conv", ["x", "w0"], ["h0"], pads=[1] * 4, strides=[2, 2])]
    for layer in range(8):
        weights[f"w{layer + 1}"] = _weights(random, 16, 16, 3, 3)
        nodes += [
            Node("Conv", [f"h{layer}", f"w{layer + 1}"], [f"c{layer}"], pads=[1] * 4),
            Node("Relu", [f"c{layer}"], [f"r{layer}"]),
            Node("Add", [f"r{layer}", f"h{layer}"], [f"h{layer + 1}"]),
        ]
    nodes += [
        Node("GlobalAveragePool", ["h8"], ["g"]),
        Node("Flatten", ["g"], ["f"]),
        Node("MatMul", ["f", "wy"], ["l"]),
        Node("Softmax", ["l"], ["y"]),
    ]
    shapes = {"x": (FLOAT, ["batch", 3, 24, 24])}
    return make_model(nodes, weights, inputs=shapes, outputs={"y": (FLOAT, ["batch", 10])}, opset=17)


def quantized_cnn(folder: Path) -> Path:
    """As onnxruntime's own quantizer writes it: QuantizeLinear and DequantizeLinear around every operator."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    random = np.random.default_rng(1)
    samples: Iterator[dict[str, NDArray[Any]]] = iter(
        [{"x": random.standard_normal((4, 3, 24, 24)).astype(np.float32)} for _ in range(4)]
    )

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def get_next(self) -> dict[str, NDArray[Any]] | None:
            return next(samples, None)

    path = folder / "qdq.onnx"
    quantize_static(residual_cnn(), path, Reader(), quant_format=QuantFormat.QDQ, per_channel=True, weight_type=QuantType.QInt8)
    return path


def half_precision(folder: Path) -> Path:
    """float16 through and through, inputs and outputs too."""
    model = residual_cnn()
    for tensor in model.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float16), tensor.name))
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = TensorProto.FLOAT16
    return save(model, folder / "half.onnx")


def gpt2_with_past(folder: Path) -> Path:
    """Two layers of GPT-2 as exported from its usual library: tokens, mask, positions, and the keys and values so far."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.cache_utils import DynamicCache

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=97, n_positions=256, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    network = GPT2LMHeadModel(config).eval()

    class Step(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def forward(self, tokens, mask, positions, key_0, value_0, key_1, value_1):  # type: ignore[no-untyped-def]
            past = DynamicCache()
            past.update(key_0, value_0, 0)
            past.update(key_1, value_1, 1)
            answer = self.network(input_ids=tokens, attention_mask=mask, position_ids=positions, past_key_values=past)
            layers = answer.past_key_values.layers
            return answer.logits, layers[0].keys, layers[0].values, layers[1].keys, layers[1].values

    batch, steps, past = 2, 3, 5
    cache = [torch.randn(batch, 2, past, 16) for _ in range(4)]
    positions = torch.arange(past, past + steps).expand(batch, steps).clone()
    inputs = (torch.randint(0, 97, (batch, steps)), torch.ones(batch, steps + past, dtype=torch.long), positions, *cache)
    rows = {0: "batch", 1: "steps"}
    axes = {"tokens": rows, "mask": {0: "batch", 1: "total"}, "positions": rows}
    names = ["tokens", "mask", "positions", *_CACHE]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the tracer warns of sizes it bakes in; adopting finds out whether it did
        torch.onnx.export(
            Step().eval(),
            inputs,
            str(folder / "gpt2.onnx"),
            dynamo=False,  # the older exporter: most of the files in the world are its work, and it takes a tenth of the time
            opset_version=17,
            input_names=names,
            output_names=["logits", *(name.replace("past", "present") for name in _CACHE)],
            dynamic_axes=axes | {name: {0: "batch", 2: "past"} for name in _CACHE},
        )
    return folder / "gpt2.onnx"


MODELS: dict[str, Callable[[Path], Path]] = {
    "silero-vad": inside("silero_vad", "data/silero_vad.onnx"),
    "silero-vad-opset15": inside("silero_vad", "data/silero_vad_16k_op15.onnx"),
    "silero-vad-opset18": inside("silero_vad", "data/silero_vad_op18_ifless.onnx"),
    "silero-vad-half": inside("silero_vad", "data/silero_vad_half.onnx"),
    "silero-vad-sequence": inside("silero_vad", "data/silero_vad_16k_sequence.onnx"),
    "silero-vad-fixed": inside("silero_vad", "data/silero_vad_openvino_16k.onnx"),
    "magika": inside("magika", "models/standard_v1/model.onnx"),
    "ocr-detection": inside("rapidocr_onnxruntime", "models/ch_PP-OCRv4_det_infer.onnx"),
    "ocr-recognition": inside("rapidocr_onnxruntime", "models/ch_PP-OCRv4_rec_infer.onnx"),
    "ocr-direction": inside("rapidocr_onnxruntime", "models/ch_ppocr_mobile_v2.0_cls_infer.onnx"),
    "squeezenet": inside("onnx", "backend/test/data/light/light_squeezenet.onnx"),
    "squeezenet-opset7": squeezenet_of_2018,
    "int8-cnn": quantized_cnn,
    "fp16-cnn": half_precision,
    "gpt2-with-past": gpt2_with_past,
}
