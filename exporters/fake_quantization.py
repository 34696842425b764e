"""A scheme's rounding inside a PyTorch network, so that training can make up for what it costs.

Going forward a weight is what the scheme will store, going backward the rounding is not there: its gradient passes straight
through (Bengio et al. 2013), and is zero for values that the scheme's range cuts off.

    x' = (clip(round(x / s) + z, lowest, highest) - z) · s,   ∂x'/∂x = 1 where nothing was cut off, else 0

int4-weights, int8-weights  matrices and embeddings in blocks (quantizers/blocks.py), each weight to the nearest number of its
                            block's range
int8-static                 matrices and kernels in seven bits (quantizers/int8_static.py), and what they multiply in uint8,
                            with a range that grows at once and shrinks slowly, and is held at the end; on tokens embeddings
                            too, each row by itself, in eight bits (quantizers/static_text.py)

Weights are torch parametrizations and inputs forward hooks: an architecture knows nothing of them, and `remove` leaves the
plain network, with weights that are exactly on the scheme's grid. Whichever way these are rounded afterwards (rounding.py),
they stay.
Scales of one channel go through a batch norm unchanged, so that folding it into a convolution keeps them on the grid too.

A first convolution that int8-static leaves in float32 (quantizers/thin.py) is trained with rounding all the same. Not seen by
training: what int8-static also keeps in uint8 between the layers of a convolutional network (outputs of convolutions, sums,
pooling); recurrent layers and cells, which stay in float32 here; fixed tables of positions; what is rounded where an exported
recurrent decoder has a matrix in parts or multiplied by its embedding; and the form of int8-weights for many rows.
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
from .quantizers.saturation import FULL, REDUCED
from .quantizers.scheme import FEWEST_WEIGHTS
from .quantizers.weights import SMALLEST_TABLE

BITS = {"int4-weights": 4, "int8-weights": 8}
STATIC = "int8-static"
AWARE = (STATIC, *BITS)
"""The schemes that a network can be trained for."""

_KERNELS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_PRODUCTS = (nn.Linear, TokenHead)
_RECURRENT = (nn.RNNBase, nn.RNNCellBase)
_UINT8 = 255
_SHRINKING = 0.01  # of the way to the extremes of the latest batch, each step
_INPUT, _OUTPUT = "input_range", "output_range"


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
    """A matrix or kernel (outputs, …) in whole numbers around zero, with one scale for each output or one for all."""

    def __init__(self, *, each: bool, largest: int = REDUCED) -> None:
        super().__init__()
        self.each = each
        self.largest = largest

    def forward(self, weight: Tensor) -> Tensor:
        with torch.no_grad():
            sizes = weight.abs()
            highest = sizes.amax(dim=tuple(range(1, weight.ndim)), keepdim=True) if self.each else sizes.max()
            scale = torch.where(highest > 0, highest / self.largest, 1.0)
        return rounded(weight, scale, torch.zeros_like(scale), -self.largest, self.largest)


class InputRange(nn.Module):
    """uint8 over the range that inputs had in training: it grows at once, and shrinks slowly while weights change."""

    low: Tensor
    high: Tensor
    seen: Tensor
    latest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.held = False
        for name in ("low", "high"):
            self.register_buffer(name, torch.zeros(()))
        self.register_buffer("seen", torch.zeros((), dtype=torch.bool))
        self.register_buffer("latest", torch.full((2,), torch.nan), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and not self.held:
            self._follow(x.detach())
        if not self.seen:
            return x
        scale, zero = _grid(self.low, self.high, _UINT8)
        return rounded(x.float(), scale, zero, 0, _UINT8)  # in mixed precision too

    def _follow(self, x: Tensor) -> None:
        low, high = latest = torch.stack((x.amin(), x.amax())).float()
        if torch.equal(latest, self.latest):  # the same batch once more, computed again for its gradient
            return
        self.latest.copy_(latest)
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
        for module in _multiplying(network, taken):
            if isinstance(module, TiedOutput):  # multiplies what its projection gives
                module.projection.add_module(_OUTPUT, InputRange())
                module.projection.register_forward_hook(_round_output)
            else:
                module.add_module(_INPUT, InputRange())
                module.register_forward_pre_hook(_round_input)
    return tuple(taken)


def remove(network: nn.Module) -> None:
    """The plain network again, its weights as the scheme stores them. A network that has nothing attached is left alone."""
    for module in list(network.modules()):
        if parametrize.is_parametrized(module, "weight"):
            parametrize.remove_parametrizations(module, "weight")
        for name, hook in ((_INPUT, _round_input), (_OUTPUT, _round_output)):
            if hasattr(module, name):
                delattr(module, name)
                _remove_hook(module, hook)


def _remove_hook(module: nn.Module, hook: Any) -> None:
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key in [key for key, found in hooks.items() if found is hook]:
            del hooks[key]


def hold_ranges(network: nn.Module, *, held: bool) -> None:
    """Whether the ranges of inputs stay what they are while training goes on."""
    for module in network.modules():
        if isinstance(module, InputRange):
            module.held = held


def left_out(network: nn.Module, scheme: str) -> tuple[str, ...]:
    """Names of modules with matrices or kernels that training for `scheme` computes in float32 all the same."""
    kinds: tuple[type[nn.Module], ...] = (*_KERNELS, *_PRODUCTS)
    if scheme in BITS or _has(network, nn.Embedding):
        kinds = (*kinds, nn.Embedding, *_RECURRENT)
    taken = _weights(network, scheme)
    trained = [module for module, _ in taken.values()] + _trained_heads(network, taken)
    return tuple(
        name
        for name, module in network.named_modules()
        if isinstance(module, kinds) and not any(module is other for other in trained)
    )


def _round_input(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return (getattr(module, _INPUT)(inputs[0]), *inputs[1:])


def _round_output(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
    result: Tensor = getattr(module, _OUTPUT)(output)
    return result


def _weights(network: nn.Module, scheme: str) -> dict[str, tuple[nn.Module, nn.Module]]:
    """Name of each weight that the scheme takes → its module, and how it is rounded: the rules of quantizers/."""
    each = _has(network, *_KERNELS, nn.Embedding)  # output of a matrix has a scale of its own
    tied = _tied_embedding(network)
    taken: dict[str, tuple[nn.Module, nn.Module]] = {}
    for name, module in network.named_modules():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, Tensor):
            continue
        rounding: nn.Module | None = None
        if module is tied or isinstance(module, _PRODUCTS):
            if weight.numel() >= FEWEST_WEIGHTS:
                rounding = Channels(each=each) if scheme == STATIC else Blocks(BITS[scheme])
        elif isinstance(module, _KERNELS) and scheme == STATIC:
            rounding = Channels(each=True)
        elif isinstance(module, nn.Embedding) and weight.numel() >= SMALLEST_TABLE:
            # embeddings that are not tied take 8 bits under int4-weights too
            if scheme == STATIC:
                rounding = Channels(each=True, largest=FULL)
            elif weight.shape[1] % 16 == 0:
                rounding = Blocks(8)
        if rounding is not None:
            taken[f"{name}.weight" if name else "weight"] = (module, rounding)
    return taken


def _multiplying(network: nn.Module, taken: dict[str, tuple[nn.Module, nn.Module]]) -> list[nn.Module]:
    """The modules that multiply their first input by a weight that is taken."""
    found = [module for module, _ in taken.values() if not isinstance(module, nn.Embedding)]
    return found + _trained_heads(network, taken)


def _trained_heads(network: nn.Module, taken: dict[str, tuple[nn.Module, nn.Module]]) -> list[nn.Module]:
    """The output layers that multiply by an embedding which is taken."""
    tied = _tied_embedding(network)
    return _tied_heads(network) if any(module is tied for module, _ in taken.values()) else []


def _tied_embedding(network: nn.Module) -> nn.Module | None:
    """The embedding that is also the output layer."""
    if not _tied_heads(network):
        return None
    tables = (getattr(network, name, None) for name in ("target_embedding", "source_embedding", "embedding"))
    return next(table for table in tables if table is not None)


def _tied_heads(network: nn.Module) -> list[nn.Module]:
    heads = [module for module in network.modules() if isinstance(module, TiedOutput | TokenHead)]
    return [head for head in heads if getattr(head, "weight", None) is None]


def _has(network: nn.Module, *kinds: type[nn.Module]) -> bool:
    return any(isinstance(module, kinds) for module in network.modules())


def _why(network: nn.Module) -> str:
    if _has(network, *_KERNELS):
        return f"its weights are kernels, which {STATIC} takes"
    return f"it has no matrix of {FEWEST_WEIGHTS} or more weights"
