"""The user's own network: a function in a file or module that returns (module, example_inputs) and perhaps options."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import itertools
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from runtime.bundle import TASKS
from runtime.errors import EdgekitError, SourceError, UnknownName

from .dynamic_axes import BATCH, find_axes
from .explain import one_line
from .exportable import Exportable, GraphSource, kind_of, named_outputs, output_leaves
from .nesting import Flat, flatten, is_plain, map_leaves
from .traceable import example_hint, refuse_memory, refuse_untraceable_example, refuse_untraceable_module

_USER_OPTIONS = ("dynamic_axes", "input_names", "output_names", "task", "labels", "name")
_FORM = "expected (module, example_inputs) or (module, example_inputs, options)"


def from_function(reference: str) -> Exportable:
    """The user's own network: a function returning (module, example inputs) and perhaps a dict of options."""
    module, examples, options = _built(reference)
    refuse_untraceable_module(reference, module)
    module = module.eval()
    named, by_keyword = _named_examples(reference, module, examples, options.get("input_names"))
    inputs, notes = _tensors_of(reference, named)
    result = _first_result(reference, module, named, by_keyword)
    if not is_plain(result) or list(inputs) != list(named):
        module, by_keyword = Flat(module, named, by_keyword).eval(), False
    draft = GraphSource(module, inputs, {}, (), by_keyword=by_keyword)
    graph = _with_output_names(reference, draft, result, options.get("output_names"))
    notes += [f"output {path!r} is None and left out" for path, leaf in output_leaves(result) if leaf is None]
    refuse_memory(reference, graph)
    axes = _declared_axes(reference, inputs, options.get("dynamic_axes"))
    if axes is None:
        graph, note = find_axes(graph)
        notes.append(note)
    else:
        graph = replace(graph, dynamic_axes=axes)
    return Exportable(
        name=str(options.get("name") or reference.rpartition(":")[0].split("/")[-1].removesuffix(".py").split(".")[-1]),
        task=_known_task(reference, options.get("task", "tensors")),
        graphs=(graph,),
        labels=_labels(reference, options.get("labels")),
        source={"kind": "function", "reference": reference.rpartition("/")[2]},  # without folders of this machine
        notes=tuple(notes),
    )


def _built(reference: str) -> tuple[nn.Module, Any, Mapping[str, Any]]:
    built = _call_user(reference, load_function(reference))
    if not isinstance(built, tuple) or len(built) not in (2, 3):
        raise SourceError(f"{reference} returned {kind_of(built)}; {_FORM}")
    module, examples, options = built if len(built) == 3 else (*built, {})
    if not isinstance(module, nn.Module):
        raise SourceError(f"{reference} returned {kind_of(module)} as its first element, not an nn.Module; {_FORM}")
    if not isinstance(options, Mapping):
        raise SourceError(f"{reference} returned {kind_of(options)} as its options, not a dict; {_FORM}")
    if unknown := [key for key in options if key not in _USER_OPTIONS]:
        raise UnknownName.of("export option", str(unknown[0]), _USER_OPTIONS)
    return module, examples, options


def load_function(reference: str) -> Callable[[], Any]:
    place, _, name = reference.rpartition(":")
    if not place or not name.isidentifier():
        raise SourceError(f"{reference!r} is not understood; expected path/to/file.py:function or package.module:function")
    try:
        module = _import_file(Path(place)) if place.endswith(".py") else _import_module(place)
    except EdgekitError:
        raise
    except (Exception, SystemExit) as error:
        raise SourceError(f"importing {place} raised {one_line(error)}") from error
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
        raise SourceError(f"{reference} raised {one_line(error)}") from error


def _named_examples(reference: str, module: nn.Module, examples: Any, names: Any) -> tuple[dict[str, Any], bool]:
    """The arguments of forward by name, and whether they are passed by name."""
    if isinstance(examples, Tensor):
        examples = (examples,)
    if isinstance(examples, Mapping):
        if names is not None:
            raise SourceError(f"{reference} gives input_names, but its example inputs are a dict, which has names already")
        named, by_keyword = {str(key): value for key, value in examples.items()}, True
    elif isinstance(examples, tuple | list):
        chosen = _position_names(module, len(examples)) if names is None else list(map(str, names))
        if len(chosen) != len(examples) or len(set(chosen)) != len(chosen):
            raise SourceError(
                f"{reference} gives {len(examples)} example inputs but input_names {chosen}; give one name for each"
            )
        named, by_keyword = dict(zip(chosen, examples, strict=True)), False
    else:
        raise SourceError(f"{reference} gave example inputs as {kind_of(examples)}; expected a tuple or a dict of tensors")
    return named, by_keyword


