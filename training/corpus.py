"""Python source whose licences allow it -> byte-level BPE tokenizer + packed token ids for `train.py`.

Reads `sources.toml` (package = version, under [train] and [held_out]), downloads those wheels with pip, refuses every
package whose metadata states a licence outside ALLOWED, filters and deduplicates the files, trains the tokenizer on
the training part and writes into the output directory:

* tokenizer.json              2048 entries; 0 end of text, 1 mask, 2 and 3 unused chat marks
* corpus.xz                   uint16 ids, training and held-out, every file followed by the id 0 (`unpack` reads it)
* packages.md                 table for SOURCES.md: package, version, licence as stated, part, files and size kept

Usage: python training/corpus.py --wheels DIR --out DIR [--max-tokens N]
"""

import argparse
import email.message
import hashlib
import lzma
import random
import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

SEED = 20261129
VOCAB = 2048
SPECIAL = ("<|endoftext|>", "<|MASK|>", "<|im_start|>", "<|im_end|>")
EOS = 0
# One package may fill at most this much of the corpus: the model should not learn one house style.
MAX_PACKAGE_BYTES = {"train": 6_000_000, "held_out": 1_000_000}
TOKENIZER_SAMPLE_BYTES = 40_000_000

ALLOWED = frozenset(
    {"PSF-2.0", "Python-2.0", "CNRI-Python", "MIT", "MIT-0", "BSD-2-Clause", "BSD-3-Clause", "0BSD", "Apache-2.0"}
    | {"ISC", "Zlib", "CC0-1.0"}
)
# Trove classifiers and free-text licence fields, as found in the metadata of the listed packages, in SPDX words.
SPDX_OF = {
    "OSI Approved :: MIT License": "MIT",
    "OSI Approved :: BSD License": "BSD-3-Clause",
    "OSI Approved :: Apache Software License": "Apache-2.0",
    "OSI Approved :: ISC License (ISCL)": "ISC",
    "OSI Approved :: Python Software Foundation License": "PSF-2.0",
    "MIT": "MIT",
    "MIT License": "MIT",
    "BSD": "BSD-3-Clause",
    "BSD License": "BSD-3-Clause",
    "3-Clause BSD License": "BSD-3-Clause",
    "New BSD": "BSD-3-Clause",
    "BSD-3": "BSD-3-Clause",
    "Apache 2.0": "Apache-2.0",
    "Apache 2": "Apache-2.0",
    "Apache-2": "Apache-2.0",
    "Apache License 2.0": "Apache-2.0",
    "Apache License, Version 2.0": "Apache-2.0",
    "Apache Software License 2.0": "Apache-2.0",
    "PSF": "PSF-2.0",
}

SKIPPED_DIRS = re.compile(
    r"vendor|third_?party|extern|node_modules|site-packages|migrations|locale|translations|_libs|bundled|"
    r"versions/|lib2to3|pydoc_data|encodings|idle_test|test_grammars",
    re.I,
)
FOREIGN_LICENCE = re.compile(
    r"\b[AL]?GPL|General Public License|Mozilla Public|Creative Commons|\bCC[- ]BY|Eclipse Public|All rights reserved\."
    r" Proprietary",
)
GENERATED = re.compile(r"generated (?:by|from|file|code|automatically)|auto-?generated|do not (?:edit|modify)", re.I)


class LicenceError(ValueError):
    """A package's metadata does not state a licence of ALLOWED."""


@dataclass
class Package:
    """One source package: `licence` in its metadata's own words, `part` "train" or "held_out"."""

    name: str
    version: str
    licence: str
    part: str
    files: int = 0
    kept_bytes: int = 0


def stated_licence(metadata: email.message.Message) -> str:
    """The licence a wheel's METADATA states. Raises LicenceError unless every licence named is in ALLOWED.

    License-Expression (PEP 639) outranks classifiers, classifiers outrank the free-text License field.
    """
    name = metadata["Name"]
    expression = metadata["License-Expression"]
    if expression:
        named = set(re.findall(r"[A-Za-z0-9.\-+]+", expression)) - {"AND", "OR"}
        stated = expression
    else:
        marks = [
            c.removeprefix("License :: ") for c in metadata.get_all("Classifier", []) if c.startswith("License ::")
        ]
        marks = [c for c in marks if c != "OSI Approved"] or [(metadata["License"] or "").strip()]
        named = {SPDX_OF.get(mark, mark if mark in ALLOWED else f"? {mark[:60]}") for mark in marks}
        stated = "; ".join(marks)
    if not named or not named <= ALLOWED:
        raise LicenceError(f"{name}: states {stated[:120]!r}; not allowed: {sorted(named - ALLOWED)}")
    return stated


