"""Runs the PTX of a Mosaic GPU kernel in NumPy: JAX's interpreter cannot run kernels made of Ampere instructions.

`Emulator` runs one program (thread block) with all its threads in lockstep. It knows the instructions that kernels made
of `nsa_jax.ops.kernels.sm80` compile to. Any other instruction raises, and so do accesses outside of a buffer and
branches on which threads disagree. About shared memory it is stricter than a GPU:

- All bytes are NaN at first. The target of a `cp.async` is NaN until the first barrier after a wait for the copy.
- A warp that touches a word which another warp has written since the last barrier raises, and so does one that writes a
  word which another has read. The threads of one warp are always in order here.

Approximate instructions are as exact as float32, and subnormal numbers are kept. The emulator says nothing about time,
except that it counts bank conflicts.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np

WARP = 32  # threads
SHARED_BASE = 1024  # address of the first byte of shared memory
BUFFER_BITS = 40  # a global address is (1 + number of the buffer) << BUFFER_BITS, plus the number of the byte in it

ROOT = pathlib.Path(__file__).resolve().parents[2]
# In a process of its own: Mosaic GPU keeps the first GPU's settings of ptxas for as long as a process lasts. JAX takes
# every GPU that is not there for a Hopper GPU, so it is told.
COMPILE = """
import importlib, sys
from jax.experimental.mosaic.gpu import utils
from nsa_jax.aot import compile_for_gpu

