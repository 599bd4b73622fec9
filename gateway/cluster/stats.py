"""Counters of a gateway's connections to workers."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(slots=True)
class LinkCounters:
    """Errors on one link. Each counted message was dropped, except those after a gap.

    Attributes:
        malformed: Messages that cannot be decoded, have a wrong number of frames, or are unexpected.
        wrong_epoch: Messages of another process of the worker.
        repeated: Step messages whose number was already received.
        sequence_gaps: Gaps in the numbers of step messages; each failed the streams of the link.
        unknown_ids: Outputs of requests that this gateway does not have, or no longer.
        send_failures: Messages that were not sent because the queue to the worker was full.
    """

    malformed: int = 0
    wrong_epoch: int = 0
    repeated: int = 0
    sequence_gaps: int = 0
    unknown_ids: int = 0
    send_failures: int = 0

    def add(self, other: LinkCounters) -> None:
        """Add the counts of a lost link."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    @property
    def wire_errors(self) -> int:
        """Messages that were dropped as faulty, and gaps where messages were missing."""
        return self.malformed + self.wrong_epoch + self.repeated + self.sequence_gaps
