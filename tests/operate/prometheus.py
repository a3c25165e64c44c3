"""A real Prometheus over peers on this machine, with the shipped configuration: only its targets are others."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.injection.ports import free_port
from tests.process.sites import until

SHIPPED = Path(__file__).parents[2] / "deploy/prometheus"
START_SECONDS = 60.0


class Prometheus:
    """Runs within `with`. `scrape_seconds` replaces the shipped intervals, so that a test need not last for minutes."""

    def __init__(self, folder: Path, targets: Sequence[str], scrape_seconds: int = 1) -> None:
        self._folder, self.port = folder, free_port()
        shutil.copytree(SHIPPED, folder, dirs_exist_ok=True)
        config = yaml.safe_load((SHIPPED / "prometheus.yml").read_text())
        config["global"] = dict.fromkeys(config["global"], f"{scrape_seconds}s")
        (job,) = config["scrape_configs"]
        job["static_configs"] = [{"targets": list(targets)}]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))

    def __enter__(self) -> Prometheus:
        command = [
            "prometheus", f"--config.file={self._folder / 'prometheus.yml'}", f"--storage.tsdb.path={self._folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{self.port}",
        ]  # fmt: skip
        log = (self._folder / "prometheus.log").open("wb")
        self._process = subprocess.Popen(command, stdout=log, stderr=log)
        log.close()
        until(lambda: self._is_ready() or self._process.poll() is not None, "Prometheus to be ready", START_SECONDS)
        assert self._process.poll() is None, (self._folder / "prometheus.log").read_text()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/-/ready", timeout=5):
                return True
        except OSError:
            return False

    def _get(self, path: str, asked: Mapping[str, str] | None = None) -> Any:
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(asked or {})}"
        with urllib.request.urlopen(url, timeout=30) as page:
            answer = json.load(page)
        assert answer["status"] == "success", answer
        return answer["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The newest samples: [{"metric": labels, "value": [time, text]}, ...]. An expression that is none is an HTTPError."""
        return list(self._get("query", {"query": expression})["result"])

    def series(self, expression: str, seconds: float, step_seconds: float = 1.0) -> list[dict[str, Any]]:
        """The samples of the last `seconds`: [{"metric": labels, "values": [[time, text], ...]}, ...]."""
        now = time.time()
        asked = {"query": expression, "start": str(now - seconds), "end": str(now), "step": str(step_seconds)}
        return list(self._get("query_range", asked)["result"])

    def rules(self) -> list[dict[str, Any]]:
        return [rule for group in self._get("rules")["groups"] for rule in group["rules"]]
