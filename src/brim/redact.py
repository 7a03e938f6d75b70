"""Secrets out of texts that are kept or shown: command lines, quoted log lines.

What is hidden is the value, never the name of the option or variable, so that a command stays readable. A
text without secrets comes back as it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

HIDDEN = "***"
_LEAST_SECRET = 6  # a shorter value of a variable is a word

# Each pattern keeps its group "keep" and hides the rest of its match.
_PATTERNS = [
    # tokens that say themselves what they are: Hugging Face, GitHub, GitLab, Slack, OpenAI, AWS, Google, W&B
    re.compile(
        r"(?P<keep>)\b(?:hf_[A-Za-z0-9]{8,}|api_org_[A-Za-z0-9]{8,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}"
        r"|glpat-[\w-]{8,}|xox[abeprs]-[\w-]{8,}|sk-[\w-]{16,}|(?:AKIA|ASIA|AROA|AIDA)[A-Z0-9]{12,}|AIza[\w-]{20,}"
        r"|wandb_v\d_\w{8,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*|pypi-[\w-]{16,}|npm_[A-Za-z0-9]{16,})"
    ),
    # Authorization: Bearer X, X-Api-Key: X
    re.compile(
        r"(?P<keep>\b(?:proxy-)?authorization['\"]?\s*[:=]\s*['\"]?(?:bearer|basic|token|digest)?\s*)[^\s'\",;]+", re.I
    ),
    re.compile(r"(?P<keep>\bbearer\s+)[\w.~+/=-]{8,}", re.I),
    # https://user:password@host, also with an @ inside the password
    re.compile(r"(?P<keep>[a-z][a-z0-9+.-]*://)[^\s/'\"]*:[^\s'\"/]*(?=@)", re.I),
    # https://token@host
    re.compile(r"(?P<keep>\bhttps?://)[^\s/'\"@:]+(?=@)", re.I),
    # Cookie: a=b; c=d
    re.compile(r"(?P<keep>\b(?:set-)?cookie['\"]?\s*[:=]\s*)[^'\"\n]+", re.I),
    # ?sig=…, &X-Amz-Signature=… in addresses that were signed
    re.compile(
        r"(?P<keep>[?&](?:sig|signature|x-amz-signature|x-amz-credential|x-goog-signature|code)=)[^\s&'\"]+", re.I
    ),
    # MYSQL_PWD=X, DB_PASS=X, --pass X, --auth X; PWD alone is a folder, and auth: no in a sentence is a word
    re.compile(
        r"(?P<keep>(?<![\w/.-])(?:--?[\w-]*?(?<![a-z])(?:pwd|pass|auth)(?:=|\s+(?!-))|[\w-]+[_-](?:pwd|pass|auth)=))"
        r"(?:'[^']*'|\"[^\"]*\"|[^\s'\",;&]+)",
        re.I,
    ),
    # --token X, --password=X, API_KEY=…, "secret": "…", -p is too common to guess
    re.compile(
        r"(?P<keep>(?<![\w/.])(?:--?)?['\"]?[\w.-]*?(?:token|passwd|password|passphrase|passwort|secret|credentials?"
        r"|api[_-]?key|access[_-]?key(?:[_-]?id)?|private[_-]?key|account[_-]?key|auth[_-]?key|sas[_-]?key)"
        r"(?:[_-](?:id|key|value|file))?['\"]?"
        r"(?:\s*[=:]\s*|(?<=\w)\s+(?!-)))"
        r"(?:'[^']*'|\"[^\"]*\"|[^\s'\",;&]+)",
        re.I,
    ),
]
# "token" followed by a blank is a secret only as an option; in a sentence it is a word.
_IN_A_SENTENCE = re.compile(r"^(?!-)['\"]?[\w.-]*\s+$")
_COUNTED = re.compile(
    r"(?:max|num|n|new|min|total|eos|bos|pad|unk|per)[_-]?[\w-]*tokens?\b|tokens?[_-]?(?:ids?|size|count)", re.I
)


def redact(text: str) -> str:
    """The text with everything that looks like a secret replaced by ***."""
    for pattern in _PATTERNS:
        text = pattern.sub(_hide, text)
    return text


def hide_values(text: str, environment: Mapping[str, str]) -> str:
    """The text without the values of variables that hold a secret.

    A server may echo a token that nobody recognizes by its looks.
    """
    values = {value for name, value in environment.items() if len(value) >= _LEAST_SECRET and _names_secret(name)}
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    return text


def _names_secret(name: str) -> bool:
    """Whether a variable of this name holds a secret."""
    return redact(f"{name}=x") == f"{name}={HIDDEN}"


def redact_command(command: list[str]) -> list[str]:
    """A command's arguments without secrets: an option's value may be the argument after it."""
    shown: list[str] = []
    hide_next = False
    for argument in command:
        if hide_next and not argument.startswith("-"):
            shown.append(HIDDEN)
            hide_next = False
            continue
        # "--token" alone: with a value put behind it, would the value be hidden?
        hide_next = (
            argument.startswith("-") and "=" not in argument and redact(f"{argument} x") == f"{argument} {HIDDEN}"
        )
        name, equals, value = argument.partition("=")
        whole = equals and " " in value and redact(f"{name}=x") == f"{name}={HIDDEN}"  # --token="two words"
        shown.append(f"{name}={HIDDEN}" if whole else _hide_login(shown, redact(argument)))
    return shown


def _hide_login(before: list[str], argument: str) -> str:
    """curl's -u NAME:PASSWORD."""
    name, colon, password = argument.partition(":")
    login = before and before[-1] in ("-u", "--user", "--proxy-user") and colon and password
    return f"{name}:{HIDDEN}" if login and not password.startswith("//") else argument


def _hide(match: re.Match[str]) -> str:
    keep = match["keep"]
    if _IN_A_SENTENCE.match(keep) or _COUNTED.search(keep):
        return match[0]
    return keep + HIDDEN
