"""Data sets by name: where their files lie and come from."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from outergrad.launch.errors import RecipeError
from outergrad_lab.data.dataset import Dataset, Format
from outergrad_lab.data.files import DamagedFileError
from outergrad_lab.data.images import (
    read_cifar10,
    read_digits,
    read_mnist,
    read_mnist_512,
    read_pneumonia,
)
from outergrad_lab.data.sequences import read_natops, read_pendigits, read_spoken_digits
from outergrad_lab.data.text import read_tinyshakespeare, read_war_and_peace
from outergrad_lab.data.texts import read_ag_news, read_imdb
from outergrad_lab.data.tokens import VOCABULARY


@dataclass(frozen=True)
class Original:
    """A file as its authors publish it; gzipped here, where its place has a name of that kind.

    Attributes:
        url: Its address.
        md5: Its checksum.
    """

    url: str
    md5: str


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a data set comes from.

    Attributes:
        summary: What it is, in a few words.
        read: Reads it from the folder that holds its files.
        format: What a row of it is.
        files: MD5 checksum of each file it needs; empty where any version will do.
        folder: Folder of the files, if it is not called like the data set.
        url: Folder on the net that holds just these files, if one does.
        originals: Of each file, where there is no such folder, but a file it can be made from.
        origin: Where the data is from, and what is to be made of it, for a person to do so.
    """

    summary: str
    read: Callable[[Path], Dataset]
    format: Format
    files: Mapping[str, str] = field(default_factory=dict)
    folder: str = ""
    url: str = ""
    originals: Mapping[str, Original] = field(default_factory=dict)
    origin: str = ""

    @property
    def can_be_fetched(self) -> bool:
        """Whether a command brings it."""
        return bool(self.url or self.originals)


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
    """Raises `RecipeError` that says which files of a data set to put where."""
    missing = missing_files(name, data_dir)
    if missing:
        raise RecipeError(f"{name} is not there: {how_to_get(name, data_dir, missing)}")


def missing_files(name: str, data_dir: Path) -> list[str]:
    """Names the files of a data set that are not in its folder."""
    folder = folder_of(name, data_dir)
    return [file for file in SOURCES[name].files if not (folder / file).is_file()]


def folder_of(name: str, data_dir: Path) -> Path:
    """The folder that holds the files of a data set."""
    return data_dir / (SOURCES[name].folder or name)


def how_to_get(name: str, data_dir: Path, files: Sequence[str]) -> str:
    """Says in one line how to bring files of a data set to their place."""
    place = f"{where_to_put(name, data_dir, files)} (--data-dir or OUTERGRAD_DATA)"
    source = SOURCES[name]
    if source.can_be_fetched:
        return f"{place}, or run: {get_command(name, data_dir)}"
    return f"{place}; to be made from {source.origin}"


def where_to_put(name: str, data_dir: Path, files: Sequence[str]) -> str:
    """Says where files of a data set belong."""
    return f"put {', '.join(files)} into {folder_of(name, data_dir)}"


def get_command(name: str, data_dir: Path) -> str:
    """The command that downloads a data set."""
    return f"outergrad data get {name} --data-dir {data_dir}"


_MNIST_FILES = {
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
}
_MNIST_URL = "https://ossci-datasets.s3.amazonaws.com/mnist/"

