"""A model in a long-running application: many generations, many threads, bad input. It stays usable and stays small."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from runtime.errors import EdgekitError, FeedError, GenerationError, OptionError
from runtime.generation.constraints import Trie
from runtime.generation.options import Generation
from tests.helpers import ROOT, environment

from .conftest import Make
from .networks import EOS, POSITIONS, VOCABULARY, Tiny, prompts

CASES = [("gpt", "onnxruntime"), ("gpt", "portable"), ("lstm", "portable"), ("transformer", "onnxruntime")]
OPTIONS: list[dict[str, Any]] = [
    {}, {"beams": 3, "n_best": 2}, {"temperature": 1.0, "seed": 3}, {"beams": 2, "no_repeat_ngram": 2}, {"speculate": True},
    {"stop": ["ab", "e"]}, {"temperature": 0.7, "seed": 4, "n_best": 3, "top_p": 0.9},
]  # fmt: skip


@pytest.fixture(params=CASES, ids="-".join)
def network(request: pytest.FixtureRequest, tiny_network: Make) -> Tiny:
    return tiny_network(*request.param)


def answers(found: Any) -> list[tuple[tuple[int, ...], str, str]]:
    listed: list[Generation] = found if isinstance(found, list) else [found]
    return [(item.tokens, item.text, item.finish) for item in listed]


def test_eight_threads_on_one_model_give_the_serial_answers(network: Tiny) -> None:
    work = [
        (prompt, options) for number in range(3) for prompt, options in zip(prompts(7, seed=number), OPTIONS, strict=True)
    ] * 4
    serial = [answers(network.model.generate(prompt, max_new_tokens=9, **options)) for prompt, options in work]
    together = threading.Barrier(8)

    def one_of_eight(number: int) -> list[Any]:
        together.wait(timeout=60)
        order = range(number, len(work) + number)  # each begins somewhere else
        return [
            (
                place % len(work),
                answers(network.model.generate(work[place % len(work)][0], max_new_tokens=9, **work[place % len(work)][1])),
            )
            for place in order
        ]

    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(one_of_eight, range(8)):
            assert [answer for _, answer in sorted(found)] == serial


# Memory. The same script measures 10,000 generations when it is called with that number.
MEMORY = """
import gc, json, sys
import runtime
from pathlib import Path

def resident():
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096

bundle, count = sys.argv[1], int(sys.argv[2])
model = runtime.load(bundle, device="cpu", threads=1)
options = [{}, {"beams": 3, "n_best": 2}, {"temperature": 1.0}, {"beams": 2, "no_repeat_ngram": 2}, {"speculate": True},
           {"stop": ["ab", "e"]}, {"temperature": 0.7, "n_best": 3, "top_p": 0.9}]
prompts = [[4 + (a * b + a) % 5 for a in range(1 + b % 9)] for b in range(11)]

def some(count):
    for number in range(count):
        model.generate(prompts[number % 11], max_new_tokens=4 + number % 9, **options[number % 7])
        if number % 50 == 0:
            model.generate(prompts, max_new_tokens=8)
            next(model.stream(prompts[number % 11], max_new_tokens=8), None)
            try:
                model.generate([4, -1])
            except runtime.errors.FeedError:
                pass

