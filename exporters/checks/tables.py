"""What each target runs, read from the tables in exporters/targets. Not a rule."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

TARGETS = ("cpu", "cuda", "mobile", "web", "webgpu", "tensorrt")


@dataclass(frozen=True)
class Target:
    name: str
    version: str
    origin: str  # where the knowledge comes from
    operators: frozenset[str]  # that run on its accelerator; empty if it has none
    fallback: str  # where others run
    types: dict[str, tuple[str, ...]]  # operator → types of the first input it takes
    missing: frozenset[str]  # operators that it does not have at all
    missing_domains: tuple[str, ...]
    missing_types: tuple[str, ...]


@cache
def target_named(name: str) -> Target:
    table = tomllib.loads((resources.files("exporters.targets") / f"{name}.toml").read_text(encoding="utf-8"))
    return Target(
        name,
        table["version"],
        table["origin"],
        frozenset(table.get("operators", "").split()),
        table.get("fallback", ""),
        {operator: tuple(kinds) for operator, kinds in table.get("types", {}).items()},
        frozenset(table.get("missing", "").split()),
        tuple(table.get("missing_domains", ())),
        tuple(table.get("missing_types", ())),
    )


ACCELERATORS = {
    "NNAPI": ("nnapi_supported_ops.md",),
    "CoreML": ("coreml_supported_mlprogram_ops.md", "coreml_supported_neuralnetwork_ops.md"),
}


@cache
def accelerated(accelerator: str) -> frozenset[str]:
    """The operators that a phone's accelerator takes over, from the tables that onnxruntime installs; empty if it has none."""
    import onnxruntime

    folder = Path(onnxruntime.__file__).parent / "tools" / "mobile_helpers"
    names = set()
    for file in ACCELERATORS[accelerator]:
        if (folder / file).is_file():
            rows = (line.split("|") for line in (folder / file).read_text(encoding="utf-8").splitlines())
            names |= {row[1].strip() for row in rows if len(row) > 2}
    return frozenset(
        name.replace(":", ".", 1).removeprefix("ai.onnx.") if name.startswith("ai.onnx") else name.replace(":", "::", 1)
        for name in names
        if name.startswith(("ai.onnx", "com.microsoft"))
    )
