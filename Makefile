# Each target makes the environment it needs, from nothing but Python 3.11 or later: `make demo`, `make test`.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
DEMO   ?= demo
PEERS  ?= .peers

.PHONY: demo test lint types unit bench bench-export bench-decoder bench-generation results quantization-matrix screenshot clean

# One environment serves every target; it is remade when what it installs changes.
$(VENV)/ready: pyproject.toml constraints.txt tests/third-party.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r tests/third-party.txt
	@touch $@

# Trains LeNet on digits, exports it, finds out that int8 everywhere is slower, and keeps int8 where it pays.
demo: $(VENV)/ready
	@# exit code 1 is an answer too: on this machine int8 pays nowhere, and the report says so
	$(BIN)/edgekit deploy lenet -o $(DEMO) --scheme int8-static --force || [ $$? -eq 1 ]

test: lint types unit

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/ready
	$(BIN)/mypy

unit: $(VENV)/ready
	$(BIN)/pytest -n 2 --dist worksteal

# Ours against PyTorch, for every small architecture on images or columns; prints ratios.
bench: $(VENV)/ready
	$(BIN)/python -m tests.bench_catalog

# How long export takes with its proof, against torch.onnx.export alone.
bench-export: $(VENV)/ready
	$(BIN)/python -m tests.bench_export

# One step of a decoder in both profiles and optimized, against the memory's bandwidth and a peer's export (in an environment of its own).
bench-decoder: $(VENV)/ready $(PEERS)/ready
	HF_HUB_OFFLINE=1 $(BIN)/python -m tests.bench_decoder --peer $(PEERS)/bin/python

# Generated tokens a second against the tools people use now, and letters → phonemes against PyTorch. About an hour.
bench-generation: $(VENV)/ready $(PEERS)/ready
	$(BIN)/python -m tests.bench_generation --peer $(PEERS)/bin/python

$(PEERS)/ready: tests/peers.txt tests/peers-builder.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check -r tests/peers.txt
	@# two versions of one library: the second lies in a folder that only onnxruntime-genai's builder is shown
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --target $(PEERS)/builder --upgrade -r tests/peers-builder.txt
	@touch $@

# Trains every shared recipe that has no finished run in runs/ (hours), and writes docs/results.md.
results: $(VENV)/ready
	$(BIN)/python -m tests.results --train runs

# Every architecture in every scheme (many hours; what was measured is kept), and writes docs/quantization.md.
quantization-matrix: $(VENV)/ready
	$(BIN)/python -m tests.quantization_matrix --work matrix-work --runs runs

# The picture in the README, taken of the demo's report. Needs Debian's chromium.
screenshot: $(DEMO)/report.html
	chromium --headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-component-update \
	  --disable-sync --hide-scrollbars --user-data-dir=$$(mktemp -d) --window-size=940,1180 \
	  --screenshot=docs/report.png file://$(CURDIR)/$(DEMO)/report.html

clean:
	rm -rf $(VENV) $(PEERS) $(DEMO) *.egg-info
