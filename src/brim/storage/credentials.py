"""Who we are to a store of objects: keys, endpoint, region and certificates, in the order of each store's own tools.

S3: as the AWS tools, with profiles.

Google: a key file that GOOGLE_APPLICATION_CREDENTIALS names, else what `gcloud auth application-default login` left,
else the role of the machine. obstore reads keys of service accounts and logins of users; for other kinds (workload
identity federation) google-auth is asked.

Azure: a connection string; the account with its key or a shared access signature; a service principal, workload or
managed identity; `az login`. az://CONTAINER/PREFIX names the container, the environment names the account.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from brim.errors import InputError, MissingDependencyError
from brim.records import dataclass
from brim.storage.location import Access, Location, checked_endpoint


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


_REGION = re.compile(r"[A-Za-z0-9._-]+")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_ROLES = ("role_arn", "sso_session", "sso_start_url")  # they come before keys, which may be those to ask with
_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")


@dataclass(frozen=True, slots=True)
class Keys:
    """A pair of keys, and the token that temporary ones come with."""

    access: str = field(repr=False)
    secret: str = field(repr=False)
    token: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if any(_CONTROL.search(text) for text in (self.access, self.secret, self.token or "")):
            raise InputError(
                "The credentials hold a line break or another character that none has.",
                hint="Set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN, or the profile, without it.",
            )


@dataclass(frozen=True, slots=True)
class Profile:
    """What the files of the AWS tools say of one profile."""

    name: str
    values: dict[str, str] = field(repr=False)

    @property
    def keys(self) -> Keys | None:
        if any(name in self.values for name in _ROLES):
            return None
        access, secret = self.values.get("aws_access_key_id"), self.values.get("aws_secret_access_key")
        return Keys(access, secret, self.values.get("aws_session_token")) if access and secret else None

    @property
    def elsewhere(self) -> bool:
        """Whether it says where else its keys come from."""
        return any(name in self.values for name in (*_ROLES, "credential_process"))

    @property
    def region(self) -> str | None:
        return self.values.get("region")

    @property
    def endpoint(self) -> str | None:
        return self.values.get("endpoint_url")


def known_keys(profile: Profile | None) -> Keys | None:
    """Those of the environment, else those of the profile: the order of the AWS tools."""
    return environment_keys() or (profile.keys if profile is not None else None)


def environment_keys() -> Keys | None:
    access, secret = (os.environ.get(name) for name in _KEYS)
    if bool(access) != bool(secret):
        here, missing = _KEYS if access else _KEYS[::-1]
        raise InputError(f"{here} is set, and {missing} is not.", hint="Set both, or none of them.")
    return Keys(access, secret, os.environ.get("AWS_SESSION_TOKEN")) if access and secret else None


def chosen_profile() -> Profile | None:
    """The profile that AWS_PROFILE names; without it `default`, if there is one."""
    import configparser

    named = os.environ.get("AWS_PROFILE") or None
    name = named or "default"
    values: dict[str, str] = {}
    for path, section in (
        (_path("CONFIG_FILE", "config"), f"profile {name}"),
        (_path("SHARED_CREDENTIALS_FILE"), name),
    ):
        parser = configparser.RawConfigParser()
        try:
            parser.read(path, encoding="utf-8")
        except (configparser.Error, UnicodeDecodeError, OSError) as error:
            raise InputError(f"The file {path!r} of the AWS tools cannot be read ({type(error).__name__}).") from error
        for title in (section, name) if name == "default" else (section,):
            if parser.has_section(title):
                values |= dict(parser.items(title))
    if not values and named is not None:
        raise InputError(
            f"AWS_PROFILE is {name!r}, and no such profile is in ~/.aws.",
            hint="`aws configure list-profiles` lists them.",
        )
    return Profile(name, values) if values else None


def _path(variable: str, name: str = "credentials") -> str:
    return os.environ.get(f"AWS_{variable}") or os.path.join(os.path.expanduser("~"), ".aws", name)


def provider(profile: Profile) -> Callable[[], dict[str, Any]]:
    """What obstore asks for keys when a profile has none of its own: botocore's answer."""
    try:
        import botocore.session
    except ImportError as error:
        raise MissingDependencyError(
            f"The profile {profile.name!r} gets its credentials elsewhere (a role, single sign-on): install botocore.",
            hint="pip install botocore; or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.",
            extra="s3",
        ) from error
    found = botocore.session.Session(profile=profile.name).get_credentials()
    if found is None:
        raise InputError(
            f"The profile {profile.name!r} has no credentials.", hint="`aws configure` or `aws sso login`."
        )

    def ask() -> dict[str, Any]:
        from datetime import UTC, datetime, timedelta

        frozen = found.get_frozen_credentials()
        expires = datetime.now(UTC) + timedelta(minutes=10)
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": expires,
        }

    return ask


