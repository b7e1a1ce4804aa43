"""A site makes its own key, the hub signs it, and nothing that travels is secret."""

from __future__ import annotations

import json
import os
import re

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID
from typer.testing import CliRunner

import outergrad as og
from outergrad.star.authority import (
    new_authority,
    new_request,
    read_certificate,
    read_kit,
    read_request,
    signed_site,
)
from outergrad.star.folder import HubFolder
from outergrad.star.server import HubServer
from outergrad.tools.commands.app import app
from stars import CPU


def invoke(*args: object):
    return CliRunner().invoke(app, [*map(str, args)])


def done(*args: object) -> str:
    result = invoke(*args)
    assert result.exit_code == 0, result.stderr
    return result.stdout


@pytest.fixture
def apart(tmp_path, monkeypatch):
    """A hub's folder, from which commands run."""
    monkeypatch.chdir(tmp_path)
    done("hub", "init", "hub", "--address", "127.0.0.1:1")
    return HubFolder(tmp_path / "hub")


def test_from_request_to_training(apart, tmp_path):
    asked = done("site", "request", "--name", "a")
    signed = done("hub", "sign", "a.csr")
    joined = done("site", "join", "a.signed")
    fingerprint = re.compile(r"(?:[0-9a-f]{4}-){7}[0-9a-f]{4}")
    assert fingerprint.search(asked)[0] == fingerprint.findall(signed)[0]
    assert fingerprint.findall(signed)[1] == fingerprint.search(joined)[0]
    secret = (tmp_path / "a.key").read_text()
    middle = "".join(secret.splitlines()[1:-1])[20:]
    for sent in ("a.csr", "a.signed"):
        assert "PRIVATE" not in (tmp_path / sent).read_text()
        assert middle not in (tmp_path / sent).read_text().replace("\n", "")
    for kept in ("a.key", "a.kit"):
        assert os.stat(kept).st_mode & 0o777 == 0o600
    server = HubServer(apart, "127.0.0.1:0")
    server.start()
    try:
        one = og.Star(f"127.0.0.1:{server.port}", kit="a.kit", blind=True)
        assert one.open(CPU).world_size == 1
        one.close()
    finally:
        server.stop()


def test_what_was_signed_is_no_kit_until_it_is_joined(apart):
    done("site", "request", "--name", "a")
    done("hub", "sign", "a.csr")
    with pytest.raises(ValueError, match=r"a\.signed has no key: `outergrad site join` puts it in"):
        read_kit("a.signed")


def test_a_request_does_not_take_the_place_of_a_site_unasked(apart):
    """Whoever sends a request under another's name would be that one."""
    done("hub", "invite", "a")
    done("site", "request", "--name", "a")
    before = apart.site("a")
    result = invoke("hub", "sign", "a.csr")
    assert result.exit_code == 2
    assert "'a' has a kit already" in result.stderr
    assert "--replace" in result.stderr
    assert apart.site("a") == before
    done("hub", "sign", "a.csr", "--replace")
    assert apart.site("a") != before


def test_a_request_does_not_undo_a_revocation_unasked(apart):
    done("hub", "invite", "a")
    done("hub", "revoke", "a")
    done("site", "request", "--name", "a")
    assert "'a' was revoked" in invoke("hub", "sign", "a.csr").stderr
    assert apart.site("a") is None


def test_another_key_is_not_joined(apart, tmp_path):
    done("site", "request", "--name", "a")
    done("hub", "sign", "a.csr")
    done("site", "request", "--name", "b")
    result = invoke("site", "join", "a.signed", "--key", "b.key")
    assert "is for another key" in result.stderr
    (tmp_path / "a.key").chmod(0o644)
    assert "chmod 600 a.key" in invoke("site", "join", "a.signed").stderr
    (tmp_path / "a.key").unlink()
    assert "a.key: No such file" in invoke("site", "join", "a.signed").stderr


def test_what_was_signed_by_another_authority_is_not_joined(apart, tmp_path):
    done("site", "request", "--name", "a")
    done("hub", "sign", "a.csr")
    told = json.loads((tmp_path / "a.signed").read_text())
    told["authority"] = new_authority().certificate
    (tmp_path / "a.signed").write_text(json.dumps(told))
    assert "is not of this star" in invoke("site", "join", "a.signed").stderr


def test_nothing_is_overwritten(apart):
    done("site", "request", "--name", "a")
    assert "a.key is there" in invoke("site", "request", "--name", "a").stderr
    done("hub", "sign", "a.csr")
    assert "a.signed is there" in invoke("hub", "sign", "a.csr", "--replace").stderr
    done("site", "join", "a.signed")
    assert "a.kit is there" in invoke("site", "join", "a.signed").stderr


