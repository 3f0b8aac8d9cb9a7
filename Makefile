# make demo, make test: complete on a fresh clone with Python 3.11-3.13, make and pip. Everything goes into .venv.
PYTHON ?= python3
VENV := .venv/bin
# The linters of the viewer's page run on the Node.js that requirements-dev.txt brings.
LINTER := $(VENV)/node .venv/lint/node_modules/.bin
# No bytecode: Python writes it of what it imports, and the installation takes a quarter less time.
PIP_INSTALL := $(VENV)/python -m pip install --no-compile --quiet --disable-pip-version-check
# The names in a file of requirements.
NAMES := sed -E '/^( *\#|-|$$)/d; s/[ =<>;].*//'
say_names = @echo "installing into .venv for one to ten minutes, on Linux perhaps several GB:" $$($(NAMES) $(1))

# Measured on two cores (docs/lab/log.md, "Busy cores"): two threads are faster unless other programs use both.
DEMO_THREADS ?= 2
DEMO_DATA := data/sudoku-6x6
DEMO_TEXT_DATA := data/spell-backward

# The tests start hundreds of processes, and without bytecode each would compile the modules again.
export PYTHONDONTWRITEBYTECODE =
# The files that name a mark. pytest would load all others, too, to find out that none of their tests has it.
marked = $(shell grep -rlE --include='test_*.py' 'mark\.$(1)\b' tests)

.PHONY: demo demo-text test test-invariance test-faults test-launch test-docs test-export test-all test-slurm test-ray test-slow test-gpu gpu check audit format clean help

demo: .venv/.demo  ## install, make puzzles, train, evaluate, draw; a few minutes
	@$(VENV)/python dataset/build_sudoku_dataset.py --output-dir $(DEMO_DATA) --generate 1000 --generate-test 500 --box 2x3
	@export OMP_NUM_THREADS=$(DEMO_THREADS); run=checkpoints/demo/$$(date +%Y%m%d-%H%M%S); \
	$(VENV)/python pretrain.py experiment=demo data_path=$(DEMO_DATA) checkpoint_path=$$run && \
	$(VENV)/python evaluate.py checkpoint=$$run \
		"save_outputs=[inputs,labels,predictions_at_step,q_halt_at_step]" > $$run/evaluation.txt && \
	$(VENV)/python view.py $$run --png -o $$run/view.html && \
	echo "the commands above work after: source .venv/bin/activate" && \
	cat $$run/evaluation.txt

demo-text: .venv/.demo-text  ## the same with a small language model
	@$(VENV)/python dataset/build_text_dataset.py --output-dir $(DEMO_TEXT_DATA) --generate spell_backward --generate-num 12000
	@export OMP_NUM_THREADS=$(DEMO_THREADS); run=checkpoints/demo_text/$$(date +%Y%m%d-%H%M%S); \
	$(VENV)/python pretrain.py experiment=demo_text data_path=$(DEMO_TEXT_DATA) checkpoint_path=$$run && \
	$(VENV)/python evaluate.py checkpoint=$$run && \
	$(VENV)/python solve.py checkpoint=$$run prompt="Spell this word backward (example: sun -> nus): trainer"

test: .venv/.dev  ## install, and run every test that needs no special machine
	OMP_NUM_THREADS=1 $(VENV)/python -m pytest -m "not gpu and not slow and not invariance and not faults and not launch and not docs and not export and not ray and not slurm" -n logical --dist loadfile --no-loadscope-reorder

# Their ranks share the cores: one after the other.
test-invariance: .venv/.dev  ## the same run on 1, 2 and 4 ranks
	OMP_NUM_THREADS=1 $(VENV)/python -m pytest -m invariance $(call marked,invariance)

test-faults: .venv/.dev  ## kills, torn files, full disks, bad steps
	OMP_NUM_THREADS=1 $(VENV)/python -m pytest -m "faults and not invariance" -n logical --dist loadfile $(call marked,faults)

test-launch: .venv/.dev  ## torchrun, mpirun, elastic restarts
	OMP_NUM_THREADS=1 $(VENV)/python -m pytest -m launch -n logical --dist loadfile $(call marked,launch)

test-docs: .venv/.dev  ## the commands of README.md and docs/
	OMP_NUM_THREADS=1 $(VENV)/python -m pytest -m docs -n logical --dist loadfile $(call marked,docs)

test-export: .venv/.dev .venv/.onnxruntime  ## files for other programs, and these programs
	OMP_NUM_THREADS=1 $(VENV)/python -m pytest -m export -n logical --dist load $(call marked,export)

# For every change. Collects once, and leaves no core idle at the end of a group. Some tests wait for processes: one
# worker more.
test-all: .venv/.dev .venv/.triton .venv/.onnxruntime  ## the tests of all targets above at once, but the slow ones
	OMP_NUM_THREADS=1 $(VENV)/python -m pytest -m "not gpu and not slow and not ray and not slurm" -n $$(($$(getconf _NPROCESSORS_ONLN) + 1)) --dist loadfile --no-loadscope-reorder

