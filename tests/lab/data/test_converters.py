"""Small archives in the formats of their authors become what the readers read."""

from __future__ import annotations

import io
import tarfile
import zipfile
from dataclasses import replace

import numpy as np
import pytest

from outergrad.launch.console import download_bars
from outergrad.launch.errors import RecipeError
from outergrad_lab.data import SOURCES
from outergrad_lab.data.catalogue import Original
from outergrad_lab.data.download import download

PIXELS = np.random.default_rng(0).integers(0, 256, (10, 3072), dtype=np.uint8)


def tar(members: dict[str, bytes]) -> bytes:
    with tarfile.open(fileobj=(out := io.BytesIO()), mode="w:gz") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return out.getvalue()


def zipped(members: dict[str, str]) -> bytes:
    with zipfile.ZipFile(out := io.BytesIO(), "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return out.getvalue()


def utterances(per_digit: int) -> bytes:
    block = "\n".join(" ".join(f"{row + k / 8}" for k in range(13)) for row in range(4))
    return "".join(f"           \n{block}\n" for _ in range(10 * per_digit)).encode()


RECORDS = np.hstack([np.arange(10, dtype=np.uint8)[:, None], PIXELS]).tobytes()
CASES = "@x\n@data\n" + "".join(
    ":".join([",".join(str(c + t + k) for t in range(51)) for c in range(24)] + [f"{k}.0"]) + "\n"
    for k in range(1, 7)
)
PENS = "".join(", ".join(map(str, [*range(d, d + 16), d])) + "\n" for d in range(10)).encode()
NEWS = "".join(f'"{c}","t","news, {{}} {c}"\n' for c in range(1, 5))
REVIEWS = {
    f"aclImdb/{part}/{kind}/{i}_{stars}.txt": f"{kind} film {i}".encode()
    for part in ("train", "test")
    for kind, stars in (("pos", 9), ("neg", 2))
    for i in (10, 9)
}
BINARIES = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
MADE = {
    "cifar10": [tar({f"cifar-10-batches-bin/{name}.bin": RECORDS for name in BINARIES})],
    "spoken-digits": [utterances(20), utterances(10)],
    "natops": [zipped({"NATOPS_TRAIN.ts": CASES, "NATOPS_TEST.ts": CASES})],
    "pendigits": [PENS, PENS],
    "imdb": [tar(REVIEWS)],
    "ag-news": [NEWS.format(*"abcd").encode(), NEWS.format(*"efgh").encode()],
}
ROWS = {"cifar10": (50, 10), "spoken-digits": (200, 100), "natops": (6, 6), "pendigits": (10, 10)}
ROWS |= {"imdb": (4, 4), "ag-news": (4, 4)}


def get(name, folder, served, contents):
    served.mkdir(exist_ok=True)
    originals = []
    for i, content in enumerate(contents):
        (served / f"{i}").write_bytes(content)
        originals.append(Original((served / f"{i}").as_uri()))
    with download_bars() as bars:
        return download(replace(SOURCES[name], made_from=originals), folder, bars)


@pytest.mark.parametrize("name", MADE)
def test_what_is_made_is_read(tmp_path, monkeypatch, name):
    monkeypatch.setenv("OUTERGRAD_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "data"
    assert get(name, folder, tmp_path / "served", MADE[name]) == [*SOURCES[name].files]
    assert {path.name for path in folder.iterdir()} == {*SOURCES[name].files}
    data = SOURCES[name].read(folder)
    assert (len(data.x_train), len(data.x_test)) == ROWS[name]
    assert data.x_train.shape[1:] == SOURCES[name].format.shape
    classes = SOURCES[name].format.classes
    assert data.y_test.unique().tolist() == list(range(classes))
    assert get(name, folder, tmp_path / "served", []) == [], "what is there stays"


@pytest.mark.parametrize("name", MADE)
def test_another_format_is_one_line_and_nothing_stays(tmp_path, name):
    with pytest.raises(RecipeError, match=r"is not what it was .*nothing kept.*--url"):
        get(name, tmp_path / "data", tmp_path / "served", [b"<html>" for _ in MADE[name]])
    assert list((tmp_path / "data").iterdir()) == []


def test_pixels_come_back_exactly(tmp_path):
    get("cifar10", tmp_path / "data", tmp_path / "served", MADE["cifar10"])
    x = np.load(tmp_path / "data" / "cifar10_subset.npz")["x_test_delta"]
    for axis in (1, 2, 3):
        x = np.cumsum(x, axis=axis, dtype=np.uint8)
    assert np.array_equal(x.reshape(10, 3072), PIXELS)
