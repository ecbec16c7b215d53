"""The proxies of mutual information as a metric of Hugging Face's `evaluate`."""

from collections.abc import Sequence
from typing import Any

import evaluate
import torch
from datasets import Features, Value
from datasets import Sequence as SequenceFeature

from ragen2_trl.instrument.information import information_metrics

DESCRIPTION = """\
How much the reasoning of a language model depends on its prompt: retrieval accuracy, mutual information and entropies
from the log-probabilities of every reasoning under every prompt (RAGEN-2, arXiv 2604.06268, Eq. 1 and Table 1).
"""

CITATION = """\
@misc{ragen2,
  title = {RAGEN-2: Reasoning Collapse in Agentic RL},
  author = {Wang, Zihan and Gui, Chi and Jin, Xing and Wang, Qineng and Liu, Licheng and others},
  year = {2026},
  eprint = {2604.06268},
  archivePrefix = {arXiv}
}
"""

INPUTS_DESCRIPTION = """
Args:
    cross_logps: for each of B reasoning traces a row of N log-probabilities in nats, summed over its tokens: one for
        each prompt. From `ragen2_trl.cross_score`.
    lengths: for each trace its number of tokens.
    prompt_index: for each trace the column, from 0, of the prompt that it was sampled from.
    prompt_class: N ids, equal for identical prompts. Default: all differ. Only in `compute`.
Returns:
    The dictionary of `ragen2_trl.information_metrics`: `retrieval_accuracy`, `mi_seq` and others.
"""


class ReasoningInformation(evaluate.Metric):
    """[`~ragen2_trl.information_metrics`] for `evaluate.combine`, `evaluate.save` and whoever speaks `evaluate`.

    Takes what `evaluate.Metric` takes, loads nothing from the Hub, and gives what `information_metrics` gives. Next to
    metrics of other inputs in `evaluate.combine`, use `add_batch` and then `compute()`: `compute` with inputs hands
    each metric those of the others.

    Raises:
        ValueError: from `compute`, where `information_metrics` raises it, and for rows of unequal length.

    >>> metric = ReasoningInformation(keep_in_memory=True)
    >>> matrix = [[-1.0, -50.0], [-50.0, -1.0]]
    >>> metrics = metric.compute(cross_logps=matrix, lengths=[5, 5], prompt_index=[0, 1])
    >>> round(metrics["mi_seq"], 4), metrics["retrieval_accuracy"], metrics["retrieval_chance"]
    (0.6931, 1.0, 0.5)
    """

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation=CITATION,
            inputs_description=INPUTS_DESCRIPTION,
            features=Features(
                {
                    "cross_logps": SequenceFeature(Value("float64")),
                    "lengths": Value("int64"),
                    "prompt_index": Value("int64"),
                }
            ),
            reference_urls=["https://arxiv.org/abs/2604.06268"],
        )

    def _compute(
        self,
        *,
        cross_logps: Sequence[Sequence[float]],
        lengths: Sequence[int],
        prompt_index: Sequence[int],
        prompt_class: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> dict[str, float]:
        if kwargs:
            raise ValueError(f"compute takes prompt_class beside its inputs, got {sorted(kwargs)}")
        widths = sorted({len(row) for row in cross_logps})
        if len(widths) > 1:
            raise ValueError(f"cross_logps must have rows of equal length, got lengths {widths}")
        return information_metrics(
            torch.tensor(cross_logps, dtype=torch.float64),
            torch.tensor(lengths),
            torch.tensor(prompt_index),
            prompt_class=None if prompt_class is None else torch.as_tensor(prompt_class),
        )
