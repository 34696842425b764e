"""The one table of devices: a name an application writes → an execution provider of onnxruntime and its options.

Only cpu and openvino (on a CPU) have been run by the authors; the options of the others follow onnxruntime's documentation.
That a provider was asked for says nothing: a session looks at what was taken after it has been created.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import onnxruntime as ort

from .errors import DeviceError, UnknownName

AUTO, CPU = "auto", "cpu"
Settings = dict[str, str]


@dataclass(frozen=True)
class Device:
    """`options` takes the device's number (None if not given) and how many threads there are."""

    provider: str
    get: str  # how to get a build of onnxruntime that has it
    options: Callable[[int | None, int], Settings] = lambda index, threads: {}
    numbered: bool = True  # "name:1" means something
    rest: str | None = None  # the device that takes what this one leaves, before the CPU does
    memory: str = "cpu"  # where onnxruntime's Python interface can place tensors for it
    session: Callable[[ort.SessionOptions], None] = lambda options: None


def _cuda(index: int | None, threads: int) -> Settings:
    return {
        "device_id": str(index or 0),
        "arena_extend_strategy": "kSameAsRequested",  # the default doubles, and a cache that grows would hold twice its size
        "cudnn_conv_algo_search": "HEURISTIC",  # the default times every algorithm again for each new shape
        "use_tf32": "0",  # with it a float32 product has 10 bits of mantissa, and answers are not PyTorch's
    }


def _tensorrt(fp16: bool) -> Callable[[int | None, int], Settings]:
    def options(index: int | None, threads: int) -> Settings:
        folder = str(cache_folder("tensorrt"))
        return {
            "device_id": str(index or 0),
            "trt_engine_cache_enable": "1",  # building an engine takes minutes
            "trt_engine_cache_path": folder,
            "trt_timing_cache_enable": "1",
            "trt_timing_cache_path": folder,
            "trt_fp16_enable": "1" if fp16 else "0",
        }

    return options


def _openvino(kind: str) -> Callable[[int | None, int], Settings]:
    def options(index: int | None, threads: int) -> Settings:
        if kind == "CPU":
            return {"device_type": kind, "num_of_threads": str(threads)}
        name = kind if index is None else f"{kind}.{index}"
        return {"device_type": name, "cache_dir": str(cache_folder("openvino"))}

    return options


def _number(index: int | None, threads: int) -> Settings:
    return {"device_id": str(index or 0)}


def _without_memory_pattern(options: ort.SessionOptions) -> None:
    options.enable_mem_pattern = False  # DirectML refuses it, and parallel execution


def _own_threads(options: ort.SessionOptions) -> None:
    options.intra_op_num_threads = 1  # XNNPACK has threads of its own, and two pools would compete
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")


_GPU_WHEEL = "install onnxruntime-gpu in place of onnxruntime"
_OPENVINO_WHEEL = "install onnxruntime-openvino in place of onnxruntime"
_BUILD = "use a build of onnxruntime that has it"

DEVICES: dict[str, Device] = {
    CPU: Device("CPUExecutionProvider", "install onnxruntime", numbered=False),
    "cuda": Device("CUDAExecutionProvider", _GPU_WHEEL, _cuda, memory="cuda"),
    "tensorrt": Device("TensorrtExecutionProvider", _GPU_WHEEL, _tensorrt(False), rest="cuda", memory="cuda"),
    "tensorrt-fp16": Device("TensorrtExecutionProvider", _GPU_WHEEL, _tensorrt(True), rest="cuda", memory="cuda"),
    "openvino": Device("OpenVINOExecutionProvider", _OPENVINO_WHEEL, _openvino("CPU"), numbered=False),
    "openvino-gpu": Device("OpenVINOExecutionProvider", _OPENVINO_WHEEL, _openvino("GPU")),
    "openvino-npu": Device("OpenVINOExecutionProvider", _OPENVINO_WHEEL, _openvino("NPU"), numbered=False),
    "coreml": Device(
        "CoreMLExecutionProvider",
        "install onnxruntime on macOS, or build it for iOS with Core ML",
        lambda index, threads: {"ModelFormat": "MLProgram", "MLComputeUnits": "ALL"},
        numbered=False,
    ),
    "directml": Device(
        "DmlExecutionProvider",
        "install onnxruntime-directml in place of onnxruntime, on Windows",
        _number,
        session=_without_memory_pattern,
    ),
    "migraphx": Device("MIGraphXExecutionProvider", "install onnxruntime-migraphx in place of onnxruntime", _number),
    "webgpu": Device("WebGpuExecutionProvider", "install onnxruntime-webgpu in place of onnxruntime", numbered=False),
    "qnn": Device(
        "QNNExecutionProvider",
        "install onnxruntime-qnn in place of onnxruntime",
        lambda index, threads: {"backend_type": "htp"},
        numbered=False,
    ),
    "xnnpack": Device(
        "XnnpackExecutionProvider",
        _BUILD,
        lambda index, threads: {"intra_op_num_threads": str(threads)},
        numbered=False,
        session=_own_threads,
    ),
    "nnapi": Device("NnapiExecutionProvider", f"{_BUILD}, for Android", numbered=False),
    "acl": Device("ACLExecutionProvider", _BUILD, numbered=False),
    "onednn": Device("DnnlExecutionProvider", _BUILD, numbered=False),
}
ALIASES = {"dml": "directml", "rocm": "migraphx", "dnnl": "onednn"}  # onnxruntime runs on ROCm through MIGraphX

