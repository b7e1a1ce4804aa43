from __future__ import annotations

import gzip
import hashlib
import threading
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
from typer.testing import CliRunner

from outergrad.launch.console import download_bars
from outergrad.launch.errors import RecipeError
from outergrad_lab.commands.data import data_app
from outergrad_lab.data import SOURCES, Format, Source
from outergrad_lab.data.catalogue import Original
from outergrad_lab.data.download import download
from outergrad_lab.training.job import Job

FILES = {"images.gz": b"i" * 200_000, "labels.gz": b"l" * 100}


class Handler(SimpleHTTPRequestHandler):
    """Serves a folder, remembers what was asked for, and can break off."""

    asked: list[str]
    missing_bytes = 0

    def do_GET(self):
        self.asked.append(self.path)
        super().do_GET()

    def copyfile(self, source, outputfile):
        content = source.read()
        outputfile.write(content[: len(content) - self.missing_bytes])

    def log_message(self, format, *args):
        pass


@pytest.fixture
def handler():
    """A fresh class for each test."""
    return type("FreshHandler", (Handler,), {"asked": []})


@pytest.fixture
def url(tmp_path, handler):
    """A server on this machine that has both files."""
    served = tmp_path / "served" / "mirror"
    served.mkdir(parents=True)
    for name, content in FILES.items():
        (served / name).write_bytes(content)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=served.parent))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/mirror"
    server.shutdown()
    thread.join()
    server.server_close()


def source(url: str = "", **checksums: str) -> Source:
    md5 = {name: hashlib.md5(content).hexdigest() for name, content in FILES.items()}
    return Source(
        summary="two files",
        read=lambda _: pytest.fail("not to be read"),
        format=Format(shape=(1,), classes=2),
        files=md5 | checksums,
        url=url,
    )


def get(source: Source, folder, url: str = "") -> list[str]:
    with download_bars() as bars:
        return download(source, folder, bars, url)


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("ending", ["", "/"])
def test_files_arrive_complete(url, tmp_path, ending):
    folder = tmp_path / "data" / "set"
    assert get(source(url + ending), folder) == list(FILES)
    assert {name: (folder / name).read_bytes() for name in names(folder)} == FILES


def test_the_users_url_goes_before_the_sources(url, tmp_path):
    assert get(source("http://127.0.0.1:1/"), tmp_path / "data", url) == list(FILES)


def test_only_what_is_not_right_is_fetched(url, tmp_path, handler):
    get(source(url), tmp_path / "data")
    (tmp_path / "data" / "labels.gz").write_bytes(b"damaged")
    handler.asked.clear()
    assert get(source(url), tmp_path / "data") == ["labels.gz"]
    assert handler.asked == ["/mirror/labels.gz"]
    assert (tmp_path / "data" / "labels.gz").read_bytes() == FILES["labels.gz"]
    assert get(source(url), tmp_path / "data") == []


def test_a_file_without_a_checksum_is_any_file_of_its_name(url, tmp_path):
    anything = {"images.gz": "", "labels.gz": ""}
    assert get(source(url, **anything), tmp_path / "data") == list(FILES)
    (tmp_path / "data" / "labels.gz").write_bytes(b"mine")
    assert get(source(url, **anything), tmp_path / "data") == []
    assert (tmp_path / "data" / "labels.gz").read_bytes() == b"mine"


def test_a_wrong_checksum_keeps_nothing_and_loses_nothing(url, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "labels.gz").write_bytes(b"mine")
    with pytest.raises(RecipeError, match=r"labels\.gz: checksum .* instead of 0000"):
        get(source(url, **{"labels.gz": "0000"}), tmp_path / "data")
    assert names(tmp_path / "data") == ["images.gz", "labels.gz"]
    assert (tmp_path / "data" / "labels.gz").read_bytes() == b"mine"


def test_a_reply_that_breaks_off_keeps_nothing(url, tmp_path, handler):
    handler.missing_bytes = 10
    with pytest.raises(RecipeError, match="images"):
        get(source(url), tmp_path / "data")
    assert names(tmp_path / "data") == []


def test_an_absent_file_is_named(url, tmp_path):
    with pytest.raises(RecipeError, match=r"cannot download .*nowhere/images\.gz \(.*404"):
        get(source(url + "/nowhere"), tmp_path / "data")
    assert names(tmp_path / "data") == []