# As root on Debian, with slurm-wlm and munge.
test-slurm: .venv/.dev  ## a Slurm of two nodes on this machine, as root
	OMP_NUM_THREADS=1 $(VENV)/python -m pytest -m slurm $(call marked,slurm)

test-slow: .venv/.dev  ## what test-all leaves out, before a release
	OMP_NUM_THREADS=1 $(VENV)/python -m pytest -m "slow and not gpu" $(call marked,slow)

# On a local Ray cluster of two nodes. Ray is half a gigabyte, so only this target installs it.
test-ray: .venv/.ray  ## a local Ray cluster; installs Ray
	OMP_NUM_THREADS=1 $(VENV)/python -m pytest -m ray $(call marked,ray)

# With the environment's own torch, because a CUDA machine brings its own: PYTHON=... chooses another.
GPU_PYTHON = $(if $(wildcard $(VENV)/python),$(VENV)/python,$(PYTHON))
test-gpu:  ## the tests that need a CUDA card
	$(GPU_PYTHON) -m pytest -m gpu

# OPTIONS="--source-dir DIR" measures accuracy, too.
MINUTES ?= 25
gpu:  ## measure what a CUDA card does with this project
	$(GPU_PYTHON) -m benchmarks.gpu --minutes $(MINUTES) $(OPTIONS)

check: .venv/.dev .venv/.lint  ## linters and types
	$(VENV)/ruff check .
	$(VENV)/ruff format --check .
	$(VENV)/mypy
	$(VENV)/hadolint Dockerfile
	$(LINTER)/eslint --config viewer/lint/eslint.config.mjs viewer/page viewer/solver tests/viewer/page
	cat viewer/page/page.css viewer/solver/solver.css | $(LINTER)/stylelint --config viewer/lint/stylelint.json --stdin
	$(LINTER)/html-validate --config viewer/lint/html-validate.json viewer/page/page.html viewer/solver/page.html viewer/page/stage.html

# Known vulnerabilities in every installed package, what the requirements bring along included. Not part of `check`: it
# asks PyPI. --strict, because a package that nobody knows there would else count as a good one; the local part of a
# version (torch's +cpu) is unknown there.
audit: .venv/.dev .venv/.audit  ## known vulnerabilities of what is installed
	$(VENV)/python -m pip check
	$(VENV)/python -m pip list --format=freeze | sed 's/+[[:alnum:].]*$$//' > .venv/installed.txt
	.venv/audit/bin/pip-audit --strict --disable-pip --no-deps --requirement .venv/installed.txt

format: .venv/.dev  ## format the code
	$(VENV)/ruff check --fix .
	$(VENV)/ruff format .

clean:  ## remove .venv, and the data and runs of the demos
	rm -rf .venv data/sudoku-6x6 data/spell-backward checkpoints/demo checkpoints/demo_text

help:  ## this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/make \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "%-22s%s\n", $$1, $$2}'

.venv/.created:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
	{ echo "error: $(PYTHON) is not Python 3.11 to 3.13; name one: make PYTHON=python3.12 ..." >&2; exit 2; }
	$(PYTHON) -m venv .venv
	touch $@

.venv/.demo: .venv/.created requirements.txt requirements-demo.txt
	$(call say_names,requirements.txt requirements-demo.txt)
	$(PIP_INSTALL) -r requirements.txt -r requirements-demo.txt
	touch $@

.venv/.demo-text: .venv/.created requirements.txt requirements-text.txt
	$(call say_names,requirements.txt requirements-text.txt)
	$(PIP_INSTALL) -r requirements.txt -r requirements-text.txt
	touch $@

# The requirements refer to one another, and a change in any of them renews the environment.
.venv/.dev: .venv/.created $(wildcard requirements*.txt)
	$(call say_names,requirements-dev.txt)
	$(PIP_INSTALL) -r requirements-dev.txt
	touch $@ .venv/.demo

# In a folder of its own, because a process that finds Triton prints lines about it at its end.
.venv/.triton: .venv/.dev requirements-triton.txt
	$(call say_names,requirements-triton.txt)
	$(PIP_INSTALL) --upgrade --target .venv/triton -r requirements-triton.txt
	touch $@

.venv/.ray: .venv/.dev requirements-ray.txt
	$(call say_names,requirements-ray.txt)
	$(PIP_INSTALL) -r requirements-ray.txt
	touch $@

.venv/.lint: .venv/.dev viewer/lint/package.json viewer/lint/package-lock.json
	mkdir -p .venv/lint
	cp viewer/lint/package.json viewer/lint/package-lock.json .venv/lint/
	$(VENV)/npm ci --prefix .venv/lint --ignore-scripts --no-audit --no-fund --silent
	touch $@

.venv/.onnxruntime: .venv/.dev viewer/solver/package.json viewer/solver/package-lock.json
	$(VENV)/npm ci --prefix viewer/solver --ignore-scripts --no-audit --no-fund --silent
	touch $@

.venv/.audit: .venv/.created requirements-audit.txt
	$(PYTHON) -m venv .venv/audit
	.venv/audit/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-audit.txt
	touch $@
