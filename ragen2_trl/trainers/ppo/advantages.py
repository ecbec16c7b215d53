"""What proximal policy optimisation computes from rewards and values: token rewards, advantages, losses.

Pure functions on the completions of one process. Shapes: rows = completions, T = padded completion width. `mask`
(rows, T), bool or integer, marks the *own* tokens, those that the model itself wrote. Tokens of the environment and
padding carry neither reward nor value and are stepped over: the successor of an own token is the next own token of its
row. A *turn* is a maximal run of own tokens. `values[i, t]` is the value of the state in which token t is chosen,
before it is written. Functions that take a mask never read what stands outside it, NaN included.

Rewards and advantages are computed in float64 on the CPU, without gradients, and returned in float32 on the device of
the input. The two losses at the end are differentiable, float32, and leave masking and averaging to the caller.

    >>> mask = torch.tensor([[1, 1, 0, 1]])  # two turns; the third token came from the environment
    >>> rewards = token_rewards(torch.tensor([3.0]), mask, turn_rewards=[[1.0]])
    >>> rewards.tolist()
    [[0.0, 1.0, 0.0, 2.0]]
    >>> advantages, returns = gae(rewards, torch.tensor([[0.5, 1.0, 9.0, 1.5]]), mask, gamma=1.0, lam=0.5)
    >>> advantages.tolist()  # 2 - 1.5 = 0.5; 1 + 1.5 - 1 + 0.5 x 0.5 = 1.75; 1 - 0.5 + 0.5 x 1.75 = 1.375
    [[1.375, 1.75, 0.0, 0.5]]
    >>> returns.tolist()
    [[1.875, 2.75, 0.0, 2.0]]
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ragen2_trl.filtering import ZERO_STD


def token_rewards(
    returns: Tensor, mask: Tensor, turn_rewards: Sequence[Sequence[float] | None] | None = None
) -> Tensor:
    """Put each episode's return on its tokens, so that the token rewards of a row sum to its return.

    The reward of turn t lands on the last own token of the t-th turn. The rest of the return, with rewards of turns
    that the completion no longer holds, lands on the last own token of the row.

    Args:
        returns: (rows,) return of each episode. A row whose return is not finite was not scored and gets zeros.
        mask: (rows, T), own tokens. A row without any gets zeros.
        turn_rewards: for each row its per-turn rewards, or None for a row without; None when no row has any.

    Returns:
        (rows, T) float32 on the device of the returns.

    Raises:
        ValueError: when `turn_rewards` has not one entry per row, or a turn reward of a scored row is not finite.

    >>> mask = torch.tensor([[1, 0, 1], [1, 1, 0]])
    >>> token_rewards(torch.tensor([1.0, 1.0]), mask, [[0.25, 0.5, 0.75], None]).tolist()
    [[0.25, 0.0, 0.75], [0.0, 1.0, 0.0]]
    """
    if turn_rewards is not None and len(turn_rewards) != len(returns):
        raise ValueError(f"turn_rewards has {len(turn_rewards)} rows; allowed: {len(returns)}, one for each return.")
    own = mask.detach().cpu().bool()
    scored = returns.detach().cpu().isfinite()
    placed = torch.zeros(own.shape, dtype=torch.float64)
    turn_ends = _turn_ends(own)
    for row, per_turn in enumerate(turn_rewards or ()):
        if per_turn is None or not scored[row]:
            continue
        if not all(map(math.isfinite, per_turn)):
            raise ValueError(f"turn_rewards[{row}]={list(per_turn)!r} is not supported; allowed: finite numbers.")
        ends = turn_ends[row].nonzero().squeeze(1)[: len(per_turn)]
        placed[row, ends] = torch.tensor(per_turn[: len(ends)], dtype=torch.float64)
    remainder = _exact(returns).where(scored, 0.0) - placed.sum(dim=1)
    last_own = own & (own.flip(1).cumsum(dim=1).flip(1) == 1)  # no own token after it
    return (placed + last_own * remainder.unsqueeze(1)).float().to(returns.device)


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over own tokens (Schulman et al. 2016, arXiv 1506.02438, eq. 16).

    With t' the next own token of the row, and V(t') = A(t') = 0 after the last one:

        delta(t) = r(t) + gamma V(t') - V(t)
        A(t) = delta(t) + gamma lam A(t')

    Args:
        rewards, values, mask: (rows, T) each; the values are those at the time of the rollout.
        gamma: discount from one own token to the next.
        lam: 0 trusts the values (one-step errors), 1 the rewards (whole returns).

    Returns:
        Advantages A and returns A + V, the targets of the value head; both (rows, T), 0 outside the mask.
    """
    own = mask.detach().cpu().bool()
    exact_rewards, exact_values = _exact(rewards), _exact(values)
    advantages = torch.zeros_like(exact_values)
    next_value = next_advantage = torch.zeros(len(own), dtype=torch.float64)  # (rows,)
    for t in reversed(range(own.shape[1])):
        is_own = own[:, t]
        delta = exact_rewards[:, t] + gamma * next_value - exact_values[:, t]
        advantage = delta + gamma * lam * next_advantage
        advantages[:, t] = advantage.where(is_own, 0.0)
        next_value = exact_values[:, t].where(is_own, next_value)
        next_advantage = advantage.where(is_own, next_advantage)
    returns = (advantages + exact_values).where(own, 0.0)
    return advantages.float().to(values.device), returns.float().to(values.device)