def download(name: str, version: str, wheels: Path) -> Path:
    """The wheel of `name==version` in `wheels`, fetched by pip if absent. Raises on a failed download."""
    pattern = re.compile(re.sub(r"[-_.]+", "[-_.]+", name) + "-" + re.escape(version) + "-", re.I)
    for _ in range(2):
        found = sorted(p for p in wheels.glob("*.whl") if pattern.match(p.name))
        if found:
            return found[0]
        command = ["pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(wheels), f"{name}=={version}"]
        subprocess.run([sys.executable, "-m", *command], check=True)
    raise FileNotFoundError(f"pip left no wheel of {name}=={version} in {wheels}")


def open_wheel(path: Path, part: str) -> tuple[Package, list[tuple[str, bytes]]]:
    """A wheel's package record and its .py files as (path, content). Raises LicenceError."""
    with zipfile.ZipFile(path) as wheel:
        (meta,) = [n for n in wheel.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", n)]
        metadata = email.message_from_bytes(wheel.read(meta))
        package = Package(metadata["Name"], metadata["Version"], stated_licence(metadata), part)
        return package, [(n, wheel.read(n)) for n in sorted(wheel.namelist()) if n.endswith(".py")]


def open_stdlib() -> tuple[Package, list[tuple[str, bytes]]]:
    """The running CPython's own standard library, tests left out."""
    root = Path(sysconfig.get_path("stdlib"))
    package = Package("CPython standard library", sys.version.split()[0], "PSF-2.0", "train")
    paths = (p.relative_to(root) for p in sorted(root.rglob("*.py")))
    return package, [(str(p), (root / p).read_bytes()) for p in paths if "test" not in p.parts]


def clean(path: str, raw: bytes) -> str | None:
    """The text to train on, its licence comment cut off; None for vendored, generated, foreign or data-like files."""
    if SKIPPED_DIRS.search(path) or path.endswith("_pb2.py") or not 600 <= len(raw) <= 200_000:
        return None
    try:
        text = raw.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError:
        return None
    if FOREIGN_LICENCE.search(text) or GENERATED.search(text[:2000]) or len(raw) - len(text) > 0.03 * len(raw):
        return None
    lines = text.split("\n")
    head = next((i for i, line in enumerate(lines) if not line.startswith("#")), len(lines))
    if re.search(r"licen[cs]e|copyright", "\n".join(lines[:head]), re.I):
        lines = lines[head:]
    lines = [line.rstrip() for line in lines]
    text = "\n".join(lines).strip("\n") + "\n"
    digits = sum(c.isdigit() for c in text)
    squeezed = len(zlib.compress(text.encode()))
    if len(text) < 400 or max(map(len, lines)) > 300 or digits > 0.08 * len(text) or squeezed < 0.13 * len(text):
        return None
    return text


class Seen:
    """Drops files most of whose longer lines an earlier file already had (copies, vendored and near-copies)."""

    def __init__(self) -> None:
        self._lines: set[bytes] = set()

    def is_new(self, text: str) -> bool:
        lines = {line.strip() for line in text.split("\n")}
        marks = {hashlib.blake2b(line.encode(), digest_size=8).digest() for line in lines if len(line) > 20}
        if not marks or len(marks & self._lines) > 0.5 * len(marks):
            return False
        self._lines |= marks
        return True


def collect(sources: Path, wheels: Path) -> tuple[list[Package], dict[str, list[str]]]:
    """Every package record and, by part, the texts kept. Held-out comes first, so that training drops its copies."""
    listed = tomllib.loads(sources.read_text())
    packages: list[Package] = []
    texts: dict[str, list[str]] = {"held_out": [], "train": []}
    seen = Seen()
    for part in ("held_out", "train"):
        opened = [open_wheel(download(n, v, wheels), part) for n, v in listed[part].items()]
        if part == "train":
            opened.insert(0, open_stdlib())
        for package, files in opened:
            # A name's hash orders the files, so the cap on a large package cuts evenly through its folders.
            for path, raw in sorted(files, key=lambda item: hashlib.sha256(item[0].encode()).digest()):
                if package.kept_bytes >= MAX_PACKAGE_BYTES[part]:
                    break
                text = clean(path, raw)
                if text is not None and seen.is_new(text):
                    texts[part].append(text)
                    package.files += 1
                    package.kept_bytes += len(text.encode())
            packages.append(package)
            print(f"{part:8} {package.name:28} {package.licence:40.40} {package.kept_bytes / 1e6:6.2f} MB", flush=True)
    for kept in texts.values():
        random.Random(SEED).shuffle(kept)
    return packages, texts


def table(packages: list[Package]) -> str:
    """The packages as a Markdown table."""
    rows = [
        "| package | version | licence, as its metadata states it | part | files | MB |",
        "|---|---|---|---|---|---|",
    ]
    for p in packages:
        part = p.part.replace("_", " ")
        rows.append(f"| {p.name} | {p.version} | {p.licence} | {part} | {p.files} | {p.kept_bytes / 1e6:.2f} |")
    return "\n".join(rows) + "\n"


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE of VOCAB entries. A newline and the indentation after it are one piece, so layout is cheap."""
    tokenizer = Tokenizer(models.BPE())
    pieces = r"\r?\n[ \t]*| ?[\p{L}_]\p{L}*|\p{N}{1,3}| ?[^\s\p{L}\p{N}_]+|[ \t]+(?!\S)|\s+"
    split = pre_tokenizers.Split(Regex(pieces), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )

    def sample() -> Iterator[str]:
        left = TOKENIZER_SAMPLE_BYTES
        for text in texts:
            if left <= 0:
                return
            left -= len(text)
            yield text

    tokenizer.train_from_iterator(sample(), trainer)
    if tokenizer.get_vocab_size() != VOCAB or tokenizer.token_to_id(SPECIAL[1]) != 1:
        raise ValueError("the tokenizer came out with another size or other special ids")
    return tokenizer


def pack(tokenizer: Tokenizer, texts: list[str], limit: int) -> npt.NDArray[np.uint16]:
    """Ids of all texts, each followed by EOS, in one flat array of at most `limit` ids."""
    parts: list[npt.NDArray[np.uint16]] = []
    total = 0
    for start in range(0, len(texts), 512):
        for encoding in tokenizer.encode_batch_fast(texts[start : start + 512], add_special_tokens=False):
            parts.append(np.array([*encoding.ids, EOS], dtype=np.uint16))
            total += len(parts[-1])
        if total >= limit:
            break
    return np.concatenate(parts)[:limit]


def squeeze(train: npt.NDArray[np.uint16], held_out: npt.NDArray[np.uint16], path: Path) -> None:
    """Writes both arrays as one xz stream: an 8-byte count of held-out ids, those ids, then the training ids."""
    raw = len(held_out).to_bytes(8, "little") + held_out.tobytes() + train.tobytes()
    path.write_bytes(lzma.compress(raw, preset=4))


def unpack(path: Path) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint16]]:
    """(train, held_out) as `squeeze` wrote them."""
    raw = lzma.decompress(path.read_bytes())
    cut = 8 + 2 * int.from_bytes(raw[:8], "little")
    return np.frombuffer(raw[cut:], np.uint16), np.frombuffer(raw[8:cut], np.uint16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--max-tokens", type=int, default=100_000_000)
    args = parser.parse_args()
    args.wheels.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)
    packages, texts = collect(Path(__file__).with_name("sources.toml"), args.wheels)
    (args.out / "packages.md").write_text(table(packages))
    tokenizer = train_tokenizer(texts["train"])
    tokenizer.save(str(args.out / "tokenizer.json"))
    held_out = pack(tokenizer, texts["held_out"], args.max_tokens)
    train = pack(tokenizer, texts["train"], args.max_tokens)
    text_bytes = sum(p.kept_bytes for p in packages if p.part == "train")
    print(f"train {len(train) / 1e6:.1f} M ids of {text_bytes / 1e6:.0f} MB, held out {len(held_out) / 1e6:.2f} M ids")
    squeeze(train, held_out, args.out / "corpus.xz")


if __name__ == "__main__":
    main()
