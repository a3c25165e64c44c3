"""A real peer whose model is a vector in memory (no torch: it starts in about a second). Its arguments are those of `geomesh`.

    LIGHT_PARAMETERS=100000 LIGHT_TRAIN_SECONDS=0.1 python -m tests.injection.peer peer RUN.toml --site SITE.toml ...
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from benchmarks.light_peer import LightEngine
from geomesh_p2p.cli import main
from geomesh_p2p.config import RunConfig, SiteConfig


def light_engine(run: RunConfig, site: SiteConfig, report: Callable[[Any], None]) -> LightEngine:
    parameters = int(os.environ.get("LIGHT_PARAMETERS", "100000"))
    return LightEngine(parameters, run.model.sequence_length, float(os.environ.get("LIGHT_TRAIN_SECONDS", "0.1")))


if __name__ == "__main__":
    sys.exit(main(make_engine=light_engine))
