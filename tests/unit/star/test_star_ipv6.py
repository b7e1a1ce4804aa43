"""A hub is reached by IPv6 as by IPv4, and a name by whichever of its addresses answers."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
from cryptography import x509
from torch import nn
from typer.testing import CliRunner

import outergrad as og
from ipv6 import needs_ipv6
from outergrad.core.addresses import Address
from outergrad.star import reach
from outergrad.star.authority import read_certificate, read_kit
from outergrad.star.folder import HubFolder
from outergrad.star.reach import Obstacle, obstacle
from outergrad.star.sentences import sentence
from outergrad.star.server import HubServer, refuse_taken
from outergrad.tools.commands.app import app
from stars import CPU


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A hub's folder and kits, for the address of IPv6's loopback and for a name."""
    found = HubFolder(tmp_path_factory.mktemp("star") / "hub")
    found.create("[0:0:0::1]:8443", ["localhost", "[2001:DB8::0001]"])
    for name in "ab":
        found.invite(name).write(found.path / f"{name}.kit")
    return found


@contextmanager
def listening(made: HubFolder, listen: str, sites: str = "ab", **settings) -> Iterator[HubServer]:
    server = HubServer(made, listen, [*sites], **settings)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def test_certificates_have_the_shortest_form_of_a_number(made):
    extensions = read_certificate(made.identity("hub").certificate).extensions
    names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    numbers = [str(one) for one in names.get_values_for_type(x509.IPAddress)]
    assert numbers == ["::1", "2001:db8::1"]
    assert names.get_values_for_type(x509.DNSName) == ["localhost"]


def trained(address: str, kit: str) -> torch.Tensor:
    """Trains as a site; returns the weights."""
    generator = torch.Generator().manual_seed(len(kit))
    model = nn.Linear(4, 2)
    transport = og.Star(address, kit=kit, wait_s=60)
    session = og.distribute(model, og.DAD(), transport=transport, timeout=30)
    for _ in range(3):
        model(torch.randn(5, 4, generator=generator)).square().sum().backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.01 * p.grad
    session.detach()
    transport.close()
    return model.weight.detach()


@needs_ipv6
def test_two_sites_train_by_a_hub_on_ipv6(made):
    said = []
    assert read_kit(made.path / "a.kit").hub == "[::1]:8443"
    with listening(made, "[::1]:0", say=said.append) as server, ThreadPoolExecutor(2) as threads:
        addresses = [f"[::1]:{server.port}", f"[0:0::0:1]:{server.port}"]  # one, written twice
        kits = [str(made.path / f"{name}.kit") for name in "ab"]
        one, other = threads.map(trained, addresses, kits)
    assert torch.equal(one, other)
    assert any(told.startswith("a joins from ::1") for told in said)


@needs_ipv6
@pytest.mark.parametrize("listen", ["127.0.0.1:0", "[::1]:0"])
def test_a_name_with_both_families_is_reached_by_the_one_that_answers(made, listen):
    with listening(made, listen, "a") as server:
        began = time.monotonic()
        transport = og.Star(f"localhost:{server.port}", kit=made.path / "a.kit", wait_s=30)
        transport.open(CPU, timeout=timedelta(seconds=30))
        took_s = time.monotonic() - began
        transport.close()
    assert took_s < 5


@needs_ipv6
@pytest.mark.parametrize("address", ["[::1]", "127.0.0.1"])
def test_a_hub_that_listens_everywhere_takes_both_families(made, address):
    other = HubFolder(made.path.parent / f"other{len(address)}")
    other.create(f"{address}:8443")
    other.invite("a").write(other.path / "a.kit")
    with listening(other, "[::]:0", "a") as server:
        found = obstacle(f"{address}:{server.port}", read_kit(other.path / "a.kit"))
        transport = og.Star(f"{address}:{server.port}", kit=other.path / "a.kit", wait_s=30)
        transport.open(CPU, timeout=timedelta(seconds=30))
        transport.close()
    assert found is None


