"""Pages of every kind, for Node.js and for a browser."""

import json
from pathlib import Path

import pytest

from tests.viewer.samples import shown, write_pages


@pytest.fixture(scope="package")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a page of each kind of run and dataset. Beside it lies its data, as JSON."""
    written = write_pages(tmp_path_factory.mktemp("pages"))
    for page in written.values():
        page.with_suffix(".json").write_text(json.dumps(shown(page)))
    return written
