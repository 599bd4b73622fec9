"""Errors with a meaning on both sides of the socket.

Each carries the fields of OpenAI's error object (message, type, param, code) and the HTTP status of the gateway's
response. Messages are written for the client: they never contain paths, addresses or tracebacks.
"""

from __future__ import annotations

from typing import Self

EXIT_CONFIGURATION = 1
"""A ConfigurationError was printed.

Unhandled Python exceptions have the same code, so it means nothing for a child that was ready before.
"""

EXIT_REFUSED = 78
"""A ConfigurationError was printed whose cause appeared only after the start (EX_CONFIG of BSD's sysexits).

Another start would fail in the same way.
"""


class PeltonError(Exception):
    """Failure that a client may be told about.

    Args:
        message: One sentence for the client that names the parameter or the limit, with the numbers.
        param: Request field at fault (`messages[0].content`), or None.
        code: OpenAI's machine-readable code, or None.
    """

    status = 500
    type = "server_error"
    default_code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code if code is not None else self.default_code

    def untouched(self) -> Self:
        """Return the error without traceback and context.

        They would keep the raiser's frames alive, and one more each time the error is raised.
        """
        twin = type(self).__new__(type(self), *self.args)
        twin.__dict__.update(self.__dict__)
        return twin


class _ClientError(PeltonError):
    """Error that the client can correct (4xx)."""

    type = "invalid_request_error"


class _RetryLaterError(PeltonError):
    """Error after which the same request may succeed in `retry_after` seconds."""

    def __init__(self, message: str, *, retry_after: float = 1.0, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.retry_after = retry_after


class InvalidRequestError(_ClientError):
    """400: the request is invalid; repeating it gives the same answer."""

    status = 400


class ContextLengthError(InvalidRequestError):
    """400: the prompt, or prompt and completion, do not fit the model's context or the KV cache."""

    default_code = "context_length_exceeded"


class AuthenticationError(_ClientError):
    """401: the key is missing or unknown."""

    status = 401
    default_code = "invalid_api_key"


class PermissionDeniedError(_ClientError):
    """403: the scope of the key does not include the route."""

    status = 403
    default_code = "insufficient_permissions"


class NotFoundError(_ClientError):
    """404: there is no such route, model or stored object for this key."""

    status = 404
    default_code = "not_found"


class ModelNotFoundError(NotFoundError):
    """404: no worker serves the model that the request names."""

    default_code = "model_not_found"


class RequestTimeoutError(_ClientError):
    """408: headers or body did not arrive within `--body-timeout`."""

    status = 408
    default_code = "request_timeout"


class PayloadTooLargeError(_ClientError):
    """413: the body is larger than `--max-body-size`."""

    status = 413
    default_code = "request_too_large"


class UnsupportedMediaTypeError(_ClientError):
    """415: the body is not uncompressed JSON."""

    status = 415
    default_code = "unsupported_media_type"


class RateLimitError(_RetryLaterError):
    """429: an admission limit is reached. `retry_after` is in seconds."""

    status = 429
    type = "rate_limit_error"
    default_code = "rate_limit_exceeded"


class UnavailableError(_RetryLaterError):
    """503: no worker can take the request now. `retry_after` is in seconds."""

    status = 503
    type = "service_unavailable_error"
    default_code = "service_unavailable"


class WorkerLostError(UnavailableError):
    """503 before the first byte, an error event after it: the worker died or stopped answering."""

    default_code = "worker_lost"


class InternalError(PeltonError):
    """500: a fault of Pelton; the log has the details under the request id."""

    default_code = "internal_error"


class ConfigurationError(Exception):
    """Setting, file or model that cannot be used.

    The command prints the message without a traceback and exits with 1.
    """


class ModelFileError(ConfigurationError):
    """Model file that is malformed, truncated or of an unsupported kind; the message names the file and the tensor."""


class WireError(Exception):
    """Message on a socket that is malformed, too large or of another protocol version; it is counted and dropped."""