some(max(200, count // 10))
sizes = [resident()]
for _ in range(5):
    some(count // 5)
    sizes.append(resident())
json.dump(sizes, sys.stdout)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
@pytest.mark.parametrize("case", [("gpt", "onnxruntime"), ("lstm", "portable")], ids="-".join)
def test_resident_memory_stays_flat_over_many_generations(case: tuple[str, str], tiny_network: Make) -> None:
    network = tiny_network(*case)
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(network.model.bundle.root), "1500"],
        cwd=ROOT, env=environment() | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-800:]
    first, *others = json.loads(done.stdout)
    assert max(others) <= first * 1.02, [f"{size / 2**20:.1f} MB" for size in (first, *others)]


# Bad input. After each the model must answer as before.


@pytest.fixture
def usable(network: Tiny) -> Iterator[Tiny]:
    prompt = prompts(1, seed=20)[0]
    before = answers(network.model.generate(prompt, max_new_tokens=8, beams=2, n_best=2))
    yield network
    assert answers(network.model.generate(prompt, max_new_tokens=8, beams=2, n_best=2)) == before


BAD: list[tuple[Any, dict[str, Any], type[EdgekitError], str]] = [
    ("", {}, FeedError, "is empty; expected at least one token"),
    ([], {}, FeedError, "holds no texts; expected at least one"),
    ([[]], {}, FeedError, "is empty"),
    ([5, -1], {}, FeedError, rf"has the token -1, which does not exist; token numbers are 0 to {VOCABULARY - 1}"),
    ([5, VOCABULARY], {}, FeedError, rf"has the token {VOCABULARY}, which does not exist"),
    ([5, 6.5], {}, FeedError, "expected a text or whole token numbers"),
    ([[5], [True]], {}, FeedError, "expected a text or whole token numbers"),
    (7, {}, FeedError, "a int is not a text; expected a text, token numbers, or a list of them"),
    (None, {}, FeedError, "a NoneType is not a text"),
    ("abz", {}, FeedError, "'z' is outside the vocabulary of 9 characters; use only what was in the training data"),
    ("ab", {"max_new_tokens": 0}, OptionError, "max_new_tokens is 0, expected a whole number of 1 or more"),
    ("ab", {"beams": -2}, OptionError, "beams is -2, expected a whole number of 1 or more"),
    ("ab", {"prefix": [-4]}, FeedError, "the prefix has the token -4, which does not exist"),
    ("ab", {"prefix": "abcabc", "max_new_tokens": 3}, OptionError, "the prefix has 6 tokens and at most 3 are generated"),
    ("ab", {"stop_tokens": [99]}, EdgekitError, "99.*0 to 8"),
    ("ab", {"bad_words": [[99]]}, OptionError, "bad_words holds token 99, but the vocabulary has 0 to 8; leave it out"),
    ("ab", {"constraint": lambda tokens: []}, GenerationError, "no token is allowed any more; relax constraint"),
    ("ab", {"constraint": lambda tokens: [], "beams": 3}, GenerationError, "no token is allowed any more; relax constraint"),
    ("ab", {"constraint": lambda tokens: [99]}, GenerationError, "allowed token 99, but the vocabulary has 0 to 8"),
    ("ab", {"constraint": Trie([[5]], ending=[EOS]), "prefix": [6]}, GenerationError, "no token is allowed any more"),
    ("ab", {"bad_words": [[n] for n in range(VOCABULARY)]}, GenerationError, "no token is allowed any more; relax"),
    (["ab", "ba"], {"constraint": lambda tokens: []}, GenerationError, "no token is allowed any more"),
    ("ab", {"temprature": 1.0}, EdgekitError, "did you mean 'temperature'"),
    ("ab", {"stop": 5}, OptionError, "stop is 5, expected a list; leave it out for none"),
    ("ab", {"stop": [5]}, OptionError, "stop holds 5, expected texts; use stop_tokens for token numbers"),
    ("ab", {"stop_tokens": ["a"]}, OptionError, "stop_tokens holds 'a', expected token numbers; use stop for texts"),
    ("ab", {"bad_words": [5]}, OptionError, r"bad_words holds 5, expected texts or lists of token numbers; write \[5\]"),
    ("ab", {"prefix": None}, OptionError, "prefix is None, expected a text or token numbers; leave it out for none"),
    ("ab", {"constraint": 3}, OptionError, "constraint is 3, expected a function of the generated tokens; use e.g. a Trie"),
]  # fmt: skip


@pytest.mark.parametrize(("prompt", "options", "kind", "message"), BAD, ids=lambda value: str(value)[:30])
def test_bad_input_is_refused_and_the_model_goes_on(
    usable: Tiny, prompt: Any, options: dict[str, Any], kind: type[EdgekitError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        usable.model.generate(prompt, **options)
    if not isinstance(prompt, list) or not any(isinstance(item, list | str) for item in prompt):
        with pytest.raises(kind, match=message):
            list(usable.model.stream(prompt, **options))


def test_a_text_longer_than_the_positions_is_refused(usable: Tiny) -> None:
    longest = usable.about.longest
    if longest is None:
        usable.model.generate([5] * 300, max_new_tokens=4)  # nothing limits a hidden state
        return
    assert longest == POSITIONS
    if not usable.is_language_model:
        with pytest.raises(FeedError, match=f"has 70 tokens, and this network takes {POSITIONS} at most; shorten it"):
            usable.model.generate([5] * 70)
        usable.model.generate([5] * POSITIONS, max_new_tokens=4)
        return
    with pytest.raises(FeedError, match=f"has 70 tokens, and this network takes {POSITIONS} at most; shorten it"):
        usable.model.generate([5] * 70)
    with pytest.raises(GenerationError, match=f"the prompt has {POSITIONS} tokens and the network {POSITIONS} positions"):
        usable.model.generate([5] * POSITIONS)
    with pytest.raises(
        GenerationError, match=f"70 tokens do not fit: the network has {POSITIONS} positions; shorten the prompt"
    ):
        usable.model.generate([5] * 40, max_new_tokens=30)
    with pytest.raises(OptionError, match="min_new_tokens is 30 and only 24 tokens fit; lower it"):
        usable.model.generate([5] * 40, min_new_tokens=30)
    assert len(usable.model.generate([5] * 40, bad_words=[[EOS]]).tokens) == POSITIONS - 40  # as many as fit
    assert len(usable.model.generate([5] * 63, bad_words=[[EOS]]).tokens) == 1


class Raising:
    """A constraint that fails in the middle."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __call__(self, generated: Sequence[int]) -> None:
        if len(generated) >= 2:
            raise self.error


@pytest.mark.parametrize("error", [ZeroDivisionError("mine"), KeyboardInterrupt(), FeedError("mine too")], ids=repr)
@pytest.mark.parametrize("options", [{}, {"beams": 3}, {"temperature": 1.0}, {"speculate": True}], ids=str)
def test_what_a_callback_raises_reaches_the_caller(usable: Tiny, error: BaseException, options: dict[str, Any]) -> None:
    given = {"constraint": Raising(error), "min_new_tokens": 5, "max_new_tokens": 8, **options}
    with pytest.raises(type(error)) as caught:
        usable.model.generate("abab", **given)
    assert caught.value is error
    with pytest.raises(type(error)):
        list(usable.model.stream("abab", **given))


@pytest.mark.parametrize("error", [ZeroDivisionError("mine"), KeyboardInterrupt()], ids=repr)
def test_a_running_batch_survives_a_callback_that_raises(usable: Tiny, error: BaseException) -> None:
    """The request whose callback it was fails with it; the others get what they get alone."""
    batch = usable.model.scheduler()
    some = prompts(3, seed=21)
    tickets = [batch.submit(prompt, max_new_tokens=9, beams=2) for prompt in some[:2]]
    bad = batch.submit("abab", constraint=Raising(error), min_new_tokens=5, max_new_tokens=8)
    tickets.append(batch.submit(some[2], max_new_tokens=9))
    with pytest.raises(type(error)):
        batch.run()
    batch.run()
    with pytest.raises(type(error)):
        bad.results()
    for prompt, ticket, beams in zip(some, tickets, (2, 2, 1), strict=True):
        assert answers(ticket.results()) == answers(usable.model.generate(prompt, max_new_tokens=9, beams=beams))


def test_an_impossible_constraint_fails_its_own_request_only(usable: Tiny) -> None:
    batch = usable.model.scheduler()
    good = batch.submit("ab", max_new_tokens=9)
    bad = batch.submit("ba", constraint=lambda tokens: [] if len(tokens) > 1 else None, min_new_tokens=5, max_new_tokens=9)
    batch.run()
    assert answers(good.results()) == answers(usable.model.generate("ab", max_new_tokens=9))
    with pytest.raises(GenerationError, match="after 2 tokens .* no token is allowed any more"):
        bad.results()


def test_a_stream_that_is_closed_leaves_the_model_usable(usable: Tiny) -> None:
    stream = usable.model.stream("abab", max_new_tokens=20, min_new_tokens=20)
    assert next(stream)
    stream.close()  # type: ignore[attr-defined]


def test_a_request_that_cannot_fit_is_refused_before_it_starts(usable: Tiny) -> None:
    batch = usable.model.scheduler(memory_limit=64)
    with pytest.raises(GenerationError, match="rows of .* tokens need .* lower beams or max_new_tokens, or raise memory_limit"):
        batch.submit("ab", beams=4, max_new_tokens=20)
    assert not batch.step()
    needed = usable.model.cache_bytes(rows=4, tokens=(2 if usable.is_language_model else 1) + 20)
    with pytest.raises(GenerationError, match="tokens need"):
        usable.model.scheduler(memory_limit=needed - 1).submit("ab", beams=4, max_new_tokens=20)
    usable.model.scheduler(memory_limit=needed).submit("ab", beams=4, max_new_tokens=20)
    for wrong in ({"most_rows": 0}, {"most_rows": "3"}, {"memory_limit": -1}):
        with pytest.raises(OptionError, match=f"{next(iter(wrong))} is .*, expected a whole number of 1 or more"):
            usable.model.scheduler(**wrong)
    batch = usable.model.scheduler(most_rows=2)
    with pytest.raises(GenerationError, match="4 rows are more than the 2 of this decoder; lower beams"):
        batch.submit("ab", beams=4, max_new_tokens=20)


def test_a_hidden_state_does_not_grow_but_what_is_kept_of_its_text_must_fit(tiny_network: Make) -> None:
    model = tiny_network("gru", "portable").model
    with pytest.raises(GenerationError, match="1 rows of 1000002 tokens need 8 MB for their state, and 1 MB are allowed"):
        model.scheduler(memory_limit=1 << 20).submit("ab", max_new_tokens=10**6)


def test_caches_are_kept_between_calls_up_to_a_size_and_nothing_of_the_last_call_shows(
    network: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    from runtime.generation import generate

    work = [(prompt, options) for prompt, options in zip(prompts(7, seed=5), OPTIONS, strict=True)]
    monkeypatch.setattr(generate, "_HELD_BYTES", -1)  # every call makes its own
    generator = network.model._generator
    generator._idle.clear()
    alone = [answers(network.model.generate(prompt, max_new_tokens=9, **options)) for prompt, options in work]
    assert generator._idle == []
    monkeypatch.undo()
    for order in (work, work[::-1]):
        found = {id(prompt): answers(network.model.generate(prompt, max_new_tokens=9, **options)) for prompt, options in order}
        assert [found[id(prompt)] for prompt, _ in work] == alone
        assert len(generator._idle) == 1
    with pytest.raises(GenerationError):
        network.model.generate(work[0][0], constraint=lambda tokens: [])
    assert answers(network.model.generate(work[0][0], max_new_tokens=9)) == alone[0]


def test_caches_that_another_thread_takes_first_are_made_anew(network: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    class Taken(list[Any]):
        """Looks as if there were one, which is gone when it is reached for."""

        def __bool__(self) -> bool:
            return True

    prompt = prompts(1, seed=5)[0]
    expected = answers(network.model.generate(prompt, max_new_tokens=9))
    monkeypatch.setattr(network.model._generator, "_idle", Taken())
    assert answers(network.model.generate(prompt, max_new_tokens=9)) == expected