@dataclass(frozen=True, slots=True)
class S3Account:
    """What signs requests to S3. `keys` is None where obstore alone knows them (the role of a machine)."""

    endpoint: str | None
    region: str
    keys: Keys | None
    authorities: str | None  # certificates, beside those that the system knows


def aws_options(access: Access, client: dict[str, Any]) -> dict[str, Any]:
    """What obstore's S3 store is made with; what its client is made with goes into `client`."""
    profile = None if access.anonymous else chosen_profile()
    endpoint = aws_endpoint(access)
    # Parts carry a checksum, and the store compares it: a signature alone is not checked by all of them.
    options: dict[str, Any] = {"region": region_of(), "checksum_algorithm": "CRC64NVME"}
    if endpoint is not None:
        options |= {"endpoint": endpoint, "virtual_hosted_style_request": False}
        client["allow_http"] = endpoint.startswith("http://")
    if (endpoint is None or endpoint.startswith("https://")) and (trusted := authorities()) is not None:
        client["root_certificate"] = trusted
    if endpoint is None or endpoint.startswith("https://") or is_loopback(endpoint):
        # The line itself keeps bytes as they are: no need for a SHA-256 of each part in its signature as well.
        options["unsigned_payload"] = True
    if access.anonymous:
        return options | {"skip_signature": True}
    if (keys := known_keys(profile)) is not None:
        options |= {"access_key_id": keys.access, "secret_access_key": keys.secret}
        return options | ({"session_token": keys.token} if keys.token else {})
    if profile is not None and profile.elsewhere:
        return options | {"credential_provider": provider(profile)}
    return options  # obstore looks for the role of the machine


def is_loopback(endpoint: str) -> bool:
    """Whether what is sent there never leaves this machine: a gateway, a tunnel, a server beside us."""
    host = urlsplit(endpoint).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")


def aws_endpoint(access: Access) -> str | None:
    """Where requests go: the option, the environment, the profile; None is Amazon."""
    if access.endpoint:
        return access.endpoint.rstrip("/")
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"):
        if said := os.environ.get(name):
            return checked_endpoint(said, name)
    profile = chosen_profile()
    if profile is None or not profile.endpoint:
        return None
    return checked_endpoint(profile.endpoint, f"endpoint_url of the profile {profile.name!r}")


def region_of() -> str:
    profile = chosen_profile()
    said = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    region = said or (profile.region if profile else None) or "us-east-1"
    if not _REGION.fullmatch(region):
        raise InputError(f"{region!r} is no region.", hint="Set AWS_REGION to a name like us-east-1.")
    return region


def authorities() -> str | None:
    """Certificates of authorities that are trusted beside those of the system, as a private store needs them."""
    profile = chosen_profile()
    path = os.environ.get("AWS_CA_BUNDLE") or (profile.values.get("ca_bundle") if profile else None)
    return certificates(path, "AWS_CA_BUNDLE (or ca_bundle of a profile)") if path else None


