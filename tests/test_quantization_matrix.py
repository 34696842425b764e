"""docs/quantization.md and the guide's table are what the record of measurements says."""

from __future__ import annotations

import json
from typing import Any

from architectures.catalog import CATALOG
from exporters.preference import EQUALLY_SMALL

from . import quantization_matrix as matrix

RECORD: dict[str, Any] = json.loads(matrix.RECORD.read_text(encoding="utf-8"))


def test_the_pages_are_what_the_record_says() -> None:
    assert matrix.PAGE.read_text(encoding="utf-8") == matrix.page(RECORD)
    assert f"{matrix.short_table(RECORD)}<!-- up to here -->" in matrix.GUIDE.read_text(encoding="utf-8")


def test_every_architecture_has_figures_or_a_reason_in_every_scheme() -> None:
    assert set(RECORD["cells"]) == {f"{name}/{scheme}" for name in CATALOG for scheme in matrix.SCHEMES}
    for key, cell in RECORD["cells"].items():
        assert cell["reason"] or cell["kept"], key
        assert "size_ratio" in cell or cell["reason"], key


def test_nothing_that_was_kept_is_outside_its_budget() -> None:
    kept = {key: cell for key, cell in RECORD["cells"].items() if cell.get("kept")}
    assert kept
    for key, cell in kept.items():
        assert cell["size_ratio"] < 1, key
        assert cell["drop"] <= cell["max_drop"], key


def test_auto_tried_every_scheme() -> None:
    assert not [key for key, cell in RECORD["cells"].items() if cell.get("untried")]


def test_auto_is_never_worse_than_the_best_scheme_alone_and_on_some_networks_better() -> None:
    better = set()
    for name, (chosen, best) in matrix.auto_and_alone(RECORD["cells"]).items():
        if best is None:
            better.add(name)
            continue
        speed, size = matrix.advantage(chosen, best)
        assert speed > 1 or (speed == 1 and size <= EQUALLY_SMALL), name
        if speed > 1 or size < 0.99:
            better.add(name)
    assert len(better) >= 3


def test_auto_refuses_only_where_every_scheme_is_refused() -> None:
    for name in CATALOG:
        cells = {scheme: RECORD["cells"].get(f"{name}/{scheme}", {}) for scheme in matrix.SCHEMES}
        assert not cells["auto"] or cells["auto"].get("kept") or not any(cell.get("kept") for cell in cells.values()), name


def test_no_scheme_alone_is_smaller_and_faster_than_what_auto_chose() -> None:
    """In a race of its own, so only where the intervals are apart."""
    for name in CATALOG:
        cells = {scheme: RECORD["cells"].get(f"{name}/{scheme}", {}) for scheme in matrix.SCHEMES}
        auto = cells.pop("auto")
        for scheme, cell in cells.items():
            if cell.get("kept") and auto.get("kept") and cell["size_ratio"] < auto["size_ratio"]:
                assert cell["latency_ratio"]["high"] >= auto["latency_ratio"]["low"], f"{name}: {scheme}"
