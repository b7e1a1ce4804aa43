"""Data sets by name: the places of their files, and how to get them."""

from collections.abc import Sequence
from pathlib import Path

from outergrad.launch.errors import RecipeError
from outergrad_lab.data.catalogue import SOURCES
from outergrad_lab.data.dataset import Dataset
from outergrad_lab.data.files import DamagedFileError


def load(name: str, data_dir: Path) -> Dataset:
    """Reads a data set.

    Args:
        name: A key of `SOURCES`.
        data_dir: Folder that holds the folders of all data sets.

    Raises:
        RecipeError: A file is absent or damaged, or of other data.
    """
    require_files(name, data_dir)
    source = SOURCES[name]
    try:
        data = source.read(folder_of(name, data_dir))
    except DamagedFileError as error:
        raise RecipeError(f"{error}: {how_to_get(name, data_dir, [error.path.name])}") from error
    if data.format != source.format:
        remedy = how_to_get(name, data_dir, list(source.files))
        raise RecipeError(f"{name} has {data.format}, not {source.format}: {remedy}")
    return data


def require_files(name: str, data_dir: Path) -> None:
    """Raises `RecipeError` if files of a data set are missing; it says which to put where."""
    missing = missing_files(name, data_dir)
    if missing:
        raise RecipeError(f"{name} is not there: {how_to_get(name, data_dir, missing)}")


def missing_files(name: str, data_dir: Path) -> list[str]:
    """Returns the names of the files of a data set that are not in its folder."""
    folder = folder_of(name, data_dir)
    return [file for file in SOURCES[name].files if not (folder / file).is_file()]


def folder_of(name: str, data_dir: Path) -> Path:
    """Returns the folder that holds the files of a data set."""
    return data_dir / (SOURCES[name].folder or name)


def how_to_get(name: str, data_dir: Path, files: Sequence[str]) -> str:
    """Returns a line about how to get files of a data set."""
    place = f"{where_to_put(name, data_dir, files)} (--data-dir or OUTERGRAD_DATA)"
    source = SOURCES[name]
    if source.can_be_fetched:
        return f"{place}, or run: {get_command(name, data_dir)}"
    return f"{place}; to be made from {source.origin}"


def where_to_put(name: str, data_dir: Path, files: Sequence[str]) -> str:
    """Returns a line about where files of a data set belong."""
    return f"put {', '.join(files)} into {folder_of(name, data_dir)}"


def get_command(name: str, data_dir: Path) -> str:
    """Returns the command that downloads a data set."""
    return f"outergrad data get {name} --data-dir {data_dir}"
