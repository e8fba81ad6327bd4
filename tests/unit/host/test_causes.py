"""What failed imports say, by real loaders and compilers where they are here, and what that is told as."""

from __future__ import annotations

import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from ddtree_ops.host.agent.causes import FATBIN, cause, kernel_archs, runs_on

GCC = shutil.which("gcc")


def failed_import(directory: Path, name: str = "broken") -> str:
    """What python prints when it imports the module there."""
    script = f"import sys; sys.path.insert(0, {str(directory)!r}); import {name}"
    done = subprocess.run([sys.executable, "-I", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    return done.stderr


@pytest.mark.skipif(GCC is None, reason="no gcc to make a broken library with")
def test_a_library_that_was_built_against_another_one(tmp_path: Path) -> None:
    """Linked with a library that had the symbol; the one that is there has not: what another torch does to a kernel."""
    assert GCC is not None
    (tmp_path / "old.c").write_text("int at_empty_cuda(void) { return 1; }\n")
    (tmp_path / "new.c").write_text("int at_other(void) { return 1; }\n")
    (tmp_path / "kernel.c").write_text(
        "int at_empty_cuda(void); void *PyInit_broken(void) { at_empty_cuda(); return 0; }\n"
    )

    def build(out: str, source: str, *more: str) -> None:
        subprocess.run([GCC, "-shared", "-fPIC", "-o", out, source, *more], cwd=tmp_path, check=True)

    build("libtorch_tiny.so", "old.c")
    build("broken.so", "kernel.c", "-L.", "-ltorch_tiny", "-Wl,-z,now", f"-Wl,-rpath,{tmp_path}")
    build("libtorch_tiny.so", "new.c")
    told = cause(failed_import(tmp_path))
    assert told is not None
    assert told.startswith(
        f"undefined symbol at_empty_cuda in {tmp_path}/broken.so: it was built against another torch"
    )
    (tmp_path / "libtorch_tiny.so").unlink()
    told = cause(failed_import(tmp_path))
    assert told == "library libtorch_tiny.so is neither in the release nor on this host"


def test_a_file_that_is_no_library(tmp_path: Path) -> None:
    (tmp_path / "broken.so").write_bytes(b"no library at all, but long enough to be read as one" * 10)
    told = cause(failed_import(tmp_path))
    assert told == f"{tmp_path}/broken.so is no library for this machine, or damaged"


def test_a_module_that_was_left_out(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import not_shipped.inner\n")
    assert cause(failed_import(tmp_path)) == "module not_shipped is not in the release"


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("ImportError: /r/sgl_kernel/common_ops.abi3.so: undefined symbol: _ZN3c104cuda9SetDeviceEab",
         "undefined symbol _ZN3c104cuda9SetDeviceEab in /r/sgl_kernel/common_ops.abi3.so"),
        ("torch.AcceleratorError: CUDA error: no kernel image is available for execution on the device",
         "missing arch"),
        ("ptxas fatal   : Value 'sm_103a' is not defined for option 'gpu-name'", "does not know sm_103a"),
        ("OutOfResources: out of resource: shared memory, Required: 106496, Hardware limit: 101376.", "another arch"),
        ("OSError: libcuda.so.1: cannot open shared object file: No such file or directory", "no NVIDIA driver"),
        ("ImportError: /lib/x86_64-linux-gnu/libc.so.6: version `GLIBC_2.38' not found (required by /r/_C.so)",
         "older than /r/_C.so was built for: it needs GLIBC_2.38"),
        ("ImportError: /r/_C.so: failed to map segment from shared object", "noexec"),
        ("The NVIDIA driver on your system is too old (found version 12020)", "driver is older"),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE. If you\n    numpy==2.0 from http://x",
         "another numpy==2.0 than the one that is pinned"),
        ("ERROR: No matching distribution found for numpy==2.0 (from -r r.txt (line 1))", "does not have numpy==2.0"),
        ("WARNING: Retrying ... after connection broken by 'NewConnectionError(...)': /simple/numpy/\n"
         "ERROR: No matching distribution found for numpy==2.0", "does not reach its index"),
        ("SSLCertVerificationError(1, '... certificate is not yet valid (_ssl.c:1006)')", "is its clock right"),
    ],
)  # fmt: skip
def test_the_fields_known_sayings(said: str, words: str) -> None:
    told = cause(f"Traceback (most recent call last):\n  File ...\n{said}\n")
    assert told is not None and words in told


def test_anything_else_has_no_cause() -> None:
    assert cause("Traceback (most recent call last):\nValueError: 3\n") is None
    assert cause("") is None


def fatbin(*entries: tuple[int, int]) -> bytes:
    """A fat binary of (kind, arch) entries, each with 24 bytes of payload."""
    body = b"".join(
        struct.pack("<HHIQIIHHI", kind, 0x101, 64, 24, 0, 0, 0, 0, arch).ljust(64, b"\0") + bytes(24)
        for kind, arch in entries
    )
    return FATBIN + struct.pack("<HHQ", 1, 16, len(body)) + body


def test_the_archs_of_a_library(tmp_path: Path) -> None:
    library = tmp_path / "x.so"
    library.write_bytes(bytes(5000) + fatbin((2, 90), (1, 80)) + bytes(64) + fatbin((2, 100)) + FATBIN)
    assert kernel_archs(library) == {"sm_90", "compute_80", "sm_100"}
    for nothing in (b"", FATBIN, FATBIN + bytes(100), FATBIN + b"\xff" * 100):
        library.write_bytes(nothing)
        assert kernel_archs(library) == set()


@pytest.mark.skipif(shutil.which("fatbinary") is None or shutil.which("ptxas") is None, reason="no CUDA tools")
def test_the_archs_that_nvidias_own_tools_wrote(tmp_path: Path) -> None:
    (tmp_path / "k.ptx").write_text(".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k() { ret; }\n")
    subprocess.run(["ptxas", "--gpu-name", "sm_90", "-o", "k.cubin", "k.ptx"], cwd=tmp_path, check=True)
    files = ["--image3=kind=elf,sm=90,file=k.cubin", "--image3=kind=ptx,sm=80,file=k.ptx"]
    subprocess.run(["fatbinary", "--create=k.fatbin", "-64", *files], cwd=tmp_path, check=True)
    assert kernel_archs(tmp_path / "k.fatbin") == {"sm_90", "compute_80"}


@pytest.mark.parametrize(
    ("archs", "arch", "runs"),
    [
        ({"sm_90"}, "sm_90", True),
        ({"sm_90"}, "sm_90a", True),
        ({"sm_80"}, "sm_89", True),
        ({"sm_89"}, "sm_80", False),
        ({"sm_90"}, "sm_100", False),
        ({"sm_100"}, "sm_103", True),
        ({"sm_100"}, "sm_120", False),
        ({"compute_80"}, "sm_120", True),
        ({"compute_100"}, "sm_90", False),
        (set(), "sm_90", False),
    ],
)
def test_what_runs_where(archs: set[str], arch: str, runs: bool) -> None:
    assert runs_on(archs, arch) is runs
