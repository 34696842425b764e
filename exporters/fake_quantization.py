"""A scheme's rounding inside a PyTorch network, so that training can make up for what it costs.

Going forward a weight is what the scheme will store, going backward the rounding is not there: its gradient passes straight
through (Bengio et al. 2013), and is zero for values that the scheme's range cuts off.

    x' = (clip(round(x / s) + z, lowest, highest) - z) · s,   ∂x'/∂x = 1 where nothing was cut off, else 0

int4-weights, int8-weights  matrices and embeddings in blocks (quantizers/blocks.py), each weight to the nearest number of its
                            block's range
int8-static                 matrices and kernels in seven bits (quantizers/int8_static.py), and what they multiply in uint8,
                            with a range that grows at once and shrinks slowly, and is held at the end

Weights are torch parametrizations and inputs forward hooks: an architecture knows nothing of them, and `remove` leaves the
plain network, with weights that are exactly on the scheme's grid. Whichever way these are rounded afterwards (rounding.py),
they stay.
Scales of one channel go through a batch norm unchanged, so that folding it into a convolution keeps them on the grid too.

Not seen by training: what int8-static also keeps in uint8 between the layers of a convolutional network (outputs of
convolutions, sums, pooling); recurrent layers and cells, which stay in float32 here; fixed tables of positions; and the form of
int8-weights for many rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from architectures.layers.blocks import TokenHead
from architectures.recurrent import TiedOutput
from runtime.errors import OptionError, UnknownName

from .quantizers.blocks import block_size
from .quantizers.scheme import FEWEST_WEIGHTS
from .quantizers.weights import SMALLEST_TABLE

BITS = {"int4-weights": 4, "int8-weights": 8}
STATIC = "int8-static"
AWARE = (STATIC, *BITS)
"""The schemes that a network can be trained for."""

_KERNELS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_PRODUCTS = (nn.Linear, TokenHead)
_RECURRENT = (nn.RNNBase, nn.RNNCellBase)
_SEVEN_BITS = 64  # either side of zero, as onnxruntime's quantizer has them with REDUCED_RANGE
_UINT8 = 255
_SHRINKING = 0.01  # of the way to the extremes of the latest batch, each step
_RANGE = "input_range"


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, zero: Tensor, lowest: int, highest: int) -> Tensor:
        wanted = torch.round(x / scale) + zero
        numbers = wanted.clamp(lowest, highest)
        ctx.save_for_backward(wanted == numbers)
        return (numbers - zero) * scale

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (inside,) = ctx.saved_tensors
        return gradients[0] * inside, None, None, None, None


def rounded(x: Tensor, scale: Tensor, zero: Tensor, lowest: int, highest: int) -> Tensor:
    """`x` on the grid of `scale` and `zero`, with a gradient that does not see the rounding."""
    result: Tensor = _Rounded.apply(x, scale, zero, lowest, highest)
    return result


class Blocks(nn.Module):
    """A matrix (outputs, inputs), or a table of embeddings, in blocks along its last axis."""

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.highest = (1 << bits) - 1

    def forward(self, weight: Tensor) -> Tensor:
        width = weight.shape[-1]
        size = block_size(width)
        blocks = nn.functional.pad(weight, (0, -width % size)).unflatten(-1, (-1, size))  # (rows, blocks, size)
        with torch.no_grad():
            scale, zero = _grid(blocks.amin(-1, keepdim=True), blocks.amax(-1, keepdim=True), self.highest)
        return rounded(blocks, scale, zero, 0, self.highest).flatten(-2)[..., :width]


class Channels(nn.Module):
    """A matrix or kernel (outputs, …) in seven bits around zero, with one scale for each output or one for all."""

    def __init__(self, *, each: bool) -> None:
        super().__init__()
        self.each = each

    def forward(self, weight: Tensor) -> Tensor:
        with torch.no_grad():
            sizes = weight.abs()
            largest = sizes.amax(dim=tuple(range(1, weight.ndim)), keepdim=True) if self.each else sizes.max()
            scale = torch.where(largest > 0, largest / _SEVEN_BITS, 1.0)
        return rounded(weight, scale, torch.zeros_like(scale), -_SEVEN_BITS, _SEVEN_BITS)


class InputRange(nn.Module):
    """uint8 over the range that inputs had in training: it grows at once, and shrinks slowly while weights change."""

    low: Tensor
    high: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.held = False
        for name in ("low", "high"):
            self.register_buffer(name, torch.zeros(()))
        self.register_buffer("seen", torch.zeros((), dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and not self.held:
            self._follow(x.detach())
        if not self.seen:
            return x
        scale, zero = _grid(self.low, self.high, _UINT8)
        return rounded(x.float(), scale, zero, 0, _UINT8)  # in mixed precision too

    def _follow(self, x: Tensor) -> None:
        low, high = x.amin().float(), x.amax().float()
        if self.seen:
            low = torch.minimum(low, self.low.lerp(low, _SHRINKING))
            high = torch.maximum(high, self.high.lerp(high, _SHRINKING))
        self.low.copy_(low)
        self.high.copy_(high)
        self.seen.fill_(True)


def _grid(low: Tensor, high: Tensor, highest: int) -> tuple[Tensor, Tensor]:
    """Scale and zero point that spread [min(low, 0), max(high, 0)] over 0 … highest."""
    low, high = low.clamp(max=0), high.clamp(min=0)
    scale = (high - low) / highest
    scale = torch.where(scale > 0, scale, 1.0)
    return scale, torch.round(-low / scale).clamp(0, highest)


def attach(network: nn.Module, scheme: str) -> tuple[str, ...]:
    """Let `network` compute with what `scheme` makes of its weights and inputs; returns the names of the weights."""
    if scheme not in AWARE:
        raise UnknownName.of("scheme that a network can be trained for", scheme, AWARE)
    taken = _weights(network, scheme)
    if not taken:
        raise OptionError(f"{scheme} has nothing to quantize in this network, and so nothing to train for; {_why(network)}")
    for name, (module, rounding) in taken.items():
        parametrize.register_parametrization(module, name.rpartition(".")[2], rounding)
        if scheme == STATIC:
            module.add_module(_RANGE, InputRange())
            module.register_forward_pre_hook(_round_input)
    return tuple(taken)


def remove(network: nn.Module) -> None:
    """The plain network again, its weights as the scheme stores them. A network that has nothing attached is left alone."""
    for module in list(network.modules()):
        if parametrize.is_parametrized(module, "weight"):
            parametrize.remove_parametrizations(module, "weight")
        if hasattr(module, _RANGE):
            delattr(module, _RANGE)
            hooks = module._forward_pre_hooks
            for key in [key for key, hook in hooks.items() if hook is _round_input]:
                del hooks[key]


def hold_ranges(network: nn.Module, *, held: bool) -> None:
    """Whether the ranges of inputs stay what they are while training goes on."""
    for module in network.modules():
        if isinstance(module, InputRange):
            module.held = held


def left_out(network: nn.Module, scheme: str) -> tuple[str, ...]:
    """Names of modules with matrices or kernels that training for `scheme` computes in float32 all the same."""
    kinds = (*_KERNELS, *_PRODUCTS, nn.Embedding, *_RECURRENT) if scheme in BITS else (*_KERNELS, *_PRODUCTS)
    taken = {name.rpartition(".")[0] for name in _weights(network, scheme)}
    return tuple(name for name, module in network.named_modules() if isinstance(module, kinds) and name not in taken)


def _round_input(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return (getattr(module, _RANGE)(inputs[0]), *inputs[1:])


def _weights(network: nn.Module, scheme: str) -> dict[str, tuple[nn.Module, nn.Module]]:
    """Name of each weight that the scheme takes → its module, and how it is rounded: the rules of quantizers/."""
    if scheme == STATIC and any(isinstance(module, nn.Embedding) for module in network.modules()):
        raise OptionError(f"no network on text is trained for {STATIC}; train it for one of {', '.join(BITS)}")
    has_kernels = any(isinstance(module, _KERNELS) for module in network.modules())
    tied = _tied_embedding(network)
    taken: dict[str, tuple[nn.Module, nn.Module]] = {}
    for name, module in network.named_modules():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, Tensor):
            continue
        rounding: nn.Module | None = None
        if scheme == STATIC:
            if isinstance(module, _KERNELS) or (isinstance(module, _PRODUCTS) and weight.numel() >= FEWEST_WEIGHTS):
                rounding = Channels(each=has_kernels)
        elif module is tied or isinstance(module, _PRODUCTS):
            rounding = Blocks(BITS[scheme]) if weight.numel() >= FEWEST_WEIGHTS else None
        elif isinstance(module, nn.Embedding) and weight.numel() >= SMALLEST_TABLE and weight.shape[1] % 16 == 0:
            rounding = Blocks(8)  # embeddings that are not tied take 8 bits under int4-weights too
        if rounding is not None:
            taken[f"{name}.weight" if name else "weight"] = (module, rounding)
    return taken


def _tied_embedding(network: nn.Module) -> nn.Module | None:
    """The embedding that is also the output layer."""
    heads = [module for module in network.modules() if isinstance(module, TiedOutput | TokenHead)]
    if not any(getattr(head, "weight", None) is None for head in heads):
        return None
    tables = (getattr(network, name, None) for name in ("target_embedding", "source_embedding", "embedding"))
    return next(table for table in tables if table is not None)


def _why(network: nn.Module) -> str:
    if any(isinstance(module, _KERNELS) for module in network.modules()):
        return f"its weights are kernels, which {STATIC} takes"
    return f"it has no matrix of {FEWEST_WEIGHTS} or more weights"
