"""edgekit verify"""

from __future__ import annotations

import click

from . import options


@click.command()
@click.argument("bundle")
@options.device
@options.as_json
def verify(bundle: str, device: str, as_json: bool) -> int:
    """Replay a bundle's goldens on this machine.

    Needs numpy and onnxruntime only. Exit 1 if a file was altered, or if an
    answer differs from PyTorch's by more than the bundle allows.

    Example: edgekit verify lenet.bundle
    """
    from runtime.__main__ import verify_command

    return verify_command(bundle, device, as_json)
