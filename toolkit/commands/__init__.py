"""One file a verb. Each imports what it needs inside its function, so that `--help` stays instant."""

from .bench import bench
from .check import check
from .deploy import deploy
from .evaluate import evaluate
from .export import export
from .list import list_command
from .optimize import optimize
from .quantize import quantize
from .run import run
from .train import train
from .verify import verify
from .wrap import wrap

COMMANDS = (list_command, train, export, check, optimize, quantize, wrap, verify, evaluate, bench, run, deploy)
