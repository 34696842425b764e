"""`python -m runtime verify BUNDLE`: what a device can do with this folder, numpy and onnxruntime alone."""

from __future__ import annotations

import argparse
import json
import sys

from .errors import AlteredFile, EdgekitError


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m runtime", description="Run parts of Edgekit with numpy and onnxruntime alone."
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="verify")
    verify = verbs.add_parser("verify", help="replay the bundle's goldens on this machine")
    verify.add_argument("bundle")
    verify.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, tensorrt, openvino, … or auto (default: cpu)")
    verify.add_argument("--json", action="store_true", help="print the report as JSON")
    verbs.add_parser("bench-worker")  # used by the benchmark: times one bundle, asked over stdin
    options = parser.parse_args(arguments)
    try:
        if options.verb == "bench-worker":
            from .bench_bundle import BundleTarget
            from .bench_worker import serve

            serve(BundleTarget)
            return 0
        return verify_command(options.bundle, options.device, options.json)
    except EdgekitError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: {error}; check the path and its permissions", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def verify_command(path: str, device: str, as_json: bool) -> int:
    """Print the verdict; 0 if the bundle is intact and answers as it should, 1 if not. `edgekit verify` is this too."""
    from .verify import verify_bundle

    try:
        report = verify_bundle(path, device=device)
    except AlteredFile as error:  # "is it the same?" has been answered: no
        if as_json:
            print(json.dumps({"bundle": path, "passed": False, "problem": str(error)}, indent=1))
        print(f"NOT verified: {error}", file=sys.stderr)
        return 1
    for warning in report.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    print(json.dumps(report.to_json(), indent=1) if as_json else "\n".join(report.lines()))
    return 0 if report else 1


if __name__ == "__main__":
    sys.exit(main())
