"""The launcher: `spec.JobSpec` is checked, `plan.plan` makes processes of it, `run.run` runs them.

Standard library only. This module stays empty because every rank imports it.
"""
