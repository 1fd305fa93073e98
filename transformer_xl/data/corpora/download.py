"""Download published files from the first address that works. pooch verifies a file before it gets its name."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
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


def download(origins: Sequence[DownloadSource], folder: Path) -> Path:
    """Download a file to `folder` from the first origin that works. If it is there already, no network is needed.

    Each origin is tried three times.

    Raises:
        OSError: a sentence with every address and the reason.
    """
    import pooch  # not above, because `txl --help` needs no network
    from requests.exceptions import RequestException

    pooch.get_logger().setLevel("WARNING")
    loader = pooch.HTTPDownloader(timeout=30, headers={"User-Agent": f"transformer-xl/{__version__}"})
    reasons = []
    for origin in sorted(origins, key=lambda origin: not (folder / origin.name).is_file()):
        path = folder / origin.name
        if not path.is_file():
            size = "" if origin.bytes is None else f" ({origin.bytes:,} bytes)"
            print(f"Loading {origin.url}{size}.", file=sys.stderr, flush=True)
        registry, urls = {path.name: origin.digest}, {path.name: origin.url}
        files = pooch.create(folder, "", registry=registry, urls=urls, retry_if_failed=2)
        try:
            with explain_write_error(path):
                files.fetch(path.name, downloader=loader)  # type: ignore[arg-type] - a class of its own
            return path
        except (RequestException, ValueError) as error:
            path.unlink(missing_ok=True)
            reasons.append(f"{origin.url} ({str(error).rstrip('.')})")
            print(f"{reasons[-1]}: this address is given up.", file=sys.stderr, flush=True)
    raise OSError(
        f"{origins[0].name} could not be downloaded from {', nor from '.join(reasons)}: give --source a copy that was "
        "downloaded by other means."
    )
