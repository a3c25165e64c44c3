"""Everything that talks to other peers; the only room that imports hivemind."""

import sys
from types import ModuleType

try:
    import uvloop as _uvloop  # noqa: F401
except ImportError:
    # hivemind imports it whatever happens, but uses it only in processes that are not started here.
    sys.modules["uvloop"] = ModuleType("uvloop")
