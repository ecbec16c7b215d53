"""What a trainer brings along: callbacks, and the paper on its model cards."""

import textwrap

# Callbacks that a trainer brings along, as `package.module:name` of a function that takes the trainer: by name, as the
# filter knows nothing of callbacks and reports.
COMPANIONS = (
    "ragen2_trl.callbacks.run_record:keep_record",
    "ragen2_trl.callbacks.cost:count_cost",
    "ragen2_trl.callbacks.training_health:keep_watch",
    "ragen2_trl.callbacks.training_progress:show_progress",
)

# On the model cards of the trainers.
PAPER = {
    "title": "RAGEN-2: Reasoning Collapse in Agentic RL",
    "id": "2604.06268",
    "citation": textwrap.dedent("""\
        @article{wang2026ragen2,
            title  = {{RAGEN-2: Reasoning Collapse in Agentic RL}},
            author = {Zihan Wang and Chi Gui and Xing Jin and Qineng Wang and Licheng Liu and Kangrui Wang and Shiqi Chen and Linjie Li and Zhengyuan Yang and Pingyue Zhang and Yiping Lu and Jiajun Wu and Li Fei-Fei and Lijuan Wang and Yejin Choi and Manling Li},
            year   = 2026,
            eprint = {arXiv:2604.06268},
        }"""),  # noqa: E501 -- BibTeX
}