def asked_by(key, *names, extensions=()):
    """A request as another program could make it."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name) for name in names])
    built = x509.CertificateSigningRequestBuilder(subject)
    for one in extensions:
        built = built.add_extension(one, critical=True)
    return built.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode()


CURVE = ec.generate_private_key(ec.SECP256R1())
STRANGE = {
    "no request": ("nothing", "it is no request"),
    "empty": ("", "it is no request"),
    "another curve": (asked_by(ec.generate_private_key(ec.SECP384R1()), "a"), "another kind"),
    "another kind of key": (
        asked_by(rsa.generate_private_key(public_exponent=65537, key_size=2048), "a"),
        "another kind of key",
    ),
    "no name": (asked_by(CURVE), "no name, or several"),
    "several names": (asked_by(CURVE, "a", "b"), "no name, or several"),
    "a name with escapes": (asked_by(CURVE, "a\x1b[31m"), "cannot be called"),
    "a name of a path": (asked_by(CURVE, "../a"), "cannot be called"),
    "a name that ends in a line": (asked_by(CURVE, "a\n"), "cannot be called"),
}


@pytest.mark.parametrize(("pem", "told"), STRANGE.values(), ids=STRANGE)
def test_strange_requests(pem, told):
    with pytest.raises(ValueError, match=told):
        read_request(pem)


def test_a_request_that_was_changed(tmp_path):
    _, request = new_request("a")
    der = bytearray(
        x509.load_pem_x509_csr(request.pem.encode()).public_bytes(serialization.Encoding.DER)
    )
    der[-1] ^= 1
    changed = x509.load_der_x509_csr(bytes(der)).public_bytes(serialization.Encoding.PEM)
    with pytest.raises(ValueError, match="not signed by its own key"):
        read_request(changed.decode())


def test_a_request_gets_no_more_than_a_site(apart):
    """Whatever else it asks for: to sign others, to be a hub."""
    wishes = [
        x509.BasicConstraints(ca=True, path_length=None),
        x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH]),
        x509.SubjectAlternativeName([x509.DNSName("localhost")]),
    ]
    request = read_request(asked_by(CURVE, "a", extensions=wishes))
    made = read_certificate(signed_site(apart.identity("authority"), request))
    extensions = {type(one.value): one.value for one in made.extensions}
    assert set(extensions) == {x509.BasicConstraints, x509.ExtendedKeyUsage}
    assert not extensions[x509.BasicConstraints].ca
    (use,) = extensions[x509.ExtendedKeyUsage]
    assert use == x509.oid.ExtendedKeyUsageOID.CLIENT_AUTH


def test_no_key_is_shown(apart):
    kit = apart.invite("a")
    identity = apart.identity("authority")
    for shown in (repr(kit), str(kit), repr([kit]), repr(identity), repr(kit.identity)):
        assert "PRIVATE" not in shown
        assert "CERTIFICATE" in shown


@pytest.mark.parametrize("mask", [0o000, 0o002, 0o022], ids=oct)
def test_a_hubs_folder_is_its_owners_alone_whatever_the_umask(tmp_path, mask):
    before = os.umask(mask)
    try:
        (tmp_path / "there").mkdir()
        for name in ("new", "there"):
            made = HubFolder(tmp_path / name)
            made.create("localhost:1")
            made.invite("a").write(tmp_path / name / "a.kit")
            assert os.stat(made.path).st_mode & 0o777 == 0o700
    finally:
        os.umask(before)


def test_a_folder_with_something_in_it_is_no_place_for_a_hub(tmp_path):
    (tmp_path / "x").write_text("")
    with pytest.raises(FileExistsError):
        HubFolder(tmp_path).create("localhost:1")


def test_a_hub_does_not_serve_with_a_key_that_others_may_read(apart, tmp_path):
    apart.invite("a")
    (tmp_path / "hub" / "hub.key").chmod(0o640)
    with pytest.raises(ValueError, match=r"chmod 600 .*hub\.key"):
        HubServer(apart, "127.0.0.1:0")


def test_a_hub_serves_without_the_key_of_its_authority(apart, tmp_path):
    """That may lie elsewhere: only invitations need it."""
    apart.invite("a")
    (tmp_path / "hub" / "authority.key").unlink()
    server = HubServer(apart, "127.0.0.1:0")
    server.start()
    server.stop()


def test_an_invitation_does_not_undo_a_revocation_that_comes_at_the_same_time(apart):
    from concurrent.futures import ThreadPoolExecutor

    names = [f"s{k}" for k in range(12)]
    for name in names:
        apart.invite(name)

    def change(k):
        own = HubFolder(apart.path)  # as another process would
        own.revoke(f"s{k}") if k < 12 else own.invite(f"t{k}")

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(change, range(24)))
    left = {site.name for site in apart.sites() if not site.revoked}
    assert left == {f"t{k}" for k in range(12, 24)}
