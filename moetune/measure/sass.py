"""What a compiled kernel is made of: registers and spills, and how many instructions its main loop issues.

Reads the output of ``cuobjdump`` and ``nvdisasm``, which ship inside Triton; no GPU. An instruction count is static:
it says what one warp issues per turn, never how long that takes.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from moetune.measure.cubin import MERGED_SECTION, merge

READER_VERSION = 1  # to be raised when any of these functions reads something else from the same cubin
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@(!?)(U?P\w+)\s+)?([A-Z][A-Z0-9_.a-z]*)(.*)$")
_LABEL = re.compile(r"^(\.L_\w+):")
_TARGET = re.compile(r"`\((\.L_\w+)\)")
_TENSOR = re.compile(r"^(HGMMA|QGMMA|IGMMA|HMMA|QMMA|IMMA|OMMA|UTC[A-Z]*MMA)\b")
_WARPGROUP_SHAPE = re.compile(r"^[HQI]GMMA\.(?:SP\.)?(\d+)x(\d+)x(\d+)")
_WARP_SHAPE = re.compile(r"^[HQI]MMA\.(?:SP\.)?(16)(8)(\d+)")
_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+)")
_MERGED = re.compile(
    rf"^\t\.section\t{re.escape(MERGED_SECTION)}(\d+),(.*?)(?=^\t\.section\t|\Z)", re.MULTILINE | re.DOTALL
)
_UNCOUNTABLE = ("BRX", "JMX", "CALL", "RET", "JMP")  # targets that the text does not name
_WARPS_OF_A_WARPGROUP = 4
_TOOL_LIMIT_S = 60


@dataclass(frozen=True, slots=True)
class Instruction:
    """One SASS instruction: opcode with modifiers, whether a predicate guards it, and the label it may jump to."""

    opcode: str
    guarded: bool
    target: str | None

    @property
    def tensor(self) -> str | None:
        """The tensor instruction's family (``HGMMA``, ``HMMA``, ``UTCHMMA``, …), or None for any other."""
        found = _TENSOR.match(self.opcode)
        return found.group(1) if found else None

    @property
    def macs(self) -> float | None:
        """Multiply-adds per warp of a tensor instruction, or None where the mnemonic does not say."""
        found, warps = _WARPGROUP_SHAPE.match(self.opcode), _WARPS_OF_A_WARPGROUP
        if found is None:
            found, warps = _WARP_SHAPE.match(self.opcode), 1
        return None if found is None else int(found[1]) * int(found[2]) * int(found[3]) / warps


@dataclass(frozen=True, slots=True)
class InstructionMix:
    """Instructions that one warp issues: outside the main loop, and in one turn of it.

    Both are None where there is no single counted loop; the loop is 0 where the compiler unrolled it away.
    """

    fixed: int | None
    loop: int | None
    loop_macs: float | None
    tensor: str | None

    def per_step(self, macs_per_step: float) -> int | None:
        """Return the loop's instructions per ``block_k`` step, undoing an unrolled loop.

        Args:
            macs_per_step: multiply-adds per warp of one step.
        """
        if self.loop is None or not self.loop_macs:
            return self.loop
        turns = max(round(self.loop_macs / macs_per_step), 1)
        return round(self.loop / turns)


def is_tensor_instruction(name: str) -> bool:
    """Whether ``name`` is a family of tensor instructions, as :attr:`Instruction.tensor` gives it."""
    found = _TENSOR.match(name)
    return found is not None and found.group(1) == name


@dataclass(slots=True)
class _Block:
    """A straight run of instructions ``[first, last]`` and the blocks it may continue in."""

    first: int
    last: int
    successors: list[int]


def tool_path(name: str) -> Path:
    """Return the path of a binary tool inside the Triton wheel.

    Raises:
        FileNotFoundError: this Triton ships no such tool.
    """
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: this Triton was built without {name}; install triton's wheel")
    return path


def read_resources(cubin: bytes) -> tuple[int, int]:
    """Return registers per thread and spilled 32-bit registers (local bytes / 4) of a cubin."""
    found = _RESOURCES.search(_run_tool("cuobjdump", ["--dump-resource-usage"], cubin))
    if found is None:
        raise ValueError("cuobjdump printed no REG and STACK for this cubin")
    return int(found[1]), int(found[2]) // 4


def read_mix(cubin: bytes) -> InstructionMix:
    """Return the instruction mix of a cubin."""
    return instruction_mix(_run_tool("nvdisasm", ["-c", "-ndf"], cubin))


def read_mixes(cubins: Sequence[bytes]) -> list[InstructionMix]:
    """Return the instruction mix of each cubin in order, from one start of the disassembler: 0.2 s, and 0.03 s for each.

    Raises:
        ValueError: a cubin has more than one function, the architectures differ, or the disassembler failed.
    """
    text = _run_tool("nvdisasm", ["-c", "-ndf"], merge(cubins))
    parts = {found[1]: found[2] for found in _MERGED.finditer(text)}
    if parts.keys() != {str(place) for place in range(len(cubins))}:
        raise ValueError(f"nvdisasm printed {len(parts)} sections of code for {len(cubins)} cubins")
    return [instruction_mix(parts[str(place)]) for place in range(len(cubins))]


def _run_tool(name: str, flags: Sequence[str], cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool_path(name)), *flags, file.name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TOOL_LIMIT_S, check=False)
    if done.returncode != 0:
        raise ValueError(f"{name} failed with exit code {done.returncode}: {done.stderr.strip()[:200]}")
    return done.stdout


