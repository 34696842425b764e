"""The quantization schemes. To add one: a file here, and a line in SCHEMES."""

from . import fp16, int8_dynamic, int8_static, weights
from .scheme import Scheme

SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (int8_dynamic.SCHEME, int8_static.SCHEME, fp16.SCHEME, weights.EIGHT_BIT, weights.FOUR_BIT)
}
