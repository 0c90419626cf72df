"""SGLang takes one function from vLLM where it runs on a CPU."""
