"""What surrounds the news in every chunk of a stream: the same for all endpoints that stream choices."""

from __future__ import annotations

from gateway.api.common.envelope import Envelope
from gateway.api.common.fan_in import Tally
from gateway.http.errors import dump_json
from gateway.http.sse import DONE, data_event, failure
from shared.errors import PeltonError


class ChunkFrame:
    """The JSON before and after a chunk's news, encoded once for each choice instead of for each token.

    A chunk is `head(index)`, the news, and `tail`.

    Args:
        kind: the chunks' `object`.
        opening: what stands between a choice's index and the news, e.g. `"text":`.
        include_usage: whether the usage comes at the end; continuous_usage: whether each chunk has what it is so far.

    Attributes:
        begun: the heads of the choices that have had a chunk.
    """

    __slots__ = ("_common", "_continuous_usage", "_include_usage", "_opening", "_tail", "_tally", "begun")

    def __init__(
        self,
        envelope: Envelope,
        tally: Tally,
        *,
        kind: str,
        opening: bytes,
        include_usage: bool,
        continuous_usage: bool = False,
    ) -> None:
        self._common = envelope.chunk(kind)
        self._tally = tally
        self._opening = opening
        self._include_usage = include_usage
        self.begun: dict[int, bytes] = {}
        self._tail = (b',"usage":null' if include_usage else b"") + b"}\n\n"
        self._continuous_usage = continuous_usage

    @property
    def tail(self) -> bytes:
        """Closes the chunk behind the list of choices; to be asked for anew for each chunk."""
        if self._continuous_usage:
            return b',"usage":' + dump_json(self._tally.usage()) + b"}\n\n"
        return self._tail

    def head(self, index: int) -> bytes:
        """The chunk up to the news of choice `index`."""
        head = self.begun.get(index)
        if head is None:
            head = b"data: " + dump_json(self._common)[:-1] + b',"choices":[{"index":%d,' % index + self._opening
            self.begun[index] = head
        return head

    def end(self) -> bytes:
        """The usage chunk, where asked for, and the end marker."""
        if not self._include_usage:
            return DONE
        return data_event({**self._common, "choices": [], "usage": self._tally.usage()}) + DONE

    def failed(self, error: PeltonError) -> bytes:
        """The error, and the end marker."""
        return failure(error)
