"""Why a model cannot be loaded. Every message is one sentence for the operator."""


class ModelError(Exception):
    """Base of all errors raised while a model is found, read or placed."""


class ModelNotFound(ModelError):
    """No directory, downloaded model or hub model has this name."""


class BrokenModel(ModelError):
    """A model directory contradicts itself or lacks a part."""


class UnsupportedModel(ModelError):
    """A sound model, but of a kind, dtype or format that cannot run here."""


class UnsupportedSplit(ModelError):
    """Tensor or pipeline parallelism that does not divide the model."""
