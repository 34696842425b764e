"""The user's own network: a function in a file or module that returns (module, example_inputs) and perhaps options."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from runtime.bundle import TASKS
from runtime.errors import EdgekitError, SourceError, UnknownName

from .exportable import Exportable, GraphSource, kind_of, named_outputs

_USER_OPTIONS = ("dynamic_axes", "output_names", "task", "labels", "name")


def from_function(reference: str) -> Exportable:
    """The user's own network: a function returning (module, example inputs) and perhaps a dict of options."""
    built = _call_user(reference, load_function(reference))
    form = "expected (module, example_inputs) or (module, example_inputs, options)"
    if not isinstance(built, tuple) or len(built) not in (2, 3):
        raise SourceError(f"{reference} returned {kind_of(built)}; {form}")
    module, examples, options = built if len(built) == 3 else (*built, {})
    if not isinstance(module, nn.Module):
        raise SourceError(f"{reference} returned {kind_of(module)} as its first element, not an nn.Module; {form}")
    if not isinstance(options, Mapping):
        raise SourceError(f"{reference} returned {kind_of(options)} as its options, not a dict; {form}")
    if unknown := [key for key in options if key not in _USER_OPTIONS]:
        raise UnknownName.of("export option", str(unknown[0]), _USER_OPTIONS)
    module = module.eval()
    inputs, by_keyword = _named_inputs(reference, module, examples)
    axes = _declared_axes(reference, inputs, options.get("dynamic_axes"))
    draft = GraphSource(module, inputs, axes or {}, (), by_keyword=by_keyword)
    graph = _with_output_names(reference, draft, options.get("output_names"))
    return Exportable(
        name=str(options.get("name") or reference.rpartition(":")[0].split("/")[-1].removesuffix(".py").split(".")[-1]),
        task=_known_task(reference, options.get("task", "tensors")),
        graphs=(graph if axes is not None else _with_found_batch_axis(graph),),
        labels=_labels(reference, options.get("labels")),
        source={"kind": "function", "reference": reference.rpartition("/")[2]},  # without folders of this machine
    )


