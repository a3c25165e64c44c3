# setup   everything into .venv (PYTHON, TORCH_SPEC and pip's own variables are honoured)
# demo    four unequal sites train one model on this machine; writes runs/demo/report.json
# test    the fast tests          test-all  every test (as root, on Debian)          lint  style, types, import law
# soak    hours of random faults, joins and leaves; resumable
# test-compose the image and the mesh in containers; dashboards and alerts over a real Prometheus (as root, on Debian)
# bench   minutes: does GeoMesh keep what it claims?     bench-full  hours: the whole comparison (docs/benchmarks.md); resumable
# bench-micro  codec, loop, transport and the like: ratios and costs

BIN := .venv/bin
export OMP_NUM_THREADS ?= 1

#: $(call needs,COMMANDS,PACKAGES): installs Debian's packages unless all the commands are there.
needs = @for one in $(1); do command -v $$one >/dev/null || { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $(2); exit $$?; }; done

.PHONY: help setup demo test test-all test-faultless test-compose soak lint bench-micro bench bench-full

help:
	@sed -n 's/^# //p' Makefile

setup:
	@scripts/setup.sh

demo: setup
	$(BIN)/geomesh mesh configs/quickstart.toml --sites peers/ --run.id demo --run.fresh

#: Two at a time, those of one file by the same worker; three of real processes, which mostly wait (each peer has its own port).
test: setup
	$(BIN)/pytest -q -n 2 --dist loadfile -m "not long" tests/unit tests/mesh tests/contract tests/golden
	$(BIN)/pytest -q -n 3 --dist loadfile -m "not long" tests/process

#: Those that take too long for every change; then the fault tests with their faults switched off, each of which must fail.
#: Some make networks of their own (as root).
test-all: setup
	$(call needs,ip tc nft,iproute2 nftables)
	@$(MAKE) --no-print-directory test
	$(BIN)/pytest -q -n 2 --dist loadfile -m long tests/unit tests/mesh tests/contract tests/golden
	$(BIN)/pytest -q -n 3 --dist loadfile -m long tests/process
	$(BIN)/pytest -q -n 2 --dist loadfile --without-faults tests

#: Fault tests with their faults switched off: each has to say that its fault did not take place.
test-faultless: setup
	$(BIN)/pytest -q -n 2 --dist loadfile --without-faults -m "fault and not long" tests/unit tests/mesh tests/contract
	$(BIN)/pytest -q -n 3 --dist loadfile --without-faults -m "fault and not long" tests/process

lint: setup
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

bench-micro: setup
	@for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

#: Hours of it: see tests/soak/__main__.py. Stopped, it goes on where it was; SOAK="--stage plain --rounds 500" chooses.
soak: setup
	$(BIN)/python -m tests.soak $(SOAK)

test-compose: setup
	$(call needs,prometheus promtool,prometheus)
	$(call needs,ip tc nft,iproute2 nftables)
	$(BIN)/pytest -q tests/operate

#: Minutes of it, on a small model; exit code 1 unless GeoMesh keeps what it claims. The whole comparison: docs/benchmarks.md.
bench: setup
	$(BIN)/geomesh bench configs/bench.toml --tokens 2097152 --check

#: Hours of it; stopped, it goes on where it was. What is trained for one comparison serves the others too.
FULL := $(BIN)/geomesh bench configs/bench-1m.toml --store runs/full/trajectories
bench-full: setup
	$(FULL) --methods all --seeds 1 2 3 --choice 2000 --out runs/full/paper
	$(FULL) --setting azure4 --methods diloco geomesh geomesh-delayed --seeds 1 2 3 --out runs/full/azure4
	$(FULL) --setting drift --methods diloco geomesh geomesh-delayed geomesh-static --out runs/full/drift
	$(FULL) --setting harsh --methods diloco diloco-1bit geomesh geomesh-fp32 geomesh-delayed --out runs/full/harsh
	$(FULL) --setting homogeneous --methods diloco geomesh geomesh-delayed --out runs/full/homogeneous
	$(FULL) --tokens 21700000 --methods diloco geomesh geomesh-delayed async --out runs/full/long
