"""The critic of PPO: the value of each state in which a token is chosen.

It is a submodule of the policy, so that whatever shards, wraps or saves the policy's parameters does so with the
critic's, and one optimizer has a group for each. It runs inside the policy's own forward pass, when somebody listens:
generation and log-probabilities pass it by.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedModel

NAME = "critic"  # of the submodule, and so the prefix of its parameters
FOLDER = "_critic"  # beside the policy's weights; the underscore keeps it out of the policy's uploads
WEIGHTS = "critic.safetensors"


class Critic(nn.Module):
    """A scalar head on the last hidden state of a backbone of its own, or of the policy.

    Args:
        hidden_size: Of that state.
        backbone: A model whose output has a `last_hidden_state`; `None` for the policy's.
    """

    def __init__(self, hidden_size: int, backbone: nn.Module | None = None):
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(hidden_size, 1)
        nn.init.zeros_(self.head.weight)  # no opinion at first: the first advantages are the returns
        nn.init.zeros_(self.head.bias)
        self._heard: list[Tensor] | None = None

    def forward(self, hidden: Tensor | None = None, **inputs: Any) -> Tensor:
        """(rows, width) float32 values, of hidden states (rows, width, hidden_size) or of a backbone's inputs."""
        if self.backbone is not None:
            hidden = self.backbone(**inputs, use_cache=False).last_hidden_state
        assert hidden is not None
        values: Tensor = self.head(hidden.to(self.head.weight.dtype)).squeeze(-1)
        return values.float()

    @contextmanager
    def listening(self) -> Iterator[list[Tensor]]:
        """Gives a list to which each forward pass of the policy adds its (rows, prompt + T) values."""
        heard: list[Tensor] = []
        self._heard = heard
        try:
            yield heard
        finally:
            self._heard = None

    def join(self, policy: nn.Module) -> None:
        """Become a submodule of the policy, and listen to its forward passes."""
        policy.add_module(NAME, self)
        body: Any = policy.get_base_model() if isinstance(policy, PeftModel) else policy
        body.base_model.register_forward_hook(self._hear_policy)
        if self.backbone is not None:
            policy.register_forward_pre_hook(self._hear_inputs, with_kwargs=True)

    def _hear_policy(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self._heard is not None:
            if self.backbone is None:
                self._heard.append(self(output.last_hidden_state))
            output.last_hidden_state = _Beside.apply(output.last_hidden_state, self._heard[-1])
        return output

    def _hear_inputs(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if self._heard is not None:
            if kwargs.get("pixel_values") is not None:
                raise ValueError("value_head='separate' cannot see pixel_values; allowed with images: shared.")
            self._heard.append(self(**{key: kwargs[key] for key in ("input_ids", "attention_mask")}))

    def save(self, folder: Path, weights: dict[str, Tensor]) -> None:
        """Write the weights that are trained, and what the backbone is."""
        folder.mkdir(parents=True, exist_ok=True)
        trained = {name for name, parameter in self.named_parameters() if parameter.requires_grad}
        tensors = {name: tensor.contiguous().cpu() for name, tensor in weights.items() if name in trained}
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        body = self.backbone.get_base_model() if isinstance(self.backbone, PeftModel) else self.backbone
        if isinstance(body, PreTrainedModel):
            body.config.save_pretrained(folder)

    def load(self, folder: Path) -> None:
        """Take the weights that `save` wrote.

        Raises:
            ValueError: if they are of another critic.
        """
        trained = {name for name, parameter in self.named_parameters() if parameter.requires_grad}
        weights = load_file(folder / WEIGHTS)
        if weights.keys() != trained:
            raise ValueError(
                f"{folder / WEIGHTS} holds {len(weights)} weights, among them {sorted(weights.keys() ^ trained)[:3]} "
                "that this critic does not have, or it has and the file does not; allowed: the same value_head, "
                "value_model and adapters as when it was saved."
            )
        self.load_state_dict(weights, strict=False)


class _Beside(torch.autograd.Function):
    """The hidden states as they are, with the values behind them: DDP takes parameters for unused that it does not
    find behind the policy's output, and values leave the forward pass beside it."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, values: Tensor) -> Tensor:
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def make_critic(policy: nn.Module, value_model: Any) -> Critic:
    """The critic of a policy, not joined to it yet.

    Args:
        policy: Of the trainer, with its adapters if it has any.
        value_model: `None` for a head on the policy's hidden state; else the backbone, or its path or Hub id, or the
            folder of a critic that was saved.
    """
    if value_model is None:
        return Critic(_hidden_size(policy))
    if isinstance(value_model, nn.Module):
        backbone = value_model
    elif (saved := Path(value_model) / WEIGHTS).exists():
        backbone = AutoModel.from_config(AutoConfig.from_pretrained(value_model))
        critic = Critic(_hidden_size(backbone), backbone)
        critic.load(saved.parent)
        return critic
    else:
        backbone = AutoModel.from_pretrained(value_model, dtype=next(policy.parameters()).dtype)
    return Critic(_hidden_size(backbone), backbone)


def _hidden_size(model: Any) -> int:
    return int(model.config.get_text_config().hidden_size)


def split_weights(weights: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The policy's own weights, and the critic's under the names that it has for them."""
    prefix = f"{NAME}."
    policy = {name: tensor for name, tensor in weights.items() if not name.startswith(prefix)}
    return policy, {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


@contextmanager
def without_critic(policy: nn.Module) -> Iterator[None]:
    """The policy as others know it, where its parameters are listed: for checkpoints, for inference engines."""
    critic = policy._modules.pop(NAME)
    try:
        yield
    finally:
        policy._modules[NAME] = critic
