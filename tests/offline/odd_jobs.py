"""Jobs of the compile pool that no kernel would be: held up until they are told, or with a cubin that cannot be read."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from moetune.measure.unread import Unread
from moetune.outcome import Compiled

BARE = Compiled(registers=40, spills=0, smem_bytes=0, block_size=128)


@dataclass(frozen=True)
class Held:
    """Writes its name to a log, and ends once the file ``until`` exists."""

    log: str
    name: str
    until: str

    def compile(self) -> str:
        descriptor = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, f"{self.name}\n".encode())
        os.close(descriptor)
        while not Path(self.until).exists():
            time.sleep(0.01)
        return self.name


@dataclass(frozen=True)
class Slept:
    """Takes a while and no CPU time."""

    seconds: float

    def compile(self) -> float:
        time.sleep(self.seconds)
        return self.seconds


@dataclass(frozen=True)
class Unreadable:
    """A compiled kernel whose cubin is at ``path``."""

    path: str

    def compile(self) -> Unread:
        return Unread(compiled=BARE, path=self.path, entry="00" * 32, macs_per_step=None)