def account_of(access: Access) -> S3Account:
    """For the few requests that obstore does not make."""
    profile = chosen_profile()
    keys = known_keys(profile)
    if keys is None and profile is not None and profile.elsewhere:
        told = provider(profile)()
        keys = Keys(told["access_key_id"], told["secret_access_key"], told["token"])
    endpoint = aws_endpoint(access)
    plain = endpoint is not None and endpoint.startswith("http://")
    return S3Account(endpoint, region_of(), keys, None if plain else authorities())


_ENDPOINTS = ("CLOUDSDK_API_ENDPOINT_OVERRIDES_STORAGE", "STORAGE_EMULATOR_HOST")
_READ_BY_OBSTORE = ("service_account", "authorized_user")
_OBSTORE_KEYS = ("GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH", "GOOGLE_SERVICE_ACCOUNT_KEY")


def google_endpoint(access: Access) -> str | None:
    """Where requests go; None is Google."""
    if access.endpoint:
        return access.endpoint.rstrip("/")
    for name in _ENDPOINTS:
        if said := os.environ.get(name):
            return checked_endpoint(said if "://" in said else f"http://{said}", name)
    return None


def google_options(access: Access, client: dict[str, Any]) -> dict[str, Any]:
    """What obstore's Google store is made with; what its client is made with goes into `client`."""
    endpoint = google_endpoint(access)
    options: dict[str, Any] = {}
    if endpoint is not None:
        options["base_url"] = endpoint
        client["allow_http"] = endpoint.startswith("http://")
    if endpoint is None or endpoint.startswith("https://"):
        client |= trusted_beside()
    credentials = _credentials_file()
    known = credentials is not None or any(os.environ.get(name) for name in _OBSTORE_KEYS)
    if access.anonymous:
        return options | {"skip_signature": True}
    if not known and os.environ.get("STORAGE_EMULATOR_HOST") and not access.endpoint:
        # Google's own clients talk to an emulator without credentials; obstore writes with some or not at all.
        return options | {"bearer_token": "emulator"}
    if credentials is None or any(os.environ.get(name) for name in _OBSTORE_KEYS):
        return options
    if _kind(credentials) in _READ_BY_OBSTORE:
        return options | {"application_credentials": str(credentials)}
    return options | {"credential_provider": _google_auth(credentials)}


def _credentials_file() -> Path | None:
    if said := os.environ.get("GOOGLE_APPLICATION_CREDENTIALS"):
        return Path(said).expanduser()
    home = os.environ.get("CLOUDSDK_CONFIG") or os.path.join(os.path.expanduser("~"), ".config", "gcloud")
    login = Path(home) / "application_default_credentials.json"
    return login if login.exists() else None


def _kind(path: Path) -> str:
    try:
        said = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(
            f"The credentials of Google at {str(path)!r} cannot be read.",
            hint="Set GOOGLE_APPLICATION_CREDENTIALS to a key file, or run `gcloud auth application-default login`.",
        ) from error
    return str(said.get("type", "")) if isinstance(said, dict) else ""


def _google_auth(path: Path) -> Any:
    try:
        from obstore.auth.google import GoogleCredentialProvider

        return GoogleCredentialProvider()
    except ImportError as error:
        raise MissingDependencyError(
            f"The credentials at {str(path)!r} are of a kind that google-auth reads: install it.",
            hint="pip install google-auth requests; or use the key of a service account.",
            extra="s3",
        ) from error


