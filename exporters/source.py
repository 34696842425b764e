"""What can be exported, and how a SOURCE on the command line is found.

runs/lenet                 a run directory
lenet                      an architecture of the catalogue, with fresh weights
my_model.py:build          a function in a file      } returning (module, example_inputs[, options])
package.module:build       a function in a module    }
model.onnx                 someone's ONNX file (see adopt.py)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from architectures.architecture import Architecture, output_name
from architectures.catalog import CATALOG, find
from architectures.raw_input import build_network
from architectures.run_directory import Run, is_run
from runtime.errors import OptionError, SourceError, UnknownName
from runtime.signature import TensorSpec

from .exportable import Exportable, GraphSource
from .profiles import ONNXRUNTIME, PORTABLE, PROFILES
from .text_graphs import about_tokens, encoder_decoder, encoder_only, language_model, no_attention
from .user_network import from_function

_EXAMPLE_BATCH = 3  # torch.export treats sizes 0 and 1 as constants


def find_source(
    text: str, settings: Mapping[str, Any] | None = None, *, profile: str | None = None, attention: bool = False
) -> Exportable:
    """The network that SOURCE names, as it is to be exported. ONNX files are not networks: see adopt.py.

    `profile` is for networks with attention (see profiles.py); None takes what suits the network. With `attention` an
    encoder–decoder gives its attention to the source too (see alignment.py).
    """
    path = Path(text)
    if profile is not None and profile not in PROFILES:
        raise UnknownName.of("profile", profile, PROFILES)
    if is_run(path):
        _refuse_settings(text, settings)
        return from_run(path, profile, attention)
    if text in CATALOG:
        return from_architecture(text, settings, profile, attention)
    if ":" in text:
        _refuse_settings(text, settings)
        _refuse_profile(text, profile)
        _refuse_attention(text, attention)
        return from_function(text)
    if path.is_dir():
        raise SourceError(f"{text} is a directory without run.json; expected a run made by: edgekit train")
    if path.suffix == ".py" and path.exists():
        raise SourceError(f"{text} is a Python file; name the function that builds the network: {text}:build")
    if path.suffix or len(path.parts) > 1:
        raise SourceError(f"there is no {text}; expected a run, an architecture's name, file.py:function or a .onnx file")
    raise UnknownName.of("architecture", text, CATALOG)


def from_run(directory: Path, profile: str | None = None, attention: bool = False) -> Exportable:
    run = Run.open(directory)
    about = run.preprocessing
    architecture = find(run.architecture)
    module, specs = run.load(directory)
    source = {
        "kind": "run",
        "architecture": run.architecture,
        "config": run.config,
        "recipe": _without_path(run.recipe),
        "metrics": {key: value for key, value in (run.metrics or {}).items() if key != "history"},
    }
    if about is None:
        network = _on_text(architecture, module, specs, run.task, profile, attention)
        tokenizers = run.load_tokenizers(directory)
        return replace(network, labels=run.labels, data=run.data, source=source, tokenizers=tokenizers)
    _refuse_profile(run.architecture, profile)
    _refuse_attention(run.architecture, attention)
    (spec,) = specs
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
        source=source,
    )


def _without_path(recipe: dict[str, Any]) -> dict[str, Any]:
    """A bundle must not carry a path of the machine it was made on."""
    sections = {"data": "path", "training": "start"}
    return recipe | {name: {k: v for k, v in recipe[name].items() if k != key} for name, key in sections.items()}


def from_architecture(
    name: str, settings: Mapping[str, Any] | None = None, profile: str | None = None, attention: bool = False
) -> Exportable:
    architecture = find(name)
    config = architecture.configure(settings)
    torch.manual_seed(0)
    module, specs = build_network(architecture, config, None)
    module.eval()
    source = {"kind": "architecture", "architecture": name, "config": asdict(config)}
    if architecture.takes == ("tokens",):
        task = getattr(config, "task", architecture.task)
        return replace(_on_text(architecture, module, specs, task, profile, attention), source=source)
    _refuse_profile(name, profile)
    _refuse_attention(name, attention)
    (spec,) = specs
    shape = [_EXAMPLE_BATCH if isinstance(dim, str) else dim for dim in spec.shape]
    example = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    graph = GraphSource(module, {spec.name: example}, {spec.name: {0: "batch"}}, (output_name(architecture.task),))
    return Exportable(name=name, task=architecture.task, graphs=(graph,), source=source)


def _on_text(
    architecture: Architecture,
    module: nn.Module,
    specs: tuple[TensorSpec, ...],
    task: str,
    profile: str | None,
    attention: bool,
) -> Exportable:
    generator = preprocessing = None
    if task != "seq2seq":
        _refuse_attention(architecture.name, attention)
    if task == "language-model":
        profile = profile or ONNXRUNTIME
        graphs, generator = language_model(module, profile)
    elif task == "seq2seq":
        profile = profile or ONNXRUNTIME
        graphs, generator = encoder_decoder(module, profile, attention=attention)
    else:
        profile = profile or PORTABLE
        graphs = encoder_only(module, tuple(spec.name for spec in specs), task, profile)
        preprocessing = about_tokens(module)
    return Exportable(architecture.name, task, graphs, preprocessing=preprocessing, generator=generator, profile=profile)


def _refuse_settings(text: str, settings: Mapping[str, Any] | None) -> None:
    if settings:
        raise SourceError(f"--set applies to an architecture's name; {text} already fixes its own settings")


def _refuse_profile(text: str, profile: str | None) -> None:
    if profile not in (None, PORTABLE):
        raise OptionError(
            f"--profile {profile} fuses the attention of this catalogue's networks on text, and {text} has none; "
            "leave --profile out, and try edgekit optimize on the bundle"
        )


def _refuse_attention(text: str, attention: bool) -> None:
    if attention:
        raise no_attention(f"{text}, which is no encoder–decoder of the catalogue")
