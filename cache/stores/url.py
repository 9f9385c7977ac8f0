"""URLs of remote stores: their options and passwords."""

from __future__ import annotations

import re
from urllib.parse import parse_qsl, urlencode, urlsplit

from advisor.cache.kinds import Duration
from advisor.errors import UsageError

TIMEOUT_S = 0.05  # for `apply` and a remote store, unless its URL says ?timeout=
_HARMLESS = "prefix|ttl|timeout|endpoint|db|insecure"  # options; others may be secret
_SECRET = re.compile(rf"([?&;](?!(?i:{_HARMLESS})=)[^=&;?#]*)=[^&;#]*")
_FORM = (
    "expected SCHEME://[USER:PASSWORD@]HOST[:PORT]/PLACE[?OPTION=VALUE&...], a port from 1 to "
    "65535, and / ? # @ in a password as %2F %3F %23 %40"
)


class RemoteUrl:
    """A URL, split from the options of advisor's own. Raises UsageError if it is malformed.
    `bare`: the URL without those options; `shown`: the whole URL without possible secrets."""

    def __init__(self, url: str, *own: str) -> None:
        place, _, query = url.partition("?")
        self.shown = shown = without_password(url)
        try:
            if urlsplit(place).port == 0:  # raises ValueError for half an IPv6 address, too
                raise ValueError
            given = parse_qsl(query, strict_parsing=bool(query))
        except ValueError as exc:
            raise UsageError(f"cache URL {shown!r}: {_FORM}") from exc
        self.options: dict[str, str] = {}
        for name, value in given:
            if name in self.options:
                raise UsageError(f"cache URL {shown!r}: {name} is given twice")
            if name in own:
                self.options[name] = value
        rest = urlencode([pair for pair in given if pair[0] not in own])
        self.bare = f"{place}?{rest}" if rest else place

    def seconds(self, option: str, default: float) -> float:
        """The time in an option, or `default`. Raises UsageError if the option is no time."""
        what = f"cache URL {self.shown!r}: {option}"
        given = self.options.get(option)
        return default if given is None else Duration().checked(what, given)


def without_password(url: str) -> str:
    """A URL that is safe to show, even if it is malformed: without user and password, and without
    values of options that may be secret."""
    place, mark, query = url.partition("?")
    query = query.partition("#")[0]
    if "@" in query:  # a password that is not percent-encoded may hold '?'
        return re.sub(r"^([A-Za-z][A-Za-z0-9+.-]*:/*).*", r"\1***", place)
    place = re.sub(r"^([A-Za-z][A-Za-z0-9+.-]*:/*).*@", r"\1", place)
    # Text after a colon may be a password, unless it is a port.
    host = r"(?:\[[0-9A-Fa-f:.]*\]|[^/:\[]*)"
    place = re.sub(rf"^([A-Za-z][A-Za-z0-9+.-]*://{host}):(?!-?\d*(?:/|$)).*", r"\1:***", place)
    return place.partition("#")[0] + _SECRET.sub(r"\1=***", mark + query)
