"""What networks of tokens share: checks of their configuration and the specs of their inputs."""

from __future__ import annotations

from typing import Any

from runtime.errors import OptionError, UnknownName
from runtime.signature import TensorSpec

from .architecture import DataFacts


def check_sizes(config: Any, *names: str) -> None:
    for name in names:
        if getattr(config, name) < 1:
            raise OptionError(f"{name} is {getattr(config, name)}, expected 1 or more; set network.{name}")


def check_choice(config: Any, name: str, known: tuple[str, ...]) -> None:
    if getattr(config, name) not in known:
        raise UnknownName.of(name, getattr(config, name), known)


def check_attention(config: Any) -> None:
    """What every configuration with heads, a width and dropout must satisfy."""
    check_sizes(config, "width", "heads", "feedforward", "max_positions")
    if config.width % config.heads:
        raise OptionError(
            f"width {config.width} cannot be divided into {config.heads} heads; set network.heads to a divisor of the width"
        )
    if not 0 <= config.dropout < 1:
        raise OptionError(f"dropout is {config.dropout}, expected 0 or more and below 1")


def check_longest(config: Any, data: DataFacts) -> None:
    if data.longest > config.max_positions:
        raise OptionError(
            f"the longest sequence has {data.longest} tokens but positions go to {config.max_positions}; "
            f"set network.max_positions={data.longest}"
        )


def token_spec(name: str = "tokens", length: str = "time") -> TensorSpec:
    return TensorSpec(name, "int64", ("batch", length))
