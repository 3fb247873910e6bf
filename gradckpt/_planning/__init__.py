"""What a training step needs, computed before it runs: :func:`gradckpt.plan`.

* The simulated step, which has no values: ``simulation`` (the mode under which operators
  run), ``simulated_tensors``, ``kernels``, ``step_trace`` (one step), ``segments`` (its memory),
  ``fsdp``.
* Profile, what regions cost: ``options``, ``devices``, ``device_memory``, ``plan_files`` and
  ``step_profile``, of which ``profile`` (a live model) and ``config_profile`` are made. What a
  config describes: ``model_and_batch``, ``config_model``, ``libraries``.
* Choice: ``chain`` and ``choose``, around the planner in C.
* Report: ``comparison`` of ready settings, ``region_plan`` within a budget, and their words,
  ``report``. They are asked for by ``plan``, ``live_budget`` (while a model trains), ``command``.
"""