def parse(text: str) -> tuple[list[Instruction], dict[str, int]]:
    """Return the instructions of ``nvdisasm -c`` text in order, and the index that each label stands before."""
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        label = _LABEL.match(line)
        if label:
            labels[label[1]] = len(code)
            continue
        found = _INSTRUCTION.match(line)
        if found:
            target = _TARGET.search(found[4]) if found[3].startswith(("BRA", *_UNCOUNTABLE)) else None
            guarded = found[2] is not None or (
                found[3].startswith("BRA") and re.match(r"\s+!?U?P\d", found[4]) is not None
            )
            code.append(Instruction(found[3], guarded, target[1] if target else None))
    return code, labels


def instruction_mix(text: str) -> InstructionMix:
    """Count the instructions of ``nvdisasm -c`` text around its main loop: the only innermost loop that multiplies.

    Waiting loops (a branch back to a barrier test) inside the main loop are not counted: they turn an unknown number
    of times.
    """
    code, labels = parse(text)
    tensors = [instruction.tensor for instruction in code if instruction.tensor]
    tensor = max(set(tensors), key=tensors.count) if tensors else None
    if not tensors or any(instruction.opcode.split(".")[0] in _UNCOUNTABLE for instruction in code):
        return InstructionMix(None, None, None, tensor)
    blocks = _blocks(code, labels)
    loops = _natural_loops(blocks)
    multiplying = [loop for loop in loops if _count_tensors(code, blocks, loop)]
    innermost = [loop for loop in multiplying if not any(other < loop for other in multiplying)]
    if len(innermost) > 1:
        return InstructionMix(None, None, None, tensor)
    main = innermost[0] if innermost else frozenset()  # none: the compiler unrolled the loop, all of it runs once
    waits = frozenset[int]().union(*(loop for loop in loops if not _count_tensors(code, blocks, loop)))
    loop_code = _instructions(code, blocks, main - waits)
    fixed_code = _instructions(code, blocks, _reachable(blocks) - main - waits)
    macs = [instruction.macs for instruction in loop_code if instruction.tensor]
    loop_macs = None if None in macs else sum(value for value in macs if value is not None)
    return InstructionMix(len(fixed_code), len(loop_code), loop_macs, tensor)


def _instructions(code: Sequence[Instruction], blocks: Sequence[_Block], members: Iterable[int]) -> list[Instruction]:
    inside = [code[at] for index in members for at in range(blocks[index].first, blocks[index].last + 1)]
    return [instruction for instruction in inside if instruction.opcode != "NOP"]


def _count_tensors(code: Sequence[Instruction], blocks: Sequence[_Block], members: Iterable[int]) -> int:
    return sum(instruction.tensor is not None for instruction in _instructions(code, blocks, members))


def _blocks(code: Sequence[Instruction], labels: dict[str, int]) -> list[_Block]:
    """Cut the code where a label stands and after every jump; wire each block to where it may go on."""
    ends = {at for at, instruction in enumerate(code) if instruction.opcode.startswith(("BRA", "EXIT"))}
    starts = sorted({0, *labels.values(), *(at + 1 for at in ends)} - {len(code)})
    blocks = [_Block(first, after - 1, []) for first, after in zip(starts, [*starts[1:], len(code)], strict=True)]
    index_of = {block.first: index for index, block in enumerate(blocks)}
    for index, block in enumerate(blocks):
        last = code[block.last]
        if last.target in labels and labels[last.target] in index_of:
            block.successors.append(index_of[labels[last.target]])
        leaves = last.opcode.startswith(("BRA", "EXIT")) and not last.guarded
        if not leaves and index + 1 < len(blocks):
            block.successors.append(index + 1)
    return blocks


def _reachable(blocks: Sequence[_Block]) -> set[int]:
    seen, todo = {0}, [0]
    while todo:
        for successor in blocks[todo.pop()].successors:
            if successor not in seen:
                seen.add(successor)
                todo.append(successor)
    return seen


def _natural_loops(blocks: Sequence[_Block]) -> list[frozenset[int]]:
    """Return one set of blocks per loop head: every edge back to a block that dominates its source closes a loop."""
    reachable = _reachable(blocks)
    sources: dict[int, list[int]] = {index: [] for index in reachable}
    for index in reachable:
        for successor in blocks[index].successors:
            sources[successor].append(index)
    dominators = _dominators(sources)
    bodies: dict[int, set[int]] = {}
    for head in sorted(reachable):
        for tail in (source for source in sources[head] if head in dominators[source]):
            body = bodies.setdefault(head, {head})
            todo = [tail]
            while todo:
                index = todo.pop()
                if index not in body:
                    body.add(index)
                    todo.extend(sources[index])
    return [frozenset(body) for body in bodies.values()]


def _dominators(sources: dict[int, list[int]]) -> dict[int, set[int]]:
    every = set(sources)
    dominators = {index: {0} if index == 0 else set(every) for index in sources}
    changed = True
    while changed:
        changed = False
        for index in sorted(every - {0}):
            known = [dominators[source] for source in sources[index]]
            new = {index} | (set.intersection(*known) if known else set())
            if new != dominators[index]:
                dominators[index], changed = new, True
    return dominators


_AMD_REGISTERS = re.compile(r"^\s*\.vgpr_count:\s+(\d+)", re.MULTILINE)
_AMD_SPILLS = re.compile(r"^\s*\.vgpr_spill_count:\s+(\d+)", re.MULTILINE)


def read_amd_resources(amdgcn: str) -> tuple[int, int]:
    """Return vector registers per thread and spilled ones from AMD assembly text; zeros where it does not say."""
    registers, spills = _AMD_REGISTERS.search(amdgcn), _AMD_SPILLS.search(amdgcn)
    return int(registers[1]) if registers else 0, int(spills[1]) if spills else 0
