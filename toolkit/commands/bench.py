"""edgekit bench"""

from __future__ import annotations

import click

from ..console import print_json, progress_bar, say
from . import options


@click.command()
@click.argument("bundles", nargs=-1, required=True, metavar="BUNDLE…")
@click.option(
    "--vs", metavar="torch|SOURCE", help="Also time PyTorch: the bundle's own architecture, or a run or file.py:function."
)
@click.option(
    "--batch",
    "batches",
    type=click.IntRange(1),
    multiple=True,
    help="Batch size; may be given several times.  [default: 1, 8, 32]",
)
@click.option("--graph", metavar="NAME", help="The graph to time.  [default: the only one, or the decoder]")
@click.option("--past", type=click.IntRange(0), help="Decoders: tokens seen before the one that is timed.  [default: 32]")
@options.threads
@click.option("--rounds", type=click.IntRange(1), default=35, show_default=True, help="Turns of each variant in each launch.")
@click.option(
    "--launches", type=click.IntRange(1), default=3, show_default=True, help="How often the processes are started anew."
)
@options.device
@options.as_json
def bench(
    bundles: tuple[str, ...],
    vs: str | None,
    batches: tuple[int, ...],
    graph: str | None,
    past: int | None,
    threads: int | None,
    rounds: int,
    launches: int,
    device: str,
    as_json: bool,
) -> None:
    """Time bundles against each other, interleaved.

    Each variant runs in a fresh process of its own, and they take turns in
    random order. Ratios are to the first bundle, with a 95 % interval.

    Example: edgekit bench lenet.bundle int8.bundle --vs torch
    """
    from runtime.bench import DEFAULT_PAST
    from runtime.bench import bench as run_bench

    from ..benchmark import bench_table, bundle_variants, default_batches, torch_variant

    count = options.thread_count(threads)
    batches = batches or default_batches(bundles)
    tokens = DEFAULT_PAST if past is None else past
    variants = bundle_variants(bundles, device=device, threads=count, graph=graph, past=tokens)
    if vs:
        variants.append(torch_variant(bundles[0], vs, threads=count))
    with progress_bar("round") as update:
        report = run_bench(variants, batches=batches, threads=count, rounds=rounds, launches=launches, progress=update)
    if as_json:
        print_json(report.to_json())
    else:
        say(bench_table(report))
