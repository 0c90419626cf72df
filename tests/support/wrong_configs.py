"""Wrong configs: a wrong value for every key, overrides by hand, and files; each with words of the error."""

import typing
from collections.abc import Iterator

from areal_rloo.config import Config
from areal_rloo.config.typed import hints_of


def of_every_key() -> Iterator[tuple[str, str]]:
    """Give an override with a value of a wrong type for every key that takes no text, and its key."""
    for key, hint in hints_of(Config).items():
        if "[" in key or key.startswith(("data.train.", "data.eval.")):
            continue  # of a source or a list of sources: by hand
        text = hint is str or (str in typing.get_args(hint) and typing.get_origin(hint) is not dict)
        yield (f"{key}.zzz=1" if text else f"{key}=[zzz, [1]]"), key


BY_HAND = [
    # texts that YAML would guess at, and numbers out of any range
    ("run.seed=2024-13-45", "run.seed: expected int, got str; the value is '2024-13-45'"),
    ("run.seed=0x_", "run.seed: expected int"),
    (f"run.seed={'1' * 5000}", "run.seed: expected int"),
    ("run.seed=!!int abc", "expected no tag, got tag:yaml.org,2002:int"),
    ("run.seed=-1", "run.seed: expected int >= 0"),
    (f"run.seed={2**70}", "run.seed: "),
    ("run.seed=1.5", "run.seed: expected int, got float"),
    ("run.seed=true", "run.seed: expected int, got bool"),
    ("run.seed=", "run.seed: expected int, got null; an empty value is null"),
    ("run.seed=null", "run.seed: expected int, got null"),
    (f"run.seed={'[' * 3000}", "expected at most 32 levels"),
    ("run.seed=&a [*a]", "the alias '*a' names no anchor that ends before it"),
    ("run={seed: 1, seed: 2}", "the key 'seed' is given twice; leave one of them out"),
    ("learner.optimizer.learning_rate=1e999", "learner.optimizer.learning_rate: expected a finite number"),
    ("learner.optimizer.learning_rate=1e300", "learner.optimizer.learning_rate: expected float <= 1e+30"),
    ("algorithm.rewards.scale=1e300", "algorithm.rewards.scale: expected float <= "),
    # lists and mappings
    (
        "learner.optimizer.betas=0.9",
        "learner.optimizer.betas: expected a list of 2 numbers, got float; the value is 0.9",
    ),
    (
        "learner.optimizer.betas=[0.9]",
        "learner.optimizer.betas: expected a list of 2 numbers, got 1; the value is [0.9]",
    ),
    (
        "algorithm.rewards.clip=1",
        "algorithm.rewards.clip: expected a list of 2 numbers or null, got int; the value is 1",
    ),
    ("rollout.sampling=5", "rollout.sampling: expected a mapping of keys, got int; the value is 5"),
    ("data.eval=5", "data.eval: expected a mapping of keys or a list or null, got int; the value is 5"),
    # timeouts
    ("wire.heartbeat_s=1e300", "wire.heartbeat_s: expected float <= 2592000.0"),
    ("wire.stall_timeout_s=1e300", "wire.stall_timeout_s: expected float <= 2592000.0"),
    ("weights.timeout_s=0", "weights.timeout_s: expected float > 0"),
    ("launcher.drain_timeout_s=1e10", "launcher.drain_timeout_s: expected float <= 2592000.0"),
    ("rollout.reward_timeout_s=-1", "rollout.reward_timeout_s: expected float > 0"),
    ("rollout.episode.timeout_s=.inf", "rollout.episode.timeout_s: expected a finite number"),
    ("learner.collective_timeout_s=1e9", "learner.collective_timeout_s: expected float <= 2592000.0"),
    ("launcher.slurm.warn_before_s=100000000", "launcher.slurm.warn_before_s: expected int <= 2592000"),
    # names and paths
    (f"run.name={'a' * 300}", "run.name: expected a name for a folder, of at most 64 letters"),
    ("run.name=../x", "run.name: expected a name for a folder"),
    ("run.name=a/b", "run.name: expected a name for a folder"),
    ("run.name=.hidden", "run.name: expected a name for a folder"),
    ("run.name=-x", "run.name: expected a name for a folder"),
    ("run.name=''", "run.name: expected a name for a folder"),
    ("run.name='a b'", "run.name: expected a name for a folder"),
    ('run.name="a\\nb"', "run.name: expected a name for a folder"),
    ('run.name="a\\e[1m"', "expected no control characters in a text"),
    (f"run.folder={'a' * 300}", "run.folder: expected a path of at most 1024 bytes, and 255 for each part"),
    (f"run.folder={'a/' * 600}", "run.folder: expected a path of at most 1024 bytes"),
    ("run.folder=/proc/x", "run.folder: /proc/x cannot be written"),
    ("run.folder=/dev/null/x", "run.folder: /dev/null/x cannot be written: Not a directory; choose another"),
    ("run.folder=''", "run.folder: expected a path of visible characters"),
    ('run.folder="a\\nb"', "run.folder: expected a path of visible characters"),
    (f"model.path={'a' * 300}", "model.path: expected a path of at most"),
    ("model.path=/nowhere/model", "model.path: /nowhere/model: no such folder"),
    ("model.path=/etc", "model.path: /etc: config.json cannot be read"),
    ("model.path=/etc/passwd", "model.path: /etc/passwd: config.json cannot be read"),
    (f"model.reference.path={'a' * 300}", "model.reference.path: expected a path of at most"),
    ("model.reference.path=/nowhere", "model.reference.path: /nowhere: no such folder"),
    ("run.entry=/nowhere/mine.py", "run.entry: /nowhere/mine.py cannot be imported"),
    ("run.entry=no_such_module", "run.entry: no_such_module cannot be imported"),
    (f"run.entry={'a' * 300}.py", "run.entry: "),
    # hosts, ports and URLs
    ("wire.host=no host", "wire.host: expected a host name or an address such as 127.0.0.1, got 'no host'"),
    ("wire.host=tcp://a", "wire.host: expected a host name or an address"),
    ("wire.host=300.1.1.1", "wire.host: expected a host name or an address"),
    ("wire.host=''", "wire.host: expected a host name or an address"),
    ("wire.host=a..b", "wire.host: expected a host name or an address"),
    ("wire.host=-a", "wire.host: expected a host name or an address"),
    (f"wire.host={'a' * 64}", "wire.host: expected a host name or an address"),
    ("telemetry.metrics_host='*'", "telemetry.metrics_host: expected a host name or an address"),
    ("wire.host=203.0.113.7", "wire.host: 203.0.113.7 is no address of this host"),
    ("wire.host=nosuchhost.invalid", "wire.host: nosuchhost.invalid is a name without an IPv4 address here"),
    ("telemetry.metrics_host=203.0.113.7", "telemetry.metrics_host: 203.0.113.7 is no address of this host"),
    ("telemetry.metrics_host=nosuchhost.invalid", "telemetry.metrics_host: nosuchhost.invalid is no address of this"),
    ("wire.port=65536", "wire.port: expected int <= 65535"),
    (
        "checkpoint.keep_every_n_steps=7",
        "checkpoint.keep_every_n_steps: expected a multiple of checkpoint.every_n_steps",
    ),
    ("telemetry.trackers=[swanlab]", "telemetry.trackers.0: expected one of tensorboard, wandb, mlflow, trackio"),
    ("telemetry.metrics_port=65535", "telemetry.metrics_port: expected at most 65534"),
    ("rollout.engine=sglang & rollout.sglang.urls=['http://[::1']", "rollout.sglang.urls: expected http://HOST:PORT"),
    (
        "rollout={engine: sglang, num_workers: 1, sglang: {urls: ['http://127.0.0.1:1']}} & "
        "learner.lora={publish: adapters}",
        "learner.lora.publish: expected auto or merged with running servers (urls), got adapters",
    ),
    ("rollout.engine=sglang & rollout.sglang.urls=[http://a:99999]", "rollout.sglang.urls: expected http://HOST:PORT"),
    ("rollout.engine=sglang & rollout.sglang.urls=[ftp://a]", "rollout.sglang.urls: expected http://HOST:PORT"),
    ("rollout.engine=sglang & rollout.sglang.urls=['http://']", "rollout.sglang.urls: expected http://HOST:PORT"),
    *(
        (
            f"rollout={{engine: sglang, num_workers: 2, sglang: {{urls: ['http://{host}:80', '{second}']}}}}",
            f"rollout.sglang.urls: expected different servers, got http://{host}:80 and {second}, the same server",
        )
        for host, second in [
            ("127.0.0.1", "http://127.0.0.1:80"),
            ("127.0.0.1", "http://127.0.0.1:80/"),
            ("127.0.0.1", "HTTP://LOCALHOST"),
            ("localhost", "http://[::1]"),
        ]
    ),
    (
        "rollout.engine=sglang & rollout.sglang.urls=['http://user:hunter2@a']",
        "rollout.sglang.urls: expected a URL without a name and a password, got 'http://***@a'; leave them out, and na",
    ),
    ("rollout.engine=sglang & rollout.sglang.urls='http://user:hunter2@a'", "the value is 'http://***@a'"),
    ("rollout.engine=sglang & rollout.sglang.urls=['http://u:hunter2@a:99999']", "got 'http://***@a:99999'"),
    ("rollout.engine=vllm & rollout.vllm.urls=['http://a?t=1']", "rollout.vllm.urls: expected a URL without a query"),
    ("rollout.engine=vllm & rollout.vllm.urls=['http://a#f']", "rollout.vllm.urls: expected a URL without a fragment"),
    (
        "data.train.rewards=[{url: 'http://user:hunter2@a/score'}]",
        "data.train.rewards.0.url: expected a URL without a name and a password, got 'http://***@a/score'",
    ),
    ("data.train.rewards=[{url: nowhere}]", "data.train.rewards.0.url: expected http://HOST:PORT"),
    ("data.train.rewards=[{url: 'http://a b'}]", "data.train.rewards.0.url: expected http://HOST:PORT"),
    # devices
    ("learner.device=tpu", "learner.device: expected one of auto, cpu, cuda; the value is 'tpu'"),
    ("rollout.device=cuda:1", "rollout.device: expected one of auto, cpu, cuda"),
    ("learner.device=cuda", "device=cuda needs one GPU of 8 GB or more"),
    ("rollout.device=cuda", "device=cuda needs one GPU of 8 GB or more"),
    ("learner.kernels=liger", "learner.kernels: expected torch on a CPU, got liger, whose kernels need a GPU"),
    ("data.train.rewards=[{model: a/b, device: tpu}]", "data.train.rewards.0.device: expected auto, cpu, cuda"),
    # counts
    ("learner.num_ranks=1000", "learner.num_ranks: expected at most"),
    ("rollout.num_workers=1000", "rollout.num_workers: expected at most"),
    ("rollout.num_workers=1000000", "rollout.num_workers: expected int <= 1024"),
    ("rollout.num_workers=-1", "rollout.num_workers: expected auto, or a number from 1; the value is -1"),
    ("rollout.num_workers=two", "rollout.num_workers: expected auto, or a number from 1; the value is 'two'"),
    ("rollout.num_reward_workers=4000", "rollout.num_reward_workers: expected at most"),
    ("rollout.num_slots=1000000000", "rollout.num_slots: expected int <= "),
    ("rollout.num_slots=65537", "rollout.num_slots: expected int <= 65536"),
    ("rollout.lease_ahead_samples=65537", "rollout.lease_ahead_samples: expected int <= 65536"),
    ("rollout.num_async_rewards=1000000000", "rollout.num_async_rewards: expected int <= "),
    ("rollout.num_threads=100000", "rollout.num_threads: expected int <= 4096"),
    ("rollout.num_threads=4096", "rollout.num_threads: expected at most"),
    ("learner.num_threads=4096", "learner.num_threads: expected at most"),
    ("learner.num_replicas=3", "learner.num_replicas: expected a divisor of learner.num_ranks=1"),
    (
        "learner.optimizer={warmup_steps: 10, warmup_share: 0.1}",
        "learner.optimizer.warmup_share: expected 0 with warmup_steps=10, got 0.1; leave one of the two out",
    ),
    ("learner={num_minibatches: 1, target_kl: 0.1}", "learner.target_kl: expected null with a single optimizer step"),
    (
        "launcher.memory_per_gpu=24",
        "launcher.memory_per_gpu: expected bytes, at least 1048576, or 0 for all",
    ),
    ("launcher.memory_per_host=64000", "launcher.memory_per_host: expected bytes, at least 1048576"),
    ("launcher.num_hosts=100000", "launcher.num_hosts: expected int <= 1024"),
    ("launcher.gpus_per_host=1000000000", "launcher.gpus_per_host: expected int <= 4096"),
    ("launcher.slurm.num_seeds=1000000", "launcher.slurm.num_seeds: expected int <= 4096"),
    ("algorithm.group_size=0", "algorithm.group_size: expected int >= 1"),
    ("algorithm.group_size=1000000000", "algorithm.group_size: expected int <= "),
    ("learner.groups_per_step=1000000000", "learner.groups_per_step: expected int <= "),
    ("model.tiny.hidden_size=1000000000", "model.tiny.hidden_size: expected int <= "),
    ("model.tiny.num_layers=1000000", "model.tiny.num_layers: expected int <= "),
    ("model.tiny.num_heads=5", "model.tiny: expected hidden_size divisible by num_heads"),
    ("model.tiny.hidden_size=42", "model.tiny: expected an even hidden_size / num_heads, because rotary positions"),
    ("model.tiny.hidden_size=6 & model.tiny.num_heads=6 & model.tiny.num_kv_heads=6", "got 6 / 6 = 1"),
    # messages and tokens
    ("wire.max_message_bytes=1", "wire.max_message_bytes: expected int >= 1048576"),
    (
        "wire.max_message_bytes=2000000 & data.max_prompt_tokens=100000 & learner.microbatch_tokens=200000",
        "wire.max_message_bytes: expected at least 3050496, for the longest sample",
    ),
    ("data.train.rewards=null", "data.train.rewards: expected a list, got null; an empty value is null"),
    ("data.max_prompt_tokens=100000000", "data.max_prompt_tokens: expected int <= "),
    ("rollout.sampling.temperature=1e-40", "rollout.sampling.temperature: expected float >= 1e-06"),
    ("rollout.sampling.max_new_tokens=100000000", "rollout.sampling.max_new_tokens: expected int <= "),
    ("learner.microbatch_tokens=10", "learner.microbatch_tokens: expected at least"),
    ("weights.bucket_bytes=1", "weights.bucket_bytes: expected int >= 65536"),
    # data and the user's code
    ("data.train.task=os:system", "data.train.task: expected os:system to be a subclass of areal_rloo.tasks.Task, got"),
    (
        "data.train.task=builtins:int",
        "data.train.task: expected builtins:int to be a subclass of areal_rloo.tasks.Task",
    ),
    ("data.train.task=arithmetik", "data.train.task: unknown task 'arithmetik'; did you mean 'arithmetic'?"),
    ("data.train.task=no.py:Task", "data.train.task: no.py cannot be imported"),
    ("data.train.path=x.jsonl", "data.train.path: the task arithmetic generates its items"),
    (
        "data.train={task: gsm8k, path: no.jsonl} & data.eval={task: gsm8k}",
        "data.train.path: no.jsonl: no such file, seen from /",
    ),
    (f"data.train={{task: gsm8k, path: {'a' * 300}}}", "data.train.path: expected a path of at most"),
    ("data.train={task: gsm8k, path: /}", "data.train.path: /: expected a file, got a folder"),
    ("data.train=[]", "data.train: expected at least one source"),
    ("data.train=[{task: math}, {task: math}]", "data.train.1.name: two sources are called 'math'"),
    ("data.train.rewards=[{}]", "data.train.rewards.0: expected exactly one of task, function, url, model"),
    ("data.train.rewards=[{function: no}]", "data.train.rewards.0.function: expected module:function"),
    ("data.train.rewards=[{function: 'no.py:f'}]", "data.train.rewards.0.function: no.py cannot be imported"),
    ("data.train.rewards=[{model: /nowhere}]", "data.train.rewards.0.model: /nowhere: no such folder"),
    ("data.train.parameters.x=1", "data.train.parameters.x: the task has no such parameter"),
    ("data.train.weight=0", "data.train.weight: expected float > 0"),
    ("data.train.few_shot={num: 0}", "data.train.few_shot.num: expected int >= 1"),
    ("data.train.name=''", "data.train.name: expected str of length >= 1"),
    ("data.eval.temperature=1e-40", "data.eval.temperature: expected 0 (greedy) or at least 1e-06, got 1e-40"),
    ("data.eval.num_samples=2", "data.eval.temperature: expected a temperature above 0"),
    ("data.curriculum=no.py:f", "data.curriculum: no.py cannot be imported"),
    ("data.curriculum=os:f & data.num_epochs=1", "data.num_epochs: expected null with data.curriculum=os:f, got 1"),
    (
        "algorithm.loss.kind=pppo",
        "algorithm.loss.kind: expected one of ppo, cispo, reinforce, or file.py:",
    ),
    (
        "algorithm.loss.kind=os:f & algorithm.loss.ratio_level=sequence_mean",
        "algorithm.loss.ratio_level: expected token with kind=os:f, got sequence_mean",
    ),
    (
        "algorithm.preset=reinforce_plus_plus & algorithm.advantages=os:f",
        "algorithm.returns: expected trajectory with algorithm.advantages=os:f, got token",
    ),
    ("algorithm.group_filter=os:nothing", "algorithm.group_filter: os has no function 'nothing'"),
    ("rollout.episode.type=os:system", "rollout.episode.type: expected a class with an async method run()"),
    ("rollout.episode.type=agent & rollout.episode.agent=no:f", "rollout.episode.agent: no cannot be imported"),
    (
        "data.overlong_prompts=truncate",
        "data.overlong_prompts: expected one of error, filter, truncate_left, truncate_r",
    ),
    ("data.chat_template=no.jinja", "data.chat_template: no.jinja: cannot be read: [Errno 2] No such file"),
    ("data.chat_template=5", "data.chat_template: expected bool or str or null, got int; the value is 5"),
    ("data.train.temperature=0.7", "unknown key 'data.train.temperature'; a source has only max_new_tokens of its own"),
    ("data.train=[{sampling: {}}]", "unknown key 'data.train.0.sampling'; a source has only max_new_tokens of its own"),
    (
        "data.train.episode={type: agent}",
        "data.train.episode.type: expected one of single_turn, multi_turn, tool_use, ",
    ),
    ("data.train.episode={tools: [python]}", "data.train.episode.tools: nothing reads it with type=single_turn; leave"),
    ("data.train.episode={timeout_s: 3}", "unknown key 'data.train.episode.timeout_s'"),
    ("data.train.max_new_tokens=4096", "data.train.max_new_tokens: expected at most rollout.sampling.max_new_tokens="),
    (
        "data.train.max_new_tokens=9 & evaluation.max_new_tokens=8 & data.eval.max_new_tokens=9",
        "data.eval.max_new_tokens: expected at most evaluation.max_new_tokens=8, got 9",
    ),
    (
        "data.train.max_new_tokens=9 & algorithm.rewards.overlong_tokens=4",
        "algorithm.rewards.overlong_tokens: expected 0 with data.train.max_new_tokens=9, got 4",
    ),
    (
        "rollout.sampling={min_new_tokens: 5, allow_truncated: true, max_new_tokens: 64} & data.train.max_new_tokens=4",
        "data.train.max_new_tokens: expected at least rollout.sampling.min_new_tokens=5, got 4",
    ),
    (
        "data.train.episode={type: multi_turn} & data.eval.episode=null",
        "data.eval.episode: expected the episode of the source of data.train with the same name 'arithmetic', got",
    ),
    (
        "rollout.episode={type: tool_use, tools: [calculator, search]}",
        "rollout.episode.tools.1: expected calculator, python or your function, as module:function or file.py:function"
        ", got 'search'; for example rollout.episode.tools=[calculator, my_tools.py:search]",
    ),
    ("rollout.episode={type: tool_use, tools: ['no.py:f']}", "rollout.episode.tools: no.py cannot be imported"),
    ("rollout.episode={type: tool_use, tools: ['a:f', 'b:f']}", "rollout.episode.tools: expected different tools"),
    ("data.train.episode={type: tool_use, tools: ['os:system']}", "data.train.episode.tools: os:system: expected"),
    # keys
    ("learner.lr=1e-5", "unknown key 'learner.lr'; did you mean 'learner.optimizer.learning_rate'?"),
    ("data.eval=[]", "data.eval: expected at least one source, got an empty list; leave the key out, or null"),
    ("algorithm.group_sise=4", "unknown key 'algorithm.group_sise'; did you mean 'algorithm.group_size'?"),
    ("zzz=4", "unknown key 'zzz'; expected one of run, model"),
    (f"{'a' * 101}=4", "expected at most 16 names of at most 100 characters before the '='"),
    (f"{'a.' * 20}b=4", "expected at most 16 names"),
    (
        "learner.num_train_steps=5 & learner={groups_per_step: 4}",
        "override 'learner={groups_per_step: 4}': expected a section before the keys inside it, got "
        "'learner.num_train_steps=5' before; change the order",
    ),
    (
        "rollout.episode.tools+=calculator & rollout.episode.tools=[python]",
        "override 'rollout.episode.tools=[python]': expected each key once, got 'rollout.episode.tools+=calculator'",
    ),
    ("run.seed=4 & --run.seed=4", "override '--run.seed=4': expected each key once, got 'run.seed=4' too; leave one"),
    ("run..seed=4", "override 'run..seed=4': expected key.path=value"),
    ("run.seed.deep=4", "'run.seed' is a value, not a section"),
    ("data.train=[{}] & data.train.7.task=math", "'data.train.7': expected an index from 0 to 0"),
    (
        "rollout={engine: vllm, share_devices: in_turns, vllm: {arguments: {enable-sleep-mode: false}}}",
        "rollout.vllm.arguments.enable-sleep-mode: not an option here: rollout.share_devices=in_turns needs the sleep",
    ),
    (
        "rollout={engine: vllm, share_devices: in_turns, vllm: {arguments: {no_enable_sleep_mode: true}}}",
        "rollout.vllm.arguments.no_enable_sleep_mode: not an option here: rollout.share_devices=in_turns needs",
    ),
    ("learner.num_ranks=0", "learner.num_ranks: expected auto, or a number from 1; the value is 0"),
    (
        "rollout.sampling.max_new_tokens=100000",
        "quickstart.yaml:32 with override 'rollout.sampling.max_new_tokens=100000': learner.microbatch_tokens: expe",
    ),
    ("launcher.slurm.arguments={a b: 1}", "launcher.slurm.arguments: expected names of options of sbatch"),
    ("launcher.slurm.time_limit=soon", "launcher.slurm.time_limit: expected minutes"),
]

