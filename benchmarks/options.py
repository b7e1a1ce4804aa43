"""What the benchmarks' command lines have in common."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

METHODS = ["alone", "ddp", "dense", "dad", "dad-activations"]


def parser(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser that the benchmark adds its own options to."""
    common = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    common.add_argument("--model", default="mlp", choices=["mlp", "vgg", "vit", "gpt"])
    common.add_argument(
        "--methods",
        type=lambda text: text.split(","),
        default=METHODS,
        help="names in methods.py, with commas",
    )
    common.add_argument("--sites", type=int, default=2)
    common.add_argument("--threads", type=int, default=1, help="PyTorch's, on each site")
    common.add_argument("--timeout", type=float, default=120, help="of the group, in seconds")
    common.add_argument("--json", type=Path, help="file for the figures")
    return common


def save(options: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Writes the figures where ``--json`` says, with the options that made them."""
    if options.json:
        figures = {"options": vars(options), "rows": rows}
        options.json.write_text(json.dumps(figures, default=str, indent=1))


def ratio(row: dict[str, Any], rows: list[dict[str, Any]], key: str) -> str:
    """Writes a figure as a multiple of DDP's, where DDP is among the rows."""
    ddp = next((other[key] for other in rows if other["method"] == "ddp"), None)
    return f"{row[key] / ddp:.4f}" if ddp else "-"
