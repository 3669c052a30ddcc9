"""The update on blocks of memory: pure arithmetic that knows no page, no file and no thread."""
