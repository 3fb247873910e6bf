"""What a handle of gradckpt.enable says of all its modules."""


def config_of(handle):
    """The CompressionConfig, or None, that all modules have."""
    (config,) = {settings["compress"] for settings in handle.modules.values()}
    return config
