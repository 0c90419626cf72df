"""Imported by the rotary layer; the models that its tests serve never call it."""


def rotary_embedding(*_: object) -> None:
    """Stands for vLLM's kernel.

    Raises:
        NotImplementedError: always; this model needs SGLang on a GPU.
    """
    raise NotImplementedError("this model's rotary embedding needs vLLM's kernels: serve it with SGLang on a GPU")
