"""What g++ made of AOTInductor's C++ is kept in build/inductor, under a hash of all that it was made from.

AOTInductor keeps none of it: what it writes for a program is compiled again each time, in some four seconds.
"""

import hashlib
import os
import shlex
import shutil
import zlib
from pathlib import Path

KEPT = Path(__file__).resolve().parent.parent / "build" / "inductor"


def keeping(compile_as_ever, kept=KEPT):
    """Returns what runs a command line of Inductor's, unless what it would make was made before.

    An object file depends on the source, the words of the command, torch's headers, the compiler, and, by
    `-march=native`, on the processor. Precompiled headers have names that tell what is in them.
    """

    def run(cmd_line, cwd):
        words = shlex.split(cmd_line)
        if "-c" not in words or not words[1].endswith(".cpp"):
            compile_as_ever(cmd_line, cwd)
            return
        target = Path(cwd, words[words.index("-o") + 1])
        state = hashlib.sha256(repr((_machine(words[0]), words[2 : words.index("-o")])).encode())
        for line in Path(cwd, words[1]).read_bytes().splitlines():
            if line and not line.startswith(b"//"):  # the last of which say how it was compiled before
                state.update(line + b"\n")
        made = kept / f"{state.hexdigest()[:32]}.o.z"
        if made.exists():
            target.write_bytes(zlib.decompress(made.read_bytes()))
            return
        compile_as_ever(cmd_line, cwd)
        kept.mkdir(parents=True, exist_ok=True)
        partial = made.with_suffix(f".{os.getpid()}")
        partial.write_bytes(zlib.compress(target.read_bytes(), 1))
        partial.replace(made)

    return run


def _machine(compiler):
    """What tells a processor, a compiler and a torch from others."""
    import torch

    found = os.stat(shutil.which(compiler) or compiler)
    cpu = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if "flags" in line), "")
    return torch.__version__, torch.version.git_version, compiler, found.st_size, found.st_mtime_ns, cpu
