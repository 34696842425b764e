"""The way that decoding goes on a device: whole tensors are bound, and a binding is good for one run. Here on the CPU's memory:
that a GPU takes it as well could not be tried."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from runtime.generation import rows as rows_module
from runtime.generation.caches import DeviceCaches
from runtime.session import Session

from .networks import ROOM, Tiny, assert_same, attends, generating, prompts, some_of
from .test_laws import MODES, REQUESTS

with_a_cache = some_of([case for case in generating("language-model") if attends(case[0])])


@pytest.fixture
def on_device(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """From when it is called caches are those of a device."""
    made = []

    def switch() -> None:
        tiny.model._generator._idle.clear()  # they hold caches of the host

        def caches(decoder: Any, room: int, capacity: int) -> DeviceCaches:
            made.append(DeviceCaches(decoder, capacity))
            return made[-1]

        monkeypatch.setattr(rows_module, "caches_for", caches)

    yield switch
    tiny.model._generator._idle.clear()
    assert made


@pytest.mark.parametrize("mode", MODES)
def test_caches_on_a_device_give_what_those_on_the_host_give(tiny: Tiny, mode: str, on_device: Any) -> None:
    some = prompts(6, seed=1)
    expected = tiny.model.generate(some, max_new_tokens=ROOM, **MODES[mode])
    on_device()
    for found, wanted in zip(tiny.model.generate(some, max_new_tokens=ROOM, **MODES[mode]), expected, strict=True):
        assert_same(found, wanted)


def test_requests_join_and_leave_a_batch_on_a_device(tiny: Tiny, on_device: Any) -> None:
    some = prompts(len(REQUESTS), seed=17)
    alone = [
        tiny.model.generate(prompt, max_new_tokens=ROOM, **options) for prompt, options in zip(some, REQUESTS, strict=True)
    ]
    on_device()
    batch = tiny.model.scheduler(most_rows=6)
    tickets = []
    for number, (prompt, options) in enumerate(zip(some, REQUESTS, strict=True)):
        tickets.append(batch.submit(prompt, max_new_tokens=ROOM, **options))
        for _ in range(number % 3):
            batch.step()
    batch.run()
    for ticket, expected in zip(tickets, alone, strict=True):
        assert_same(ticket.results(), expected)


@with_a_cache
def test_what_was_read_is_continued_and_rewound_on_a_device(tiny: Tiny, on_device: Any) -> None:
    prompt = [4, 6, 8, 5, 7, 5, 6]
    whole, part = (tiny.model.generate(tokens, max_new_tokens=ROOM, beams=3) for tokens in (prompt, prompt[:4]))
    guessed = tiny.model.generate(prompt * 3, max_new_tokens=ROOM)
    on_device()
    context = tiny.model.read(prompt[:2])
    context.read(prompt[2:])
    assert_same(context.generate(max_new_tokens=ROOM, beams=3), whole)
    context.rewind(4)
    assert_same(context.generate(max_new_tokens=ROOM, beams=3), part)
    assert_same(tiny.model.generate(prompt * 3, max_new_tokens=ROOM, speculate=True), guessed)


@some_of(generating("seq2seq"))
def test_what_an_encoder_gave_is_placed_once_and_not_at_every_step(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    placed: list[Any] = []
    place = Session.place
    monkeypatch.setattr(Session, "place", lambda session, array: (placed.append(array), place(session, array))[1])
    tiny.model.generate(prompts(1, seed=1)[0], max_new_tokens=ROOM, min_new_tokens=ROOM)
    assert len(placed) == len(tiny.model._generator.decoder.memory)
