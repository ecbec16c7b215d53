"""What is measured of the same completions in each scope, and under which keys it is logged."""

from typing import Any

from ragen2_trl.instrument.diagnosis import (
    REFERENCE_SCOPE,
    Measurement,
    combine,
    measure_first_turn,
    measure_trajectory,
    measure_trajectory_reference,
)

# Of a trajectory's single positions, only what tells them apart.
PER_POSITION = ("retrieval_accuracy", "retrieval_chance", "mi_seq", "conditional_entropy_token", "num_completions")
# Of contexts without the model's own words, what means something.
WITHOUT_OWN_WORDS = ("retrieval_accuracy", "retrieval_chance", "num_completions")


def measure_scope(scope: str, *arguments: Any) -> tuple[dict[str, float], dict[str, float], Measurement | None]:
    """Measures one scope.

    Args:
        scope: `first_turn`, `trajectory` or `trajectory_reference`.
        *arguments: of `measure_first_turn` and its siblings.

    Returns:
        The metrics of the scope, further ones of its parts by their names within the scope, and the measurement where
        it is of first turns.

    Raises:
        NotMeasurableError: Where there is nothing to measure.
    """
    if scope == REFERENCE_SCOPE:
        return measure_trajectory_reference(*arguments).metrics, {}, None
    if scope == "first_turn":
        measurement = measure_first_turn(*arguments)
        return measurement.metrics, {}, measurement
    by_position = measure_trajectory(*arguments)
    parts = {
        f"turn_{position + 1}/{key}": measurement.metrics[key]
        for position, measurement in by_position.items()
        for key in PER_POSITION
    }
    retold = [one.without_own_words for one in by_position.values() if one.without_own_words]
    if retold:
        without = combine(retold)
        parts |= {f"without_own_words/{name}": without[name] for name in WITHOUT_OWN_WORDS}
    return combine(list(by_position.values())), parts, None