_AUTOMATIC = ("cuda", "migraphx", "directml")
"""What `auto` takes, the first that is there: devices that run whole graphs. The others leave much to the CPU, and it depends
on the graph whether that is faster than the CPU alone; name them."""


@dataclass(frozen=True)
class Request:
    """What was asked for, and what to ask of onnxruntime. Without a `device` it is the CPU alone."""

    text: str  # as it was written
    name: str  # in the table, or "auto"
    index: int | None
    device: str | None  # the one that will be tried; None where onnxruntime does not have it, or the CPU was meant

    def providers(self, threads: int) -> list[tuple[str, Settings]]:
        """For onnxruntime, the preferred first."""
        chosen, name, available = [], self.device, ort.get_available_providers()
        while name is not None:
            if DEVICES[name].provider in available:
                chosen.append((DEVICES[name].provider, DEVICES[name].options(self.index, threads)))
            name = DEVICES[name].rest
        return [*chosen, (DEVICES[CPU].provider, {})]

    def prepare(self, options: ort.SessionOptions) -> None:
        """What the device wants of a session."""
        if self.device is not None:
            DEVICES[self.device].session(options)

    def fallback(self) -> Request:
        """The same without the device that failed: what takes the rest of its work, in the end the CPU."""
        return replace(self, device=None if self.device is None else DEVICES[self.device].rest)

    def taken(self, provider: str) -> str:
        """The name of the device that a session with `provider` as its first runs on."""
        if self.device is not None and DEVICES[self.device].provider == provider:
            return self.device
        return next((name for name, device in DEVICES.items() if device.provider == provider), provider)

    def memory(self, taken: str) -> tuple[str, int]:
        """Where tensors for device `taken` are best kept: (kind, number), as onnxruntime's IO binding takes it."""
        kind = DEVICES[taken].memory if taken in DEVICES else "cpu"
        return kind, (self.index or 0) if kind != "cpu" else 0

    def advice(self, reason: str | None) -> str:
        """Why it could not be used, and what to do."""
        device = DEVICES[self.name]
        if self.device is None:
            return f"{device.get} to use it"
        if reason is not None:
            return f"onnxruntime says: {reason}"
        return (
            f"this onnxruntime has {device.provider}, which did not load (it wrote the reason to stderr); "
            "check the driver and libraries"
        )


def requested(text: str) -> Request:
    """Understand "auto", "cuda", "cuda:1" …"""
    if not isinstance(text, str):
        raise DeviceError(f"device is {text!r}, expected a name; write e.g. 'auto', 'cpu' or 'cuda:1'")
    kind, colon, number = text.partition(":")
    name = ALIASES.get(kind, kind)
    if name != AUTO and name not in DEVICES:
        raise UnknownName.of("device", kind, [AUTO, *DEVICES, *ALIASES])
    if colon and (name == AUTO or not DEVICES[name].numbered):
        raise DeviceError(f"device {text!r} is not understood: {kind} takes no number; write {kind!r}")
    if colon and not (number.isascii() and number.isdigit()):
        raise DeviceError(f"device {text!r} is not understood; write e.g. '{kind}:1'")
    available = ort.get_available_providers()
    candidates = _AUTOMATIC if name == AUTO else (name,)
    found = next((item for item in candidates if item != CPU and DEVICES[item].provider in available), None)
    return Request(text, name, int(number) if colon else None, found)


def cache_folder(name: str) -> Path:
    """A folder of this user's for what a provider compiles. Private: what is read from it is run."""
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "edgekit" / name
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise DeviceError(
            f"the cache folder {folder} cannot be made ({error.strerror}); set XDG_CACHE_HOME to one that can be written"
        ) from None
    return folder
