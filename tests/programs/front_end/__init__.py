"""A front end as Axolotl and LLaMA-Factory are: its users write a YAML file and no Python."""