def test_a_hub_listens_on_ipv4_where_there_is_no_ipv6(monkeypatch):
    opened, create = [], socket.create_server

    def without_ipv6(place, *, family, dualstack_ipv6):
        if family == socket.AF_INET6:
            raise OSError(97, "Address family not supported by protocol")
        opened.append(place[0])
        return create(place, family=family, dualstack_ipv6=dualstack_ipv6)

    monkeypatch.setattr(socket, "create_server", without_ipv6)
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    refuse_taken(Address("::", 0))
    assert opened == ["0.0.0.0"]


def made_up(monkeypatch, met: dict[str, Exception | Obstacle | None]) -> None:
    """Makes a name have addresses, and each of them what is met there."""

    def connect(place, _):
        found = met[place[0]]
        if isinstance(found, Exception):
            raise found
        return socket.socket()

    places = [(0, 0, 0, "", (number, 8443)) for number in met]
    answers = iter([one for one in met.values() if not isinstance(one, Exception)])
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: places)
    monkeypatch.setattr(socket, "create_connection", connect)
    monkeypatch.setattr(reach, "_in_tls", lambda *_: next(answers))


NO_WAY, SILENT, REFUSED = OSError(101, "Unreachable"), TimeoutError(), ConnectionRefusedError()
FOREIGN = Obstacle("another hub", lasts=True, how_far=3)


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        (SILENT, NO_WAY, "hub.test does not answer on port 8443"),
        (NO_WAY, SILENT, "hub.test does not answer on port 8443"),
        (REFUSED, SILENT, "nobody listens on port 8443 of hub.test"),
        (FOREIGN, REFUSED, "nobody listens on port 8443 of hub.test"),
        (FOREIGN, FOREIGN, "another hub"),
        (SILENT, None, ""),
        (None, SILENT, ""),
    ],
)
def test_of_two_addresses_the_obstacle_farthest_on_the_way_is_told(
    made, monkeypatch, first, second, told
):
    made_up(monkeypatch, {"2001:db8::1": first, "192.0.2.1": second})
    found = obstacle("hub.test:8443", read_kit(made.path / "a.kit"))
    assert (found is None) == (told == "")
    assert found is None or told in found.why
    assert found is None or found.lasts == (first is second is FOREIGN)


def invoke(*words: str):
    return CliRunner().invoke(app, [*words])


BARE = "is no address: an IPv6 address stands in brackets, as [2001:db8::1]:8443"


def test_a_bad_address_is_told_in_one_line_with_its_parameter(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = invoke("hub", "init", "hub", "--address", "2001:db8::1").stderr
    assert told == f"outergrad: --address='2001:db8::1' {BARE}\n"
    told = invoke("hub", "init", "hub", "--address", "hub:1", "--host", "::1]:1").stderr
    assert told.startswith("outergrad: --host='::1]:1' is no address: ")
    assert invoke("hub", "init", "hub", "--address", "[::1]:1").exit_code == 0
    assert invoke("hub", "invite", "a").exit_code == 0
    told = invoke("hub", "serve", "--listen", "::1:8443").stderr
    assert told == f"outergrad: --listen='::1:8443' {BARE}\n"
    with pytest.raises(ValueError, match="is no address") as raised:
        og.Star("2001:db8::1", kit="a.kit")
    assert str(raised.value) == f"og.Star: hub='2001:db8::1' {BARE}"


def test_a_kit_with_a_bad_address_is_told_in_one_line(made, tmp_path):
    kit = tmp_path / "odd.kit"
    kit.write_text((made.path / "a.kit").read_text().replace("[::1]:8443", "::1"))
    kit.chmod(0o600)
    with pytest.raises(ValueError, match="stands in brackets") as raised:
        og.Star(kit=kit).open(CPU)
    assert str(raised.value) == f"the kit of a: hub='::1' {BARE}"


@pytest.mark.parametrize("peer", ["ipv6:[2001:db8::7]:41", "ipv6:%5B2001:db8::7%5D:41"])
def test_where_a_site_calls_from_is_told_without_brackets(peer):
    told = sentence("joined", {"site": "a", "missing": [], "peer": peer})
    assert told == "a joins from 2001:db8::7"
