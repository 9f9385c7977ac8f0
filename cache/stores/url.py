"""URLs of remote stores: their options and passwords."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlencode, urlsplit

from advisor.errors import UsageError

PATIENCE_S = 0.05
"""How long `apply` waits for a remote store, unless its URL says ?timeout=."""
_TIME = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_HARMLESS = ("prefix", "ttl", "timeout", "endpoint", "db", "insecure")
"""Options whose values are shown; any other value may be a secret."""
_OPTION = re.compile(r"([?&;])([^=&;?#]*)=([^&;#]*)")
_FORM = "expected SCHEME://[USER:PASSWORD@]HOST[:PORT]/PLACE[?OPTION=VALUE&...]"
_QUOTE = "write / ? # @ in a password as %2F %3F %23 %40"


@dataclass(frozen=True, slots=True)
class RemoteUrl:
    """`bare`: the URL without advisor's own options; `shown`: without a password too."""

    bare: str
    shown: str
    options: dict[str, str]

    @classmethod
    def parse(cls, url: str, own: tuple[str, ...]) -> RemoteUrl:
        """Split the options named in `own` from a URL.

        Raises:
            UsageError: an option is given twice, or the URL is malformed.
        """
        place, _, query = url.partition("?")
        shown = without_password(url)
        try:
            urlsplit(place)  # refuses half an IPv6 address
            given = parse_qsl(query, strict_parsing=bool(query))
        except ValueError as exc:
            raise UsageError(f"cache URL {shown!r}: {_FORM}; {_QUOTE}") from exc
        names = [name for name, _value in given]
        for name in own:
            if names.count(name) > 1:
                raise UsageError(f"cache URL {shown!r}: {name} is given twice")
        rest = urlencode([pair for pair in given if pair[0] not in own])
        options = {name: value for name, value in given if name in own}
        return cls(bare=f"{place}?{rest}" if rest else place, shown=shown, options=options)

    def address(self, default_port: int) -> tuple[str, int]:
        """Host and port. Raises UsageError if the port is none."""
        parts = urlsplit(self.bare)
        try:
            port = parts.port
        except ValueError:
            port = 0
        if port == 0:
            found = re.search(r":(-?\d{1,20})$", parts.netloc)
            # What follows a colon and is no number may be a password.
            named = f"port {found[1]}" if found else "port"
            rule = f"{named}: expected a number from 1 to 65535; {_QUOTE}"
            raise UsageError(f"cache URL {self.shown!r}: {rule}")
        return parts.hostname or "localhost", port or default_port

    def endpoint(self) -> tuple[str, int] | None:
        """Host and port of the option `endpoint`, None without one."""
        url = self.options.get("endpoint")
        if not url:
            return None
        if not re.match(r"https?://[^/:[]", url):
            raise UsageError(f"cache URL {self.shown!r}: endpoint: expected https://HOST[:PORT]")
        return RemoteUrl(url, self.shown, {}).address(443 if url.startswith("https") else 80)

    def seconds(self, option: str, default: float) -> float:
        """A time such as 50ms, 2s or 30d.

        Raises:
            UsageError: it is no time.
        """
        text = self.options.get(option)
        if text is None:
            return default
        found = _TIME.fullmatch(text)
        seconds = float(found[1]) * _UNITS[found[2]] if found else 0.0
        if not 0 < seconds < 1e9:
            raise UsageError(
                f"cache URL {self.shown!r}: {option}={text}: expected a time as 50ms, 2s or 30d"
            )
        return seconds


def without_password(url: str) -> str:
    """A URL as it may be shown, even if it is malformed: without user and password, and without the
    values of options that may be secret."""
    place, mark, query = url.partition("?")
    query = _OPTION.sub(_option, f"{mark}{query.partition('#')[0]}") if mark else ""
    place = re.sub(r"^([A-Za-z][A-Za-z0-9+.-]*:/*).*@", r"\1", place)
    if "@" in query:  # a password that is not percent-encoded may hold '?'
        place, query = re.sub(r"^([A-Za-z][A-Za-z0-9+.-]*:/*).*", r"\1***", place), ""
    # What follows a colon and is no port may be a password.
    host = r"(?:\[[0-9A-Fa-f:.]*\]|[^/:\[]*)"
    place = re.sub(rf"^([A-Za-z][A-Za-z0-9+.-]*://{host}):(?!-?\d*(?:/|$)).*", r"\1:***", place)
    return place.partition("#")[0] + query


def _option(found: re.Match[str]) -> str:
    before, name, value = found.groups()
    if name.lower() == "endpoint":
        value = re.sub(r"//[^/@]*@", "//", value)
    shown = value if name.lower() in _HARMLESS and "@" not in value else "***"
    return f"{before}{name}={shown}"
