"""What two processes hand one another and what they compute themselves; each saves what it saw for `test_distributed`.

python -m torch.distributed.run --standalone --nproc_per_node=2 moved_rows.py POLICY FOLDER
"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator, PartialState
from ending import end

sys.path.insert(0, str(Path(__file__).parents[1]))

from backends import COMMON
from conftest import PROMPTS
from replayed import make_trainer

from ragen2_trl.trainers import processes
from ragen2_trl.trainers.batches import take

FOUR_BY_FOUR = {**COMMON, "beta": 0.0, "max_steps": 1, "per_device_train_batch_size": 4}
# Where the kept groups (0, 2, 5, 6) are sampled: the first four prompts are those of process 0.
PLACES = {
    "two and two": ([0, 1, 2, 3, 4, 5, 6, 7], {"equal_lengths": True}),
    "three and one": ([0, 2, 5, 1, 3, 4, 6, 7], {}),
    "four and none": ([0, 2, 5, 6, 1, 3, 4, 7], {}),
}


class Sent:
    """The parcels of every exchange, with their sizes in bytes."""

    def __init__(self):
        self.parcels, self.bytes, self.exchange = [], [], processes.exchange
        processes.exchange = self

    def __call__(self, parcels, device):
        self.parcels.append(parcels)
        self.bytes.append([0 if parcel is None else len(processes._pack(parcel)) for parcel in parcels])
        return self.exchange(parcels, device)


def completions(batch) -> list[tuple[int, ...]]:
    """Those of a batch that the loss counts, without padding."""
    counted = zip(batch["completion_ids"], batch["completion_mask"].bool(), strict=True)
    silent = batch["tool_mask"].sum(dim=1) == 0 if "tool_mask" in batch else [False] * len(batch["completion_ids"])
    return [tuple(ids[mask].tolist()) for (ids, mask), skip in zip(counted, silent, strict=True) if not skip]


def moves(policy_path: str, folder: str) -> dict:
    """For each place of the kept groups: what was sent, what was trained on, by this process."""
    results = {}
    for name, (order, settings) in PLACES.items():
        sent = Sent()
        args = {**FOUR_BY_FOUR, "gradient_accumulation_steps": 4, "num_iterations": 2, "max_steps": 2}
        prompts = [PROMPTS[number] for number in order]
        trainer = make_trainer(policy_path, {**args, "output_dir": folder}, prompts, **settings)
        trained, whole, compute, generate = [], [], trainer._compute_loss, trainer._generate_and_score_completions

        def seen(model, inputs, trained=trained, compute=compute):
            trained.append(completions(inputs))
            return compute(model, inputs)

        def sampled(inputs, whole=whole, generate=generate):
            batch = generate(inputs)
            kept = batch["snr_kept"].nonzero().squeeze(1).tolist()
            own = take(batch, kept) if kept else None
            whole.append({"rows": own and completions(own), "bytes": len(processes._pack(own)) if kept else 0})
            return batch

        trainer._compute_loss, trainer._generate_and_score_completions = seen, sampled
        trainer.train()
        processes.exchange = sent.exchange
        parcels = [[parcel and completions(parcel) for parcel in parcels] for parcels in sent.parcels]
        results[name] = {"sent": parcels, "bytes": sent.bytes, "trained": trained, "kept": whole}
    return results


def refills(policy_path: str, folder: str) -> list[dict]:
    """For each generation: rows of the forward passes without gradients, and what this process holds."""
    args = {**FOUR_BY_FOUR, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 8, "max_steps": 3}
    args |= {"snr_dynamic_sampling_rounds": 4, "snr_strategy": "nonzero", "output_dir": folder}
    trainer = make_trainer(policy_path, args, PROMPTS)
    generations, forward = [], trainer._get_per_token_logps_and_entropies
    generate = trainer._generate_and_score_completions

    def counted(model, input_ids, *arguments, **keywords):
        if not torch.is_grad_enabled():
            generations[-1]["forwards"].append(len(input_ids))
        return forward(model, input_ids, *arguments, **keywords)

    def sampled(inputs):
        generations.append({"forwards": [], "carried": len(trainer._dynamic_sampling.waiting.numbers)})
        generations[-1]["carries"] = trainer._dynamic_sampling.waiting.count > 0
        batch = generate(inputs)
        waiting = trainer._dynamic_sampling.waiting
        generations[-1] |= {"waiting": len(waiting.numbers), "groups": waiting.count, "size": len(batch["prompt_ids"])}
        return batch

    trainer._get_per_token_logps_and_entropies, trainer._generate_and_score_completions = counted, sampled
    trainer.train()
    return generations


def batch_with_tiles(tiles: list[int], width: int, rows: list[int]) -> dict:
    """LLaVA-NeXT's layout: an image a row, of so many tiles, padded to the most of them; ids and pixels name rows."""
    pixels = torch.zeros(len(rows), max(tiles), 3, 2, 2)
    for number, (count, row) in enumerate(zip(tiles, rows, strict=True)):
        pixels[number, :count] = row + 1
    ids = torch.tensor(rows).unsqueeze(1).expand(-1, width) + 1
    return {
        **{
            f"{side}_{kind}": ids if kind == "ids" else torch.ones_like(ids)
            for side in ("prompt", "completion")
            for kind in ("ids", "mask")
        },
        "advantages": torch.tensor(rows, dtype=torch.float),
        "pixel_values": pixels,
        "image_sizes": torch.tensor([[count, 1] for count in tiles]),
        "num_images": [1] * len(rows),
    }


def tiles() -> list:
    """Rows of other tile counts than this process's own, handed over: (row, tiles, what they show)."""
    accelerator = Accelerator(cpu=True)
    me = accelerator.process_index
    own = batch_with_tiles([[1, 2], [4, 3]][me], 3 + me, [10 * me, 10 * me + 1])
    deal = [[[(0, 0), (1, 0)], [(0, 1), (1, 1)]]]
    held, place = processes.exchange_rows(own, [0, 1], deal, accelerator, 0, None)
    batch = take(held, [place[row] for row in deal[0][me]])
    counts = batch["image_sizes"][:, 0].tolist()
    shown = [image[:count].unique().tolist() for image, count in zip(batch["pixel_values"], counts, strict=True)]
    return list(zip(batch["advantages"].int().tolist(), counts, shown, strict=True))


def main() -> None:
    policy_path, folder = sys.argv[1:]
    state = PartialState(cpu=True, backend="gloo")
    results = {"moves": moves(policy_path, folder), "refills": refills(policy_path, folder), "tiles": tiles()}
    torch.save(results, Path(folder) / f"seen_{state.process_index}.pt")


if __name__ == "__main__":
    main()
    end()