utils._infer_arch = lambda: (8, 0)
test = importlib.import_module(f"tests.kernels.{sys.argv[1]}")
eval(f"compile_for_gpu({sys.argv[2]}, gpu='a100-80gb')")
"""

KINDS = {"b": "u", "u": "u", "s": "i"}
TYPES = {f"{kind}{bits}": np.dtype(f"{KINDS[kind]}{bits // 8}") for kind in KINDS for bits in (16, 32, 64)}
TYPES |= {"f32": np.dtype(np.float32), "pred": np.dtype(bool)}
ROUNDING = {"rn", "approx", "ftz", "lo"}  # parts of a name that change nothing here


def _wide(a, b):
    """The whole product of integers of 16 or 32 bits."""
    return np.multiply(a, b, dtype=f"{a.dtype.kind}{2 * a.itemsize}")


def _two_bfloat16(high, low):
    """Two float32 numbers as bfloat16 in one word."""
    return np.stack([low, high], -1).astype(ml_dtypes.bfloat16).view(np.uint32)[:, 0]


# What an instruction computes, by its name without its last type, which is that of all sources, and `ROUNDING`.
ARITHMETIC: dict[str, Callable] = {
    **dict.fromkeys(("mov", "cvta.to.global", "ld.param", "ld.param::entry"), np.copy),
    "selp": lambda a, b, chosen: np.where(chosen, a, b),
    **{"add": np.add, "sub": np.subtract, "mul": np.multiply, "mad": lambda a, b, c: a * b + c},
    **{"mul.wide": _wide, "mul.hi": lambda a, b: (_wide(a, b) >> 8 * a.itemsize).astype(a.dtype)},
    **{"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert, "neg": np.negative},
    **{"shl": np.left_shift, "shr": np.right_shift, "min": np.fmin, "max": np.fmax},
    **{"ex2": np.exp2, "lg2": np.log2, "rcp": np.reciprocal, "div": np.divide},
    "fma": lambda a, b, c: (a.astype(np.float64) * b + c).astype(np.float32),
    **{"setp.eq": np.equal, "setp.ne": lambda a, b: (a < b) | (a > b), "setp.lt": np.less, "setp.le": np.less_equal},
    **{"setp.gt": np.greater, "setp.ge": np.greater_equal, "cvt.bf16x2": _two_bfloat16},
    "setp.eq.and": lambda a, b, too: (a == b) & too,
    "setp.ne.and": lambda a, b, too: (a != b) & too,
    "setp.lt.and": lambda a, b, too: (a < b) & too,
    **{f"cvt.{x}": functools.partial(np.ndarray.astype, dtype=TYPES[x]) for x in ("u16", "u32", "u64", "s32", "s64")},
}


def compiled(kernel: str, module: str, folder: pathlib.Path) -> str:
    """The PTX of a kernel, compiled for an A100.

    Args:
      kernel: a Python expression of the kernel and the shapes of what it takes, for `compile_for_gpu`.
      module: of tests.kernels, which `kernel` calls `test`.
      folder: an empty one, where Mosaic GPU leaves what it makes.
    """
    settings = {"MOSAIC_GPU_DUMP_TO": str(folder), "JAX_ENABLE_COMPILATION_CACHE": "false"}
    command = [sys.executable, "-c", COMPILE, module, kernel]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    (path,) = folder.glob("*.ptx")
    return path.read_text()


@dataclasses.dataclass(frozen=True)
class Instruction:
    """An instruction, which has an effect where the predicate register `guard` is `guard_value`, or without one."""

    place: str  # "line 12: " and the text
    name: str  # with all its parts, as in "add.rn.f32"
    operands: list[str]  # registers in braces and an address in brackets are one
    guard: str | None
    guard_value: bool


def parse(text: str) -> tuple[list[Instruction], dict[str, int], str]:
    """The instructions of a kernel, the number of the instruction behind each label, and the text before the kernel."""
    head, body = re.split(r"^\{$", text, maxsplit=1, flags=re.MULTILINE)
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for number, line in enumerate(body.split("\n}\n")[0].split("\n"), head.count("\n") + 1):
        for part in line.partition("//")[0].split(";"):
            part = part.strip().removeprefix("{").strip()  # inline PTX may be a scope of its own
            if label := re.fullmatch(r"(\$\w+):", part):
                labels[label[1]] = len(instructions)
            elif found := re.fullmatch(r"(?:@(!?)(%?\w+)\s+)?([a-z][\w.:]*)\s*(.*)", part):
                operands = [x.strip() for x in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", found[4])]
                instructions.append(Instruction(f"line {number}: {part}", found[3], operands, found[2], not found[1]))
            elif part not in ("", "}") and part[0] != ".":
                raise SyntaxError(f"line {number}: {part}")
    return instructions, labels, head


class Emulator:
    """One program of a kernel.

    Attributes:
      threads: of the program.
      bank_conflicts: how often threads that access shared memory at once met in a bank, at different places.
    """

    def __init__(self, text: str, program: Sequence[int], buffers: Sequence[np.ndarray], shared_bytes: int):
        """Prepares a program.

        Args:
          text: PTX with one kernel.
          program: x, y and z in the grid.
          buffers: arrays in global memory, one for each parameter, uint8 [bytes]; a program changes them in place.
          shared_bytes: size of shared memory in bytes.
        """
        self._instructions, self._labels, head = parse(text)
        self.threads = int(re.findall(r"\.maxntid (\d+)", head)[0])
        self.bank_conflicts = 0
        self._buffers = buffers
        self._shared = np.full(shared_bytes, 0xFF, np.uint8)
        self._copies: list[tuple[np.ndarray, np.ndarray]] = []  # of the open group: where to, and bytes
        self._groups: list[list] = []  # closed, and not waited for
        self._arrived: list[tuple[np.ndarray, np.ndarray]] = []  # waited for, and not visible before a barrier
        self._active = self._same(True, bool)  # for which threads the instruction at hand has an effect
        self._registers = {f"%ctaid.{axis}": self._same(x, np.uint32) for axis, x in zip("xyz", program, strict=True)}
        self._registers["%tid.x"] = np.arange(self.threads, dtype=np.uint32)
        self._registers["__dynamic_shmem__0"] = self._same(SHARED_BASE, np.uint64)
        for number, (name, _) in enumerate(zip(re.findall(r"\w+_param_\d+", head), buffers, strict=True), 1):
            self._registers[f"[{name}]"] = self._same(number << BUFFER_BITS, np.uint64)
        self._forget_accesses()

    def run(self) -> None:
        """Runs the program to its end.

        Raises:
          RuntimeError: an instruction is unknown or does what it must not; the message has its line.
        """
        at = 0
        while (instruction := self._instructions[at]).name != "ret":
            try:
                with np.errstate(all="ignore"):
                    at = self._labels[instruction.operands[0]] if self._branches(instruction) else at + 1
            except Exception as problem:
                raise RuntimeError(f"{instruction.place}: {type(problem).__name__}: {problem}") from problem

    def _branches(self, instruction: Instruction) -> bool:
        """Executes an instruction, or tells that it is a branch to take."""
        self._active = self._same(True, bool)
        if instruction.guard is not None:
            self._active = self._registers[instruction.guard] == instruction.guard_value
        if self._active.any() != self._active.all() and not re.match(r"st\.|cp\.async\.cg", instruction.name):
            raise ValueError("only some of the threads do this")
        if not self._active.any() or instruction.name in ("bra", "bra.uni"):
            return bool(self._active.any())
        find(instruction.name)(self, *instruction.operands)
        return False

    # Registers

    def _same(self, number: int, dtype) -> np.ndarray:
        return np.full(self.threads, number, dtype)

    def _read(self, operand: str, dtype) -> np.ndarray:
        """A register or a constant as [threads] of a type; predicates stay bool."""
        if operand in self._registers:
            value = self._registers[operand]
        elif operand.startswith("0f"):
            value = self._same(int(operand[2:], 16), np.uint32)
        else:
            value = self._same(int(operand, 0) % 2**64, np.uint64)
        if value.dtype == bool:
            return value
        size = np.dtype(dtype).itemsize  # shifts by a 32-bit number and constants have another
        return (value if value.itemsize == size else value.view(f"u{value.itemsize}").astype(f"u{size}")).view(dtype)

    def _words(self, operand: str) -> np.ndarray:
        """The registers of an operand as uint32 [threads, registers]."""
        return np.stack([self._read(x, np.uint32) for x in _names(operand)], -1)

    def _set_words(self, operand: str, words: np.ndarray) -> None:
        """Sets as many registers as there are words per thread, of any 32-bit type."""
        words = np.ascontiguousarray(words.reshape(self.threads, -1).T)
        self._registers.update(zip(_names(operand), words, strict=True))

    def _compute(self, target: str, *sources: str, operation: Callable, dtype: np.dtype) -> None:
        self._registers[target] = operation(*(self._read(x, dtype) for x in sources))

    # Memory

    def _place(self, operand: str, size: int, writes: bool, space: str) -> tuple[np.ndarray, np.ndarray]:
        """The memory of "[register + offset]", and numbers of the bytes from there, [active threads, size]."""
        register, _, offset = operand.strip("[]").partition("+")
        first = self._read(register.strip(), np.uint64).view(np.int64)[self._active] + int(offset or 0)
        if space == "shared":
            memory, first = self._shared, first - SHARED_BASE
        else:
            number, first = np.divmod(first, 1 << BUFFER_BITS)
            if number.min() != number.max() or not 1 <= number[0] <= len(self._buffers):
                raise IndexError(f"no buffer, or several: {np.unique(number - 1)}")
            memory = self._buffers[number[0] - 1]
        if first.min() < 0 or first.max() + size > memory.size or (first % size).any():
            raise IndexError(f"bytes {first.min()} to {first.max() + size} of {memory.size} {space}, {size} aligned")
        if space == "shared":
            self._note_accesses(first, size, writes)
        return memory, first[:, None] + np.arange(size)

    def _note_accesses(self, first: np.ndarray, size: int, writes: bool) -> None:
        """Looks for bank conflicts and races of accesses to `size` bytes of shared memory per active thread."""
        at_once = 128 // size  # threads that all 32 banks of 4 bytes serve together
        together = first[: first.size // at_once * at_once].reshape(-1, at_once) // size
        places, banks = (int((np.diff(np.sort(x)) != 0).sum()) for x in (together, together % at_once))
        self.bank_conflicts += places - banks
        warp = 1 << (np.flatnonzero(self._active) // WARP)[:, None]
        words = first[:, None] // 4 + np.arange(size // 4)
        np.bitwise_or.at(self._writers if writes else self._readers, words, warp)
        if ((self._writers[words] | (self._readers[words] if writes else 0)) & ~warp).any():
            raise RuntimeError("a race of two warps for a word of shared memory")

    def _forget_accesses(self) -> None:
        self._readers, self._writers = np.zeros((2, self._shared.size // 4), np.int64)  # of each word, a bit per warp

    def _load(self, targets: str, address: str, space: str) -> None:
        memory, places = self._place(address, 4 * len(_names(targets)), False, space)
        self._set_words(targets, memory[places].view(np.uint32))

    def _store(self, address: str, sources: str, space: str) -> None:
        words = self._words(sources)[self._active]
        memory, places = self._place(address, 4 * words.shape[1], True, space)
        memory[places] = words.view(np.uint8)

    def _start_copy(self, target: str, source: str, size: str) -> None:
        memory, places = self._place(source, int(size), False, "global")
        shared, targets = self._place(target, int(size), True, "shared")
        self._copies.append((targets, memory[places]))
        shared[targets] = 0xFF

    def _close_group(self) -> None:
        self._groups.append(self._copies)
        self._copies = []

    def _wait(self, may_be_open: str) -> None:
        while len(self._groups) > int(may_be_open):
            self._arrived += self._groups.pop(0)

    def _meet(self, barrier: str, threads: str | None = None) -> None:
        if threads is not None and int(threads) != self.threads:
            raise NotImplementedError("a barrier of some warps")
        for places, content in self._arrived:
            self._shared[places] = content
        self._arrived = []
        self._forget_accesses()

    # Warps

    def _exchange(self, target: str, source: str, distance: str, clamp: str, mask: str) -> None:
        if (clamp, mask) != ("31", "-1"):
            raise NotImplementedError("an exchange in a part of a warp")
        self._registers[target] = self._read(source, np.uint32)[np.arange(self.threads) ^ int(distance)]

    def _load_matrices(self, targets: str, address: str, transposed: str | None) -> None:
        """Thread 8 j + r of a warp names row r of matrix j; thread 4 r + c gets its columns 2 c and 2 c + 1."""
        memory, places = self._place(address, 16, False, "shared")
        matrices = memory[places].view(np.uint16).reshape(-1, 4, 8, 8)  # [warps, matrices, rows, columns]
        matrices = np.ascontiguousarray(matrices.swapaxes(2, 3)) if transposed else matrices
        self._set_words(targets, matrices.view(np.uint32).transpose(0, 2, 3, 1))

    def _multiply(self, targets: str, *sources: str) -> None:
        """Adds the product of bfloat16 [16, 16] and [16, 8] to float32 [16, 8], in each warp.

        The registers of thread 4 r + c, in their order, are
        - of the left matrix: columns 2 c and 2 c + 1 of row r, then of row r + 8, then both 8 columns to the right;
        - of the right matrix: rows 2 c and 2 c + 1 of column r, then 8 rows below;
        - of the sum: columns 2 c and 2 c + 1 of row r, then of row r + 8.
        """
        left, right, total = (self._words(x) for x in sources)
        left, right = (x.view(ml_dtypes.bfloat16).astype(np.float32) for x in (left, right))
        left = left.reshape(-1, 8, 4, 2, 2, 2).transpose(0, 4, 1, 3, 2, 5).reshape(-1, 16, 16)
        right = right.reshape(-1, 8, 4, 2, 2).transpose(0, 3, 2, 4, 1).reshape(-1, 16, 8)
        total = total.view(np.float32).reshape(-1, 8, 4, 2, 2).transpose(0, 3, 1, 2, 4).reshape(-1, 16, 8)
        self._set_words(targets, (total + left @ right).reshape(-1, 2, 8, 4, 2).transpose(0, 2, 3, 1, 4))


def _names(operand: str) -> list[str]:
    """The registers of an operand: several in braces, or one."""
    return [x.strip() for x in operand.strip("{}").split(",")]


# What else instructions do, by a pattern of the name; it takes the operands and then what the pattern captures.
OTHERS: dict[str, Callable] = {
    r"ld\.(shared|global)(?:\.v[24])?\.[buf]32": Emulator._load,
    r"st\.(shared|global)(?:\.v[24])?\.[buf]32": Emulator._store,
    r"cp\.async\.cg\.shared\.global": Emulator._start_copy,
    r"cp\.async\.commit_group": Emulator._close_group,
    r"cp\.async\.wait_group": Emulator._wait,
    r"bar\.sync": Emulator._meet,
    r"bar\.warp\.sync": lambda emulator, mask: None,
    r"shfl\.sync\.bfly\.b32": Emulator._exchange,
    r"ldmatrix\.sync\.aligned\.m8n8\.x4(\.trans)?\.shared\.b16": Emulator._load_matrices,
    r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.bf16\.bf16\.f32": Emulator._multiply,
}


@functools.cache
def find(name: str) -> Callable[..., None]:
    """What an instruction does, by its name: a function of the emulator and the operands."""
    for pattern, method in OTHERS.items():
        if found := re.fullmatch(pattern, name):
            return lambda emulator, *operands: method(emulator, *operands, *found.groups())
    *parts, kind = name.split(".")
    operation = ARITHMETIC.get(".".join(x for x in parts if x not in ROUNDING))
    if operation is None or kind not in TYPES:
        raise NotImplementedError("unknown instruction")
    return functools.partial(Emulator._compute, operation=operation, dtype=TYPES[kind])
