"""Accounts at object stores: keys, endpoint, region and certificates, in the order of each store's own tools.

S3: as the AWS tools, with profiles.

Google: a key file that GOOGLE_APPLICATION_CREDENTIALS names, else what `gcloud auth application-default login` left,
else the role of the machine. obstore reads keys of service accounts and logins of users; for other kinds (workload
identity federation) google-auth is used.

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

_REGION = re.compile(r"[A-Za-z0-9._-]+")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_ROLES = ("role_arn", "sso_session", "sso_start_url")  # they precede keys, which may be those to assume a role with
_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
_AWS_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_GOOGLE_ENDPOINTS = ("CLOUDSDK_API_ENDPOINT_OVERRIDES_STORAGE", "STORAGE_EMULATOR_HOST")
_GOOGLE_KINDS = ("service_account", "authorized_user")  # that obstore reads
_OBSTORE_KEYS = ("GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH", "GOOGLE_SERVICE_ACCOUNT_KEY")
# The account of every emulator, as its documentation says.
_EMULATOR = {
    "AccountName": "devstoreaccount1",
    "AccountKey": "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==",
    "BlobEndpoint": "http://127.0.0.1:10000/devstoreaccount1",
}
_ACCOUNT = ("AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_ACCOUNT_NAME")
_KEY = ("AZURE_STORAGE_KEY", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCESS_KEY")
_SIGNATURE = ("AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_SAS_KEY")
_IDENTITIES = ("AZURE_CLIENT_ID", "AZURE_FEDERATED_TOKEN_FILE", "AZURE_STORAGE_TOKEN", "IDENTITY_ENDPOINT")
_AZURE_ENDPOINTS = ("AZURE_STORAGE_BLOB_ENDPOINT", "AZURE_STORAGE_ENDPOINT")


def _variable(*names: str) -> str:
    """Return the first of these environment variables that is set."""
    return next((os.environ[name] for name in names if os.environ.get(name)), "")


def certificates(path: str, variable: str) -> str:
    """Return the text of a file with certificates; InputError for another file, which would crash obstore."""
    import ssl  # 10 ms, and few stores need it

    try:
        text = Path(path).expanduser().read_text()
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=text)
    except (OSError, ValueError) as error:
        raise InputError(
            f"{variable} is {path!r}, which holds no certificates that can be read.",
            hint="Name a file of certificates in PEM format.",
        ) from error
    return text


def _plain_client(endpoint: str | None, client: dict[str, Any]) -> None:
    """Let a client of gs:// or az:// use http for its endpoint, or trust the certificates that other programs trust."""
    if endpoint is not None:
        client["allow_http"] = endpoint.startswith("http://")
    if endpoint is None or endpoint.startswith("https://"):
        for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"):
            if path := os.environ.get(name):
                client["root_certificate"] = certificates(path, name)
                return


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
    """One profile in the files of the AWS tools."""

    name: str
    values: dict[str, str] = field(repr=False)

    @property
    def keys(self) -> Keys | None:
        if any(name in self.values for name in _ROLES):
            return None
        access, secret = self.values.get("aws_access_key_id"), self.values.get("aws_secret_access_key")
        return Keys(access, secret, self.values.get("aws_session_token")) if access and secret else None

    @property
    def has_provider(self) -> bool:
        """Return whether its keys come from a role, single sign-on or a program."""
        return any(name in self.values for name in (*_ROLES, "credential_process"))


def known_keys(profile: Profile | None) -> Keys | None:
    """Return the keys of the environment, else those of the profile: the order of the AWS tools."""
    access, secret = (os.environ.get(name) for name in _KEYS)
    if bool(access) != bool(secret):
        present, absent = _KEYS if access else _KEYS[::-1]
        raise InputError(f"{present} is set, and {absent} is not.", hint="Set both, or none of them.")
    if access and secret:
        return Keys(access, secret, os.environ.get("AWS_SESSION_TOKEN"))
    return profile.keys if profile is not None else None


def find_profile() -> Profile | None:
    """Return the profile that AWS_PROFILE names; without it `default`, if there is one."""
    import configparser  # every process would load it

    folder = os.path.join(os.path.expanduser("~"), ".aws")
    name = os.environ.get("AWS_PROFILE") or "default"
    values: dict[str, str] = {}
    for variable, file, section in (
        ("AWS_CONFIG_FILE", "config", f"profile {name}"),
        ("AWS_SHARED_CREDENTIALS_FILE", "credentials", name),
    ):
        path = os.environ.get(variable) or os.path.join(folder, file)
        parser = configparser.RawConfigParser()
        try:
            parser.read(path, encoding="utf-8")
        except (configparser.Error, UnicodeDecodeError, OSError) as error:
            raise InputError(f"The file {path!r} of the AWS tools cannot be read ({type(error).__name__}).") from error
        for title in (section, name) if name == "default" else (section,):
            if parser.has_section(title):
                values |= dict(parser.items(title))
    if not values and os.environ.get("AWS_PROFILE"):
        raise InputError(
            f"AWS_PROFILE is {name!r}, and no such profile is in ~/.aws.",
            hint="`aws configure list-profiles` lists them.",
        )
    return Profile(name, values) if values else None


