"""How fast one step of an exported decoder is: ours in both profiles, optimized, and the same step exported by a peer.

    python -m tests.bench_decoder --work DIR [--peer PYTHON]

GPT-2 small, fp32, random weights, one new token after 512; and 6 layers of width 512 after 2048. Every variant runs in a
process of its own, taking turns (runtime/bench.py); ours as `edgekit bench --past` runs them, the peer's both as it runs itself
and as a mere graph in onnxruntime.
The machine's memory bandwidth is one of the variants: the time to read as many bytes as a step must. PYTHON is an interpreter
with the peer installed (`make bench-decoder` makes one). Prints ratios and writes bench-decoder.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from runtime.bench import BenchReport, bench, bundle_variant
from runtime.bench_worker import Variant, serve
from runtime.bundle import Bundle

THREADS = 2
SHAPES = {
    "gpt2": ({}, 512),
    "decoder-6x512": (
        {"width": 512, "heads": 8, "layers": 6, "feedforward": 2048, "vocabulary": 32_000, "max_positions": 4096, "pad": -1},
        2048,
    ),
}


class StepTarget:
    """One step of the peer's graph in onnxruntime alone, with bound inputs and outputs."""

    device = "cpu"

    def __init__(self, request: dict[str, Any]) -> None:
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.intra_op_num_threads = THREADS
        options.log_severity_level = 3
        self._session = ort.InferenceSession(request["path"], options, providers=["CPUExecutionProvider"])
        self._past = request["past"]
        self.inputs = f"1 token after {self._past}"

    def prepare(self, batch: int | None) -> Callable[[], object]:
        import onnxruntime as ort

        binding = self._session.io_binding()
        for item in self._session.get_inputs():
            array = self._feed(item.name, item.type, item.shape)
            binding.bind_ortvalue_input(item.name, ort.OrtValue.ortvalue_from_numpy(array))
        for item in self._session.get_outputs():
            binding.bind_output(item.name, "cpu")
        return lambda: self._session.run_with_iobinding(binding)

    def _feed(self, name: str, kind: str, shape: list[int | str]) -> np.ndarray[Any, Any]:
        if kind == "tensor(float)":  # keys and values (1, heads, past, head)
            return np.random.default_rng(0).standard_normal((1, shape[1], self._past, shape[3]), np.float32)  # type: ignore[arg-type]
        if name == "attention_mask":
            return np.ones((1, self._past + 1), np.int64)
        return np.full((1, 1), self._past if name == "position_ids" else 7, np.int64)