def _position_names(module: nn.Module, count: int) -> list[str]:
    forward = inspect.signature(module.forward).parameters.values()
    names = [item.name for item in forward if item.kind in (item.POSITIONAL_ONLY, item.POSITIONAL_OR_KEYWORD)]
    return names[:count] if len(names) >= count else [f"input_{index}" for index in range(count)]


def _tensors_of(reference: str, named: dict[str, Any]) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors among the examples, copied apart (also within `named`), and notes on what is no input of the graph."""
    leaves = {path: leaf for name, value in named.items() for path, leaf in flatten(name, value).items()}
    given = {path: leaf for path, leaf in leaves.items() if isinstance(leaf, Tensor)}
    for path, leaf in leaves.items():
        if not isinstance(leaf, Tensor | int | float | str | None):
            raise SourceError(
                f"example input {path!r} of {reference} is {kind_of(leaf)}; expected a tensor: torch.as_tensor(...)"
            )
    if not given:
        raise SourceError(f"{reference} gave no example inputs; expected a tuple or a dict of tensors")
    for path, tensor in given.items():
        refuse_untraceable_example(reference, path, tensor)
    notes = [f"{path}={leaf!r} is a constant of the graph" for path, leaf in leaves.items() if path not in given]
    for (one, first), (other, second) in itertools.combinations(given.items(), 2):
        if first is second or first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr():
            kind = "were the same tensor" if first is second else "share memory"
            notes.append(f"examples {one!r} and {other!r} {kind}; copied apart")
    # Copies: one tensor passed for two arguments would be merged into one graph input without a word.
    copies = {path: tensor.detach().clone() for path, tensor in given.items()}
    for name, value in named.items():
        named[name] = map_leaves(copies.get, name, value)
    return copies, notes


def _declared_axes(reference: str, inputs: Mapping[str, Tensor], axes: Any) -> dict[str, dict[int, str]] | None:
    if axes is None:
        return None
    declared: dict[str, dict[int, str]] = {}
    if not isinstance(axes, Mapping) or not all(isinstance(entry, Mapping | list | tuple) for entry in axes.values()):
        raise SourceError(f"dynamic_axes of {reference} is {axes!r}; expected e.g. {{'x': {{0: 'batch'}}}} or {{'x': [0]}}")
    for name, entry in axes.items():
        if name not in inputs:
            raise UnknownName.of(f"input of {reference} (dynamic_axes are for inputs; outputs follow)", str(name), inputs)
        rank = inputs[name].ndim
        labels = entry if isinstance(entry, Mapping) else {axis: _axis_label(name, axis) for axis in entry}
        for axis, label in labels.items():
            if not isinstance(axis, int) or not -rank <= axis < rank or not str(label).isidentifier():
                raise SourceError(
                    f"dynamic_axes of {name!r} has {axis!r}: {label!r}; expected e.g. {{0: 'batch'}}, within its {rank} axes"
                )
            declared.setdefault(name, {})[axis % rank] = str(label)
    return declared


def _axis_label(name: str, axis: Any) -> str:
    """The name of an axis that was listed without one: the first is the batch, as everywhere."""
    return BATCH if axis == 0 else re.sub(r"\W", "_", f"{name}_{axis}")


def _first_result(reference: str, module: nn.Module, named: Mapping[str, Any], by_keyword: bool) -> Any:
    arguments = {name: map_leaves(_copy, name, value) for name, value in named.items()}  # forward may work in place
    with torch.inference_mode(), contextlib.redirect_stdout(sys.stderr):
        try:
            return module(**arguments) if by_keyword else module(*arguments.values())
        except Exception as error:
            hint = example_hint(module, named, error)
            raise SourceError(f"the network of {reference} fails on its own example inputs: {one_line(error)}{hint}") from error


def _copy(path: str, leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _with_output_names(reference: str, draft: GraphSource, result: Any, names: Any) -> GraphSource:
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
