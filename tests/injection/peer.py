"""A real peer that comes to grief as it is told (tests/injection/struck.py), by the table of tests/injection/process.py.

    LIGHT_PARAMETERS=100000 LIGHT_TRAIN_SECONDS=0.1 python -m tests.injection.peer peer RUN.toml --site SITE.toml ...

Everything else is the product's own: sockets, protocol, disk, planner, codec. The model is a vector in memory
(no torch: such a peer starts in about a second). The arguments are those of `geomesh`.
"""

from __future__ import annotations

import sys

from tests.injection import clock

if __name__ == "__main__":
    clock.install()  # before anybody keeps a reference to the real one

    from tests.injection.struck import run

    sys.exit(run())
