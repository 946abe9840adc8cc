"""A compiler for a just-in-time cache that would otherwise compile one kernel after another. Run as a
program, in nvcc's place.

With MEGAMOE_NVCC=collect it starts the compilation in the background and fails, so that the caller goes on
to the next kernel without launching this one. With MEGAMOE_NVCC=wait it hands out the finished result, or
compiles if nobody started. Results are kept in MEGAMOE_NVCC_FOLDER by the hash of source and options.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path

__all__ = ["install"]


def install(folder: Path) -> None:
    """Makes this program DeepGEMM's compiler, for this process and its children; must come before the first
    launch."""
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "nvcc"
    if not script.exists():
        script.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).resolve()} "$@"\n')
        script.chmod(script.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
    real = os.environ.get("DG_JIT_NVCC_COMPILER") or shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    if Path(real) != script:
        os.environ["MEGAMOE_NVCC_REAL"] = real
    os.environ.update(
        DG_JIT_NVCC_COMPILER=str(script),
        DG_JIT_USE_NVRTC="0",
        DG_JIT_CACHE_DIR=str(folder / "cache"),
        DG_PRINT_CONFIGS="1",
        MEGAMOE_NVCC_FOLDER=str(folder),
        MEGAMOE_NVCC="wait",
    )


def main(arguments: list[str]) -> int:
    real = os.environ["MEGAMOE_NVCC_REAL"]
    sources = [Path(word) for word in arguments if word.endswith(".cu")]
    if not sources or "-o" not in arguments:
        return subprocess.run([real, *arguments], check=False).returncode
    source, target = sources[0], Path(arguments[arguments.index("-o") + 1])
    options = [word for word in arguments if word not in (str(source), str(target))]
    key = hashlib.sha256(source.read_bytes() + "\0".join(options).encode()).hexdigest()[:24]
    base = Path(os.environ["MEGAMOE_NVCC_FOLDER"]) / key
    _start(real, arguments, source, target, base)
    if os.environ.get("MEGAMOE_NVCC") == "collect":
        return 1
    result, failed = base.with_suffix(".cubin"), base.with_suffix(".failed")
    while not result.exists():
        if failed.exists():
            sys.stderr.write(base.with_suffix(".log").read_text()[-4000:])
            return 1
        time.sleep(0.05)
    shutil.copyfile(result, target)
    return 0


def _start(real: str, arguments: list[str], source: Path, target: Path, base: Path) -> None:
    """Starts the real compiler unless somebody has."""
    try:
        base.with_suffix(".started").open("x").close()
    except FileExistsError:
        return
    kept = base.with_suffix(".cu")
    shutil.copyfile(source, kept)
    partial, result = base.with_suffix(".partial"), base.with_suffix(".cubin")
    command = [
        str(kept) if word == str(source) else str(partial) if word == str(target) else word
        for word in arguments
    ]
    finish = f'"$0" "$@" && mv {partial} {result} || touch {base.with_suffix(".failed")}'
    with base.with_suffix(".log").open("w") as log:
        subprocess.Popen(["sh", "-c", finish, real, *command], stdout=log, stderr=log, start_new_session=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
