"""Reading slices of tensors out of a directory of safetensors files."""

import hashlib
import json
from collections import OrderedDict
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from worker.models.errors import BrokenModelError, UnsupportedModelError
from worker.models.fields import Fields

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_MAPPED_FILES = 2
_SAMPLED_BYTES = 1 << 16


class Checkpoint:
    """The tensors of one model directory, read slice by slice. Use as a context manager.

    The two files read last stay memory-mapped, so a loader that goes through the layers in
    order never has more than two mapped, and a rank touches only the pages of its slices.
    """

    def __init__(self, directory: Path) -> None:
        """Raises BrokenModelError for a missing shard, UnsupportedModelError for pickle weights."""
        self.directory = directory
        self._file_of = _locate_tensors(directory)
        self._open: OrderedDict[str, tuple[Any, ExitStack]] = OrderedDict()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for _, stack in self._open.values():
            stack.close()
        self._open.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    @property
    def files(self) -> list[Path]:
        """All weight files, by name."""
        return [self.directory / file for file in sorted(set(self._file_of.values()))]

    def read(
        self, name: str, expected_shape: tuple[int, ...], where: tuple[slice, ...] = ()
    ) -> Tensor:
        """The part `where` of a tensor (all of it by default), in its stored dtype, on the CPU.

        It may be a view of the mapped file: copy it. Raises BrokenModelError where the tensor is
        absent or its whole shape is another one, UnsupportedModelError for a dtype we cannot read.
        """
        view = self._slice(name)
        shape = tuple(view.get_shape())
        if shape != expected_shape:
            raise BrokenModelError(
                f"{name} in {self.directory} has shape {list(shape)}, but config.json implies "
                f"{list(expected_shape)}."
            )
        try:
            tensor = view[where or ...]
        except SafetensorError as error:
            raise BrokenModelError(
                f"{name} in {self.directory} cannot be read: {error}."
            ) from error
        assert isinstance(tensor, Tensor)
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise UnsupportedModelError(
                f"{name} in {self.directory} is stored as {_dtype_name(tensor.dtype)}; only "
                f"float32, bfloat16 and float16 weights can be read."
            )
        return tensor

    def _slice(self, name: str) -> Any:
        file = self._file_of.get(name)
        if file is None:
            raise BrokenModelError(f"The weights in {self.directory} lack the tensor {name}.")
        if file not in self._open:
            self._map(file)
        self._open.move_to_end(file)
        try:
            return self._open[file][0].get_slice(name)
        except SafetensorError:
            raise BrokenModelError(
                f"{INDEX_FILE} in {self.directory} places {name} in {file}, which lacks it."
            ) from None

    def _map(self, file: str) -> None:
        stack = ExitStack()
        try:
            handle = stack.enter_context(_open(self.directory / file))
        except SafetensorError as error:
            raise _unreadable(self.directory / file, error) from error
        self._open[file] = (handle, stack)
        if len(self._open) > _MAPPED_FILES:
            _, (_, oldest) = self._open.popitem(last=False)
            oldest.close()


def _open(path: Path) -> Any:
    return safe_open(path, framework="pt")


def _unreadable(path: Path, error: Exception) -> BrokenModelError:
    return BrokenModelError(
        f"{path} ({path.stat().st_size} bytes) is truncated or no safetensors file ({error}); "
        f"fetch it again."
    )


def _locate_tensors(directory: Path) -> dict[str, str]:
    """The file name of each tensor, by the index or by the one file there is."""
    index = directory / INDEX_FILE
    if index.exists():
        return _read_index(directory, index)
    single = directory / SINGLE_FILE
    if single.exists():
        try:
            with _open(single) as handle:
                return dict.fromkeys(handle.keys(), SINGLE_FILE)
        except SafetensorError as error:
            raise _unreadable(single, error) from error
    pickles = sorted(path.name for pattern in _PICKLES for path in directory.glob(pattern))
    if pickles:
        raise UnsupportedModelError(
            f"{directory} has only pickle weights ({pickles[0]}), which can run code when they "
            f"are read; convert them to safetensors."
        )
    raise BrokenModelError(f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}.")


def _read_index(directory: Path, index: Path) -> dict[str, str]:
    weight_map = Fields.read(index).nested("weight_map")
    if weight_map is None:
        raise BrokenModelError(f"{index} has no field 'weight_map'.")
    file_of = weight_map.text_values()
    for file in file_of.values():
        if Path(file).name != file:
            raise BrokenModelError(
                f"{index} names the shard {file!r}, which is not a plain file name."
            )
    missing = sorted({file for file in file_of.values() if not (directory / file).exists()})
    if missing:
        raise BrokenModelError(
            f"{directory} lacks {len(missing)} of {len(set(file_of.values()))} weight files, "
            f"the first is {missing[0]}; fetch the model again."
        )
    return file_of


def digest(directory: Path) -> str:
    """A fingerprint of configuration and weights that reads little: 32 hex digits.

    It covers `config.json`, all safetensors headers (names, dtypes, shapes, offsets), file
    sizes, and the first and last 64 KiB of tensor data of each file. It tells models and
    revisions apart; it is no proof against someone who alters single weights on purpose.
    """
    fingerprint = hashlib.sha256((directory / "config.json").read_bytes())
    for path in Checkpoint(directory).files:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = file.read(8)
            header = file.read(int.from_bytes(length, "little"))
            head = file.read(_SAMPLED_BYTES)
            file.seek(max(0, size - _SAMPLED_BYTES))
            tail = file.read(_SAMPLED_BYTES)
        for part in (json.dumps([path.name, size]).encode(), length, header, head, tail):
            fingerprint.update(part)
    return fingerprint.hexdigest()[:32]


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
