"""The code of several cubins in one file, so that a disassembler that takes long to start need start only once.

A cubin is a 64-bit little-endian ELF file with one section of code per function.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

MERGED_SECTION = ".text.k"  # before the place of the cubin that the code is from
_MAGIC = b"\x7fELF\x02\x01"
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_STRING_TABLE, _SYMBOL_TABLE, _NO_BYTES = 3, 2, 8  # kinds of section; the last has a size but no bytes in the file
_STRINGS, _NAMES, _FIRST_CODE = 1, 3, 4  # places of the merged file's sections
_FUNCTION, _ENTRY = 0x12, 0x10  # a global function's symbol; the mark of a kernel
_ALIGNMENT = 128
_REGISTERS = 0xFF000000  # of a code section's info; the other bits are the number of its symbol


@dataclass(frozen=True, slots=True)
class _Code:
    """The one function of a cubin: the file's ELF header, its section's header, and its bytes."""

    header: tuple[int, ...]
    section: tuple[int, ...]
    data: bytes


def merge(cubins: Sequence[bytes]) -> bytes:
    """Return one cubin with the code of all, the n-th one's in section ``.text.k<n>``: to be disassembled, never run.

    Raises:
        ValueError: one of them is no cubin with exactly one function, or they are not all for one architecture.
    """
    codes = [_code(cubin) for cubin in cubins]
    if len({code.header[7] for code in codes}) != 1:
        raise ValueError("cubins of one architecture were expected")
    symbols, strings = bytearray(_SYMBOL.size), bytearray(b"\0")
    for place, code in enumerate(codes):
        symbols += _SYMBOL.pack(len(strings), _FUNCTION, _ENTRY, _FIRST_CODE + place, 0, len(code.data))
        strings += f"k{place}\0".encode()
    titles = [".strtab", ".symtab", ".shstrtab", *(f"{MERGED_SECTION}{place}" for place in range(len(codes)))]
    names = b"\0" + b"".join(f"{title}\0".encode() for title in titles)
    # Of each section: kind, flags, bytes, the section that it refers to, a number that its kind gives a meaning, entry size.
    contents: list[tuple[int, int, bytes, int, int, int]] = [
        (_STRING_TABLE, 0, bytes(strings), 0, 0, 0),
        (_SYMBOL_TABLE, 0, bytes(symbols), _STRINGS, 1, _SYMBOL.size),
        (_STRING_TABLE, 0, names, 0, 0, 0),
        *(
            (code.section[1], code.section[2], code.data, 2, (code.section[7] & _REGISTERS) | (place + 1), 0)
            for place, code in enumerate(codes)
        ),
    ]
    file, headers, named = bytearray(_HEADER.size), bytearray(_SECTION.size), 1
    for title, (kind, flags, data, link, info, entry) in zip(titles, contents, strict=True):
        file += bytes(-len(file) % _ALIGNMENT)
        headers += _SECTION.pack(named, kind, flags, 0, len(file), len(data), link, info, _ALIGNMENT, entry)
        file += data
        named += len(title) + 1
    file += bytes(-len(file) % _ALIGNMENT)
    first = codes[0].header
    _HEADER.pack_into(
        file, 0, *first[:5], 0, len(file), first[7], _HEADER.size, first[9], 0, _SECTION.size, 1 + len(titles), _NAMES
    )
    return bytes(file + headers)


def _code(cubin: bytes) -> _Code:
    try:
        header = _HEADER.unpack_from(cubin)
        start, count, names = header[6], header[12], header[13]
        sections = [_SECTION.unpack_from(cubin, start + place * _SECTION.size) for place in range(count)]
        ends = [one[4] + one[5] for one in sections if one[1] != _NO_BYTES]
        whole = max(header[5] + header[9] * header[10], *ends, 0)
        names_at = sections[names][4]
        found = [section for section in sections if cubin.startswith(b".text.", names_at + section[0])]
    except (struct.error, IndexError) as error:
        raise ValueError(f"not a cubin: {error}") from None
    if not cubin.startswith(_MAGIC) or len(found) != 1:
        raise ValueError(f"a cubin with one function was expected, this one has {len(found)}")
    (section,) = found
    if len(cubin) < whole or not section[5]:
        raise ValueError(f"not a cubin: {len(cubin)} bytes of {whole} are there, {section[5]} of them code")
    return _Code(header, section, cubin[section[4] : section[4] + section[5]])