class PeerTarget:
    """The peer's own call of its export, in its own environment."""

    device = "cpu"

    def __init__(self, request: dict[str, Any]) -> None:
        import onnxruntime as ort
        import torch
        from optimum.onnxruntime import ORTModelForCausalLM

        torch.set_num_threads(THREADS)
        options = ort.SessionOptions()
        options.intra_op_num_threads = THREADS
        self._model = ORTModelForCausalLM.from_pretrained(request["path"], session_options=options)
        self._past = request["past"]
        self.inputs = f"1 token after {self._past}"

    def prepare(self, batch: int | None) -> Callable[[], object]:
        import torch

        config = self._model.config
        shape = (1, config.n_head, self._past, config.n_embd // config.n_head)
        feeds = {
            "input_ids": torch.full((1, 1), 7),
            "attention_mask": torch.ones((1, self._past + 1), dtype=torch.int64),
            "position_ids": torch.full((1, 1), self._past),
            "past_key_values": tuple((torch.randn(shape), torch.randn(shape)) for _ in range(config.n_layer)),
        }
        return lambda: self._model(**feeds)


class BandwidthTarget:
    """Reads as many bytes as a step must, with the same threads."""

    device = "cpu"

    def __init__(self, request: dict[str, Any]) -> None:
        import torch

        torch.set_num_threads(THREADS)
        self._data = torch.ones(request["bytes"] // 4)
        self.inputs = f"{request['bytes']} bytes"

    def prepare(self, batch: int | None) -> Callable[[], object]:
        return self._data.sum


def bytes_of_a_step(network: Any, past: int) -> int:
    """Every weight but the tables that only one row is taken of, and the keys and values of the past."""
    tables = network.positions.table.weight.numel()
    weights = sum(parameter.numel() for parameter in network.parameters()) - tables
    width = network.embedding.embedding_dim
    return int(4 * (weights + 2 * len(network.layers) * past * width))


def make_bundles(shape: str, settings: dict[str, Any], work: Path) -> dict[str, Path]:
    """Portable, onnxruntime and optimized bundles of a shape; made once."""
    from exporters.export import export
    from exporters.optimize import optimize
    from exporters.source import find_source

    architecture = "gpt2" if shape == "gpt2" else "gpt"
    paths = {name: work / f"{shape}-{name}.bundle" for name in ("portable", "onnxruntime", "optimized")}
    for profile in ("portable", "onnxruntime"):
        if not paths[profile].exists():
            print(f"exporting {shape}, {profile}", file=sys.stderr)
            export(find_source(architecture, settings, profile=profile), paths[profile])
    if not paths["optimized"].exists():
        print(f"optimizing {shape}", file=sys.stderr)
        optimize(Bundle.open(paths["onnxruntime"]), paths["optimized"])
    return paths


_PEER = """
import sys, torch
from transformers import GPT2Config, GPT2LMHeadModel
from optimum.onnxruntime import ORTModelForCausalLM
torch.manual_seed(0)
GPT2LMHeadModel(GPT2Config()).eval().save_pretrained(sys.argv[1] + "-torch")
ORTModelForCausalLM.from_pretrained(sys.argv[1] + "-torch", export=True).save_pretrained(sys.argv[1])
"""


def make_peer(python: str, work: Path) -> Path:
    folder = work / "peer-gpt2"
    if not (folder / "model.onnx").exists():
        print("exporting gpt2 with the peer", file=sys.stderr)
        subprocess.run([python, "-c", _PEER, str(folder)], check=True, stdout=sys.stderr)
    return folder / "model.onnx"


def measure(shape: str, work: Path, peer: str | None) -> tuple[BenchReport, int]:
    from exporters.source import find_source

    settings, past = SHAPES[shape]
    bundles = make_bundles(shape, settings, work)
    network = find_source("gpt2" if shape == "gpt2" else "gpt", settings).generator
    assert network is not None
    size = bytes_of_a_step(network.network, past)
    theirs = make_peer(peer, work) if peer and shape == "gpt2" else None
    variants = [bundle_variant(path, name=name, threads=THREADS, past=past) for name, path in bundles.items()]
    if theirs:
        graph = {"target": "step", "path": str(theirs.absolute()), "past": past}
        variants.append(Variant("peer's graph", "tests.bench_decoder", graph))
        request = {"target": "peer", "path": str(theirs.parent.absolute()), "past": past}
        variants.append(Variant("peer", "tests.bench_decoder", request, python=str(peer)))
    variants.append(Variant("bandwidth", "tests.bench_decoder", {"target": "bandwidth", "bytes": size}))
    return bench(variants, threads=THREADS, rounds=15, launches=2, turn_seconds=0.2), size


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path, default=Path("bench-work"))
    parser.add_argument("--peer", help="python with the peer installed")
    parser.add_argument("--shape", choices=SHAPES, action="append")
    arguments = parser.parse_args()
    arguments.work.mkdir(exist_ok=True)
    results = []
    for shape in arguments.shape or SHAPES:
        report, size = measure(shape, arguments.work, arguments.peer)
        if report.warning:
            print(report.warning, file=sys.stderr)
        times = {item.variant: report.timing(item.variant, 1) for item in report.timings}
        for name, timing in times.items():
            ratio = f"{timing.ratio.median:.2f} of portable" if timing.ratio else ""
            print(f"{shape:14} {name:12} {timing.latency.median / 1000:8.2f} ms  {ratio}")
        ours, floor = times["optimized"].latency.median, times["bandwidth"].latency.median
        speed = f"{floor / ours:.2f} of the bandwidth ({size / floor / 1000:.1f} GB/s)"
        print(f"{shape:14} optimized reads {size / 1e6:.0f} MB at {speed}")
        for name in ("peer", "peer's graph"):
            if name in times:
                print(f"{shape:14} optimized takes {ours / times[name].latency.median:.2f} of the time of {name}")
        results.append({"shape": shape, "bytes": size, **report.to_json()})
    Path("bench-decoder.json").write_text(json.dumps(results, indent=1))


def _open(request: dict[str, Any]) -> Any:
    return {"step": StepTarget, "peer": PeerTarget, "bandwidth": BandwidthTarget}[request["target"]](request)


if __name__ == "__main__":
    serve(_open) if sys.argv[1:] == ["bench-worker"] else main()
