"""What a failed import or pip run means: the loader's, CUDA's and pip's words, by their cause."""

from __future__ import annotations

import mmap
import re
import struct
from pathlib import Path

# (what it says, what that means); the first that is found counts. Field cases: docs, "What goes wrong in the field".
CAUSES = (
    (r"(?P<a>[\w./+-]+\.so[\w.]*): undefined symbol: (?P<b>\w+)",
     "undefined symbol {b} in {a}: it was built against another torch, CUDA or C++ ABI than what is beside it; "
     "torch, triton and the kernels must be pinned together"),
    (r"version `(?P<a>[\w.]+)' not found \(required by (?P<b>[^)]+)\)",
     "this host's libraries are older than {b} was built for: it needs {a}"),
    (r"no kernel image is available|cudaErrorNoKernelImageForDevice|(?P<a>[Cc]ould not load any common_ops library)",
     "missing arch: the kernels were not built for this GPU"),
    (r"ptxas fatal *: *Value '(?P<a>sm_\w+)' is not defined",
     "missing arch: the ptxas that triton brings does not know {a}"),
    (r"out of resource: shared memory[^\n]*",
     "the kernel's tiles are too big for this GPU's shared memory: it was tuned for another arch"),
    (r"(?P<a>[\w./+-]+): invalid ELF header|(?P<b>[\w./+-]+): (?:wrong ELF class|file too short)",
     "{a}{b} is no library for this machine, or damaged"),
    (r"(?P<a>[\w./+-]+): failed to map segment from shared object",
     "{a} may not be executed: is its file system mounted noexec?"),
    (r"(?P<a>libcuda\.so[\w.]*): cannot open shared object file", "{a} is missing: no NVIDIA driver on this host"),
    (r"(?P<a>[\w./+-]+\.so[\w.]*): cannot open shared object file",
     "library {a} is neither in the release nor on this host"),
    (r"driver version is insufficient|NVIDIA driver on your system is too old",
     "this host's NVIDIA driver is older than the release's CUDA"),
    (r"ModuleNotFoundError: No module named '(?P<a>[\w.]+)'", "module {a} is not in the release"),
    (r"THESE PACKAGES DO NOT MATCH THE HASHES[\s\S]*?\n\s+(?P<a>\S+) from",
     "the host's index has another {a} than the one that is pinned"),
    (r"certificate is not yet valid|certificate has expired",
     "the index's certificate is not valid at this host's time: is its clock right?"),
    (r"(?:NewConnectionError|ConnectTimeoutError|NameResolutionError|ProxyError)",
     "the host does not reach its index: see pip.conf there, or use wheels: ship"),
    # after those two: pip ends with it whatever kept it from asking
    (r"No matching distribution found for (?P<a>[^\s(]+)", "the host's index does not have {a}"),
)  # fmt: skip
FATBIN = b"\x50\xed\x55\xba"
ENTRY = struct.Struct("<HHIQII HHI")  # kind, -, header size, payload size, -, -, -, -, arch
PTX = 1


def cause(text: str) -> str | None:
    """The named cause in what a failed import or pip printed; None when it is none of those that are known."""
    for pattern, meaning in CAUSES:
        if found := re.search(pattern, text):
            return meaning.format(**{key: value or "" for key, value in found.groupdict().items()})
    return None


def kernel_archs(library: Path) -> set[str]:
    """The archs a library has device code for: "sm_90" machine code, "compute_90" PTX. Empty when it has none.

    Reads nvcc's fat binaries (fatbinary_section.h names the magic; the entry's layout is what cuobjdump shows).
    """
    found: set[str] = set()
    if library.stat().st_size < ENTRY.size:
        return found
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = data.find(FATBIN)
        while at >= 0:
            found |= fatbin_archs(data, at)
            at = data.find(FATBIN, at + 8)
    return found


def fatbin_archs(data: mmap.mmap, at: int) -> set[str]:
    found: set[str] = set()
    if at + 16 > len(data):
        return found
    version, header, size = struct.unpack_from("<HHQ", data, at + 4)
    at, end = at + header, at + header + size
    if version != 1 or header != 16 or end > len(data):
        return found
    while at + ENTRY.size <= end:
        kind, _, entry, payload, *_, arch = ENTRY.unpack_from(data, at)
        if entry < ENTRY.size or not 20 <= arch < 1000:
            break
        found.add(f"compute_{arch}" if kind == PTX else f"sm_{arch}")
        at += entry + payload
    return found


def runs_on(archs: set[str], arch: str) -> bool:
    """Whether one of ``archs`` runs on a GPU of ``arch``: machine code of its major, not newer; or older PTX."""
    want = int(re.sub(r"\D", "", arch))
    for name in archs:
        have = int(name.rpartition("_")[2])
        if have <= want and (name.startswith("compute_") or have // 10 == want // 10):
            return True
    return False
