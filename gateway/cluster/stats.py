"""What the gateway counts about its connections to workers."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(slots=True)
class LinkCounters:
    """What went wrong on one link; each message counted here was dropped, except those after a gap.

    Attributes:
        malformed: messages that are none, of a wrong number of frames, or not expected.
        wrong_epoch: messages of another life of the worker.
        repeated: step messages with a number that was had before.
        sequence_gaps: how often step messages were missing; the streams of the link failed.
        unknown_ids: outputs of requests that are not, or no longer, waited for.
        send_failures: messages that found the queue to the worker full.
    """

    malformed: int = 0
    wrong_epoch: int = 0
    repeated: int = 0
    sequence_gaps: int = 0
    unknown_ids: int = 0
    send_failures: int = 0

    def add(self, other: LinkCounters) -> None:
        """Adds the counts of a link that is gone."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    @property
    def wire_errors(self) -> int:
        """Messages that were dropped because something was wrong with them, and gaps where some were missing."""
        return self.malformed + self.wrong_epoch + self.repeated + self.sequence_gaps
