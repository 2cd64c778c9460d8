"""What a request does to the logits before a token is chosen: masks, biases, penalties.

Order: allowed ids, bad words, min tokens, logit bias, repetition, frequency, presence. Every
function changes the logits in place, and row k only by what belongs to row k.
"""

import numpy as np
import torch
from torch import Tensor

from worker.sampling_table import Constraints, SamplingTable, Settings
from worker.sequence_table import Int64s, SequenceTable

_OFF = float("-inf")


def adjust(
    logits_kV: Tensor,
    row_k: Int64s,
    settings_k: Settings,
    sampling: SamplingTable,
    table: SequenceTable,
) -> None:
    """Apply everything but temperature and truncation."""
    for k in np.flatnonzero(settings_k["constrained"]):
        row = int(row_k[k])
        _constrain(
            logits_kV[k], sampling.constraints[row], row, int(settings_k["min_tokens"][k]), table
        )
    _penalise(logits_kV, row_k, settings_k, table)


def _constrain(
    logits_V: Tensor, constraints: Constraints, row: int, min_tokens: int, table: SequenceTable
) -> None:
    prompt, known = int(table.num_prompt_tokens[row]), int(table.num_tokens[row])
    if constraints.allowed_ids is not None:
        allowed = logits_V[constraints.allowed_ids]
        logits_V.fill_(_OFF)
        logits_V[constraints.allowed_ids] = allowed
    if constraints.bad_words:
        output = table.token_ids[row, prompt:known]
        for word in constraints.bad_words:
            begun = len(word) - 1
            if begun <= len(output) and (output[len(output) - begun :] == word[:-1]).all():
                logits_V[int(word[-1])] = _OFF
    if constraints.stopping_ids is not None and known - prompt < min_tokens:
        logits_V[constraints.stopping_ids] = _OFF
    if constraints.bias_ids is not None:
        logits_V[constraints.bias_ids] += constraints.bias


def _penalise(logits_kV: Tensor, row_k: Int64s, settings_k: Settings, table: SequenceTable) -> None:
    vocab_size = logits_kV.shape[1]
    flat = logits_kV.view(-1)  # where (k, token) is k * V + token
    known_k, prompt_k = table.num_tokens[row_k], table.num_prompt_tokens[row_k]

    # Each token of a sequence names one logit. A token that occurs twice reads the same value
    # twice and writes the same result twice, so nothing needs to be made unique.
    k_p = np.flatnonzero(settings_k["repetition_penalty"] != 1)
    if len(k_p):
        at, which = _occurrences(table, row_k[k_p], np.zeros(len(k_p), np.int64), known_k[k_p])
        index = _on(logits_kV, k_p[which] * vocab_size + at)
        factor = _on(logits_kV, settings_k["repetition_penalty"][k_p][which])
        value = flat[index]
        flat[index] = torch.where(value > 0, value / factor, value * factor)
    k_p = np.flatnonzero(
        (settings_k["frequency_penalty"] != 0) | (settings_k["presence_penalty"] != 0)
    )
    if len(k_p):
        at, which = _occurrences(table, row_k[k_p], prompt_k[k_p], known_k[k_p])
        index = _on(logits_kV, k_p[which] * vocab_size + at)
        # The addends of one logit are all equal, so their order does not show in the sum.
        flat.index_add_(0, index, -_on(logits_kV, settings_k["frequency_penalty"][k_p][which]))
        flat[index] = flat[index] - _on(logits_kV, settings_k["presence_penalty"][k_p][which])


def _occurrences(
    table: SequenceTable, row_p: Int64s, begin_p: Int64s, end_p: Int64s
) -> tuple[Int64s, Int64s]:
    """The tokens [begin, end) of each row, flat, and for each which of the p rows it is of."""
    length_p = end_p - begin_p
    which = np.repeat(np.arange(len(row_p)), length_p)
    first_p = np.cumsum(length_p) - length_p
    position = np.arange(len(which)) - first_p[which] + begin_p[which]
    return table.token_ids[row_p[which], position].astype(np.int64), which


def _on(like: Tensor, array: np.ndarray) -> Tensor:
    return torch.from_numpy(array).to(like.device)
