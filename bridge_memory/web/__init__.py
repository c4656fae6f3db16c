"""The web page of ``bridge-memory serve``, and the JSON API behind it.

It uses the standard library's ``http.server``: enough for one person's page on their own machine, and available
wherever the package is, in a training container too, without further packages.

``serve`` (the command) -> ``server`` (HTTP, access checks) -> ``api`` (questions, answers) -> ``options`` (questions as
RunSpecs), ``fixes`` (refusals with changes to click), ``jobs`` and ``worker`` (long computations in separate
processes).
"""