def provider(profile: Profile) -> Callable[[], dict[str, Any]]:
    """Return the function that obstore calls for keys when a profile has none: it uses botocore."""
    try:
        import botocore.session
    except ImportError as error:
        raise MissingDependencyError(
            f"The profile {profile.name!r} gets its credentials elsewhere (a role, single sign-on): install botocore.",
            hint="pip install botocore; or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.",
            extra="s3",
        ) from error
    from datetime import UTC, datetime, timedelta

    credentials = botocore.session.Session(profile=profile.name).get_credentials()
    if credentials is None:
        raise InputError(
            f"The profile {profile.name!r} has no credentials.", hint="`aws configure` or `aws sso login`."
        )

    def read_keys() -> dict[str, Any]:
        frozen = credentials.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + timedelta(minutes=10),
        }

    return read_keys


def aws_endpoint(access: Access) -> str | None:
    """Return where requests go: the option, the environment, the profile; None is Amazon."""
    if access.endpoint:
        return access.endpoint.rstrip("/")
    for name in _AWS_ENDPOINTS:
        if text := os.environ.get(name):
            return checked_endpoint(text, name)
    profile = find_profile()
    text = profile.values.get("endpoint_url") if profile is not None else None
    return checked_endpoint(text, f"endpoint_url of the profile {profile.name!r}") if profile and text else None


def find_region() -> str:
    profile = find_profile()
    own = profile.values.get("region") if profile is not None else None
    region = _variable("AWS_REGION", "AWS_DEFAULT_REGION") or own or "us-east-1"
    if not _REGION.fullmatch(region):
        raise InputError(f"Unknown region {region!r}.", hint="Set AWS_REGION to a name like us-east-1.")
    return region


def authorities() -> str | None:
    """Return certificates of authorities that are trusted besides those of the system, as a private store needs."""
    profile = find_profile()
    path = os.environ.get("AWS_CA_BUNDLE") or (profile.values.get("ca_bundle") if profile else None)
    return certificates(path, "AWS_CA_BUNDLE (or ca_bundle of a profile)") if path else None


def aws_options(access: Access, client: dict[str, Any]) -> dict[str, Any]:
    """Return the options of obstore's S3 store; those of its client are added to `client`."""
    profile = None if access.anonymous else find_profile()
    endpoint = aws_endpoint(access)
    host = urlsplit(endpoint or "").hostname or ""
    is_https = endpoint is None or endpoint.startswith("https://")
    # Parts carry a checksum, and the store compares it: some do not check a signature alone.
    options: dict[str, Any] = {"region": find_region(), "checksum_algorithm": "CRC64NVME"}
    if endpoint is not None:
        options |= {"endpoint": endpoint, "virtual_hosted_style_request": False}
        client["allow_http"] = endpoint.startswith("http://")
    if is_https and (trusted := authorities()) is not None:
        client["root_certificate"] = trusted
    if is_https or host in ("localhost", "::1") or host.startswith("127."):
        # The connection protects the bytes, or they stay on this machine: no SHA-256 of each part in its signature.
        options["unsigned_payload"] = True
    if access.anonymous:
        return options | {"skip_signature": True}
    if (keys := known_keys(profile)) is not None:
        options |= {"access_key_id": keys.access, "secret_access_key": keys.secret}
        return options | ({"session_token": keys.token} if keys.token else {})
    if profile is not None and profile.has_provider:
        return options | {"credential_provider": provider(profile)}
    return options  # obstore finds the role of the machine


@dataclass(frozen=True, slots=True)
class S3Account:
    """What signs requests to S3. `keys` is None where obstore alone knows them (the role of a machine)."""

    endpoint: str | None
    region: str
    keys: Keys | None
    authorities: str | None  # certificates, besides those that the system knows


def account_of(access: Access) -> S3Account:
    """Return what signs the few requests to S3 that brim makes without obstore."""
    profile = find_profile()
    keys = known_keys(profile)
    if keys is None and profile is not None and profile.has_provider:
        values = provider(profile)()
        keys = Keys(values["access_key_id"], values["secret_access_key"], values["token"])
    endpoint = aws_endpoint(access)
    is_http = endpoint is not None and endpoint.startswith("http://")
    return S3Account(endpoint, find_region(), keys, None if is_http else authorities())


def google_endpoint(access: Access) -> str | None:
    """Return where requests go; None is Google."""
    if access.endpoint:
        return access.endpoint.rstrip("/")
    for name in _GOOGLE_ENDPOINTS:
        if text := os.environ.get(name):
            return checked_endpoint(text if "://" in text else f"http://{text}", name)
    return None


