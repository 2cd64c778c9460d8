"""Why a model cannot be loaded. Every message is one sentence for the operator."""

from worker.errors import WorkerError


class ModelError(WorkerError):
    """Base of all errors raised while a model is found, read or placed."""


class ModelNotFoundError(ModelError):
    """No directory, downloaded model or hub model has this name."""


class BrokenModelError(ModelError):
    """A model directory contradicts itself or lacks a part."""


class UnsupportedModelError(ModelError):
    """A sound model, but of a kind, dtype or format that cannot run here."""
