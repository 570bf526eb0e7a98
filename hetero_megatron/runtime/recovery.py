"""What a recovery was about and where its time went, for the log."""

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from hetero_megatron.cluster import ranges_text
from hetero_megatron.runtime.membership import View

ASKED = "another strategy was asked for"
"""What is said of a change of strategy that nobody was lost or joined for."""


@dataclass
class Laps:
    """Seconds by phase; each lap goes on where the one before ended."""

    seconds: dict[str, float]
    at: float = field(default_factory=time.perf_counter)

    def lap(self, name: str) -> None:
        """The phase `name` ends now."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self.at
        self.at = now


@dataclass(frozen=True, slots=True)
class Recovery:
    """What a recovery was about and took.

    Attributes:
        iteration: the last step that counts.
        seconds: by phase: detect, agree, complete, plan, groups, specialize, move; and redo, until the first step
            after it has been committed, once that is known.
        planned: what there is to say of the strategy, such as why the planner was not asked.
        lost_state: what no survivor holds, when the run had to go back to a checkpoint.
        completed: whether this rank made the last update afterwards.
        moved_bytes: of master weights and moments, sent by all ranks together.
    """

    view: View
    noticed: str
    iteration: int
    seconds: Mapping[str, float]
    planned: str = ""
    lost_state: str = ""
    completed: bool = False
    moved_bytes: int = 0

    def __str__(self) -> str:
        """The line for the log."""
        lost = "; ".join(self.view.lost[rank] for rank in sorted(self.view.lost))
        if not lost:
            lost = (
                f"rank {ranges_text(self.view.joined)} asked to join"
                if self.view.joined
                else ASKED
                if self.planned == ASKED
                else "connections were lost"
            )
        joined = f" ({ranges_text(self.view.joined)} new)" if self.view.joined else ""
        noticed = f"; noticed by {self.noticed}" if self.noticed else ""
        back = f"; {self.lost_state}: back to the last checkpoint" if self.lost_state else ""
        planned = f"; {self.planned}" if self.planned not in ("", ASKED) else ""
        return (
            f"{lost}{noticed}{back}; going on with ranks {ranges_text(self.view.ranks)}{joined} after "
            f"iteration {self.iteration}, in {self._took('redo'):.3f} s ({self._parts('redo')}), "
            f"{self.moved_bytes / 1e6:,.2f} MB moved{planned}"
        )

    @property
    def end(self) -> str:
        """The line for the log when the first step after it is committed: the whole of its time."""
        since = (
            "the ranks stopped" if self.planned == ASKED and not self.view.lost else "the loss was noticed"
        )
        return (
            f"recovered: iteration {self.iteration + 1} is committed {self._took():.3f} s after {since} "
            f"({self._parts()})"
        )

    def _took(self, but: str = "") -> float:
        return sum(took for phase, took in self.seconds.items() if phase != but)

    def _parts(self, but: str = "") -> str:
        return ", ".join(f"{phase} {took:.3f}" for phase, took in self.seconds.items() if phase != but)


def in_short(error: RuntimeError) -> str:
    """`Connection reset by peer`: without the place in the library, the addresses, and the advice."""
    text = (str(error).splitlines() or [type(error).__name__])[0]
    return re.sub(r"\[[^\]]*\](:\d+|:)? *", "", text.partition(". This is")[0]).strip()[:120]
