"""Opening someone's model in onnxruntime, or telling in one line which part of it onnxruntime does not know."""

from __future__ import annotations

import re
from pathlib import Path

import onnx
import onnxruntime

from runtime.errors import BundleError, SourceError
from runtime.session import Session
from runtime.signature import GraphSignature

_LARGEST = 2**31 - 1  # bytes of one protobuf message
_OLDEST_OPSET = 7  # the first that onnxruntime promises to run; it runs some graphs below it
_STANDARD = ("", "ai.onnx")

_NEWER_IR = re.compile(r"Unsupported model IR version: (\d+), max supported IR version: (\d+)")
_UNRELEASED_OPSET = re.compile(r"Opset (\d+) is under development.*?till opset (\d+)", re.DOTALL)
_UNKNOWN_OPERATOR = re.compile(r"(?:Fatal error: (?P<domain>[\w.]+):(?P<operator>\w+)\(-?\d+\) is not a registered)")
_NO_IMPORT = re.compile(r'In Node, \(".*?", (?P<operator>\w+), "(?P<domain>[\w.]+)", -?\d+\).*No opset import for domain')
_UNKNOWN_STANDARD = re.compile(r"No Op registered for (\w+) with domain_version of (\d+)")
_NOT_IMPLEMENTED = re.compile(r"Could not find an implementation for (\w+)\((\d+)\)")


def serialized(path: Path, model: onnx.ModelProto) -> bytes:
    """The model as one message, weights from external files inside it."""
    if (size := model.ByteSize()) > _LARGEST:
        raise SourceError(
            f"{path} holds {size:,} bytes, and a graph with its weights inside it may have {_LARGEST:,}; "
            "store its weights in a narrower type (fp16), or split it"
        )
    return model.SerializeToString()


def open_original(path: Path, model: onnx.ModelProto, signature: GraphSignature, optimization: str = "none") -> Session:
    """The original in onnxruntime. Without graph optimizations it is the reference for everything made of it."""
    try:
        return Session(serialized(path, model), signature, device="cpu", optimization=optimization, log_level=4)
    except BundleError as error:
        reason = str(error.__cause__ or error)
        raise SourceError(f"{path} {_explained(model, reason)}") from error


def _explained(model: onnx.ModelProto, reason: str) -> str:
    """What onnxruntime did not take, in words that name the fix."""
    host = f"onnxruntime {onnxruntime.__version__}"
    opset = next((item.version for item in model.opset_import if item.domain in _STANDARD), None)
    if found := _NEWER_IR.search(reason):
        return (
            f"has IR version {found[1]}, and {host} reads up to {found[2]}; "
            f"upgrade onnxruntime, or save it with ir_version = {found[2]}"
        )
    if found := _UNRELEASED_OPSET.search(reason):
        return f"uses opset {found[1]}, and {host} runs up to {found[2]}; export it again with opset {found[2]} or lower"
    if found := _UNKNOWN_OPERATOR.search(reason) or _NO_IMPORT.search(reason):
        return (
            f"uses the operator {found['operator']} of the domain {found['domain']!r}, which {host} does not know; "
            "export it again with standard operators"
        )
    if found := _UNKNOWN_STANDARD.search(reason):
        return f"uses the operator {found[1]}, which opset {found[2]} does not have; export it again with the opset that has it"
    if found := _NOT_IMPLEMENTED.search(reason):
        if opset is not None and opset < _OLDEST_OPSET:
            return (
                f"uses opset {opset}, whose {found[1]} {host} does not run; "
                f"convert it to opset {_OLDEST_OPSET} or later with onnx.version_converter"
            )
        return f"uses {found[1]} on a type that {host} has no code for; export it again in float32"
    try:
        onnx.checker.check_model(model)
    except Exception as error:
        return f"breaks the ONNX standard: {_line(error)}; export it again from its framework"
    return f"cannot be loaded by {host}: {_line(reason)}; export it again from its framework"


def _line(reason: object) -> str:
    return " ".join(str(reason).split())[:300]
