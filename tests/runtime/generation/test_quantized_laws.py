"""What laws of decoding there are beside test_laws.py for bundles whose decoder comes in two forms."""

from __future__ import annotations

import pytest

from runtime.bundle import MANY
from runtime.text import EOS

from .conftest import Make
from .networks import ROOM, Tiny, generating, prompts
from .quantized import INT4, INT8, MANY_ROWS, OF_ONE_FORM

networks = pytest.mark.parametrize("case", generating(), ids="-".join)


@networks
@pytest.mark.parametrize("exact", [False, True])
def test_laws_are_tested_on_quantized_graphs_and_int8_has_a_form_for_many_rows(
    case: tuple[str, str], exact: bool, tiny_network: Make
) -> None:
    for precision in (INT8, INT4):
        manifest = tiny_network(*case, precision=precision, exact=exact).model.bundle.manifest
        operators = manifest.requirements["operators"]
        assert any("MatMulNBits" in operator for operator in operators)
        assert not {"RNN", "GRU", "LSTM"} & set(operators)
        assert any("MatMulIntegerToFloat" in operator for operator in operators) == (precision == INT8 and not exact)
        assert (MANY in manifest.graphs) == (precision == INT8)


@pytest.mark.parametrize("precision", OF_ONE_FORM)
def test_a_beams_score_is_the_sum_that_score_gives(tiny: Tiny) -> None:
    """With activations rounded as they are; where that is left out, PyTorch says the same (test_laws.py)."""
    for prompt in prompts(6, seed=9):
        for found in tiny.model.generate(prompt, max_new_tokens=ROOM, min_new_tokens=1, beams=3, n_best=3, length_penalty=0):
            ending = [EOS] if found.finish == "eos" else []
            written = [*found.tokens, *ending]
            if tiny.is_language_model:
                scored = tiny.model.score([*prompt, *written]).token_logprobs[len(prompt) - 1 :]
            else:
                scored = tiny.model.score(found.tokens, source=prompt).token_logprobs[: len(written)]
            assert found.token_logprobs == pytest.approx(scored[: len(found.tokens)], abs=1e-4)
            assert found.score == pytest.approx(sum(scored), abs=2e-4)


@networks
def test_texts_are_scored_in_the_form_for_many_rows_alone_and_in_a_batch(case: tuple[str, str], tiny_network: Make) -> None:
    both, many = tiny_network(*case, precision=INT8), tiny_network(*case, precision=MANY_ROWS)
    texts = prompts(5, longest=9, seed=3)
    source = None if both.is_language_model else texts[0]
    texts = [[*text, 5, 6] for text in texts]
    alone = [both.model.score(text, source) for text in texts]
    for together in (both.model.score(texts, source), many.model.score(texts, source)):
        for score, expected in zip(together, alone, strict=True):
            assert score.token_logprobs == pytest.approx(expected.token_logprobs, abs=1e-4)
    assert both.model._scorer.decoder is both.model.sessions[MANY]