SOURCES: dict[str, Source] = {
    "digits": Source(
        summary="1797 handwritten digits of 8x8 pixels",
        read=read_digits,
        format=Format(shape=(64,), classes=10),
        origin="shipped with scikit-learn",
    ),
    "mnist": Source(
        summary="70000 handwritten digits of 28x28 pixels, 11 MB",
        read=read_mnist,
        format=Format(shape=(784,), classes=10),
        files=_MNIST_FILES,
        url=_MNIST_URL,
        origin="MNIST, http://yann.lecun.com/exdb/mnist, from PyTorch's copy",
    ),
    "mnist-512": Source(
        summary="the 512 pixels of mnist that vary most",
        read=read_mnist_512,
        format=Format(shape=(512,), classes=10),
        files=_MNIST_FILES,
        folder="mnist",
        url=_MNIST_URL,
        origin="as mnist",
    ),
    "cifar10": Source(
        summary="30000 photographs of 32x32 pixels in 10 classes",
        read=read_cifar10,
        format=Format(shape=(3, 32, 32), classes=10),
        files={"cifar10_subset.npz": ""},
        folder="cifar10_subset",
        origin="CIFAR-10, https://www.cs.toronto.edu/~kriz/cifar.html: arrays y_train, y_test and "
        "x_train_delta, x_test_delta, uint8 (rows, 3, 32, 32), modulo 256 the "
        "differences of neighbours along channels, rows and columns",
    ),
    "pneumonia": Source(
        summary="5332 chest X-rays of 28x28 pixels in 2 classes",
        read=read_pneumonia,
        format=Format(shape=(1, 28, 28), classes=2),
        files={"pneumoniamnist.npz": ""},
        folder="pneumoniamnist",
        originals={
            "pneumoniamnist.npz": Original(
                "https://zenodo.org/records/10519652/files/pneumoniamnist.npz",
                "28209eda62fecd6e6a2d98b1501bb15f",
            )
        },
        origin="MedMNIST, https://medmnist.com, CC BY 4.0",
    ),
    "spoken-digits": Source(
        summary="8800 spoken Arabic digits of 40 frames of 13 coefficients",
        read=read_spoken_digits,
        format=Format(shape=(40, 13), classes=10),
        files={"spoken_arabic_digits.npz": ""},
        folder="spoken_arabic_digits",
        origin="UCI data set 195, https://archive.ics.uci.edu/dataset/195: arrays x_train, x_test, "
        "float32 (rows, frames, 13), with zeros behind the end, len_train, len_test, y_train, "
        "y_test and speaker_train, which counts blocks of a digit by tens",
    ),
    "natops": Source(
        summary="360 gestures of 51 frames of 24 coordinates in 6 classes",
        read=read_natops,
        format=Format(shape=(51, 24), classes=6),
        files={"natops.npz": ""},
        origin="NATOPS, https://www.timeseriesclassification.com: arrays x_train, x_test, float32 "
        "(rows, 51, 24), y_train and y_test",
    ),
    "pendigits": Source(
        summary="10992 handwritten digits of 8 positions of the pen",
        read=read_pendigits,
        format=Format(shape=(8, 2), classes=10),
        files={"pendigits.npz": ""},
        origin="UCI data set 81, https://archive.ics.uci.edu/dataset/81: arrays x_train, x_test, "
        "uint8 (rows, 8, 2), y_train and y_test, of pendigits.tra and pendigits.tes",
    ),
    "tinyshakespeare": Source(
        summary="8646 rows of 129 characters by Shakespeare",
        read=read_tinyshakespeare,
        format=Format(shape=(128,), classes=65, tokens=True),
        files={"input.txt.gz": ""},
        originals={
            "input.txt.gz": Original(
                "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/"
                "input.txt",
                "6fb458f1232090904fb40fe944165e91",
            )
        },
        origin="data/tinyshakespeare/input.txt of https://github.com/karpathy/char-rnn, gzipped",
    ),
    "war-and-peace": Source(
        summary="24870 rows of 129 characters by Tolstoy",
        read=read_war_and_peace,
        format=Format(shape=(128,), classes=94, tokens=True),
        files={"warandpeace.txt.gz": ""},
        folder="war_and_peace",
        originals={
            "warandpeace.txt.gz": Original(
                "https://raw.githubusercontent.com/timbmg/RNNLM/master/data/warandpeace.txt",
                "afa9376862d9e355ca4ec5a1c969f77d",
            )
        },
        origin="book 2600 of https://www.gutenberg.org, plain text with its notices, gzipped",
    ),
    "imdb": Source(
        summary="50000 reviews of films of 128 tokens in 2 classes",
        read=read_imdb,
        format=Format(shape=(128,), classes=2, tokens=True, vocabulary=VOCABULARY),
        files={"train.csv.gz": "", "test.csv.gz": ""},
        origin="Large Movie Review Dataset, https://ai.stanford.edu/~amaas/data/sentiment, "
        "as tables with the columns label (0 or 1) and text",
    ),
    "ag-news": Source(
        summary="24920 news of 64 tokens in 4 classes",
        read=read_ag_news,
        format=Format(shape=(64,), classes=4, tokens=True, vocabulary=VOCABULARY),
        files={"train_subset.csv.gz": "", "test.csv.gz": ""},
        folder="ag_news",
        origin="AG News, https://github.com/mhjabreel/CharCnn_Keras, as tables with the "
        "columns label (0 to 3) and description; of train.csv a part",
    ),
}
