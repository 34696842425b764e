"""The figures in docs/results.md are those of the records beside it, and the records are of the recipes as they are now."""

from __future__ import annotations

from dataclasses import replace

import pytest

from toolkit.training.recipe import Recipe, load_recipe

from . import results

RECORDS = {name: record for name, record in results.read_records().items() if name != results.BASELINES}


def test_the_page_is_what_the_records_say() -> None:
    assert results.PAGE.read_text(encoding="utf-8") == results.page(results.read_records())


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_is_of_its_recipe_as_it_is_now(name: str) -> None:
    recorded, now = Recipe.from_json(RECORDS[name]["recipe"], name), load_recipe(name)
    training = replace(recorded.training, threads=None, start=None)
    assert replace(recorded, training=training, description="") == replace(now, description="")
    assert RECORDS[name]["status"] == "complete"


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_names_no_folder(name: str) -> None:
    recipe = RECORDS[name]["recipe"]
    assert recipe["data"]["path"] is None
    assert "/" not in (recipe["training"]["start"] or "")
