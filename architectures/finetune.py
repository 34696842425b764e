"""Starting from an earlier run: take over its features, give it a new head, keep the features as they are if asked."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from runtime.errors import OptionError, SourceError

from .architecture import Architecture

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)


def take_over(network: nn.Module, weights: Mapping[str, Tensor], architecture: Architecture, *, origin: str) -> list[str]:
    """Load every weight that is not part of a head, and the head's where it fits. Returns the names left fresh."""
    own = network.state_dict()
    fits = {name: tensor for name, tensor in weights.items() if name in own and own[name].shape == tensor.shape}
    fresh = [name for name in own if name not in fits]
    if stray := [name for name in fresh if not _in_head(name, architecture)]:
        name = stray[0]
        found = f"{list(weights[name].shape)}, expected {list(own[name].shape)}" if name in weights else "missing"
        raise SourceError(
            f"{origin} does not fit this {architecture.name}: {name} is {found}; use the same architecture and network settings"
        )
    network.load_state_dict(fits, strict=False)
    return fresh


def freeze_features(network: nn.Module, architecture: Architecture) -> None:
    """Train the head alone; batch norms of the features keep their statistics (see `hold_still`)."""
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(_in_head(name, architecture))
    if not any(parameter.requires_grad for parameter in network.parameters()):
        raise OptionError(f"{architecture.name} has no head to train alone; leave training.freeze out")


def hold_still(network: nn.Module) -> None:
    """After `network.train()`: norms whose weights are frozen stay in evaluation mode."""
    for module in network.modules():
        if isinstance(module, _NORMS) and not any(parameter.requires_grad for parameter in module.parameters()):
            module.eval()


def _in_head(name: str, architecture: Architecture) -> bool:
    return any(name.startswith(f"{part}.") or name == part for part in architecture.head)
