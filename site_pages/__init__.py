"""The documentation site: pages from the registry, the records, the emulator and docs/; `make site` builds it."""
