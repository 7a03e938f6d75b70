"""Credentials for S3, as the ecosystem has them: environment, profiles, and the roles of a machine.

obstore itself knows the environment and the roles of machines (instances, containers, web identities). What it does not
know are the files of the AWS tools: a profile with keys is read here, any other kind (single sign-on, assumed roles) is
botocore's, if it is installed. Nothing of this is ever printed or stored.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from brim.errors import InputError, MissingExtra

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
