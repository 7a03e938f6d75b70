"""Who we are to S3: keys, profile, endpoint, region and certificates, in the order of the AWS tools."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import field
from typing import Any
from urllib.parse import urlsplit

from brim.buckets.bucket_address import Access, checked_endpoint
from brim.buckets.certificates import certificates
from brim.errors import InputError, MissingExtra
from brim.records import dataclass

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
        raise MissingExtra(
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
