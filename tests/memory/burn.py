"""A script that uses a known amount of memory, in itself and in a child."""

from __future__ import annotations

import mmap
import subprocess
import sys
import time

from .measure import MIB, mark, report


def main() -> None:
    num_bytes = int(sys.argv[1])
    time.sleep(0.1)
    mark("own")
    block = bytearray(b"x") * num_bytes
    time.sleep(0.1)
    mark("freed")
    time.sleep(0.05)
    del block
    time.sleep(0.1)
    mark("shared")
    with mmap.mmap(-1, num_bytes) as shared:
        shared.write(b"x" * num_bytes)
        time.sleep(0.1)
    mark("child")
    code = f"import time; block = bytearray(b'x') * {num_bytes}; time.sleep(0.3)"
    subprocess.run([sys.executable, "-c", code], check=True)
    mark("end")
    report(mib=num_bytes // MIB)
    time.sleep(0.1)


if __name__ == "__main__":
    main()
