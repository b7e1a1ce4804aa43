"""The certificates of a star: of its own authority, of the hub, and of each site."""

from __future__ import annotations

import hashlib
import ipaddress
import json
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_AUTHORITY_DAYS = 3650
DAYS = 365
_SITE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_EARLIER = timedelta(hours=1)
"""A certificate is valid from this much earlier on, because clocks differ."""


@dataclass(frozen=True)
class Identity:
    """A private key and its certificate, as PEM.

    Attributes:
        key: private; it never leaves its owner, except in a kit that the hub has made.
        certificate: public.
    """

    key: str = field(repr=False)
    certificate: str

    @property
    def private_key(self) -> ec.EllipticCurvePrivateKey:
        """The key, parsed."""
        key = serialization.load_pem_private_key(self.key.encode(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        return key

    @property
    def serial(self) -> int:
        """Serial number of the certificate."""
        return read_certificate(self.certificate).serial_number


def site_name(name: str) -> str:
    """Returns the name if it is valid for a site.

    Raises:
        ValueError: the name is not valid.
    """
    if not _SITE_NAME.fullmatch(name):
        raise ValueError(f"a site cannot be called {name!r}: letters, digits, and . _ - are meant")
    return name


def new_authority() -> Identity:
    """Makes the authority whose certificates a star trusts."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = _named("outergrad authority")
    built = _builder(name, name, key.public_key(), _AUTHORITY_DAYS)
    built = built.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    usage = x509.KeyUsage(*(False,) * 5, key_cert_sign=True, crl_sign=True, **_NO_CIPHERS)
    return Identity(_private_pem(key), _signed(built.add_extension(usage, critical=True), key))


def new_hub(authority: Identity, hosts: Sequence[str], days: int = DAYS) -> Identity:
    """Makes the identity of the hub.

    Args:
        authority: the identity that signs it.
        hosts: names and addresses by which sites reach the hub.
        days: validity of the certificate, days.
    """
    names = x509.SubjectAlternativeName([_general_name(host) for host in hosts])
    return _issued(authority, "hub", ExtendedKeyUsageOID.SERVER_AUTH, days, names)


def new_site(authority: Identity, name: str, days: int = DAYS) -> Identity:
    """Makes the identity of a site, which the hub knows by the name in the certificate alone.

    Args:
        authority: the identity that signs it.
        name: of the site.
        days: validity of the certificate, days.
    """
    return _issued(authority, site_name(name), ExtendedKeyUsageOID.CLIENT_AUTH, days)


@dataclass(frozen=True)
class Request:
    """A site's request to sign a certificate for its name and public key.

    Attributes:
        site: name of the site.
        pem: the request as PEM; nothing in it is secret.
    """

    site: str
    pem: str

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the public key, equal on both sides if nobody has changed the request."""
        return fingerprint_of(_request_in(self.pem).public_key())


def new_request(name: str) -> tuple[str, Request]:
    """Makes a private key, which stays at the site, and the request for the hub.

    Args:
        name: of the site.

    Raises:
        ValueError: the name is not valid.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    built = x509.CertificateSigningRequestBuilder(_named(site_name(name)))
    pem = built.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    return _private_pem(key), Request(name, pem.decode())


def read_request(pem: str) -> Request:
    """Reads the request that a site has sent, as PEM.

    Raises:
        ValueError: it is no request, not signed by its own key, or of another kind of key.
    """
    asked = _request_in(pem)
    return Request(site_name(_common_name(asked.subject)), pem)


def signed_site(authority: Identity, request: Request, days: int = DAYS) -> str:
    """Returns a certificate, as PEM, for a site that has made its own key.

    Only the name and the public key are taken from the request, whatever else it asks for.

    Args:
        authority: the identity that signs it.
        request: of the site.
        days: validity of the certificate, days.
    """
    public = _request_in(request.pem).public_key()
    assert isinstance(public, ec.EllipticCurvePublicKey)
    return _certified(
        authority, site_name(request.site), ExtendedKeyUsageOID.CLIENT_AUTH, days, public
    )


def is_key_of(key: str, certificate: str) -> bool:
    """True if a private key, as PEM, belongs to a certificate.

    Raises:
        ValueError: the key is no private key.
    """
    try:
        own = serialization.load_pem_private_key(key.encode(), None)
    except (ValueError, TypeError) as error:
        raise ValueError("the key's file is no private key of `outergrad site request`") from error
    return own.public_key() == read_certificate(certificate).public_key()


def fingerprint_of(key: Any) -> str:
    """Returns half of the SHA-256 of a public key, in groups of digits to be read out."""
    digest = hashlib.sha256(
        key.public_bytes(
            serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    ).hexdigest()
    return "-".join(digest[at : at + 4] for at in range(0, 32, 4))


def now() -> datetime:
    """Returns the time against which certificates are checked."""
    return datetime.now(timezone.utc)


def read_certificate(pem: str | bytes) -> x509.Certificate:
    """Reads a certificate from PEM.

    Raises:
        ValueError: it is no certificate.
    """
    return x509.load_pem_x509_certificate(pem.encode() if isinstance(pem, str) else pem)


def name_in(certificate: x509.Certificate) -> str:
    """Returns the name of the certificate's owner."""
    return _common_name(certificate.subject)


def check_site(certificate: x509.Certificate, authority: x509.Certificate, name: str) -> None:
    """Raises unless a certificate of this authority is for a site of this name, and valid now.

    Raises:
        ValueError: it is not.
    """
    try:
        certificate.verify_directly_issued_by(authority)
        uses = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except Exception as error:  # what is wrong has many names
        raise ValueError(f"the certificate of {name!r} is not of this star") from error
    holds = certificate.not_valid_before_utc <= now() <= certificate.not_valid_after_utc
    if not holds or name_in(certificate) != name or ExtendedKeyUsageOID.CLIENT_AUTH not in uses:
        raise ValueError(f"the certificate that came for {name!r} is another one, or expired")


_NO_CIPHERS = {"encipher_only": False, "decipher_only": False}


def _request_in(pem: str) -> x509.CertificateSigningRequest:
    try:
        asked = x509.load_pem_x509_csr(pem.encode())
        public = asked.public_key()
        is_signed = asked.is_signature_valid
    except Exception as error:  # what is wrong has many names
        raise ValueError("it is no request: `outergrad site request` writes one") from error
    if not isinstance(public, ec.EllipticCurvePublicKey) or public.curve.name != "secp256r1":
        raise ValueError("a request for another kind of key: `outergrad site request` makes one")
    if not is_signed:
        raise ValueError("the request was not signed by its own key: it was changed on its way")
    return asked


def _common_name(subject: x509.Name) -> str:
    found = subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    if len(found) != 1:
        raise ValueError("it has no name, or several")
    return str(found[0].value)


def _issued(
    authority: Identity,
    name: str,
    use: x509.ObjectIdentifier,
    days: int,
    names: x509.SubjectAlternativeName | None = None,
) -> Identity:
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = _certified(authority, name, use, days, key.public_key(), names)
    return Identity(_private_pem(key), certificate)


def _certified(
    authority: Identity,
    name: str,
    use: x509.ObjectIdentifier,
    days: int,
    public: ec.EllipticCurvePublicKey,
    names: x509.SubjectAlternativeName | None = None,
) -> str:
    issuer = read_certificate(authority.certificate)
    built = _builder(_named(name), issuer.subject, public, days)
    built = built.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    built = built.add_extension(x509.ExtendedKeyUsage([use]), critical=False)
    if names is not None:
        built = built.add_extension(names, critical=False)
    return _signed(built, authority.private_key)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    today = now()
    return x509.CertificateBuilder(
        issuer_name=issuer,
        subject_name=subject,
        public_key=key,
        serial_number=x509.random_serial_number(),
        not_valid_before=today - _EARLIER + min(timedelta(days=days), timedelta()),
        not_valid_after=today + timedelta(days=days),
    )


def _signed(built: x509.CertificateBuilder, signer: ec.EllipticCurvePrivateKey) -> str:
    return built.sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode()


def _private_pem(key: ec.EllipticCurvePrivateKey) -> str:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    ).decode()


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def write_secret(path: str | os.PathLike[str], text: str) -> None:
    """Creates a file that its owner alone may read.

    Raises:
        OSError: the file exists, or cannot be written.
    """
    opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(opened, "w") as file:
        file.write(text)


_OTHERS = stat.S_IRWXG | stat.S_IRWXO


@dataclass(frozen=True)
class Kit:
    """The kit that `outergrad hub invite` writes, or `outergrad hub sign`, then without the key.

    Attributes:
        site: name of the site.
        hub: host and port of the hub.
        key: private key of the site, PEM; empty if the site has it in a file of its own.
        certificate: of the site, PEM.
        authority: certificate of the authority that signs all others, PEM.
    """

    site: str
    hub: str
    key: str = field(repr=False)
    certificate: str
    authority: str

    @property
    def identity(self) -> Identity:
        """The site's key and certificate."""
        return Identity(self.key, self.certificate)

    @property
    def authority_fingerprint(self) -> str:
        """Fingerprint of the key that signs all certificates of the star."""
        return fingerprint_of(read_certificate(self.authority).public_key())

    def write(self, path: Path) -> None:
        """Writes the kit into a new file that its owner alone may read.

        Raises:
            OSError: the file exists, or cannot be written.
        """
        write_secret(path, json.dumps({"outergrad kit": 1, **vars(self)}, indent=1) + "\n")

    def joined(self, key: str) -> Kit:
        """Returns the kit with the key that the site made itself.

        Raises:
            ValueError: the certificate is not for this key, or not of this site and authority.
        """
        check_site(read_certificate(self.certificate), read_certificate(self.authority), self.site)
        if not is_key_of(key, self.certificate):
            raise ValueError(
                f"the certificate of {self.site!r} is for another key: join it with the key that "
                "`outergrad site request` wrote together with this request"
            )
        return replace(self, key=key)


def read_kit(path: str | os.PathLike[str]) -> Kit:
    """Reads a kit from a file.

    Raises:
        ValueError: there is no file, it cannot be read, it has no key, or others on this machine
            may read it, too.
    """
    kit = read_signed(path)
    refuse_open_to_others(path, "the kit")
    if not kit.key:
        raise ValueError(f"{path} has no key: `outergrad site join` puts it in")
    return kit


def read_signed(path: str | os.PathLike[str]) -> Kit:
    """Reads a kit, which need not have the key, from a file.

    Raises:
        ValueError: there is no file, or it cannot be read.
    """
    try:
        told = json.loads(Path(path).read_text())
        if told.pop("outergrad kit") != 1 or not all(isinstance(one, str) for one in told.values()):
            raise TypeError
        return Kit(**told)
    except OSError as error:
        raise ValueError(f"the kit {path}: {error.strerror}") from error
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} is no kit: `outergrad hub invite SITE` writes one") from error


def refuse_open_to_others(path: str | os.PathLike[str], what: str) -> None:
    """Raises if others than its owner may read a file.

    Args:
        path: of the file.
        what: name of the file, for the error.

    Raises:
        ValueError: others on this machine may read the file.
        OSError: the file is not there.
    """
    if os.name == "posix" and os.stat(path).st_mode & _OTHERS:
        raise ValueError(f"others on this machine may read {what} {path}: chmod 600 {path}")
