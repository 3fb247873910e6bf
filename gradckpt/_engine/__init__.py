"""The Python part of the engine: functions that C calls, and code that needs torch's Python API."""
