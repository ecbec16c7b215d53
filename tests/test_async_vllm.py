"""The asynchronous trainer against a real vLLM server, with TRL's own sync of a LoRA adapter.

`make test-vllm` runs this in an environment of its own.
"""

import json
import os
import socket
import subprocess
import sys
import urllib.request
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed here; `make test-vllm` runs these with its build for CPUs")

import async_cpu
from async_cpu import ASYNC_RUN, TEXT, parity, prompts_with_dead
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from ragen2_trl import MutualInformationCallback, SNRFilteredAsyncGRPOConfig, SNRFilteredAsyncGRPOTrainer
from ragen2_trl.tiny import TINY_MODEL_PATH

pytestmark = pytest.mark.vllm

STEPS = 20
# The server's command looks for a distribution of this name, and tells a CPU by the version.
METADATA = "Metadata-Version: 2.1\nName: vllm\nVersion: {}+cpu\n"
SERVER = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """A server of the tiny model with room for the adapters of four versions and two more."""
    folder, port = tmp_path_factory.mktemp("server"), free_port()
    release = version("vllm-cpu")
    told = folder / f"vllm-{release}+cpu.dist-info"
    told.mkdir()
    (told / "METADATA").write_text(METADATA.format(release))
    environment = {
        **os.environ,
        **SERVER,
        "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]),
    }
    command = [str(Path(sys.executable).parent / "vllm"), "serve", str(TINY_MODEL_PATH), "--host", "127.0.0.1"]
    command += ["--port", str(port), "--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "16"]
    command += ["--enforce-eager", "--enable-lora", "--max-lora-rank", "8", "--max-loras", "6"]
    command += ["--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"]
    with open(folder / "log", "w") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    yield f"http://127.0.0.1:{port}"
    server.terminate()
    try:
        server.wait(60)
    except subprocess.TimeoutExpired:  # its engine may be in the middle of a step
        server.kill()
        server.wait(60)


def ask(url, **request):
    body = json.dumps({"temperature": 1.0, **request}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]


def logps(model, prompt, answer):
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
    return torch.tensor([logits[len(prompt) - 1 + place, token] for place, token in enumerate(answer)])


def test_a_real_server_samples_with_the_adapter_that_the_filter_trains(url, tmp_path, monkeypatch):
    async_cpu.patch(monkeypatch.setattr)
    monkeypatch.setattr(async_cpu.async_grpo_trainer, "AsyncRolloutWorker", async_cpu.ProcessWorker)
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL_PATH)
    tokenizer.response_template = TEXT
    settings = {**ASYNC_RUN, "max_steps": STEPS, "max_staleness": 4, "learning_rate": 2e-3}
    settings |= {
        "vllm_server_base_url": url,
        "snr_strategy": "nonzero",
        "max_completion_length": 24,
        "vllm_server_timeout": 600,
    }
    trainer = SNRFilteredAsyncGRPOTrainer(
        str(TINY_MODEL_PATH),
        parity,
        SNRFilteredAsyncGRPOConfig(str(tmp_path), **settings),
        prompts_with_dead(),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "up_proj"]),
    )
    assert trainer._lora_sync
    trainer.add_callback(MutualInformationCallback(trainer, every=5))
    trainer.train()

    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert len(rows) == STEPS and any("mi/first_turn/retrieval_accuracy" in row for row in rows)
    assert max(row["sample/staleness_max"] for row in rows) <= 4
    assert 0 < sum(row["snr/kept_fraction"] for row in rows if "snr/kept_fraction" in row) / STEPS < 0.8

    newest = f"trl-policy-v{trainer.model_version}"
    prompt = tokenizer.apply_chat_template(
        prompts_with_dead()[8]["prompt"], add_generation_prompt=True, return_dict=False
    )
    answer = ask(url, model=newest, prompt=prompt, max_tokens=16, return_token_ids=True, logprobs=0)["token_ids"]
    told = ask(url, model=newest, prompt=prompt + answer, max_tokens=1, prompt_logprobs=0)["prompt_logprobs"]
    of_server = torch.tensor([next(iter(one.values()))["logprob"] for one in told[len(prompt) :]])
    base = AutoModelForCausalLM.from_pretrained(TINY_MODEL_PATH, dtype=torch.float32)
    of_base = logps(base, prompt, answer)
    of_trainer = logps(PeftModel.from_pretrained(base, os.path.join(trainer._lora_dir, newest)), prompt, answer)
    torch.testing.assert_close(of_server, of_trainer, rtol=0, atol=1e-3)
    assert (of_trainer - of_base).abs().max() > 0.1
