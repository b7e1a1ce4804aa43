"""Data sets by name, and where each comes from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from outergrad.launch.errors import RecipeError
from outergrad_lab.data import converters
from outergrad_lab.data.dataset import Dataset, Format
from outergrad_lab.data.files import DamagedFileError
from outergrad_lab.data.images import (
    read_cifar10,
    read_digits,
    read_mnist,
    read_mnist_512,
    read_natops,
    read_pendigits,
    read_pneumonia,
    read_spoken_digits,
)
from outergrad_lab.data.texts import (
    VOCABULARY,
    Decoder,
    ag_news_decoder,
    film_reviews_decoder,
    imdb_decoder,
    read_ag_news,
    read_film_reviews,
    read_imdb,
    read_tinyshakespeare,
    read_war_and_peace,
    tinyshakespeare_decoder,
    war_and_peace_decoder,
)


@dataclass(frozen=True)
class Original:
    """A file as its authors publish it; gzipped here if only the local name ends in ``.gz``.

    Attributes:
        url: Address of the file.
        md5: Checksum of the file; empty where none is known.
    """

    url: str
    md5: str = ""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Origin of a data set, and how to read it.

    Attributes:
        summary: Description in a few words.
        read: Reads it from the folder that holds its files.
        format: Form of one row.
        decoder: Makes, from that folder, what makes texts of ids; None where rows are no texts.
        files: MD5 checksum of each file it needs; empty where any version will do.
        folder: Folder of the files, if it is not called like the data set.
        url: Folder on the net that holds just these files, if one does.
        originals: Original of each file, where there is no such folder.
        made_from: Originals that all files together are made from, where none is one of them.
        convert: Makes the files, from the paths of these originals, in a folder.
        licence: Licence, as its authors state it.
        size: Size of the download.
        origin: Origin of the data and how to make the files, for a person to do so.
    """

    summary: str
    read: Callable[[Path], Dataset]
    format: Format
    decoder: Callable[[Path], Decoder] | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    folder: str = ""
    url: str = ""
    originals: Mapping[str, Original] = field(default_factory=dict)
    made_from: Sequence[Original] = ()
    convert: Callable[[Sequence[Path], Path], None] | None = None
    origin: str = ""
    licence: str = "none stated"
    size: str = ""

    @property
    def can_be_fetched(self) -> bool:
        """True if `outergrad data get` can download it."""
        return bool(self.url or self.originals or self.made_from)


_MNIST_FILES = {
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
}
_MNIST_URL = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_UCI = "https://archive.ics.uci.edu/ml/machine-learning-databases/"
_IMDB = (
    Original(
        "https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz",
        "7c2ac02c03563afcf9b574c7e56c153a",
    ),
)
_AG_NEWS = "https://raw.githubusercontent.com/mhjabreel/CharCnn_Keras/master/data/ag_news_csv/"

