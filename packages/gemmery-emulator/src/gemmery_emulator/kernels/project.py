"""What a project knows of a file of its own: its headers, and the file of which it is a part."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from gemmery.cuda import include

INCLUDE = re.compile(r"^\s*#\s*include\s*([<\"])([^>\"]+)[>\"]", re.MULTILINE)
_IMPORT = re.compile(r"^(\s*#\s*)import(?=\s*[<\"])", re.MULTILINE)
_BESIDE = ("", "include", "inc", "common", "Common", "utils", "common/inc")  # folders of a project's headers
_ENDINGS = (".h", ".cuh", ".hpp", ".hh", ".hxx", ".inl", ".inc", ".cu")
_MOST_FOLDERS = 5000  # of a project that are searched for headers
_UP = 5  # folders above a file in which they are looked for


def headers_of(
    text: str, options: Sequence[str], folder: Path | None, toolkit: tuple[str, ...]
) -> tuple[dict[str, str], list[str], tuple[str, ...]]:
    """The texts of a program's own headers, the headers without a file, and the folders of packages with others."""
    folders = [Path(match[1]) for it in options if (match := re.match(r"(?:-I|--include-path=)(.+)", it))]
    folders += _searched(folder)
    texts, empty, wheels = dict[str, str](), list[str](), set[str]()
    read = dict[Path, str]()  # the first name of each file
    pending: list[tuple[str, Path | None]] = [(text, folder)]
    while pending:
        whole, beside = pending.pop()
        for included in INCLUDE.finditer(whole):
            header = included[2]
            if header in texts or header in empty:
                continue
            places = (each / header for each in ([beside] if beside else []) + folders)
            path = next((each for each in places if each.is_file()), None)
            if path is None and folder is not None and not is_in(header, toolkit):
                path = _elsewhere(folder, header)
                if path and ".." not in header:  # a build names a folder once, for all of its headers
                    folders.append(path.parents[header.count("/")])
            if header in include.STANDARD or (path is None and is_in(header, toolkit)):
                continue
            if path is not None and (first := read.setdefault(path.resolve(), header)) != header:
                texts[header] = f'#include "{first}"\n'  # by another name
            elif path is not None:
                texts[header] = as_nvcc_reads(path.read_text(encoding="utf-8", errors="replace"), path.name)
                pending.append((texts[header], path.parent))
            elif include.wheel(header):
                wheels.add(include.wheel(header))
            else:
                empty.append(header)
    return texts, empty, tuple(sorted(wheels))


def as_nvcc_reads(text: str, name: str) -> str:
    """A file's text without what NVRTC refuses and nvcc does not: a backslash at its end, #import for #include, and
    #pragma once in a file that includes itself.
    """
    text = _IMPORT.sub(r"\1include", text) + "\n" * text.rstrip().endswith("\\")
    once = "#pragma once" in text
    return re.sub(rf"^[ \t]*#\s*include\s*\"{re.escape(name)}\"", "", text, flags=re.MULTILINE) if once else text


def _searched(folder: Path | None) -> list[Path]:
    """The folders of a project's headers: beside its file, and in those above it."""
    if folder is None:
        return []
    above = [folder.resolve(), *folder.resolve().parents][:_UP]
    return [path for parent in above for part in _BESIDE if (path := parent / part).is_dir()]


@lru_cache(maxsize=8)
def _project(root: Path) -> dict[str, list[Path]]:
    """The headers of a project by their names without folders, but for those of hidden folders."""
    headers: dict[str, list[Path]] = {}
    for count, (place, folders, names) in enumerate(os.walk(root)):
        folders[:] = [each for each in folders if not each.startswith(".")]
        for name in names:
            if name.endswith(_ENDINGS):
                headers.setdefault(name, []).append(Path(place, name))
        if count > _MOST_FOLDERS:
            break
    return headers


def _elsewhere(folder: Path, header: str) -> Path | None:
    """A header that only the build of a project finds: the one of that name in it, from the folder with .git."""
    root = next((each for each in (folder.resolve(), *folder.resolve().parents) if (each / ".git").exists()), None)
    if root is None or root == Path.home():
        return None
    ends = f"/{os.path.normpath(header).lstrip('./')}"
    headers = [each for each in _project(root).get(os.path.basename(header), []) if each.as_posix().endswith(ends)]
    return headers[0] if len({each.read_bytes() for each in headers}) == 1 else None


def is_in(header: str, folders: tuple[str, ...]) -> bool:
    """Whether one of some folders has a header."""
    return any(os.path.exists(os.path.join(folder, header)) for folder in folders)


def including(folder: Path, name: str) -> Path | None:
    """The only file here or above that includes a file as a part of its own text."""
    places = [each for parent in (folder, folder.resolve().parent) for each in sorted(parent.glob("*.c[up]*"))]
    some = {each.resolve(): each for each in places if each.suffix in (".cu", ".cpp")}
    part = re.compile(rf"^\s*#\s*include\s*\"(?:[^\"]*/)?{re.escape(name)}\"", re.MULTILINE)
    whole = [each for each in some.values() if part.search(each.read_text(encoding="utf-8", errors="replace"))]
    return whole[0] if len(whole) == 1 else None
