"""More kernels where a user's limits leave none of the first round: the rest of the space, what takes least of them first.

How many registers a kernel takes only the compiler knows. So limits are refused when everything was compiled that could
keep to them, and not because the few candidates of a first round do not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest

from moetune.engine.backend import WAIT_S, Kernel
from moetune.engine.budget import Deadline
from moetune.engine.events import Emit, Warned
from moetune.engine.within import Within
from moetune.errors import RunError, UsageError
from moetune.space import counts_text, shared_heights, telling
from moetune_kernels.config import Role

AHEAD = 60  # kernels under way: a few per compile process, so that none idles while what ended is looked at


@dataclass
class Fitting:
    """The search for kernels inside the limits, by compiling alone.

    Args:
        within: the limits, and what is compiled.
        tokens: the token counts of the sweep.
        deadline: when it ends whatever was found.
    """

    within: Within
    tokens: Sequence[int]
    deadline: Deadline
    _rest: list[Kernel] = field(default_factory=list[Kernel], init=False)

    def run(self, emit: Emit) -> bool:
        """Compile until every token count has kernels inside, or none is left to compile for those that have not.

        Where all have them already that is nothing. Returns False where the deadline ended it.

        Raises:
            UsageError: nothing keeps to the limits.
            RunError: nothing was found until the deadline.
        """
        unserved = self.within.unserved(self.tokens)
        ended = True
        if unserved:
            self._rest = self._untried()
            if self._rest:
                emit(Warned(f"{self._missing} at {counts_text(unserved)} tokens: smaller kernels are compiled"))
            ended = self._compile()
        self.within.report(emit)
        reason = self.within.why_nothing(self.tokens)
        if reason is not None and ended:
            raise UsageError(f"{reason}; widen the limits")
        if reason is not None:
            raise RunError(f"{reason}, and the budget left {len(self._rest):,} others untried; widen either")
        return ended

    @property
    def _missing(self) -> str:
        limits = next(iter(self.within.spaces.values())).limits
        return f"none of the first kernels is inside {limits.text}"

    def _compile(self) -> bool:
        bench = self.within.bench
        while unserved := self.within.unserved(self.tokens):
            wanted = self._wanted(unserved)
            waiting = sum((role, config.block_m) in wanted for role, config in bench.under_way)
            if waiting <= AHEAD // 2:
                fresh = self._next(wanted, AHEAD - waiting)
                bench.request(fresh)
                if not fresh and not waiting:
                    return True
            if self.deadline.passed:
                bench.give_up_compiling()
                return False
            bench.collect(min(WAIT_S, max(self.deadline.left_s, 0.0)))
        return True

    def _wanted(self, unserved: Sequence[int]) -> set[tuple[Role, int]]:
        """Return the tile heights that would serve one of these token counts, by the GEMM that has no kernel there."""
        heights = {height for count in unserved for height in shared_heights(self.within.spaces, count)}
        return {(role, height) for role in Role for height in heights - self.within.kept(role)}

    def _next(self, wanted: set[tuple[Role, int]], count: int) -> list[Kernel]:
        """Take the next ``count`` kernels of the wanted heights out of the rest."""
        taken: list[Kernel] = []
        left: list[Kernel] = []
        for role, config in self._rest:
            (taken if len(taken) < count and (role, config.block_m) in wanted else left).append((role, config))
        self._rest = left
        return taken

    def _untried(self) -> list[Kernel]:
        """Return what was not compiled, the roles by turns."""
        by_role = [self._of(role) for role in Role]
        return [kernel for kernel in chain.from_iterable(zip_longest(*by_role)) if kernel is not None]

    def _of(self, role: Role) -> Iterator[Kernel]:
        bench = self.within.bench
        kernels = ((role, config) for config in telling(self.within.spaces[role]))
        return (kernel for kernel in kernels if bench.is_wanted(kernel))