FILES = [
    ("run:\n  seed: 1\n  seed: 2\n", "my.yaml:3: the key 'run.seed' is given twice, in line 2 too"),
    ("run: {}\nwire: {}\nrun: {}\n", "my.yaml:3: the key 'run' is given twice, in line 1 too"),
    ("run:\n  seed: 2024-13-45\n", "my.yaml:2: run.seed: expected int, got str"),
    ("run: {seed: [\n", "my.yaml:1: not valid YAML: expected the node content, but found '<stream end>'"),
    ("run:\n  seed: [1, 2\n", "my.yaml:2: not valid YAML: expected ',' or ']', but got '<stream end>', while parsing"),
    ("run:\n  seed: [1,\n  2\n", "my.yaml:2: not valid YAML: expected ',' or ']', but got '<stream end>', while"),
    ("run:\n  seed: [1,\n\n\n", "my.yaml:2: not valid YAML: expected the node content, but found '<stream end>'"),
    ("run:\n  seed: [1\n  name: x\n", "but got ':', while parsing a flow sequence that begins in line 2"),
    ("run:\n  name: 'abc\n  seed: 1\n", "my.yaml:2: not valid YAML: found unexpected end of stream, while scanning a"),
    ("run:\n  seed:1\n  name: x\n", "my.yaml:3: not valid YAML: mapping values are not allowed here; the line before"),
    ("run:\n  name: a: b\n", "my.yaml:2: not valid YAML: mapping values are not allowed here"),
    ("run:\n  name: @x\n", "my.yaml:2: not valid YAML: found character '@'"),
    ("run:\n  name: a\x07b\n", "my.yaml:2: not valid YAML: the character '\\x07' is not allowed"),
    ("run:\n\tseed: 1\n", "my.yaml:2: not valid YAML: found character '\\t'"),
    ("- run\n", "expected a mapping of sections, got list"),
    ("just words\n", "expected a mapping of sections"),
    ("run: {}\n---\nrun: {}\n", "my.yaml:2: expected a single document"),
    ("a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *c]\n", "my.yaml:3: the alias '*c' names no anchor"),
    ("run: !!python/name:os.system ''\n", "my.yaml:1: expected no tag"),
    ("run: &r {seed: 1}\nwire:\n  <<: *r\n", "my.yaml:3: the merge key '<<' is not read here"),
    ("run:\n" + "  - " * 100 + "1\n", "my.yaml:2: expected at most 32 levels"),
    ("run: [" + "1," * 20_000 + "]\n", "my.yaml:1: expected at most 10000 values"),
    ("run: {name: '" + "a" * 200_000 + "'}\n", "my.yaml:1: expected at most 100000 characters of text"),
    ("#" * 600_000, "expected a config of at most 524288 bytes"),
    ("wire:\n  host: a b\n", "my.yaml:2: wire.host: expected a host name or an address"),
    ("learner:\n  num_ranks: 0x10\n", "my.yaml:2: learner.num_ranks: expected auto, or a number from 1"),
    ("? [1]\n: 2\n", "my.yaml:1: expected a plain name as the key of a value"),
]
