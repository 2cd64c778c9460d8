"""The one error of this package."""


class ConfigError(Exception):
    """A setting that cannot be used, told in sentences that a user can act on.

    Holds nothing but its message, so that it survives pickling. The values of secret settings
    never appear in it.
    """