def masked_moments(values: Tensor, mask: Tensor) -> Tensor:
    """Sum, sum of squares and count of the values inside the mask: (rows, T) -> (3,) float64 on their device.

    Moments of several processes, or micro-batches, add up: sum them before `whiten`.
    """
    inside = values.detach().double().where(mask.bool(), 0.0)
    return torch.stack([inside.sum(), inside.square().sum(), mask.bool().sum().double()])


def whiten(values: Tensor, mask: Tensor, moments: Tensor) -> Tensor:
    """Shift and scale to zero mean and unit variance: (values - mean) / sqrt(variance + 1e-8), as verl does.

    Args:
        values, mask: (rows, T) each.
        moments: (3,) from `masked_moments`, summed over processes. The variance divides by count - 1; it is 0 with
            fewer than two tokens.

    Returns:
        (rows, T) float32, 0 outside the mask (verl leaves the shifted zeros there).

    >>> mask = torch.tensor([[1, 1, 0, 1]])
    >>> advantages = torch.tensor([[1.0, 2.0, 9.0, 3.0]])
    >>> whiten(advantages, mask, masked_moments(advantages, mask)).tolist()
    [[-1.0, 0.0, 0.0, 1.0]]
    """
    mean, variance = _mean_and_variance(moments)
    whitened = (values.detach().double() - mean) / (variance + 1e-8).sqrt()
    return whitened.where(mask.bool(), 0.0).float()


def explained_variance(error_moments: Tensor, return_moments: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns), how much of the returns the values foresee, for the logs; at most 1.

    Takes (3,) `masked_moments` of returns - values and of the returns, summed over processes. NaN when the returns do
    not vary (standard deviation at most 1e-6): nothing is there to explain.
    """
    variance = _mean_and_variance(return_moments)[1].item()
    return 1 - _mean_and_variance(error_moments)[1].item() / variance if variance > ZERO_STD**2 else math.nan


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """0.5 max[(V - R)^2, (clamp(V, V_old - clip, V_old + clip) - R)^2]: (rows, T) each -> (rows, T).

    0.5 (V - R)^2 when `clip` is None. Only `values` receive a gradient.

    >>> values, old = torch.tensor([[1.0, 1.0]]), torch.zeros(1, 2)
    >>> clipped_value_loss(values, old, torch.tensor([[2.0, 0.0]]), clip=0.5).tolist()
    [[1.125, 0.5]]
    """
    values, old_values, returns = values.float(), old_values.detach().float(), returns.detach().float()
    loss = 0.5 * (values - returns).square()
    if clip is None:
        return loss
    clipped = values.clamp(old_values - clip, old_values + clip)
    return torch.maximum(loss, 0.5 * (clipped - returns).square())


def _turn_ends(own: Tensor) -> Tensor:
    """Which own tokens are the last of their turn. (rows, T) bool -> (rows, T) bool."""
    followed = torch.zeros_like(own)
    followed[:, :-1] = own[:, 1:]
    return own & ~followed


def _mean_and_variance(moments: Tensor) -> tuple[Tensor, Tensor]:
    total, squares, count = moments.double().unbind()
    mean = total / count  # NaN without any token, when there is nothing to whiten either
    return mean, ((squares - total * mean) / (count - 1).clamp(min=1)).clamp(min=0)


def _exact(values: Tensor) -> Tensor:
    return values.detach().cpu().double()
