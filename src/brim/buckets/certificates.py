"""Files of certificates that are trusted beside those of the system."""

from __future__ import annotations

import os
from pathlib import Path

from brim.errors import InputError


def certificates(path: str, said_by: str) -> str:
    """The text of the file, if it holds certificates: obstore ends the whole process over some that do not."""
    import ssl

    try:
        found = Path(path).expanduser().read_text()
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=found)
    except (OSError, ValueError) as error:
        raise InputError(
            f"{said_by} is {path!r}, which holds no certificates that can be read.",
            hint="Name a file of certificates in PEM format.",
        ) from error
    return found


def trusted_beside() -> dict[str, str]:
    """What a client of gs:// or az:// is told to trust beside the system's: what other programs are told."""
    for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"):
        if path := os.environ.get(name):
            return {"root_certificate": certificates(path, name)}
    return {}
