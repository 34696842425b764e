"""What can be exported, and how a SOURCE on the command line is found.

runs/lenet                 a run directory
lenet                      an architecture of the catalogue, with fresh weights
my_model.py:build          a function in a file      } returning (module, example_inputs[, options])
package.module:build       a function in a module    }
model.onnx                 someone's ONNX file (see adopt.py)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from architectures.architecture import Architecture, output_name
from architectures.catalog import CATALOG, find
from architectures.raw_input import build_network
from architectures.run_directory import Run, is_run
from runtime.errors import SourceError, UnknownName

from .exportable import Exportable, GraphSource
from .user_network import from_function

_EXAMPLE_BATCH = 3  # torch.export treats sizes 0 and 1 as constants


def find_source(text: str, settings: Mapping[str, Any] | None = None) -> Exportable:
    """The network that SOURCE names. ONNX files are not networks: see adopt.py."""
    path = Path(text)
    if is_run(path):
        _refuse_settings(text, settings)
        return from_run(path)
    if text in CATALOG:
        return from_architecture(text, settings)
    if ":" in text:
        _refuse_settings(text, settings)
        return from_function(text)
    if path.is_dir():
        raise SourceError(f"{text} is a directory without run.json; expected a run made by: edgekit train")
    if path.suffix == ".py" and path.exists():
        raise SourceError(f"{text} is a Python file; name the function that builds the network: {text}:build")
    if path.suffix or len(path.parts) > 1:
        raise SourceError(f"there is no {text}; expected a run, an architecture's name, file.py:function or a .onnx file")
    raise UnknownName.of("architecture", text, CATALOG)


def from_run(directory: Path) -> Exportable:
    run = Run.open(directory)
    about = run.preprocessing
    refuse_text(find(run.architecture))
    assert about is not None
    module, (spec,) = run.load(directory)
    trailing = (1,) * (len(about.shape) - 1)
    random = torch.randn((_EXAMPLE_BATCH, *about.shape), generator=torch.Generator().manual_seed(0))
    example = random * torch.tensor(about.deviation).reshape(-1, *trailing) + torch.tensor(about.mean).reshape(-1, *trailing)
    return Exportable(
        name=run.architecture,
        task=run.task,
        graphs=(GraphSource(module, {spec.name: example}, {spec.name: {0: "batch"}}, (output_name(run.task),)),),
        labels=run.labels,
        preprocessing=about.to_json(),
        data=run.data,
        source={
            "kind": "run",
            "architecture": run.architecture,
            "config": run.config,
            "recipe": _without_path(run.recipe),
            "metrics": {key: value for key, value in (run.metrics or {}).items() if key != "history"},
        },
    )


def _without_path(recipe: dict[str, Any]) -> dict[str, Any]:
    """A bundle must not carry a path of the machine it was made on."""
    sections = {"data": "path", "training": "start"}
    return recipe | {name: {k: v for k, v in recipe[name].items() if k != key} for name, key in sections.items()}


def from_architecture(name: str, settings: Mapping[str, Any] | None = None) -> Exportable:
    architecture = find(name)
    config = architecture.configure(settings)
    refuse_text(architecture)
    torch.manual_seed(0)
    module, (spec,) = build_network(architecture, config, None)
    shape = [_EXAMPLE_BATCH if isinstance(dim, str) else dim for dim in spec.shape]
    example = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    graph = GraphSource(module.eval(), {spec.name: example}, {spec.name: {0: "batch"}}, (output_name(architecture.task),))
    return Exportable(
        name=name,
        task=architecture.task,
        graphs=(graph,),
        source={"kind": "architecture", "architecture": name, "config": asdict(config)},
    )


def refuse_text(architecture: Architecture) -> None:
    if architecture.takes == ("tokens",):
        raise SourceError(
            f"{architecture.name} takes text, and exporting such networks is not built yet; "
            "until then export one that takes images or columns, or your own module with file.py:function"
        )


def _refuse_settings(text: str, settings: Mapping[str, Any] | None) -> None:
    if settings:
        raise SourceError(f"--set applies to an architecture's name; {text} already fixes its own settings")
