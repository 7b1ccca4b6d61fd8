"""What the tests of publishing share: the checkpoints and manifests of the repository, and a JSON file edited."""

import json
from pathlib import Path
from typing import Any

from conftest import ROOT

from common.models.registry import PACKAGES

CHECKPOINTS = sorted(path.parent for path in ROOT.glob("*/checkpoints/*/config.json"))
MANIFESTS = {package: ROOT / package / "checkpoints" / "manifest.json" for package in PACKAGES.values()}


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
