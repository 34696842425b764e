"""The quantization schemes. To add one: a file here, and a line in SCHEMES."""

from runtime.bundle import Manifest

from . import by_row, fp16, int8_dynamic, int8_static, static_text, weights
from .scheme import Scheme

SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (int8_dynamic.SCHEME, int8_static.SCHEME, fp16.SCHEME, fp16.BF16, weights.EIGHT_BIT, weights.FOUR_BIT)
}
_ON_TOKENS = {scheme.name: scheme for scheme in (by_row.ON_TOKENS, static_text.ON_TOKENS)}  # in place of the one above


def scheme_for(name: str, manifest: Manifest) -> Scheme:
    """The scheme of this name for a bundle: networks that read tokens may have one of their own."""
    inputs = [graph.signature.inputs[0] for graph in manifest.graphs.values() if graph.signature.inputs]
    reads_tokens = any(spec.dtype == "int64" and len(spec.shape) == 2 for spec in inputs)
    return _ON_TOKENS.get(name, SCHEMES[name]) if reads_tokens else SCHEMES[name]
