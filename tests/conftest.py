"""Settings of all tests: one torch thread, hypothesis without deadlines (a busy machine is no failure), examples repeatable."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from hypothesis import settings

settings.register_profile("geomesh", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("geomesh")
