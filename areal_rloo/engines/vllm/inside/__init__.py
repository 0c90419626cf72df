"""The code that runs in vLLM's own processes, with vLLM's Python and nothing of this package: `areal_rloo_vllm`.

A server finds the module because PYTHONPATH names this folder (`command.environment`).
"""
