"""`make bench`: every small network on images or columns, exported, against PyTorch in one interleaved run. Prints ratios."""

from __future__ import annotations

import tempfile
from pathlib import Path

from architectures.catalog import CATALOG
from exporters.export import export
from exporters.source import find_source
from runtime.bench import bench, bundle_variant
from runtime.machine import available_cpus, describe_machine
from toolkit.benchmark import TORCH, ratio_text, torch_variant
from toolkit.console import note, say, table, time_text

BATCHES = (1, 32)


def main() -> None:
    threads = available_cpus()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in (name for name, item in CATALOG.items() if item.takes != ("tokens",) and item.parameters() < 10**6):
            note(f"timing {name}")
            path = export(find_source(name), Path(folder) / f"{name}.bundle").bundle.root
            variants = [torch_variant(str(path), TORCH, threads=threads), bundle_variant(path, name="ours", threads=threads)]
            report = bench(variants, batches=BATCHES, threads=threads)
            for batch in BATCHES:
                ours, torch = report.timing("ours", batch), report.timing(TORCH, batch)
                assert ours.ratio is not None
                rows.append(
                    [name, str(batch), time_text(torch.latency.median), time_text(ours.latency.median), ratio_text(ours.ratio)]
                )
    say(table(["network", "batch", "torch", "ours", "ratio"], rows))
    machine = describe_machine()
    say(f"{machine['cpu']}, {threads} threads, onnxruntime {machine['onnxruntime']}")


if __name__ == "__main__":
    main()
