"""edgekit run"""

from __future__ import annotations

import click

from ..console import print_json, say
from . import options


@click.command()
@click.argument("bundle")
@click.option(
    "--input",
    "input_path",
    required=True,
    metavar="FILE",
    help="An image, a .csv/.tsv with the model's columns, or an .npz/.npy.",
)
@click.option("-o", "--output", metavar="FILE.npz", help="Save raw outputs instead of printing predictions.")
@options.force
@options.device
@options.threads
@options.as_json
def run(bundle: str, input_path: str, output: str | None, force: bool, device: str, threads: int | None, as_json: bool) -> None:
    """Run a bundle on a file of raw inputs.

    \b
    Examples:
      edgekit run lenet.bundle --input digit.png
      edgekit run houses.bundle --input houses.csv
      edgekit run my.bundle --input tensors.npz -o outputs.npz
    """
    from ..prediction import run_file

    lines, document = run_file(bundle, input_path, output, force=force, device=device, threads=threads)
    if as_json:
        print_json(document)
    else:
        say("\n".join(lines))
