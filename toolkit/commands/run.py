"""edgekit run"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import click

from ..console import print_json, say
from . import options

_GENERATION = (
    click.option("--max-new-tokens", type=int, help="Most tokens to generate.  [default: what fits, at most 256]"),
    click.option("--beams", type=int, help="Beam search with so many texts side by side."),
    click.option("--n-best", type=int, help="Give the best N texts."),
    click.option("--temperature", type=float, help="Draw tokens instead of taking the likeliest; 1 is as the network says."),
    click.option("--top-k", type=int, help="Draw among the K likeliest."),
    click.option("--top-p", type=float, help="Draw among the likeliest that together have probability P."),
    click.option("--seed", type=int, help="The same text every time."),
    click.option("--prefix", help="The text begins with this."),
    click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; may be given several times."),
    click.option(
        "--set", "settings", multiple=True, metavar="NAME=VALUE",
        help="Any other option of docs/guide-runtime.md, e.g. no_repeat_ngram=3; may be given several times.",
    ),
    click.option("--many-rows", is_flag=True, help="A quantized decoder's form for beams and batches, if it has one."),
    click.option("--scores", is_flag=True, help="Print the score before each text."),
    click.option("--stream/--no-stream", default=True, help="Print one text as it is generated.  [default: stream]"),
)  # fmt: skip


def _generation_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(_GENERATION):
        command = option(command)
    return command


@click.command()
@click.argument("bundle")
@click.option("--text", metavar="TEXT", help="A prompt, a source, or a text to classify.")
@click.option("--stdin", is_flag=True, help="Read one text a line from stdin; answer each with a line.")
@click.option(
    "--input",
    "input_path",
    metavar="FILE",
    help="An image, a .csv/.tsv with the model's columns, or an .npz/.npy.",
)
@click.option("-o", "--output", metavar="FILE.npz", help="With --input: save raw outputs instead of printing predictions.")
@_generation_options
@click.option("--batch", type=click.IntRange(1), default=1, help="With --stdin: answer so many lines together.  [default: 1]")
@options.force
@options.device
@options.threads
@options.as_json
def run(
    bundle: str,
    text: str | None,
    stdin: bool,
    input_path: str | None,
    output: str | None,
    batch: int,
    force: bool,
    device: str,
    threads: int | None,
    as_json: bool,
    **generation: Any,
) -> int:
    """Run a bundle on a text, on lines of stdin, or on a file of raw inputs.

    \b
    Examples:
      edgekit run gpt.bundle --text "def main(" --temperature 0.8 --seed 1
      edgekit run g2p.bundle --text onnx --beams 4 --n-best 3 --scores
      cat words.txt | edgekit run g2p.bundle --stdin --json
      edgekit run lenet.bundle --input digit.png
      edgekit run my.bundle --input tensors.npz -o outputs.npz
    """
    from runtime.errors import OptionError

    if sum((text is not None, stdin, input_path is not None)) != 1:
        raise OptionError("give exactly one of --text, --stdin and --input")
    if input_path is None:
        return _run_texts(bundle, text, generation, batch, device, threads, as_json, output)
    from ..prediction import run_file

    lines, document = run_file(bundle, input_path, output, force=force, device=device, threads=threads)
    if as_json:
        print_json(document)
    else:
        say("\n".join(lines))
    return 0


def _run_texts(
    bundle: str,
    text: str | None,
    generation: dict[str, Any],
    batch: int,
    device: str,
    threads: int | None,
    as_json: bool,
    output: str | None,
) -> int:
    from runtime.errors import OptionError

    from ..generating import parse_option, run_texts

    if output:
        raise OptionError("-o saves raw outputs of --input; redirect the output of --text and --stdin, or use --json")
    scores, stream, many_rows = (bool(generation.pop(name)) for name in ("scores", "stream", "many_rows"))
    settings: tuple[str, ...] = generation.pop("settings")
    given = {name: value for name, value in generation.items() if value not in (None, ())}
    given |= dict(map(parse_option, settings))
    lines: Iterable[str] = [] if text is None else [text]
    if text is None:
        lines = (line.rstrip("\n") for line in sys.stdin)
    return run_texts(
        bundle,
        lines,
        given,
        one=text is not None,
        stream=stream,
        scores=scores,
        as_json=as_json,
        batch=batch,
        device=device,
        threads=threads,
        many_rows=many_rows,
    )
