# `make help` lists the targets, `make help-all` those for contributors, too.
#
# Variables, on the command line or in the environment:
#   LIBFABRIC_HOME  where libfabric is; otherwise /opt/amazon/efa, otherwise what
#                   pkg-config names
#   CUDA_HOME       where the CUDA Toolkit is, otherwise /usr/local/cuda;
#                   empty (make CUDA_HOME=): build without it
#   CXX, CXXFLAGS   the compiler and its options
#   BUILD           where to build (build)
#   CHAPTER, ARGS   for `make demo`: the program, and its client's arguments
#   ARGS            for `make test-rdma`: options;
#                   for `make watch-6`: the client's arguments; CLIENTS: how many at once;
#                   BEHIND=build/strict.so: a library between the recorder and libfabric
#   WRITE           for `make check`: WRITE=1 writes anew what follows from the programs
#   FORCE           for `make type-5.3`: FORCE=1 writes over src/my_5.cpp
#   DIR, SOURCE     for `make watch`: the folder with the records, and the program's source
#   RUNS, SIZES, PROVIDERS
#                   for `make bench`: RUNS=5 SIZES="64 64K" PROVIDERS="shm tcp"
#   JOBS            for `make mutants`: how many at a time (JOBS=2)

BUILD ?= build
CXXFLAGS ?= -O2
CHAPTER ?= 7_queue
OUR_CXXFLAGS := -std=c++20 -Wall -Wextra -Werror

# make takes a blank for the end of a name.
ifneq ($(words $(CURDIR)),1)
$(error the path of the repository must not have blanks; it is '$(CURDIR)')
endif
ifneq ($(words $(BUILD)),1)
$(error BUILD has to be the name of one folder, without blanks; it is '$(BUILD)')
endif

