# What people type. The work is done by cargo, `space` and xtask; see README.md.
CARGO ?= cargo
TARGET := x86_64-unknown-linux-gnu
SUDO := $(shell [ "$$(id -u)" = 0 ] || echo sudo)
BUILD_PACKAGES := protobuf-compiler gcc libc6-dev make pkg-config git
RELEASE := target/release

.PHONY: help deps build setup demo test lint fuzz clean

help:
	@echo "make build   release binaries in $(RELEASE): space, space-hostd, space-daemon"
	@echo "make setup   prepare this machine (packages, pool, guest kernel, template seed)"
	@echo "make demo    build, set up, start the server, run a program in a microVM, measure"
	@echo "make test    format, lints, licences, all tests with real VMs (needs root)"
	@echo "make lint    only what needs no VM"
	@echo "make fuzz    every parser of hostile bytes against a fuzzer, FUZZ_SECONDS=30 each (FUZZ_TARGETS=... for some)"
	@echo "make clean   remove build results and the stage of the tests"

# Only what is missing is installed, so that a prepared machine needs neither root nor a network here.
deps:
	@missing=""; for p in $(BUILD_PACKAGES); do \
	  [ "$$(dpkg-query -W -f '$${db:Status-Status}' $$p 2>/dev/null)" = installed ] || missing="$$missing $$p"; done; \
	if [ -n "$$missing" ]; then echo "installing:$$missing"; \
	  $(SUDO) apt-get update -q && $(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends $$missing; fi
	@command -v $(CARGO) >/dev/null || { echo "Rust (stable 1.95 or newer) is missing: see rustup.rs"; exit 1; }

# The daemon runs in guests that have no libraries for it, so it is static, and stripped: a small guest unpacks it into memory. Built
# apart, as its flags would rebuild all else.
build: deps
	$(CARGO) build --release --locked --package space-cli --package space-hostd --package xtask
	RUSTFLAGS="-C target-feature=+crt-static -C strip=symbols" $(CARGO) build --release --locked --package space-daemon --target $(TARGET)
	@cmp -s target/$(TARGET)/release/space-daemon $(RELEASE)/space-daemon || \
	  { cp target/$(TARGET)/release/space-daemon $(RELEASE)/space-daemon.new && mv $(RELEASE)/space-daemon.new $(RELEASE)/space-daemon; }

setup: build
	$(SUDO) $(RELEASE)/space setup

# The server that it starts stays up; `space down --sandboxes` ends it.
demo: build
	$(RELEASE)/xtask demo

test: build
	@[ "$$(id -u)" = 0 ] || { echo "make test starts VMs and mounts a pool: run it as root (sudo -E env PATH=\"$$PATH\" make test)"; exit 1; }
	$(RELEASE)/xtask test

lint: build
	$(RELEASE)/xtask lint

# libFuzzer is C++. The compiler for it is asked for here only: nothing that is shipped needs it.
fuzz: deps
	@command -v c++ >/dev/null || { echo "a C++ compiler is missing: apt-get install g++"; exit 1; }
	$(CARGO) xtask fuzz $(FUZZ_TARGETS)

clean:
	-[ ! -x $(RELEASE)/space ] || [ ! -e target/test-stage/data/run/server.lock ] || \
	  { SPACE_DATA_DIR=$(CURDIR)/target/test-stage/data $(SUDO) -E $(RELEASE)/space down --unmount; }
	$(CARGO) clean
