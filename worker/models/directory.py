"""From the name of a model to a local directory. No torch."""

from pathlib import Path




def models_cache() -> Path:
    """Where pulled models lie: `$XDG_CACHE_HOME/palimpsest/models`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "palimpsest/models"
