"""Session: one graph in onnxruntime, with checked feeds and a device that is what it says."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from .errors import BundleError, DeviceError, FeedError, UnknownName
from .huge_pages import LARGE, in_huge_pages
from .machine import available_cpus
from .signature import GraphSignature

_PROVIDERS = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
}
OPTIMIZATION_LEVELS = {
    "none": ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "basic": ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "all": ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
}


class Session:
    """Runs one ONNX graph.

    `device` is "auto" (a GPU if it can be used, else the CPU), "cpu", "cuda", "cuda:1" or "tensorrt". A device that
    onnxruntime could not use falls back to the CPU with a warning; with strict=True that is a DeviceError.
    `device` on the session is the one that was really taken.
    """

    def __init__(
        self,
        path: str | Path | bytes,
        signature: GraphSignature,
        *,
        device: str = "auto",
        threads: int | None = None,
        optimization: str = "all",
        strict: bool = False,
        log_level: int = 3,
    ) -> None:
        self.signature = signature
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads or available_cpus()
        options.inter_op_num_threads = 1
        options.graph_optimization_level = OPTIMIZATION_LEVELS[optimization]
        options.log_severity_level = log_level  # 3, errors: warnings would litter an application's stderr; 4 silences trials
        kind, providers = _providers_for(device)
        # A decoder's step reads all its weights and does little else.
        with in_huge_pages() if signature.states and _bytes_of(path) >= LARGE else nullcontext():
            self._session = _create(path, options, providers)
        taken = self._session.get_providers()[0]
        self.device = next((name for name, provider in _PROVIDERS.items() if provider == taken), taken)
        if kind not in ("auto", self.device):
            if strict:
                raise DeviceError(f"device {device!r} could not be used; {_gpu_advice()}")
            message = f"device {device!r} could not be used and the model runs on {self.device}; {_gpu_advice()}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
        self.memory = ("cuda" if self.device in ("cuda", "tensorrt") else "cpu", 0)
        self._outputs = [spec.name for spec in signature.outputs]

    def run(self, feeds: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Named tensors in, named tensors out. Feeds are checked first, so that an error names the fix."""
        self.signature.check_feeds(feeds)
        return self.run_unchecked(feeds)

    def run_unchecked(self, feeds: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """As `run`, for a caller that made the feeds from the signature itself (benchmarks, decoding loops)."""
        try:
            values = self._session.run(self._outputs, feeds)
        except Exception as error:  # onnxruntime raises its own C++ exceptions, all children of Exception
            raise FeedError(f"onnxruntime could not run the graph on these inputs: {_first_line(error)}") from error
        return dict(zip(self._outputs, values, strict=True))

    def binding(self) -> Any:
        """An empty IO binding, for a caller that keeps its own memory (decoding); see `run_bound`."""
        return self._session.io_binding()

    def run_bound(self, binding: Any) -> None:
        try:
            self._session.run_with_iobinding(binding)
        except Exception as error:
            raise FeedError(f"onnxruntime could not run the graph on these inputs: {_first_line(error)}") from error

    def bind(self, feeds: Mapping[str, NDArray[Any]]) -> Callable[[], None]:
        """A call that runs the graph on `feeds` again and again, without a copy of anything.

        Caches in place (see `StateSpec.filled`) are updated where they are: each call writes to the same slots.
        """
        self.signature.check_feeds(feeds)
        binding = self._session.io_binding()
        values = {name: ort.OrtValue.ortvalue_from_numpy(np.array(array, order="C")) for name, array in feeds.items()}
        for name, value in values.items():
            binding.bind_ortvalue_input(name, value)
        in_place = {state.output: state.input for state in self.signature.states if state.filled}
        for name in self._outputs:
            if name in in_place:
                binding.bind_ortvalue_output(name, values[in_place[name]])
            else:
                binding.bind_output(name, "cpu")

        def run() -> None:
            self._session.run_with_iobinding(binding)

        return run


def _bytes_of(path: str | Path | bytes) -> int:
    """Size of the graph; of one with weights in other files, of all that lies beside it."""
    if isinstance(path, bytes):
        return len(path)
    return sum(item.stat().st_size for item in Path(path).parent.iterdir() if item.is_file()) if Path(path).exists() else 0


def _create(path: str | Path | bytes, options: ort.SessionOptions, providers: list[Any]) -> ort.InferenceSession:
    source = path if isinstance(path, bytes) else str(path)
    try:
        return ort.InferenceSession(source, options, providers=providers)
    except Exception as error:
        what = "the graph" if isinstance(path, bytes) else Path(path).name
        raise BundleError(f"onnxruntime {ort.__version__} cannot load {what}: {_first_line(error)}") from error


def _providers_for(device: str) -> tuple[str, list[Any]]:
    kind, _, index = device.partition(":")
    if kind == "auto":
        wanted = [_PROVIDERS["cuda"]] if _PROVIDERS["cuda"] in ort.get_available_providers() else []
        return kind, [*wanted, _PROVIDERS["cpu"]]
    if kind not in _PROVIDERS:
        raise UnknownName.of("device", kind, ["auto", *_PROVIDERS])
    if index and not index.isdigit():
        raise DeviceError(f"device {device!r} is not understood; write e.g. 'cuda:1'")
    if kind == "cpu":
        return kind, [_PROVIDERS["cpu"]]
    if _PROVIDERS[kind] not in ort.get_available_providers():
        return kind, [_PROVIDERS["cpu"]]
    chosen: list[Any] = [(_PROVIDERS[kind], {"device_id": index or "0"})]
    if kind == "tensorrt":
        chosen.append((_PROVIDERS["cuda"], {"device_id": index or "0"}))
    return kind, [*chosen, _PROVIDERS["cpu"]]


def _gpu_advice() -> str:
    if _PROVIDERS["cuda"] in ort.get_available_providers():
        return "onnxruntime-gpu is installed but could not load CUDA; check the driver and the CUDA libraries"
    return "install onnxruntime-gpu in place of onnxruntime to use a GPU"


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:400]
