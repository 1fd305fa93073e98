"""Download published files from the first address that works. pooch verifies a file before it gets its name."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from ... import __version__
from ...runtime.files import explain_write_error


@dataclass(frozen=True)
class DownloadSource:
    """One address of a file."""

    url: str
    bytes: int | None = None
    """Exact length; None if it is not published."""
    digest: str | None = None
    """"sha256:..." or "md5:..."; None if it is not published."""

    @property
    def name(self) -> str:
        """The file's name: the end of the address, decoded."""
        return unquote(urlsplit(self.url).path).rsplit("/", 1)[-1]


def download(
    origins: Sequence[DownloadSource],
    folder: Path,
    *,
    check: Callable[[Path], object] = lambda path: None,
    attempts: int = 4,
    timeout: float = 30.0,
    pause: float = 1.0,
) -> Path:
    """Download a file to `folder` from the first origin that works. If it is there already, no network is needed.

    Args:
        check: verifies a file without a published digest, or raises `ValueError`.
        attempts: number of tries of an origin that is busy, or whose connection breaks.
        timeout: seconds without a byte after which a connection counts as broken.
        pause: seconds before the second try, doubled before each further one.

    Raises:
        OSError: a sentence with every address and the reason.
    """
    with explain_write_error(folder):
        folder.mkdir(parents=True, exist_ok=True)
    reasons = []
    for origin in sorted(origins, key=lambda origin: not (folder / origin.name).is_file()):
        for attempt in range(attempts):
            try:
                return _load(origin, folder, check, timeout)
            except _Broken as broken:
                reason = str(broken)
                if not broken.passing or attempt == attempts - 1:
                    break
                time.sleep(pause * 2**attempt)
        reasons.append(f"{origin.url} ({reason})")
        print(f"{reasons[-1]}: this address is given up.", file=sys.stderr, flush=True)
    raise OSError(
        f"{origins[0].name} could not be downloaded from {', nor from '.join(reasons)}: give --source a copy that was "
        "downloaded by other means."
    )


class _Broken(Exception):
    """An origin did not give the file. `passing`: another try may succeed."""

    def __init__(self, reason: object, *, passing: bool = False):
        super().__init__(str(reason).rstrip("."))
        self.passing: bool = passing


def _load(origin: DownloadSource, folder: Path, check: Callable[[Path], object], timeout: float) -> Path:
    import pooch  # not above, because `txl --help` needs no network
    from requests import exceptions
    from urllib3.exceptions import NewConnectionError

    pooch.get_logger().setLevel("WARNING")
    path = folder / origin.name
    here = path.is_file()
    if not here:
        size = "" if origin.bytes is None else f" ({origin.bytes:,} bytes)"
        print(f"Loading {origin.url}{size}.", file=sys.stderr, flush=True)
    http: Any = pooch.HTTPDownloader(timeout=timeout, headers={"User-Agent": f"transformer-xl/{__version__}"})
    try:
        with explain_write_error(path):
            pooch.retrieve(origin.url, origin.digest, path.name, folder, downloader=http)
        if origin.bytes not in (None, size := path.stat().st_size):
            raise ValueError(f"it has {size:,} bytes there, and {origin.bytes:,} are published")
        if origin.digest is None:
            check(path)
    except exceptions.HTTPError as error:
        answer: Any = error.response
        passing = answer.status_code >= 500 or answer.status_code == 429
        raise _Broken(f"HTTP {answer.status_code} {answer.reason}", passing=passing) from error
    except (exceptions.SSLError, exceptions.InvalidSchema, exceptions.TooManyRedirects) as error:
        raise _Broken(error) from error
    except exceptions.RequestException as error:
        cause = getattr(error.args[0] if error.args else None, "reason", None) or error
        raise _Broken(cause, passing=not isinstance(cause, NewConnectionError)) from error
    except ValueError as error:  # pooch's, of a digest, comes before the file has its name
        path.unlink(missing_ok=True)
        raise _Broken(error, passing=here) from error  # what was here may have been damaged
    return path
