"""Devices by name. Providers that this machine cannot have are stood in for by fakes of onnxruntime's two answers: the list of
what is available, and a session that takes a provider, does not take it, or refuses to be made."""

from __future__ import annotations

import stat
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

import runtime
from runtime.devices import ALIASES, AUTO, CPU, DEVICES, cache_folder, requested
from runtime.errors import BundleError, DeviceError, OptionError, UnknownName

REAL = ort.InferenceSession
Fake = Callable[..., list[list[str]]]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Fake:
    """fake(available, taken=…, refused=…): an onnxruntime with other providers; returns what sessions were asked for."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def install(*available: str, taken: bool = True, refused: dict[str, str] | None = None) -> list[list[str]]:
        asked: list[list[str]] = []

        class FakeSession:
            def __init__(self, source: Any, options: Any, *, providers: list[Any], **rest: Any) -> None:
                names = [name for name, _ in providers]
                asked.append(names if rest["enable_fallback"] == 0 else ["onnxruntime may change them"])
                for name, problem in (refused or {}).items():
                    if name in names:
                        raise RuntimeError(problem)
                self._real = REAL(source, options, providers=["CPUExecutionProvider"])
                self._names = names if taken else names[-1:]

            def get_providers(self) -> list[str]:
                return self._names

            def __getattr__(self, name: str) -> Any:
                return getattr(self._real, name)

        monkeypatch.setattr(ort, "get_available_providers", lambda: [*available, "CPUExecutionProvider"])
        monkeypatch.setattr(ort, "InferenceSession", FakeSession)
        return asked

    return install


@pytest.mark.parametrize("name", [name for name in DEVICES if name != CPU])
def test_every_device_in_the_table_is_asked_for_and_verified(name: str, fake: Fake, bundle: Path) -> None:
    provider = DEVICES[name].provider
    asked = fake(provider)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = runtime.load(bundle, device=name, strict=True)
    assert model.device == name
    assert asked == [[provider, "CPUExecutionProvider"]]
    assert model.run({"x": np.ones((1, 4), np.float32)})["y"].shape == (1, 3)


@pytest.mark.parametrize("name", [name for name in DEVICES if name != CPU])
def test_a_device_that_did_not_take_is_a_warning_or_with_strict_an_error(name: str, fake: Fake, bundle: Path) -> None:
    fake(DEVICES[name].provider, taken=False)
    expected = f"device '{name}' could not be used.*{DEVICES[name].provider}, which did not load .*check the driver"
    with pytest.warns(RuntimeWarning, match=expected):
        assert runtime.load(bundle, device=name).device == CPU
    with pytest.raises(DeviceError, match=expected):
        runtime.load(bundle, device=name, strict=True)


@pytest.mark.parametrize("name", [name for name in DEVICES if name != CPU])
def test_a_device_that_onnxruntime_lacks_says_how_to_get_it(name: str, bundle: Path) -> None:
    if DEVICES[name].provider in ort.get_available_providers():
        pytest.skip("this machine has it")
    with pytest.warns(RuntimeWarning, match=f"runs on cpu; {DEVICES[name].get} to use it"):
        assert runtime.load(bundle, device=name).device == CPU
    with pytest.raises(DeviceError, match=DEVICES[name].get):
        runtime.load(bundle, device=name, strict=True)


def test_what_a_provider_says_when_it_refuses_is_told(fake: Fake, bundle: Path) -> None:
    asked = fake("OpenVINOExecutionProvider", refused={"OpenVINOExecutionProvider": "Device GPU\n is not available"})
    expected = (
        "device 'openvino-gpu' could not be used and the model runs on cpu; onnxruntime says: Device GPU is not available"
    )
    with pytest.warns(RuntimeWarning, match=expected):
        model = runtime.load(bundle, device="openvino-gpu")
    assert model.device == CPU
    assert asked == [["OpenVINOExecutionProvider", "CPUExecutionProvider"], ["CPUExecutionProvider"]]
    assert model.run({"x": np.ones((1, 4), np.float32)})["y"].shape == (1, 3)
    with pytest.raises(DeviceError, match="onnxruntime says: Device GPU is not available"):
        runtime.load(bundle, device="openvino-gpu", strict=True)


def test_tensorrt_leaves_to_cuda_what_it_cannot_run_and_falls_back_to_it(fake: Fake, bundle: Path) -> None:
    both = ("TensorrtExecutionProvider", "CUDAExecutionProvider")
    assert fake(*both) == []
    assert runtime.load(bundle, device="tensorrt:1").sessions["model"].memory == ("cuda", 1)
    asked = fake(*both, refused={both[0]: "no TensorRT libraries"})
    with pytest.warns(RuntimeWarning, match="'tensorrt' could not be used and the model runs on cuda; .*no TensorRT libraries"):
        assert runtime.load(bundle, device="tensorrt").device == "cuda"
    assert asked == [[*both, "CPUExecutionProvider"], ["CUDAExecutionProvider", "CPUExecutionProvider"]]


def test_a_graph_that_no_device_loads_is_not_blamed_on_the_device(fake: Fake, bundle: Path) -> None:
    fake("CUDAExecutionProvider", refused={"CUDAExecutionProvider": "bad graph", "CPUExecutionProvider": "bad graph"})
    with pytest.raises(BundleError, match="cannot load model.onnx: bad graph"):
        runtime.load(bundle, device="cuda")


def test_auto_takes_a_gpu_and_says_nothing_where_there_is_none(fake: Fake, bundle: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fake("CUDAExecutionProvider")
        assert runtime.load(bundle).device == "cuda"
        fake("DmlExecutionProvider")
        assert runtime.load(bundle).device == "directml"
        fake("CUDAExecutionProvider", taken=False)
        assert runtime.load(bundle).device == CPU
        fake("CUDAExecutionProvider", refused={"CUDAExecutionProvider": "no driver"})
        assert runtime.load(bundle).device == CPU
        fake("XnnpackExecutionProvider", "CoreMLExecutionProvider")
        assert runtime.load(bundle).device == CPU


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("cuda:2", {"device_id": "2", "arena_extend_strategy": "kSameAsRequested", "cudnn_conv_algo_search": "HEURISTIC"}),
        ("tensorrt", {"trt_fp16_enable": "0", "trt_engine_cache_enable": "1"}),
        ("tensorrt-fp16:1", {"trt_fp16_enable": "1", "device_id": "1"}),
        ("openvino", {"device_type": "CPU", "num_of_threads": "3"}),
        ("openvino-gpu", {"device_type": "GPU"}),
        ("openvino-gpu:1", {"device_type": "GPU.1"}),
        ("openvino-npu", {"device_type": "NPU"}),
        ("dml:1", {"device_id": "1"}),
        ("rocm", {"device_id": "0"}),
        ("qnn", {"backend_type": "htp"}),
        ("coreml", {"ModelFormat": "MLProgram"}),
        ("xnnpack", {"intra_op_num_threads": "3"}),
    ],
)
def test_options_of_a_device(device: str, expected: dict[str, str], fake: Fake) -> None:
    fake(*(item.provider for item in DEVICES.values()))
    (_, options), *_ = requested(device).providers(threads=3)
    assert expected.items() <= options.items()
    assert all(isinstance(value, str) for value in options.values())


def test_sessions_are_prepared_as_a_device_wants() -> None:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 4
    DEVICES["directml"].session(options)
    assert options.enable_mem_pattern is False
    DEVICES["xnnpack"].session(options)
    assert options.intra_op_num_threads == 1


def test_what_is_compiled_is_kept_in_a_private_folder_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = cache_folder("tensorrt")
    assert folder == tmp_path / "edgekit" / "tensorrt"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(DeviceError, match="cannot be made .*; set XDG_CACHE_HOME to one that can be written"):
        cache_folder("tensorrt")


def test_a_cache_that_cannot_be_made_is_a_reason_to_fall_back(
    fake: Fake, bundle: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake("TensorrtExecutionProvider", "CUDAExecutionProvider")
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.warns(RuntimeWarning, match="the model runs on cuda; .*set XDG_CACHE_HOME"):
        assert runtime.load(bundle, device="tensorrt").device == "cuda"


@pytest.mark.parametrize(
    ("device", "error", "message"),
    [
        ("cudda", UnknownName, "no device named 'cudda'; did you mean 'cuda'"),
        ("", UnknownName, "no device named ''; known: acl, auto, coreml, cpu"),
        ("cuda:one", DeviceError, "device 'cuda:one' is not understood; write e.g. 'cuda:1'"),
        ("cuda:-1", DeviceError, "write e.g. 'cuda:1'"),
        ("cuda:", DeviceError, "write e.g. 'cuda:1'"),
        ("cpu:1", DeviceError, "device 'cpu:1' is not understood: cpu takes no number; write 'cpu'"),
        ("auto:1", DeviceError, "auto takes no number"),
        ("coreml:0", DeviceError, "coreml takes no number"),
        (None, DeviceError, "device is None, expected a name; write e.g. 'auto', 'cpu' or 'cuda:1'"),
    ],
)
def test_names_that_are_not_understood(device: str, error: type[Exception], message: str, bundle: Path) -> None:
    with pytest.raises(error, match=message):
        runtime.load(bundle, device=device)


def test_aliases_and_what_auto_takes_are_in_the_table() -> None:
    from runtime.devices import _AUTOMATIC

    assert {*ALIASES.values(), *_AUTOMATIC} <= DEVICES.keys()
    assert not ALIASES.keys() & {AUTO, *DEVICES}
    assert all(device.rest is None or device.rest in DEVICES for device in DEVICES.values())


def test_provider_names_are_onnxruntimes_own() -> None:
    assert {device.provider for device in DEVICES.values()} <= set(ort.get_all_providers())


def test_a_number_of_threads_below_one_is_refused(bundle: Path) -> None:
    for threads in (0, -2, 1.5, "2"):
        with pytest.raises(OptionError, match=f"threads is {threads!r}, expected 1 or more; leave it out"):
            runtime.load(bundle, threads=threads)  # type: ignore[arg-type]
