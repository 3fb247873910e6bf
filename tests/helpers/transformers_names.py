"""How transformers names checkpointing: in 5.23 and later "activation", before "gradient"."""

import transformers

NEW = hasattr(transformers.PreTrainedModel, "activation_checkpointing_enable")
NAME = "activation_checkpointing" if NEW else "gradient_checkpointing"


def turn_on(model, *given, **named):
    """``given``: the dict of the call; ``named``: keywords of transformers."""
    getattr(model, f"{NAME}_enable")(*given, **named)


def turn_off(model):
    getattr(model, f"{NAME}_disable")()


def is_on(model):
    return getattr(model, f"is_{NAME}")


def flag(kwargs=None):
    """The arguments of a Trainer."""
    return {NAME: True, f"{NAME}_kwargs": kwargs}
