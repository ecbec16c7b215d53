"""TRL's asynchronous trainer without a GPU: a server in place of vLLM, and patches of what a CPU stops at in TRL."""

import json
import queue
import random
import threading
import types
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch
from conftest import RUN
from datasets import Dataset
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoTokenizer
from trl.experimental.async_grpo import AsyncGRPOConfig, async_grpo_trainer, async_rollout_worker, packing

from ragen2_trl import SNRFilteredAsyncGRPOConfig, SNRFilteredAsyncGRPOTrainer

TEXT = {"defaults": {"role": "assistant"}, "fields": {"content": {"content": "text"}}}  # a response template
ASYNC_RUN = {
    **{name: value for name, value in RUN.items() if name != "max_completion_length"},
    "per_device_train_batch_size": 16,
    "max_completion_length": 12,
    "token_budget": 0,
    "dtype": "float32",
    "max_staleness": 1000,
    "max_inflight_tasks": 16,
    "queue_maxsize": 64,
    "learning_rate": 1e-3,
}


def attention_by_segment(query, key, value, starts_q, starts_k, *_, softmax_scale=None, **__):
    """FlashAttention's varlen function, segment by segment."""
    parts = []
    for i in range(len(starts_q) - 1):
        q = query[starts_q[i] : starts_q[i + 1]].transpose(0, 1)
        k, v = (one[starts_k[i] : starts_k[i + 1]].transpose(0, 1) for one in (key, value))
        k, v = (one.repeat_interleave(q.shape[0] // one.shape[0], 0) for one in (k, v))
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        parts.append(scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=softmax_scale).transpose(0, 1))
    return torch.cat(parts)


def patch(setattr=setattr):
    """What stops a CPU: a look for vLLM, a table of GPUs, and a kernel."""
    kernel = types.SimpleNamespace(flash_attn_varlen_func=attention_by_segment)
    setattr(packing, "_flash_attn", lambda: kernel)
    setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *args, **kwargs: None)
    setattr(async_rollout_worker, "is_vllm_available", lambda *args, **kwargs: True)


@pytest.fixture
def on_a_cpu(monkeypatch):
    """TRL's worker samples in a thread."""
    patch(monkeypatch.setattr)
    monkeypatch.setattr(async_grpo_trainer, "AsyncRolloutWorker", ThreadWorker)


class Server:
    """Answers completions with random tokens, or by a model; knows what it was asked for.

    Args:
        model: samples, if there is one.
    """

    def __init__(self, model=None, vocabulary=200):
        self.model, self.vocabulary = model, vocabulary
        self.random, self.lock, self.open = random.Random(0), threading.Lock(), threading.Event()
        self.open.set()
        self.asked = Counter()  # completions by prompt
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args):
                pass

            def say(self, answer):
                body = json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_GET(self):
                self.say({"data": [{"max_model_len": 256}]} if self.path.startswith("/v1/models") else {})

            def do_POST(self):
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.open.wait()
                ids, logps = outer.complete(request["prompt"], request["max_tokens"])
                self.say({"choices": [{"token_ids": ids, "logprobs": {"token_logprobs": logps}}]})

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    @property
    def completions(self):
        return sum(self.asked.values())

    def complete(self, prompt, most):
        with self.lock:
            self.asked[tuple(prompt)] += 1
            if self.model is not None:
                return self.sample(prompt, most)
            ids = [self.random.randrange(self.vocabulary) for _ in range(self.random.randint(3, most))]
            return ids, [-5.3] * len(ids)

    @torch.no_grad()
    def sample(self, prompt, most):
        out = self.model.generate(
            torch.tensor([prompt]), max_new_tokens=most, do_sample=True, top_k=0, output_logits=True,
            return_dict_in_generate=True, pad_token_id=0,
        )  # fmt: skip
        ids = out.sequences[0, len(prompt) :].tolist()
        logps = torch.cat(out.logits).float().log_softmax(-1)
        return ids, [logps[number, token].item() for number, token in enumerate(ids)]


class Transfer:
    """Weights go to the server's model, if it has one."""

    def __init__(self, server):
        self.server = server

    def init_weight_transfer(self):
        pass

    def pause(self):
        self.server.open.clear()

    def send_weights(self, weights):
        with self.server.lock, torch.no_grad():
            own = {} if self.server.model is None else dict(self.server.model.named_parameters())
            for name, tensor in weights:
                if name in own:
                    own[name].copy_(tensor)

    def resume(self):
        self.server.open.set()

    def destroy(self):
        pass


class ThreadWorker(async_rollout_worker.AsyncRolloutWorker):
    """TRL's worker, whose loop runs in a thread in place of a process: it starts at once."""

    def __init__(self, queue_maxsize=0, **kwargs):
        super().__init__(queue_maxsize=queue_maxsize, **kwargs)
        self.rollout_buffer, self.metrics_queue = queue.Queue(queue_maxsize), queue.Queue()

    def start(self):
        self._heartbeat_value.value = 1e12  # never stale
        self._stop_event_mp.clear()
        loop = self._loop_cls(
            **self._loop_kwargs,
            rollout_buffer=self.rollout_buffer,
            model_version_value=self._model_version_value,
            heartbeat_value=types.SimpleNamespace(value=0.0),
            failed_event=self._failed_event,
            exception_info_queue=self._exception_info_queue,
            metrics_queue=self.metrics_queue,
        )
        async_rollout_worker._spawn_stop_watcher(loop, self._stop_event_mp)
        self.thread = threading.Thread(target=loop.run, daemon=True)
        self.thread.start()

    def stop(self):
        self._stop_event_mp.set()
        self.thread.join(10)