def google_options(access: Access, client: dict[str, Any]) -> dict[str, Any]:
    """Return the options of obstore's Google store; those of its client are added to `client`."""
    endpoint = google_endpoint(access)
    options: dict[str, Any] = {} if endpoint is None else {"base_url": endpoint}
    _plain_client(endpoint, client)
    if access.anonymous:
        return options | {"skip_signature": True}
    chosen_path = os.environ.get("GOOGLE_APPLICATION_CREDENTIALS")
    home = os.environ.get("CLOUDSDK_CONFIG") or os.path.join(os.path.expanduser("~"), ".config", "gcloud")
    path = Path(chosen_path).expanduser() if chosen_path else Path(home) / "application_default_credentials.json"
    if _variable(*_OBSTORE_KEYS):
        return options
    if not chosen_path and not path.exists():
        if os.environ.get("STORAGE_EMULATOR_HOST") and not access.endpoint:
            # Google's own clients use an emulator without credentials; obstore writes with some or not at all.
            return options | {"bearer_token": "emulator"}
        return options
    try:
        account = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(
            f"The credentials of Google at {str(path)!r} cannot be read.",
            hint="Set GOOGLE_APPLICATION_CREDENTIALS to a key file, or run `gcloud auth application-default login`.",
        ) from error
    if isinstance(account, dict) and account.get("type") in _GOOGLE_KINDS:
        return options | {"application_credentials": str(path)}
    try:
        from obstore.auth.google import GoogleCredentialProvider

        return options | {"credential_provider": GoogleCredentialProvider()}
    except ImportError as error:
        raise MissingDependencyError(
            f"The credentials at {str(path)!r} are of a kind that google-auth reads: install it.",
            hint="pip install google-auth requests; or use the key of a service account.",
            extra="s3",
        ) from error


def _connection() -> dict[str, str]:
    """Return the fields of Azure's connection string."""
    text = os.environ.get("AZURE_STORAGE_CONNECTION_STRING") or ""
    pairs = [part.partition("=") for part in text.split(";") if part.strip()]
    if any(not equals for _, equals, _ in pairs):
        raise InputError(
            "AZURE_STORAGE_CONNECTION_STRING is not what Azure gives out: it has a part without '='.",
            hint="`az storage account show-connection-string` prints it.",
        )
    fields = {name.strip(): value.strip() for name, _, value in pairs}
    if fields.get("UseDevelopmentStorage", "").lower() == "true":
        return _EMULATOR
    if "AccountName" in fields and "BlobEndpoint" not in fields and "EndpointSuffix" in fields:
        scheme = fields.get("DefaultEndpointsProtocol", "https")
        fields["BlobEndpoint"] = f"{scheme}://{fields['AccountName']}.blob.{fields['EndpointSuffix']}"
    return fields


def azure_endpoint(access: Access) -> str | None:
    """Return where requests go: Azure has an address for each account. None if no account is known."""
    if access.endpoint:
        return access.endpoint.rstrip("/")
    fields = _connection()
    if text := fields.get("BlobEndpoint"):
        return checked_endpoint(text, "BlobEndpoint of AZURE_STORAGE_CONNECTION_STRING")
    for name in _AZURE_ENDPOINTS:
        if text := os.environ.get(name):
            return checked_endpoint(text, name)
    account = fields.get("AccountName") or _variable(*_ACCOUNT)
    return f"https://{account}.blob.core.windows.net" if account else None


def azure_options(access: Access, client: dict[str, Any]) -> dict[str, Any]:
    """Return the options of obstore's Azure store; those of its client are added to `client`."""
    fields, endpoint = _connection(), azure_endpoint(access)
    parts = urlsplit(endpoint or "")
    host, path = parts.hostname or "", parts.path.strip("/")
    # https://ACCOUNT.blob.core.windows.net, or http://HOST/ACCOUNT as emulators have it.
    host_account = path.partition("/")[0] or (host.partition(".")[0] if ".blob." in host else "")
    account = fields.get("AccountName") or _variable(*_ACCOUNT) or host_account
    if not account:
        raise InputError(
            "az:// needs the name of the storage account.",
            hint="Set AZURE_STORAGE_ACCOUNT, or AZURE_STORAGE_CONNECTION_STRING.",
        )
    options: dict[str, Any] = {"account_name": account} | ({} if endpoint is None else {"endpoint": endpoint})
    _plain_client(endpoint, client)
    if access.anonymous:
        return options | {"skip_signature": True}
    if key := fields.get("AccountKey") or _variable(*_KEY):
        return options | {"account_key": key}
    if signature := fields.get("SharedAccessSignature") or _variable(*_SIGNATURE):
        return options | {"sas_key": signature.removeprefix("?")}
    if not _variable(*_IDENTITIES) and shutil.which("az") is not None:
        return options | {"use_azure_cli": True}
    return options  # obstore reads the variables that name an identity, else asks for that of the machine


_ENDPOINTS = {"s3": aws_endpoint, "gs": google_endpoint, "az": azure_endpoint}


def endpoint_of(location: Location) -> str | None:
    """Return the endpoint that the option, the environment or a profile sets; None for the scheme's own cloud."""
    if location.scheme == "hf":
        return os.environ.get("HF_ENDPOINT", "").rstrip("/") or None
    find = _ENDPOINTS.get(location.scheme)
    return find(location.access) if find is not None else None
