"""Session: one graph in onnxruntime, with checked feeds and a device that is what it says."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from .devices import AUTO, Request, requested
from .errors import BundleError, DeviceError, FeedError, OptionError
from .huge_pages import LARGE, in_huge_pages
from .machine import available_cpus
from .signature import GraphSignature

OPTIMIZATION_LEVELS = {
    "none": ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "basic": ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "all": ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
}

# Its fused kernel takes longer than the two it replaces, on one row and 3 to 10 times as long on hundreds (docs/optimize.md).
_SLOWER_ON_THE_CPU = {"SkipLayerNormFusion"}
# onnxruntime's tiled attention over a cache takes 1.4 to 9 times as long as its plain one on prompts, and as long on single
# tokens; there is no other option for it than this.
os.environ.setdefault("ORT_GQA_DISABLE_FLASH_ATTENTION", "1")


class Session:
    """Runs one ONNX graph.

    `device` is "auto" (a GPU if it can be used, else the CPU), "cpu", "cuda", "cuda:1" or another name of `devices.DEVICES`. A
    device that onnxruntime could not use falls back to the CPU with a warning; with strict=True that is a DeviceError.
    `device` on the session is the one that was really taken, and `memory` where its tensors are best kept. A session may be
    used by several threads at once.
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
        spins: bool = True,
    ) -> None:
        """`spins`: threads wait busily for the next run, which is fastest for one run after the other; a host that works in
        between is slowed by them."""
        self.signature = signature
        if threads is not None and (not isinstance(threads, int) or threads < 1):
            raise OptionError(f"threads is {threads!r}, expected 1 or more; leave it out to use all that are available")
        self.threads = threads or available_cpus()
        request = requested(device)
        # A decoder's step reads all its weights and does little else.
        with in_huge_pages() if signature.states and _bytes_of(path) >= LARGE else nullcontext():
            self._session, reason = _create(path, request, self.threads, OPTIMIZATION_LEVELS[optimization], log_level, spins)
        self.device = request.taken(self._session.get_providers()[0])
        self.memory = request.memory(self.device)
        if request.name not in (AUTO, self.device):
            if strict:
                raise DeviceError(f"device {device!r} could not be used; {request.advice(reason)}")
            message = f"device {device!r} could not be used and the model runs on {self.device}; {request.advice(reason)}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
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

    def place(self, array: NDArray[Any]) -> ort.OrtValue:
        """`array` in the device's own memory, for IO binding; on the CPU it is used where it is, not copied."""
        return ort.OrtValue.ortvalue_from_numpy(array, *self.memory)

    def bind(self, feeds: Mapping[str, NDArray[Any]]) -> Callable[[], None]:
        """A call that runs the graph on `feeds` again and again, without a copy of anything.

        Caches in place (see `StateSpec.filled`) are updated where they are: each call writes to the same slots.
        """
        self.signature.check_feeds(feeds)
        binding = self._session.io_binding()
        values = {name: self.place(np.array(array, order="C")) for name, array in feeds.items()}
        for name, value in values.items():
            binding.bind_ortvalue_input(name, value)
        in_place = {state.output: state.input for state in self.signature.states if state.filled}
        for name in self._outputs:
            if name in in_place:
                binding.bind_ortvalue_output(name, values[in_place[name]])
            else:
                binding.bind_output(name, *self.memory)

        def run() -> None:
            self._session.run_with_iobinding(binding)

        return run


def _bytes_of(path: str | Path | bytes) -> int:
    """Size of the graph; of one with weights in other files, of all that lies beside it."""
    if isinstance(path, bytes):
        return len(path)
    return sum(item.stat().st_size for item in Path(path).parent.iterdir() if item.is_file()) if Path(path).exists() else 0


def _create(
    path: str | Path | bytes, request: Request, threads: int, optimization: Any, log_level: int, spins: bool
) -> tuple[ort.InferenceSession, str | None]:
    """The session; and if the device that was asked for refused the graph, why: it is on the CPU then."""
    source = path if isinstance(path, bytes) else str(path)

    def create(wanted: Request) -> ort.InferenceSession:
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.graph_optimization_level = optimization
        options.log_severity_level = log_level  # 3, errors: warnings would litter an application's stderr; 4 silences trials
        if not spins:
            options.add_session_config_entry("session.force_spinning_stop", "1")
        wanted.prepare(options)
        # Without onnxruntime's own fallback, which prints to stdout and goes on with other providers after any failing run.
        return ort.InferenceSession(
            source,
            options,
            providers=wanted.providers(threads),
            enable_fallback=0,
            disabled_optimizers=_SLOWER_ON_THE_CPU if wanted.device in (None, "cpu") else None,
        )

    reason: str | None = None
    wanted = request
    while True:
        try:
            return create(wanted), reason
        except Exception as error:  # onnxruntime raises its own C++ exceptions, all children of Exception
            if wanted.device is None:
                what = "the graph" if isinstance(path, bytes) else Path(path).name
                raise BundleError(f"onnxruntime {ort.__version__} cannot load {what}: {_first_line(error)}") from error
            reason = reason or _first_line(error)
            wanted = wanted.fallback()


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:400]