SOURCES: dict[str, Source] = {
    "digits": Source(
        summary="1797 handwritten digits of 8x8 pixels",
        read=read_digits,
        format=Format(shape=(64,), classes=10),
        origin="shipped with scikit-learn",
        licence="CC BY 4.0 (UCI)",
        size="nothing",
    ),
    "mnist": Source(
        summary="70000 handwritten digits of 28x28 pixels, 11 MB",
        read=read_mnist,
        format=Format(shape=(784,), classes=10),
        files=_MNIST_FILES,
        url=_MNIST_URL,
        origin="MNIST, http://yann.lecun.com/exdb/mnist, from PyTorch's copy",
        licence="CC BY-SA 3.0",
        size="11 MB",
    ),
    "mnist-512": Source(
        summary="the 512 pixels of mnist that vary most",
        read=read_mnist_512,
        format=Format(shape=(512,), classes=10),
        files=_MNIST_FILES,
        folder="mnist",
        url=_MNIST_URL,
        origin="as mnist",
        licence="CC BY-SA 3.0",
        size="11 MB",
    ),
    "cifar10": Source(
        summary="30000 photographs of 32x32 pixels in 10 classes",
        read=read_cifar10,
        format=Format(shape=(3, 32, 32), classes=10),
        files={"cifar10_subset.npz": ""},
        folder="cifar10_subset",
        origin="CIFAR-10, https://www.cs.toronto.edu/~kriz/cifar.html: of each class the "
        "first 2000 training images, in their order, and the test images; figures in the docs "
        "are of 2000 others per class",
        made_from=(
            Original(
                "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
                "c32a1d4ab5d03f1284b67883e8d87530",
            ),
        ),
        convert=converters.convert_cifar10,
        licence="none stated; cite the report of 2009",
        size="170 MB",
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
        origin="MedMNIST, https://medmnist.com, in its order; figures in the docs are of the same "
        "training images in another order",
        licence="CC BY 4.0; not for clinical use",
        size="4 MB",
    ),
    "spoken-digits": Source(
        summary="8800 spoken Arabic digits of 40 frames of 13 coefficients",
        read=read_spoken_digits,
        format=Format(shape=(40, 13), classes=10),
        files={"spoken_arabic_digits.npz": ""},
        folder="spoken_arabic_digits",
        origin="UCI data set 195, https://archive.ics.uci.edu/dataset/195; speakers are counted by "
        "tens of utterances of a digit",
        made_from=tuple(
            Original(f"{_UCI}00195/{part}_Arabic_Digit.txt") for part in ("Train", "Test")
        ),
        convert=converters.convert_spoken_digits,
        licence="CC BY 4.0",
        size="about 50 MB",
    ),
    "natops": Source(
        summary="360 gestures of 51 frames of 24 coordinates in 6 classes",
        read=read_natops,
        format=Format(shape=(51, 24), classes=6),
        files={"natops.npz": ""},
        origin="NATOPS, https://www.timeseriesclassification.com",
        made_from=(Original("https://www.timeseriesclassification.com/aeon-toolkit/NATOPS.zip"),),
        convert=converters.convert_natops,
        licence="none stated; cite the UEA archive",
        size="a few MB",
    ),
    "pendigits": Source(
        summary="10992 handwritten digits of 8 positions of the pen",
        read=read_pendigits,
        format=Format(shape=(8, 2), classes=10),
        files={"pendigits.npz": ""},
        origin="UCI data set 81, https://archive.ics.uci.edu/dataset/81",
        made_from=tuple(Original(f"{_UCI}pendigits/pendigits.{part}") for part in ("tra", "tes")),
        convert=converters.convert_pendigits,
        licence="CC BY 4.0",
        size="0.7 MB",
    ),
    "tinyshakespeare": Source(
        summary="8646 rows of 129 characters by Shakespeare",
        read=read_tinyshakespeare,
        decoder=tinyshakespeare_decoder,
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
        licence="public domain",
        size="1.1 MB",
    ),
    "war-and-peace": Source(
        summary="24870 rows of 129 characters by Tolstoy",
        read=read_war_and_peace,
        decoder=war_and_peace_decoder,
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
        licence="public domain in the US, terms of Project Gutenberg",
        size="3.3 MB",
    ),
    "imdb": Source(
        summary="50000 reviews of films of 128 tokens in 2 classes",
        read=read_imdb,
        decoder=imdb_decoder,
        format=Format(shape=(128,), classes=2, tokens=True, vocabulary=VOCABULARY),
        files={"train.csv.gz": "", "test.csv.gz": ""},
        origin="Large Movie Review Dataset, https://ai.stanford.edu/~amaas/data/sentiment, its "
        "labelled part",
        made_from=_IMDB,
        convert=converters.convert_imdb,
        licence="none stated: for research, not to be passed on",
        size="84 MB",
    ),
    "film-reviews": Source(
        summary="rows of 129 tokens of reviews of films",
        read=read_film_reviews,
        decoder=film_reviews_decoder,
        format=Format(shape=(128,), classes=VOCABULARY, tokens=True),
        files={"train.csv.gz": "", "test.csv.gz": ""},
        folder="imdb",
        origin="as imdb",
        made_from=_IMDB,
        convert=converters.convert_imdb,
        licence="none stated: for research, not to be passed on",
        size="84 MB",
    ),
    "ag-news": Source(
        summary="24920 news of 64 tokens in 4 classes",
        read=read_ag_news,
        decoder=ag_news_decoder,
        format=Format(shape=(64,), classes=4, tokens=True, vocabulary=VOCABULARY),
        files={"train_subset.csv.gz": "", "test.csv.gz": ""},
        folder="ag_news",
        origin="AG News, https://github.com/mhjabreel/CharCnn_Keras: of each class the first 4330 "
        "training rows that are not in the test, and the test; figures in the docs are of 17320 "
        "others",
        made_from=(
            Original(f"{_AG_NEWS}train.csv", "b1a00f826fdfbd249f79597b59e1dc12"),
            Original(f"{_AG_NEWS}test.csv", "d52ea96a97a2d943681189a97654912d"),
        ),
        convert=converters.convert_ag_news,
        licence="research and other non-commercial use",
        size="31 MB",
    ),
}


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


def decoder(name: str, data_dir: Path) -> Decoder | None:
    """Returns what makes texts of the ids of a data set that is there; None of other rows.

    Args:
        name: A key of `SOURCES`.
        data_dir: Folder that holds the folders of all data sets.
    """
    make = SOURCES[name].decoder
    return None if make is None else make(folder_of(name, data_dir))


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