def text_of(completion):
    return completion[0]["content"]


def parity(completions, dead, **columns):
    """Live prompts: whether a text has an even number of characters. Dead ones: 0."""
    return [0.0 if one else float(len(text_of(text)) % 2 == 0) for text, one in zip(completions, dead, strict=True)]


def prompts_with_dead(number=40, dead=7):
    """Prompts of which `dead` of 10 never earn anything."""
    rows = [
        {"prompt": [{"role": "user", "content": f"Use {i} and {i + 3}"}], "dead": i % 10 < dead, "number": i}
        for i in range(number)
    ]
    return Dataset.from_list(rows)


def make_async(path, folder, server, plain=False, dataset=None, reward=parity, **settings):
    """A trainer whose default worker asks the server, made by TRL's own constructor."""
    given = {
        name: settings.pop(name)
        for name in ("selector", "rollout_worker", "environment_factory", "callbacks", "tools")
        if name in settings
    }
    trainer_class, config = (
        (async_grpo_trainer.AsyncGRPOTrainer, AsyncGRPOConfig)
        if plain
        else (SNRFilteredAsyncGRPOTrainer, SNRFilteredAsyncGRPOConfig)
    )
    args = config(str(folder), **{**ASYNC_RUN, "vllm_server_base_url": server.url, **settings})
    dataset = prompts_with_dead() if dataset is None else dataset
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.response_template = TEXT
    return trainer_class(
        path, reward, args, dataset, processing_class=tokenizer, weight_transfer=Transfer(server), **given
    )


class StubWorker:
    """A worker of somebody else's, which sends the rows that it is given, and waits for nothing."""

    def __init__(self, rows=(), healthy=True):
        self.rollout_buffer, self.metrics_queue = queue.Queue(), queue.Queue()
        self.rows, self.healthy, self.versions = list(rows), healthy, []

    def start(self):
        for row in self.rows:
            self.rollout_buffer.put(row)

    def stop(self):
        pass

    def update_model_version(self, version):
        self.versions.append(version)

    def check_health(self, stale_after_s):
        if not self.healthy:
            raise RuntimeError("Rollout worker child has failed; see chained exception.")


def rows_of_group(number, rewards, version=0, length=6, prompt=4, forks=None):
    """TRL's rows of a group: one for each reward, or as many as `forks` says."""
    rewards = np.array(rewards, dtype=float)
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-8)
    draw = np.random.default_rng(number)
    rows = []
    for member, (reward, advantage) in enumerate(zip(rewards, advantages, strict=True)):
        for _ in range(1 if forks is None else forks[member]):
            size = prompt + length + member
            rows.append(
                async_rollout_worker.RolloutSample(
                    prompt=[{"role": "user", "content": str(number)}],
                    completion=[{"role": "assistant", "content": str(member)}],
                    input_ids=np.r_[np.arange(prompt) + number % 50, draw.integers(100, 190, size - prompt)],
                    completion_mask=np.array([0] * prompt + [1] * (size - prompt)),
                    old_log_probs=np.array([0.0] * prompt + [-5.3] * (size - prompt), dtype=np.float32),
                    advantage=float(advantage),
                    model_version=version,
                    group_id=number,
                    metrics={
                        "reward": float(reward),
                        "reward_std": float(rewards.std()),
                        "rewards/parity": float(reward),
                    },
                )
            )
    return rows


LIVE, DEAD = [1, 0, 0, 1], [0, 0, 0, 0]


def send(groups, **settings):
    """A worker that sends groups of these rewards."""
    return StubWorker([row for number, one in enumerate(groups) for row in rows_of_group(number, one, **settings)])


def make_sent(path, folder, sent, **settings):
    """A trainer for one step of two groups, unless told otherwise; `sent` are groups, rows or a worker."""
    if not isinstance(sent, StubWorker):
        sent = send(sent) if isinstance(sent[0], list) else StubWorker(sent)
    settings = {"per_device_train_batch_size": 8, "snr_strategy": "nonzero", "max_steps": 1, **settings}
    if settings.get("plain") or "selector" in settings:
        del settings["snr_strategy"]
    return make_async(path, folder, Server(), rollout_worker=sent, **settings)


def note_inputs(trainer):
    """What the loss is computed of, as it comes."""
    seen, compute_loss = [], trainer.compute_loss

    def note(model, inputs, *args, **kwargs):
        seen.append({name: value.clone() for name, value in inputs.items()})
        return compute_loss(model, inputs, *args, **kwargs)

    trainer.compute_loss = note
    return seen


def note_decisions(trainer):
    """Groups, and what becomes of each: its selection and the rows that are trained."""
    seen, decide = [], trainer._decide

    def note(group):
        seen.append((group, *decide(group)))
        return seen[-1][1:]

    trainer._decide = note
    return seen


class ProcessWorker(async_rollout_worker.AsyncRolloutWorker):
    """TRL's worker in its spawned process, whose queues wait for nobody at the end of a test."""

    def stop(self):
        super().stop()
        for one in (self.rollout_buffer, self.metrics_queue, self._exception_info_queue):
            one.cancel_join_thread()
