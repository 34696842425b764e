"""k-fold cross-validation: k runs of one recipe, each validated on rows that the others trained on."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from architectures.run_directory import Run
from runtime.files import write_file

FOLDS_FILE = "folds.json"


def summarise(runs: list[Run], directory: Path) -> dict[str, Any]:
    """Validation metric of every fold, their mean and deviation; also written beside the folds."""
    values = [run.metrics["validation"] for run in runs if run.metrics]
    summary = {
        "metric": runs[0].metrics["metric"] if runs[0].metrics else "",
        "folds": values,
        "mean": statistics.fmean(values),
        "deviation": statistics.stdev(values),
        "runs": [f"fold-{number}" for number in range(1, len(runs) + 1)],
    }
    write_file(directory / FOLDS_FILE, json.dumps(summary, indent=1) + "\n")
    return summary
