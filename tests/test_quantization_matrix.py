"""docs/quantization.md and the guide's table are what the record of measurements says."""

from __future__ import annotations

import json
from typing import Any

from architectures.catalog import CATALOG

from . import quantization_matrix as matrix

RECORD: dict[str, Any] = json.loads(matrix.RECORD.read_text(encoding="utf-8"))


def test_the_pages_are_what_the_record_says() -> None:
    assert matrix.PAGE.read_text(encoding="utf-8") == matrix.page(RECORD)
    assert f"{matrix.short_table(RECORD)}<!-- up to here -->" in matrix.GUIDE.read_text(encoding="utf-8")


def test_every_cell_is_of_the_catalogue_and_has_figures_or_a_reason() -> None:
    for key, cell in RECORD["cells"].items():
        name, _, scheme = key.partition("/")
        assert name in CATALOG
        assert scheme in matrix.SCHEMES
        assert cell["reason"] or cell["kept"], key
        assert "size_ratio" in cell or cell["reason"], key


def test_nothing_that_was_kept_is_outside_its_budget() -> None:
    kept = {key: cell for key, cell in RECORD["cells"].items() if cell.get("kept")}
    assert kept
    for key, cell in kept.items():
        assert cell["size_ratio"] < 1, key
        assert cell["drop"] <= cell["max_drop"], key
