"""Warm start: supervised fine-tuning on demonstrations, so that a model solves some tasks before RL begins.

    ragen2-trl warm-start --recipe warm_start_tiny
    ragen2-trl warm-start --model Qwen/Qwen2.5-0.5B-Instruct --env_args size=5

Takes the arguments below together with those of `trl.SFTConfig` and `trl.ModelConfig`.
"""

from typing import Any

from datasets import Dataset, concatenate_datasets
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerFast, PrinterCallback, set_seed
from trl import ModelConfig, SFTConfig, SFTTrainer, get_peft_config, get_quantization_config

from ragen2_trl.callbacks import TrainingProgressCallback
from ragen2_trl.cli.arguments import WarmStartArguments, parse_env_args
from ragen2_trl.cli.console import make_console
from ragen2_trl.cli.models import check_model, loading, options_of_model
from ragen2_trl.cli.typed import checked_input, parse, parser_of
from ragen2_trl.envs import make_env
from ragen2_trl.redaction import with_hidden_credentials
from ragen2_trl.tiny import resolve_model
from ragen2_trl.tiny.build import build_model, build_tokenizer


def main(args: list[str] | None = None) -> None:
    """Trains on demonstrations and saves model and tokenizer to `output_dir`."""
    parser = parser_of("warm-start", WarmStartArguments, SFTConfig, ModelConfig)
    script_args, training_args, model_args = parse(parser, args)
    console = make_console()
    set_seed(training_args.seed)
    with checked_input():
        model, tokenizer = _model_and_tokenizer(script_args, training_args, model_args)
        demonstrations = _demonstrations(script_args)
    # With several turns the completion holds the environment's messages, too.
    training_args.assistant_only_loss |= any(
        not isinstance(completion, str) and len(completion) > 1 for completion in demonstrations["completion"]
    )
    training_args.disable_tqdm = True  # the progress of this command takes its place
    with loading(script_args.model):
        trainer = SFTTrainer(
            model=model,
            args=training_args,
            train_dataset=demonstrations,
            processing_class=tokenizer,
            peft_config=get_peft_config(model_args),
            quantization_config=get_quantization_config(model_args),
        )
    trainer.args = with_hidden_credentials(trainer.args)  # which checkpoints hold
    trainer.remove_callback(PrinterCallback)
    progress = TrainingProgressCallback(trainer, console, quiet=True)
    trainer.add_callback(progress)
    try:
        trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    finally:
        progress.close()
    _save(trainer, training_args.output_dir)


def _demonstrations(script_args: WarmStartArguments) -> Dataset:
    """Solved tasks, as many of each kind."""
    count, seed = script_args.num_demonstrations, script_args.demonstrations_seed
    tasks = [script_args.make_env().demonstrations(count, seed, script_args.data)]
    for task in script_args.mix:
        name, *options = task.split()
        tasks.append(make_env(name, **parse_env_args(options)).demonstrations(count, seed))
    return concatenate_datasets(tasks)


def _model_and_tokenizer(
    script_args: WarmStartArguments, training_args: SFTConfig, model_args: ModelConfig
) -> tuple[str | PreTrainedModel, PreTrainedTokenizerFast | None]:
    """The model to train; a path is left to the trainer to load, with the options of `model_args`."""
    name = check_model(script_args.model)
    if script_args.from_scratch:
        if name != "tiny":
            raise ValueError(f"from_scratch must be False for every model but `tiny`, got {name!r}")
        return build_model(training_args.seed), build_tokenizer()
    options_of_model(training_args, model_args)
    return resolve_model(name), None


def _save(trainer: SFTTrainer, output_dir: str) -> None:
    """Saves weights and tokenizer, and nothing that belongs to this run or this machine (as `save_model` would)."""
    state_dict = trainer.accelerator.get_state_dict(trainer.model)  # gathers sharded weights: on every process
    if trainer.is_world_process_zero():
        trainer.accelerator.unwrap_model(trainer.model).save_pretrained(output_dir, state_dict=state_dict)
        tokenizer: Any = trainer.processing_class
        tokenizer.save_pretrained(output_dir)
        Console().print(f"Model and tokenizer saved to [bold]{output_dir}[/bold]")