# What everybody who runs the emulator has; its documentation says so.
_EMULATOR = {
    "AccountName": "devstoreaccount1",
    "AccountKey": "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==",
    "BlobEndpoint": "http://127.0.0.1:10000/devstoreaccount1",
}
_ACCOUNT = ("AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_ACCOUNT_NAME")
_KEY = ("AZURE_STORAGE_KEY", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCESS_KEY")
_SIGNATURE = ("AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_SAS_KEY")
_IDENTITIES = ("AZURE_CLIENT_ID", "AZURE_FEDERATED_TOKEN_FILE", "AZURE_STORAGE_TOKEN", "IDENTITY_ENDPOINT")


def azure_endpoint(access: Access) -> str | None:
    """Where requests go: Azure itself has an address for each account. None if no account is known."""
    if access.endpoint:
        return access.endpoint.rstrip("/")
    if said := _connection().get("BlobEndpoint"):
        return checked_endpoint(said, "BlobEndpoint of AZURE_STORAGE_CONNECTION_STRING")
    for name in ("AZURE_STORAGE_BLOB_ENDPOINT", "AZURE_STORAGE_ENDPOINT"):
        if said := os.environ.get(name):
            return checked_endpoint(said, name)
    account = _connection().get("AccountName") or _said(_ACCOUNT)
    return f"https://{account}.blob.core.windows.net" if account else None


def azure_options(access: Access, client: dict[str, Any]) -> dict[str, Any]:
    """What obstore's Azure store is made with; what its client is made with goes into `client`."""
    connection, endpoint = _connection(), azure_endpoint(access)
    options: dict[str, Any] = {"account_name": _account(connection, endpoint)}
    if endpoint is not None:
        options["endpoint"] = endpoint
        client["allow_http"] = endpoint.startswith("http://")
    if endpoint is None or endpoint.startswith("https://"):
        client |= trusted_beside()
    if access.anonymous:
        return options | {"skip_signature": True}
    if key := connection.get("AccountKey") or _said(_KEY):
        return options | {"account_key": key}
    if signature := connection.get("SharedAccessSignature") or _said(_SIGNATURE):
        return options | {"sas_key": signature.removeprefix("?")}
    if not _said(_IDENTITIES) and shutil.which("az") is not None:
        return options | {"use_azure_cli": True}
    return options  # obstore reads what names an identity, else asks for that of the machine


def _connection() -> dict[str, str]:
    said = os.environ.get("AZURE_STORAGE_CONNECTION_STRING") or ""
    pairs = [part.partition("=") for part in said.split(";") if part.strip()]
    if any(not equals for _, equals, _ in pairs):
        raise InputError(
            "AZURE_STORAGE_CONNECTION_STRING is not what Azure gives out: it has a part without '='.",
            hint="`az storage account show-connection-string` prints it.",
        )
    found = {name.strip(): value.strip() for name, _, value in pairs}
    if found.get("UseDevelopmentStorage", "").lower() == "true":
        return _EMULATOR
    if "AccountName" in found and "BlobEndpoint" not in found and "EndpointSuffix" in found:
        scheme = found.get("DefaultEndpointsProtocol", "https")
        found["BlobEndpoint"] = f"{scheme}://{found['AccountName']}.blob.{found['EndpointSuffix']}"
    return found


def _account(connection: dict[str, str], endpoint: str | None) -> str:
    account = connection.get("AccountName") or _said(_ACCOUNT) or _account_of(endpoint)
    if not account:
        raise InputError(
            "az:// needs the name of the storage account.",
            hint="Set AZURE_STORAGE_ACCOUNT, or AZURE_STORAGE_CONNECTION_STRING.",
        )
    return account


def _account_of(endpoint: str | None) -> str:
    """https://ACCOUNT.blob.core.windows.net, or http://HOST/ACCOUNT as emulators have it."""
    if endpoint is None:
        return ""
    parts = urlsplit(endpoint)
    host, path = parts.hostname or "", parts.path.strip("/")
    return path.partition("/")[0] or (host.partition(".")[0] if ".blob." in host else "")


def _said(names: tuple[str, ...]) -> str:
    return next((os.environ[name] for name in names if os.environ.get(name)), "")


_ENDPOINT_OF = {"s3": aws_endpoint, "gs": google_endpoint, "az": azure_endpoint}


def endpoint_of(location: Location) -> str | None:
    """Return where requests go by the option, the environment or a profile; None is the scheme's own cloud."""
    if location.scheme == "hf":
        return os.environ.get("HF_ENDPOINT", "").rstrip("/") or None
    find = _ENDPOINT_OF.get(location.scheme)
    return find(location.access) if find is not None else None
