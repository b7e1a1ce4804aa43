"""Packages that parts of outergrad need, and the command that installs those that are missing.

The command names the packages themselves: outergrad is on no index, so that pip would find nothing,
or another's package, by its name.
"""

from importlib.util import find_spec

REQUIREMENTS = {
    "accelerate": "accelerate>=1.15",
    "cryptography": "cryptography>=42",
    "dp_accounting": "dp-accounting>=0.6",
    "filelock": "filelock>=3",
    "grpc": "grpcio>=1.60",
    "jinja2": "jinja2>=3.1",
    "lightning": "lightning>=2.6.6",
    "matplotlib": "matplotlib>=3.8",
    "nvflare": "nvflare>=2.9,<2.10",
    "opacus": "opacus>=1.6",
    "pandas": "pandas>=2.2",
    "plotly": "plotly>=6.0",
    "psutil": "psutil>=5.9",
    "rich": "rich>=13",
    "river": "river>=0.22",
    "seaborn": "seaborn>=0.13",
    "sklearn": "scikit-learn>=1.4",
    "tensorboard": "tensorboard>=2.15",
    "tokenizers": "tokenizers>=0.20",
    "transformers": "transformers>=5.23",
    "typer": "typer>=0.15",
    "yaml": "pyyaml>=6",
}
"""Requirements by importable name, as in pyproject.toml's extras."""


def is_installed(module: str) -> bool:
    """Tells if a module can be imported, without importing it."""
    return find_spec(module) is not None


def how_to_install(*modules: str) -> str:
    """Returns the pip command that installs modules, by their importable names."""
    return " ".join(["pip install", *(f"'{REQUIREMENTS[module]}'" for module in modules)])


def missing(*modules: str) -> str | None:
    """Names the modules that are not installed, with the command for them; None if all are."""
    absent = [module for module in modules if not is_installed(module)]
    return f"{', '.join(absent)} not found: {how_to_install(*absent)}" if absent else None


def require(*modules: str) -> None:
    """Checks that modules are installed.

    Raises:
        ImportError: one is missing; the message has the command that installs it.
    """
    if told := missing(*modules):
        raise ImportError(told)
