"""The `edgekit` command. Nothing heavy is imported here: `--help` must be instant.

Exit 0: done. 1: the answer is no. 2: misuse or bad input, told in one line. 130: interrupted.
"""

from __future__ import annotations

import errno
import signal
import sys
import traceback
import warnings
from typing import Any

import click

from runtime.errors import EdgekitError, MissingDependency

from .commands import COMMANDS

_EXTRAS = {
    "torch": "export",
    "onnx": "export",
    "onnxscript": "export",
    "onnx_ir": "export",
    "safetensors": "export",
    "onnxruntime": "cpu",
    "sklearn": "data",
    "PIL": "data",
    "jinja2": "report",
}


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80})
@click.version_option(package_name="edgekit")
def cli() -> None:
    """Take a network to an edge device, and prove that it still gives the same
    answers there.

    \b
    From nothing to a report:     edgekit deploy lenet -o demo
    Your own network:             edgekit export my_model.py:build -o my.bundle
    What there is:                edgekit list

    Add --debug to any command to see where an error came from.
    """


for command in COMMANDS:
    cli.add_command(command)


def main(arguments: list[str] | None = None) -> None:
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code; errors become one line on stderr."""
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    signal.signal(signal.SIGTERM, _terminate)
    warnings.showwarning = _show_warning
    try:
        result: Any = cli(arguments, prog_name="edgekit", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return 130
    except SystemExit:
        # click wraps stdout like this when the reader of our output has gone, as with `| head`
        if "PacifyFlushWrapper" in type(sys.stdout).__name__:
            return 0
        raise
    except Exception as error:
        if debug:
            traceback.print_exc()
        message, code = _explain(error)
        click.echo(f"error: {message}", err=True)
        return code


def _explain(error: Exception) -> tuple[str, int]:
    if isinstance(error, EdgekitError):
        return str(error), error.exit_code
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        return f"a command is missing\n{error.format_message()}", 2
    if isinstance(error, click.ClickException):
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "edgekit"
        return f"{' '.join(error.format_message().split()).rstrip('.')}; see: {command} --help", 2
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] in _EXTRAS:
        package = (error.name or "").partition(".")[0]
        return str(MissingDependency.of(package, _EXTRAS[package], "this command")), 2
    if isinstance(error, OSError):
        place = f" ({error.filename})" if error.filename else ""
        if error.errno == errno.ENOSPC:
            return f"the disk is full{place}; nothing was kept of the unfinished output, free some space and run it again", 2
        return f"{error.strerror or error}{place}; check the path and its permissions", 2
    if isinstance(error, MemoryError):
        return "out of memory; use a smaller batch or a smaller network", 2
    return (
        f"this is a bug in edgekit, {type(error).__name__}: {' '.join(str(error).split())[:300]}; run it again with --debug",
        2,
    )


def _terminate(number: int, frame: object) -> None:
    raise SystemExit(128 + number)  # so that what is half-written is removed on the way out


def _show_warning(message: Warning | str, category: type[Warning], *rest: object, **more: object) -> None:
    if issubclass(
        category, RuntimeWarning
    ):  # ours, e.g. a device that could not be used; libraries' notices are for developers
        click.echo(f"warning: {message}", err=True)
