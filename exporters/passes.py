"""The passes of `optimize`, in order: cleaning by library passes first, then our own rewrites."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import onnx
import onnx_ir
from onnx_ir.passes import common

from .rewrites import REWRITES
from .rewrites.engine import Rewrite, Rewritten, apply


@dataclass(frozen=True)
class Pass:
    name: str
    description: str
    apply: Callable[[onnx.ModelProto], onnx.ModelProto | Rewritten]
    standard: bool = True  # False: what it makes runs in onnxruntime only
    timed: bool = False  # whether it must prove that it is not slower
    doubtful: bool = False  # and that it is faster


def passes_for(*, portable: bool) -> tuple[Pass, ...]:
    """All passes; with `portable` those that keep to the operators of the ONNX standard."""
    rewrites = tuple(_of(rewrite, portable) for rewrite in REWRITES if rewrite.standard or not portable)
    return (*_CLEANING, *rewrites)


def _of(rewrite: Rewrite[Any], portable: bool) -> Pass:
    run = partial(apply, rewrite, portable=portable)
    return Pass(rewrite.name, rewrite.description, run, rewrite.standard, timed=True, doubtful=rewrite.doubtful)


def _ir_passes(*passes: Callable[[], Any]) -> Callable[[onnx.ModelProto], onnx.ModelProto]:
    def run(model: onnx.ModelProto) -> onnx.ModelProto:
        graph = onnx_ir.from_proto(model)
        for make in passes:
            make()(graph)
        return onnx_ir.to_proto(graph)

    return run


def _fold_constants(model: onnx.ModelProto) -> onnx.ModelProto:
    from onnxscript import optimizer

    graph = onnx_ir.from_proto(model)
    optimizer.fold_constants(graph)
    return onnx_ir.to_proto(graph)


_CLEANING = (
    Pass("fold-constants", "compute now what does not depend on the input", _fold_constants),
    Pass("remove-identities", "drop nodes that hand on their input", _ir_passes(common.IdentityEliminationPass)),
    Pass(
        "merge-duplicates",
        "share equal weights and equal computations",
        _ir_passes(common.DeduplicateInitializersPass, common.CommonSubexpressionEliminationPass),
    ),
    Pass("remove-unused", "drop nodes and weights that no output needs", _ir_passes(common.RemoveUnusedNodesPass)),
)

PASSES = passes_for(portable=False)