@pytest.mark.parametrize("nowhere", ["http://127.0.0.1:1/", "no url at all"])
def test_without_a_server_the_remedy_is_told(tmp_path, nowhere):
    with pytest.raises(RecipeError, match=f"put images.gz into {tmp_path / 'data'} yourself"):
        get(source(nowhere), tmp_path / "data")


def test_a_folder_that_cannot_be_written_is_named(url, tmp_path):
    (tmp_path / "data").write_text("a file, not a folder")
    with pytest.raises(RecipeError, match=r"cannot write .*images\.gz .*--data-dir"):
        get(source(url), tmp_path / "data")


@pytest.mark.parametrize("address", ["http://example.org/mnist", "http://127.0.0.1.example.org"])
def test_an_address_that_is_not_protected_is_refused(tmp_path, address):
    with pytest.raises(RecipeError, match=r"is not protected.*https://"):
        get(source(), tmp_path / "data", address)
    assert not (tmp_path / "data").exists() or names(tmp_path / "data") == []


def test_a_redirect_to_such_an_address_is_refused(url, tmp_path, handler):
    def redirect(self):
        self.send_response(302)
        self.send_header("Location", "http://example.org/images.gz")
        self.end_headers()

    handler.do_GET = redirect
    with pytest.raises(RecipeError, match=r"example.org/images.gz is not protected"):
        get(source(url), tmp_path / "data")
    assert names(tmp_path / "data") == []


def test_files_of_this_machine_are_taken(url, tmp_path):
    address = (tmp_path / "served" / "mirror").as_uri()
    assert get(source(), tmp_path / "data", address) == list(FILES)


def test_a_file_that_its_authors_publish_plain_is_gzipped_on_its_way(tmp_path):
    (tmp_path / "input.txt").write_bytes(text := b"to be or not to be")
    original = Original((tmp_path / "input.txt").as_uri(), hashlib.md5(text).hexdigest())
    folder = tmp_path / "data"
    one = replace(source(), files={"input.txt.gz": ""}, originals={"input.txt.gz": original})
    assert get(one, folder) == ["input.txt.gz"]
    assert gzip.decompress((folder / "input.txt.gz").read_bytes()) == text
    assert get(one, folder) == []


def test_a_changed_original_is_not_kept(tmp_path):
    (tmp_path / "input.txt").write_text("other words")
    original = Original((tmp_path / "input.txt").as_uri(), hashlib.md5(b"").hexdigest())
    one = replace(source(), files={"input.txt.gz": ""}, originals={"input.txt.gz": original})
    with pytest.raises(RecipeError, match="checksum"):
        get(one, tmp_path / "data")
    assert names(tmp_path / "data") == []


@pytest.mark.parametrize(
    ("missing", "md5", "said"), [(10, "", "put images"), (0, "00", "checksum")]
)
def test_originals_that_break_off_or_differ_leave_nothing(
    url, tmp_path, handler, missing, md5, said
):
    handler.missing_bytes = missing
    made_from = (Original(f"{url}/images.gz", md5),)
    one = replace(source(), made_from=made_from, convert=lambda *_: pytest.fail("not to be made"))
    with pytest.raises(RecipeError, match=said) as caught:
        get(one, tmp_path / "data")
    assert ".unfinished" not in str(caught.value)
    assert names(tmp_path / "data") == []


def test_the_list_says_of_every_data_set_where_it_is_from(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "2000")
    told = CliRunner().invoke(data_app, ["list", "--data-dir", str(tmp_path)]).stdout
    for name, one in SOURCES.items():
        (about,) = (row for row in told.split("├") if f"│ {name} " in row)
        assert one.summary in about
        assert one.origin in about
        assert one.licence in about
        assert one.size in about
        assert not one.can_be_fetched or f"outergrad data get {name} " in about


def test_a_misspelt_data_set_gets_a_near_match():
    assert "did you mean mnist?" in CliRunner().invoke(data_app, ["get", "mnits"]).stderr
    with pytest.raises(
        RecipeError, match=r"--data must be .* not 'mnits' \(did you mean mnist\?\)"
    ):
        Job(data="mnits")
