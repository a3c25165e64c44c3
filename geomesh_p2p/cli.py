"""The command `geomesh`: verbs, configuration, exit codes. Imports nothing heavy until a verb runs."""