def load_function(reference: str) -> Callable[[], Any]:
    place, _, name = reference.rpartition(":")
    if not place or not name.isidentifier():
        raise SourceError(f"{reference!r} is not understood; expected path/to/file.py:function or package.module:function")
    try:
        module = _import_file(Path(place)) if place.endswith(".py") else _import_module(place)
    except EdgekitError:
        raise
    except (Exception, SystemExit) as error:
        raise SourceError(f"importing {place} raised {_where(error)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
        raise UnknownName.of(f"function in {place}", name, functions)
    return function


def _import_file(path: Path) -> Any:
    if not path.is_file():
        raise SourceError(f"there is no file {path}; expected path/to/file.py:function")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    if str(path.parent.resolve()) not in sys.path:
        sys.path.insert(0, str(path.parent.resolve()))  # the file may import its neighbours, as when run as a script
    spec.loader.exec_module(module)
    return module


def _import_module(name: str) -> Any:
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            raise SourceError(
                f"there is no module {name!r}; expected package.module:function or path/to/file.py:function"
            ) from None
        raise


def _call_user(reference: str, function: Callable[[], Any]) -> Any:
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what it prints must not get among our results
            return function()
    except (Exception, SystemExit) as error:
        raise SourceError(f"{reference} raised {_where(error)}") from error


def _named_inputs(reference: str, module: nn.Module, examples: Any) -> tuple[dict[str, Tensor], bool]:
    if isinstance(examples, Tensor):
        examples = (examples,)
    by_keyword = isinstance(examples, Mapping)
    if by_keyword:
        named = dict(examples)
    elif isinstance(examples, tuple | list):
        forward = inspect.signature(module.forward).parameters.values()
        parameters = [item.name for item in forward if item.kind in (item.POSITIONAL_ONLY, item.POSITIONAL_OR_KEYWORD)]
        names = (
            parameters[: len(examples)] if len(parameters) >= len(examples) else [f"input_{i}" for i in range(len(examples))]
        )
        named = dict(zip(names, examples, strict=True))
    else:
        raise SourceError(f"{reference} gave example inputs as {kind_of(examples)}; expected a tuple or a dict of tensors")
    if not named:
        raise SourceError(f"{reference} gave no example inputs; expected a tuple or a dict of tensors")
    for name, tensor in named.items():
        if not isinstance(tensor, Tensor):
            raise SourceError(f"example input {name!r} of {reference} is {kind_of(tensor)}; expected a tensor")
        if tensor.numel() == 0 or tensor.dtype == torch.bfloat16 or tensor.is_complex():
            what = "no elements" if tensor.numel() == 0 else f"dtype {tensor.dtype}"
            raise SourceError(
                f"example input {name!r} of {reference} has {what}; give real values of an ordinary type such as float32"
            )
    # Copies: one tensor passed for two arguments would be merged into one graph input without a word.
    return {name: tensor.detach().clone() for name, tensor in named.items()}, by_keyword


def _declared_axes(reference: str, inputs: Mapping[str, Tensor], axes: Any) -> dict[str, dict[int, str]] | None:
    if axes is None:
        return None
    declared: dict[str, dict[int, str]] = {}
    if not isinstance(axes, Mapping) or not all(isinstance(entry, Mapping) for entry in axes.values()):
        raise SourceError(f"dynamic_axes of {reference} is {axes!r}; expected e.g. {{'x': {{0: 'batch'}}}}")
    for name, entry in axes.items():
        if name not in inputs:
            raise UnknownName.of(f"input of {reference} (dynamic_axes are for inputs; outputs follow)", str(name), inputs)
        rank = inputs[name].ndim
        for axis, label in dict(entry).items():
            if not isinstance(axis, int) or not -rank <= axis < rank or not str(label).isidentifier():
                raise SourceError(
                    f"dynamic_axes of {name!r} has {axis!r}: {label!r}; expected e.g. {{0: 'batch'}}, within its {rank} axes"
                )
            declared.setdefault(name, {})[axis % rank] = str(label)
    return declared


def _with_output_names(reference: str, draft: GraphSource, names: Any) -> GraphSource:
    with torch.inference_mode():
        try:
            result = draft.module(**draft.inputs) if draft.by_keyword else draft.module(*draft.inputs.values())
        except Exception as error:
            raise SourceError(f"the network of {reference} fails on its own example inputs: {_where(error)}") from error
    outputs = named_outputs(result)
    for name, tensor in outputs:
        if tensor.dtype == torch.bfloat16 or tensor.is_complex():
            raise SourceError(f"output {name!r} of {reference} is {tensor.dtype}; convert it in forward, e.g. with .float()")
    found = [f"{name}_output" if name in draft.inputs else name for name, _ in outputs]
    chosen = tuple(map(str, names)) if names else tuple(found)
    if clash := [name for name in chosen if name in draft.inputs]:
        raise SourceError(f"{clash[0]!r} of {reference} is both an input and an output; give the output another name")
    if len(chosen) != len(found) or len(set(chosen)) != len(chosen):
        raise SourceError(f"{reference} gives {len(found)} outputs but output_names are {list(chosen)}; give one name for each")
    return replace(draft, output_names=chosen)


def _with_found_batch_axis(draft: GraphSource) -> GraphSource:
    """Axis 0 of every input becomes "batch" if PyTorch agrees: three times the rows in, three times the rows out."""
    if any(tensor.ndim == 0 for tensor in draft.inputs.values()):
        return draft
    if len({tensor.shape[0] for tensor in draft.inputs.values()}) != 1:
        return draft
    try:
        before = draft.call(draft.inputs)
        after = draft.call({name: torch.cat([tensor] * 3) for name, tensor in draft.inputs.items()})
        grows = all(
            y.ndim and y.shape == (3 * x.shape[0], *x.shape[1:]) for x, y in zip(before.values(), after.values(), strict=True)
        )
    except Exception:  # the network takes one batch size only: that is an answer, not a failure
        return draft
    return replace(draft, dynamic_axes={name: {0: "batch"} for name in draft.inputs}) if grows else draft


def _labels(reference: str, labels: Any) -> tuple[str, ...] | None:
    if labels is None:
        return None
    if isinstance(labels, str) or not isinstance(labels, Sequence):
        raise SourceError(f"labels of {reference} is {labels!r}; expected a list of names, one a class")
    return tuple(map(str, labels))


def _known_task(reference: str, task: Any) -> str:
    if task not in TASKS:
        raise UnknownName.of(f"task (from {reference})", str(task), TASKS)
    return str(task)


def _where(error: BaseException) -> str:
    """The error with the user's own line: the last frame that is not inside a library."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        frame
        for frame in frames
        if "site-packages" not in frame.filename
        and "importlib" not in frame.filename
        and Path(frame.filename).name != "user_network.py"
    ]
    line = f" at {Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}{line}"