# The programs of the tutorial, and programs of your own, which are those with another
# name: src/mine.cpp. Only `make`, `make mine`, `make demo` and `make diff-mine` look at
# these.
IN_SRC := ls src | sed -n 's/\.cpp$$//p' | grep '^[-+.0-9A-Z_a-z]*$$' | sort -V
PROGRAMS := $(shell $(IN_SRC) | grep -E '^[0-9]+_')
OWN := $(shell $(IN_SRC) | grep -vE '^[0-9]+_')
# The one of a target's number: of 2_first and 2_verbs, the first.
numbered = $(firstword $(filter $*_%,$(PROGRAMS)))
# The moves of a step, 5.3: patches that lead from its parent to it.
MOVES := $(shell ls scripts/moves/*/*.patch 2>/dev/null | \
  sed -nE 's|.*/([0-9]+)_[^/]*/([0-9]+)_.*|\1.\2|p' | sort -V)

# ---- libfabric ----

comma := ,

ifeq ($(LIBFABRIC_HOME),)
LIBFABRIC_HOME := $(wildcard /opt/amazon/efa)
endif
ifneq ($(LIBFABRIC_HOME),)
LIBFABRIC_DIR := $(patsubst %/,%,$(dir $(firstword \
  $(wildcard $(LIBFABRIC_HOME)/lib64/libfabric.so \
             $(LIBFABRIC_HOME)/lib/libfabric.so \
             $(LIBFABRIC_HOME)/lib/*/libfabric.so))))
LIBFABRIC_CXXFLAGS := -I$(LIBFABRIC_HOME)/include
LIBFABRIC_LIBS := -L$(LIBFABRIC_DIR) -lfabric
else
LIBFABRIC_CXXFLAGS := $(shell pkg-config --cflags libfabric 2>/dev/null)
LIBFABRIC_LIBS := $(shell pkg-config --libs libfabric 2>/dev/null || \
                    echo -lfabric)
endif
# The programs must find the library at run time where the linker has found it.
LIBFABRIC_LIBS += $(patsubst -L%,-Wl$(comma)-rpath$(comma)%,\
                    $(filter -L%,$(LIBFABRIC_LIBS)))

# ---- CUDA ----

CUDA_HOME ?= $(wildcard /usr/local/cuda)
ifneq ($(CUDA_HOME),)
CUDA_LIB := $(firstword $(wildcard $(CUDA_HOME)/lib64/libcudart_static.a \
              $(CUDA_HOME)/lib/libcudart_static.a \
              $(CUDA_HOME)/targets/*/lib/libcudart_static.a))
ifeq ($(CUDA_LIB),)
$(warning no libcudart_static.a under $(CUDA_HOME): building without CUDA)
endif
endif
# The programs that use GPUs say so: #ifdef USE_CUDA.
USE_GPUS := $(filter $(PROGRAMS) $(OWN),$(basename $(notdir \
  $(shell grep -l USE_CUDA src/*.cpp))))
ifneq ($(CUDA_LIB),)
# With the static runtime, programs start even where there is no driver.
$(USE_GPUS:%=$(BUILD)/%): CUDA_CXXFLAGS := -DUSE_CUDA -isystem $(CUDA_HOME)/include
$(USE_GPUS:%=$(BUILD)/%): CUDA_LIBS := $(CUDA_LIB) -ldl -lrt -lpthread
# Those after the moves are known only once they are there.
$(MOVES:%=$(BUILD)/%): CUDA_CXXFLAGS = $(if $(shell grep -s USE_CUDA $<),\
  -DUSE_CUDA -isystem $(CUDA_HOME)/include)
$(MOVES:%=$(BUILD)/%): CUDA_LIBS = $(if $(shell grep -s USE_CUDA $<),\
  $(CUDA_LIB) -ldl -lrt -lpthread)
endif

# ---- What is missing ----

# Says yes if the compiler finds a header. It need not read those of scripts/test.sh for that.
has_header = $(shell echo '\#include <$(1)>' | \
  $(CXX) $(filter-out -include %.h,$(CXXFLAGS)) $(LIBFABRIC_CXXFLAGS) -E -x c++ - \
  >/dev/null 2>&1 && echo yes)
INSTALL := scripts/install-deps.sh installs what is missing

# Programs that need xxHash, or the library of verbs, are left out where it is not
# installed.
including = $(filter $(basename $(notdir \
  $(shell grep -l '<$(1)>' src/*.cpp))),$(PROGRAMS) $(OWN))
OVER_VERBS := $(call including,infiniband/verbs.h)
ifeq ($(call has_header,xxhash.h),)
WITHOUT_XXHASH := $(call including,xxhash.h)
endif
ifeq ($(call has_header,infiniband/verbs.h),)
WITHOUT_VERBS := $(OVER_VERBS)
endif
NO_XXHASH = xxHash is missing (the package libxxhash-dev or xxhash-devel); \
  $(INSTALL)
NO_VERBS = libibverbs is missing (the package libibverbs-dev or rdma-core-devel); \
  $(INSTALL)
NO_LIBFABRIC = $(CXX) does not find libfabric (the package libfabric-dev or \
  libfabric-devel); $(INSTALL)

# ---- Building ----

.PHONY: all $(PROGRAMS) $(OWN) $(MOVES)
all: $(filter-out $(WITHOUT_XXHASH) $(WITHOUT_VERBS),$(PROGRAMS) $(OWN))
	$(if $(WITHOUT_XXHASH),@echo 'not built: $(WITHOUT_XXHASH); $(strip $(NO_XXHASH))' >&2)
	$(if $(WITHOUT_VERBS),@echo 'not built: $(WITHOUT_VERBS); $(strip $(NO_VERBS))' >&2)
$(PROGRAMS) $(OWN) $(MOVES): %: $(BUILD)/%
$(WITHOUT_XXHASH:%=$(BUILD)/%): FORCE
	@$(error $(NO_XXHASH))
$(WITHOUT_VERBS:%=$(BUILD)/%): FORCE
	@$(error $(NO_VERBS))
# These do without libfabric.
$(OVER_VERBS:%=$(BUILD)/%): LIBFABRIC_LIBS := -libverbs

BUILD_IT = $(CXX) $(OUR_CXXFLAGS) $(CXXFLAGS) $(LIBFABRIC_CXXFLAGS) \
	  $(CUDA_CXXFLAGS) -o $@ $< $(LDFLAGS) $(LIBFABRIC_LIBS) $(CUDA_LIBS)
$(BUILD)/%: src/%.cpp $(BUILD)/.flags
	$(BUILD_IT)

# make 5.3: the program after the third move of step 5.
$(MOVES:%=$(BUILD)/%): $(BUILD)/%: $(BUILD)/moves/src/%.cpp $(BUILD)/.flags
	$(BUILD_IT)
# It changes when the program does.
$(MOVES:%=$(BUILD)/moves/src/%.cpp): $(BUILD)/moves/src/%.cpp: FORCE
	@python3 scripts/moves/moves.py state $* $@

# Not programs of the tutorial: what tests, the recorder (watch.so) and benchmarks need.
# The head of each says what it is. scripts/test.sh has TOOL_CXXFLAGS, because the
# optimizer takes longer than most of them run.
TOOL_CXXFLAGS ?= $(CXXFLAGS)
TOOLS := $(BUILD)/sender $(BUILD)/allocator $(BUILD)/bench_loop
LIBRARIES := $(BUILD)/strict.so $(BUILD)/watch.so
$(BUILD)/sender: scripts/tests/sender.cpp
$(BUILD)/allocator: scripts/tests/allocator.cpp src/8_malloc.cpp
$(BUILD)/bench_loop: scripts/bench/bench_loop.cpp src/7_queue.cpp
$(BUILD)/strict.so: scripts/tests/strict.cpp scripts/tests/stand_in.h
$(BUILD)/watch.so: scripts/watch/recorder.cpp scripts/tests/stand_in.h
$(BUILD)/bench_loop $(BUILD)/watch.so: TOOL_CXXFLAGS = $(CXXFLAGS)
$(LIBRARIES): SHARED := -shared -fPIC
$(TOOLS) $(LIBRARIES): $(BUILD)/.flags
	$(CXX) $(OUR_CXXFLAGS) $(TOOL_CXXFLAGS) $(LIBFABRIC_CXXFLAGS) $(SHARED) -o $@ \
	  $(filter scripts/%.cpp,$^) $(LDFLAGS) $(LIBFABRIC_LIBS)
$(BUILD)/bench_allreduce: scripts/bench/bench_allreduce.cpp $(BUILD)/.flags
	mpicxx $(OUR_CXXFLAGS) $(CXXFLAGS) -o $@ $<

# The programs that use GPUs, built once more for machines without a GPU and without
# the CUDA Toolkit: a folder that looks like the toolkit's holds a header and a
# library of ours. The optimizer would take longer than the tests run them.
STAND_IN_CXXFLAGS ?= -O0
.PHONY: stand-ins
stand-ins: $(BUILD)/strict.so $(patsubst %,$(BUILD)/cuda/%,\
  $(filter $(PROGRAMS),$(USE_GPUS)))
$(BUILD)/cuda/lib64/libcudart_static.a: scripts/tests/cuda_stub.cpp \
  scripts/tests/cuda_runtime.h $(BUILD)/.flags
	@mkdir -p $(BUILD)/cuda/include $(@D)
	cp scripts/tests/cuda_runtime.h $(BUILD)/cuda/include/
	$(CXX) $(OUR_CXXFLAGS) $(CXXFLAGS) -isystem $(BUILD)/cuda/include -c \
	  -o $(@:.a=.o) $<
	ar rcs $@ $(@:.a=.o)
$(BUILD)/cuda/%: $(BUILD)/cuda/lib64/libcudart_static.a FORCE
	@$(MAKE) --no-print-directory $@ OWN= BUILD=$(BUILD)/cuda \
	  CUDA_HOME=$(BUILD)/cuda CXXFLAGS='$(STAND_IN_CXXFLAGS)'

# Changes when the options do, so that everything is built again.
FLAGS := $(CXX) $(CXXFLAGS) $(LDFLAGS) $(LIBFABRIC_CXXFLAGS) \
         $(LIBFABRIC_LIBS) $(CUDA_LIB)
$(BUILD)/.flags: FORCE
	@$(if $(call has_header,rdma/fabric.h),,$(error $(NO_LIBFABRIC)))
	@mkdir -p $(BUILD)
	@echo '$(FLAGS)' | cmp -s - $@ || echo '$(FLAGS)' >$@
.PHONY: FORCE
FORCE:

# ---- Everything else ----

.PHONY: demo report moves watch check test test-all test-rdma mutants lint book \
  figures clean help help-all
# These targets install what they need first. Only then is there a libfabric to
# find, so they build with another make.
demo:
	@scripts/install-deps.sh build
	@$(MAKE) --no-print-directory $(BUILD)/$(CHAPTER)
	@scripts/demo.sh $(BUILD)/$(CHAPTER) $(ARGS)

# Tries the programs on this machine, and prints a block to send to us. What can't be
# built is part of it.
report:
	@scripts/install-deps.sh build
	-@$(MAKE) --no-print-directory -k $(addprefix $(BUILD)/,6_write 7_queue watch.so)
	@BUILD='$(BUILD)' python3 scripts/report.py

# In a minute, what needs no program. WRITE=1 first writes anew what follows from the
# programs.
check:
	@scripts/install-deps.sh build test
	@WRITE='$(WRITE)' scripts/check.sh

test:
	@scripts/install-deps.sh build test book
	@scripts/test.sh

# Every test with everything that it takes.
test-all:
	@scripts/install-deps.sh build test book
	@ALL=1 scripts/test.sh

# Over Soft-RoCE, here or in a virtual machine: ARGS="-k test_data".
test-rdma:
	@scripts/rdma/test.sh $(ARGS)

# Breaks a rule of the programs at a time: does a test notice? MUTANTS="pause slot"
mutants:
	@scripts/install-deps.sh build test
	@scripts/test.sh --collect-only -q >/dev/null
	@bash -c '. scripts/common.sh; python=$$(python_with pytest xdist) && \
	  without_symbols "$$python" scripts/tests/mutants.py $(MUTANTS)'

# Each has its variables at the top of its file in scripts/bench/.
BENCHES := bench bench-variants bench-ring
bench bench-variants: MEASURED := 7_queue bench_loop
bench-ring: MEASURED := 15_ring bench_allreduce
.PHONY: $(BENCHES)
$(BENCHES):
	@scripts/install-deps.sh build $(if $(filter %-ring,$@),$@,bench)
	@$(MAKE) --no-print-directory $(MEASURED:%=$(BUILD)/%)
	@BUILD=$(BUILD) python3 -B scripts/bench/bench_$(if $(filter %-ring,$@),ring,queue).py \
	  $(@:bench-%=%)

# Checks what a reader has made of an exercise: make exercise-4.
exercise-%:
	@scripts/install-deps.sh build exercise
	@$(MAKE) --no-print-directory $(BUILD)/sender $(BUILD)/watch.so \
	  $(addprefix $(BUILD)/,$(numbered))
	@BUILD='$(BUILD)' scripts/exercises/run.sh $*

# Builds a program with one thing broken or changed on purpose, and says what to do with
# it: make break-10, make break-8.asleep, and after a move: make break-10.4.
break-%:
	@scripts/install-deps.sh build
	@BUILD='$(BUILD)' scripts/breaks/run.sh $*

# Runs a program with a recorder, and shows who owned what when, and what was wrong in
# that: make watch-6, make watch-mine, make watch-break-10. With DIR: of what was recorded
# by hand.
watch-%:
	@scripts/install-deps.sh build
	@$(MAKE) --no-print-directory $(BUILD)/watch.so $(BEHIND) \
	  $(or $(addprefix $(BUILD)/,$(numbered) $(filter $*,$(OWN) $(MOVES))),\
	  $(error there is no program $*))
	@BUILD='$(BUILD)' python3 scripts/watch/run.py \
	  $(addprefix $(BUILD)/,$(numbered) $(filter $*,$(OWN) $(MOVES))) $(ARGS)
watch-break-%:
	@$(MAKE) -s --no-print-directory break-$* $(BUILD)/watch.so $(BEHIND) >/dev/null
	@BUILD='$(BUILD)' python3 scripts/watch/run.py \
	  -o $(BUILD)/watch/break-$* $(BUILD)/break/$(or $(numbered),$*) $(ARGS)
watch:
	@[ -n '$(DIR)' ] || { \
	  echo 'error: name the folder with the records: make watch DIR=build/run1' >&2; exit 2; }
	@BUILD='$(BUILD)' python3 scripts/watch/run.py '$(DIR)' '$(SOURCE)'

# Shows what a program adds to the one that it is based on: make diff-7; what a move
# adds: make diff-5.3.
diff-%:
	@scripts/diff.sh $* $(OWN) $(PROGRAMS)

# The moves, a line each.
moves:
	@python3 scripts/moves/moves.py list

# For those who type a move: make type-5.3 makes src/my_5.cpp as it is before the move
# (FORCE=1: also if that is there), make typed-5.3 compares it with what it should be.
type-%:
	@FORCE='$(FORCE)' scripts/moves/type.sh $@
typed-%:
	@scripts/moves/type.sh $@

lint:
	@scripts/install-deps.sh lint test
	@scripts/check.sh -k test_format

# The chapters beside their programs, as pages.
book:
	@scripts/book/book.sh

# Gives the chapters' SVG figures their style: see scripts/book/style.py.
figures:
	@scripts/book/style.py

clean:
	rm -rf $(BUILD)

help:
	@echo 'make            build all programs into $(BUILD)/'
	@echo 'make 7_queue    build one: $(PROGRAMS)'
	@echo 'make mine       build one of your own, src/mine.cpp'
	@echo 'make demo       run server and client (CHAPTER=4_hello make demo)'
	@echo 'make diff-7     what 7 adds to the program that it is based on'
	@echo 'make moves      the moves of each step, a line each'
	@echo 'make 5.3        build the program after move 3 of step 5'
	@echo 'make diff-5.3   what this move is for, and what it adds'
	@echo 'make type-5.3   begin to type it: src/my_5.cpp, as it is before the move'
	@echo 'make typed-5.3  what src/my_5.cpp still lacks'
	@echo 'make exercise-4 check what you made of the exercise of chapter 4'
	@echo 'make break-2    build a program with one thing broken on purpose'
	@echo 'make watch-6    run it with a recorder: who owned what when, and what was wrong'
	@echo 'make book       the chapters beside their programs, in build/book/'
	@echo 'make bench      measure 7_queue beside what this machine can do'
	@echo 'make report     try an adapter or a GPU, and print what to send us'
	@echo 'make test       build and check everything'
	@echo 'make clean      remove $(BUILD)/'
	@echo 'make CUDA_HOME= build without CUDA (now: $(or $(CUDA_LIB),none))'
	@echo 'make help-all   what else there is, for contributors'

help-all: help
	@echo 'make check      check what needs no program: chapters, patches (WRITE=1: mend them)'
	@echo 'make test-all   check with every program, provider and build: twice as long'
	@echo 'make test-rdma  run the programs over real verbs, without a card'
	@echo 'make mutants    break the programs: does a test notice?'
	@echo 'make bench-variants  what each of the things does that made 7_queue fast'
	@echo 'make bench-ring measure 15_ring beside MPI_Allreduce'
	@echo 'make figures    give the figures of the chapters their style'
	@echo 'make lint       check the formatting'
