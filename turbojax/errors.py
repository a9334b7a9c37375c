"""Typed errors of turbojax: each names what failed, what came and what to do."""

from __future__ import annotations


class TurbojaxError(Exception):
    """Base of every error that turbojax raises on purpose."""


class ModelConfigError(TurbojaxError):
    """A field of the model's config.json is missing or cannot be honoured."""


class UnknownArchitectureError(ModelConfigError):
    """The config names an architecture that no family describes."""


class OutOfMemoryError(TurbojaxError):
    """Weights or KV pool do not fit the device; the message has the numbers."""


class ConfigError(TurbojaxError):
    """A field of EngineConfig or GenerationConfig is out of range, or contradicts another."""

    def __init__(self, owner: str, field: str, value: object, accepted: str) -> None:
        self.owner, self.field, self.value, self.accepted = owner, field, value, accepted
        super().__init__(f"{owner}.{field} is {value!r}; accepted: {accepted}")


class RequestError(TurbojaxError):
    """A request cannot be served as it is."""


class EmptyPromptError(RequestError):
    """The prompt has no tokens."""


class InvalidPromptError(RequestError):
    """The prompt is of a kind, or holds token ids, that the model cannot take."""


class PromptTooLongError(RequestError):
    """Prompt (and one token) exceed `session_len` or the whole KV pool; the message has the numbers."""


class MissingTokenizerError(RequestError):
    """Text was given, but the checkpoint has no tokenizer: token ids are needed."""


class InvalidFieldError(RequestError):
    """A field of a request that came as JSON is wrong; `param` is its path."""

    def __init__(self, param: str, message: str) -> None:
        self.param = param
        super().__init__(f"{param}: {message}")


class RequestTimeoutError(RequestError):
    """The time that a request was given is over; what it generated until then stands."""


class RowError(RequestError):
    """A row of a dataset cannot be answered: names the row, the column, what came and what is accepted."""


class QueueFullError(TurbojaxError):
    """The engine holds as many requests as it may; the message has the numbers."""


class MissingExtraError(RequestError):
    """The request needs a package that is not installed; the message names the extra."""


class GuideError(RequestError):
    """A guided request came to a place where its response format or its bad words leave no token."""


class EngineClosedError(TurbojaxError):
    """The engine was closed before the request ended."""


class EngineFailedError(TurbojaxError):
    """The engine cannot go on (a lost device, failures without end): every request has ended with this error."""


class StepFailedError(TurbojaxError):
    """A request's step failed on the device twice, the second time with no other request in it."""


class SlotError(TurbojaxError):
    """What a step was told of one slot cannot be run; the request in that slot is at fault."""

    def __init__(self, slot: int, message: str) -> None:
        self.slot = slot
        super().__init__(message)


class NumericsError(TurbojaxError):
    """The logits of a request are not finite: a NaN or an overflow in weights or activations."""


class TokenizerError(TurbojaxError):
    """A checkpoint's tokenizer is broken, or of a kind that is not supported."""


class ModelNotFoundError(TurbojaxError):
    """A model is neither a path nor a repo id that can be fetched."""


class DownloadError(TurbojaxError):
    """A model could not be fetched, or is not what was expected."""


class CalibrationError(TurbojaxError):
    """Calibration text is missing, unreadable or too short; the message has the numbers."""


class InteropError(TurbojaxError):
    """Parameters of another library cannot be taken over, or given to it, as they are; names the parameter."""


class ServerError(TurbojaxError):
    """The server cannot listen where it should, or cannot prove who it is; the message says what to change."""


class LiteError(TurbojaxError):
    """A checkpoint cannot be quantised or measured as asked: what was found, and what to do."""


class ClusterError(TurbojaxError):
    """Several processes of one engine cannot work together; names the processes and what they have."""


class CoordinatorUnreachableError(ClusterError):
    """Processes did not find each other in time: which are missing, where they were looked for, and how long."""


class ClusterMismatchError(ClusterError):
    """Processes differ in what must be the same (versions, config, model); names both values."""


class ProcessLostError(ClusterError):
    """A process of the job is gone, or went another way than the others: the job ends with it."""
