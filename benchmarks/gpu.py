"""What the methods cost on one GPU, without any network.

    python benchmarks/gpu.py kernels              # one weight: product, factors, PowerSGD
    python benchmarks/gpu.py step                 # a training step of GPT-2 small

`kernels` is described in gpu_kernels.py, `step` in gpu_step.py; each takes a few minutes on a
data-centre GPU. From a checkout that is not installed, put `PYTHONPATH=src` before the command.
On a CPU, for small shapes alone:

    python benchmarks/gpu.py kernels --device cpu --sizes 64 --rows 8 --verify
    python benchmarks/gpu.py step --device cpu --vocab 64 --width 32 --depth 2 --heads 4 \
        --positions 16 --batch 2 --rounds 2
"""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """A parser that says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        """Ends the program."""
        self.exit(2, f"{Path(sys.argv[0]).name}: {message}\n")


def main() -> int:
    """Runs one of the benches; returns the exit status."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what timeout(1) sends
    parser = make_parser()
    options = parser.parse_args()
    try:
        return run(parser, options)
    except KeyboardInterrupt:
        return interrupted()


def run(parser: Parser, options: argparse.Namespace) -> int:
    """Checks the options against this machine, measures, prints and saves.

    An interrupted run shows and saves what it has.
    """
    import gpu_common as common  # loads PyTorch: a mistake on the command line is told before

    bench = load(options.bench)
    objection = common.objection(options, bench.METHODS) or bench.objection(options)
    if objection:
        parser.error(objection)
    common.set_up(options)
    print(common.headline(options), flush=True)
    checks = bench.verify(options)
    for line in checks:
        print(line, flush=True)
    rows: list[common.Row] = []
    status = 0
    try:
        bench.measure(options, rows)
    except KeyboardInterrupt:
        status = interrupted()
    bench.add_ratios(rows)
    print(common.table(bench.COLUMNS, rows))
    common.save(options, checks, rows)
    return status or int(any(row["status"].startswith("failed") for row in rows))


def load(bench: str) -> ModuleType:
    """The module of a bench: its methods, columns, checks and measurements."""
    return importlib.import_module(f"gpu_{bench}")


def interrupted() -> int:
    """Says so; returns the exit status that shells expect."""
    print("\ngpu.py: interrupted", file=sys.stderr)
    return 128 + signal.SIGINT


def make_parser() -> Parser:
    """The command line."""
    parser = Parser(description=(__doc__ or "").partition("\n")[0])
    benches = parser.add_subparsers(dest="bench", required=True, metavar="kernels | step")
    add_kernels(benches.add_parser("kernels", help="one weight: product, factors, PowerSGD"))
    add_step(benches.add_parser("step", help="a training step of GPT-2 small"))
    return parser


def add_kernels(parser: Parser) -> None:
    """The options of gpu_kernels.py."""
    add_common(parser)
    sizes, rows = [1024, 2048, 4096, 8192], [32, 128, 512, 2048, 8192]
    parser.add_argument("--sizes", type=positive, nargs="+", default=sizes, help="weights n x n")
    parser.add_argument("--rows", type=positive, nargs="+", default=rows, help="batch x positions")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="of A and Δ")
    parser.add_argument("--sites", type=positive, default=2, help="for DAD's choice")
    parser.add_argument("--repeats", type=positive, default=20, help="timed calls")
    parser.add_argument("--warmup", type=positive, default=3, help="untimed calls before them")
    parser.add_argument("--verify", action="store_true", help="check that the products are right")


def add_step(parser: Parser) -> None:
    """The options of gpu_step.py."""
    add_common(parser)
    parser.add_argument("--batch", type=positive, default=8, help="sequences in a step")
    parser.add_argument("--positions", type=positive, default=1024, help="tokens in a sequence")
    parser.add_argument("--vocab", type=positive, default=50257)
    parser.add_argument("--width", type=positive, default=768)
    parser.add_argument("--depth", type=positive, default=12)
    parser.add_argument("--heads", type=positive, default=12)
    parser.add_argument("--steps", type=positive, default=3, help="timed, of a method in a round")
    parser.add_argument("--rounds", type=positive, default=5, help="in which methods take turns")
    parser.set_defaults(dtype="fp32")
    parser.add_argument(
        "--autocast", dest="dtype", action="store_const", const="bf16", help="forward in bf16"
    )
    parser.add_argument("--backend", choices=["nccl", "gloo"], help="nccl on CUDA by default")


def add_common(parser: Parser) -> None:
    """The options of both."""
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tf32", action="store_true", help="TF32 in products of fp32")
    parser.add_argument("--methods", nargs="+", metavar="NAME", help="all by default")
    parser.add_argument("--json", type=Path, metavar="FILE", help="for the figures")


def positive(text: str) -> int:
    """A whole number above zero."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
